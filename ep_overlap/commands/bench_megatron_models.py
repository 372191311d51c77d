"""The models that ``bench --against megatron`` measures, each wrapped as its side wraps one.

::

    strategy             megatron-core's schedules         ours
    no_shard             the GPTModel                      the GPTModel
    any other            in its FSDP v1                    in fully_shard

Sharded, both compute in bfloat16, reduce in bfloat16 and add up in float32.
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ep_overlap.commands.arguments import BenchArguments, TransformerImpl
from ep_overlap.commands.measured_world import MeasuredWorld
from ep_overlap.plan.lower import Strategy
from fsdp_hooks.collectives import new_torch_group
from fsdp_hooks.precision import MixedPrecision
from fsdp_hooks.shard import fully_shard


@dataclass(frozen=True, kw_only=True)
class MeasuredModel:
    """What a step is given."""

    whole: nn.Module
    """The model with its wrapper; it goes to ``forward_backward_func``."""
    pg_collection: Any
    clear_gradients: Callable[[], None]
    """Between steps, as its side's users do. Only what ``fully_shard`` leaves is freed: elsewhere
    memory of gradients is no step's."""


@contextmanager
def fsdp_environment(args: BenchArguments, device: torch.device) -> Generator[None]:
    """What megatron-core's FSDP v1 needs, where it is measured, until the block ends.

    To be entered before ``bench_megatron.environment``.
    """
    if args.data_parallel_sharding_strategy is Strategy.NO_SHARD:
        yield
        return
    from ep_overlap.models.megatron_cpu_fsdp import megatron_fsdp_on_cpu
    from ep_overlap.models.megatron_emulated import megatron_fsdp_of_one_rank

    with ExitStack() as stack:
        if device.type == "cpu":
            stack.enter_context(megatron_fsdp_on_cpu())
        if not args.emulates_nothing:
            stack.enter_context(megatron_fsdp_of_one_rank())
        yield


@final
class ModelMaker:
    """Builds them, all with the same weights and over the same groups. Collective."""

    def __init__(self, args: BenchArguments, world: MeasuredWorld) -> None:
        from ep_overlap.models.groups import new_expert_groups

        self._args = args
        self._device = world.device
        self._size = world.size
        self._experts = new_expert_groups(world.size)
        self._alone = new_torch_group([world.rank], "one_rank")
        self.is_sharded = args.data_parallel_sharding_strategy is not Strategy.NO_SHARD
        """Whether there are gathers and reductions."""
        self._first: Any = None
        """The others are built like it: drawing weights takes seconds. Where models are sharded,
        and their weights soon elsewhere, it is none of those measured."""
        if self.is_sharded:
            self._data = new_torch_group(range(world.size), "data")
            self._first = self._gpt(overlap=False, delay=False)

    def make(self, *, is_ours: bool, overlap: bool, delay: bool) -> MeasuredModel:
        """One more. The flags are megatron-core's."""
        model = self._gpt(overlap=overlap, delay=delay)
        if self.is_sharded:
            return self._in_fully_shard(model) if is_ours else self._in_fsdp_v1(model)
        self._first = self._first or model
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return MeasuredModel(
            whole=model,
            pg_collection=model.pg_collection,
            clear_gradients=lambda: model.zero_grad(set_to_none=False),
        )

    def _gpt(self, *, overlap: bool, delay: bool) -> Any:
        from ep_overlap.models.megatron_build import MegatronSizes, build_gpt

        args = self._args
        is_fused = args.transformer_impl is TransformerImpl.TRANSFORMER_ENGINE
        sizes = MegatronSizes(
            num_layers=args.num_layers,
            hidden_size=args.hidden_size,
            num_heads=args.num_attention_heads,
            ffn_hidden_size=args.moe_ffn_hidden_size,
            num_experts=args.num_experts,
            topk=args.moe_router_topk,
            seq_length=args.seq_length,
            vocab_size=args.vocab_size,
            moe_layer_freq=args.moe_layer_freq,
            force_load_balancing=(
                args.moe_router_force_load_balancing and args.moe_router_force_biased is None
            ),
            transformer_impl=args.transformer_impl.value,
            dtype=torch.bfloat16,
            settings={
                "num_query_groups": args.num_query_groups or args.num_attention_heads,
                "kv_channels": args.kv_channels or args.hidden_size // args.num_attention_heads,
                "moe_permute_fusion": is_fused,
                "apply_rope_fusion": is_fused,
                "bias_activation_fusion": is_fused,
                "overlap_moe_expert_parallel_comm": overlap,
                "delay_wgrad_compute": delay,
                "moe_router_force_biased": args.moe_router_force_biased,
            },
        )
        return build_gpt(
            sizes,
            self._experts,
            seed=args.seed,
            device=self._device,
            alone=self._alone,
            like=self._first,
        )

    def _in_fully_shard(self, model: Any) -> MeasuredModel:
        from ep_overlap.models.megatron_parts import GPTParts

        parts = GPTParts(model)
        experts = frozenset(parts.expert_parameters())
        dense, expert = self._mesh(self._data), self._mesh(self._alone)

        def mesh_of(name: str, param: nn.Parameter) -> DeviceMesh:
            return expert if param in experts else dense

        strategy = self._args.data_parallel_sharding_strategy.value
        mp = MixedPrecision(reduce_dtype=torch.bfloat16)
        # The output layer by itself: its gather and reduction are hidden then, as the layers'.
        for module in (*(layer.module for layer in parts.layers), parts.head):
            assert module is not None, "built with an output layer of its own"
            fully_shard(module, mesh=mesh_of, strategy=strategy, mp=mp)
        fully_shard(model, mesh=mesh_of, strategy=strategy, mp=mp, grad_divisor=self._size)
        return MeasuredModel(
            whole=model,
            pg_collection=model.pg_collection,
            clear_gradients=model.zero_grad,
        )

    def _mesh(self, group: Any) -> DeviceMesh:
        return DeviceMesh.from_group(group, self._device.type)

    def _in_fsdp_v1(self, model: Any) -> MeasuredModel:
        from megatron.core.distributed import (
            DistributedDataParallelConfig,
            FullyShardedDataParallel,
            finalize_model_grads,
        )

        collection = model.pg_collection
        for name in ("dp", "dp_cp", "intra_dp_cp", "intra_dist_opt"):
            setattr(collection, name, self._data)
        for name in ("expt_dp", "intra_expt_dp", "expt_tp"):
            setattr(collection, name, self._alone)
        collection.dp_cp_ag = collection.expt_dp_ag = None
        collection.tp_ep_pp = self._experts.exchange
        config = DistributedDataParallelConfig(
            use_megatron_fsdp=True,
            use_distributed_optimizer=True,
            data_parallel_sharding_strategy=self._args.data_parallel_sharding_strategy.value,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            gradient_reduce_div_fusion=False,
            megatron_fsdp_main_grads_dtype=torch.float32,
            megatron_fsdp_grad_comm_dtype=torch.bfloat16,
        )
        fsdp: Any = FullyShardedDataParallel(model.config, config, model, pg_collection=collection)
        model.config.no_sync_func = fsdp.no_sync
        model.config.finalize_model_grads_func = finalize_model_grads
        return MeasuredModel(
            whole=fsdp, pg_collection=collection, clear_gradients=fsdp.zero_grad_buffer
        )
