"""``ep-overlap bench --sharding``: our standard path and torch's FSDP2, alternating in one process.

Two dense models from one seed, sharded block by block, learn the same text on the same ranks. A
round is a step of each: forward, backward, optimizer, zero_grad. They take turns at going first.
Both are as they come: FSDP2 with its own defaults, ours with ``optim_grads_params``, which is what
those do. A last backward of each, not timed, finds gradient norms and FSDP2's memory.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final, final

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard

from ep_overlap.commands.arguments import BenchArguments
from ep_overlap.commands.dense import STRATEGY, build_dense, loss_of, optimizer_of, shard_dense
from ep_overlap.commands.results import write_json
from ep_overlap.commands.running import RunFailedError, batches_of, running
from ep_overlap.commands.world import Meshes, World, local_part, open_world
from ep_overlap.models.dense import DenseTransformer
from ep_overlap.report.fsdp2_peak import GatheredBytes
from fsdp_hooks.lifecycle import ShardedModule, lifecycle_of
from fsdp_hooks.optimizer import shard_optimizer

OURS: Final = "ours"
FSDP2: Final = "fsdp2"
NUM_WARMUP_ROUNDS: Final = 2
TOLERANCE: Final = 1e-5
"""Relative, of a loss in float32: how far two right results may be apart."""

_MIB: Final = 2**20


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """One step of one variant on this rank."""

    step_time_s: float
    """Of the slowest rank; the phases are this rank's own."""
    forward_s: float
    backward_s: float
    optimizer_s: float
    loss: float
    """Mean of ranks."""


@final
@dataclass(frozen=True, kw_only=True)
class _Variant:
    """A sharded model, its optimizer, and its timed steps."""

    model: DenseTransformer
    optimizer: torch.optim.Optimizer
    samples: list[_Sample] = field(default_factory=list)


def run(args: BenchArguments) -> int:
    """Be a rank of it. Returns the exit status.

    Raises:
        RunFailedError: the two do not compute the same losses.
    """
    with open_world(args.device, speed=None) as world:
        bench = _Bench(args, world)
        with running():
            for number in track(
                range(NUM_WARMUP_ROUNDS + args.rounds),
                description=f"{OURS} and {FSDP2}",
                console=Console(stderr=True, quiet=world.rank != 0),
                transient=True,
            ):
                bench.round(number)
            result = bench.result()
        if world.rank == 0:
            Console().print(table(result))
            write_json(args.json, result)
    return 0


@final
class _Bench:
    """Both variants on this rank."""

    def __init__(self, args: BenchArguments, world: World) -> None:
        self._args = args
        self._world = world
        self._data = batches_of(args, world)
        mesh = Meshes.of(world, world.size).dense
        self._variants = {
            OURS: _build(args, world, lambda model: shard_dense(model, mesh)),
            FSDP2: _build(args, world, lambda model: _shard_fsdp2(model, mesh)),
        }

    def round(self, number: int) -> None:
        """One step of each variant, on the same data."""
        batch = self._batch(number)
        variants = list(self._variants.values())
        for variant in variants if number % 2 == 0 else reversed(variants):
            sample = self._sample(variant, batch)
            if number >= NUM_WARMUP_ROUNDS:
                variant.samples.append(sample)

    def _batch(self, number: int) -> tuple[Tensor, Tensor]:
        ((tokens, targets),) = self._data.microbatches(number, 1)
        return tokens.to(self._world.device), targets.to(self._world.device)

    def _sample(self, variant: _Variant, batch: tuple[Tensor, Tensor]) -> _Sample:
        world = self._world
        world.gathered(None)  # start together: what comes before is no part of the step
        start_s = self._world.now_s()
        loss = loss_of(variant.model, *batch)
        forward_done_s = self._world.now_s()
        loss.backward()
        backward_done_s = self._world.now_s()
        variant.optimizer.step()
        variant.optimizer.zero_grad()
        end_s = self._world.now_s()
        (mean_loss,) = world.mean([loss.item()])
        return _Sample(
            step_time_s=max(world.gathered(end_s - start_s)),
            forward_s=forward_done_s - start_s,
            backward_s=backward_done_s - forward_done_s,
            optimizer_s=end_s - backward_done_s,
            loss=mean_loss,
        )

    def result(self) -> dict[str, Any]:
        """What was found, as JSON has it. Collective; takes one more backward of each.

        Raises:
            RunFailedError: losses or gradient norms differ by more than rounding.
        """
        batch = self._batch(NUM_WARMUP_ROUNDS + self._args.rounds)
        norms = {OURS: self._grad_norm(OURS, batch)}
        with GatheredBytes() as fsdp2_bytes:
            norms[FSDP2] = self._grad_norm(FSDP2, batch)
        ours, theirs = (self._variants[name].samples for name in (OURS, FSDP2))
        largest = check_same_work(
            [*(sample.loss for sample in ours), norms[OURS]],
            [*(sample.loss for sample in theirs), norms[FSDP2]],
        )
        ratios = [a.step_time_s / b.step_time_s for a, b in zip(ours, theirs, strict=True)]
        stats = lifecycle_of(self._variants[OURS].model).stats
        variants = {
            OURS: {
                **_times(ours),
                "peak_unsharded_bytes": stats.peak_unsharded_bytes,
                "peak_buffer_bytes": 0,
                "grad_norm": norms[OURS],
            },
            FSDP2: {
                **_times(theirs),
                "peak_unsharded_bytes": fsdp2_bytes.peak_bytes,
                "peak_buffer_bytes": fsdp2_bytes.peak_buffer_bytes,
                "grad_norm": norms[FSDP2],
            },
        }
        return {
            "device": self._world.device.type,
            "link": self._args.link_in_use,
            "num_ranks": self._world.size,
            "num_blocks": self._args.num_blocks,
            "num_parameters": sum(p.numel() for p in self._variants[OURS].model.parameters()),
            "strategy": STRATEGY,
            "rounds": self._args.rounds,
            "variants": variants,
            "ratio": variants[OURS]["step_time_s"] / variants[FSDP2]["step_time_s"],
            "ratio_of_rounds": [min(ratios), median(ratios), max(ratios)],
            "largest_difference": largest,
        }

    def _grad_norm(self, name: str, batch: tuple[Tensor, Tensor]) -> float:
        """Of one more forward and backward. Collective."""
        variant = self._variants[name]
        loss_of(variant.model, *batch).backward()
        grads = [param.grad for param in variant.model.parameters()]
        squares = (local_part(g).double().square().sum() for g in grads if g is not None)
        (mean_square,) = self._world.mean([float(sum(squares))])
        variant.optimizer.zero_grad()
        return math.sqrt(mean_square * self._world.size)


def _build(
    args: BenchArguments, world: World, shard: Callable[[DenseTransformer], None]
) -> _Variant:
    model = build_dense(args, world.device)
    shard(model)
    optimizer = optimizer_of(args, model)
    return _Variant(
        model=model,
        optimizer=shard_optimizer(optimizer) if isinstance(model, ShardedModule) else optimizer,
    )


def _shard_fsdp2(model: DenseTransformer, mesh: DeviceMesh) -> None:
    for block in model.layers:
        fsdp2_fully_shard(block, mesh=mesh)
    fsdp2_fully_shard(model, mesh=mesh)


def check_same_work(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Losses and gradient norms of both, in one order. Returns their largest relative difference.

    Raises:
        RunFailedError: it is more than rounding, or not a number.
    """
    differences = [abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)]
    for difference in differences:
        if not difference <= TOLERANCE:  # so that nan is caught
            raise RunFailedError(
                f"ours and FSDP2 differ by {difference:.1e} of a loss or gradient norm, expected "
                f"{TOLERANCE:.0e} at most: their times are of different work"
            )
    return max(differences)


def _times(samples: Sequence[_Sample]) -> dict[str, float]:
    return {
        "step_time_s": median(sample.step_time_s for sample in samples),
        "forward_s": median(sample.forward_s for sample in samples),
        "backward_s": median(sample.backward_s for sample in samples),
        "optimizer_s": median(sample.optimizer_s for sample in samples),
        "first_loss": samples[0].loss,
        "last_loss": samples[-1].loss,
    }


def table(result: Mapping[str, Any]) -> Table:
    """The result for people."""
    lowest, _, highest = result["ratio_of_rounds"]
    shown = Table(
        title=f"dense, {result['num_blocks']} blocks, {result['num_parameters'] / 1e6:.1f}M "
        f"parameters, {result['num_ranks']} ranks, {result['device']}, {result['link']} link, "
        f"{result['strategy']}, median of {result['rounds']} rounds",
        caption=f"{lowest:.2f}x to {highest:.2f}x in single rounds; losses and gradient norms are "
        f"apart by {result['largest_difference']:.0e} at most; peak: of gathered parameters, those "
        "in gather buffers with them",
    )
    shown.add_column("sharding", no_wrap=True)
    phases = ("forward", "backward", "optimizer")
    for column in ("step\nms", "of\nfsdp2", *(f"{phase}\nms" for phase in phases)):
        shown.add_column(column, justify="right", no_wrap=True)
    for column in ("peak\nMiB", "buffers\nMiB"):
        shown.add_column(column, justify="right", no_wrap=True)
    fsdp2_s = result["variants"][FSDP2]["step_time_s"]
    for name, variant in result["variants"].items():
        shown.add_row(
            name,
            f"{variant['step_time_s'] * 1e3:.0f}",
            f"{variant['step_time_s'] / fsdp2_s:.2f}x",
            *(f"{variant[f'{phase}_s'] * 1e3:.0f}" for phase in phases),
            f"{variant['peak_unsharded_bytes'] / _MIB:.1f}",
            f"{variant['peak_buffer_bytes'] / _MIB:.1f}",
        )
    return shown
