"""The source's own check of fused weight gradients. ``python tests/wgrad_mtp.py`` prints it.

A 2-layer GPT of megatron-core with 2 layers of multi-token prediction (MTP), on its own forward,
trained on a text over two ranks: the output layer is used three times, the embedding too, and tied
they are one weight. Weight gradients are made as autograd does, fused, delayed, and both; main
loss, both MTP losses and the norm of all gradients stand side by side.

Delayed is bitwise equal to plain, but for tied embeddings: there six uses of one weight add up to
its gradient, three of them lookups, which autograd adds up before the delayed three come. Rounding
then differs, as it does for fused.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from schedule_support import Groups
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from wgrad_support import counted

from ep_overlap.commands.data import VOCAB_SIZE, ByteBatches, load_bytes
from ep_overlap.models.megatron_globals import replace
from ep_overlap.testing import RankPool
from fsdp_hooks.accumulation import microbatch
from fsdp_hooks.context import Runtime
from fsdp_hooks.grad_norm import global_grad_norm
from fsdp_hooks.lifecycle import lifecycle_of
from fsdp_hooks.optimizer import shard_optimizer
from fsdp_hooks.shard import fully_shard
from fsdp_hooks.wgrad_layers import delayed_wgrad, manage_wgrad

NUM_RANKS = 2
NUM_STEPS = 10
NUM_MICROBATCHES = 2
NUM_MTP_LAYERS = 2
SEQ_LENGTH = 32
BATCH_SIZE = 2
LR = 3e-3

NUM_USES = 23
"""Of managed weights by a forward, on each of two ranks. The first decoder layer has QKV,
projection, and two experts of two matrices: 6; the second QKV, projection and two matrices: 4; an
MTP layer the same and ``eh_proj``: 5 each; the output layer: 3."""


class Making(StrEnum):
    """How weight gradients are made."""

    PLAIN = "plain"
    FUSED = "fused"
    DELAYED = "delayed"
    BOTH = "both"

    @property
    def is_fused(self) -> bool:
        return self in (Making.FUSED, Making.BOTH)

    @property
    def is_delayed(self) -> bool:
        return self in (Making.DELAYED, Making.BOTH)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained."""

    strategy: str
    is_tied: bool
    making: Making
    device: str = "cpu"
    transformer_engine: bool = False


STRATEGIES = ("no_shard", "optim_grads_params")


def cases() -> Iterator[Case]:
    """``PLAIN`` first, which the others are compared with."""
    for is_tied in (False, True):
        for strategy in STRATEGIES:
            for making in Making:
                yield Case(strategy=strategy, is_tied=is_tied, making=making)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step brought: means over microbatches and ranks."""

    main_loss: float
    mtp_losses: tuple[float, ...]
    grad_norm: float

    @property
    def values(self) -> tuple[float, ...]:
        return (self.main_loss, *self.mtp_losses, self.grad_norm)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One case, trained."""

    case: Case
    steps: tuple[Step, ...]
    num_delayed: int
    """Weight gradients that waited for a flush, in all steps."""
    num_written: int
    """Weight gradients that were written where they go."""


# ---- on a rank -----------------------------------------------------------------------------------


def train_all(chosen: Sequence[Case], num_steps: int = NUM_STEPS) -> list[Run]:
    """Run in every rank of a pool. Collective."""
    from ep_overlap.models.megatron_cpu import megatron_on_cpu
    from ep_overlap.models.megatron_globals import megatron_globals

    groups = Groups()
    data = ByteBatches(
        tokens=load_bytes(None),
        seq_length=SEQ_LENGTH,
        micro_batch_size=BATCH_SIZE,
        seed=7,
        rank=dist.get_rank(),
        num_ranks=dist.get_world_size(),
    )
    on_cpu = all(case.device == "cpu" for case in chosen)
    with megatron_on_cpu() if on_cpu else megatron_globals():
        return [_train(case, groups, data, num_steps) for case in chosen]


def _train(case: Case, groups: Groups, data: ByteBatches, num_steps: int) -> Run:
    model = _build(case, groups)
    optimizer = shard_optimizer(torch.optim.AdamW(model.parameters(), lr=LR))
    steps: list[Step] = []
    num_delayed = 0
    with _mtp_losses() as mtp_losses, counted(model, fuse=case.making.is_fused) as sink:
        for number in range(num_steps):
            optimizer.zero_grad()
            batches = data.microbatches(number, NUM_MICROBATCHES)
            loss, num_waited = _step(model, case, batches)
            num_delayed += num_waited
            main, *mtp = _mean([loss, *(mtp_losses() / NUM_MICROBATCHES)])
            norm = global_grad_norm(model.parameters(), group=dist.group.WORLD)
            steps.append(Step(main_loss=main, mtp_losses=tuple(mtp), grad_norm=norm))
            optimizer.step()
    return Run(case=case, steps=tuple(steps), num_delayed=num_delayed, num_written=sink.num_written)


def _build(case: Case, groups: Groups) -> Any:
    """A GPTModel, each layer a unit, managed."""
    from ep_overlap.models.megatron_build import MegatronSizes, build_gpt
    from ep_overlap.models.megatron_wgrad import WGRAD_LAYERS

    sizes = MegatronSizes(
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        ffn_hidden_size=48,
        num_experts=4,
        topk=2,
        seq_length=SEQ_LENGTH,
        vocab_size=VOCAB_SIZE,
        moe_layer_freq=2,
        mtp_num_layers=NUM_MTP_LAYERS,
        tied_embeddings=case.is_tied,
        transformer_impl="transformer_engine" if case.transformer_engine else "local",
    )
    num_ranks = dist.get_world_size()
    model = build_gpt(sizes, groups.experts(num_ranks), seed=11, device=case.device)
    kind = torch.device(case.device).type
    everyone = groups.mesh(list(range(num_ranks)), is_hybrid=False, device=kind)
    alone = groups.mesh([dist.get_rank()], is_hybrid=False, device=kind)

    def mesh_of(name: str, param: nn.Parameter) -> DeviceMesh:
        return alone if ".experts." in name else everyone

    for layer in [*model.decoder.layers, *model.mtp.layers]:
        fully_shard(layer, mesh=mesh_of, strategy=case.strategy)
    fully_shard(
        model,
        mesh=mesh_of,
        strategy=case.strategy,
        grad_divisor=num_ranks,
        runtime=Runtime(new_group=groups.group),
    )
    lifecycle_of(model)  # builds the root, and with it the groups of its lanes
    manage_wgrad(model, fuse=case.making.is_fused, layer_types=WGRAD_LAYERS)
    return model


def _step(
    model: nn.Module, case: Case, batches: Sequence[tuple[Tensor, Tensor]]
) -> tuple[Tensor, int]:
    """All microbatches: the mean of their main losses, and how many gradients waited."""
    device = case.device
    mask = torch.ones(1, 1, SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool, device=device).triu(1)
    positions = torch.arange(SEQ_LENGTH, device=device).expand(BATCH_SIZE, -1)
    losses: list[Tensor] = []
    num_waited = 0
    for index, (tokens, targets) in enumerate(batches):
        with microbatch(model, is_last=index == len(batches) - 1):
            tokens, targets = tokens.to(device), targets.to(device)
            loss = model(tokens, positions, mask, labels=targets).mean() / len(batches)
            losses.append(loss.detach())
            with delayed_wgrad(model) if case.making.is_delayed else nullcontext() as delayed:
                loss.backward()
                num_waited += 0 if delayed is None else len(delayed)
    return torch.stack(losses).sum(), num_waited


@contextmanager
def _mtp_losses() -> Generator[Callable[[], Tensor]]:
    """Gives a function that takes the losses that megatron-core has noted since, ``[MTP layers]``,
    summed over microbatches.

    What MTP keeps on classes is put back: the losses noted, and by how much their gradients are
    scaled, which megatron-core's schedules set to one over the number of microbatches. Its own
    ``track_mtp_metrics`` would average over ranks by ``ReduceOp.AVG``, which gloo lacks.
    """
    from megatron.core.transformer.multi_token_prediction import (
        MTPLossAutoScaler,
        MTPLossLoggingHelper,
    )

    def take() -> Tensor:
        noted = MTPLossLoggingHelper.tracker["loss_values"].clone()
        MTPLossLoggingHelper.clean_metrics_in_tracker()
        return noted

    with ExitStack() as undo:
        replace(undo, MTPLossLoggingHelper, "tracker", {})
        scale = torch.tensor(1 / NUM_MICROBATCHES)
        replace(undo, MTPLossAutoScaler, "main_loss_backward_scale", scale)
        yield take


def _mean(values: Sequence[Tensor]) -> list[float]:
    """Over ranks."""
    total = torch.stack([value.cpu() for value in values]).double()
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


# ---- the table -----------------------------------------------------------------------------------

NAMES = ("main loss", *(f"MTP {number + 1} loss" for number in range(NUM_MTP_LAYERS)), "grad norm")
SHOWN_STEPS = (0, NUM_STEPS // 2, NUM_STEPS - 1)


def printed(value: float) -> str:
    """At the precision of a training log."""
    return f"{value:.4f}"


def table(runs: Sequence[Run]) -> Table:
    """One row for each case and step shown."""
    shown = Table(
        title=f"GPT of megatron-core, 2 layers and {NUM_MTP_LAYERS} of MTP, {NUM_RANKS} ranks, "
        f"{NUM_STEPS} steps of {NUM_MICROBATCHES} microbatches, float32"
    )
    for column in ("embeddings", "strategy", "step", "weight gradients"):
        shown.add_column(column)
    for name in NAMES:
        shown.add_column(name, justify="right")
    shown.add_column("all steps")
    for same in by_model(runs):
        plain = same[0]
        for number in SHOWN_STEPS:
            for run in same:
                case = run.case
                shown.add_row(
                    "tied" if case.is_tied else "own",
                    case.strategy,
                    str(number + 1),
                    str(case.making),
                    *(printed(value) for value in run.steps[number].values),
                    _likeness(run, plain),
                )
        shown.add_section()
    return shown


def by_model(runs: Sequence[Run]) -> list[Sequence[Run]]:
    """Those that are to be alike, ``PLAIN`` first."""
    return [runs[start : start + len(Making)] for start in range(0, len(runs), len(Making))]


def _likeness(run: Run, plain: Run) -> str:
    if run is plain:
        return ""
    worst = largest_difference(run, plain)
    return "bitwise" if worst == 0 else f"within {worst:.0e}"


def largest_difference(run: Run, plain: Run) -> float:
    """Of any value of any step, relative to the plain one."""
    return max(
        abs(ours - theirs) / abs(theirs)
        for step, expected in zip(run.steps, plain.steps, strict=True)
        for ours, theirs in zip(step.values, expected.values, strict=True)
    )


if __name__ == "__main__":
    with RankPool(NUM_RANKS) as pool:
        by_rank = pool.run(train_all, list(cases()), timeout_s=400.0)
    Console(width=140).print(table(by_rank[0]))
