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

from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

from ep_overlap.plan.action import Action, Lane
from ep_overlap.plan.edges import walk

_LANES: Final = (Lane.COMP, Lane.COMM, Lane.RS)

_READERS: Final = MappingProxyType({Lane.COMP: (Lane.COMM, Lane.RS), Lane.COMM: (Lane.COMP,)})
"""For each lane that allocates what crosses lanes, the lanes that read it."""


def release_points(actions: Sequence[Action]) -> tuple[int | None, ...]:
    """For each node and REDUCE, the first later action whose lane has waited for it.

    A node reads what the other of the lanes comp and comm allocated; REDUCE reads gradients that
    comp allocated. They may be dropped once that action is issued, its waits with it. None: only
    after the step (and for what reads nothing of another lane).
    """
    waiting = walk(actions)
    points: list[int | None] = [None] * len(actions)
    # For each lane, its readers that the lane they read from has not yet waited for, oldest first.
    unknown: dict[Lane, list[int]] = {lane: [] for lane in _LANES}
    for index, action in enumerate(actions):
        for reading in _READERS.get(action.lane, ()):
            done_until = waiting[index].knows[reading]
            while unknown[reading] and unknown[reading][0] <= done_until:
                points[unknown[reading].pop(0)] = index
        if action.lane in unknown:
            unknown[action.lane].append(index)
    return tuple(points)
