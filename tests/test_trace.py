import pytest

from ep_overlap.plan.action import Lane
from ep_overlap.run.trace import Busy, ChromeTrace, HiddenShare, StepTrace, hidden_share
from fsdp_hooks.streams import Span


def wait(start_ns: int, end_ns: int, lane: str = "comm") -> Span:
    return Span("comp", "0F.mlp.L0", start_ns, end_ns, end_ns + 10, "0F.dispatch.L0", lane)


def busy(
    start_ns: int,
    end_ns: int,
    *,
    lane: Lane | None = Lane.COMM,
    inline: bool = False,
    skew: int = 0,
) -> Busy:
    return Busy(lane=lane, on_compute_lane=inline, interval=(start_ns, end_ns), skew_ns=skew)


def test_communication_that_nobody_waits_for_is_hidden() -> None:
    assert hidden_share([], [busy(0, 100)]).a2a.hidden == 1.0


def test_a_wait_counts_only_where_it_meets_busy_time() -> None:
    # 60 ns of wait: 20 before the last rank had entered, 30 within, 10 after the end.
    share = hidden_share([wait(-20, 40)], [busy(0, 30, skew=25)])
    assert share.a2a.waited_s == pytest.approx(30e-9)
    assert share.a2a.hidden == 0.0
    assert share.a2a.skew_s == pytest.approx(25e-9)


def test_a_wait_is_charged_to_the_lane_that_ended_it_and_to_no_other() -> None:
    collectives = [busy(0, 100), busy(0, 100, lane=Lane.RS)]
    share = hidden_share([wait(50, 100)], collectives)
    assert share.a2a.hidden == pytest.approx(0.5)
    assert share.rs.hidden == 1.0


def test_a_wait_behind_two_queued_exchanges_is_charged_for_both() -> None:
    share = hidden_share([wait(0, 200)], [busy(0, 100), busy(100, 200)])
    assert share.a2a.hidden == 0.0


def test_a_collective_on_the_compute_lane_is_all_waited_for() -> None:
    share = hidden_share([], [busy(0, 100, inline=True, skew=7)])
    assert share.a2a.hidden == 0.0
    assert share.compute_lane_s == pytest.approx(107e-9)


def test_token_counts_take_compute_time_but_are_of_no_kind() -> None:
    share = hidden_share([], [busy(0, 50, lane=None, inline=True)])
    assert share.a2a.hidden is None
    assert share.compute_lane_s == pytest.approx(50e-9)


def test_steps_are_added_up_before_the_share_is_taken() -> None:
    first = hidden_share([wait(0, 100)], [busy(0, 100)])
    second = hidden_share([], [busy(0, 300)])
    assert HiddenShare.total([first, second]).a2a.hidden == pytest.approx(0.75)


def test_a_chrome_trace_holds_waits_and_actions_with_their_phase() -> None:
    trace = StepTrace()
    trace.on_span(wait(1000, 3000))
    trace.on_span(Span("ag", "UNSHARD.L0", 0, 0, 500))
    trace.on_span(Span("comp", "synchronize", 0, 0, 1))
    chrome = ChromeTrace(rank=1, origin_ns=0)
    chrome.add(trace, step=4)
    events = [event for event in chrome.as_json()["traceEvents"] if event["ph"] == "X"]
    assert [(e["name"], e["cat"], e["ts"], e["tid"], e["args"]) for e in events] == [
        ("wait for 0F.dispatch.L0", "wait", 1.0, 0, {"step": 4}),
        ("0F.mlp.L0", "compute", 3.0, 0, {"step": 4, "phase": "F"}),
        ("UNSHARD.L0", "gather", 0.0, 2, {"step": 4, "phase": None}),
    ]
