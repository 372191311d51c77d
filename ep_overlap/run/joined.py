"""Several units of a sharding core as one unit of a plan: of a layer that consists of modules which
its model holds apart (``JoinedModules``).

What is asked of the one is asked of each, in order. An action has one event, that of the work which
its lane does last: lanes are first in, first out. Which one that is, the events do not tell. Of
releases and reductions it is the last one issued; a gather may have been issued before, for another
unit (DDP's buckets span units), so gathers are kept in order::

    UNSHARD.root   ->  g0                 AG lane:  g0  g1
    UNSHARD.L0     ->  g1 of the first module, g0 of the second: g1
"""

from collections import deque
from collections.abc import Sequence
from typing import final

from fsdp_hooks.lifecycle import NOTHING_DONE, UnitLifecycle, UnitState
from fsdp_hooks.streams import Event


@final
class GatherOrder:
    """The last gathers of a schedule's units, in the order of issue.

    Args:
        num_units: of the sharding core; a unit has at most one gather under way.
    """

    def __init__(self, num_units: int) -> None:
        self._issued: deque[Event] = deque(maxlen=2 * num_units)

    def last_of(self, events: Sequence[Event]) -> Event:
        """The one issued last. ``events``: as they were just returned, one after the other; every
        gather is to pass here when it is issued."""
        for event in events:
            if not any(event is known for known in self._issued):
                self._issued.append(event)
        return next(
            (known for known in reversed(self._issued) if any(known is event for event in events)),
            NOTHING_DONE,
        )


@final
class JoinedUnit:
    """Implements ``UnitLifecycle`` for one or several of a core's.

    Args:
        name: of the plan's unit.
        units: of the core; none is in another ``JoinedUnit``.
        order: of all units of the schedule.
    """

    def __init__(self, name: str, units: Sequence[UnitLifecycle], order: GatherOrder) -> None:
        self.name = name
        self._units = tuple(units)
        self._order = order

    @property
    def state(self) -> UnitState:
        """The issued state; its units' differ only where some do not gather."""
        unsharded = all(unit.state is UnitState.UNSHARDED for unit in self._units if unit.gathers)
        return UnitState.UNSHARDED if unsharded else UnitState.SHARDED

    @property
    def releases(self) -> bool:
        """Whether a reshard frees memory."""
        return any(unit.releases for unit in self._units)

    @property
    def gathers(self) -> bool:
        """Whether an unshard asks other ranks."""
        return any(unit.gathers for unit in self._units)

    def unshard(self, *, after: Sequence[Event] = (), word: str | None = None) -> Event:
        """Issue the gathers. Idempotent. The event is behind all of them."""
        issued = [unit.unshard(after=after, word=word) for unit in self._units if unit.gathers]
        return self._order.last_of(issued)

    def reshard(self, *, after: Sequence[Event] = (), word: str | None = None) -> Event:
        """Issue the releases. Raises as the units'."""
        return _last([unit.reshard(after=after, word=word) for unit in self._units])

    def reduce(self, *, after: Sequence[Event] = (), word: str | None = None) -> Event:
        """Issue the reductions. Raises as the units'."""
        return _last([unit.reduce(after=after, word=word) for unit in self._units])

    def drop_reduced(self) -> None:
        """Let go of what the oldest reductions read."""
        for unit in self._units:
            unit.drop_reduced()

    def ensure(self) -> None:
        """The safety net, in stream time."""
        for unit in self._units:
            if unit.releases:
                unit.ensure()

    def seal(self, microbatch: int, *, is_last: bool) -> None:
        """In stream time: this microbatch's contributions are complete."""
        for unit in self._units:
            unit.seal(microbatch, is_last=is_last)


def _last(events: Sequence[Event]) -> Event:
    """Of events that were all issued just now; those of nothing issued aside."""
    return next((event for event in reversed(events) if event is not NOTHING_DONE), NOTHING_DONE)
