"""Gradients of a GPTModel of usual widths, on one rank of an emulated world: ours beside those of
megatron-core's standard step. With small ``Sizes`` of local layers it runs on CPU, too.

All steps are of one model, but for those that fuse weight gradients into ``fully_shard``'s: those
are of two models, both fused, as a fused sum rounds otherwise than one that is not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from dropin_steps import deterministic, enter_emulated_world, megatron_on
from models_support import random_tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from wgrad_support import counted

from ep_overlap.commands.world import local_part
from ep_overlap.links.emulated_speed import EmulatedLinks
from ep_overlap.models.groups import ExpertGroups, new_expert_groups
from fsdp_hooks import fully_shard
from fsdp_hooks.accumulation import microbatch
from fsdp_hooks.collectives import new_torch_group
from fsdp_hooks.precision import MixedPrecision
from fsdp_hooks.wgrad_layers import manage_wgrad

WORLD_SIZE = 8
LINKS = EmulatedLinks(a2a_bytes_per_s=50e9, dp_bytes_per_s=100e9, latency_s=20e-6)
NUM_MICROBATCHES = 3
BATCH_SIZE = 2


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """By default layers like Qwen3-30B-A3B's, of Transformer Engine."""

    num_layers: int = 4
    hidden_size: int = 2048
    num_heads: int = 32
    num_query_groups: int = 4
    kv_channels: int = 128
    num_experts: int = 128
    topk: int = 8
    ffn_hidden_size: int = 768
    seq_length: int = 4096
    transformer_engine: bool = True
    """Whose layers, else megatron-core's local ones."""
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Found:
    """Of one way to run a step."""

    name: str
    differences: tuple[str, ...]
    """From the standard step, by even one bit; where that differs from itself, that, too."""
    num_added: int
    """Weight gradients that came apart from autograd's."""
    num_written: int
    """Those that were written where they are reduced from."""


Left = dict[str, Tensor]
"""Losses and gradients."""


def found(sizes: Sizes, device: str) -> list[Found]:
    """Every way. Ends the world that this process is in."""
    enter_emulated_world(WORLD_SIZE, LINKS)
    with megatron_on(device), deterministic():
        world = _World(sizes, device)
        return [*world.unsharded(), *world.fused()]


class _World:
    """Its groups, and models made alike."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        self._sizes = sizes
        self._device = device
        self._experts: ExpertGroups = new_expert_groups(WORLD_SIZE)
        self._alone = new_torch_group([0], "one_rank")
        self._data = new_torch_group(range(WORLD_SIZE), "data")
        texts = (random_tokens(i, BATCH_SIZE, sizes.seq_length) for i in range(NUM_MICROBATCHES))
        self._batches = [tuple(tensor.to(device) for tensor in text) for text in texts]
        self._first: Any = None
        """The others are built like it."""

    def unsharded(self) -> list[Found]:
        """Plain and paired, delayed or not."""
        from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

        from ep_overlap.models.megatron import ForwardBackward, GPTParts

        model = self._model()
        standard = partial(self._step, forward_backward_no_pipelining, model)
        theirs = standard(overlap=False)
        _check(theirs)
        # From here on; until somebody delays them, gradients are made as ever.
        manage_wgrad(model, fuse=False, layer_types=GPTParts(model).wgrad_layers)
        results: list[Found] = []
        for order, delay in product(("plain", "paired"), (False, True)):
            name = f"{order}{', delayed' if delay else ''}"
            with counted(model, fuse=False) as sink:
                ours = self._step(ForwardBackward(order=order), model, delay=delay)
            results.append(_found(name, ours, theirs, partial(standard, overlap=False), sink))
        return results

    def fused(self) -> list[Found]:
        """In ``fully_shard`` without sharding."""
        from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

        from ep_overlap.models.megatron import ForwardBackward

        model = self._fused_model()
        standard = partial(self._step, forward_backward_no_pipelining, model)
        theirs = standard(overlap=False)
        _check(theirs)
        own = self._fused_model()
        results: list[Found] = []
        for delay in (False, True):
            name = f"paired, fused{', delayed' if delay else ''}"
            with counted(own, fuse=True) as sink:
                ours = self._step(ForwardBackward(order="paired"), own, delay=delay)
            results.append(_found(name, ours, theirs, partial(standard, overlap=False), sink))
        return results

    def _model(self) -> Any:
        from ep_overlap.models.megatron_build import MegatronSizes, build_gpt

        sizes = self._sizes
        is_fused = sizes.transformer_engine
        chosen = MegatronSizes(
            num_layers=sizes.num_layers,
            hidden_size=sizes.hidden_size,
            num_heads=sizes.num_heads,
            ffn_hidden_size=sizes.ffn_hidden_size,
            num_experts=sizes.num_experts,
            topk=sizes.topk,
            seq_length=sizes.seq_length,
            transformer_impl="transformer_engine" if sizes.transformer_engine else "local",
            dtype=sizes.dtype,
            settings={
                "num_query_groups": sizes.num_query_groups,
                "kv_channels": sizes.kv_channels,
                "moe_permute_fusion": is_fused,
                "apply_rope_fusion": is_fused,
                "bias_activation_fusion": is_fused,
            },
        )
        model = build_gpt(
            chosen,
            self._experts,
            seed=3,
            device=self._device,
            alone=self._alone,
            like=self._first,
        )
        self._first = self._first or model
        return model

    def _fused_model(self) -> Any:
        from ep_overlap.models.megatron import GPTParts

        model = self._model()
        parts = GPTParts(model)
        experts = frozenset(parts.expert_parameters())
        kind = torch.device(self._device).type
        dense, expert = (DeviceMesh.from_group(group, kind) for group in (self._data, self._alone))

        def mesh_of(name: str, param: nn.Parameter) -> DeviceMesh:
            return expert if param in experts else dense

        options: dict[str, Any] = {
            "mesh": mesh_of,
            "strategy": "no_shard",
            "mp": MixedPrecision(reduce_dtype=torch.bfloat16),
        }
        for layer in parts.layers:
            fully_shard(layer.module, **options)
        fully_shard(model, **options, grad_divisor=WORLD_SIZE)
        manage_wgrad(model, fuse=True, layer_types=parts.wgrad_layers)
        # A script's own way to say that a microbatch is not the last.
        model.config.no_sync_func = partial(microbatch, model, is_last=False)
        return model

    def _step(
        self,
        function: Callable[..., Any],
        model: Any,
        *,
        overlap: bool = True,
        delay: bool = False,
    ) -> Left:
        model.zero_grad(set_to_none=True)
        model.config.overlap_moe_expert_parallel_comm = overlap
        model.config.delay_wgrad_compute = delay
        logged = function(
            forward_step_func=self._forward_step,
            data_iterator=iter(self._batches),
            model=model,
            num_microbatches=NUM_MICROBATCHES,
            seq_length=self._sizes.seq_length,
            micro_batch_size=BATCH_SIZE,
            pg_collection=model.pg_collection,
        )
        left = {f"loss {index}": each["lm loss"] for index, each in enumerate(logged)}
        assert len(left) == NUM_MICROBATCHES
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, f"{name} has no gradient"
            left[name] = local_part(parameter.grad).clone()
        return left

    def _forward_step(self, data: Any, called: Any) -> Any:
        tokens, labels = next(data)
        length, device = self._sizes.seq_length, tokens.device
        positions = torch.arange(length, device=device).expand(len(tokens), -1)
        hidden = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)[None, None]
        return called(tokens, positions, hidden, labels=labels), _mean_loss


def _mean_loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = output.float().mean()
    return loss, {"lm loss": loss.detach().clone()}


def _check(left: Left) -> None:
    """That there is something to compare: an expert without a token has a gradient of zeros."""
    assert all(bool(tensor.isfinite().all()) for tensor in left.values())
    empty = [name for name, tensor in left.items() if not tensor.any()]
    assert all(".experts." in name for name in empty), empty
    assert len(empty) < len(left) / 4, empty


def _found(name: str, ours: Left, theirs: Left, again: Callable[[], Left], sink: Any) -> Found:
    wrong = _unequal(ours, theirs)
    if wrong:
        wrong += [f"the standard step itself: {each}" for each in _unequal(again(), theirs)]
    return Found(
        name=name,
        differences=tuple(wrong),
        num_added=sink.num_added,
        num_written=sink.num_written,
    )


def _unequal(ours: Left, theirs: Left) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [
        f"{name}, by {_error(ours[name], expected):.1e}"
        for name, expected in theirs.items()
        if not torch.equal(ours[name], expected)
    ]


def _error(ours: Tensor, theirs: Tensor) -> float:
    """Relative to the largest entry."""
    return float((ours - theirs).abs().max() / theirs.abs().max())
