"""How often a step gathers, and what is unsharded meanwhile: real runs against plan and numbers.

Numbers are of a step. Gathering a unit takes one all-gather for each of its groups of which other
ranks hold a part; the root is gathered once, and counted apart.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import final

import pytest
import schedule_support as support
from schedule_support import Case, Groups

from ep_overlap.plan.action import ROOT_UNIT, UnitAction, UnitOp
from ep_overlap.plan.plan import Plan
from ep_overlap.schedule import OverlapSchedule
from ep_overlap.testing import RankPool
from fsdp_hooks.lifecycle import lifecycle_of
from fsdp_hooks.root import FsdpRoot
from fsdp_hooks.streams import Span, StreamKind

ZERO3 = "optim_grads_params"
Timeline = list[tuple[str, int]]
"""Each gather and release of a step in turn, and the unsharded bytes of all units after it."""


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What one run counted, on one rank."""

    unit_gathers: int
    """Of the plan, less the root's."""
    all_gathers: list[int]
    """Of each step, as the communicators counted them."""
    gathering_groups: tuple[int, int]
    """Of a layer's unit, and of the root's."""
    unit_bytes: int
    root_bytes: int
    peak_bytes: int
    """``stats.peak_unsharded_bytes``."""
    timeline: Timeline
    """Of the last step, read off the storages."""
    counted: Timeline
    """The same, from ``stats.unsharded_bytes``."""
    planned: Timeline
    """The same, from the plan alone."""


@final
class LiveBytes:
    """A ``StreamObserver`` that looks at the storages after each piece of work of the AG lane, from
    within that lane: nobody else allocates or frees them."""

    def __init__(self, root: FsdpRoot) -> None:
        self._root = root
        self.timeline: Timeline = []
        self.counted: Timeline = []

    def on_issue(self, lane: str, word: str) -> None:
        """What is live shows when the work is done."""

    def on_span(self, span: Span) -> None:
        """Note what is allocated, and what is counted."""
        if span.word.startswith(("UNSHARD", "RESHARD")):
            groups = (group for unit in self._root.units for group in unit.groups if group.releases)
            wholes = [group.weights.whole for group in groups]
            live = sum(whole.nbytes for whole in wholes if whole.is_allocated)
            self.timeline.append((span.word, live))
            self.counted.append((span.word, self._root.stats.unsharded_bytes))


def timeline_of(plan: Plan, sizes: dict[str, int]) -> Timeline:
    """``sizes``: bytes that gathering a unit allocates."""
    live = 0
    found: Timeline = []
    for action in plan.actions:
        if isinstance(action, UnitAction) and action.op is not UnitOp.REDUCE:
            live += sizes[action.unit] if action.op is UnitOp.UNSHARD else -sizes[action.unit]
            found.append((str(action), live))
    return found


def root_of(parts: support.MoETransformer) -> FsdpRoot:
    root = lifecycle_of(parts.module)
    assert isinstance(root, FsdpRoot)
    return root


def count(cases: list[Case], num_steps: int) -> list[Counted]:
    groups = Groups()
    return [count_one(case, groups, num_steps) for case in cases]


def count_one(case: Case, groups: Groups, num_steps: int) -> Counted:
    parts = support.build(case, groups)
    root = root_of(parts)
    # Not traced: a trace would take the place of our observer.
    schedule = OverlapSchedule(parts, replace(case.config, trace=False), stream_kind=case.kind)
    optimizer = support.sgd(parts)
    all_gathers: list[int] = []
    live = LiveBytes(root)
    for step in range(num_steps):
        before = root.stats.num_all_gathers
        live = LiveBytes(root)
        schedule.observe(live)
        schedule.step(support.batches(parts, case, step), support.loss_of(case))
        optimizer.step()
        optimizer.zero_grad()
        all_gathers.append(root.stats.num_all_gathers - before)
    schedule.observe(None)  # a worker thread holds its observer, and ours the root with its streams
    assert root.stats.hook_misses == 0
    assert support.not_at_rest(parts) == []
    units = {f"L{index}": unit for index, unit in enumerate(root.inner_units)}
    units[ROOT_UNIT] = root.root_unit
    sizes = {name: unit.unsharded_bytes for name, unit in units.items()}
    assert len({sizes[name] for name in sizes if name != ROOT_UNIT}) == 1
    num_gathers = schedule.plan.num_gathers
    return Counted(
        unit_gathers=sum(n for name, n in num_gathers.items() if name != ROOT_UNIT),
        all_gathers=all_gathers,
        gathering_groups=(
            sum(group.gathers for group in units["L0"].groups),
            sum(group.gathers for group in units[ROOT_UNIT].groups),
        ),
        unit_bytes=sizes["L0"],
        root_bytes=sizes[ROOT_UNIT],
        peak_bytes=root.stats.peak_unsharded_bytes,
        timeline=live.timeline,
        counted=live.counted,
        planned=timeline_of(schedule.plan, sizes),
    )


def assert_live_bytes(counted: Counted, budget: int) -> None:
    """Never more than the budget's units and the root, and at times just as much."""
    assert counted.timeline == counted.planned
    assert counted.timeline == counted.counted
    assert counted.timeline[-1][1] == 0
    limit = budget * counted.unit_bytes + counted.root_bytes
    assert max(live for _, live in counted.timeline) == limit
    assert counted.peak_bytes == limit


# ---- 4 layers, 4 microbatches, on 4 ranks of which 2 share each expert ---------------------------


def four(order: str, budget: int | None, strategy: str = ZERO3, ep: int = 2) -> Case:
    return Case(strategy=strategy, order=order, layers=4, microbatches=4, ep=ep, budget=budget)


def test_four_layers_and_microbatches_take_these_all_gathers(ranks4: RankPool) -> None:
    """megatron-core 0.19.2 issues 65 where the plain order issues 23."""
    expected = {("plain", 3): 11, ("paired", 3): 9, ("serial", 2): 18}
    cases = [four(order, budget) for order, budget in expected]
    for results in ranks4.run(count, cases, 2):
        for (case, unit_gathers), counted in zip(expected.items(), results, strict=True):
            assert counted.gathering_groups == (2, 1), "dense and expert, and the root's dense ones"
            assert counted.unit_gathers == unit_gathers, case
            assert counted.all_gathers == [2 * unit_gathers + 1] * 2, case
            assert_live_bytes(counted, budget=case[1])
            # Attention, norms and router of all ranks, two experts of this one, and padding.
            dense, experts = 4 * 16 * 16 + 2 * 16 + 4 * 16, 2 * (2 * 16 * 24)
            assert 0 <= counted.unit_bytes - 4 * (dense + experts) < 256


KEPT = ("optim", "optim_grads")
"""Strategies that keep parameters whole."""


def test_strategies_that_keep_parameters_gather_each_group_once_a_step(ranks4: RankPool) -> None:
    cases = [four(order, None, strategy) for strategy in KEPT for order in ("plain", "serial")]
    for results in ranks4.run(count, cases, 2):
        for case, counted in zip(cases, results, strict=True):
            assert counted.gathering_groups == (2, 1), case
            assert counted.unit_gathers == 4, case
            assert counted.all_gathers == [2 * 4 + 1] * 2, case
            assert [word.split(".")[0] for word, _ in counted.timeline] == ["UNSHARD"] * 5, case
            assert counted.peak_bytes == 0, "nothing that a release would free"


# ---- on 2 ranks ----------------------------------------------------------------------------------


def test_ranks_alone_with_their_experts_gather_the_dense_group_only(ranks2: RankPool) -> None:
    cases = [four("plain", 3, ep=2), four("plain", 3, ep=1), four("plain", None, "no_shard")]
    for alone, together, whole in ranks2.run(count, cases, 2):
        assert alone.gathering_groups == (1, 1)
        assert alone.all_gathers == [11 + 1] * 2
        assert_live_bytes(alone, budget=3)
        # With one mesh for all parameters, those of a unit are one group, experts included.
        assert together.gathering_groups == (1, 1)
        assert together.all_gathers == [11 + 1] * 2
        assert_live_bytes(together, budget=3)
        assert together.unit_bytes == alone.unit_bytes + 4 * (4 * 2 * 16 * 24)
        assert whole.all_gathers == [0] * 2
        assert whole.timeline == []


EIGHT = {
    ("plain", 2): 100,
    ("plain", 3): 83,
    ("plain", 4): 68,
    ("paired", 2): 88,
    ("paired", 3): 73,
    ("paired", 4): 60,
}
"""Unit gathers of 8 layers and 8 microbatches, by order and budget. That they are the fewest,
``test_plan_residency.py`` shows by exhaustive search."""


def test_eight_layers_and_microbatches_take_these_all_gathers(ranks2: RankPool) -> None:
    cases = [
        Case(
            strategy=ZERO3,
            order=order,
            layers=8,
            microbatches=8,
            budget=budget,
            kind=StreamKind.INLINE,
        )
        for order, budget in EIGHT
    ]
    for results in ranks2.run(count, cases, 1):
        for (case, unit_gathers), counted in zip(EIGHT.items(), results, strict=True):
            assert counted.gathering_groups == (1, 1)
            assert counted.unit_gathers == unit_gathers, case
            assert counted.all_gathers == [unit_gathers + 1], case
            assert_live_bytes(counted, budget=case[1])


def gathers_of_the_standard_path() -> list[int]:
    case = four("serial", None, ep=1)
    parts = support.build(case)
    root = root_of(parts)
    totals = [0]
    for step in range(2):
        support.standard_step(parts, support.batches(parts, case, step), support.loss_of(case))
        totals.append(root.stats.num_all_gathers)
    return [after - before for before, after in pairwise(totals)]


def test_the_standard_path_gathers_all_units_but_the_last_twice(ranks2: RankPool) -> None:
    # It knows one use ahead: 7 unit gathers and the root's, for each microbatch.
    for gathers in ranks2.run(gathers_of_the_standard_path):
        assert gathers == [4 * (7 + 1)] * 2


@pytest.mark.parametrize("order", ["plain", "paired"])
def test_a_budget_for_all_units_gathers_each_once(ranks2: RankPool, order: str) -> None:
    ((counted,), _) = ranks2.run(count, [four(order, 4, ep=1)], 1)
    assert counted.unit_gathers == 4
    assert counted.all_gathers == [4 + 1]
    assert_live_bytes(counted, budget=4)
