"""megatron-core's own training step over its FSDP v1, and the same under a schedule."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_layer import TransformerLayer
from models_support import random_tokens
from torch import Tensor
from torch.distributed.tensor import DTensor

from ep_overlap.models.groups import ExpertGroups, new_expert_groups
from ep_overlap.models.megatron import GPTBatch, GPTParts, mean_loss
from ep_overlap.models.megatron_build import MegatronSizes, build_gpt, process_groups


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model, its FSDP and how it is trained."""

    strategy: str = "optim_grads_params"
    dtype: torch.dtype = torch.float32
    layers: int = 4
    tied: bool = False
    shared: bool = False
    microbatches: int = 4
    steps: int = 3
    order: str | None = None
    delay: bool = False
    ddp: Mapping[str, Any] = field(default_factory=dict)
    """Other options of ``DistributedDataParallelConfig``."""


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The process groups of one world. Made once: connecting ranks is what takes time."""

    experts: ExpertGroups
    collection: ProcessGroupCollection

    @staticmethod
    def new(expert_parallel_size: int = 2, *, own_gathers: bool = False) -> "Groups":
        """``own_gathers``: gathers have groups of their own (Megatron's ``dp_cp_ag``)."""
        experts = new_expert_groups(expert_parallel_size)
        world = dist.get_world_size()
        collection = process_groups(experts)
        lone = [dist.new_group([rank]) for rank in range(world)][dist.get_rank()]
        collection.expt_tp = lone
        collection.dp_cp_ag = collection.expt_dp_ag = None
        for suffix in ("", "_ag") if own_gathers else ("",):
            data = dist.new_group(list(range(world)))
            of_expert = [
                dist.new_group(list(range(first, world, expert_parallel_size)))
                for first in range(expert_parallel_size)
            ]
            setattr(collection, f"dp_cp{suffix}", data)
            setattr(collection, f"expt_dp{suffix}", of_expert[experts.rank])
        for name in ("dp", "intra_dp_cp", "intra_dist_opt"):
            setattr(collection, name, collection.dp_cp)
        collection.intra_expt_dp = collection.expt_dp
        collection.tp_ep_pp = experts.exchange
        return Groups(experts=experts, collection=collection)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a script holds: FSDP around the model, its optimizer, and the parts for a schedule."""

    fsdp: FullyShardedDataParallel
    parts: GPTParts
    optimizer: MegatronOptimizer
    groups: Groups

    def batches(self, step: int, num: int) -> list[GPTBatch]:
        seed = 1000 * step + 100 * dist.get_rank()
        return [
            self.parts.batch(*random_tokens(seed + i, batch_size=2, seq_length=16))
            for i in range(num)
        ]

    def finalize(self) -> None:
        finalize_model_grads([self.fsdp], pg_collection=self.groups.collection)


def trained(case: Case, groups: Groups) -> Trained:
    sizes = MegatronSizes(
        num_layers=case.layers,
        hidden_size=32,
        num_heads=4,
        ffn_hidden_size=48,
        num_experts=4,
        topk=2,
        seq_length=16,
        shared_expert_ffn_hidden_size=24 if case.shared else None,
        tied_embeddings=case.tied,
        dtype=case.dtype,
    )
    model = build_gpt(sizes, groups.experts, seed=5)
    parts = GPTParts(model)
    fsdp = FullyShardedDataParallel(
        model.config, ddp_config(case), model, pg_collection=groups.collection
    )
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        bf16=case.dtype is torch.bfloat16,
        params_dtype=case.dtype,
        use_distributed_optimizer=True,
        overlap_param_gather=True,
        clip_grad=1.0,
    )
    optimizer = get_megatron_optimizer(
        config, [fsdp], use_gloo_process_groups=False, pg_collection=groups.collection
    )
    model.config.no_sync_func = fsdp.no_sync
    model.config.finalize_model_grads_func = finalize_model_grads
    return Trained(fsdp=fsdp, parts=parts, optimizer=optimizer, groups=groups)


def ddp_config(case: Case) -> DistributedDataParallelConfig:
    chosen: dict[str, Any] = {
        "use_megatron_fsdp": True,
        "use_distributed_optimizer": True,
        "data_parallel_sharding_strategy": case.strategy,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "gradient_reduce_div_fusion": False,
        **case.ddp,
    }
    return DistributedDataParallelConfig(**chosen)


Seen = dict[str, Tensor]
"""Losses, gradients as the optimizer finds them, and weights, of every step, by name."""

Step = Callable[[list[GPTBatch]], list[Tensor]]
"""Forward and backward of one step, gradients finalized; returns the losses."""


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(case: Case, model: Trained, step: Step) -> Seen:
    seen: Seen = {}
    for index in range(case.steps):
        model.optimizer.zero_grad()
        with counted() as counts:
            losses = step(model.batches(index, case.microbatches))
        seen |= {f"{index}.loss{i}": loss.clone() for i, loss in enumerate(losses)}
        for name, param in model.fsdp.named_parameters():
            if param.grad is not None:
                seen[f"{index}.grad.{name}"] = local(param.grad)
        seen[f"{index}.num_gathers"] = torch.tensor(counts["all_gather_into_tensor"])
        seen[f"{index}.num_reductions"] = torch.tensor(counts["reduce_scatter_tensor"])
        _, norm, _ = model.optimizer.step()
        seen[f"{index}.norm"] = torch.tensor(norm)
        for name, param in model.fsdp.named_parameters():
            seen[f"{index}.weight.{name}"] = local(param)
    return seen


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How many gathers and reductions FSDP asks for. The dispatcher's gathers of token counts are
    not counted: they are on another group."""
    ops = ("all_gather_into_tensor", "reduce_scatter_tensor")
    counts = dict.fromkeys(ops, 0)
    originals = {op: getattr(dist, op) for op in ops}

    def counting(op: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if "output_tensor" in kwargs or "output" in kwargs:  # FSDP's way to call it
                counts[op] += 1
            return originals[op](*args, **kwargs)

        return call

    for op in ops:
        setattr(dist, op, counting(op))
    try:
        yield counts
    finally:
        for op, original in originals.items():
            setattr(dist, op, original)


def standard_step(model: Trained) -> Step:
    """megatron-core's own."""

    def forward_step(data: Iterator[GPTBatch], fsdp: FullyShardedDataParallel) -> Any:
        batch = next(data)
        output = fsdp(batch.tokens, batch.position_ids, batch.attention_mask, labels=batch.targets)

        def loss_of(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            loss = mean_loss(output, batch)
            return loss, {"loss": loss.detach().clone()}

        return output, loss_of

    def step(batches: list[GPTBatch]) -> list[Tensor]:
        reported = forward_backward_no_pipelining(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=[model.fsdp],
            num_microbatches=len(batches),
            seq_length=16,
            micro_batch_size=2,
            pg_collection=model.groups.collection,
        )
        return [each["loss"] for each in reported]

    return step


def unequal(got: Seen, expected: Seen) -> list[str]:
    assert got.keys() == expected.keys()
    return [
        name
        for name, value in got.items()
        if ".num_" not in name and not torch.equal(value, expected[name])
    ]


__all__ = ["TransformerLayer"]
