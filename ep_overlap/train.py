"""``ep-overlap train``: starts its ranks, trains, and says how it went."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, final

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from ep_overlap.arguments import BenchArguments, ModelName, TrainArguments
from ep_overlap.config import OverlapConfig
from ep_overlap.data import ByteBatches, load_bytes
from ep_overlap.launch import launch
from ep_overlap.parity import Parity, compare, worse
from ep_overlap.plan_arguments import order_of, read_order
from ep_overlap.report.results import write_json, write_trace
from ep_overlap.run.trace import ChromeTrace, HiddenShare
from ep_overlap.trainee import (
    Recipe,
    ScheduledStep,
    StandardStep,
    Stepper,
    Trainee,
    build_trainee,
)
from ep_overlap.world import Meshes, World, choose_device, open_world
from fsdp_hooks.lifecycle import ShardingStats
from fsdp_hooks.optimizer import global_grad_norm


def run(args: TrainArguments) -> int:
    """Be a rank, under torchrun or started by ourselves; else start the ranks. Returns the status.

    Raises:
        ValueError: what can be found wrong only here: no GPU, a port in use, data too short.
    """
    if "RANK" not in os.environ:
        choose_device(args.device)
        return launch(own_command(), nproc=args.nproc)
    with open_world(args.device, speed=None) as world, model_environment(args.model, world):
        _train(args, world)
    return 0


def own_command() -> list[str]:
    """The command line of this process, for its ranks."""
    return [sys.executable, "-m", "ep_overlap.cli", *sys.argv[1:]]


@contextmanager
def model_environment(model: ModelName, world: World) -> Iterator[None]:
    """What the model needs around it: megatron-core on CPU wants stand-ins.

    Raises:
        ValueError: megatron-core is not installed.
    """
    with ExitStack() as stack:
        if model is ModelName.MEGATRON:
            try:
                with quiet_import():
                    from ep_overlap.models import megatron
                    from ep_overlap.models.megatron_cpu import megatron_on_cpu
                    from ep_overlap.models.megatron_globals import megatron_globals
            except ImportError as error:
                raise ValueError(f"--model megatron: {error}") from error
            assert megatron  # imported for its message where megatron-core is missing
            on_cpu = world.device.type == "cpu"
            stack.enter_context(megatron_on_cpu() if on_cpu else megatron_globals())
        yield


@contextmanager
def quiet_import() -> Iterator[None]:
    """Keep back what megatron-core and torch say of absent optional packages when imported."""
    logger = logging.getLogger("torch.utils.cpp_extension")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def running() -> Iterator[None]:
    """Errors from here on are a failed run (exit status 1), not a refused command line (2)."""
    try:
        yield
    except ValueError as error:
        raise RunFailedError(f"{type(error).__name__}: {error}") from error


class RunFailedError(RuntimeError):
    """A run that began could not go on."""


def recipe_of(args: TrainArguments | BenchArguments, *, lr: float, optimizer: Any) -> Recipe:
    """How to build the model that the flags ask for."""
    return Recipe(
        model=args.model,
        sizes=args,
        seq_length=args.seq_length,
        seed=args.seed,
        expert_parallel_size=args.expert_parallel_size(os.environ),
        strategy=str(args.data_parallel_sharding_strategy),
        optimizer=optimizer,
        lr=lr,
    )


def overlap_config(args: TrainArguments) -> OverlapConfig:
    """The schedule that the flags ask for."""
    order = order_of(args)
    return OverlapConfig(
        num_microbatches=args.num_microbatches,
        order=None if isinstance(order, Path) else order,
        order_text=read_order(order) if isinstance(order, Path) else None,
        max_unsharded_units=args.max_unsharded_units,
        trace=args.trace is not None,
    )


def _train(args: TrainArguments, world: World) -> None:
    data = ByteBatches(
        tokens=load_bytes(args.data),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        seed=args.seed,
        rank=world.rank,
        num_ranks=world.size,
    )
    recipe = recipe_of(args, lr=args.lr, optimizer=args.optimizer)
    meshes = Meshes.of(world, recipe.expert_parallel_size)
    trainee = build_trainee(recipe, world, meshes)
    stepper: Stepper
    if args.overlap_moe_expert_parallel_comm:
        stepper = ScheduledStep(trainee, overlap_config(args), world)
    else:
        stepper = StandardStep(trainee, args.num_microbatches, world)
    baseline = None
    if args.check_parity:
        twin = build_trainee(recipe, world, meshes)
        baseline = _Baseline(trainee, twin, StandardStep(twin, args.num_microbatches, world), world)
    history = _History(args, world)
    with running(), _progress(args.train_iters, world) as progress:
        for iteration in range(args.train_iters):
            pairs = data.microbatches(iteration, args.num_microbatches)
            pairs = [(a.to(world.device), b.to(world.device)) for a, b in pairs]
            history.add(iteration, _iterate(trainee, stepper, baseline, pairs, world))
            progress.advance(history.line())
    result = history.result(trainee.lifecycle.stats, baseline)
    write_trace(args.trace, history.chrome, world)
    if world.rank == 0:
        _report(args, result)


@final
class _Iteration:
    """What one iteration brought."""

    def __init__(self, loss: float, grad_norm: float, step_time_s: float, result: Any) -> None:
        self.loss = loss
        self.grad_norm = grad_norm
        self.step_time_s = step_time_s
        self.share: HiddenShare | None = result.hidden_share
        self.trace = result.trace


def _iterate(
    trainee: Trainee,
    stepper: Stepper,
    baseline: "_Baseline | None",
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    world: World,
) -> _Iteration:
    trainee.optimizer.zero_grad()
    start_s = perf_counter()
    result = stepper.step([trainee.make_batch(tokens, targets) for tokens, targets in pairs])
    step_time_s = perf_counter() - start_s if result.trace is None else result.trace.duration_s
    if baseline is not None:
        baseline.step(pairs, result.losses)
    norm = global_grad_norm(trainee.module.parameters(), group=world.control)
    trainee.optimizer.step()
    if baseline is not None:
        baseline.after_update()
    (loss,) = world.mean([float(torch.stack(result.losses).mean())])
    return _Iteration(loss, norm, step_time_s, result)


@final
class _Baseline:
    """The same model beside it on the standard path, compared after every step."""

    def __init__(self, trainee: Trainee, twin: Trainee, stepper: StandardStep, world: World) -> None:
        self.parity = Parity.BITWISE
        self._modules = (trainee.module, twin.module)
        self._twin = twin
        self._stepper = stepper
        self._world = world

    def step(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        losses: Sequence[torch.Tensor],
    ) -> None:
        twin = self._twin
        twin.optimizer.zero_grad()
        expected = self._stepper.step([twin.make_batch(*pair) for pair in pairs]).losses
        found = compare((losses, expected), self._modules, self._world, gradients=True)
        self.parity = worse(self.parity, found)

    def after_update(self) -> None:
        self._twin.optimizer.step()
        found = compare(((), ()), self._modules, self._world, gradients=False)
        self.parity = worse(self.parity, found)


@final
class _History:
    """The run so far, on this rank."""

    def __init__(self, args: TrainArguments, world: World) -> None:
        self._world = world
        self._iterations: list[_Iteration] = []
        self._step_tokens = (
            args.seq_length * args.micro_batch_size * args.num_microbatches * world.size
        )
        self.chrome = None if args.trace is None else ChromeTrace(rank=world.rank, origin_ns=0)

    def add(self, number: int, iteration: _Iteration) -> None:
        self._iterations.append(iteration)
        if self.chrome is not None and iteration.trace is not None:
            self.chrome.add(iteration.trace, step=number)
        iteration.trace = None  # thousands of spans a step

    def line(self) -> str:
        last = self._iterations[-1]
        hidden = None if last.share is None else last.share.a2a.hidden
        text = f"loss {last.loss:.3f}  {self._step_tokens / last.step_time_s:,.0f} tokens/s"
        return text if hidden is None else f"{text}  A2A hidden {hidden:.0%}"

    def result(self, stats: ShardingStats, baseline: _Baseline | None) -> dict[str, object]:
        steps = self._iterations
        shares = [step.share for step in steps if step.share is not None]
        steady = steps[1:] or steps  # the first step warms up allocators and sockets
        return {
            "losses": [step.loss for step in steps],
            "grad_norms": [step.grad_norm for step in steps],
            "step_time_s": median(step.step_time_s for step in steady),
            "comm_s": median(share.comm_s for share in shares) if shares else None,
            "hidden_share": HiddenShare.total(shares).as_json() if shares else None,
            "num_all_gathers": stats.num_all_gathers,
            "num_reduce_scatters": stats.num_reduce_scatters,
            "peak_unsharded_bytes": stats.peak_unsharded_bytes,
            "hook_misses": stats.hook_misses,
            "parity": None if baseline is None else str(baseline.parity),
        }


@final
class _Bar:
    """The progress bar of rank 0; silent on the others."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def advance(self, text: str) -> None:
        self._progress.update(self._task, advance=1, status=text)


@contextmanager
def _progress(total: int, world: World) -> Iterator[_Bar]:
    progress = Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[status]}"),
        console=Console(stderr=True, quiet=world.rank != 0),
    )
    with progress:
        yield _Bar(progress, progress.add_task("train", total=total, status="starting"))


def _report(args: TrainArguments, result: dict[str, Any]) -> None:
    write_json(args.json, result)
    losses = result["losses"]
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps")
    print(f"step {result['step_time_s'] * 1e3:.1f} ms (median)", end="")
    shares = result["hidden_share"] or {}
    shown = [f"{kind} {share:.0%}" for kind, share in shares.items() if share is not None]
    print(f", hidden: {', '.join(shown)}" if shown else "")
    if args.check_parity:
        print(f"parity with the step without overlap: {result['parity']}")
