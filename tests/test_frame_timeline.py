"""The timeline: what is read of a trace, what is drawn of it, and that the sums are true."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import traces
from matplotlib.patches import Rectangle

from ep_overlap.cli import main
from ep_overlap.report import timeline
from ep_overlap.report.timeline import EXPOSED, Row, draw, kind_of, rows_of, title_of
from ep_overlap.report.trace_file import Span, exposed_us, parse_trace, read_trace


def small() -> Mapping[str, object]:
    """Two ranks, one step: rank 0 waits 2 ms, rank 1 waits 1 ms of which 0.5 ms after 6 ms."""
    events = [
        traces.span("0F.attn.L0", "compute", "comp", 1000, 3000, phase="F"),
        traces.span("0F.dispatch.L0", "exchange", "comm", 4000, 2000, phase="F"),
        traces.span("0F.dispatch.L0", "wait", "comp", 4000, 2000, phase="F"),
        traces.span("0B.mlp.L0", "compute", "comp", 6000, 4000, phase="B"),
        traces.span("UNSHARD.L1", "gather", "ag", 1500, 1000),
        traces.span("0F.attn.L0", "wait", "comm", 1000, 3000, phase="F"),
        traces.span("0F.attn.L0", "compute", "comp", 1000, 5500, phase="F", rank=1),
        traces.span("0F.dispatch.L0", "wait", "comp", 6500, 1000, phase="F", rank=1),
        traces.span("REDUCE.L0", "reduce", "rs", 8000, 3000, rank=1),
    ]
    return traces.trace(events, num_ranks=2)


def words(row: Row) -> list[str]:
    return [bar.word for bar in row.bars]


def test_rows_are_the_lanes_of_each_rank_that_did_something() -> None:
    trace = parse_trace(small())
    rows = rows_of(trace, trace.window(None))
    assert [(row.rank, row.lane) for row in rows] == [
        (0, "comp"),
        (0, "comm"),
        (0, "ag"),
        (1, "comp"),
        (1, "rs"),
    ]
    assert words(rows[0]) == ["0F.attn.L0", "0F.dispatch.L0", "0B.mlp.L0"]
    assert words(rows[1]) == ["0F.dispatch.L0"]  # the comm lane's own wait is no work


def test_times_start_with_the_step() -> None:
    first, *_, last = parse_trace(small()).window(None)
    assert (first.start_us, first.end_us) == (0.0, 3000.0)
    assert (last.word, last.start_us, last.end_us) == ("REDUCE.L0", 7000.0, 10000.0)


def test_exposed_is_what_the_comp_lane_waits() -> None:
    trace = parse_trace(small())
    assert exposed_us(trace.window(None)) == {0: 2000.0, 1: 1000.0}
    assert title_of(trace.window(None)) == (
        "step 0, 0.00 to 10.00 ms; exposed communication "
        "2.00 ms (20%) on rank 0, 1.00 ms (10%) on rank 1"
    )


def test_a_window_cuts_bars_and_waits_at_its_edges() -> None:
    spans = parse_trace(small()).window(None, start_ms=4.0, end_ms=6.0)
    assert exposed_us(spans) == {0: 1000.0, 1: 500.0}
    assert min(span.start_us for span in spans) == 4000.0
    assert max(span.end_us for span in spans) == 6000.0
    assert "UNSHARD.L1" not in {span.word for span in spans}


def test_nothing_hidden_reads_as_all_exposed() -> None:
    events = traces.serial_step(num_layers=2, num_microbatches=3, exchange_us=200.0)
    trace = parse_trace(traces.trace(events))
    assert exposed_us(trace.window(None)) == {0: 3 * 2 * 4 * 200.0}


@pytest.mark.parametrize(
    ("word", "category", "lane", "phase", "kind"),
    [
        ("0F.attn.L0", "compute", "comp", "F", "F"),
        ("0B.combine.L0", "exchange", "comm", "B", "B"),
        ("0W.mlp.L0", "compute", "comp", "W", "W"),
        ("UNSHARD.L0", "gather", "ag", "", "gather"),
        ("RESHARD.L0", "release", "ag", "", "release"),
        ("REDUCE.L0", "reduce", "rs", "", "reduce"),
        ("0F.combine.L0", "wait", "comp", "F", EXPOSED),
        ("0SYNC.L0", "sync", "comp", "", "other"),
    ],
)
def test_a_bar_is_coloured_by_phase_or_unit_action(
    word: str, category: str, lane: str, phase: str, kind: str
) -> None:
    span = Span(
        word=word,
        category=category,
        phase=phase,
        rank=0,
        lane=lane,
        step=0,
        start_us=0.0,
        end_us=1.0,
    )
    assert kind_of(span) == kind
    assert kind in timeline.COLOURS
    assert kind in timeline.MEANINGS


def test_the_picture_has_a_bar_for_each_span_at_its_place() -> None:
    trace = parse_trace(small())
    figure = draw(trace, trace.window(None))
    (axes,) = figure.axes
    bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    drawn = sorted((bar.get_x(), bar.get_width(), bool(bar.get_hatch())) for bar in bars)
    assert drawn == [
        (0.0, 3.0, False),  # 0F.attn.L0, rank 0
        (0.0, 5.5, False),  # 0F.attn.L0, rank 1
        (0.5, 1.0, False),  # UNSHARD.L1
        (3.0, 2.0, False),  # 0F.dispatch.L0 on comm
        (3.0, 2.0, True),  # and the wait for it on comp
        (5.0, 4.0, False),  # 0B.mlp.L0
        (5.5, 1.0, True),
        (7.0, 3.0, False),
    ]
    assert axes.get_xlim() == (0.0, 10.0)
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "comp",
        "comm",
        "ag",
        "comp",
        "rs",
    ]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "forward",
        "backward",
        "unit gather",
        "unit reduce",
        "exposed communication",
    ]


def test_a_bar_carries_its_word_only_where_it_fits() -> None:
    events = [
        traces.span("0F.attn.L0", "compute", "comp", 0, 10_000, phase="F"),
        traces.span("0F.mlp.L0", "compute", "comp", 10_000, 200, phase="F"),
        traces.span("0B.mlp.L0", "compute", "comp", 10_200, 5, phase="B"),
    ]
    trace = parse_trace(traces.trace(events))
    (axes,) = draw(trace, trace.window(None)).axes
    along = {text.get_text(): text.get_rotation() for text in axes.texts}
    assert along == {"0F.attn.L0": 0.0, "0F.mlp.L0": 90.0, "rank 0": 90.0}


def test_the_step_that_was_cut_off_is_not_the_default() -> None:
    whole = [
        event
        for step in range(2)
        for event in traces.serial_step(
            num_layers=1, num_microbatches=1, step=step, start_us=step * 1e6
        )
    ]
    cut = traces.serial_step(num_layers=1, num_microbatches=1, step=2, start_us=2e6)[:3]
    trace = parse_trace(traces.trace([*whole, *cut]))
    assert trace.steps == (0, 1, 2)
    assert trace.last_whole_step() == 1
    assert {span.step for span in trace.window(None)} == {1}
    assert {span.step for span in trace.window(2)} == {2}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "expected JSON, got"),
        ("[]", 'expected an object with a list "traceEvents"'),
        ('{"traceEvents": 3}', 'expected an object with a list "traceEvents"'),
        ('{"traceEvents": [3]}', 'expected every entry of "traceEvents" to be an object'),
        ('{"traceEvents": []}', "no events"),
        ('{"traceEvents": [{"ph": "X", "name": "a"}]}', "expected an integer as 'pid'"),
        ('{"traceEvents": [{"ph": "X", "args": 1}]}', "expected an object as 'args'"),
        (
            '{"traceEvents": [{"ph": "X", "pid": 0, "tid": 0, "ts": "x", "dur": 1}]}',
            "expected a number as 'ts', got 'x'",
        ),
        (
            '{"traceEvents": [{"ph": "X", "pid": 0, "tid": 0, "ts": NaN, "dur": 1}]}',
            "expected a number as 'ts', got nan",
        ),
        (
            f'{{"traceEvents": [{{"ph": "X", "pid": 0, "tid": 0, "ts": 1, "dur": {10**400}}}]}}',
            "expected a number as 'dur', got 1000",
        ),
        ('{"traceEvents": [{"ph": "X", "pid": true}]}', "expected an integer as 'pid', got True"),
        ("[" * 200_000, "expected JSON, got"),
        (
            '{"traceEvents": [{"ph": "X", "pid": 0, "tid": 0, "ts": 1, "dur": -2}]}',
            "expected 0 or more as 'dur', got -2",
        ),
    ],
)
def test_a_file_that_is_no_trace_is_refused_in_one_line(
    tmp_path: Path, content: str, problem: str
) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"^trace .*trace\.json: ") as caught:
        read_trace(path)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_step_or_window_without_events_is_refused() -> None:
    trace = parse_trace(small())
    with pytest.raises(ValueError, match=r"^no step 7 in the trace; it has step 0$"):
        trace.window(7)
    with pytest.raises(ValueError, match=r"nothing happens between 50 and 60 ms of step 0; it tak"):
        trace.window(0, start_ms=50, end_ms=60)


@pytest.mark.parametrize(
    ("name", "start"),
    [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.html", b"<!doctype html>")],
)
def test_the_command_writes_each_format(tmp_path: Path, name: str, start: bytes) -> None:
    path, result = tmp_path / "trace.json", tmp_path / "result.json"
    path.write_text(json.dumps(small()))
    picture = tmp_path / name
    assert main(["timeline", str(path), "-o", str(picture), "--json", str(result)]) == 0
    assert picture.read_bytes().startswith(start)
    assert json.loads(result.read_text()) == {
        "step": 0,
        "num_spans": 9,
        "start_ms": 0.0,
        "end_ms": 10.0,
        "exposed_ms": {"0": 2.0, "1": 1.0},
    }


def test_a_page_holds_its_words_and_refers_to_nothing_outside(tmp_path: Path) -> None:
    trace = parse_trace(small())
    page = tmp_path / "a.html"
    timeline.save(trace, trace.window(None), page)
    text = page.read_text()
    assert text.count("0F.attn.L0</text>") == 2
    assert "exposed communication 2.00 ms (20%) on rank 0" in text
    assert "<script" not in text
    assert 'src="' not in text
    assert 'href="http' not in text


def test_the_same_trace_gives_the_same_file(tmp_path: Path) -> None:
    trace = parse_trace(small())
    for name in ("a.svg", "b.svg"):
        timeline.save(trace, trace.window(None), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_another_suffix_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(small()))
    assert main(["timeline", str(path), "-o", str(tmp_path / "a.pdf")]) == 2
    assert "expected a name ending in .png, .svg, .html\n" in capsys.readouterr().err
