"""Prints actions as a grid: a column per lane, issue order from left to right and downwards.

::

       step  comp          comm              ag
          9  0F.attn.L2
         10  0F.mlp.L2     0F.combine.L2     UNSHARD.L1
    >    13  0B.mlp.L2
"""

from collections.abc import Sequence
from typing import Final

from ep_overlap.plan.action import Action, Lane
from ep_overlap.plan.plan import Plan

_COLUMNS: Final = (Lane.HOST, Lane.COMP, Lane.COMM, Lane.AG, Lane.RS)
_MARKER: Final = ">"
_GAP: Final = "  "


def grid(
    plan_or_actions: Plan | Sequence[Action], *, around: int | None = None, context: int = 6
) -> str:
    """The whole grid, or ``context`` steps to each side of step ``around``, which is marked.

    ``step`` is the index of the row's first action. Actions share a row only where reading from
    left to right is their issue order; the marked one has a row of its own.
    """
    title: list[str] = []
    actions = plan_or_actions
    if isinstance(actions, Plan):
        title = [actions.title, ""] if around is None else []
        actions = actions.actions
    used = {action.lane for action in actions}
    lanes = [lane for lane in _COLUMNS if lane in used]
    rows = _rows(actions, lanes, alone=around)
    shown = rows
    if around is not None:
        shown = [row for row in rows if row[-1] >= around - context and row[0] <= around + context]

    widths = [
        max(len(lane), *(len(str(action)) for action in actions if action.lane is lane))
        for lane in lanes
    ]
    step_width = max(len("step"), len(str(len(actions))))
    lines = [_line("", f"{'step':>{step_width}}", lanes, widths)]
    if shown and shown[0] != rows[0]:
        lines.append(_line("", f"{'...':>{step_width}}", (), ()))
    for row in shown:
        words = {actions[index].lane: str(actions[index]) for index in row}
        marker = _MARKER if row[0] == around else ""
        cells = [words.get(lane, "") for lane in lanes]
        lines.append(_line(marker, f"{row[0]:>{step_width}}", cells, widths))
    if shown and shown[-1] != rows[-1]:
        lines.append(_line("", f"{'...':>{step_width}}", (), ()))
    return "\n".join([*title, *lines]) + "\n"


def _rows(
    actions: Sequence[Action], lanes: Sequence[Lane], *, alone: int | None
) -> list[list[int]]:
    """Indices of each row's actions: lanes strictly from left to right within a row."""
    rows: list[list[int]] = []
    column_before = len(lanes)
    for index, action in enumerate(actions):
        column = lanes.index(action.lane)
        if column > column_before and alone not in (index, index - 1):
            rows[-1].append(index)
        else:
            rows.append([index])
        column_before = column
    return rows


def _line(marker: str, step: str, cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)]
    return _GAP.join([f"{marker:<1}", step, *padded]).rstrip()
