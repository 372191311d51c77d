"""Reads a Chrome trace of a run: spans in lanes of ranks, steps, and exposed communication.

The file is what ``chrome://tracing`` and Perfetto open: ``{"traceEvents": [...]}``. A span is a
complete event (``"ph": "X"``) with ``name`` (the action's word), ``cat``, ``ts`` and ``dur`` in
us, ``pid`` (the rank), ``tid`` (the lane's number) and ``args`` (``step``, ``phase``). Metadata
events (``"ph": "M"``) name the lanes.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, cast

WAIT: Final = "wait"
"""The category of spans in which a lane waits for another: on ``comp``, exposed communication."""

COMP: Final = "comp"
"""The lane whose waits are exposed communication."""

_LONGEST_US: Final = 1e18
"""Of a time that is believed: 30,000 years. A float holds it, and the sum of two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One event of the trace."""

    word: str
    category: str
    phase: str
    """``F``, ``B``, ``W``, ``R``, or the word's own kind where it has no phase."""
    rank: int
    lane: str
    step: int
    start_us: float
    end_us: float

    @property
    def duration_us(self) -> float:
        """How long it took."""
        return self.end_us - self.start_us

    @property
    def is_exposed(self) -> bool:
        """Whether compute stood still here."""
        return self.category == WAIT and self.lane == COMP


@dataclass(frozen=True, kw_only=True)
class Trace:
    """All spans of a file, in order of start."""

    spans: tuple[Span, ...]
    lanes: tuple[str, ...]
    """Lane names in order of their numbers."""

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that occur, ascending."""
        return tuple(sorted({span.step for span in self.spans}))

    def last_whole_step(self) -> int:
        """The last step with as many compute spans as any: a run may end within a step."""
        counts = Counter(span.step for span in self.spans if span.category == "compute")
        if not counts:
            return self.steps[-1]
        most = max(counts.values())
        return max(step for step, count in counts.items() if count == most)

    def window(
        self, step: int | None, start_ms: float = 0.0, end_ms: float | None = None
    ) -> tuple[Span, ...]:
        """Spans of a step (None: the last whole one), times from the step's start, cut to a window.

        Raises:
            ValueError: the trace has no such step, or nothing happens in the window.
        """
        chosen = self.last_whole_step() if step is None else step
        of_step = [span for span in self.spans if span.step == chosen]
        if not of_step:
            raise ValueError(f"no step {chosen} in the trace; it has {_ranges(self.steps)}")
        origin_us = min(span.start_us for span in of_step)
        last_us = max(span.end_us for span in of_step) - origin_us
        low_us, high_us = start_ms * 1e3, last_us if end_ms is None else end_ms * 1e3
        cut = tuple(
            replace(
                span,
                start_us=max(span.start_us - origin_us, low_us),
                end_us=min(span.end_us - origin_us, high_us),
            )
            for span in of_step
            if span.start_us - origin_us < high_us and span.end_us - origin_us > low_us
        )
        if not cut:
            raise ValueError(
                f"nothing happens between {low_us / 1e3:g} and {high_us / 1e3:g} ms of step "
                f"{chosen}; it takes {last_us / 1e3:.3f} ms"
            )
        return cut


def exposed_us(spans: Iterable[Span]) -> dict[int, float]:
    """Exposed communication of each rank that has spans."""
    sums: defaultdict[int, float] = defaultdict(float)
    for span in spans:
        sums[span.rank] += span.duration_us if span.is_exposed else 0.0
    return dict(sorted(sums.items()))


def read_trace(path: Path) -> Trace:
    """Read a trace.

    Raises:
        ValueError: no such file, not JSON, not a trace, or no spans in it.
    """
    try:
        content: object = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"trace {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"trace {path}: expected JSON, got: {error}") from error
    try:
        return parse_trace(content)
    except ValueError as error:
        raise ValueError(f"trace {path}: {error}") from error


def parse_trace(content: object) -> Trace:
    """Make a ``Trace`` of decoded JSON; raises ValueError as ``read_trace``."""
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise ValueError('expected an object with a list "traceEvents"')
    events = cast("list[Mapping[str, object]]", content["traceEvents"])
    if not all(isinstance(event, dict) for event in events):
        raise ValueError('expected every entry of "traceEvents" to be an object')
    names = _lane_names(events)
    spans = sorted(
        (_span(event, names) for event in events if event.get("ph") == "X"),
        key=lambda span: (span.start_us, span.end_us),
    )
    if not spans:
        raise ValueError('no events: expected some with "ph": "X"')
    used = {span.lane for span in spans}
    lanes = dict.fromkeys(names[key] for key in sorted(names) if names[key] in used)
    lanes |= dict.fromkeys(sorted(used - lanes.keys()))
    return Trace(spans=tuple(spans), lanes=tuple(lanes))


def _lane_names(events: Iterable[Mapping[str, object]]) -> dict[tuple[int, int], str]:
    """Lane names by (lane number, rank), so that sorting goes by lane number."""
    names: dict[tuple[int, int], str] = {}
    for event in events:
        if event.get("ph") == "M" and event.get("name") == "thread_name":
            names[_integer(event, "tid"), _integer(event, "pid")] = str(_args(event).get("name"))
    return names


def _span(event: Mapping[str, object], names: Mapping[tuple[int, int], str]) -> Span:
    args = _args(event)
    word = str(event.get("name"))
    rank, tid = _integer(event, "pid"), _integer(event, "tid")
    start_us, duration_us = _number(event, "ts"), _number(event, "dur")
    if duration_us < 0:
        raise ValueError(f"expected 0 or more as 'dur', got {duration_us:g} in {dict(event)}")
    return Span(
        word=word,
        category=str(event.get("cat", "")),
        phase=str(args.get("phase", "")),
        rank=rank,
        lane=names.get((tid, rank), f"lane {tid}"),
        step=_integer(args, "step"),
        start_us=start_us,
        end_us=start_us + duration_us,
    )


def _args(event: Mapping[str, object]) -> Mapping[str, object]:
    args = event.get("args", {})
    if not isinstance(args, dict):
        raise ValueError(f"expected an object as 'args', got {args!r} in {dict(event)}")
    return cast("Mapping[str, object]", args)


def _number(event: Mapping[str, object], key: str) -> float:
    value = event.get(key)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not abs(value) <= _LONGEST_US  # nor is NaN
    ):
        raise ValueError(f"expected a number as {key!r}, got {value!r} in {dict(event)}")
    return float(value)


def _integer(event: Mapping[str, object], key: str) -> int:
    value = event.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"expected an integer as {key!r}, got {value!r} in {dict(event)}")
    return value


def _ranges(steps: tuple[int, ...]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
