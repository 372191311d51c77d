"""Measures a step's communication from the logs of link groups."""

import threading
from collections.abc import Mapping, Sequence
from typing import Final, final

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ep_overlap.links.group import LinkGroup
from ep_overlap.links.times import BusySpan, CollectiveKind, CollectiveSpan, align, clock_offset_ns
from ep_overlap.plan.action import Lane
from ep_overlap.run.trace import Busy, HiddenShare, StepTrace, hidden_share

_LANE_OF: Final[Mapping[CollectiveKind, Lane]] = {
    CollectiveKind.A2A: Lane.COMM,
    CollectiveKind.AG: Lane.AG,
    CollectiveKind.RS: Lane.RS,
    CollectiveKind.AR: Lane.RS,
}


@final
class LinkMeter:
    """A ``Meter`` over link groups.

    Args:
        links: all groups whose collectives count.
        group: a group of all ranks, used for nothing else while a step runs.
    """

    def __init__(self, links: Sequence[LinkGroup], group: ProcessGroup) -> None:
        self._links = tuple(links)
        self._group = group
        offsets: list[int] = [0] * group.size()
        dist.all_gather_object(offsets, clock_offset_ns(group), group=group)
        self._offsets_ns = offsets
        self._compute_threads: set[str] = set()

    def begin(self) -> None:
        """A step begins: clear the logs."""
        # The caller's thread is the compute lane where no schedule drives.
        self._compute_threads = {"stream-comp", threading.current_thread().name}
        for link in self._links:
            link.log = []

    def share(self, trace: StepTrace) -> HiddenShare:
        """Of this rank. Collective: what was busy depends on when the last rank entered."""
        own = [span for link in self._links for span in link.log or ()]
        by_rank: list[list[CollectiveSpan]] = [[] for _ in range(self._group.size())]
        dist.all_gather_object(by_rank, own, group=self._group)
        mine = align(by_rank, self._offsets_ns)[self._group.rank()]
        return hidden_share(trace.waits(), [self._busy(span) for span in mine])

    def _busy(self, busy: BusySpan) -> Busy:
        return Busy(
            lane=_LANE_OF.get(busy.span.kind),
            on_compute_lane=busy.span.thread_name in self._compute_threads,
            interval=(busy.last_enter_ns, busy.span.exit_ns),
            skew_ns=busy.skew_ns,
        )
