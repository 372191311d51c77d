"""Sample Chrome traces, as a run writes them, with known exposed communication."""

from collections.abc import Iterable

LANES = ("comp", "comm", "ag", "rs")

Event = dict[str, object]


def span(
    word: str,
    category: str,
    lane: str,
    start_us: float,
    dur_us: float,
    *,
    phase: str = "",
    rank: int = 0,
    step: int = 0,
) -> Event:
    """A complete event."""
    return {
        "name": word,
        "cat": category,
        "ph": "X",
        "ts": start_us,
        "dur": dur_us,
        "pid": rank,
        "tid": LANES.index(lane),
        "args": {"step": step, "phase": phase},
    }


def trace(events: Iterable[Event], num_ranks: int = 1) -> dict[str, list[Event]]:
    """The file's content: lane names, then the events."""
    named: list[Event] = [
        {
            "name": "thread_name",
            "ph": "M",
            "pid": rank,
            "tid": tid,
            "args": {"name": lane},
        }
        for rank in range(num_ranks)
        for tid, lane in enumerate(LANES)
    ]
    return {"traceEvents": [*named, *events]}


def serial_step(
    *,
    num_layers: int,
    num_microbatches: int,
    rank: int = 0,
    step: int = 0,
    start_us: float = 0.0,
    compute_us: float = 300.0,
    exchange_us: float = 200.0,
) -> list[Event]:
    """Nothing overlaps but gathers and reductions: every exchange is exposed in full.

    Exposed: ``num_microbatches * num_layers * 4 * exchange_us``.
    """
    events: list[Event] = []
    now_us = start_us
    place = {"rank": rank, "step": step}

    def compute(word: str, phase: str) -> None:
        nonlocal now_us
        events.append(span(word, "compute", "comp", now_us, compute_us, phase=phase, **place))
        now_us += compute_us

    def exchange(word: str, phase: str) -> None:
        nonlocal now_us
        events.append(span(word, "exchange", "comm", now_us, exchange_us, phase=phase, **place))
        events.append(span(word, "wait", "comp", now_us, exchange_us, phase=phase, **place))
        now_us += exchange_us

    for microbatch in range(num_microbatches):
        for layer in range(num_layers):
            events.append(
                span(f"UNSHARD.L{layer}", "gather", "ag", now_us, compute_us / 2, **place)
            )
            compute(f"{microbatch}F.attn.L{layer}", "F")
            exchange(f"{microbatch}F.dispatch.L{layer}", "F")
            compute(f"{microbatch}F.mlp.L{layer}", "F")
            exchange(f"{microbatch}F.combine.L{layer}", "F")
            events.append(span(f"RESHARD.L{layer}", "release", "ag", now_us - 20.0, 20.0, **place))
        for layer in reversed(range(num_layers)):
            exchange(f"{microbatch}B.combine.L{layer}", "B")
            compute(f"{microbatch}B.mlp.L{layer}", "B")
            exchange(f"{microbatch}B.dispatch.L{layer}", "B")
            compute(f"{microbatch}W.mlp.L{layer}", "W")
            compute(f"{microbatch}B.attn.L{layer}", "B")
            events.append(span(f"REDUCE.L{layer}", "reduce", "rs", now_us, compute_us, **place))
    return events
