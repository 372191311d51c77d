"""``ep-overlap bench``: off, plain and paired on one link, alternating in one process.

Flags of weight gradients add variants: ``delayed`` is the paired order with W nodes, ``serial`` is
no overlap but that of dispatch's backward with the experts' W.

Its other measurements are in files of their own: ``--sharding`` in ``bench_sharding.py``,
``--wgrad-fusion`` in ``bench_fusion.py``, ``--against megatron`` in ``bench_megatron.py``,
``--suite`` in ``suite.py``,
``--host-overhead`` in ``report/host_overhead.py``.

Each variant is a model of its own, from the same seed, trained on the same text: equal losses say
that they did the same work. A round is one step of each. All figures are medians over rounds.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, final

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ep_overlap.commands import bench_fusion, bench_megatron, bench_sharding, suite
from ep_overlap.commands.arguments import BenchArguments, DeviceChoice, Peer
from ep_overlap.commands.results import write_json, write_trace
from ep_overlap.commands.running import (
    batches_of,
    model_environment,
    own_command,
    quiet_import,
    recipe_of,
    running,
)
from ep_overlap.commands.trainee import ScheduledStep, StandardStep, Stepper, Trainee, build_trainee
from ep_overlap.commands.world import Meshes, World, choose_device, open_world
from ep_overlap.config import OverlapConfig
from ep_overlap.links.speed import LinkSpeed, parse_rate
from ep_overlap.plan.order import OrderName
from ep_overlap.processes.launch import launch
from ep_overlap.processes.shaped_link import ShapedLink
from ep_overlap.run.trace import ChromeTrace, HiddenShare

OFF: Final = "off"
DEFAULT: Final = OrderName.PAIRED.value
DELAYED: Final = "delayed"
SERIAL: Final = OrderName.SERIAL.value
NUM_WARMUP_ROUNDS: Final = 1
LATENCY_S: Final = 50e-6
"""Of a paced link: a data-centre network's, with its switches and host stacks."""


def run(args: BenchArguments) -> int:
    """Be a rank, or start the ranks. Returns the exit status.

    Raises:
        ValueError: what can be found wrong only here: no GPU, no root for a shaped link.
    """
    if args.host_overhead:
        return _host_overhead(args)
    if args.wgrad_fusion:
        return bench_fusion.run(args)
    if args.suite is not None:
        return suite.run(args)
    if args.against is Peer.MEGATRON:
        return bench_megatron.run(args)
    kind, _, rate = args.link_in_use.partition(":")
    device = args.device if args.sharding else _cpu_for_links(args)
    if "RANK" not in os.environ:
        choose_device(device)
        with ExitStack() as stack:
            link = None
            if kind == "shaped":
                link = stack.enter_context(ShapedLink(num_ranks=args.nproc, rate=rate))
            return launch(own_command(), nproc=args.nproc, netns=link)
    if args.sharding:
        return bench_sharding.run(args)
    speed = None
    if kind == "paced":
        speed = LinkSpeed(bytes_per_s=parse_rate(rate), latency_s=LATENCY_S)
    with open_world(device, speed=speed) as world, model_environment(args.model, world):
        bench = _Bench(args, world)
        with running():
            for round_number in track(
                range(NUM_WARMUP_ROUNDS + args.rounds),
                description=f"{args.model} on {args.link_in_use}",
                console=Console(stderr=True, quiet=world.rank != 0),
                transient=True,
            ):
                bench.round(round_number)
        result = bench.result()
        if world.rank == 0:
            Console().print(table(result))
        write_trace(args.trace, bench.chrome, world)
        if world.rank == 0:
            write_json(args.json, result)
    return 0


def _cpu_for_links(args: BenchArguments) -> DeviceChoice:
    """Links are paced, shaped and measured between CPU ranks.

    Raises:
        ValueError: GPUs were asked for.
    """
    if args.device is DeviceChoice.CUDA:
        raise ValueError(
            "--device cuda: this measurement paces the links of CPU ranks; expected --device cpu, "
            "or --against megatron (on emulated links, or with --emulate none on the GPUs' own)"
        )
    return DeviceChoice.CPU


def _host_overhead(args: BenchArguments) -> int:
    from ep_overlap.report import host_overhead

    with quiet_import():
        measured = host_overhead.measure()
    Console().print(host_overhead.table(measured))
    write_json(args.json, host_overhead.as_json(measured))
    return 0


@dataclass(frozen=True, kw_only=True)
class _Variant:
    trainee: Trainee
    stepper: Stepper


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """One step of one variant."""

    step_time_s: float
    """Of the slowest rank."""
    compute_s: float
    """The step less what the compute lane spent in and waiting for collectives; mean of ranks."""
    share: HiddenShare | None
    loss: float


def variants_of(args: BenchArguments) -> list[str]:
    """What is compared, in the order of the table."""
    names = [OFF, OrderName.PLAIN.value, DEFAULT]
    if args.delay_wgrad_compute:
        names.append(DELAYED)
    if args.overlap_dispatch_backward_with_experts_wgrad:
        names.insert(1, SERIAL)
    return names


def config_of(args: BenchArguments, variant: str) -> OverlapConfig | None:
    """The schedule of a variant; ``off`` has none, unless layers are recomputed: then one without
    overlap."""
    if variant == OFF and not args.recomputes_layers:
        return None
    order = {OFF: SERIAL, DELAYED: DEFAULT}.get(variant, variant)
    return OverlapConfig(
        num_microbatches=args.num_microbatches,
        order=order,
        delay_wgrad=variant == DELAYED,
        dispatch_over_wgrad=variant == SERIAL,
        recompute_granularity="full" if args.recomputes_layers else None,
        max_unsharded_units=args.max_unsharded_units,
    )


@final
class _Bench:
    """All variants on this rank."""

    def __init__(self, args: BenchArguments, world: World) -> None:
        self._args = args
        self._world = world
        self._data = batches_of(args, world)
        recipe = recipe_of(args)
        meshes = Meshes.of(world, recipe.expert_parallel_size)
        self._variants: dict[str, _Variant] = {}
        for name in variants_of(args):
            trainee = build_trainee(recipe, world, meshes)
            self._variants[name] = _Variant(trainee=trainee, stepper=self._stepper(name, trainee))
        self._samples: dict[str, list[_Sample]] = {name: [] for name in self._variants}
        self.chrome = None if args.trace is None else ChromeTrace(rank=world.rank, origin_ns=0)

    def _stepper(self, name: str, trainee: Trainee) -> Stepper:
        config = config_of(self._args, name)
        if config is None:
            return StandardStep(trainee, self._args.num_microbatches, self._world)
        return ScheduledStep(trainee, config, self._world)

    def round(self, number: int) -> None:
        """One step of each variant, on the same data."""
        pairs = self._data.microbatches(number, self._args.num_microbatches)
        pairs = [(a.to(self._world.device), b.to(self._world.device)) for a, b in pairs]
        names = list(self._variants)
        first = number % len(names)
        for name in names[first:] + names[:first]:  # in turns, and each as often the first
            sample = self._sample(self._variants[name], name, pairs, number)
            if number >= NUM_WARMUP_ROUNDS:
                self._samples[name].append(sample)

    def _sample(
        self,
        variant: _Variant,
        name: str,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        number: int,
    ) -> _Sample:
        world, trainee = self._world, variant.trainee
        trainee.optimizer.zero_grad()
        batches = [trainee.make_batch(*pair) for pair in pairs]
        world.gathered(None)  # start together: what comes before is no part of the step
        start_s = world.now_s()
        result = variant.stepper.step(batches)
        elapsed_s = world.now_s() - start_s
        trainee.optimizer.step()
        share = result.hidden_share
        waited_s = share.compute_lane_s if share is not None else 0.0
        loss, compute_s = world.mean(
            [float(torch.stack(result.losses).mean()), elapsed_s - waited_s]
        )
        if self.chrome is not None and name == DEFAULT and result.trace is not None:
            self.chrome.add(result.trace, step=number)
        return _Sample(
            step_time_s=max(world.gathered(elapsed_s)),
            compute_s=compute_s,
            share=share,
            loss=loss,
        )

    def result(self) -> dict[str, Any]:
        """What was found, as JSON has it; shares are those of all ranks together. Collective."""
        variants = {name: self._variant_result(samples) for name, samples in self._samples.items()}
        default = variants[DEFAULT]
        return {
            "link": self._args.link_in_use,
            "model": str(self._args.model),
            "strategy": str(self._args.data_parallel_sharding_strategy),
            "num_ranks": self._world.size,
            "rounds": self._args.rounds,
            "gradient_accumulation_fusion": self._args.gradient_accumulation_fusion,
            "recompute_granularity": self._args.recompute_granularity,
            "variants": variants,
            "delayed_of_paired": self._delayed_of_paired(),
            "compute_s": variants[OFF]["compute_s"],
            "comm_s": default["comm_s"],
            "hidden_share": default["hidden_share"],
        }

    def _delayed_of_paired(self) -> float | None:
        """The step with delayed weight gradients over that without: the median of rounds."""
        if DELAYED not in self._samples:
            return None
        pairs = zip(self._samples[DELAYED], self._samples[DEFAULT], strict=True)
        return median(delayed.step_time_s / paired.step_time_s for delayed, paired in pairs)

    def _variant_result(self, samples: Sequence[_Sample]) -> dict[str, Any]:
        shares = [s.share for s in samples if s.share is not None]
        everywhere = [share for of_rank in self._world.gathered(shares) for share in of_rank]
        return {
            "step_time_s": median(s.step_time_s for s in samples),
            "compute_s": median(s.compute_s for s in samples),
            "comm_s": median(s.comm_s for s in shares) if shares else None,
            "hidden_share": HiddenShare.total(everywhere).as_json() if shares else None,
            "first_loss": samples[0].loss,
            "last_loss": samples[-1].loss,
        }


def table(result: Mapping[str, Any]) -> Table:
    """The result for people."""
    off_s = result["variants"][OFF]["step_time_s"]
    bound_s = max(result["compute_s"], result["comm_s"] or 0.0)
    kinds = [kind for kind, share in result["hidden_share"].items() if share is not None]
    fused = ", fused weight gradients" if result["gradient_accumulation_fusion"] else ""
    recompute = result["recompute_granularity"]
    recomputed = "" if recompute is None else f", {recompute} recompute"
    ratio = result["delayed_of_paired"]
    shown = Table(
        title=f"{result['model']}, {result['num_ranks']} ranks, {result['link']}, "
        f"{result['strategy']}{fused}{recomputed}, median of {result['rounds']} rounds",
        caption=f"compute alone {_ms(result['compute_s'])}, communication alone "
        f"{_ms(result['comm_s'])}: no order can be faster than the longer of the two, the bound"
        + ("" if ratio is None else f"; a round's delayed step is {ratio:.2f}x its paired one"),
    )
    shown.add_column("overlap", no_wrap=True)
    hidden = (f"{kind}\nhidden" for kind in kinds)
    for column in ("step\nms", "of\noff", "of\nbound", *hidden, "loss"):
        shown.add_column(column, justify="right", no_wrap=True)
    for name, variant in result["variants"].items():
        shares = variant["hidden_share"] or {}
        shown.add_row(
            name,
            f"{variant['step_time_s'] * 1e3:.0f}",
            f"{variant['step_time_s'] / off_s:.2f}x",
            f"{variant['step_time_s'] / bound_s:.2f}x",
            *(_percent(shares.get(kind)) for kind in kinds),
            f"{variant['first_loss']:.2f} to {variant['last_loss']:.2f}",
        )
    return shown


def _ms(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds * 1e3:.0f} ms"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"
