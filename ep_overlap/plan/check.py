"""Proves a plan, or says what is wrong and shows the grid around the place.

What is proved: every node is issued exactly once; everything comes after what it needs; weights
are gathered when they are read, within the budget, and released at the end; gradients are reduced
once and complete; and, lane by lane, collectives are issued in one order on all ranks.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NoReturn

from ep_overlap.plan.action import (
    NODES_OF,
    PINNED_UNITS,
    RECOMPUTED_OF,
    WGRADS_OF,
    Action,
    Compute,
    Node,
    Phase,
    Sync,
    UnitAction,
    UnitOp,
)
from ep_overlap.plan.edges import backward_of, dependencies, in_model_order, waits
from ep_overlap.plan.grid import grid
from ep_overlap.plan.plan import Plan
from ep_overlap.plan.units import units_given, units_read

_BACKWARD_OP: Final = {
    "all_gather_into_tensor": "reduce_scatter_tensor",
    "reduce_scatter_tensor": "all_gather_into_tensor",
}
"""What a collective's backward issues, where that is another collective."""


class PlanError(ValueError):
    """A plan that cannot be run. The text says why, and shows the grid with the step marked."""

    def __init__(self, message: str, *, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step
        """Index of the action at fault."""


def check(plan: Plan) -> None:
    """Check everything that this module's docstring names.

    Raises:
        PlanError: something does not hold.
    """
    _check_nodes(plan)
    _check_syncs(plan)
    _check_units(plan)
    _check_reductions(plan)
    _check_places(plan)
    if plan.waits != waits(plan.actions):
        _fail(plan, 0, "the plan's waits are not those of its actions; expected edges.waits()")


def check_order(plan: Plan) -> None:
    """Check the nodes alone: each exactly once, each after what it needs.

    Raises:
        PlanError: a node is missing, doubled, unknown, or too early.
    """
    _check_nodes(plan)
    _check_places(plan)


def collective_order(
    plan: Plan, table: Mapping[Node | UnitOp, Sequence[tuple[str, str]]]
) -> dict[str, list[tuple[str, str]]]:
    """For each communicator, the (word, collective) pairs in the order that a rank issues them.

    A plan is a pure function of its arguments, and each lane is first-in-first-out: so ranks with
    equal ``Plan.digest`` issue the collectives of one lane in the same order. Two lanes have no
    order between them, so a communicator may be used from one lane only.

    Args:
        plan: the plan.
        table: for each node the (communicator's name, collective) pairs of its forward, in issue
            order. Its backward issues the counterparts, last first. Unit actions may be listed as
            well.

    Raises:
        PlanError: one communicator is used from two lanes.
    """
    issued: dict[str, list[tuple[str, str]]] = {}
    first_use: dict[str, int] = {}
    for step, action in enumerate(plan.actions):
        for group, op in _collectives(action, table):
            first = plan.actions[first_use.setdefault(group, step)]
            if first.lane is not action.lane:
                _fail(
                    plan,
                    step,
                    f"communicator {group!r} is used by {first} on lane {first.lane} and by "
                    f"{action} on lane {action.lane}: two lanes have no order between them, so "
                    "ranks could issue these in different orders; give each lane its own",
                )
            issued.setdefault(group, []).append((str(action), op))
    return issued


def _collectives(
    action: Action, table: Mapping[Node | UnitOp, Sequence[tuple[str, str]]]
) -> list[tuple[str, str]]:
    if isinstance(action, UnitAction):
        return list(table.get(action.op, ()))
    if isinstance(action, Sync) or action.phase is Phase.WGRAD:
        return []
    forward = list(table.get(action.node, ()))
    if action.phase is not Phase.BACKWARD:
        return forward
    return [(group, _BACKWARD_OP.get(op, op)) for group, op in reversed(forward)]


def _fail(plan: Plan, step: int, reason: str, *, marked: str = "") -> NoReturn:
    """``marked``: what is, where it is not what ``reason`` begins with."""
    if not plan.actions:
        raise PlanError(f"{reason}\nThe plan is empty.")
    step = min(step, len(plan.actions) - 1)
    note = f"\nMarked: {marked}." if marked else ""
    raise PlanError(f"{reason}{note}\n\n{grid(plan, around=step)}", step=step)


def _expected_nodes(plan: Plan) -> list[Compute]:
    """Every node that the plan must issue, by microbatch and phase, each phase in model order.

    What has a W node in one microbatch has one in all; if one layer is recomputed, all are.
    """
    delayed = plan.delayed
    again = RECOMPUTED_OF if plan.recomputes else NODES_OF
    nodes_of = {Phase.FORWARD: NODES_OF}
    if plan.recomputes:
        nodes_of[Phase.RECOMPUTE] = again
    if not plan.is_forward_only:
        nodes_of[Phase.BACKWARD] = again
    expected: list[Compute] = []
    for microbatch in range(plan.num_microbatches):
        for phase, nodes in nodes_of.items():
            for layer, kind in enumerate(plan.shape.layers):
                expected += [Compute(microbatch, phase, node, layer) for node in nodes[kind]]
            if phase is not Phase.RECOMPUTE:
                expected += [Compute(microbatch, phase, node) for node in (Node.PRE, Node.POST)]
        for layer, kind in enumerate(plan.shape.layers):
            expected += [
                Compute(microbatch, Phase.WGRAD, node, layer)
                for node in WGRADS_OF[kind]
                if (node, layer) in delayed
            ]
    return expected


def _check_nodes(plan: Plan) -> None:
    expected = _expected_nodes(plan)
    known = frozenset(expected)
    seen: dict[Compute, int] = {}
    for step, action in enumerate(plan.actions):
        if not isinstance(action, Compute):
            continue
        if action not in known:
            _fail(plan, step, f"{action} is not a node of this plan ({plan.title})")
        if action in seen:
            _fail(plan, step, f"{action} is issued twice, first at step {seen[action]}")
        seen[action] = step
    for node in expected:
        if node not in seen:
            _fail(plan, _place_of_missing(node, seen), f"{node} is missing", marked="its place")


def _place_of_missing(node: Compute, seen: Mapping[Compute, int]) -> int:
    """Where a missing node is missed first: at the next node of its pass; for R and W, at its B."""
    if node.phase is Phase.WGRAD:
        return seen.get(backward_of(node), len(seen))
    if node.phase is Phase.RECOMPUTE:
        own = Compute(node.microbatch, Phase.BACKWARD, node.node, node.layer)
        return seen.get(own, len(seen))
    backward = node.phase is Phase.BACKWARD
    after = [
        step
        for other, step in seen.items()
        if (other.microbatch, other.phase) == (node.microbatch, node.phase)
        and (in_model_order(other) < in_model_order(node)) == backward
    ]
    return min(after, default=max(seen.values(), default=0))


def _check_places(plan: Plan) -> None:
    """Everything comes after what it needs."""
    for step, needed in enumerate(dependencies(plan.actions)):
        for late in (index for index in needed if index > step):
            reason = f"{plan.actions[step]} is issued before {plan.actions[late]}, which it needs"
            _fail(plan, step, f"{reason} (that comes at step {late})")


def _check_syncs(plan: Plan) -> None:
    """One Sync before each dispatch of F and R. Its place is checked as a dependency."""
    seen: dict[Sync, int] = {}
    for step, action in enumerate(plan.actions):
        if isinstance(action, Sync) and action in seen:
            _fail(plan, step, f"{action} is issued twice, first at step {seen[action]}")
        if isinstance(action, Sync):
            seen[action] = step
    dispatches: set[Sync] = set()
    for step, action in enumerate(plan.actions):
        if not isinstance(action, Compute) or action.layer is None:
            continue
        if action.node is Node.DISPATCH and action.phase is not Phase.BACKWARD:
            sync = Sync(action.microbatch, action.layer, action.phase)
            dispatches.add(sync)
            if sync not in seen:
                _fail(plan, step, f"{action} has no {sync} before it to wait for split sizes")
    for sync, step in seen.items():
        if sync not in dispatches:
            _fail(plan, step, f"{sync} belongs to no forward dispatch of this plan")


def _check_units(plan: Plan) -> None:
    """Weights: gathered when read, never twice, within the budget, all released at the end; or, if
    they stay, gathered once."""
    strategy = None if plan.sharding is None else plan.sharding.strategy
    gathers = strategy is not None and strategy.shards_main
    releases = strategy is not None and strategy.shards_params
    has_head = plan.sharding is not None and plan.sharding.has_head
    budget = plan.max_unsharded_units
    gathered: dict[str, int] = {}
    released: dict[str, int] = {}
    unread: set[str] = set()
    for step, action in enumerate(plan.actions):
        for unit in units_read(action, has_head=has_head) if gathers else ():
            if unit not in gathered:
                then = f"; released at step {released[unit]}" if unit in released else ""
                _fail(plan, step, f"{action} reads unit {unit}, which is not gathered{then}")
            unread.discard(unit)
        if not isinstance(action, UnitAction) or action.op is UnitOp.REDUCE:
            continue
        if not (releases or (gathers and action.op is UnitOp.UNSHARD)):
            _fail(plan, step, f"{action}, but the weights of this plan are not sharded")
        if action.op is UnitOp.UNSHARD:
            if action.unit in gathered:
                _fail(plan, step, f"{action}: gathered already, at step {gathered[action.unit]}")
            gathered[action.unit] = step
            unread.add(action.unit)
        else:
            if action.unit not in gathered:
                _fail(plan, step, f"{action}: released, but not gathered")
            if action.unit in unread:
                _fail(plan, step, f"{action}: gathered and released without a reader between")
            released[action.unit] = step
            del gathered[action.unit]
        live = sorted(gathered.keys() - PINNED_UNITS)
        if budget is not None and len(live) > budget:
            names = ", ".join(live)
            _fail(plan, step, f"{len(live)} layers gathered, budget {budget}: {names}")
    for unit, step in gathered.items():
        if releases:
            _fail(plan, step, f"unit {unit} is never released after this gather")


def _check_reductions(plan: Plan) -> None:
    """Every unit with gradients is reduced once a microbatch, or once a step, and never else.

    That a REDUCE comes after its last contribution is checked as a dependency.
    """
    each_microbatch = plan.sharding is not None and plan.sharding.reduces_each_microbatch
    reduces: dict[str, list[int]] = {}
    given: dict[str, dict[int, int]] = {}  # the last contribution of each microbatch, or of all
    for step, action in enumerate(plan.actions):
        if isinstance(action, UnitAction) and action.op is UnitOp.REDUCE:
            reduces.setdefault(action.unit, []).append(step)
        if isinstance(action, Compute) and plan.sharding is not None:
            for unit in units_given(action, has_head=plan.sharding.has_head):
                given.setdefault(unit, {})[action.microbatch if each_microbatch else 0] = step
    for unit, steps in reduces.items():
        expected = len(given.get(unit, {}))
        if len(steps) > expected:
            reason = f"{plan.actions[steps[expected]]} once too often"
            _fail(plan, steps[expected], f"{reason}: expected {expected} a step, got {len(steps)}")
    for unit, last in given.items():
        steps = reduces.get(unit, [])
        if len(steps) < len(last):
            reason = f"REDUCE.{unit} is missing: expected {len(last)} a step, got {len(steps)}"
            place = _place_of_missing_reduce(sorted(last.values()), steps)
            _fail(plan, place, reason, marked="the last node that gives it gradients")


def _place_of_missing_reduce(completions: Sequence[int], reduces: Sequence[int]) -> int:
    """The first completion of a unit's gradients that is followed by the next, not by a REDUCE."""
    for number, following in enumerate(completions[1:]):
        if sum(step < following for step in reduces) <= number:
            return completions[number]
    return completions[-1]
