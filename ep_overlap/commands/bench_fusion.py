"""``ep-overlap bench --wgrad-fusion``: fused against separate weight gradients, alternating.

Two dense models from one seed learn the same text on the standard path, sharded block by block
with ``optim_grads_params``. In one of them weight gradients are written straight into the input of
the reduction. A round is a step of each: two or more microbatches, optimizer, ``zero_grad``. They
take turns at going first.

It is one rank, on one device, of an emulated world: collectives copy their bytes locally and take
no link time, so gradients are right for a world in which no other rank has any.
"""

import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any, Final, final

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ep_overlap.commands.arguments import BenchArguments, TransformerImpl
from ep_overlap.commands.data import ByteBatches, load_bytes
from ep_overlap.commands.dense import STRATEGY, build_dense, loss_of, optimizer_of, shard_dense
from ep_overlap.commands.results import write_json
from ep_overlap.commands.running import RunFailedError, running
from ep_overlap.commands.world import choose_device, local_part
from ep_overlap.links.emulated import register_emulated_backend
from ep_overlap.links.emulated_speed import EmulatedLinks
from ep_overlap.models.dense import DenseTransformer
from fsdp_hooks.accumulation import microbatch
from fsdp_hooks.optimizer import shard_optimizer
from fsdp_hooks.precision import MixedPrecision
from fsdp_hooks.wgrad_layers import manage_wgrad

SEPARATE: Final = "separate"
FUSED: Final = "fused"
NUM_RANKS: Final = 8
NUM_WARMUP_ROUNDS: Final = 3
TOLERANCE: Final = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""How far the gradients of a parameter may be apart, relative to their norm."""

_GIB: Final = 2**30


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """One step of one variant."""

    step_time_s: float
    peak_bytes: int
    """The most that was allocated over what the step began with; 0 on CPU, where nobody counts."""
    end_bytes: int
    """What it left allocated over what it began with."""


@final
@dataclass(frozen=True, kw_only=True)
class _Variant:
    """A sharded model, its optimizer, and its timed steps."""

    model: DenseTransformer
    optimizer: torch.optim.Optimizer
    samples: list[_Sample] = field(default_factory=list)


def run(args: BenchArguments) -> int:
    """Run it in this process. Returns the exit status.

    Raises:
        RunFailedError: gradients differ by more than rounding.
        ValueError: ``--device cuda`` without a GPU.
    """
    device = choose_device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    register_emulated_backend()
    dist.init_process_group("emulated", rank=0, world_size=NUM_RANKS, store=dist.HashStore())
    try:
        bench = _Bench(args, device)
        with running():
            difference = bench.compare_gradients()
            for number in track(
                range(NUM_WARMUP_ROUNDS + args.rounds),
                description=f"{SEPARATE} and {FUSED}",
                console=Console(stderr=True),
                transient=True,
            ):
                bench.round(number)
        result = bench.result(difference)
    finally:
        dist.destroy_process_group()
    Console().print(table(result))
    write_json(args.json, result)
    return 0


@final
class _Bench:
    """Both variants."""

    def __init__(self, args: BenchArguments, device: torch.device) -> None:
        self._args = args
        self._device = device
        self._dtype = torch.bfloat16 if args.bf16 else torch.float32
        self._data = ByteBatches(
            tokens=load_bytes(None),
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            seed=args.seed,
            rank=0,
            num_ranks=1,
        )
        self._variants = {name: self._build(fuse=name == FUSED) for name in (SEPARATE, FUSED)}

    def round(self, number: int) -> None:
        """One step of each variant, on the same data."""
        batches = self._batches(number)
        names = list(self._variants)
        for name in names if number % 2 == 0 else reversed(names):
            sample = self._sample(self._variants[name], batches)
            if number >= NUM_WARMUP_ROUNDS:
                self._variants[name].samples.append(sample)

    def compare_gradients(self) -> float:
        """Of one backward of each, before any step: the largest relative difference.

        Raises:
            RunFailedError: it is more than rounding.
        """
        batches = self._batches(0)
        grads: dict[str, list[Tensor]] = {}
        for name, variant in self._variants.items():
            with _deterministic():
                self._accumulate(variant.model, batches)
            found = [param.grad for param in variant.model.parameters()]
            grads[name] = [local_part(grad).float() for grad in found if grad is not None]
            variant.optimizer.zero_grad()
        pairs = zip(grads[SEPARATE], grads[FUSED], strict=True)
        difference = max(float((a - b).norm() / a.norm()) for a, b in pairs if a.numel() > 0)
        if not difference <= TOLERANCE[self._dtype]:  # so that nan is caught
            raise RunFailedError(
                f"gradients that are fused differ by {difference:.1e} of their norm from those "
                f"that are not, expected {TOLERANCE[self._dtype]:.0e} at most"
            )
        return difference

    def _batches(self, number: int) -> list[tuple[Tensor, Tensor]]:
        made = self._data.microbatches(number, self._args.num_microbatches)
        return [(tokens.to(self._device), targets.to(self._device)) for tokens, targets in made]

    def _build(self, *, fuse: bool) -> _Variant:
        args = self._args
        model = build_dense(args, self._device, linear=_linear(args.transformer_impl))
        model.to(self._dtype)
        mesh = init_device_mesh(self._device.type, (NUM_RANKS,))
        mp = MixedPrecision(reduce_dtype=torch.bfloat16 if args.grad_reduce_in_bf16 else None)
        shard_dense(model, mesh, mp)
        if fuse:
            manage_wgrad(model, fuse=True)
        return _Variant(model=model, optimizer=shard_optimizer(optimizer_of(args, model)))

    def _accumulate(self, model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        for index, (tokens, targets) in enumerate(batches):
            with microbatch(model, is_last=index == len(batches) - 1):
                (loss_of(model, tokens, targets) / len(batches)).backward()

    def _sample(self, variant: _Variant, batches: Sequence[tuple[Tensor, Tensor]]) -> _Sample:
        start_s = self._now_s()
        start_bytes = self._allocated_bytes()
        self._reset_peaks()
        self._accumulate(variant.model, batches)
        variant.optimizer.step()
        variant.optimizer.zero_grad()
        end_s = self._now_s()
        return _Sample(
            step_time_s=end_s - start_s,
            peak_bytes=self._peak_bytes() - start_bytes,
            end_bytes=self._allocated_bytes() - start_bytes,
        )

    def _now_s(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return perf_counter()

    def _reset_peaks(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated() if self._device.type == "cuda" else 0

    def _peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated() if self._device.type == "cuda" else 0

    def _reserved_bytes(self, variant: _Variant) -> int:
        """What the forwards and backwards of one more step reserve over what they begin with. From
        an empty cache: else what earlier steps left there would be counted."""
        if self._device.type != "cuda":
            return 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        start_bytes = torch.cuda.memory_reserved()
        self._accumulate(variant.model, self._batches(0))
        torch.cuda.synchronize()
        variant.optimizer.zero_grad()
        return torch.cuda.max_memory_reserved() - start_bytes

    def result(self, difference: float) -> dict[str, Any]:
        """What was found, as JSON has it. Takes one more backward of each, on a GPU."""
        args = self._args
        num_tokens = args.num_microbatches * args.micro_batch_size * args.seq_length
        variants: dict[str, dict[str, float]] = {}
        for name, variant in self._variants.items():
            step_time_s = median(sample.step_time_s for sample in variant.samples)
            variants[name] = {
                "step_time_s": step_time_s,
                "tokens_per_s": num_tokens / step_time_s,
                "peak_allocated_bytes": max(sample.peak_bytes for sample in variant.samples),
                "peak_reserved_bytes": self._reserved_bytes(variant),
                "end_allocated_bytes": max(sample.end_bytes for sample in variant.samples),
            }
        pairs = zip(self._variants[FUSED].samples, self._variants[SEPARATE].samples, strict=True)
        ratios = sorted(fused.step_time_s / separate.step_time_s for fused, separate in pairs)
        is_gpu = self._device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name() if is_gpu else "CPU",
            "counts_memory": is_gpu,
            "world": EmulatedLinks().describe(NUM_RANKS),
            "linear": str(args.transformer_impl),
            "dtype": str(self._dtype).removeprefix("torch."),
            "reduce_dtype": "bfloat16" if args.grad_reduce_in_bf16 else "float32",
            "num_blocks": args.num_blocks,
            "num_parameters": sum(p.numel() for p in self._variants[FUSED].model.parameters()),
            "strategy": STRATEGY,
            "rounds": args.rounds,
            "variants": variants,
            "ratio": variants[FUSED]["step_time_s"] / variants[SEPARATE]["step_time_s"],
            "ratio_of_rounds": [ratios[0], median(ratios), ratios[-1]],
            "largest_difference": difference,
        }


@contextmanager
def _deterministic() -> Generator[None]:
    """Attention's backward adds up in another order every time, on a GPU; differences of rounding
    grow from block to block."""
    before = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what has no such algorithm
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warned)


def _linear(impl: TransformerImpl) -> type[nn.Module]:
    if impl is TransformerImpl.LOCAL:
        return nn.Linear
    import transformer_engine.pytorch as te  # pyright: ignore[reportMissingImports]

    return te.Linear  # type: ignore[no-any-return]


def table(result: Mapping[str, Any]) -> Table:
    """The result for people."""
    lowest, middle, highest = result["ratio_of_rounds"]
    shown = Table(
        title=f"dense, {result['num_blocks']} blocks, {result['num_parameters'] / 1e6:,.1f}M "
        f"parameters, {result['linear']} layers, {result['dtype']}, reduced in "
        f"{result['reduce_dtype']}, {result['device']}, "
        f"{result['world']}, {result['strategy']}, median of {result['rounds']} rounds",
        caption=f"fused takes {lowest:.3f}x to {highest:.3f}x of separate's time in single rounds, "
        f"{middle:.3f}x in the middle one; gradients are apart by "
        f"{result['largest_difference']:.0e} of their norm at most; memory: over what a step "
        "begins with",
    )
    shown.add_column("weight gradients", no_wrap=True)
    columns = ("step\nms", "of\nseparate", "tokens\n/s", "peak\nGiB", "reserved\nGiB", "left\nGiB")
    for column in columns:
        shown.add_column(column, justify="right", no_wrap=True)
    separate_s = result["variants"][SEPARATE]["step_time_s"]
    for name, variant in result["variants"].items():
        shown.add_row(
            name,
            f"{variant['step_time_s'] * 1e3:.1f}",
            f"{variant['step_time_s'] / separate_s:.3f}x",
            f"{variant['tokens_per_s']:,.0f}",
            *(
                f"{variant[f'{what}_bytes'] / _GIB:.3f}" if result["counts_memory"] else "-"
                for what in ("peak_allocated", "peak_reserved", "end_allocated")
            ),
        )
    return shown
