"""The schedule against the standard path: losses, every gradient, every weight, bit for bit."""

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Concatenate

import pytest
import schedule_support as support
import torch
import torch.distributed as dist
from schedule_support import Case
from torch import Tensor
from torch.nn import functional as F

from ep_overlap.plan.action import LayerKind
from ep_overlap.plan.build import build_plan
from ep_overlap.plan.order import ModelShape, OrderName
from ep_overlap.run import exchange_node, node
from ep_overlap.run.exchange_node import ExchangeInput, ExchangeOutput
from ep_overlap.run.node import HandOff
from ep_overlap.schedule import OverlapSchedule
from ep_overlap.testing import RankPool
from fsdp_hooks.streams import StreamKind

SHARDED = "optim_grads_params"
FLOAT64_TOLERANCE = 1e-12
"""Relative to a tensor's largest entry."""


def own_order(layers: int, microbatches: int, order: OrderName = OrderName.PAIRED) -> str:
    """An order file, as ``plan.order_text()`` writes it."""
    shape = ModelShape(layers=(LayerKind.MOE,) * layers)
    return build_plan(shape=shape, num_microbatches=microbatches, order=order).order_text()


def last_first(layers: int) -> str:
    """Two forwards, then the second one's backward, then the first one's."""
    serial = own_order(layers, 2, OrderName.SERIAL).split("\n")
    words = [word for line in serial if not line.startswith("#") for word in line.split()]
    passes = {name: [w for w in words if w.startswith(name)] for name in ("0F", "1F", "1B", "0B")}
    return " ".join(word for part in passes.values() for word in part)


ON_TWO_RANKS = [
    Case(order="serial", layers=2, microbatches=3, ep=2),
    Case(order="paired", layers=1, microbatches=1),
    Case(order="plain", layers=3, microbatches=2, ep=2, freq=2),
    Case(order_text=own_order(3, 3), layers=3, microbatches=3, ep=2),
    Case(strategy="no_shard", order="serial", layers=1, microbatches=2),
    Case(strategy="no_shard", order="plain", layers=2, microbatches=3, ep=2),
    Case(strategy="no_shard", order="paired", layers=5, microbatches=2, freq=2),
    Case(strategy="no_shard", order_text=last_first(2), layers=2, ep=2),
    Case(strategy=SHARDED, order="serial", layers=3, ep=2, budget=2),
    Case(strategy=SHARDED, order="plain", layers=5, microbatches=3, ep=2, budget=2),
    Case(strategy=SHARDED, order="plain", layers=2, microbatches=7, budget=3),
    Case(strategy=SHARDED, order="paired", layers=3, microbatches=7, ep=2, freq=2, budget=3),
    Case(strategy=SHARDED, order="paired", layers=5, microbatches=2, ep=2, budget=2),
    Case(strategy=SHARDED, order="paired", layers=1, microbatches=3, ep=2),
    Case(strategy=SHARDED, order_text=last_first(3), layers=3, budget=2),
    Case(strategy=SHARDED, order="paired", layers=2, microbatches=3, ep=2, dtype=torch.float64),
    Case(strategy="no_shard", order="plain", layers=3, ep=2, freq=3, dtype=torch.float64),
    Case(strategy="no_shard", head=True, order="serial", layers=2, ep=2),
    Case(strategy="optim", head=True, order="plain", layers=2, microbatches=3, ep=2),
    Case(strategy="optim_grads", head=True, order="paired", layers=1, microbatches=3, ep=2),
    Case(strategy=SHARDED, head=True, order="paired", layers=3, microbatches=4, ep=2, budget=2),
    Case(strategy=SHARDED, head=True, order_text=last_first(3), layers=3, budget=2),
    Case(strategy=SHARDED, head=True, order="paired", microbatches=3, ep=2, delay=True, fuse=True),
    Case(strategy=SHARDED, head=True, order="plain", ep=2, recompute=True),
]
ON_FOUR_RANKS = [
    Case(strategy=SHARDED, order="paired", layers=3, microbatches=3, ep=2),
    Case(strategy=SHARDED, order="plain", layers=3, microbatches=2, ep=2, freq=2, budget=2),
    Case(strategy="no_shard", order="paired", layers=2, microbatches=2, ep=2),
]
MEGATRON = [
    Case(megatron=True, order="paired", layers=2, microbatches=3, ep=2, shared=True),
    Case(megatron=True, strategy="no_shard", order="plain", layers=3, ep=2, freq=2),
    Case(megatron=True, strategy=SHARDED, order="paired", layers=3, microbatches=3, ep=2, budget=2),
    Case(megatron=True, strategy=SHARDED, order="plain", layers=2, freq=2, shared=True),
    Case(megatron=True, strategy=SHARDED, order="serial", layers=1, microbatches=1, shared=True),
    Case(
        megatron=True, strategy=SHARDED, head=True, order="paired", layers=2, microbatches=3, ep=2
    ),
]


def every_difference(cases: list[Case]) -> dict[str, list[str]]:
    with ExitStack() as stack:
        if any(case.megatron for case in cases):
            from ep_overlap.models.megatron_cpu import megatron_on_cpu

            stack.enter_context(megatron_on_cpu())
        found = {f"{i}: {case}": support.differences(case) for i, case in enumerate(cases)}
    return {case: names for case, names in found.items() if names}


def test_two_ranks_are_bitwise_the_standard_path(ranks2: RankPool) -> None:
    assert ranks2.run(every_difference, ON_TWO_RANKS) == [{}, {}]


def test_four_ranks_are_bitwise_the_standard_path(ranks4: RankPool) -> None:
    assert ranks4.run(every_difference, ON_FOUR_RANKS) == [{}] * 4


def test_megatrons_model_is_bitwise_the_standard_path(ranks2: RankPool) -> None:
    assert ranks2.run(every_difference, MEGATRON) == [{}, {}]


# ---- against one process -------------------------------------------------------------------------


def whole_gradients(parts: Any) -> dict[str, Tensor]:
    """Every gradient of the whole model: rows of all shards, experts of all ranks."""
    by_rank: list[dict[str, Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(by_rank, support.gradients(parts))
    experts = frozenset(parts.expert_parameters())
    shapes = {name: parameter.shape for name, parameter in parts.module.named_parameters()}
    local_experts = {name for name, p in parts.module.named_parameters() if p in experts}
    whole: dict[str, Tensor] = {}
    for name in {name for grads in by_rank for name in grads}:
        shards = [grads[name] for grads in by_rank if name in grads]
        if len(shards) == 1 or name in local_experts or shards[0].shape == shapes[name]:
            whole[name] = shards[0]
        else:
            whole[name] = torch.cat(shards)
    return whole


def error_against_one_process(strategy: str) -> float:
    """The largest error of any gradient's entry, relative to the gradient's largest."""
    case = Case(strategy=strategy, layers=3, microbatches=3, ep=2, freq=2, dtype=torch.float64)
    parts = support.build(case)
    loss_fn = support.loss_of(case)
    schedule = OverlapSchedule(parts, case.config)
    schedule.step(support.batches(parts, case, 0), loss_fn)
    ours = whole_gradients(parts)

    lone = Case(layers=3, microbatches=3, freq=2, dtype=torch.float64)
    one = support.build(lone)
    for rank in range(2):
        for batch in support.batches(one, lone, 0, rank=rank):
            (loss_fn(one.whole(batch), batch) / (2 * lone.microbatches)).backward()
    theirs = support.gradients(one)
    assert ours.keys() == theirs.keys()
    return max(
        float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in theirs
    )


@pytest.mark.parametrize("strategy", ["no_shard", SHARDED])
def test_two_ranks_are_one_process_in_float64(ranks2: RankPool, strategy: str) -> None:
    errors = ranks2.run(error_against_one_process, strategy)
    assert max(errors) <= FLOAT64_TOLERANCE


# ---- a lost hand-over turns it red ---------------------------------------------------------------

HANDOVERS = {
    "pre": ["hidden"],
    "weights": ["tied"],
    "attn.L0": ["tokens", "probs"],
    "carry.L0": ["residual", "shared"],
    "dispatch.L0": ["tokens", "probs"],
    "mlp.L0": ["hidden"],
    "combine.L0": ["hidden"],
    "attn.L1": ["hidden"],
    "mlp.L1": ["hidden"],
}
"""Every kind of hand-over: layer 0 has experts, layer 1 is dense; the output layer is tied."""

MEGATRON_ONLY = ("probs", "shared")
"""The reference model weighs tokens before it sends them, and has no shared experts."""


def lose(monkeypatch: pytest.MonkeyPatch, lost: str | None, field: int = 0) -> set[str]:
    """Drop the gradient of one field of microbatch 1's hand-over. Fills in the names of all."""
    seen: set[str] = set()

    def losing[**P, R](
        take: Callable[Concatenate[Any, P], R],
    ) -> Callable[Concatenate[HandOff, P], R]:
        def taking(self: HandOff, *args: P.args, **kwargs: P.kwargs) -> R:
            seen.add(self.name.partition(".")[2])
            if self.name == f"1.{lost}":
                drop(self)
            return take(self, *args, **kwargs)

        return taking

    def drop(handoff: HandOff) -> None:
        if isinstance(handoff, ExchangeInput):
            grads = list(handoff.grads)
            assert grads[field] is not None
            grads[field] = None
            handoff.grads = tuple(grads)
            return
        received = handoff._received[field]  # pyright: ignore[reportPrivateUsage]
        assert received is not None
        assert received.grad is not None
        received.grad = None

    takes = ((HandOff, "roots"), (ExchangeInput, "roots"), (ExchangeOutput, "take_grads"))
    for kind, name in takes:
        monkeypatch.setattr(kind, name, losing(getattr(kind, name)))
    return seen


def lossy(case: Case) -> list[str]:
    return support.differences(case, num_steps=1)


@pytest.mark.parametrize(
    ("handover", "field"),
    [
        (handover, field)
        for handover, fields in HANDOVERS.items()
        for field in range(len(fields))
        if fields[field] not in MEGATRON_ONLY
    ],
)
def test_a_gradient_lost_between_two_nodes_is_seen(
    monkeypatch: pytest.MonkeyPatch, handover: str, field: int
) -> None:
    lose(monkeypatch, handover, field)
    found = lossy(Case(layers=2, freq=2, tied=True, kind=StreamKind.INLINE))
    assert any(name.startswith("gradient of") for name in found)
    assert not any(name.startswith("loss") for name in found)


def test_the_list_of_hand_overs_is_complete_and_losing_none_is_bitwise_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = lose(monkeypatch, None)
    assert lossy(Case(layers=2, freq=2, tied=True, kind=StreamKind.INLINE)) == []
    assert seen == HANDOVERS.keys()


@pytest.mark.parametrize(
    "mode",
    [
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor),
        ExitStack,
    ],
    ids=["autocast", "packing hooks", "none"],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_a_tied_weight_keeps_its_gradient_where_no_graph_saves_the_weight_itself(
    monkeypatch: pytest.MonkeyPatch, mode: Callable[[], Any], recompute: bool
) -> None:
    for module in (node, exchange_node):
        monkeypatch.setattr(module, "MIN_BYTES", 1)  # so that what is small is let go of, too
    case = Case(layers=2, tied=True, recompute=recompute, kind=StreamKind.INLINE)
    ours, theirs = support.build(case), support.build(case)
    schedule = OverlapSchedule(ours, case.config, stream_kind=case.kind)
    inputs, loss_fn = support.batches(ours, case, 0), support.loss_of(case)
    with mode():
        schedule.step(inputs, loss_fn)
        support.standard_step(theirs, inputs, loss_fn)
    assert support.unequal(support.gradients(ours), support.gradients(theirs)) == []


def without_gradient_of(handover: str, field: str) -> tuple[list[str], list[str]]:
    from ep_overlap.models.megatron_cpu import megatron_on_cpu

    case = Case(megatron=True, shared=True, layers=1, kind=StreamKind.INLINE)
    with megatron_on_cpu(), pytest.MonkeyPatch.context() as patch:
        intact = lossy(case)
        lose(patch, handover, HANDOVERS[handover].index(field))
        return intact, lossy(case)


@pytest.mark.parametrize(
    ("handover", "field", "parameter"),
    [
        ("carry.L0", "shared", "shared_experts"),
        ("attn.L0", "probs", "router"),
        ("dispatch.L0", "probs", "router"),
    ],
)
def test_a_gradient_lost_between_nodes_of_megatrons_model_is_seen(
    ranks2: RankPool, handover: str, field: str, parameter: str
) -> None:
    for intact, broken in ranks2.run(without_gradient_of, handover, field):
        assert intact == []
        assert any(parameter in name for name in broken)


# ---- timing and routing --------------------------------------------------------------------------


def with_sleeps() -> list[str]:
    """Rank-dependent delays in every node, forward and backward (Megatron-LM issue 1810)."""
    found: list[str] = []
    for case in (
        Case(order="plain", layers=2, microbatches=3, ep=2),
        Case(strategy=SHARDED, order="paired", layers=3, microbatches=4, ep=2, budget=2),
    ):
        ours, theirs = support.build(case), support.build(case)
        loss_fn, delays = support.loss_of(case), random.Random(dist.get_rank())

        def pause(node: str, result: Any = None, delays: random.Random = delays) -> None:
            time.sleep(delays.choice((0.0, 0.0, 0.001, 0.004)))

        support.tap(ours, pause, pause)
        schedule = OverlapSchedule(ours, case.config)
        inputs = support.batches(ours, case, 0)
        losses = schedule.step(inputs, loss_fn).losses
        expected = support.standard_step(theirs, inputs, loss_fn)
        found += support.unequal(support.named(losses), support.named(expected))
        found += support.unequal(support.gradients(ours), support.gradients(theirs))
    return found


def test_delays_that_differ_by_rank_change_nothing(ranks2: RankPool) -> None:
    assert ranks2.run(with_sleeps, timeout_s=30.0) == [[], []]


def prefer(parts: Any, layer: int, experts: tuple[int, ...]) -> None:
    """Let every token of a layer choose these experts."""
    router = parts.layers[layer].router
    bonus = torch.zeros(4).index_fill_(0, torch.tensor(experts), 100.0)
    router.forward = lambda hidden: F.linear(hidden, router.weight) + bonus


def with_idle_ranks() -> tuple[list[str], list[list[int]]]:
    """Layer 0 sends everything to rank 0, layer 1 to rank 1, layer 2 as it likes."""
    case = Case(strategy=SHARDED, order="paired", layers=3, microbatches=3, ep=2)
    ours, theirs = support.build(case), support.build(case)
    for parts in (ours, theirs):
        prefer(parts, 0, (0, 1))
        prefer(parts, 1, (2, 3))
    states: list[Any] = []
    begin = ours.begin

    def remembering(batch: Any) -> Any:
        states.append(begin(batch))
        return states[-1]

    ours.begin = remembering
    loss_fn, inputs = support.loss_of(case), support.batches(ours, case, 0)
    losses = OverlapSchedule(ours, case.config).step(inputs, loss_fn).losses
    expected = support.standard_step(theirs, inputs, loss_fn)
    found = support.unequal(support.named(losses), support.named(expected))
    found += support.unequal(support.gradients(ours), support.gradients(theirs))
    received = [[sum(state.routing[layer].received) for state in states] for layer in range(3)]
    return found, received


def test_ranks_that_receive_no_tokens_and_microbatches_that_route_differently(
    ranks2: RankPool,
) -> None:
    (found0, received0), (found1, received1) = ranks2.run(with_idle_ranks)
    assert found0 == found1 == []
    everything = 2 * support.BATCH_SIZE * support.SEQ_LENGTH * 2  # ranks, tokens, top-2
    assert received0[0] == received1[1] == [everything] * 3
    assert received0[1] == received1[0] == [0] * 3
    assert len(set(received0[2])) > 1  # the microbatches in flight route differently
