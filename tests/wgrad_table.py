"""The table of weight gradients. ``python tests/wgrad_table.py`` prints it.

Every strategy, on two ranks and on four (two expert-parallel, two data-parallel), for both models;
three microbatches, two steps of SGD::

    plain             the standard path: gradients against one process
    overlap           bit for bit the standard path: losses, gradients, weights
    + delayed wgrad   bit for bit the standard path without delay; the standard path with delay, too
    + fusion          bit for bit the standard path with fusion; that against the one without
    both              bit for bit the standard path with fusion; the standard path with both, too

Fusion adds in another order, so it differs by rounding: errors are relative to the largest entry of
a gradient. megatron-core's model computes its router and loss in float32 whatever the dtype: it is
compared in float32.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final

import schedule_support as support
import torch
from parity_table import (
    FLOAT64_TOLERANCE,
    LAYOUTS,
    MEGATRON_TOLERANCE,
    Layout,
    lone,
    of_all_ranks,
    one_process,
)
from parity_table import error as worst_entry
from rich.console import Console
from rich.table import Table
from schedule_support import Case, Groups, unequal
from torch import Tensor
from wgrad_support import counted

from ep_overlap.schedule import OverlapSchedule
from ep_overlap.testing import RankPool
from fsdp_hooks.accumulation import microbatch
from fsdp_hooks.lifecycle import lifecycle_of
from fsdp_hooks.placement import STRATEGIES
from fsdp_hooks.wgrad_layers import delayed_wgrad, manage_wgrad

NUM_STEPS: Final = 2
FUSED_TOLERANCE: Final = {
    torch.float64: FLOAT64_TOLERANCE,
    torch.float32: MEGATRON_TOLERANCE,
    torch.bfloat16: 2e-2,
}
"""Fused against unfused, relative to a gradient's largest entry: the dtype's rounding, over a sum
of some dozen tokens' products and three microbatches."""
COLUMNS: Final = ("plain", "overlap", "+ delayed wgrad", "+ fusion", "both")

Steps = dict[str, Tensor]
"""By name: losses, gradients and weights of every step."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What was found for one case."""

    layout: str
    case: Case
    column: str
    differences: tuple[str, ...]
    """Between what must be bitwise equal; empty: it is."""
    error: float | None
    """Of the largest gradient's entry, where rounding may differ."""

    @property
    def tolerance(self) -> float:
        """For ``error``."""
        return FUSED_TOLERANCE[self.case.dtype]

    @property
    def is_right(self) -> bool:
        """Whether all comparisons hold."""
        return not self.differences and (self.error is None or self.error <= self.tolerance)


FLAT: Final = tuple(layout for layout in LAYOUTS if layout.hybrid is None)


def case_of(strategy: str, *, megatron: bool) -> Case:
    """Three layers, the one in the middle dense; megatron-core's with a shared expert in others."""
    return Case(
        strategy=strategy,
        layers=3,
        microbatches=3,
        freq=2,
        ep=2,
        dtype=torch.float32 if megatron else torch.float64,
        megatron=megatron,
        shared=megatron,
    )


def cells_of(
    layout: Layout, megatron: bool, strategies: Sequence[str] = tuple(STRATEGIES)
) -> list[Cell]:
    """Run in every rank of a pool of that many. Collective."""
    from ep_overlap.models.megatron_cpu import megatron_on_cpu

    groups = Groups()
    with megatron_on_cpu() if megatron else nullcontext():
        alone = one_process(lone(case_of("no_shard", megatron=megatron)))
        cells: list[Cell] = []
        for strategy in strategies:
            case = case_of(strategy, megatron=megatron)
            ours = of_all_ranks(case, groups, alone.routing)
            first = Cell(
                layout=layout.title,
                case=case,
                column=COLUMNS[0],
                differences=(),
                error=worst_entry(ours, alone.gradients),
            )
            cells += [first, *overlapped(layout.title, case, groups)]
    return cells


def overlapped(title: str, case: Case, groups: Groups) -> Iterator[Cell]:
    """The columns that have overlap, of one case. Collective."""
    plain = on_standard_path(case, groups)
    fused = on_standard_path(replace(case, fuse=True), groups)
    for column, delay, fuse in zip(
        COLUMNS[1:], (False, True) * 2, (False, False, True, True), strict=True
    ):
        flags = replace(case, delay=delay, fuse=fuse)
        expected = fused if fuse else plain
        found = unequal(under_schedule(flags, groups), expected)
        if delay:
            delayed = on_standard_path(flags, groups)
            found += [f"standard path: {name}" for name in unequal(delayed, expected)]
        yield Cell(
            layout=title,
            case=flags,
            column=column,
            differences=tuple(found),
            error=error_of_gradients(fused, plain) if fuse else None,
        )


# ---- training ------------------------------------------------------------------------------------


def under_schedule(case: Case, groups: Groups | None = None) -> Steps:
    """Train with overlap; a hook miss or something left behind is a difference, too."""
    parts = support.build(case, groups)
    schedule = OverlapSchedule(parts, case.config, stream_kind=case.kind)
    loss_fn = support.loss_of(case)

    def step(inputs: Sequence[Any]) -> list[Tensor]:
        return list(schedule.step(inputs, loss_fn).losses)

    seen = _trained(parts, case, step)
    left = support.not_at_rest(parts)
    if misses := lifecycle_of(parts.module).stats.hook_misses:
        left.append(f"{misses} hook misses")
    return seen | {what: torch.zeros(()) for what in left}


def on_standard_path(case: Case, groups: Groups | None = None) -> Steps:
    """Train by the module's own forward and one backward for each microbatch."""
    parts, loss_fn = support.build(case, groups), support.loss_of(case)
    if case.delay:
        manage_wgrad(parts.module, layer_types=parts.wgrad_layers)
    run = delayed_step if case.delay else support.standard_step
    return _trained(parts, case, lambda inputs: run(parts, inputs, loss_fn))


def delayed_step(parts: Any, inputs: Sequence[Any], loss_fn: Any) -> list[Tensor]:
    """As ``standard_step``, with a flush after each backward."""
    losses: list[Tensor] = []
    with delayed_wgrad(parts.module) as delayed:
        for index, batch in enumerate(inputs):
            with microbatch(parts.module, is_last=index == len(inputs) - 1):
                loss = loss_fn(parts.whole(batch), batch)
                losses.append(loss.detach())
                (loss / len(inputs)).backward()
                assert len(delayed), "no weight gradient was delayed"
                delayed.flush()
    return losses


def _trained(parts: Any, case: Case, run: Callable[[Sequence[Any]], list[Tensor]]) -> Steps:
    if not (case.delay or case.fuse):
        return _steps(parts, case, run)
    with counted(parts.module, fuse=case.fuse) as sink:
        seen = _steps(parts, case, run)
    # Flags that did nothing would be bitwise right, too.
    assert (sink.num_written > 0, sink.num_added > 0) == (case.fuse, not case.fuse)
    return seen


def _steps(parts: Any, case: Case, run: Callable[[Sequence[Any]], list[Tensor]]) -> Steps:
    optimizer = support.sgd(parts)
    seen: Steps = {}
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        losses = run(support.batches(parts, case, step))
        found = support.named(losses)
        found |= {f"gradient of {name}": grad for name, grad in support.gradients(parts).items()}
        optimizer.step()
        found |= {f"weight {name}": weight for name, weight in support.weights(parts).items()}
        seen |= {f"step {step}: {name}": tensor for name, tensor in found.items()}
    return seen


def error_of_gradients(ours: Steps, theirs: Steps) -> float:
    """The largest of the first step, relative to a gradient's largest entry. One that is zero, of
    an expert without rows, must be zero in both.

    After it the weights differ by rounding, and a token may go to another expert: the gradients of
    later steps are not to be compared (in bfloat16 they were apart by 0.15).
    """
    assert ours.keys() == theirs.keys()
    errors = [
        float((ours[name] - grad).abs().max() / grad.abs().max())
        for name, grad in theirs.items()
        if name.startswith("step 0: gradient of") and grad.any()
    ]
    assert not any(ours[name].any() for name, grad in theirs.items() if not grad.any())
    return max(errors)


# ---- the table -----------------------------------------------------------------------------------


def all_cells() -> list[Cell]:
    """Start the ranks and run everything; what any rank found."""
    cells: list[Cell] = []
    for layout in FLAT:
        with RankPool(layout.num_ranks) as pool:
            for megatron in (False, True):
                cells += worst_of_ranks(pool.run(cells_of, layout, megatron, timeout_s=200.0))
    return cells


def worst_of_ranks(by_rank: Sequence[Sequence[Cell]]) -> list[Cell]:
    """One cell of each case, with what any rank found."""
    return [
        replace(
            same[0],
            differences=tuple(dict.fromkeys(name for cell in same for name in cell.differences)),
            error=max((cell.error for cell in same if cell.error is not None), default=None),
        )
        for same in zip(*by_rank, strict=True)
    ]


_TITLE: Final = (
    "Bit for bit the standard path. Largest errors: plain against one process, fused against "
    f"unfused; at most {FLOAT64_TOLERANCE:.0e} (reference, float64), {MEGATRON_TOLERANCE:.0e} "
    "(megatron, float32)"
)

_WIDTH: Final = 120


def table(cells: Sequence[Cell]) -> Table:
    """One line for each model, layout and strategy."""
    shown = Table(title=_TITLE)
    for column in ("model", "ranks", "strategy", *COLUMNS):
        shown.add_column(column)
    rows: dict[tuple[str, ...], dict[str, Cell]] = {}
    for cell in cells:
        model = "megatron" if cell.case.megatron else "reference"
        key = (model, cell.layout.partition(" ")[0], str(cell.case.strategy))
        rows.setdefault(key, {})[cell.column] = cell
    for key, by_column in rows.items():
        shown.add_row(*key, *(_text(by_column[column]) for column in COLUMNS))
    return shown


def _text(cell: Cell) -> str:
    if cell.differences:
        return f"{len(cell.differences)} DIFFER: {', '.join(cell.differences[:3])}"
    words = [] if cell.column == COLUMNS[0] else ["bitwise"]
    if cell.error is not None:
        words.append(f"{cell.error:.0e}")
    return ", ".join(words) + ("" if cell.is_right else " WRONG")


if __name__ == "__main__":
    found = all_cells()
    Console(width=_WIDTH).print(table(found))  # whole words, in a file too
    raise SystemExit(any(not cell.is_right for cell in found))
