"""When the actions of a plan would run, were every node's duration known: lanes in order, one wait
for each edge, a host that is never late. Collectives of weights and gradients take no time."""

from collections.abc import Callable
from dataclasses import dataclass, field

from ep_overlap.plan.action import Compute, Lane
from ep_overlap.plan.plan import Plan

TRACED_MS = {
    "F.pre": 0.2,
    "F.attn": 5.7,
    "F.mlp": 5.8,
    "F.post": 10.7,
    "B.post": 8.15,
    "B.mlp": 6.1,
    "B.attn": 9.6,
    "B.pre": 0.7,
    "W.mlp": 3.7,
    "W.attn": 2.05,
}
"""Of the size of docs/gpu.md's "Against megatron-core", in a trace of 2026-11-30: one H200."""

EXCHANGES = ("F.dispatch", "F.combine", "B.dispatch", "B.combine")


@dataclass
class LaneTimes:
    """A step's length, and how long each lane was idle ahead of which node."""

    step: float
    idle: dict[tuple[Lane, str], float] = field(default_factory=dict[tuple[Lane, str], float])

    def idle_of(self, lane: Lane) -> float:
        return sum(time for (which, _), time in self.idle.items() if which is lane)


def traced(exchange: float) -> Callable[[str], float]:
    """Durations of nodes, exchanges of one length.

    Raises:
        KeyError: of a node that was not traced.
    """
    return {**TRACED_MS, **dict.fromkeys(EXCHANGES, exchange)}.__getitem__


def lane_times(plan: Plan, duration: Callable[[str], float]) -> LaneTimes:
    """Run the plan on paper. ``duration``: of a node such as ``F.attn``. Lanes of gathers and
    reductions have no order here, so of a sharded plan it says too little."""
    times = LaneTimes(0.0)
    ends: list[float] = []
    free: dict[Lane, float] = {}
    for action, waits in zip(plan.actions, plan.waits, strict=True):
        start = max((ends[index] for index in waits), default=0.0)
        if not isinstance(action, Compute):
            ends.append(start)
            continue
        name = f"{action.phase}.{action.node}"
        was_free = free.get(action.lane, 0.0)
        if start > was_free:
            key = (action.lane, name)
            times.idle[key] = times.idle.get(key, 0.0) + start - was_free
        ends.append(max(start, was_free) + duration(name))
        free[action.lane] = ends[-1]
    times.step = max(ends)
    return times
