"""Drawn plans: what must hold for every order, shape, budget and strategy."""

from itertools import accumulate
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from plan_shapes import arguments, plans

from ep_overlap.plan.action import (
    HEAD_UNIT,
    PINNED_UNITS,
    ROOT_UNIT,
    Compute,
    Lane,
    Sync,
    UnitAction,
    UnitOp,
)
from ep_overlap.plan.build import build_plan, parse_words, plan_from_words
from ep_overlap.plan.check import check
from ep_overlap.plan.edges import REDUCE_DEPTH, dependencies
from ep_overlap.plan.lower import Sharding, Strategy
from ep_overlap.plan.order import OrderName, combined_1f1b, forward_only, serial
from ep_overlap.plan.plan import Plan
from ep_overlap.plan.units import Reduction, reductions

BRIEF = settings(max_examples=120, deadline=None)


def known_before(plan: Plan) -> list[int]:
    """For each action, as a bit mask, the actions that are done when it starts.

    Worked out anew from the waits: each lane does one action after the other. The end of a Sync
    says nothing of what it waited for.
    """
    before: list[int] = []
    after: list[int] = []
    last_of_lane: dict[Lane, int] = {}
    for index, (action, waited) in enumerate(zip(plan.actions, plan.waits, strict=True)):
        known = 0 if action.lane not in last_of_lane else after[last_of_lane[action.lane]]
        lane_alone = known
        for other in waited:
            known |= after[other]
        before.append(known)
        after.append((lane_alone if isinstance(action, Sync) else known) | 1 << index)
        last_of_lane[action.lane] = index
    return before


@BRIEF
@given(plans())
def test_every_built_plan_passes_the_check(plan: Plan) -> None:
    check(plan)


@BRIEF
@given(plans())
def test_waits_and_lane_order_imply_every_dependency(plan: Plan) -> None:
    known = known_before(plan)
    for index, needed in enumerate(dependencies(plan.actions)):
        for other in needed:
            assert known[index] >> other & 1, (str(plan.actions[index]), str(plan.actions[other]))


@BRIEF
@given(plans())
def test_no_wait_could_be_left_out(plan: Plan) -> None:
    needed = dependencies(plan.actions)
    for index, waited in enumerate(plan.waits):
        for other in waited:
            assert other in needed[index]
            assert plan.actions[other].lane is not plan.actions[index].lane
            rest = tuple(i for i in waited if i != other)
            leaner = Plan(
                shape=plan.shape,
                order=plan.order,
                num_microbatches=plan.num_microbatches,
                sharding=None,
                actions=plan.actions[: index + 1],
                waits=(*plan.waits[:index], rest),
            )
            if index < 150:  # the rest is more of the same, at quadratic cost
                assert not known_before(leaner)[index] >> other & 1


@BRIEF
@given(plans())
def test_the_text_parses_back(plan: Plan) -> None:
    assert tuple(parse_words(plan.text())) == plan.actions
    assert "" not in plan.order_text().splitlines()
    again = plan_from_words(
        plan.order_text(),
        shape=plan.shape,
        num_microbatches=plan.num_microbatches,
        sharding=plan.sharding,
        recompute=plan.recomputes,
    )
    assert again.actions == plan.actions
    assert again.waits == plan.waits


@BRIEF
@given(plans())
def test_live_units_never_exceed_the_budget_and_end_at_none(plan: Plan) -> None:
    change = {UnitOp.UNSHARD: 1, UnitOp.RESHARD: -1, UnitOp.REDUCE: 0}
    live = list(
        accumulate(
            change[action.op]
            for action in plan.actions
            if isinstance(action, UnitAction) and action.unit not in PINNED_UNITS
        )
    )
    strategy = None if plan.sharding is None else plan.sharding.strategy
    if strategy in (Strategy.OPTIM, Strategy.OPTIM_GRADS):
        # To stay: each once, whatever the budget.
        assert max(live) == live[-1] == plan.shape.num_layers
        assert live == sorted(live)
    else:
        assert all(0 <= count <= (plan.max_unsharded_units or 0) for count in live)
        assert not live or live[-1] == 0


@BRIEF
@given(arguments(), st.sampled_from(Strategy), st.booleans())
def test_full_size_gradient_buffers_in_flight_stay_bounded(
    given_arguments: dict[str, Any], strategy: Strategy, has_head: bool
) -> None:
    sharding = Sharding(strategy=strategy, reduce_each_microbatch=True, has_head=has_head)
    plan = build_plan(**{**given_arguments, "sharding": sharding})
    known = known_before(plan)

    def filled_from(reduction: Reduction) -> int:
        by_pre_alone = has_head and reduction.unit == ROOT_UNIT
        return reduction.contributions[-1 if by_pre_alone else 0]

    found = reductions(plan.actions)
    layers = [reduction for reduction in found if reduction.unit not in PINNED_UNITS]
    pinned = [[r for r in found if r.unit == unit] for unit in (ROOT_UNIT, HEAD_UNIT)]
    for turns in (layers, *pinned):
        for filled in turns:
            first = filled_from(filled)
            in_flight = [
                other
                for other in turns
                if filled_from(other) <= first and not known[first] >> other.reduce & 1
            ]
            assert len(in_flight) <= REDUCE_DEPTH


@BRIEF
@given(arguments())
def test_lowering_keeps_the_order_of_the_nodes(drawn: dict[str, Any]) -> None:
    lowered = build_plan(**drawn)
    shape, num = drawn["shape"], drawn["num_microbatches"]
    delay, recompute = drawn["delay_wgrad"], drawn["recompute"]
    if drawn["evaluate"]:
        order = forward_only(shape, num)
    elif drawn["order"] is OrderName.SERIAL:
        order = serial(shape, num, delay_wgrad=delay, recompute=recompute)
    else:
        paired = drawn["order"] is OrderName.PAIRED
        order = combined_1f1b(shape, num, paired=paired, delay_wgrad=delay, recompute=recompute)
    assert [action for action in lowered.actions if isinstance(action, Compute)] == order
