"""When a collective was really busy: from the last rank's entry on, on clocks brought together.

::

    rank 0   enter |------- skew -------|###### busy ######| exit
    rank 1                        enter |###### busy ######| exit

What a rank waits before the last one has entered is skew between ranks, not communication.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import torch
import torch.distributed as dist

NUM_PINGS: Final = 32


class CollectiveKind(StrEnum):
    """What a collective is counted as."""

    A2A = "a2a"
    AG = "ag"
    RS = "rs"
    AR = "ar"
    OTHER = "other"


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveSpan:
    """One collective of one rank: what, where, how much, when."""

    kind: CollectiveKind
    op: str
    """torch.distributed's name, such as ``all_to_all_single``."""
    group: str
    """The name given to ``new_link_group``."""
    ranks: tuple[int, ...]
    """Global ranks of the group: two groups on different ranks may share a name."""
    sequence: int
    """Counts the group's collectives from 0; equal on all ranks for the same collective."""
    thread_name: str
    wire_bytes: int
    """What this rank puts on the wire or takes from it, whichever is more."""
    enter_ns: int
    """``time.perf_counter_ns()`` of this rank; ``align`` brings ranks together."""
    exit_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BusySpan:
    """One collective of one rank with the time in which all ranks were in it."""

    span: CollectiveSpan
    last_enter_ns: int
    """When the group's last rank entered, on this rank's clock; at most ``span.exit_ns``."""
    skew_ns: int
    """How long this rank waited for the last one."""

    @property
    def busy_ns(self) -> int:
        """Length of ``[last_enter_ns, span.exit_ns]``."""
        return self.span.exit_ns - self.last_enter_ns


def align(
    spans_by_rank: Sequence[Sequence[CollectiveSpan]], clock_offsets_ns: Sequence[int]
) -> list[list[BusySpan]]:
    """For each global rank, its spans in the given order, with their busy part.

    Spans of one collective are found by group name, ranks and sequence. ``clock_offsets_ns[r]`` is
    what ``clock_offset_ns`` returned on rank r. Results are on each rank's own clock.

    Raises:
        ValueError: a rank has no span of a collective that another rank has (a log that was
            cleared or switched off on some ranks), or has another operation in its place.
    """
    if len(spans_by_rank) != len(clock_offsets_ns):
        raise ValueError(
            f"expected one clock offset per rank, got {len(clock_offsets_ns)} offsets "
            f"for the spans of {len(spans_by_rank)} ranks"
        )
    by_collective: dict[tuple[str, tuple[int, ...], int], dict[int, CollectiveSpan]] = {}
    for rank, spans in enumerate(spans_by_rank):
        for span in spans:
            by_collective.setdefault((span.group, span.ranks, span.sequence), {})[rank] = span

    last_enter_ns: dict[tuple[str, tuple[int, ...], int], int] = {}
    for key, span_of in by_collective.items():
        _check_same_collective(key, span_of)
        last_enter_ns[key] = max(
            span.enter_ns - clock_offsets_ns[rank] for rank, span in span_of.items()
        )

    def busy(span: CollectiveSpan, offset_ns: int) -> BusySpan:
        entered_ns = last_enter_ns[span.group, span.ranks, span.sequence] + offset_ns
        # Offsets are good to microseconds: the last entry may seem to fall outside the own span.
        entered_ns = min(max(entered_ns, span.enter_ns), span.exit_ns)
        return BusySpan(span=span, last_enter_ns=entered_ns, skew_ns=entered_ns - span.enter_ns)

    return [
        [busy(span, offset_ns) for span in spans]
        for spans, offset_ns in zip(spans_by_rank, clock_offsets_ns, strict=True)
    ]


def _check_same_collective(
    key: tuple[str, tuple[int, ...], int], span_of: dict[int, CollectiveSpan]
) -> None:
    group, ranks, sequence = key
    if missing := [rank for rank in ranks if rank not in span_of]:
        raise ValueError(
            f"collective {sequence} of link group {group!r} {list(ranks)} was logged by ranks "
            f"{sorted(span_of)} but not by {missing}; keep or clear the logs of all ranks together"
        )
    if len({span.op for span in span_of.values()}) > 1:
        ops = ", ".join(f"rank {rank}: {span.op}" for rank, span in sorted(span_of.items()))
        raise ValueError(
            f"collective {sequence} of link group {group!r} {list(ranks)} is not the same "
            f"operation on all ranks ({ops})"
        )


def clock_offset_ns(group: dist.ProcessGroup) -> int:
    """This rank's ``perf_counter_ns`` minus that of the group's first rank. Collective.

    Ping-pong with the first rank, best of ``NUM_PINGS`` round trips (Cristian's algorithm). On one
    host all ranks read the same clock, so it is 0 up to microseconds.
    """
    own = dist.get_rank(group)
    clock = torch.zeros(1, dtype=torch.int64)
    if own == 0:
        for peer in range(1, dist.get_world_size(group)):
            for _ in range(NUM_PINGS):
                dist.recv(clock, group=group, group_src=peer)
                clock[0] = time.perf_counter_ns()
                dist.send(clock, group=group, group_dst=peer)
        return 0
    best_round_trip_ns, best_offset_ns = None, 0
    for _ in range(NUM_PINGS):
        start_ns = time.perf_counter_ns()
        dist.send(clock, group=group, group_dst=0)
        dist.recv(clock, group=group, group_src=0)
        end_ns = time.perf_counter_ns()
        if best_round_trip_ns is None or end_ns - start_ns < best_round_trip_ns:
            best_round_trip_ns = end_ns - start_ns
            best_offset_ns = (start_ns + end_ns) // 2 - int(clock.item())
    return best_offset_ns
