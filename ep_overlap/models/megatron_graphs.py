"""Attention of megatron-core's layers, replayed from CUDA graphs, and what is refused beside them.

Of an MoE layer's nodes attention is what is the same for every microbatch: it has one shape, where
experts get as many tokens as the router sends. megatron-core calls it ``cuda_graph_modules=attn``.
"""

# TransformerLayer's attention and a module's hooks have no public names.
# pyright: reportPrivateUsage=false

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from ep_overlap.config import GRAPHED_TILE
from ep_overlap.models.megatron_globals import INSTALL_HINT
from ep_overlap.models.megatron_layers import Attention, called_attention
from ep_overlap.run.cuda_graph import GraphedFunction

try:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.transformer_layer import TransformerLayer
except ImportError as error:
    raise ImportError(INSTALL_HINT) from error


def graphed_attention(
    layer: TransformerLayer, *, aside: Callable[[], torch.cuda.Stream]
) -> Attention:
    """Replayed while a schedule trains, called elsewhere. ``aside``: see ``GraphedFunction``.

    Raises:
        ValueError: the layer's attention is none that can be replayed. At the first call: sequences
            are of a length that cannot.
    """
    unfit = next(_unfit(layer), None)
    if unfit is not None:
        found, expected = unfit
        raise ValueError(
            f"cuda_graphs with {found}, expected {expected}; leave cuda_graphs out, or change that"
        )
    modules = _modules_of_attention(layer)
    return GraphedFunction(called_attention(layer), modules, check=_check_length, aside=aside)


def _check_length(hidden: Tensor) -> None:
    """The backward of cuDNN's attention reads whole tiles, past the end of shorter tensors: mostly
    into other tensors of torch's pool, without effect. Behind a graph's own pool there may be no
    memory: 32 tokens end in an illegal access (compute-sanitizer names the kernel,
    ``sdpa_sm90_flash_bprop_wgmma_f16_..._64x64x64``; torch 2.11, H200).

    Raises:
        ValueError: the last tile is not whole.
    """
    if len(hidden) % GRAPHED_TILE:
        raise ValueError(
            f"cuda_graphs with sequences of {len(hidden)} tokens, expected a multiple of "
            f"{GRAPHED_TILE}; leave cuda_graphs out, or pad them"
        )


def _modules_of_attention(layer: TransformerLayer) -> list[nn.Module]:
    return [cast(nn.Module, layer.input_layernorm), cast(nn.Module, layer.self_attention)]


def _has_hooks(module: nn.Module) -> bool:
    return any(
        each._forward_hooks
        or each._forward_pre_hooks
        or each._backward_hooks
        or each._backward_pre_hooks
        for each in module.modules()
    )


def _unfit(layer: TransformerLayer) -> Iterator[tuple[str, str]]:
    config, attention = layer.config, cast(Any, layer.self_attention)
    read_by_own = type(layer)._forward_attention is TransformerLayer._forward_attention
    if not (read_by_own and isinstance(layer.cross_attention, IdentityOp)):
        yield (
            f"a {type(layer).__name__} of its own attention",
            "a TransformerLayer's self-attention",
        )
    if type(attention.core_attention).__name__ != "TEDotProductAttention":
        yield "local layers", "Transformer Engine's"
    elif attention.attn_mask_type is not AttnMaskType.causal:
        # Causal attention does not read the mask that a microbatch brings; others do.
        yield f"mask {attention.attn_mask_type.name}", "causal"
    if next(layer.parameters()).device.type != "cuda":
        yield "a model on CPU", "one on CUDA"
    if config.attention_dropout > 0 or config.hidden_dropout > 0:
        yield "dropout", "none: a graph would draw the same numbers again"
    if config.tensor_model_parallel_size > 1:
        yield f"tensor_model_parallel_size {config.tensor_model_parallel_size}", "1"
    if config.multi_latent_attention:
        yield "multi_latent_attention, whose angles may move", "plain attention"
    if config.qk_clip or config.log_max_attention_logit:
        yield "qk_clip or log_max_attention_logit, which the host keeps", "neither"
    if any(map(_has_hooks, _modules_of_attention(layer))):
        yield "hooks on attention's modules, which a replay would pass by", "none"
    if config.recompute_granularity is not None:
        yield f"recompute_granularity {config.recompute_granularity!r}", "None"
    tracker: Any = random.get_cuda_rng_tracker()
    is_plain = isinstance(tracker, random.CudaRNGStatesTracker) and tracker.is_initialized()
    if is_plain and not tracker.use_cudagraphable_rng:
        yield "a tracker of random states that cannot be captured", "te_rng_tracker"
