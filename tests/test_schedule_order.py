"""What a step does, in which order, and what is gathered meanwhile; on inline streams."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import schedule_support as support
import torch.distributed as dist
from schedule_support import Case
from torch import Tensor

from ep_overlap.plan.action import Action, Sync, UnitAction, UnitOp, parse_action
from ep_overlap.plan.edges import waits
from ep_overlap.plan.units import units_given, units_read
from ep_overlap.run.runner import Program
from ep_overlap.schedule import OverlapSchedule
from ep_overlap.testing import RankPool, assert_count, assert_order, record
from fsdp_hooks.lifecycle import UnitLifecycle, lifecycle_of
from fsdp_hooks.streams import StreamKind

INLINE = StreamKind.INLINE


def words_of(actions: Sequence[Action]) -> list[str]:
    """All that streams see: a SYNC is the host's."""
    return [str(action) for action in actions if not isinstance(action, Sync)]


@pytest.mark.parametrize("order", ["serial", "plain", "paired"])
def test_without_sharding_the_plan_is_issued_word_by_word(order: str) -> None:
    case = Case(order=order, layers=3, microbatches=3, freq=2, kind=INLINE)
    parts = support.build(case)
    schedule = OverlapSchedule(parts, case.config, stream_kind=INLINE)
    ran: list[str] = []
    support.tap(parts, lambda node, result: ran.append(node))
    trace = schedule.step(support.batches(parts, case, 0), support.loss_of(case)).trace
    assert trace is not None
    issued = support.actions_among([word for _, word in trace.issued])
    assert issued == words_of(schedule.plan.actions)
    assert support.actions_among([span.word for span in trace.spans]) == issued
    assert ran == [word.partition(".")[2] for word in issued if word[1] == "F"]


def test_each_exchange_is_issued_on_the_exchange_lane_and_nothing_else_is() -> None:
    case = Case(order="paired", layers=2, microbatches=3, kind=INLINE)
    parts = support.build(case)
    schedule = OverlapSchedule(parts, replace(case.config, trace=False), stream_kind=INLINE)
    with record() as recording:
        schedule.observe(recording)
        schedule.step(support.batches(parts, case, 0), support.loss_of(case))
    on_comm = support.actions_among(recording.on_lane("comm"))
    assert len(on_comm) == 2 * 2 * 3 * 2  # dispatch and combine, F and B, microbatches, layers
    assert all(".dispatch." in word or ".combine." in word for word in on_comm)
    assert_order(recording, "0B.combine.L1", "2F.attn.L0", "0B.mlp.L1", "2F.dispatch.L0")
    schedule.observe(None)
    schedule.step(support.batches(parts, case, 0), support.loss_of(case))
    assert len(support.actions_among(recording.words)) == len(words_of(schedule.plan.actions))


def exchanged(recompute: bool) -> list[str]:
    """What one microbatch exchanges in one layer of megatron-core's, in order."""
    from ep_overlap.models.megatron_cpu import megatron_on_cpu

    case = Case(megatron=True, order="serial", layers=1, microbatches=1, ep=2, recompute=recompute)
    log: list[str] = []
    exchange = dist.all_to_all_single

    def logged(output: Tensor, *arguments: Any, **named: Any) -> Any:
        log.append({2: "tokens", 1: "probs"}[output.dim()])
        return exchange(output, *arguments, **named)

    with megatron_on_cpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", logged)
        parts = support.build(case)
        schedule = OverlapSchedule(parts, case.config, stream_kind=INLINE)
        schedule.step(support.batches(parts, case, 0), support.loss_of(case))
    return log


@pytest.mark.parametrize("recompute", [False, True])
def test_tokens_are_exchanged_ahead_of_their_probs_both_ways(
    ranks2: RankPool, recompute: bool
) -> None:
    forward = ["tokens", "probs", "tokens"]  # dispatch, combine
    again = forward if recompute else []
    backward = ["tokens", "tokens", "probs"]
    assert ranks2.run(exchanged, recompute) == [[*forward, *again, *backward]] * 2


def test_evaluation_issues_forwards_alone() -> None:
    case = Case(order="paired", layers=2, microbatches=2, kind=INLINE)
    parts = support.build(case)
    schedule = OverlapSchedule(parts, case.config, stream_kind=INLINE)
    trace = schedule.evaluate(support.batches(parts, case, 0), support.loss_of(case)).trace
    assert trace is not None
    issued = support.actions_among([word for _, word in trace.issued])
    assert issued[:2] == ["0F.pre", "0F.attn.L0"]
    assert len(issued) == 2 * (1 + 2 * 4 + 1)
    assert_count(issued, "?B.*", 0)


# ---- sharded -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Watched:
    """One rank's step."""

    issued: list[str]
    planned: list[str]
    read_sharded: list[str]
    """Nodes whose unit's weights were not in the module while the node ran."""
    peak_bytes: int
    layer_bytes: int
    root_bytes: int
    hook_misses: int
    num_reduce_scatters: int
    left_over: list[str]


def watched_step(case: Case) -> Watched:
    parts = support.build(case)
    schedule = OverlapSchedule(parts, case.config, stream_kind=INLINE)
    root = lifecycle_of(parts.module)
    modules = {f"L{index}": layer.module for index, layer in enumerate(parts.layers)}
    modules |= {"pre": parts.embedding, "post": parts.output}
    read_sharded: list[str] = []

    def probe(node: str, result: Any = None) -> None:
        # A placeholder and released storage have no bytes; exchanges read no weights.
        if node.startswith(("dispatch", "combine")):
            return
        weights = modules[node.rpartition(".")[2]].parameters()
        if any(weight.untyped_storage().nbytes() == 0 for weight in weights):
            read_sharded.append(node)

    support.tap(parts, probe, probe)
    trace = schedule.step(support.batches(parts, case, 0), support.loss_of(case)).trace
    assert trace is not None
    root_unit: Any = root.root_unit
    layer_unit: Any = root.inner_units[0]
    return Watched(
        issued=support.actions_among([word for _, word in trace.issued]),
        planned=words_of(schedule.plan.actions),
        read_sharded=read_sharded,
        peak_bytes=root.stats.peak_unsharded_bytes,
        layer_bytes=layer_unit.unsharded_bytes,
        root_bytes=root_unit.unsharded_bytes,
        hook_misses=root.stats.hook_misses,
        num_reduce_scatters=root.stats.num_reduce_scatters,
        left_over=support.not_at_rest(parts),
    )


SHARDED = [
    Case(
        strategy="optim_grads_params", order=order, layers=3, microbatches=3, budget=2, kind=INLINE
    )
    for order in ("serial", "plain", "paired")
]


def watched_steps() -> list[Watched]:
    return [watched_step(case) for case in SHARDED]


def test_sharded_steps_issue_the_plan_and_read_gathered_weights_alone(ranks2: RankPool) -> None:
    for step in [step for steps in ranks2.run(watched_steps) for step in steps]:
        assert step.issued == step.planned
        assert step.read_sharded == []
        assert step.hook_misses == 0
        assert step.left_over == []
        # Two layers at once, never three: the budget is used and kept.
        assert step.peak_bytes == step.root_bytes + 2 * step.layer_bytes
        assert step.num_reduce_scatters == 3 * 4  # each microbatch: three layers and the root
        check_units(step.issued)


def check_units(issued: list[str]) -> None:
    """Gathered before use, released after the last, reduced after the last giver."""
    actions = [parse_action(word) for word in issued]
    gathered: set[str] = set()
    unreduced: dict[str, int] = {}
    for action in actions:
        for unit in units_read(action, has_head=False):
            assert unit in gathered, f"{action} reads {unit}, which is released"
        for unit in units_given(action, has_head=False):
            unreduced[unit] = unreduced.get(unit, 0) + 1
        if isinstance(action, UnitAction):
            match action.op:
                case UnitOp.UNSHARD:
                    gathered.add(action.unit)
                case UnitOp.RESHARD:
                    gathered.remove(action.unit)
                case UnitOp.REDUCE:
                    unreduced[action.unit] -= 2  # mlp and attn, or post and pre
    assert gathered == set()
    assert set(unreduced.values()) == {0}


# ---- the safety net ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Rescued:
    misses: list[int]
    """After each of two steps without gathers, and after a whole one behind them."""
    wrong: list[str]


def without_gathers_of_one_layer() -> Rescued:
    """A plan that forgot a unit: the nodes' own hooks gather it."""
    case = replace(SHARDED[0], kind=INLINE)
    ours, theirs = support.build(case), support.build(case)
    schedule = OverlapSchedule(ours, case.config, stream_kind=INLINE)
    whole = schedule._training  # pyright: ignore[reportPrivateUsage]
    actions = [
        action
        for action in schedule.plan.actions
        if str(action) not in ("UNSHARD.L1", "RESHARD.L1")
    ]
    units: dict[str, UnitLifecycle] = schedule._units  # pyright: ignore
    schedule._training = Program(  # pyright: ignore[reportPrivateUsage]
        replace(schedule.plan, actions=tuple(actions), waits=waits(actions)),
        streams=schedule._streams,  # pyright: ignore[reportPrivateUsage]
        nodes=schedule._nodes,  # pyright: ignore[reportPrivateUsage]
        again=schedule._again,  # pyright: ignore[reportPrivateUsage]
        wgrads={},
        units=units,
        runs_after_launch=False,
    )
    loss_fn, inputs = support.loss_of(case), support.batches(ours, case, 0)
    root = lifecycle_of(ours.module)
    found: list[str] = []
    misses: list[int] = []
    for program in (schedule._training, schedule._training, whole):  # pyright: ignore[reportPrivateUsage]
        schedule._training = program  # pyright: ignore[reportPrivateUsage]
        ours.zero_grad()
        theirs.zero_grad()
        losses = schedule.step(inputs, loss_fn).losses
        expected = support.standard_step(theirs, inputs, loss_fn)
        found += support.unequal(support.named(losses), support.named(expected))
        found += support.unequal(support.gradients(ours), support.gradients(theirs))
        misses.append(root.stats.hook_misses)
        found += support.not_at_rest(ours)
    return Rescued(misses=misses, wrong=found)


def test_a_gather_that_the_plan_forgot_is_a_counted_miss_and_the_result_is_right(
    ranks2: RankPool,
) -> None:
    for rescued in ranks2.run(without_gathers_of_one_layer):
        assert rescued.wrong == []
        first, second, whole = rescued.misses
        assert 1 <= first < second
        assert whole == second  # the whole plan misses nothing
