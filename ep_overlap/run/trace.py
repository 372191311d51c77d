"""What ran when: spans of one step, the share of communication that was hidden, Chrome traces.

Hidden share, for one kind of collective on one rank::

    comp   [ attn ][ mlp ]//wait//[ mlp ]          waited: the part of the compute lane's waits
    comm        ..[ A2A busy  ]                            that falls within busy time
                ^ skew: this rank is in, another is not yet
                  [ busy: from the last rank's entry to the end ]

    hidden = (busy - waited) / busy, at least 0

A wait is charged once, to the lane whose event ended it. A collective that runs on the compute
lane itself is waited for from beginning to end. What is waited while ranks are not yet together
is skew, reported apart; the rest of a wait (packing, hand-over between threads) is neither.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, Final, Protocol, final

from ep_overlap.plan.action import Compute, Lane, UnitAction, UnitOp, parse_action
from fsdp_hooks.streams import Span

NS_PER_S: Final = 1e9
NS_PER_US: Final = 1e3

Interval = tuple[int, int]
"""Start and end, ns."""


@final
class StepTrace:
    """The spans of one step; a ``StreamObserver``."""

    def __init__(self) -> None:
        self.begin_ns = perf_counter_ns()
        self.end_ns = self.begin_ns
        self.issued: list[tuple[str, str]] = []
        """(lane, word) in issue order."""
        self.spans: list[Span] = []
        """In order of completion; in execution order within a lane."""

    def on_issue(self, lane: str, word: str) -> None:
        self.issued.append((lane, word))

    def on_span(self, span: Span) -> None:
        self.spans.append(span)

    def finish(self) -> None:
        """The step is over."""
        self.end_ns = perf_counter_ns()

    @property
    def duration_s(self) -> float:
        """The step, without what measuring it took afterwards."""
        return (self.end_ns - self.begin_ns) / NS_PER_S

    def waits(self) -> Iterable[Span]:
        """The compute lane's waits for other lanes."""
        return (s for s in self.spans if s.lane == Lane.COMP and s.blocked_by_lane is not None)


@dataclass(frozen=True, kw_only=True)
class Busy:
    """One collective, as ``hidden_share`` needs it."""

    lane: Lane | None
    """The lane that its kind belongs to; None: of no kind that is reported (token counts)."""
    on_compute_lane: bool
    """It ran on the compute lane itself: all of it is waited for."""
    interval: Interval
    """From the last rank's entry to the end."""
    skew_ns: int


@dataclass(frozen=True, kw_only=True)
class KindShare:
    """One kind of communication in one step on one rank."""

    busy_s: float
    waited_s: float
    skew_s: float
    num_collectives: int

    @property
    def hidden(self) -> float | None:
        """Share that ran under compute, 0 to 1; None if there was no such communication."""
        return max(0.0, self.busy_s - self.waited_s) / self.busy_s if self.busy_s > 0 else None

    @classmethod
    def total(cls, shares: Sequence["KindShare"]) -> "KindShare":
        """Of several steps together."""
        return cls(
            busy_s=sum(share.busy_s for share in shares),
            waited_s=sum(share.waited_s for share in shares),
            skew_s=sum(share.skew_s for share in shares),
            num_collectives=sum(share.num_collectives for share in shares),
        )


@dataclass(frozen=True, kw_only=True)
class HiddenShare:
    """By kind: all-to-all, all-gather of parameters, reduction of gradients."""

    a2a: KindShare
    ag: KindShare
    rs: KindShare
    compute_lane_s: float
    """What the compute lane spent in collectives and in waits for them, skew included: the step
    without it is compute."""

    def as_json(self) -> dict[str, float | None]:
        """The shares alone."""
        return {"a2a": self.a2a.hidden, "ag": self.ag.hidden, "rs": self.rs.hidden}

    @property
    def comm_s(self) -> float:
        """All communication of the step, hidden or not."""
        return self.a2a.busy_s + self.ag.busy_s + self.rs.busy_s

    @classmethod
    def total(cls, shares: Sequence["HiddenShare"]) -> "HiddenShare":
        """Of several steps together."""
        return cls(
            a2a=KindShare.total([share.a2a for share in shares]),
            ag=KindShare.total([share.ag for share in shares]),
            rs=KindShare.total([share.rs for share in shares]),
            compute_lane_s=sum(share.compute_lane_s for share in shares),
        )


class Meter(Protocol):
    """Measures the communication of a step."""

    def begin(self) -> None:
        """A step begins: forget what was."""
        ...

    def share(self, trace: StepTrace) -> HiddenShare:
        """The step's share. Collective: every rank calls it."""
        ...


def hidden_share(waits: Iterable[Span], collectives: Sequence[Busy]) -> HiddenShare:
    """See the module's docstring."""
    by_lane: dict[str, list[Interval]] = {}
    for span in waits:
        if span.blocked_by_lane is not None and span.start_ns > span.wait_ns:
            by_lane.setdefault(span.blocked_by_lane, []).append((span.wait_ns, span.start_ns))
    inline_ns = sum(
        _length(busy.interval) + busy.skew_ns for busy in collectives if busy.on_compute_lane
    )
    waited_ns = sum(_length(wait) for waits_of_lane in by_lane.values() for wait in waits_of_lane)

    def share(lane: Lane) -> KindShare:
        return _kind_share(by_lane.get(lane, []), [b for b in collectives if b.lane is lane])

    return HiddenShare(
        a2a=share(Lane.COMM),
        ag=share(Lane.AG),
        rs=share(Lane.RS),
        compute_lane_s=(inline_ns + waited_ns) / NS_PER_S,
    )


def _kind_share(waits: Sequence[Interval], collectives: Sequence[Busy]) -> KindShare:
    aside = [busy.interval for busy in collectives if not busy.on_compute_lane]
    inline_ns = sum(_length(busy.interval) for busy in collectives if busy.on_compute_lane)
    return KindShare(
        busy_s=sum(_length(busy.interval) for busy in collectives) / NS_PER_S,
        waited_s=(inline_ns + _overlap_ns(waits, aside)) / NS_PER_S,
        skew_s=sum(busy.skew_ns for busy in collectives) / NS_PER_S,
        num_collectives=len(collectives),
    )


def _length(interval: Interval) -> int:
    return interval[1] - interval[0]


def _overlap_ns(first: Iterable[Interval], second: Iterable[Interval]) -> int:
    """Total length of the intersections; intervals within each list do not overlap."""
    ours, theirs = sorted(first), sorted(second)
    total_ns = i = j = 0
    while i < len(ours) and j < len(theirs):
        start = max(ours[i][0], theirs[j][0])
        end = min(ours[i][1], theirs[j][1])
        total_ns += max(0, end - start)
        if ours[i][1] <= theirs[j][1]:
            i += 1
        else:
            j += 1
    return total_ns


# ---- Chrome trace --------------------------------------------------------------------------

_LANES: Final = (Lane.COMP, Lane.COMM, Lane.AG, Lane.RS)
_CATEGORY: Final[Mapping[UnitOp, str]] = {
    UnitOp.UNSHARD: "gather",
    UnitOp.RESHARD: "release",
    UnitOp.REDUCE: "reduce",
}


@dataclass(kw_only=True)
class ChromeTrace:
    """Steps of one rank as Chrome trace events (``chrome://tracing``, Perfetto)."""

    rank: int
    origin_ns: int = field(default_factory=perf_counter_ns)
    """Time zero of the picture; the same on all ranks of a host."""
    events: list[dict[str, Any]] = field(default_factory=list)

    def add(self, trace: StepTrace, *, step: int) -> None:
        """Add a step's spans."""
        for span in trace.spans:
            if span.blocked_on is not None and span.start_ns > span.wait_ns:
                waited = (span.wait_ns, span.start_ns)
                name = f"wait for {span.blocked_on}"
                self._event(name, "wait", span.lane, waited, {"step": step})
            category, phase = _kind_of(span.word)
            if category is not None:
                ran = (span.start_ns, span.end_ns)
                self._event(span.word, category, span.lane, ran, {"step": step, "phase": phase})

    def _event(
        self, name: str, category: str, lane: str, interval: Interval, args: dict[str, Any]
    ) -> None:
        self.events.append(
            {
                "name": name,
                "cat": category,
                "ph": "X",
                "ts": (interval[0] - self.origin_ns) / NS_PER_US,
                "dur": _length(interval) / NS_PER_US,
                "pid": self.rank,
                "tid": _LANES.index(Lane(lane)),
                "args": args,
            }
        )

    def as_json(self) -> dict[str, Any]:
        """The rank's events, with the names of its rows."""
        names = [_name("process_name", self.rank, 0, f"rank {self.rank}")]
        names += [_name("thread_name", self.rank, i, str(lane)) for i, lane in enumerate(_LANES)]
        return {"traceEvents": names + self.events}


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _kind_of(word: str) -> tuple[str | None, str | None]:
    """Category and phase of a word; (None, None) for what is no action."""
    try:
        action = parse_action(word)
    except ValueError:
        return None, None
    match action:
        case Compute():
            category = "exchange" if action.lane is Lane.COMM else "compute"
            return category, str(action.phase)
        case UnitAction():
            return _CATEGORY[action.op], None
        case _:
            return None, None
