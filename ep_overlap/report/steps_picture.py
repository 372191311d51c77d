"""Draws the step times of several variants: a bar each, with what of it is compute alone.

::

    megatron standard      |######## compute ########|//// exposed ////|   1949 ms
    ours paired, delayed   |######## compute ########|//|                  1344 ms
"""

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

from ep_overlap.report.whole_file import write_whole

_COMPUTE, _EXPOSED, _EDGE = "#7fb2e5", "#ffffff", "#c0504d"
_INCHES_PER_BAR: Final = 0.45


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw the result of ``bench --against megatron``.

    Args:
        result: as its JSON has it.
        path: ``.png`` or ``.svg``.

    Raises:
        CannotWriteError: it cannot be written.
    """
    variants = result["variants"]
    compute_ms = result["compute_s"] * 1e3
    figure = Figure(figsize=(9, 1.6 + _INCHES_PER_BAR * len(variants)), layout="constrained")
    axes = figure.add_subplot()
    for row, variant in enumerate(variants.values()):
        step_ms = variant["step_time_s"] * 1e3
        inside_ms = min(compute_ms, step_ms)
        axes.barh(row, inside_ms, color=_COMPUTE, label="compute alone" if row == 0 else None)
        axes.barh(
            row,
            step_ms - inside_ms,
            left=inside_ms,
            color=_EXPOSED,
            edgecolor=_EDGE,
            hatch="///",
            label="more than that" if row == 0 else None,
        )
        share = variant["hidden_share"]
        hidden = "" if share is None else f", {share:.0%} hidden"
        axes.text(step_ms, row, f"  {step_ms:.0f} ms{hidden}", va="center", fontsize=9)
    axes.set_yticks(range(len(variants)), list(variants))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max(v["step_time_s"] for v in variants.values()) * 1e3)
    axes.set_xlabel("ms of a step")
    axes.set_title(f"{result['device']}, {result['world']}", fontsize=10)
    axes.legend(loc="lower right", fontsize=8)
    picture = BytesIO()
    figure.savefig(picture, format=path.suffix[1:])
    write_whole(path, picture.getvalue())
