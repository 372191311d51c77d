"""A model in training on this rank: built, sharded, with its optimizer, stepped either way.

``ScheduledStep`` runs the schedule. ``StandardStep`` is what it is compared with: the module's own
``forward()`` and one ``loss.backward()`` per microbatch, driven by module hooks.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ep_overlap.commands.arguments import ModelFlags, ModelName, OptimizerName, TransformerImpl
from ep_overlap.commands.data import VOCAB_SIZE
from ep_overlap.commands.world import Meshes, World
from ep_overlap.config import OverlapConfig
from ep_overlap.links.group import LinkGroup
from ep_overlap.links.speed import Wire
from ep_overlap.links.times import CollectiveKind
from ep_overlap.models.groups import ExpertGroups, lone_expert_groups
from ep_overlap.report.meter import LinkMeter
from ep_overlap.run.layer import ModelParts
from ep_overlap.run.trace import StepTrace
from ep_overlap.schedule import OverlapSchedule, StepResult
from fsdp_hooks.accumulation import microbatch
from fsdp_hooks.context import Runtime
from fsdp_hooks.lifecycle import RootLifecycle, lifecycle_of
from fsdp_hooks.optimizer import shard_optimizer
from fsdp_hooks.precision import MixedPrecision
from fsdp_hooks.shard import fully_shard
from fsdp_hooks.wgrad_layers import delayed_wgrad, manage_wgrad

LossFn = Callable[[Tensor, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to build a trainee; equal recipes with equal seeds give equal weights."""

    model: ModelName
    sizes: ModelFlags
    seq_length: int
    seed: int
    expert_parallel_size: int
    strategy: str
    optimizer: OptimizerName
    lr: float
    transformer_impl: TransformerImpl = TransformerImpl.LOCAL
    bf16: bool = False
    """Compute in bfloat16; main weights and their gradients are in float32."""
    grad_reduce_in_bf16: bool = False
    fuse_wgrad: bool = False
    """Write weight gradients straight into the reduction's input."""
    recompute_modules: tuple[str, ...] = ()
    """Parts of layers that the model recomputes: megatron-core's setting, of its model alone."""
    force_load_balancing: bool = False
    """Spread tokens evenly over the experts, whatever the router says: for measuring."""


class PartsForTraining(ModelParts[Any, Any], Protocol):
    """What both models' parts have besides."""

    def expert_parameters(self) -> Iterable[nn.Parameter]:
        """Parameters that belong to one expert."""
        ...

    def global_name(self, name: str) -> str:
        """A parameter's name in the model of all expert-parallel ranks."""
        ...


@final
@dataclass(frozen=True, kw_only=True)
class Trainee:
    """A sharded model and its optimizer."""

    parts: PartsForTraining
    loss_fn: LossFn
    make_batch: Callable[[Tensor, Tensor], Any]
    """``(tokens, targets)`` -> the model's batch; int64 ``[B, S]`` each."""
    optimizer: torch.optim.Optimizer
    links: tuple[LinkGroup, ...]
    """Its own groups, for a meter."""

    @property
    def module(self) -> nn.Module:
        """The whole model."""
        return self.parts.module

    @property
    def lifecycle(self) -> RootLifecycle:
        """Of the whole model."""
        return lifecycle_of(self.module)

    def meter(self, world: World) -> LinkMeter | None:
        """None on CUDA, where link groups do not measure."""
        return LinkMeter(self.links, world.control) if self.links else None


def build_trainee(recipe: Recipe, world: World, meshes: Meshes) -> Trainee:
    """Build, shard, and make the optimizer. Collective."""
    first_link = len(world.links)
    groups = _expert_groups(recipe.expert_parallel_size, world)
    parts, loss_fn, make_batch = _build_parts(recipe, groups, world)
    experts = frozenset(parts.expert_parameters())

    def mesh_of(name: str, param: nn.Parameter) -> Any:
        return meshes.expert if param in experts else meshes.dense

    mp = None
    if recipe.bf16:
        mp = MixedPrecision(reduce_dtype=torch.bfloat16 if recipe.grad_reduce_in_bf16 else None)
    for layer in parts.layers:
        fully_shard(layer.module, mesh=mesh_of, strategy=recipe.strategy, mp=mp)
    fully_shard(
        parts.module,
        mesh=mesh_of,
        strategy=recipe.strategy,
        mp=mp,
        grad_divisor=world.size,
        runtime=Runtime(new_group=_SharingGroups(world)),
    )
    parameters = list(parts.module.parameters())
    if recipe.optimizer is OptimizerName.SGD:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=recipe.lr)
    else:
        optimizer = torch.optim.AdamW(parameters, lr=recipe.lr)
    lifecycle_of(parts.module)  # builds the root, and with it the groups of its lanes
    if recipe.fuse_wgrad:
        manage_wgrad(parts.module, fuse=True, layer_types=parts.wgrad_layers)
    return Trainee(
        parts=parts,
        loss_fn=loss_fn,
        make_batch=make_batch,
        optimizer=shard_optimizer(optimizer),
        links=tuple(world.links[first_link:]),
    )


@final
class _SharingGroups:
    """Makes the groups of the AG and RS lanes; each lane has a wire of its own."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._wires: dict[str, Wire] = {}

    def __call__(self, ranks: Sequence[int], name: str) -> ProcessGroup:
        lane = name.partition("-")[0]
        kind = {"gather": CollectiveKind.AG, "rescue": CollectiveKind.AG}.get(
            lane, CollectiveKind.RS
        )
        wire = self._wires.setdefault(lane, Wire())
        return self._world.new_group(ranks, name=name, kind=kind, wire=wire)


def _expert_groups(size: int, world: World) -> ExpertGroups:
    if size == 1:
        return lone_expert_groups()
    first = world.rank // size * size
    ranks = list(range(first, first + size))
    return ExpertGroups(
        exchange=world.new_group(ranks, name="exchange", kind=CollectiveKind.A2A, wire=None),
        counts=world.new_group(ranks, name="counts", kind=CollectiveKind.OTHER, wire=None),
    )


def _build_parts(
    recipe: Recipe, groups: ExpertGroups, world: World
) -> tuple[PartsForTraining, LossFn, Callable[[Tensor, Tensor], Any]]:
    sizes = recipe.sizes
    dtype = torch.bfloat16 if recipe.bf16 else torch.float32
    if recipe.model is ModelName.REFERENCE:
        from ep_overlap.models.reference import (
            Batch,
            MoETransformer,
            ReferenceConfig,
            cross_entropy,
        )

        config = ReferenceConfig(
            num_layers=sizes.num_layers,
            hidden_size=sizes.hidden_size,
            num_heads=sizes.num_attention_heads,
            ffn_hidden_size=sizes.moe_ffn_hidden_size,
            num_experts=sizes.num_experts,
            topk=sizes.moe_router_topk,
            seq_length=recipe.seq_length,
            vocab_size=VOCAB_SIZE,
            moe_layer_freq=sizes.moe_layer_freq,
            force_load_balancing=recipe.force_load_balancing,
            dtype=dtype,
        )
        model = MoETransformer(config, groups, seed=recipe.seed, device=world.device)
        return model, cross_entropy, lambda tokens, targets: Batch(tokens=tokens, targets=targets)
    from ep_overlap.models.megatron import GPTParts, mean_loss
    from ep_overlap.models.megatron_build import MegatronSizes, build_gpt

    parts = GPTParts(
        build_gpt(
            MegatronSizes(
                num_layers=sizes.num_layers,
                hidden_size=sizes.hidden_size,
                num_heads=sizes.num_attention_heads,
                ffn_hidden_size=sizes.moe_ffn_hidden_size,
                num_experts=sizes.num_experts,
                topk=sizes.moe_router_topk,
                seq_length=recipe.seq_length,
                vocab_size=VOCAB_SIZE,
                moe_layer_freq=sizes.moe_layer_freq,
                shared_expert_ffn_hidden_size=sizes.moe_shared_expert_intermediate_size,
                force_load_balancing=recipe.force_load_balancing,
                transformer_impl=recipe.transformer_impl.value,
                dtype=dtype,
                settings=_recompute(recipe.recompute_modules),
            ),
            groups,
            seed=recipe.seed,
            device=world.device,
            alone=world.new_group(
                [world.rank], name="one_rank", kind=CollectiveKind.OTHER, wire=None
            ),
        )
    )
    return parts, mean_loss, parts.batch


def _recompute(modules: Sequence[str]) -> dict[str, object]:
    """Selective, by megatron-core's names."""
    if not modules:
        return {}
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


class Stepper(Protocol):
    """One way to make a step: gradients are in ``.grad`` afterwards."""

    def step(self, batches: Sequence[Any]) -> StepResult:
        """Forward and backward of all microbatches."""
        ...


@final
class ScheduledStep:
    """Under a schedule."""

    def __init__(self, trainee: Trainee, config: OverlapConfig, world: World) -> None:
        self._loss_fn = trainee.loss_fn
        self.schedule = OverlapSchedule(trainee.parts, config, meter=trainee.meter(world))

    def step(self, batches: Sequence[Any]) -> StepResult:
        return self.schedule.step(batches, self._loss_fn)


@final
class StandardStep:
    """The module's own forward and one backward per microbatch: the baseline.

    ``delay_wgrad``: make weight gradients after each backward, not in it.
    """

    def __init__(
        self, trainee: Trainee, num_microbatches: int, world: World, *, delay_wgrad: bool = False
    ) -> None:
        self._delayed: Callable[[], AbstractContextManager[object]] = nullcontext
        if delay_wgrad:
            types = trainee.parts.wgrad_layers
            self._delayed = partial(delayed_wgrad, trainee.module, layer_types=types)
        self._trainee = trainee
        self._num_microbatches = num_microbatches
        self._meter = trainee.meter(world)

    def step(self, batches: Sequence[Any]) -> StepResult:
        trainee, trace = self._trainee, StepTrace()
        trainee.lifecycle.observe(trace)
        if self._meter is not None:
            self._meter.begin()
        losses: list[Tensor] = []
        for index, batch in enumerate(batches):
            with microbatch(trainee.module, is_last=index == len(batches) - 1), self._delayed():
                loss = trainee.loss_fn(trainee.parts.whole(batch), batch)
                losses.append(loss.detach())
                (loss / self._num_microbatches).backward()
        trace.finish()
        return StepResult(
            losses=tuple(losses),
            trace=trace,
            hidden_share=None if self._meter is None else self._meter.share(trace),
        )
