"""The parity table of the sharding core. ``python tests/parity_table.py`` prints it.

Every strategy, on two ranks, four ranks (two expert-parallel, two data-parallel) and four ranks in
hybrid sharding, with one to three microbatches, reduced each or at the end::

    overlap against the standard path    bit for bit: losses, gradients, weights, over two steps
    gradients against one process        float64, relative to the tensor's largest entry
    a strategy against ``no_shard``      the same

megatron-core's model computes its router and loss in float32 whatever the dtype: it is compared in
float32, with the routing of every token asserted equal.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import schedule_support as support
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from schedule_support import Case, Groups
from torch import Tensor, nn

from ep_overlap.testing import RankPool
from fsdp_hooks.lifecycle import lifecycle_of
from fsdp_hooks.placement import STRATEGIES
from fsdp_hooks.root import FsdpRoot

FLOAT64_TOLERANCE = 1e-12
MEGATRON_TOLERANCE = 2e-6
"""float32. Both relative to the largest entry of a tensor."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many ranks there are, and how they share a model."""

    title: str
    num_ranks: int
    hybrid: str | None = None


LAYOUTS = (
    Layout(title="2 ranks: EP2", num_ranks=2),
    Layout(title="4 ranks: EP2 x DP2", num_ranks=4),
    Layout(title="4 ranks: hybrid", num_ranks=4, hybrid="no_shard"),
    Layout(title="4 ranks: hybrid, optimizer over both", num_ranks=4, hybrid="optim"),
)
MICROBATCHES = (1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What was found for one case."""

    layout: str
    case: Case
    differences: tuple[str, ...]
    """Between overlap and the standard path; empty: bitwise equal."""
    from_one_process: float
    from_no_shard: float
    """Largest errors of any gradient's entry."""

    @property
    def is_right(self) -> bool:
        """Whether all three comparisons hold."""
        tolerance = MEGATRON_TOLERANCE if self.case.megatron else FLOAT64_TOLERANCE
        worst = max(self.from_one_process, self.from_no_shard)
        return not self.differences and worst <= tolerance


def cases_of(layout: Layout, *, megatron: bool) -> Iterator[Case]:
    """Every case of a layout; ``no_shard`` first, which the others are compared with."""
    microbatches = (2,) if megatron else MICROBATCHES
    reduced_each = (True,) if megatron else (True, False)
    for num, each, strategy in product(microbatches, reduced_each, STRATEGIES):
        if strategy == "no_shard" and layout.hybrid == "optim":
            continue  # refused: there is nothing to share out
        yield Case(
            strategy=strategy,
            order="paired",
            layers=2,
            microbatches=num,
            freq=2 if num == 3 else 1,
            ep=2,
            dtype=torch.float32 if megatron else torch.float64,
            hybrid=layout.hybrid,
            reduce_each=each,
            megatron=megatron,
        )


def cells_of(layouts: Sequence[Layout], megatron: bool) -> list[Cell]:
    """Run in every rank of a pool: all cases of layouts of that many ranks. Collective."""
    from ep_overlap.models.megatron_cpu import megatron_on_cpu

    groups = Groups()
    cells: list[Cell] = []
    with megatron_on_cpu() if megatron else nullcontext():
        expected = {case: one_process(case) for case in _lone_cases(layouts, megatron=megatron)}
        replicated: dict[tuple[int, bool | None], dict[str, Tensor]] = {}
        for layout in layouts:
            for case in cases_of(layout, megatron=megatron):
                found = support.differences(case, groups=groups)
                ours = of_all_ranks(case, groups, expected[lone(case)].routing)
                key = (case.microbatches, case.reduce_each)
                if case.strategy == "no_shard":
                    replicated[key] = ours
                cells.append(
                    Cell(
                        layout=layout.title,
                        case=case,
                        differences=tuple(found),
                        from_one_process=error(ours, expected[lone(case)].gradients),
                        from_no_shard=error(ours, replicated[key]),
                    )
                )
    return cells


# ---- one process ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Expected:
    """A step of one process over the batches of all ranks."""

    gradients: dict[str, Tensor]
    routing: list[Tensor] | None
    """Of each router's call, rank by rank; megatron-core's alone."""


def lone(case: Case) -> Case:
    return replace(case, strategy=None, hybrid=None, reduce_each=None, ep=1)


def _lone_cases(layouts: Sequence[Layout], *, megatron: bool) -> set[Case]:
    return {lone(case) for layout in layouts for case in cases_of(layout, megatron=megatron)}


def one_process(case: Case) -> _Expected:
    parts, loss_fn, num_ranks = support.build(case), support.loss_of(case), dist.get_world_size()
    routing = _recorded_routing(parts) if case.megatron else None
    for rank in range(num_ranks):
        for batch in support.batches(parts, case, 0, rank=rank):
            loss = loss_fn(parts.whole(batch), batch)
            (loss / (num_ranks * case.microbatches)).backward()
    names = _global_names(parts, case)
    gradients = {names[name]: grad for name, grad in support.gradients(parts).items()}
    return _Expected(gradients=gradients, routing=routing)


def _recorded_routing(parts: Any) -> list[Tensor]:
    """Filled with ``[tokens, experts]`` bool by each router's call."""
    from megatron.core.transformer.moe.router import TopKRouter

    seen: list[Tensor] = []
    for module in parts.module.modules():
        if isinstance(module, TopKRouter):
            module.register_forward_hook(lambda m, args, output: seen.append(output[1].bool()))
    return seen


def _global_names(parts: Any, case: Case) -> dict[str, str]:
    names = [name for name, _ in parts.module.named_parameters()]
    if not case.megatron:
        return {name: name for name in names}
    from ep_overlap.models.megatron_build import global_name

    return {name: global_name(parts.module, name) for name in names}


# ---- all ranks -----------------------------------------------------------------------------------


def of_all_ranks(
    case: Case, groups: Groups, expected_routing: list[Tensor] | None
) -> dict[str, Tensor]:
    """Gradients of a standard step, whole, by global name. Collective."""
    parts = support.build(case, groups)
    names = _global_names(parts, case)
    routing = _recorded_routing(parts) if expected_routing is not None else None
    support.standard_step(parts, support.batches(parts, case, 0), support.loss_of(case))
    if routing is not None and expected_routing is not None:
        own = slice(dist.get_rank() * len(routing), (dist.get_rank() + 1) * len(routing))
        pairs = zip(routing, expected_routing[own], strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs), "tokens went elsewhere"
    mine = {names[name]: piece for name, piece in _own_pieces(parts.module)}
    everyone: list[dict[str, tuple[int, Tensor]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    pieces: dict[str, dict[int, Tensor]] = {}
    for held in everyone:
        for name, (first, rows) in held.items():
            if rows.shape[0]:
                pieces.setdefault(name, {})[first] = rows
    return {name: torch.cat([rows[i] for i in sorted(rows)]) for name, rows in pieces.items()}


def _own_pieces(module: nn.Module) -> Iterator[tuple[str, tuple[int, Tensor]]]:
    """``(name, (first row, gradient's rows))`` of what this rank counts for."""
    root = lifecycle_of(module)
    assert isinstance(root, FsdpRoot)
    for unit in root.units:
        prefix = "" if unit.module is module else f"{unit.name}."
        for group in unit.groups:
            for index, (slot, param) in enumerate(
                zip(group.slots, group.sharded_params, strict=True)
            ):
                if group.is_primary and param.grad is not None:
                    rows = param.grad.to_local().clone()
                    yield f"{prefix}{slot.name}", (group.rows(index)[0], rows)


def error(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(
        float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in theirs
    )


# ---- the table -----------------------------------------------------------------------------------


def all_cells() -> list[Cell]:
    """Start the ranks and run everything; the largest errors of any rank."""
    cells: list[Cell] = []
    for num_ranks in (2, 4):
        layouts = [layout for layout in LAYOUTS if layout.num_ranks == num_ranks]
        with RankPool(num_ranks) as pool:
            for megatron in (False, True):
                cells += worst_of_ranks(pool.run(cells_of, layouts, megatron, timeout_s=400.0))
    return cells


def worst_of_ranks(by_rank: Sequence[Sequence[Cell]]) -> list[Cell]:
    """One cell of each case, with what any rank found."""
    return [
        replace(
            same[0],
            differences=tuple(name for cell in same for name in cell.differences),
            from_one_process=max(cell.from_one_process for cell in same),
            from_no_shard=max(cell.from_no_shard for cell in same),
        )
        for same in zip(*by_rank, strict=True)
    ]


def table(cells: Sequence[Cell]) -> Table:
    """One line for each model, layout, strategy and way to reduce."""
    shown = Table(title="overlap against standard path; largest error against one process")
    for column in ("model", "ranks", "strategy", "reduced"):
        shown.add_column(column)
    for num in MICROBATCHES:
        shown.add_column(f"{num} microbatch{'es'[: 2 * (num > 1)]}")
    rows: dict[tuple[str, ...], dict[int, Cell]] = {}
    for cell in cells:
        model = "megatron, float32" if cell.case.megatron else "reference, float64"
        reduced = "each" if cell.case.reduce_each else "at the end"
        key = (model, cell.layout, str(cell.case.strategy), reduced)
        rows.setdefault(key, {})[cell.case.microbatches] = cell
    for key, by_num in sorted(rows.items()):
        shown.add_row(*key, *(_text(by_num.get(num)) for num in MICROBATCHES))
    return shown


def _text(cell: Cell | None) -> str:
    if cell is None:
        return ""
    equal = "bitwise" if not cell.differences else f"{len(cell.differences)} DIFFER"
    return f"{equal}, {cell.from_one_process:.0e}{'' if cell.is_right else ' WRONG'}"


if __name__ == "__main__":
    Console().print(table(all_cells()))
