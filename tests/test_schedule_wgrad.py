"""Weight gradients that are nodes of a schedule, and fused ones under it: the table of spec A, own
orders, releases before W, what arrives in which node, failures."""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import schedule_support as support
import torch
from schedule_support import Case, Groups, unequal
from test_schedule_parity import own_order
from test_wgrad_sharded_fused import Seen, seen_in, storages
from torch import Tensor, nn
from wgrad_table import (
    FLAT,
    FUSED_TOLERANCE,
    cells_of,
    error_of_gradients,
    on_standard_path,
    under_schedule,
    worst_of_ranks,
)

from ep_overlap.plan.action import Compute, LayerKind, Node, Phase
from ep_overlap.plan.build import build_plan
from ep_overlap.plan.order import ModelShape, OrderName, computes_of
from ep_overlap.schedule import OverlapSchedule
from ep_overlap.testing import RankPool, assert_order
from fsdp_hooks.lifecycle import UnitState
from fsdp_hooks.placement import STRATEGIES
from fsdp_hooks.precision import MixedPrecision
from fsdp_hooks.streams import StreamKind
from fsdp_hooks.wgrad import Destination, GradSink, ManagedLayer
from fsdp_hooks.wgrad_layers import delayed_wgrad

INLINE, THREAD = StreamKind.INLINE, StreamKind.THREAD
RELEASED = "optim_grads_params"

# ---- the table -----------------------------------------------------------------------------------


def wrong_cells(
    pool: RankPool, num_ranks: int, strategies: Sequence[str], *, megatron: bool = False
) -> list[str]:
    (layout,) = [layout for layout in FLAT if layout.num_ranks == num_ranks]
    by_rank = pool.run(cells_of, layout, megatron, strategies, timeout_s=120.0)
    cells = worst_of_ranks(by_rank)
    assert len(cells) == 5 * len(strategies)
    return [str(cell) for cell in cells if not cell.is_right]


def test_the_table_holds_on_two_ranks(ranks2: RankPool) -> None:
    assert wrong_cells(ranks2, 2, list(STRATEGIES)) == []


def test_the_table_holds_for_megatrons_model(ranks2: RankPool) -> None:
    assert wrong_cells(ranks2, 2, [RELEASED], megatron=True) == []


def test_the_table_holds_on_four_ranks(ranks4: RankPool) -> None:
    assert wrong_cells(ranks4, 4, [RELEASED]) == []


# ---- more ways to run it -------------------------------------------------------------------------


def late_wgrads(layers: int, microbatches: int, order: OrderName = OrderName.PAIRED) -> str:
    """An order whose W nodes come all at once, behind their microbatch's backward, backwards."""
    shape = ModelShape(layers=(LayerKind.MOE,) * layers)
    plan = build_plan(shape=shape, num_microbatches=microbatches, order=order, delay_wgrad=True)
    nodes = computes_of(plan.actions)
    late: list[Compute] = []
    for node in nodes:
        if node.phase is not Phase.WGRAD:
            late.append(node)
        if node.phase is Phase.BACKWARD and node.node is Node.PRE:
            own = [w for w in nodes if (w.phase, w.microbatch) == (Phase.WGRAD, node.microbatch)]
            late += reversed(own)
    assert len(late) == len(nodes)
    return " ".join(map(str, late))


def shared_wgrads_last() -> str:
    """An order whose W nodes come behind all others, the second microbatch's first; and within the
    first microbatch the shared experts' W first: what ran before it is of the other microbatch."""
    shape = ModelShape(layers=(LayerKind.MOE_SHARED,) * 2)
    nodes = computes_of(build_plan(shape=shape, num_microbatches=2, delay_wgrad=True).actions)
    wgrads = [node for node in nodes if node.phase is Phase.WGRAD]
    wgrads.sort(key=lambda node: (-node.microbatch, node.node is not Node.SHARED))
    return " ".join(map(str, [*(n for n in nodes if n.phase is not Phase.WGRAD), *wgrads]))


BF16 = MixedPrecision(param_dtype=torch.bfloat16)
BOTH: dict[str, Any] = {"delay": True, "fuse": True}
MORE_ON_TWO = [
    Case(order="serial", layers=3, freq=2, ep=2, delay=True),
    Case(order="serial", layers=2, ep=2, dispatch_over=True),
    Case(strategy=RELEASED, order="serial", layers=3, freq=2, ep=2, dispatch_over=True, fuse=True),
    Case(strategy="optim", order="plain", layers=2, microbatches=3, ep=2, dispatch_over=True),
    Case(strategy=RELEASED, layers=3, microbatches=3, ep=2, dispatch_over=True, **BOTH),
    Case(strategy=RELEASED, layers=5, microbatches=4, ep=2, freq=2, budget=2, **BOTH),
    Case(strategy=RELEASED, layers=2, microbatches=3, ep=2, reduce_each=False, **BOTH),
    Case(strategy="no_shard", layers=2, microbatches=3, ep=2, reduce_each=True, **BOTH),
    Case(strategy=RELEASED, order_text=late_wgrads(3, 3), layers=3, microbatches=3, delay=True),
    Case(strategy="no_shard", order_text=late_wgrads(2, 3), microbatches=3, ep=2, **BOTH),
    Case(strategy="no_shard", tied=True, microbatches=3, ep=2, fuse=True),
    Case(strategy="no_shard", tied=True, microbatches=3, ep=2, delay=True),
    Case(strategy="optim", tied=True, order="plain", microbatches=3, ep=2, **BOTH),
    Case(strategy="optim_grads", tied=True, microbatches=3, ep=2, fuse=True),
    Case(strategy=RELEASED, tied=True, microbatches=3, ep=2, **BOTH),
    Case(strategy=RELEASED, microbatches=3, ep=2, mp=BF16, **BOTH),
    Case(strategy="no_shard", microbatches=3, ep=2, mp=BF16, **BOTH),
]
HYBRID = [
    Case(strategy=RELEASED, hybrid="optim", microbatches=3, ep=2, **BOTH),
    Case(strategy="optim_grads", hybrid="no_shard", microbatches=3, ep=2, fuse=True),
    Case(strategy="optim", hybrid="optim", microbatches=3, ep=2, reduce_each=True, **BOTH),
    Case(strategy="no_shard", hybrid="no_shard", microbatches=2, ep=2, **BOTH),
]
MEGATRON = [
    Case(megatron=True, shared=True, strategy=RELEASED, order="plain", dispatch_over=True, ep=2),
    Case(megatron=True, shared=True, strategy="optim", order="serial", freq=2, ep=2, **BOTH),
    Case(
        megatron=True, shared=True, strategy=RELEASED, order_text=shared_wgrads_last(), delay=True
    ),
]


def every_difference(cases: Sequence[Case]) -> dict[str, list[str]]:
    """From the standard path with the same fusion, and no delay; and of that from no fusion."""
    groups = Groups()
    found: dict[str, list[str]] = {}
    with ExitStack() as stack:
        if any(case.megatron for case in cases):
            from ep_overlap.models.megatron_cpu import megatron_on_cpu

            stack.enter_context(megatron_on_cpu())
        for index, case in enumerate(cases):
            expected = on_standard_path(replace(case, delay=False), groups)
            names = unequal(under_schedule(case, groups), expected)
            if case.fuse and (case.tied or case.hybrid):  # the table has the others
                plain = on_standard_path(replace(case, delay=False, fuse=False), groups)
                error = error_of_gradients(expected, plain)
                names += [f"{error} from unfused"] * (error > FUSED_TOLERANCE[case.dtype])
            if names:
                found[f"{index}: {case}"] = names
    return found


def test_orders_of_wgrad_nodes_change_no_bit_on_two_ranks(ranks2: RankPool) -> None:
    assert ranks2.run(every_difference, MORE_ON_TWO) == [{}, {}]


def test_wgrad_nodes_of_hybrid_meshes_change_no_bit(ranks4: RankPool) -> None:
    assert ranks4.run(every_difference, HYBRID) == [{}] * 4


def test_wgrad_nodes_of_megatrons_model_change_no_bit(ranks2: RankPool) -> None:
    assert ranks2.run(every_difference, MEGATRON) == [{}, {}]


def test_an_own_order_without_wgrad_nodes_is_refused_if_they_are_asked_for() -> None:
    text = own_order(2, 2)
    for case in (Case(order_text=text, delay=True), Case(order_text=text, dispatch_over=True)):
        with pytest.raises(ValueError, match=r"the order has no W nodes, such as 0W\.mlp\.L0"):
            OverlapSchedule(support.build(case), case.config)


def refusals_within_delayed_wgrad() -> list[str]:
    """The messages; or what is wrong with the step afterwards."""
    groups, found = Groups(), list[str]()
    for strategy, delay in ((RELEASED, False), (RELEASED, True), (None, True)):
        case = Case(strategy=strategy, ep=2, delay=delay)
        parts, other = support.build(case, groups), support.build(case, groups)
        schedule, loss_fn = OverlapSchedule(parts, case.config), support.loss_of(case)
        inputs = support.batches(parts, case, 0)
        with delayed_wgrad(parts.module):
            try:
                schedule.step(inputs, loss_fn)
            except RuntimeError as error:
                found.append(str(error))
        schedule.step(inputs, loss_fn)
        support.standard_step(other, inputs, loss_fn)
        found += unequal(support.gradients(parts), support.gradients(other))
    return found


def test_a_step_within_delayed_wgrad_is_refused_and_harms_nothing(ranks2: RankPool) -> None:
    for messages in ranks2.run(refusals_within_delayed_wgrad):
        assert len(messages) == 3
        assert all(message.startswith("step() within delayed_wgrad") for message in messages)


# ---- released before W ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Released:
    """One rank's step."""

    issued: list[str]
    states: dict[str, UnitState]
    """Of the unit, when each W node ran."""


def states_at_wgrads(case: Case) -> Released:
    parts = support.build(case)
    schedule = OverlapSchedule(parts, case.config, stream_kind=INLINE)
    states: dict[str, UnitState] = {}

    def note(word: str, unit: Any) -> None:
        states[word] = unit._stream_state

    for (microbatch, node, layer), wgrad in schedule._wgrads.items():
        word = str(Compute(microbatch, Phase.WGRAD, node, layer))
        wgrad.pre_hooks += (partial(note, word, schedule._units[f"L{layer}"]),)
    trace = schedule.step(support.batches(parts, case, 0), support.loss_of(case)).trace
    assert trace is not None
    issued = support.actions_among([word for _, word in trace.issued])
    return Released(issued=issued, states=states)


def test_units_are_released_before_their_weight_gradients_are_made(ranks2: RankPool) -> None:
    # The numbers are right: the table, and the cases above.
    case = Case(strategy=RELEASED, order="serial", layers=3, budget=2, kind=INLINE, **BOTH)
    for step in ranks2.run(states_at_wgrads, case):
        released_first = ["1B.attn.L2", "RESHARD.L2", "UNSHARD.L0", "1W.attn.L2", "REDUCE.L2"]
        assert_order(step.issued, *released_first, contiguous=True)
        assert len(step.states) == 2 * 2 * 3
        released = {word for word, state in step.states.items() if state is UnitState.SHARDED}
        # The others stay for the next forward, which reads L0 and L1 first.
        assert released == {"0W.attn.L2", "1W.attn.L2", "1W.attn.L1", "1W.attn.L0"}
    late = replace(case, order=None, order_text=late_wgrads(3, 2, OrderName.SERIAL))
    for step in ranks2.run(states_at_wgrads, late):
        assert_order(step.issued, "RESHARD.L0", "1B.pre", "1W.attn.L0", "1W.mlp.L0", "REDUCE.L0")
        assert {state for word, state in step.states.items() if word[0] == "1"} == {
            UnitState.SHARDED
        }


# ---- dispatch's backward over the experts' W -----------------------------------------------------


def test_without_overlap_the_backward_of_dispatch_comes_before_the_experts_wgrad() -> None:
    case = Case(order="serial", layers=2, kind=INLINE, dispatch_over=True)
    parts = support.build(case)
    trace = (
        OverlapSchedule(parts, case.config, stream_kind=INLINE)
        .step(support.batches(parts, case, 0), support.loss_of(case))
        .trace
    )
    assert trace is not None
    issued = support.actions_among([word for _, word in trace.issued])
    backward = ["0B.mlp.L1", "0B.dispatch.L1", "0W.mlp.L1", "0B.attn.L1", "0B.combine.L0"]
    assert_order(issued, *backward, contiguous=True)
    wgrads = {word for word in issued if "W." in word}
    assert wgrads == {f"{k}W.mlp.L{layer}" for k in range(2) for layer in range(2)}
    beside_delay = OverlapSchedule(parts, replace(case, delay=True).config, stream_kind=INLINE)
    words = [str(action) for action in beside_delay.plan.actions]
    assert_order(words, *backward[:4], "0W.attn.L1", "0B.combine.L0", contiguous=True)


def met_within_a_step(order: str) -> list[str]:
    """Both sides wait until the other is there, too: only if they run at one time is it over."""
    case = Case(order=order, layers=2, microbatches=2, ep=2, dispatch_over=True)
    parts, barrier, met = support.build(case), threading.Barrier(2), list[str]()

    def meet(word: str) -> None:
        barrier.wait(timeout=20.0)
        met.append(word)

    def in_backward(node: str) -> None:
        if node.startswith("dispatch"):
            meet(node)

    support.tap(parts, lambda node, result: None, in_backward)
    schedule = OverlapSchedule(parts, case.config, stream_kind=THREAD)
    for (_, node, layer), wgrad in schedule._wgrads.items():
        wgrad.pre_hooks += (partial(meet, f"{node}.L{layer}"),)
    schedule.step(support.batches(parts, case, 0), support.loss_of(case))
    return sorted(met)


@pytest.mark.parametrize("order", ["serial", "plain", "paired"])
def test_on_threads_the_backward_of_dispatch_runs_while_the_experts_wgrad_does(
    ranks2: RankPool, order: str
) -> None:
    expected = ["dispatch.L0", "dispatch.L1", "mlp.L0", "mlp.L1"]
    for met in ranks2.run(met_within_a_step, order):
        assert met == sorted(2 * expected)


# ---- what arrives in which node ------------------------------------------------------------------


class NotingSink:
    """A ``GradSink`` that notes in which W node each weight's gradient arrives."""

    def __init__(self, sink: GradSink, schedule: OverlapSchedule, names: Any) -> None:
        self._sink = sink
        self._names = names
        self._word = ""
        self.arrived: dict[str, list[str]] = {}
        for (microbatch, node, layer), wgrad in schedule._wgrads.items():
            word = str(Compute(microbatch, Phase.WGRAD, node, layer))
            wgrad.pre_hooks += (partial(self._enter, word),)
            wgrad.post_hooks += (partial(self._enter, ""),)

    def _enter(self, word: str) -> None:
        self._word = word

    def _note(self, weight: nn.Parameter) -> None:
        self.arrived.setdefault(self._word, []).append(self._names[weight])

    def add(self, weight: nn.Parameter, grad: Tensor) -> None:
        self._note(weight)
        self._sink.add(weight, grad)

    def destination(self, weight: nn.Parameter) -> Destination:
        self._note(weight)
        return self._sink.destination(weight)


def arrivals(fuse: bool, dispatch_over_alone: bool) -> tuple[dict[str, list[str]], list[str]]:
    """By W node, the weights; then the weights of all managed layers."""
    from ep_overlap.models.megatron_cpu import megatron_on_cpu

    alone = dispatch_over_alone
    case = Case(
        megatron=True, shared=True, ep=2, fuse=fuse, delay=not alone, dispatch_over=alone, freq=2
    )
    with megatron_on_cpu():
        parts = support.build(case)
        names = {param: name for name, param in parts.module.named_parameters()}
        schedule = OverlapSchedule(parts, case.config, stream_kind=INLINE)
        wgrad = schedule._wgrad
        assert wgrad is not None
        wgrad.sink = sink = NotingSink(wgrad.sink, schedule, names)
        schedule.step(support.batches(parts, case, 0), support.loss_of(case))
        managed = [
            f"{name}.weight"
            for name, module in parts.module.named_modules()
            if isinstance(module, ManagedLayer)
        ]
    return sink.arrived, managed


@pytest.mark.parametrize("fuse", [False, True])
def test_shared_experts_experts_and_attention_have_each_their_own_wgrad_node(
    ranks2: RankPool, fuse: bool
) -> None:
    for arrived, managed in ranks2.run(arrivals, fuse, False):
        made_at_once = arrived.pop("", [])
        assert set(made_at_once) <= {"output_layer.weight"}
        layer = "decoder.layers.0."
        for microbatch in range(2):
            shared, mlp, attn = (
                {n.removeprefix(layer) for n in arrived.pop(f"{microbatch}W.{node}.L0")}
                for node in ("shared", "mlp", "attn")
            )
            assert shared == {f"mlp.shared_experts.linear_fc{i}.weight" for i in (1, 2)}
            assert mlp == {
                f"mlp.experts.local_experts.{e}.linear_fc{i}.weight" for e in (0, 1) for i in (1, 2)
            }
            assert attn == {f"self_attention.linear_{what}.weight" for what in ("qkv", "proj")}
            dense = {*arrived.pop(f"{microbatch}W.mlp.L1")}
            assert dense == {f"decoder.layers.1.mlp.linear_fc{i}.weight" for i in (1, 2)}
            assert len(arrived.pop(f"{microbatch}W.attn.L1")) == 2
        assert arrived == {}
        assert len(managed) == 2 + 4 + 2 + 2 + 2 + 1


def test_with_the_experts_wgrad_alone_delayed_others_are_made_at_once(ranks2: RankPool) -> None:
    for arrived, managed in ranks2.run(arrivals, True, True):
        at_once = set(arrived.pop(""))
        assert arrived.keys() == {"0W.mlp.L0", "1W.mlp.L0"}  # the dense layer has no dispatch
        of_experts = {name for names in arrived.values() for name in names}
        assert len(of_experts) == 2 * 2
        assert all("local_experts" in name for name in of_experts)
        assert at_once == {*managed} - of_experts


def places(case: Case) -> Seen:
    parts = support.build(case)
    schedule = OverlapSchedule(parts, case.config)
    with seen_in(parts.module) as seen:
        schedule.step(support.batches(parts, case, 0), support.loss_of(case))
    assert storages(seen.written) == storages(seen.reduced)
    return Seen(num_packs=seen.num_packs, accumulated=sorted({*seen.accumulated}))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_under_a_schedule_reductions_read_what_gradients_were_written_into(
    ranks2: RankPool, strategy: str
) -> None:
    for seen in ranks2.run(places, Case(strategy=strategy, microbatches=3, **BOTH)):
        assert seen.num_packs == 0
        assert seen.accumulated == [
            "attention_norm.weight",
            "embedding.weight",
            "final_norm.weight",
            "mlp_norm.weight",
            "positions.weight",
        ]


# ---- beside other schedules ----------------------------------------------------------------------


def results(parts: Any, run: Callable[[Any], Sequence[Tensor]], case: Case) -> dict[str, Tensor]:
    parts.module.zero_grad()
    losses = run(support.batches(parts, case, 0))
    return support.named(losses) | support.gradients(parts)


def wrong_in_turns(case: Case) -> list[str]:
    groups, loss_fn, found = Groups(), support.loss_of(case), list[str]()
    expected = results(alone := support.build(case, groups), partial(_standard, alone, case), case)
    parts = support.build(case, groups)
    plain = OverlapSchedule(parts, case.config)
    delayed = OverlapSchedule(parts, replace(case, delay=True).config)
    serial = OverlapSchedule(parts, replace(case, order="serial", dispatch_over=True).config)
    drivers: dict[str, Callable[[Any], Sequence[Tensor]]] = {
        "plain": lambda inputs: plain.step(inputs, loss_fn).losses,
        "delayed": lambda inputs: delayed.step(inputs, loss_fn).losses,
        "serial": lambda inputs: serial.step(inputs, loss_fn).losses,
        "standard": partial(_standard, parts, case),
    }
    for turn in ["plain", "delayed", "plain", "serial", "delayed", "standard", "delayed"]:
        found += [
            f"{turn}: {name}" for name in unequal(results(parts, drivers[turn], case), expected)
        ]
        losses = support.named(delayed.evaluate(support.batches(parts, case, 0), loss_fn).losses)
        found += [f"after {turn}: {n}" for n in losses if not torch.equal(losses[n], expected[n])]
        found += support.not_at_rest(parts)
    return found


def _standard(parts: Any, case: Case, inputs: Any) -> list[Tensor]:
    return support.standard_step(parts, inputs, support.loss_of(case))


@pytest.mark.parametrize("fuse", [False, True])
def test_schedules_with_and_without_delay_take_turns_with_evaluation_between(
    ranks2: RankPool, fuse: bool
) -> None:
    case = Case(strategy=RELEASED, layers=2, microbatches=3, ep=2, fuse=fuse)
    assert ranks2.run(wrong_in_turns, case) == [[], []]
