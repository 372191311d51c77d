"""When a tensor that crossed lanes may be given back.

Memory is given back to the lane that allocated it, and that lane may use it at once. A tensor that
another lane has read must therefore live until its own lane has waited for the reader::

    comp   [ mlp.B makes g ]           [ ... ]  [ attn.B, waits for dispatch.B ]
    comm                  [ dispatch.B reads g ]
                                                ^ here g may go, not before

Where work is launched ahead of its execution (CUDA) dropping the last reference is giving back. In
a first version of a schedule one gradient was dropped too early: losses stayed right and one norm
became 771 instead of 0.61.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from ep_overlap.plan.action import Action, Lane, Sync
from ep_overlap.plan.edges import Waiting, walk

_LANES: Final = (Lane.COMP, Lane.COMM, Lane.RS)

_READERS: Final = MappingProxyType({Lane.COMP: (Lane.COMM, Lane.RS), Lane.COMM: (Lane.COMP,)})
"""For each lane that allocates what crosses lanes, the lanes that read it."""


def wait_points(actions: Sequence[Action]) -> tuple[Mapping[int, int], ...]:
    """For each action, what it waits for, and after which action's issue its lane can be told so.

    That is as soon as both are issued: what it waits for, and what its lane does before it. Nothing
    runs later for that, and what the awaited action read can be given back sooner::

        issued     combine.B   attn.F   mlp.B   dispatch.F
        comm                         ^ waits for attn.F: what attn.F read goes before mlp.B
                                       takes its memory
    """
    last: dict[Lane, int] = {}
    points: list[Mapping[int, int]] = []
    for index, (action, waiting) in enumerate(zip(actions, walk(actions), strict=True)):
        before = last.get(action.lane, 0)
        points.append({awaited: max(awaited, before) for awaited in waiting.waits})
        last[action.lane] = index
    return tuple(points)


def release_points(actions: Sequence[Action]) -> tuple[int | None, ...]:
    """For each node and REDUCE, the action after whose issue what it read may be dropped.

    A node reads what the other of the lanes comp and comm allocated; REDUCE reads gradients that
    comp allocated. By then the lane that allocated it has been told to wait for it (see
    ``wait_points``). None: only after the step (and for what reads nothing of another lane).
    """
    waiting = walk(actions)
    points: list[int | None] = [None] * len(actions)
    # For each lane, its readers that the lane they read from has not yet waited for, oldest first.
    unknown: dict[Lane, list[int]] = {lane: [] for lane in _LANES}
    for index, (action, waits) in enumerate(zip(actions, wait_points(actions), strict=True)):
        for awaited, point in waits.items():
            for reading in _READERS.get(action.lane, ()):
                done_until = _done_until(awaited, reading, actions, waiting)
                while unknown[reading] and unknown[reading][0] <= done_until:
                    points[unknown[reading].pop(0)] = point
        if action.lane in unknown:
            unknown[action.lane].append(index)
    return tuple(points)


def _done_until(
    awaited: int, lane: Lane, actions: Sequence[Action], waiting: Sequence[Waiting]
) -> int:
    """The latest action of a lane that is done when ``awaited`` is."""
    if actions[awaited].lane is lane:
        return awaited
    if isinstance(actions[awaited], Sync):  # see ``walk``
        return -1
    return waiting[awaited].knows[lane]
