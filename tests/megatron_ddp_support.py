"""megatron-core's own training step over its DDP, and the same under a schedule."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import pipeline_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
    param_and_grad_buffer,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron_script import BATCH_SIZE, SEQ_LENGTH, forward_step, microbatches
from models_support import random_tokens
from torch import Tensor, nn

from ep_overlap.config import OverlapConfig
from ep_overlap.models.groups import ExpertGroups, new_expert_groups
from ep_overlap.models.megatron import install, uninstall
from ep_overlap.models.megatron_build import MegatronSizes, build_gpt, process_groups
from ep_overlap.models.megatron_cpu import megatron_training_on_cpu
from ep_overlap.models.megatron_globals import megatron_globals
from ep_overlap.models.megatron_hybrid import HybridParts
from ep_overlap.models.megatron_hybrid_build import build_hybrid
from ep_overlap.models.megatron_parts import GPTBatch, GPTParts, mean_loss
from ep_overlap.run.layer import modules_of
from ep_overlap.schedule import OverlapSchedule
from fsdp_hooks.adapters.megatron_ddp import MegatronDdp
from fsdp_hooks.streams import StreamKind

Seen = dict[str, Tensor]
"""Losses, gradients as the optimizer finds them, and weights, of every step, by name."""

SMALL_BUCKETS = 8000
"""Elements: several buckets a layer, some across layers."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model, its DDP and how it is trained."""

    dtype: torch.dtype = torch.float32
    layers: int = 2
    freq: int = 1
    tied: bool = False
    shared: bool = False
    pattern: str | None = None
    """Of a HybridModel, in place of ``layers`` and ``freq``."""
    ddp: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options of ``DistributedDataParallelConfig``."""
    microbatches: int = 3
    steps: int = 2
    """DDP counts in the first what it reduces by in those that follow."""
    order: str | None = None
    delay: bool = False
    dispatch_over: bool = False
    float16_module: bool = False
    """Within DDP, as scripts have it."""
    device: str = "cpu"
    transformer_engine: bool = False
    """Whose layers, else megatron-core's local ones; needs a GPU."""
    kind: StreamKind | None = None

    @property
    def on_standard_path(self) -> "Case":
        """Less what only a schedule knows."""
        return replace(self, order=None, delay=False, dispatch_over=False)


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The process groups of one world. Made once: connecting ranks is what takes time."""

    experts: ExpertGroups
    collection: ProcessGroupCollection

    @staticmethod
    def new() -> "Groups":
        """Expert parallelism of two ranks; of one, where there is one."""
        world = dist.get_world_size()
        size = min(2, world)
        experts = new_expert_groups(size)
        data = dist.new_group(list(range(world)))
        of_experts = [dist.new_group(list(range(first, world, size))) for first in range(size)]
        collection = process_groups(experts)
        for name in ("dp", "dp_cp", "intra_dp_cp", "intra_dist_opt"):
            setattr(collection, name, data)
        for name in ("expt_dp", "intra_expt_dp"):
            setattr(collection, name, of_experts[experts.rank])
        if size > 1:  # over which the norm of experts' gradients is summed
            collection.tp_ep_pp = experts.exchange
        return Groups(experts=experts, collection=collection)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a script holds: DDP around the model, its optimizer; and the parts for a schedule."""

    ddp: DistributedDataParallel
    parts: GPTParts | HybridParts
    optimizer: MegatronOptimizer
    groups: Groups
    device: str

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.ddp.module.named_parameters()

    def shards(self) -> Seen:
        """This rank's part of the weights, as its optimizer updates them."""
        weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        return {f"shard{i}": weight.detach().clone() for i, weight in enumerate(weights)}

    def batches(self, step: int, num: int) -> list[GPTBatch]:
        seed = 1000 * step + 100 * dist.get_rank()
        return [
            self.parts.batch(*(tensor.to(self.device) for tensor in random_tokens(seed + i, 2, 16)))
            for i in range(num)
        ]

    def finalize(self) -> None:
        finalize_model_grads([self.ddp], pg_collection=self.groups.collection)


def trained(case: Case, groups: Groups) -> Trained:
    sizes = MegatronSizes(
        num_layers=case.layers,
        hidden_size=32,
        num_heads=4,
        ffn_hidden_size=48,
        num_experts=4,
        topk=2,
        seq_length=16,
        moe_layer_freq=case.freq,
        shared_expert_ffn_hidden_size=24 if case.shared else None,
        tied_embeddings=case.tied,
        transformer_impl="transformer_engine" if case.transformer_engine else "local",
        dtype=case.dtype,
    )
    if case.pattern is None:
        parts = GPTParts(build_gpt(sizes, groups.experts, seed=5, device=case.device))
    else:
        hybrid = build_hybrid(sizes, case.pattern, groups.experts, seed=5, device=case.device)
        parts = HybridParts(hybrid)
    model = parts.module
    inside = Float16Module(model.config, model) if case.float16_module else model
    ddp_config = DistributedDataParallelConfig(**{"bucket_size": SMALL_BUCKETS, **case.ddp})
    ddp = DistributedDataParallel(model.config, ddp_config, inside, pg_collection=groups.collection)
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        clip_grad=1.0,
        bf16=case.dtype is torch.bfloat16,
        params_dtype=case.dtype,
        use_distributed_optimizer=ddp_config.use_distributed_optimizer,
        overlap_param_gather=ddp_config.overlap_param_gather,
    )
    optimizer = get_megatron_optimizer(
        config, [ddp], use_gloo_process_groups=False, pg_collection=groups.collection
    )
    model.config.no_sync_func = ddp.no_sync
    model.config.finalize_model_grads_func = finalize_model_grads
    return Trained(ddp=ddp, parts=parts, optimizer=optimizer, groups=groups, device=case.device)


@contextmanager
def one_world(device: str = "cpu") -> Generator[Groups]:
    """Groups of the ranks, and what megatron-core needs there. On leaving, its process-wide choice
    of a reduce-scatter is undone, which ``reduce_scatter_with_fp32_accumulation`` makes for
    good."""
    with megatron_training_on_cpu() if device == "cpu" else megatron_globals():
        theirs = param_and_grad_buffer.dist_reduce_scatter_func
        try:
            yield Groups.new()
        finally:
            param_and_grad_buffer.dist_reduce_scatter_func = theirs


# ---- training ------------------------------------------------------------------------------------

Step = Callable[[list[GPTBatch]], list[Tensor]]
"""Forward and backward of one step, gradients finalized; returns the losses."""


def train(case: Case, model: Trained, steps: Sequence[Step]) -> Seen:
    """``steps``: taken in turn."""
    seen: Seen = {}
    for index in range(case.steps):
        model.ddp.zero_grad_buffer()
        model.optimizer.zero_grad()
        losses = steps[index % len(steps)](model.batches(index, case.microbatches))
        seen |= {f"{index}.loss{i}": loss.clone() for i, loss in enumerate(losses)}
        seen |= {f"{index}.grad.{name}": param.main_grad.clone() for name, param in model.named()}
        _, norm, _ = model.optimizer.step()
        seen[f"{index}.norm"] = torch.tensor(norm)
        seen |= {f"{index}.{name}": shard for name, shard in model.shards().items()}
    if model.ddp.ddp_config.overlap_param_gather:
        model.ddp.start_param_sync(force_sync=True)
    return seen | {f"weight.{name}": param.detach().clone() for name, param in model.named()}


def standard_step(model: Trained) -> Step:
    """megatron-core's own ``forward_backward_no_pipelining``."""

    def forward_step(data: Iterator[GPTBatch], ddp: DistributedDataParallel) -> Any:
        batch = next(data)
        output = ddp(batch.tokens, batch.position_ids, batch.attention_mask, labels=batch.targets)

        def loss_of(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            loss = mean_loss(output, batch)
            return loss, {"loss": loss.detach().clone()}

        return output, loss_of

    def step(batches: list[GPTBatch]) -> list[Tensor]:
        reported = forward_backward_no_pipelining(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=[model.ddp],
            num_microbatches=len(batches),
            seq_length=16,
            micro_batch_size=2,
            pg_collection=model.groups.collection,
        )
        return [each["loss"] for each in reported]

    return step


def core_of(case: Case, model: Trained) -> MegatronDdp:
    layers = [module for layer in model.parts.layers for module in modules_of(layer.module)]
    return MegatronDdp(model.ddp, layers, stream_kind=case.kind)


def schedule_of(case: Case, model: Trained, core: MegatronDdp) -> OverlapSchedule:
    config = OverlapConfig(
        num_microbatches=case.microbatches,
        order=case.order,
        overlap=case.order != "serial",
        delay_wgrad=case.delay,
        dispatch_over_wgrad=case.dispatch_over,
    )
    return OverlapSchedule(model.parts, config, lifecycle=core, stream_kind=case.kind)


def scheduled_step(model: Trained, schedule: OverlapSchedule) -> Step:
    def step(batches: list[GPTBatch]) -> list[Tensor]:
        losses = schedule.step(batches, mean_loss).losses
        model.finalize()
        return list(losses)

    return step


def train_by_script(case: Case, model: Trained) -> Seen:
    """As ``megatron.training.training`` has it in ``train`` and ``evaluate``, by the function that
    it gets from megatron-core: DDP's forward hooks are off in the first step and in evaluation,
    which comes after the second."""
    ddp, config, hooked = model.ddp, model.ddp.config, model.ddp.use_forward_hook
    config.no_sync_func = ddp.no_sync if ddp.ddp_config.overlap_grad_reduce else None
    config.grad_scale_func = model.optimizer.scale_loss
    function = pipeline_parallel.get_forward_backward_func(pp_size=1)
    seen: Seen = {}

    def run(word: str, seed: int, **arguments: Any) -> None:
        logged = function(
            forward_step_func=forward_step,
            data_iterator=[microbatches(case.microbatches, seed, device=case.device)],
            model=[ddp],
            num_microbatches=case.microbatches,
            seq_length=SEQ_LENGTH,
            micro_batch_size=BATCH_SIZE,
            pg_collection=model.groups.collection,
            **arguments,
        )
        seen.update({f"{word}.loss{i}": each["lm loss"] for i, each in enumerate(logged)})

    if hooked:
        ddp.disable_forward_pre_hook(param_sync=False)
    for step in range(3):
        ddp.zero_grad_buffer()
        model.optimizer.zero_grad()
        run(f"{step}", step)
        seen |= {f"{step}.grad.{name}": param.main_grad.clone() for name, param in model.named()}
        model.optimizer.step()
        seen |= {f"{step}.{name}": shard for name, shard in model.shards().items()}
        if hooked and step == 0:
            ddp.enable_forward_pre_hook()
        if step == 1:
            if hooked:
                ddp.disable_forward_pre_hook()
            with torch.no_grad():
                run("evaluation", 7, forward_only=True)
            if hooked:
                ddp.enable_forward_pre_hook()
    if hooked:
        ddp.disable_forward_pre_hook()
    return seen | {f"weight.{name}": param.detach().clone() for name, param in model.named()}


def train_installed(case: Case, model: Trained) -> Seen:
    """The same script, with ours installed in place of megatron-core's function."""
    called: list[None] = []
    model.ddp.register_forward_pre_hook(lambda *_: called.append(None))
    model.ddp.config.overlap_moe_expert_parallel_comm = True
    model.ddp.config.delay_wgrad_compute = True
    install()
    try:
        seen = train_by_script(case, model)
    finally:
        uninstall()
    assert len(called) == case.microbatches, "evaluation alone calls the model"
    return seen


def unequal(got: Seen, expected: Seen) -> list[str]:
    assert got.keys() == expected.keys()
    return [name for name, value in got.items() if not torch.equal(value, expected[name])]


def differences(cases: Sequence[Case]) -> dict[str, list[str]]:
    """By case, what a schedule leaves otherwise than megatron-core's own path. On one device."""
    found: dict[str, list[str]] = {}
    expected: dict[str, Seen] = {}
    (device,) = {case.device for case in cases}
    with one_world(device) as groups:
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
