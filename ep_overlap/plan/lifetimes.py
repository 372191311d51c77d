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
from typing import Final

from ep_overlap.plan.action import Action, Compute, Lane
from ep_overlap.plan.edges import walk

_OTHER: Final = {Lane.COMP: Lane.COMM, Lane.COMM: Lane.COMP}


def release_points(actions: Sequence[Action]) -> tuple[int | None, ...]:
    """For each node, the first later action before which the other lane has waited for it.

    What the node read and the other lane allocated may be dropped once that action is issued, its
    waits with it. None: only after the step (and for actions that are no nodes).
    """
    waiting = walk(actions)
    points: list[int | None] = [None] * len(actions)
    # For each lane, the nodes that the other lane has not yet waited for, oldest first.
    unknown: dict[Lane, list[int]] = {lane: [] for lane in _OTHER}
    for index, action in enumerate(actions):
        if not isinstance(action, Compute):
            continue
        readers = unknown[_OTHER[action.lane]]
        done_until = waiting[index].knows[_OTHER[action.lane]]
        while readers and readers[0] <= done_until:
            points[readers.pop(0)] = index
        unknown[action.lane].append(index)
    return tuple(points)
