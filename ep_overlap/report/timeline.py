"""Draws one step of a trace: a row for each lane of each rank, a bar for each action.

::

    rank 0  comp  | 2F.attn.L0 | 1B.mlp.L1 |//////| 2F.mlp.L0 |     //// exposed communication
            comm  |1B.comb.L1| | 2F.disp.L0      | ...

PNG and SVG are sized for a page; HTML embeds an SVG wide enough to write the words along their
bars, and scrolls.
"""

import html
import io
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from ep_overlap.report.trace_file import WAIT, Span, Trace, exposed_us
from ep_overlap.report.whole_file import write_whole

FORMATS: Final = (".png", ".svg", ".html")

EXPOSED: Final = "exposed communication"

COLOURS: Final = MappingProxyType(
    {
        "F": "#7fb2e5",
        "B": "#f2b36b",
        "W": "#8fcf9b",
        "R": "#d9d26a",
        "gather": "#b79ad9",
        "release": "#c9ccd3",
        "reduce": "#d98fb5",
        "other": "#e3ded5",
        EXPOSED: "#ffffff",
    }
)
"""Fill of each kind of bar. The order is that of the legend."""

MEANINGS: Final = MappingProxyType(
    {
        "F": "forward",
        "B": "backward",
        "W": "weight gradient",
        "R": "recompute",
        "gather": "unit gather",
        "release": "unit release",
        "reduce": "unit reduce",
        "other": "other",
        EXPOSED: EXPOSED,
    }
)
"""What the legend says of each kind."""

_RED: Final = "#c62828"
_FONT_POINTS: Final = 6.0
_CHAR_INCHES: Final = 0.602 * _FONT_POINTS / 72
"""Advance of DejaVu Sans Mono, matplotlib's own monospaced font: whether a word fits is exact."""
_BAR_INCHES: Final = 0.78
"""Height of a bar: room for ``12F.dispatch.L3`` set upright."""
_ROW_INCHES: Final = 0.86
_THIN_INCHES: Final = 0.03
_RANK_GAP_INCHES: Final = 0.3
_MARGIN_LEFT, _MARGIN_RIGHT, _MARGIN_TOP, _MARGIN_BOTTOM = 1.25, 0.25, 0.9, 0.6
_PAGE_INCHES: Final = 18.0
_WIDEST_INCHES: Final = 160.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """The bars of one lane of one rank, times in us from the step's start."""

    rank: int
    lane: str
    bars: tuple[Span, ...]


def rows_of(trace: Trace, spans: Sequence[Span]) -> tuple[Row, ...]:
    """Rows of a window: by rank, then in the trace's order of lanes; lanes without bars left out.

    Waits of other lanes than ``comp`` are no work and hide nothing: they stay blank.
    """
    shown = [span for span in spans if span.category != WAIT or span.is_exposed]
    rows = (
        Row(
            rank=rank,
            lane=lane,
            bars=tuple(span for span in shown if (span.rank, span.lane) == (rank, lane)),
        )
        for rank in sorted({span.rank for span in shown})
        for lane in trace.lanes
    )
    return tuple(row for row in rows if row.bars)


def kind_of(span: Span) -> str:
    """The key of ``COLOURS`` and ``MEANINGS`` that a bar is drawn with."""
    if span.is_exposed:
        return EXPOSED
    if span.category in ("gather", "release", "reduce"):
        return span.category
    return span.phase if span.phase in ("F", "B", "W", "R") else "other"


def title_of(spans: Sequence[Span]) -> str:
    """The step, the window, and the exposed communication of each rank (of all, above four)."""
    start_us, end_us = _extent_us(spans)
    sums = exposed_us(spans)
    if len(sums) > 4:
        low, high = min(sums.values()), max(sums.values())
        shares = f"{low / 1e3:.2f} to {high / 1e3:.2f} ms over {len(sums)} ranks"
    else:
        shares = ", ".join(
            f"{waited / 1e3:.2f} ms ({waited / (end_us - start_us):.0%}) on rank {rank}"
            for rank, waited in sums.items()
        )
    window = f"{start_us / 1e3:.2f} to {end_us / 1e3:.2f} ms"
    return f"step {spans[0].step}, {window}; {EXPOSED} {shares}"


def draw(trace: Trace, spans: Sequence[Span], width_inches: float = _PAGE_INCHES) -> Figure:
    """Draw the spans that ``trace.window`` returned."""
    rows = rows_of(trace, spans)
    tops = _row_tops(rows)
    height = tops[-1] + _ROW_INCHES
    total = height + _MARGIN_TOP + _MARGIN_BOTTOM
    figure = Figure(figsize=(width_inches, total))
    plot_inches = width_inches - _MARGIN_LEFT - _MARGIN_RIGHT
    axes = figure.add_axes(
        (
            _MARGIN_LEFT / width_inches,
            _MARGIN_BOTTOM / total,
            plot_inches / width_inches,
            height / total,
        )
    )
    start_us, end_us = _extent_us(spans)
    axes.set_xlim(start_us / 1e3, end_us / 1e3)
    axes.set_ylim(height, 0.0)  # the y unit is an inch, downward
    inches_per_ms = plot_inches / (end_us - start_us) * 1e3
    for row, top in zip(rows, tops, strict=True):
        for span in row.bars:
            _draw_bar(axes, span, top, inches_per_ms)
    _label_axes(axes, rows, tops, plot_inches)
    _label_figure(figure, spans, total)
    return figure


def save(trace: Trace, spans: Sequence[Span], path: Path) -> None:
    """Write the picture; the suffix chooses the format (``FORMATS``).

    Raises:
        ValueError: another suffix.
        CannotWriteError: it cannot be written.
    """
    if path.suffix not in FORMATS:
        raise ValueError(f"-o {path}: expected a name ending in {', '.join(FORMATS)}")
    if path.suffix == ".html":
        write_whole(path, _page(trace, spans))
    elif path.suffix == ".svg":
        write_whole(path, _svg(draw(trace, spans)))
    else:
        picture = io.BytesIO()
        draw(trace, spans).savefig(picture, format=path.suffix[1:], dpi=160)
        write_whole(path, picture.getvalue())


def _extent_us(spans: Sequence[Span]) -> tuple[float, float]:
    return min(span.start_us for span in spans), max(span.end_us for span in spans)


def _row_tops(rows: Sequence[Row]) -> list[float]:
    """Inches from the top of the plot to each row; ranks stand a gap apart."""
    tops = [0.0]
    for above, below in pairwise(rows):
        gap = _RANK_GAP_INCHES if above.rank != below.rank else 0.0
        tops.append(tops[-1] + _ROW_INCHES + gap)
    return tops


def _draw_bar(axes: Axes, span: Span, top: float, inches_per_ms: float) -> None:
    kind = kind_of(span)
    is_thin = span.duration_us / 1e3 * inches_per_ms < _THIN_INCHES
    if kind == EXPOSED:
        edge = _RED
    else:
        edge = COLOURS[kind] if is_thin else "#ffffff"  # white would cover a thin bar
    bar = Rectangle(
        (span.start_us / 1e3, top + (_ROW_INCHES - _BAR_INCHES) / 2),
        span.duration_us / 1e3,
        _BAR_INCHES,
        facecolor=COLOURS[kind],
        edgecolor=edge,
        linewidth=0.5,
        hatch="//////" if kind == EXPOSED else None,
        gid=span.word,
    )
    axes.add_patch(bar)
    rotation = None if kind == EXPOSED else _text_rotation(span, inches_per_ms)
    if rotation is not None:
        axes.text(
            (span.start_us + span.end_us) / 2e3,
            top + _ROW_INCHES / 2,
            span.word,
            rotation=rotation,
            rotation_mode="anchor",
            ha="center",
            va="center_baseline",
            fontsize=_FONT_POINTS,
            family=["DejaVu Sans Mono", "monospace"],
            color="#1f2933",
        )


def _text_rotation(span: Span, inches_per_ms: float) -> int | None:
    """0 where the word fits along its bar, 90 where it fits across, None where it does not."""
    bar_inches = span.duration_us / 1e3 * inches_per_ms
    word_inches = len(span.word) * _CHAR_INCHES
    if word_inches + _CHAR_INCHES <= bar_inches:
        return 0
    if word_inches <= _BAR_INCHES and bar_inches >= 1.2 * _FONT_POINTS / 72:
        return 90
    return None


def _label_axes(axes: Axes, rows: Sequence[Row], tops: Sequence[float], plot_inches: float) -> None:
    axes.set_yticks([top + _ROW_INCHES / 2 for top in tops], [row.lane for row in rows])
    axes.tick_params(axis="y", length=0, labelsize=10)
    axes.tick_params(axis="x", labelsize=9, color="#9aa5b1")
    axes.set_xlabel("ms from the start of the step", fontsize=10)
    axes.grid(axis="x", color="#e4e7eb", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#9aa5b1")
    inches_to_axes = axes.get_yaxis_transform()
    for rank in sorted({row.rank for row in rows}):
        of_rank = [top for row, top in zip(rows, tops, strict=True) if row.rank == rank]
        axes.text(
            -0.72 / plot_inches,
            (of_rank[0] + of_rank[-1] + _ROW_INCHES) / 2,
            f"rank {rank}",
            transform=inches_to_axes,
            rotation=90,
            ha="center",
            va="center",
            fontsize=11,
            fontweight="bold",
        )


def _label_figure(figure: Figure, spans: Sequence[Span], total_inches: float) -> None:
    width = figure.get_figwidth()
    kinds = {kind_of(span) for span in spans if span.category != WAIT or span.is_exposed}
    handles = [
        Patch(
            facecolor=COLOURS[kind],
            edgecolor=_RED if kind == EXPOSED else COLOURS[kind],
            hatch="//////" if kind == EXPOSED else None,
            label=MEANINGS[kind],
        )
        for kind in COLOURS
        if kind in kinds
    ]
    left = _MARGIN_LEFT / width
    figure.text(left, 1 - 0.35 / total_inches, title_of(spans), fontsize=13, fontweight="bold")
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(left, 1 - 0.45 / total_inches),
        borderaxespad=0.0,
        borderpad=0.2,
        ncols=len(handles),
        frameon=False,
        fontsize=10,
        handlelength=1.6,
        columnspacing=1.6,
    )


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    # Text stays text (searchable, small); fixed ids and no date: the same trace, the same file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ep-overlap"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _page(trace: Trace, spans: Sequence[Span]) -> str:
    """A page without outside references."""
    bars = [span for row in rows_of(trace, spans) for span in row.bars if not span.is_exposed]
    start_us, end_us = _extent_us(spans)
    length_us = end_us - start_us
    typical_us = statistics.median([span.duration_us for span in bars]) if bars else length_us
    wanted = 15 * _CHAR_INCHES * length_us / max(typical_us, 1e-9)
    svg = _svg(draw(trace, spans, width_inches=min(max(wanted, _PAGE_INCHES), _WIDEST_INCHES)))
    title = html.escape(title_of(spans))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        "<style>body{margin:1rem;font-family:sans-serif}"
        "h1{font-size:1.1rem}.scroll{overflow-x:auto}</style></head>\n"
        f'<body><h1>{title}</h1>\n<div class="scroll">{svg[svg.index("<svg") :]}</div>\n'
        "</body></html>\n"
    )
