"""What each action depends on, and which waits between lanes that takes.

``dependencies`` is the whole truth, one list per action; ``waits`` is the least that a runner has
to do about it, given that each lane does its actions in issue order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from ep_overlap.plan.action import (
    HEAD_UNIT,
    PINNED_UNITS,
    ROOT_UNIT,
    Action,
    Compute,
    Lane,
    Node,
    Phase,
    Sync,
    UnitAction,
    UnitOp,
)
from ep_overlap.plan.units import reductions, units_read

REDUCE_DEPTH: Final = 2
"""How many full-size gradient buffers may be in flight: one being filled, one being reduced.

Without this back-pressure a slow reduce-scatter lane lets backward run ahead, with one more
full-size buffer alive for each unit that it is ahead.
"""

_NODES: Final = tuple(Node)
_LANES: Final = tuple(Lane)
_NOTHING_YET: Final = -1


def dependencies(actions: Sequence[Action]) -> tuple[tuple[int, ...], ...]:
    """For each action, the indices of all actions that must be done before it starts.

    Own-lane dependencies are included. A dependency that comes later in the list (a broken plan)
    has the larger index; one that is missing altogether is left out: ``check`` finds both.
    """
    needed: list[set[int]] = [set() for _ in actions]
    _add_data(actions, needed)
    _add_syncs(actions, needed)
    _add_units(actions, needed)
    _add_reductions(actions, needed)
    return tuple(tuple(sorted(indices)) for indices in needed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """What an action's lane waits for before it, and what it then knows to be done."""

    waits: tuple[int, ...]
    knows: Mapping[Lane, int]
    """For each lane, the latest action known to be done; -1: none."""


def waits(actions: Sequence[Action]) -> tuple[tuple[int, ...], ...]:
    """For each action, the earlier actions on other lanes that its lane must wait for.

    The minimum: what a lane already waited for, directly or through another lane, is not waited
    for again.
    """
    return tuple(waiting.waits for waiting in walk(actions))


def walk(actions: Sequence[Action]) -> list[Waiting]:
    """Each action's waits and knowledge.

    Each lane keeps a vector clock: the latest action of every lane that is known to be done (the
    idea of C. J. Fidge and F. Mattern, 1988).
    """
    known = {lane: dict.fromkeys(_LANES, _NOTHING_YET) for lane in _LANES}
    clocks: list[dict[Lane, int]] = []
    steps: list[Waiting] = []
    for index, (action, needed) in enumerate(zip(actions, dependencies(actions), strict=True)):
        clock = known[action.lane]
        mine: list[int] = []
        # Latest first: a later action may vouch for an earlier one, never the other way round.
        for dependency in reversed(needed):
            lane = actions[dependency].lane
            if lane is action.lane or dependency <= clock[lane] or dependency > index:
                continue
            mine.append(dependency)
            _learn(clock, clocks[dependency])
        steps.append(Waiting(waits=tuple(sorted(mine)), knows=dict(clock)))
        clock[action.lane] = index
        # A Sync may be over when the split sizes have come, which may be before attn is: it vouches
        # for nothing but itself, and dispatch waits for attn on its own account.
        clocks.append({action.lane: index} if isinstance(action, Sync) else dict(clock))
    return steps


def _learn(clock: dict[Lane, int], other: dict[Lane, int]) -> None:
    for lane, index in other.items():
        clock[lane] = max(clock[lane], index)


def in_model_order(compute: Compute) -> tuple[int, int]:
    """Where a node stands in the forward pass; a sort key."""
    last_layer = 1 << 30
    layer = {Node.PRE: -1, Node.POST: last_layer}.get(compute.node, compute.layer or 0)
    return layer, _NODES.index(compute.node)


def backward_of(wgrad: Compute) -> Compute:
    """The node whose backward leaves a W node its work."""
    node = Node.ATTN if wgrad.node is Node.SHARED else wgrad.node
    return Compute(wgrad.microbatch, Phase.BACKWARD, node, wgrad.layer)


def _add_data(actions: Sequence[Action], needed: list[set[int]]) -> None:
    """Along each pass, node after node; each backward after its forward, each W after its B."""
    place = {action: i for i, action in enumerate(actions) if isinstance(action, Compute)}
    passes: dict[tuple[int, Phase], list[Compute]] = {}
    for action in place:
        passes.setdefault((action.microbatch, action.phase), []).append(action)
    for (_, phase), nodes in passes.items():
        if phase is Phase.WGRAD:
            continue  # W nodes need their own B alone, not each other
        nodes.sort(key=in_model_order, reverse=phase is Phase.BACKWARD)
        for earlier, later in pairwise(nodes):
            # Each layer is recomputed from its own input.
            if phase is not Phase.RECOMPUTE or earlier.layer == later.layer:
                needed[place[later]].add(place[earlier])
    for action, index in place.items():
        needed[index].update(place[before] for before in _needed_of(action) if before in place)


def _needed_of(action: Compute) -> Sequence[Compute]:
    """Of the other phases of a node: what it needs, as far as there is one."""
    match action.phase:
        case Phase.FORWARD:
            return ()
        case Phase.WGRAD:
            return (backward_of(action),)
        case Phase.RECOMPUTE:
            # The whole forward, as both leave their routing in the microbatch's one state.
            return (Compute(action.microbatch, Phase.FORWARD, Node.POST),)
        case Phase.BACKWARD if action.node is Node.FINISH:
            return (Compute(action.microbatch, Phase.RECOMPUTE, action.node, action.layer),)
        case Phase.BACKWARD if action.layer is None:  # pre and post are not recomputed
            return (Compute(action.microbatch, Phase.FORWARD, action.node),)
        case Phase.BACKWARD:
            phases = (Phase.FORWARD, Phase.RECOMPUTE)
            return [Compute(action.microbatch, p, action.node, action.layer) for p in phases]


def _add_syncs(actions: Sequence[Action], needed: list[set[int]]) -> None:
    """Sync after the attn that computes the sizes; dispatch after its Sync."""
    place = {action: index for index, action in enumerate(actions)}
    for action, index in place.items():
        if not isinstance(action, Sync):
            continue
        attn = Compute(action.microbatch, action.phase, Node.ATTN, action.layer)
        dispatch = Compute(action.microbatch, action.phase, Node.DISPATCH, action.layer)
        if attn in place:
            needed[index].add(place[attn])
        if dispatch in place:
            needed[place[dispatch]].add(index)


def _add_units(actions: Sequence[Action], needed: list[set[int]]) -> None:
    """Readers after the latest gather of their unit; a release after the readers since then."""
    window: dict[str, list[int]] = {}  # of each gathered unit: the gather, then its readers
    for index, action in enumerate(actions):
        for unit in units_read(action, has_head=True):
            if unit in window:
                needed[index].add(window[unit][0])
                window[unit].append(index)
        if isinstance(action, UnitAction) and action.op is UnitOp.UNSHARD:
            window[action.unit] = [index]
        elif isinstance(action, UnitAction) and action.op is UnitOp.RESHARD:
            needed[index].update(window.pop(action.unit, []))


def _add_reductions(actions: Sequence[Action], needed: list[set[int]]) -> None:
    """REDUCE after what it reduces, and back-pressure (``REDUCE_DEPTH``).

    The root unit's buffer is in use from the first node of a backward to the last, and the head's
    is filled ahead of all layers', so they take no part in the turns of the layers' buffers; each
    takes turns with itself. Where there is a head, post gives the root next to nothing, a norm's:
    its buffer counts from pre on.
    """
    found = [reduction for reduction in reductions(actions) if reduction.contributions]
    for reduction in found:
        needed[reduction.reduce].update(reduction.contributions)
    layers = [reduction for reduction in found if reduction.unit not in PINNED_UNITS]
    pinned = [[r for r in found if r.unit == unit] for unit in sorted(PINNED_UNITS)]
    has_head = any(reduction.unit == HEAD_UNIT for reduction in found)
    for turns in (layers, *pinned):
        for done, filled in zip(turns, turns[REDUCE_DEPTH:], strict=False):
            is_pre_alone = has_head and filled.unit == ROOT_UNIT
            first = (max if is_pre_alone else min)(filled.contributions)
            # An order of one's own may fill more buffers than that before it reduces any, and a
            # unit that reduces once a step keeps its buffer throughout: nothing to wait for then.
            if done.reduce < first:
                needed[first].add(done.reduce)
