"""Test kit: record what ran, assert its order, run functions on warm ranks.

::

    with record() as recording:
        schedule.observe(recording)
        schedule.step(microbatches, loss_fn)
    assert_order(recording, "*F.attn.L0", "*F.dispatch.L0", "*F.mlp.L0")
    assert_never(recording, "RESHARD.root")

Patterns are those of ``fnmatch``. A failed assertion shows the log around the spot. For ranks, in a
``conftest.py``::

    ranks2 = pytest.fixture(scope="session")(testing.ranks2)

This file imports neither torch nor pytest.
"""

import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from ep_overlap.processes.ranks import RankError, RankPool, RankReport, RankState

__all__ = [
    "Event",
    "RankError",
    "RankPool",
    "RankReport",
    "RankState",
    "Recording",
    "assert_between",
    "assert_count",
    "assert_never",
    "assert_order",
    "ranks2",
    "ranks4",
    "record",
]

NUM_CONTEXT_EVENTS: Final = 5
"""Events shown before and after the spot of a failure."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened: an action's word, and the lane it ran on."""

    what: str
    lane: str | None = None


class Recording:
    """The events of a ``record()`` block, in order of arrival; thread-safe.

    It is a ``fsdp_hooks.streams.StreamObserver``: give it to ``OverlapSchedule.observe``, or to a
    stream or a sharded root, and it notes every action in the order of issue.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._open = True

    def add(self, word: str, lane: str | None = None) -> None:
        """Append an event. Ignored once the block has ended."""
        with self._lock:
            if self._open:
                self._events.append(Event(word, lane))

    def on_issue(self, lane: str, word: str) -> None:
        """An action was issued."""
        self.add(word, lane)

    def on_span(self, span: object) -> None:
        """An action was run; a recording keeps the order of issue alone."""

    def close(self) -> None:
        """Take no more events."""
        with self._lock:
            self._open = False

    @property
    def events(self) -> tuple[Event, ...]:
        """The events so far."""
        with self._lock:
            return tuple(self._events)

    @property
    def words(self) -> tuple[str, ...]:
        """The events' words."""
        return tuple(event.what for event in self.events)

    def on_lane(self, lane: str) -> tuple[str, ...]:
        """The words of one lane."""
        return tuple(event.what for event in self.events if event.lane == lane)


@contextmanager
def record() -> Generator[Recording]:
    """Give a ``Recording`` that takes events until the block ends."""
    recording = Recording()
    try:
        yield recording
    finally:
        recording.close()


# --- assertions on order ------------------------------------------------------------------------

Log = Recording | Sequence[str]
"""What the assertions read: a recording, or plain words."""


def assert_order(log: Log, *expected: str, contiguous: bool = False) -> None:
    """The expected patterns match events in this order, with any others in between.

    With ``contiguous``, they match events that follow one another directly.

    Raises:
        AssertionError: they do not; shows how far they matched.
    """
    _check_patterns(expected)
    events = _events(log)
    if contiguous:
        _assert_contiguous(events, expected)
        return
    marks: dict[int, str] = {}
    position = 0
    for num_found, pattern in enumerate(expected):
        found = next((i for i in range(position, len(events)) if _is(events[i], pattern)), None)
        if found is None:
            after = f" after {expected[num_found - 1]!r}" if num_found else ""
            earlier = [i for i in range(position) if _is(events[i], pattern)]
            seen = f"; it occurs only before, at {_numbers(earlier)}" if earlier else ""
            marks |= {i: f"too early: {pattern}" for i in earlier if i not in marks}
            raise AssertionError(
                f"expected {pattern!r}{after}, and it does not occur there{seen}\n"
                + _expectation(expected, num_found)
                + _excerpt(events, marks, [max(position - 1, 0), *earlier[-1:]])
            )
        marks[found] = f"matched {pattern}"
        position = found + 1


def assert_never(log: Log, pattern: str) -> None:
    """No event matches ``pattern``.

    Raises:
        AssertionError: some do; shows where.
    """
    assert_count(log, pattern, 0)


def assert_count(log: Log, pattern: str, count: int) -> None:
    """Exactly ``count`` events match ``pattern``.

    Raises:
        AssertionError: more or fewer do; shows where.
    """
    _check_patterns([pattern])
    events = _events(log)
    found = [i for i, event in enumerate(events) if _is(event, pattern)]
    if len(found) != count:
        wanted = "never" if count == 0 else f"{count} times"
        spots = found or [len(events) - 1]
        raise AssertionError(
            f"expected {pattern!r} {wanted}, found {len(found)}"
            f"{f', at {_numbers(found)}' if found else ''}\n"
            + _excerpt(events, dict.fromkeys(found, f"matches {pattern}"), spots)
        )


def assert_between(
    log: Log, word: str, *, after: str | None = None, before: str | None = None
) -> None:
    """``word`` occurs, and never outside of the window from ``after`` to ``before``.

    The window opens at the first event that matches ``after`` (without one: at the start) and
    closes at the first event behind it that matches ``before`` (without one: at the end). The two
    events themselves do not count as occurrences of ``word``.

    Raises:
        AssertionError: ``word`` or a bound does not occur, or ``word`` occurs outside.
    """
    patterns = [pattern for pattern in (word, after, before) if pattern is not None]
    if len(patterns) == 1:
        raise ValueError("assert_between needs after=, before= or both; got neither")
    _check_patterns(patterns)
    events = _events(log)
    marks: dict[int, str] = {}

    def bound(pattern: str, start: int, role: str) -> int:
        found = next((i for i in range(start, len(events)) if _is(events[i], pattern)), None)
        if found is None:
            spot = f" behind event {start - 1}" if start else ""
            raise AssertionError(
                f"the bound {role}={pattern!r} does not occur{spot}\n"
                + _excerpt(events, marks, [max(start - 1, 0)])
            )
        marks[found] = f"{role}={pattern}"
        return found

    opens = -1 if after is None else bound(after, 0, "after")
    closes = len(events) if before is None else bound(before, opens + 1, "before")
    found = [i for i, event in enumerate(events) if _is(event, word) and i not in (opens, closes)]
    outside = [i for i in found if not opens < i < closes]
    if outside or not found:
        marks |= {i: f"{'outside' if i in outside else 'inside'}: {word}" for i in found}
        window = " and ".join(
            f"{role} {pattern!r}"
            for role, pattern in (("after", after), ("before", before))
            if pattern is not None
        )
        problem = f"it occurs outside, at {_numbers(outside)}" if outside else "it does not occur"
        bounds = [i for i in (opens, closes) if 0 <= i < len(events)]
        raise AssertionError(
            f"expected {word!r} {window}, and {problem}\n"
            + _excerpt(events, marks, outside[:3] + bounds)
        )


def _check_patterns(patterns: Sequence[str]) -> None:
    if not patterns or not all(patterns):
        raise ValueError(f"expected at least one pattern and none of them empty, got {patterns}")


def _events(log: Log) -> Sequence[Event]:
    return log.events if isinstance(log, Recording) else [Event(word) for word in log]


def _is(event: Event, pattern: str) -> bool:
    return fnmatchcase(event.what, pattern)


def _numbers(positions: Sequence[int]) -> str:
    shown = ", ".join(map(str, positions[:8]))
    return shown if len(positions) <= 8 else f"{shown}, ..."


def _assert_contiguous(events: Sequence[Event], expected: Sequence[str]) -> None:
    """Report the start that matched furthest; of several, the first."""
    best_start, best_length = 0, 0
    for start in range(len(events)):
        length = 0
        while (
            length < len(expected)
            and start + length < len(events)
            and _is(events[start + length], expected[length])
        ):
            length += 1
        if length == len(expected):
            return
        if length > best_length:
            best_start, best_length = start, length
    marks = {best_start + i: f"matched {expected[i]}" for i in range(best_length)}
    stop = best_start + best_length
    if best_length and stop < len(events):
        marks[stop] = f"expected {expected[best_length]}"
    raise AssertionError(
        f"expected {len(expected)} events in direct succession, found at most {best_length}\n"
        + _expectation(expected, best_length)
        + _excerpt(events, marks, [stop])
    )


# --- what a failure shows -----------------------------------------------------------------------


def _expectation(expected: Sequence[str], num_found: int) -> str:
    """The expected patterns, one a line: found ones ticked, the first missing one pointed at."""
    lines = ["expected:"]
    for i, pattern in enumerate(expected):
        mark = "ok" if i < num_found else "->" if i == num_found else "  "
        lines.append(f"  {mark} {pattern}")
    return "\n".join(lines) + "\n"


def _excerpt(events: Sequence[Event], marks: dict[int, str], spots: Sequence[int]) -> str:
    """The log around the spots, as numbered lines; marked events point at their remark."""
    if not events:
        return "log: empty"
    shown = sorted(
        {
            i
            for spot in spots
            for i in range(spot - NUM_CONTEXT_EVENTS, spot + NUM_CONTEXT_EVENTS + 1)
            if 0 <= i < len(events)
        }
    )
    lane_width = max(len(events[i].lane or "") for i in shown)
    word_width = max(len(events[i].what) for i in shown)
    lines = [f"log ({len(events)} events):"]
    previous = -1
    for i in shown:
        if i != previous + 1:
            lines.append("       ...")
        lane = f"{events[i].lane or '':<{lane_width}}  " if lane_width else ""
        remark = f"  <- {marks[i]}" if i in marks else ""
        pointer = ">" if i in marks else " "
        lines.append(f" {pointer}{i:5d}  {lane}{events[i].what:<{word_width}}{remark}".rstrip())
        previous = i
    if previous != len(events) - 1:
        lines.append("       ...")
    return "\n".join(lines)


# --- pytest fixtures, to be decorated in a conftest.py ------------------------------------------


def ranks2() -> Iterator[RankPool]:
    """Two warm ranks; started by the first test that uses them."""
    with RankPool(2) as pool:
        yield pool


def ranks4() -> Iterator[RankPool]:
    """Four warm ranks; started by the first test that uses them."""
    with RankPool(4) as pool:
        yield pool
