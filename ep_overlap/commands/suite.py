"""``ep-overlap bench --suite multi-gpu``: what real GPUs and NCCL say, in one run of ten minutes.

On ``--nproc`` ranks, each with a GPU of its own where there are enough::

    parity    every strategy x overlap, delayed, fused, both; reference model, GPTModel of local and
              of Transformer Engine's layers: against the same training without overlap
    overlap   gathers and reductions under GEMMs, by the profiler         (a GPU for each rank)
    steps     megatron-core's schedules and ours, alternating; hidden share, host time, peak memory
    sharded   the same over its FSDP v1 and our fully_shard

Each part's table is printed when the part is done. Without a GPU for each rank it runs to its end
over gloo, with small sizes, and says what it left out.
"""

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Final

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ep_overlap.commands import bench_megatron
from ep_overlap.commands.arguments import (
    BenchArguments,
    ModelFlags,
    ModelName,
    OptimizerName,
    TransformerImpl,
)
from ep_overlap.commands.bench_megatron_models import fsdp_environment
from ep_overlap.commands.data import ByteBatches, load_bytes
from ep_overlap.commands.measured_world import RealWorld
from ep_overlap.commands.parity import Baseline, Parity
from ep_overlap.commands.results import write_json
from ep_overlap.commands.running import own_command, running
from ep_overlap.commands.trainee import Recipe, ScheduledStep, StandardStep, build_trainee
from ep_overlap.commands.world import Meshes, World, choose_device, open_world
from ep_overlap.config import OverlapConfig
from ep_overlap.plan.lower import Strategy
from ep_overlap.processes.launch import launch
from ep_overlap.report.overlap_proof import profiled_overlaps
from ep_overlap.report.steps_picture import draw
from fsdp_hooks.placement import STRATEGIES

NUM_STEPS: Final = 2
NUM_MICROBATCHES: Final = 3
SEQ_LENGTH: Final = 64
COLUMNS: Final = {
    "overlap": (False, False),
    "+ delayed wgrad": (True, False),
    "+ fusion": (False, True),
    "both": (True, True),
}
"""Whether weight gradients are delayed, and whether they are fused."""

FULL_SIZES: Final = {
    "num_layers": 4,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_query_groups": 4,
    "kv_channels": 128,
    "moe_router_topk": 8,
    "moe_ffn_hidden_size": 768,
    "seq_length": 4096,
    "micro_batch_size": 8,
    "num_microbatches": 8,
    "vocab_size": 16384,
}
"""Of the timed GPTModel: layers like Qwen3-30B-A3B's, as one of eight ranks has them."""
NUM_LOCAL_EXPERTS: Final = 16
SMALL_SIZES: Final = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "moe_ffn_hidden_size": 96,
    "seq_length": 64,
    "micro_batch_size": 2,
    "num_microbatches": 3,
}
NUM_SMALL_EXPERTS: Final = 8


@dataclass(frozen=True, kw_only=True)
class ParityModel:
    """One that parity is shown for."""

    title: str
    name: ModelName
    impl: TransformerImpl = TransformerImpl.LOCAL
    bf16: bool = False


MODELS: Final = (
    ParityModel(title="reference, float32", name=ModelName.REFERENCE),
    ParityModel(title="GPTModel, local layers, float32", name=ModelName.MEGATRON),
    ParityModel(
        title="GPTModel, Transformer Engine, bf16",
        name=ModelName.MEGATRON,
        impl=TransformerImpl.TRANSFORMER_ENGINE,
        bf16=True,
    ),
)


def run(args: BenchArguments) -> int:
    """Be a rank, or start the ranks. Returns 0; 1 if something is not as it must be.

    Raises:
        ValueError: ``--device cuda`` without a GPU; megatron-core is not installed.
    """
    if "RANK" not in os.environ:
        choose_device(args.device)
        return launch(own_command(), nproc=args.nproc)
    args = replace(args, emulate="none")
    with (
        open_world(args.device, speed=None) as world,
        fsdp_environment(_sharded(args), world.device),
        bench_megatron.environment(world.device),
    ):
        console = Console(quiet=world.rank != 0)
        result: dict[str, Any] = {"num_ranks": world.size}
        with running():
            for part in _parts(args, world):
                result |= part
                for table in tables(result["num_ranks"], part):
                    console.print(table)
        if world.rank == 0:
            write_json(args.json, result)
            if args.plot is not None:
                draw(result["steps"], args.plot)
    return 0 if result["is_right"] else 1


def _parts(args: BenchArguments, world: World) -> Iterator[dict[str, Any]]:
    is_gpu = world.device.type == "cuda"
    has_te = is_gpu and find_spec("transformer_engine") is not None
    models = [model for model in MODELS if has_te or model.impl is TransformerImpl.LOCAL]
    parity = parity_of(models, tuple(STRATEGIES), world)
    yield {"parity": parity}
    left_out: list[str] = []
    if not has_te:
        left_out.append("Transformer Engine's layers: they need it, and a GPU")
    has_gpu_each = is_gpu and torch.cuda.device_count() >= world.size
    are_all_there = True
    if has_gpu_each and world.size > 1:
        found = profiled_overlaps(Meshes.of(world, world.size).dense)
        overlaps = {str(step + 1): str(overlap) for step, overlap in found.items()}
        mine = all(overlap.are_all_there for overlap in found.values())
        are_all_there = all(world.gathered(mine))
        yield {"overlaps": overlaps}
    else:
        left_out.append("the profiler's proof of overlap: it needs a GPU for each rank")
    if not has_gpu_each:
        left_out.append("steps of full size: they need a GPU for each rank")
    gc.collect()  # the proof's model: what is measured next must not be freed in its place
    sizes = timed_sizes(args, num_ranks=world.size, has_gpu_each=has_gpu_each, has_te=has_te)
    yield {"steps": bench_megatron.measure(sizes, RealWorld(world))}
    gc.collect()  # its models
    yield {"sharded": bench_megatron.measure(_sharded(sizes), RealWorld(world))}
    is_right = all(cell == Parity.BITWISE for row in parity.values() for cell in row.values())
    yield {"left_out": left_out, "is_right": is_right and are_all_there}


def timed_sizes(
    args: BenchArguments, *, num_ranks: int, has_gpu_each: bool, has_te: bool
) -> BenchArguments:
    """What is timed: on every machine of a kind the same, whatever other flags say. Ranks that
    share a GPU exchange over gloo, for which full sizes are gigabytes."""
    return replace(
        BenchArguments(emulate="none", device=args.device, rounds=args.rounds),
        **(FULL_SIZES if has_gpu_each else SMALL_SIZES),
        num_experts=NUM_LOCAL_EXPERTS * num_ranks if has_gpu_each else NUM_SMALL_EXPERTS,
        transformer_impl=TransformerImpl.TRANSFORMER_ENGINE if has_te else TransformerImpl.LOCAL,
    )


def _sharded(args: BenchArguments) -> BenchArguments:
    return replace(args, data_parallel_sharding_strategy=Strategy.OPTIM_GRADS_PARAMS)


# ---- parity --------------------------------------------------------------------------------------


def parity_of(
    models: Sequence[ParityModel], strategies: Sequence[str], world: World
) -> dict[str, dict[str, str]]:
    """By model and strategy, and by column. Collective; within ``bench_megatron.environment``."""
    # Communicators are made once: models run one after another.
    world = replace(world, reusable={})
    meshes = Meshes.of(world, _expert_parallel_size(world))
    cells = [(m, strategy, column) for m in models for strategy in strategies for column in COLUMNS]
    rows: dict[str, dict[str, str]] = {}
    console = Console(stderr=True, quiet=world.rank != 0)
    for model, strategy, column in track(
        cells, description="parity", console=console, transient=True
    ):
        row = rows.setdefault(f"{model.title}, {strategy}", {})
        row[column] = _cell(model, strategy, column, world, meshes)
    return rows


def _cell(model: ParityModel, strategy: str, column: str, world: World, meshes: Meshes) -> Parity:
    delay, fuse = COLUMNS[column]
    recipe = Recipe(
        model=model.name,
        sizes=ModelFlags(num_layers=3, hidden_size=64, moe_ffn_hidden_size=96, moe_layer_freq=2),
        seq_length=SEQ_LENGTH,
        seed=1234,
        expert_parallel_size=_expert_parallel_size(world),
        strategy=strategy,
        optimizer=OptimizerName.ADAMW,
        lr=1e-3,
        transformer_impl=model.impl,
        bf16=model.bf16,
        fuse_wgrad=fuse,
    )
    ours, theirs = build_trainee(recipe, world, meshes), build_trainee(recipe, world, meshes)
    config = OverlapConfig(num_microbatches=NUM_MICROBATCHES, delay_wgrad=delay)
    stepper = ScheduledStep(ours, config, world)
    baseline = Baseline(ours, theirs, StandardStep(theirs, NUM_MICROBATCHES, world), world)
    for pairs in _batches(world):
        ours.optimizer.zero_grad()
        losses = stepper.step([ours.make_batch(*pair) for pair in pairs]).losses
        baseline.step(pairs, losses)
        ours.optimizer.step()
        baseline.after_update()
    assert baseline.difference is not None, "there are batches"
    parity = baseline.difference.parity
    del ours, theirs, stepper, baseline
    gc.collect()  # their streams' threads with them
    return parity


def _expert_parallel_size(world: World) -> int:
    """2, so that four ranks and more share experts' weights too."""
    return 2 if world.size % 2 == 0 else world.size


def _batches(world: World) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    data = ByteBatches(
        tokens=load_bytes(None),
        seq_length=SEQ_LENGTH,
        micro_batch_size=2,
        seed=1234,
        rank=world.rank,
        num_ranks=world.size,
    )
    for step in range(NUM_STEPS):
        pairs = data.microbatches(step, NUM_MICROBATCHES)
        yield [(tokens.to(world.device), targets.to(world.device)) for tokens, targets in pairs]


# ---- for people ----------------------------------------------------------------------------------


def tables(num_ranks: int, part: Mapping[str, Any]) -> Iterator[Table]:
    """Those of one part of the result."""
    if "parity" in part:
        shown = Table(
            title=f"against the same training without overlap, {num_ranks} ranks, "
            f"{NUM_STEPS} steps: losses, gradients, weights"
        )
        for column in ("model, strategy", *COLUMNS):
            shown.add_column(column)
        for title, row in part["parity"].items():
            shown.add_row(title, *(row[column] for column in COLUMNS))
        yield shown
    if "overlaps" in part:
        shown = Table(title="under GEMMs, by the profiler")
        shown.add_column("step")
        shown.add_column("found")
        for step, found in part["overlaps"].items():
            shown.add_row(step, str(found))
        yield shown
    for name in ("steps", "sharded"):
        if name in part:
            yield bench_megatron.table(part[name])
    if part.get("left_out"):
        shown = Table(title="left out")
        shown.add_column("what, and why")
        for what in part["left_out"]:
            shown.add_row(what)
        yield shown
