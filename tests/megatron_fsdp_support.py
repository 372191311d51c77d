"""megatron-core's own training step over its FSDP v1, and the same under a schedule."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallelConfig,
    FullyShardedDataParallel,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.process_groups_config import ProcessGroupCollection
from models_support import random_tokens
from torch import Tensor
from torch.distributed.tensor import DTensor

from ep_overlap.config import OverlapConfig
from ep_overlap.models.groups import ExpertGroups, new_expert_groups
from ep_overlap.models.megatron import get_forward_backward_func
from ep_overlap.models.megatron_build import MegatronSizes, build_gpt, process_groups
from ep_overlap.models.megatron_cpu import megatron_schedule_on_cpu
from ep_overlap.models.megatron_cpu_fsdp import megatron_fsdp_on_cpu
from ep_overlap.models.megatron_globals import megatron_schedule_globals
from ep_overlap.models.megatron_hybrid import HybridParts
from ep_overlap.models.megatron_hybrid_build import build_hybrid
from ep_overlap.models.megatron_parts import GPTBatch, GPTParts, mean_loss
from ep_overlap.run.layer import modules_of
from ep_overlap.schedule import OverlapSchedule
from fsdp_hooks.adapters.megatron_fsdp import MegatronFsdp
from fsdp_hooks.streams import StreamKind

SEQ_LENGTH = 16
BATCH_SIZE = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model, its FSDP and how it is trained."""

    strategy: str = "optim_grads_params"
    dtype: torch.dtype = torch.float32
    layers: int = 2
    freq: int = 1
    tied: bool = False
    shared: bool = False
    pattern: str | None = None
    """Of a HybridModel, in place of ``layers`` and ``freq``."""
    frozen: bool = False
    """Whether the first router is."""
    per_token: bool = False
    """``calculate_per_token_loss``."""
    ddp: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Other options of ``DistributedDataParallelConfig``."""
    own_gathers: bool = False
    """Whether gathers have process groups of their own."""
    overlap: bool = False
    """``overlap_moe_expert_parallel_comm``, by which FSDP v1 chooses its hooks."""
    microbatches: int = 3
    steps: int = 2
    order: str | None = None
    delay: bool = False
    max_unsharded_units: int | None = None
    kind: StreamKind | None = None
    device: str = "cpu"
    transformer_engine: bool = False
    """Whose layers, else megatron-core's local ones; needs a GPU."""
    optimizes: bool = True
    """Whether a step ends with the optimizer's; else with its gradients."""

    @property
    def on_standard_path(self) -> "Case":
        """Less what only a schedule knows, and groups of its own for gathers."""
        return replace(
            self,
            order=None,
            delay=False,
            overlap=False,
            own_gathers=False,
            max_unsharded_units=None,
        )


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The process groups of one world. Made once: connecting ranks is what takes time."""

    experts: ExpertGroups
    shared: ProcessGroupCollection
    """Gathers and reductions over one group."""
    apart: ProcessGroupCollection
    """Gathers over groups of their own (``dp_cp_ag``, ``expt_dp_ag``)."""

    @staticmethod
    def new(expert_parallel_size: int = 2) -> "Groups":
        size = min(expert_parallel_size, dist.get_world_size())
        experts = new_expert_groups(size)
        lone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        data, gathers = _new_data_groups(experts, size), _new_data_groups(experts, size)
        shared, apart = process_groups(experts), process_groups(experts)
        for collection in (shared, apart):
            for name in ("dp", "dp_cp", "intra_dp_cp", "intra_dist_opt"):
                setattr(collection, name, data[0])
            for name in ("expt_dp", "intra_expt_dp"):
                setattr(collection, name, data[1])
            collection.expt_tp = lone
            collection.dp_cp_ag = collection.expt_dp_ag = None
            collection.tp_ep_pp = experts.exchange  # the norm of experts' gradients is over it
        apart.dp_cp_ag, apart.expt_dp_ag = gathers
        return Groups(experts=experts, shared=shared, apart=apart)

    def of(self, case: Case) -> ProcessGroupCollection:
        return self.apart if case.own_gathers else self.shared


def _new_data_groups(experts: ExpertGroups, size: int) -> tuple[Any, Any]:
    world = dist.get_world_size()
    data = dist.new_group(list(range(world)))
    of_experts = [dist.new_group(list(range(first, world, size))) for first in range(size)]
    return data, of_experts[experts.rank]


@contextmanager
def one_world(expert_parallel_size: int = 2, device: str = "cpu") -> Generator[Groups]:
    """Groups of the ranks, and what megatron-core needs there: its FSDP, its optimizers, its
    schedules."""
    with ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(megatron_fsdp_on_cpu())
            stack.enter_context(megatron_schedule_on_cpu())
        else:
            stack.enter_context(megatron_schedule_globals())
        yield Groups.new(expert_parallel_size)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a script holds: FSDP around the model, its optimizer; and the parts for a schedule."""

    fsdp: FullyShardedDataParallel
    parts: GPTParts | HybridParts
    optimizer: MegatronOptimizer
    groups: Groups
    collection: ProcessGroupCollection
    device: str

    def batches(self, step: int, num: int) -> list[GPTBatch]:
        seed = 1000 * step + 100 * dist.get_rank()
        return [
            self.parts.batch(*(tensor.to(self.device) for tensor in tokens))
            for tokens in (random_tokens(seed + i, BATCH_SIZE, SEQ_LENGTH) for i in range(num))
        ]

    def finalize(self) -> None:
        finalize_model_grads([self.fsdp], pg_collection=self.collection)


def trained(case: Case, groups: Groups, **changed: Any) -> Trained:
    """``changed``: other arguments of ``FullyShardedDataParallel``."""
    sizes = MegatronSizes(
        num_layers=case.layers,
        hidden_size=32,
        num_heads=4,
        ffn_hidden_size=48,
        num_experts=4,
        topk=2,
        seq_length=SEQ_LENGTH,
        moe_layer_freq=case.freq,
        shared_expert_ffn_hidden_size=24 if case.shared else None,
        tied_embeddings=case.tied,
        transformer_impl="transformer_engine" if case.transformer_engine else "local",
        dtype=case.dtype,
    )
    collection = groups.of(case)
    if case.pattern is None:
        parts = GPTParts(build_gpt(sizes, groups.experts, seed=5, device=case.device))
    else:
        hybrid = build_hybrid(sizes, case.pattern, groups.experts, seed=5, device=case.device)
        parts = HybridParts(hybrid)
    model = parts.module
    model.config.overlap_moe_expert_parallel_comm = case.overlap
    model.config.calculate_per_token_loss = case.per_token
    if case.frozen:
        model.decoder.layers[0].mlp.router.weight.requires_grad_(False)
    ddp_config = DistributedDataParallelConfig(
        **{
            "use_megatron_fsdp": True,
            "use_distributed_optimizer": True,
            "data_parallel_sharding_strategy": case.strategy,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
            "gradient_reduce_div_fusion": False,  # gloo cannot
            **case.ddp,
        }
    )
    fsdp = FullyShardedDataParallel(
        model.config, ddp_config, model, pg_collection=collection, **changed
    )
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        clip_grad=1.0,
        bf16=case.dtype is torch.bfloat16,
        params_dtype=case.dtype,
        use_distributed_optimizer=True,
        overlap_param_gather=ddp_config.overlap_param_gather,
    )
    optimizer = get_megatron_optimizer(
        config, [fsdp], use_gloo_process_groups=False, pg_collection=collection
    )
    model.config.no_sync_func = fsdp.no_sync
    model.config.finalize_model_grads_func = finalize_model_grads
    return Trained(
        fsdp=fsdp,
        parts=parts,
        optimizer=optimizer,
        groups=groups,
        collection=collection,
        device=case.device,
    )


# ---- training ------------------------------------------------------------------------------------

Seen = dict[str, Tensor]
"""Losses, gradients as the optimizer finds them, their norm, and weights, of every step."""

Step = Callable[[list[GPTBatch]], list[Tensor]]
"""Forward and backward of one step, gradients finalized; returns the losses."""


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(case: Case, model: Trained, steps: Sequence[Step]) -> Seen:
    """``steps``: taken in turn."""
    seen: Seen = {}
    for index in range(case.steps):
        model.optimizer.zero_grad()
        losses = steps[index % len(steps)](model.batches(index, case.microbatches))
        seen |= {f"{index}.loss{i}": loss.clone() for i, loss in enumerate(losses)}
        named = list(model.fsdp.named_parameters())
        assert all(isinstance(param, DTensor) for _, param in named) or case.strategy == "no_shard"
        grads = {name: param.grad for name, param in named if param.grad is not None}
        seen |= {f"{index}.grad.{name}": local(grad) for name, grad in grads.items()}
        if not case.optimizes:
            continue
        _, norm, _ = model.optimizer.step()
        seen[f"{index}.norm"] = torch.tensor(norm)
        main = model.fsdp.param_and_grad_buffer.optimizer_named_parameters
        seen |= {f"{index}.weight.{name}": local(param) for name, param in main}
    return seen


def standard_step(model: Trained) -> Step:
    """megatron-core's own ``forward_backward_no_pipelining``; with the flag for overlap set, that
    runs its own overlapped schedule."""
    return _step_of(model, forward_backward_no_pipelining)


def dropin_step(model: Trained) -> Step:
    """Ours, in place of it."""
    return _step_of(model, get_forward_backward_func())


def _step_of(model: Trained, forward_backward: Callable[..., Any]) -> Step:
    def forward_step(
        data: Iterator[GPTBatch], fsdp: Any, return_schedule_plan: bool = False
    ) -> Any:
        batch = next(data)
        call = model.parts.module.build_schedule_plan if return_schedule_plan else fsdp
        output = call(batch.tokens, batch.position_ids, batch.attention_mask, labels=batch.targets)

        def loss_of(output: Tensor) -> tuple[Any, ...]:
            loss = mean_loss(output, batch)
            logged = {"loss": loss.detach().clone()}
            if not model.parts.module.config.calculate_per_token_loss:
                return loss, logged
            num_tokens = torch.tensor(output.numel(), dtype=torch.int, device=output.device)
            return output.float().sum(), num_tokens, logged

        return output, loss_of

    def step(batches: list[GPTBatch]) -> list[Tensor]:
        reported = forward_backward(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=[model.fsdp],
            num_microbatches=len(batches),
            seq_length=SEQ_LENGTH,
            micro_batch_size=BATCH_SIZE,
            pg_collection=model.collection,
        )
        return [each["loss"] for each in reported]

    return step


def core_of(case: Case, model: Trained) -> MegatronFsdp:
    layers = [module for layer in model.parts.layers for module in modules_of(layer.module)]
    return MegatronFsdp(model.fsdp, layers, stream_kind=case.kind)


def schedule_of(case: Case, model: Trained, core: MegatronFsdp) -> OverlapSchedule:
    config = OverlapConfig(
        num_microbatches=case.microbatches,
        order=case.order,
        overlap=case.order != "serial",
        delay_wgrad=case.delay,
        max_unsharded_units=case.max_unsharded_units,
    )
    return OverlapSchedule(model.parts, config, lifecycle=core, stream_kind=case.kind)


def scheduled_step(model: Trained, schedule: OverlapSchedule) -> Step:
    def step(batches: list[GPTBatch]) -> list[Tensor]:
        losses = schedule.step(batches, mean_loss).losses
        model.finalize()
        return list(losses)

    return step


def unequal(got: Seen, expected: Seen) -> list[str]:
    assert got.keys() == expected.keys()
    return [name for name, value in got.items() if not torch.equal(value, expected[name])]


def differences(cases: Sequence[Case], expert_parallel_size: int = 2) -> dict[str, list[str]]:
    """By case, what a schedule leaves otherwise than megatron-core's own path."""
    found: dict[str, list[str]] = {}
    expected: dict[str, Seen] = {}
    with one_world(expert_parallel_size) as groups:
        for case in cases:
            standard = case.on_standard_path
            if str(standard) not in expected:
                model = trained(standard, groups)
                expected[str(standard)] = train(standard, model, [standard_step(model)])
            model = trained(case, groups)
            schedule = schedule_of(case, model, core_of(case, model))
            got = train(case, model, [scheduled_step(model, schedule)])
            if names := unequal(got, expected[str(standard)]):
                found[str(case)] = names
    return found


def dropin_differences(cases: Sequence[Case]) -> dict[str, list[str]]:
    """As ``differences``, of the drop-in. On one device."""
    found: dict[str, list[str]] = {}
    (device,) = {case.device for case in cases}
    with one_world(device=device) as groups:
        for case in cases:
            standard = case.on_standard_path
            model = trained(standard, groups)
            expected = train(standard, model, [standard_step(model)])
            model = trained(case, groups)
            model.parts.module.config.delay_wgrad_compute = case.delay
            if names := unequal(train(case, model, [dropin_step(model)]), expected):
                found[str(case)] = names
    return found


# ---- collectives ---------------------------------------------------------------------------------


@contextmanager
def counted() -> Generator[dict[str, int]]:
    """Gathers and reductions that FSDP v1 asks for: it names the output in the call, and the
    dispatcher, which gathers token counts, does not."""
    counts = dict.fromkeys(("all_gather_into_tensor", "reduce_scatter_tensor"), 0)

    def counting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += bool({"output_tensor", "output"} & kwargs.keys())
            return real(*args, **kwargs)

        return call

    with ExitStack() as undo:
        for name in counts:
            real = getattr(dist, name)
            undo.callback(setattr, dist, name, real)
            setattr(dist, name, counting(name, real))
        yield counts
