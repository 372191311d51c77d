"""``ep-overlap bench --against megatron``: megatron-core's own schedules and ours, alternating.

The same GPTModel, sizes, data and links through megatron-core's ``forward_backward_no_pipelining``
(its standard path, its combined 1F1B, and that with delayed weight gradients) and through ours, by
the drop-in with one unchanged ``forward_step_func``. Each variant has a model of its own.

By default it is one rank, on one device, of an emulated world: exchanges copy their bytes locally
and then hold their stream for latency and bytes over rate. ``compute alone`` is megatron-core's
standard path on links that take no time; what a variant takes more than that is what its exchanges
cost::

    hidden = 1 - (step - compute alone) / (time that the links take)

It is told where exchanges take a twentieth of compute or more.

With ``--data-parallel-sharding-strategy`` megatron-core's models are in its FSDP v1 and ours in
``fully_shard``; gathers and reductions are then in the difference, too, and no share is told.

With ``--emulate none`` it is ``--nproc`` real ranks; compute alone is then the standard step less
the time that NCCL's exchange kernels take in it, waiting for other ranks with it.

A sample is a step that is not timed, from an empty cache, and one that is: so no variant runs in
memory that another has cut up. Garbage collection passes the models by.
"""

import gc
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any, Final, final

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from ep_overlap.commands.arguments import BenchArguments, TransformerImpl
from ep_overlap.commands.bench_megatron_models import ModelMaker, fsdp_environment
from ep_overlap.commands.data import ByteBatches, load_bytes
from ep_overlap.commands.measured_world import MeasuredWorld, measured_world
from ep_overlap.commands.results import write_json
from ep_overlap.commands.running import own_command, quiet_import, running
from ep_overlap.commands.world import choose_device
from ep_overlap.plan.lower import Strategy
from ep_overlap.processes.launch import launch
from ep_overlap.report.steps_picture import draw

NUM_WARMUP_ROUNDS: Final = 1
COMPUTE: Final = "compute alone"
_LEAST_SHARE: Final = 0.05
"""Of compute, that exchanges must take for their hidden share to be told."""
_GIB: Final = 2**30

Microbatch = tuple[Tensor, Tensor]
"""Tokens and labels, int64 ``[B, S]``."""


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """One way to run a step."""

    name: str
    order: str | None = None
    """Of ours; None: megatron-core's own function."""
    overlap: bool = True
    delay: bool = False
    graphs: bool = False
    has_links: bool = True


KINDS: Final = (
    _Kind(name=COMPUTE, overlap=False, has_links=False),
    _Kind(name="megatron standard", overlap=False),
    _Kind(name="megatron combined"),
    _Kind(name="megatron combined, delayed", delay=True),
    _Kind(name="ours plain", order="plain"),
    _Kind(name="ours plain, delayed", order="plain", delay=True),
    _Kind(name="ours paired", order="paired"),
    _Kind(name="ours paired, delayed", order="paired", delay=True),
    _Kind(name="ours plain, graphs", order="plain", graphs=True),
    _Kind(name="ours paired, graphs", order="paired", graphs=True),
)
"""Delayed weight gradients need Transformer Engine's layers in megatron-core: elsewhere its own
setting is accepted and does nothing, so there it is left out."""


@dataclass(frozen=True, kw_only=True)
class _Sample:
    step_time_s: float
    host_s: float
    """Until all was issued."""
    peak_bytes: int
    """The most that was in use over models and gradients: what is freed while another stream reads
    it (``record_stream``) is in use until then, though torch does not call it allocated."""


@final
@dataclass(kw_only=True)
class _Variant:
    kind: _Kind
    step: Callable[[Sequence[Microbatch]], None]
    state_bytes: int
    """Of its weights and gradients, as it was made."""
    samples: list[_Sample] = field(default_factory=list[_Sample])
    left_bytes: int = 0
    """What its steps have left allocated: it is theirs, though it is there when the next begins."""


def run(args: BenchArguments) -> int:
    """Run it in this process, or start the ranks. Returns the exit status.

    Raises:
        ValueError: ``--device cuda`` without a GPU; megatron-core is not installed.
    """
    if args.emulates_nothing and "RANK" not in os.environ:
        choose_device(args.device)
        return launch(own_command(), nproc=args.nproc)
    with (
        measured_world(args) as world,
        fsdp_environment(args, world.device),
        environment(world.device),
    ):
        with running():
            result = measure(args, world)
        if world.rank == 0:
            Console().print(table(result))
            write_json(args.json, result)
            if args.plot is not None:
                draw(result, args.plot)
    return 0


def measure(args: BenchArguments, world: MeasuredWorld) -> dict[str, Any]:
    """All rounds; the result as JSON has it. Collective; within ``environment``."""
    bench = _Bench(args, world)
    console = Console(stderr=True, quiet=world.rank != 0)
    with Progress(console=console, transient=True) as progress, ExitStack() as stack:
        num_rounds = NUM_WARMUP_ROUNDS + args.rounds
        task = progress.add_task("rounds", total=num_rounds * len(bench.variants))
        for number in range(num_rounds):
            if number == NUM_WARMUP_ROUNDS:
                stack.enter_context(_uncollected())
            for _ in bench.round(number):
                progress.advance(task)
    return bench.result()


@contextmanager
def _uncollected() -> Generator[None]:
    """Until the block ends, let garbage collection pass by what is there now, models mostly: a pass
    over all variants' takes tenths of a second, in whosever step it falls. Then it is a suite's to
    collect."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def environment(device: torch.device) -> AbstractContextManager[None]:
    """What megatron-core's schedules and ours need process-wide, until the block ends.

    Raises:
        ValueError: megatron-core is not installed.
    """
    try:
        with quiet_import():
            from ep_overlap.models import megatron_build
            from ep_overlap.models.megatron_cpu import megatron_schedule_on_cpu
            from ep_overlap.models.megatron_globals import megatron_schedule_globals
    except ImportError as error:
        raise ValueError(f"--against megatron: {error}") from error
    assert megatron_build  # imported here, where its notes are kept back
    return megatron_schedule_on_cpu() if device.type == "cpu" else megatron_schedule_globals()


@final
class _Bench:
    """All variants."""

    def __init__(self, args: BenchArguments, world: MeasuredWorld) -> None:
        self._args = args
        self._world = world
        self._device = world.device
        self._data = ByteBatches(
            tokens=load_bytes(None),
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            seed=args.seed,
            rank=world.rank,
            num_ranks=world.size,
        )
        self._models = ModelMaker(args, world)
        uses_te = args.transformer_impl is TransformerImpl.TRANSFORMER_ENGINE
        self.variants = [
            self._variant_of(kind)
            for kind in KINDS
            if uses_te or kind.order is not None or not kind.delay
            if kind.has_links or world.has_compute_alone
            if args.cuda_graphs or not kind.graphs
        ]

    def round(self, number: int) -> Iterator[None]:
        """One sample of each variant, on the same data; yields after each."""
        batches = self._batches(number)
        for variant in self.variants if number % 2 == 0 else reversed(self.variants):
            sample = self._sample(variant, batches)
            if number >= NUM_WARMUP_ROUNDS:
                variant.samples.append(sample)
            yield

    def _sample(self, variant: _Variant, batches: Sequence[Microbatch]) -> _Sample:
        world, is_gpu = self._world, self._device.type == "cuda"
        with nullcontext() if variant.kind.has_links else world.without_links():
            world.together()
            rest_bytes = 0
            if is_gpu:
                torch.cuda.empty_cache()
                rest_bytes = torch.cuda.memory_allocated() - variant.left_bytes
            variant.step(batches)
            world.together()
            if is_gpu:
                torch.cuda.reset_peak_memory_stats()
            start_s = perf_counter()
            variant.step(batches)
            issued_s = perf_counter()
            if is_gpu:
                torch.cuda.synchronize()
            end_s = perf_counter()
        if is_gpu:
            variant.left_bytes = torch.cuda.memory_allocated() - rest_bytes
        return _Sample(
            step_time_s=world.slowest(end_s - start_s),
            host_s=issued_s - start_s,
            peak_bytes=_peak_bytes() - rest_bytes if is_gpu else 0,
        )

    def _variant_of(self, kind: _Kind) -> _Variant:
        before_bytes = self._allocated_bytes()
        step = self._step_of(kind)
        return _Variant(kind=kind, step=step, state_bytes=self._allocated_bytes() - before_bytes)

    def _allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated() if self._device.type == "cuda" else 0

    def _step_of(self, kind: _Kind) -> Callable[[Sequence[Microbatch]], None]:
        from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

        from ep_overlap.models.megatron import ForwardBackward

        args = self._args
        made = self._models.make(
            is_ours=kind.order is not None, overlap=kind.overlap, delay=kind.delay
        )
        function: Callable[..., Any] = (
            forward_backward_no_pipelining
            if kind.order is None
            else ForwardBackward(
                order=kind.order,
                max_unsharded_units=args.max_unsharded_units,
                cuda_graphs=kind.graphs,
            )
        )
        forward_step = ForwardStep(args.seq_length, self._device)

        def step(batches: Sequence[Microbatch]) -> None:
            function(
                forward_step_func=forward_step,
                data_iterator=iter(batches),
                model=made.whole,
                num_microbatches=len(batches),
                seq_length=args.seq_length,
                micro_batch_size=args.micro_batch_size,
                pg_collection=made.pg_collection,
            )
            made.clear_gradients()

        return step

    def result(self) -> dict[str, Any]:
        """What was found, as JSON has it. Collective."""
        args = self._args
        (standard,) = (v for v in self.variants if v.kind.has_links and not v.kind.overlap)
        batches = self._batches(0)
        link_s = self._world.link_s(lambda: standard.step(batches))
        times = {
            variant.kind.name: [sample.step_time_s for sample in variant.samples]
            for variant in self.variants
        }
        if COMPUTE in times:
            compute_s = median(times[COMPUTE])
        else:
            compute_s = median(times[standard.kind.name]) - (link_s or 0.0)
        # Below that, it would be noise of the steps over next to nothing.
        tells_share = not self._models.is_sharded and (link_s or 0) > _LEAST_SHARE * compute_s
        theirs = [v.kind.name for v in self.variants if v.kind.order is None and v.kind.has_links]
        best = min(theirs, key=lambda name: median(times[name]))
        variants: dict[str, Any] = {}
        for variant in self.variants:
            name, step_time_s = variant.kind.name, median(times[variant.kind.name])
            pairs = zip(times[name], times[best], strict=True)
            num_gathers = self._world.num_gathers(lambda v=variant: v.step(batches))
            variants[name] = {
                "num_gathers": num_gathers,
                "step_time_s": step_time_s,
                "of_best": median(ours / theirs for ours, theirs in pairs),
                "hidden_share": 1 - (step_time_s - compute_s) / link_s
                if variant.kind.has_links and link_s and tells_share
                else None,
                "host_s": median(sample.host_s for sample in variant.samples),
                "peak_bytes": max(sample.peak_bytes for sample in variant.samples),
                "left_bytes": variant.left_bytes,
                "state_bytes": variant.state_bytes,
            }
        is_gpu = self._device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name() if is_gpu else "CPU",
            "counts_memory": is_gpu,
            "world": self._world.describe(),
            "num_layers": args.num_layers,
            "num_microbatches": args.num_microbatches,
            "micro_batch_size": args.micro_batch_size,
            "seq_length": args.seq_length,
            "transformer_impl": str(args.transformer_impl),
            "strategy": str(args.data_parallel_sharding_strategy),
            "routing": _routing(args),
            "rounds": args.rounds,
            "link_s": link_s,
            "compute_s": compute_s,
            "best_of_megatron": best,
            "variants": variants,
        }

    def _batches(self, number: int) -> list[Microbatch]:
        made = self._data.microbatches(number, self._args.num_microbatches)
        return [(tokens.to(self._device), labels.to(self._device)) for tokens, labels in made]


def _peak_bytes() -> int:
    return torch.cuda.memory_stats()["active_bytes.all.peak"]


@final
class ForwardStep:
    """As ``pretrain_gpt.py`` has it."""

    def __init__(self, seq_length: int, device: torch.device) -> None:
        self._positions = torch.arange(seq_length, device=device).unsqueeze(0)
        self._mask = torch.ones(seq_length, seq_length, dtype=torch.bool, device=device).triu(1)

    def __call__(
        self, data: Iterator[Microbatch], model: Any, return_schedule_plan: bool = False
    ) -> tuple[Any, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
        tokens, labels = next(data)
        # A wrapper has no such method, and does not mind being passed by.
        call = _innermost(model).build_schedule_plan if return_schedule_plan else model
        positions = self._positions.expand(len(tokens), -1)
        return call(tokens, positions, self._mask[None, None], labels=labels), _mean_loss


def _innermost(model: Any) -> Any:
    while (inner := model._modules.get("module")) is not None:
        model = inner
    return model


def _mean_loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = output.float().mean()
    return loss, {"lm loss": loss.detach().clone()}


def table(result: Mapping[str, Any]) -> Table:
    """The result for people."""
    shown = Table(
        title=f"GPTModel, {result['num_layers']} layers ({result['transformer_impl']}), "
        f"{result['num_microbatches']} microbatches of {result['micro_batch_size']} x "
        f"{result['seq_length']} tokens, routing {result['routing']}, {result['strategy']}; "
        f"{result['device']}, "
        f"{result['world']}; median of {result['rounds']} rounds",
        caption=f"exchanges take {_ms(result['link_s'])}; best of "
        f"megatron: {result['best_of_megatron']}, compared round by round; host: until all was "
        "issued; state: weights and gradients as they were made; peak: over it",
    )
    shown.add_column("step", no_wrap=True)
    is_sharded = result["strategy"] != Strategy.NO_SHARD
    fourth = "gathers" if is_sharded else "a2a\nhidden"
    for column in ("ms", "of best of\nmegatron", fourth, "host\nms", "state\nGiB", "peak\nGiB"):
        shown.add_column(column, justify="right", no_wrap=True)
    for name, variant in result["variants"].items():
        share = variant["hidden_share"]
        shown.add_row(
            name,
            f"{variant['step_time_s'] * 1e3:.0f}",
            f"{variant['of_best']:.3f}x",
            _gathers(variant["num_gathers"]) if is_sharded else _percent(share),
            f"{variant['host_s'] * 1e3:.0f}",
            *(
                f"{variant[memory] / _GIB:.1f}" if result["counts_memory"] else "-"
                for memory in ("state_bytes", "peak_bytes")
            ),
        )
    return shown


def _routing(args: BenchArguments) -> str:
    if args.moe_router_force_biased is not None:
        return f"skewed by {args.moe_router_force_biased:g}"
    return "balanced" if args.moe_router_force_load_balancing else "as the router says"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _gathers(number: int | None) -> str:
    return "-" if number is None else str(number)


def _ms(seconds: float | None) -> str:
    return (
        "a time that was not measured"
        if seconds is None
        else f"{seconds * 1e3:.0f} ms of the links"
    )
