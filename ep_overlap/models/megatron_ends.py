"""What a model does before its first layer and after its last.

The embedding's weights may be used at both ends: as a tied output layer's, and in the layers of
multi-token prediction (MTP, arXiv 2412.19437). ``post`` then uses values in their place (see
``ModelParts.shared_weights``), in shallow copies of the modules that hold them.

MTP layers run within ``post``, exchanges and all, so these do not overlap with compute: megatron-
core's ``MultiTokenPredictionBlock`` is called as it is. Their losses and their gradients' scale are
megatron-core's (``MTPLossLoggingHelper``, ``MTPLossAutoScaler``).
"""

# pyright: reportPrivateUsage=false

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from torch import Tensor, nn

from ep_overlap.models.groups import ALL_REDUCE, EXCHANGE, GATHER_COUNTS, issued
from ep_overlap.models.megatron_build import MegatronModel
from ep_overlap.models.megatron_globals import INSTALL_HINT
from ep_overlap.run.layer import Collective
from fsdp_hooks.wgrad import ManagedLayer

try:
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
except ImportError as error:
    raise ImportError(INSTALL_HINT) from error


def shared_weights(model: MegatronModel) -> Sequence[nn.Parameter]:
    """What both ends use: all of the embedding with MTP, its words where they are tied, or none.

    Not what the output layer fuses the gradients of: they are written where they go use by use, on
    the standard path, too.
    """
    is_tied = model.share_embeddings_and_output_weights
    output = cast(nn.Module, model.output_layer)
    is_fused = isinstance(output, ManagedLayer) and output.fuses_wgrad
    words = model.embedding.word_embeddings.weight
    used = model.embedding.parameters() if model.mtp_process else [words] * is_tied
    return tuple(weight for weight in used if not (weight is words and is_tied and is_fused))


def with_values[ModelT: MegatronModel](model: ModelT, values: Sequence[Tensor]) -> ModelT:
    """The model, computing with ``values`` in place of its ``shared_weights``.

    All but the embedding is the model's own, parameters that sharding swaps in included.
    """
    if not values:
        return model
    own = copy.copy(model)
    by_weight = dict(zip(shared_weights(model), values, strict=True))
    embedding = _with_parameters(model.embedding, by_weight)
    own._modules = {**model._modules, "embedding": embedding}
    return own


def _with_parameters(module: nn.Module, values: Mapping[nn.Parameter, Tensor]) -> nn.Module:
    own = copy.copy(module)
    # A plain tensor is a parameter to whoever reads it.
    parameters = {
        name: None if weight is None else values.get(weight, weight)
        for name, weight in module._parameters.items()
    }
    own._parameters = cast("dict[str, nn.Parameter | None]", parameters)
    own._modules = {
        name: None if inner is None else _with_parameters(inner, values)
        for name, inner in module._modules.items()
    }
    return own


def exchange_with_counts(model: MegatronModel) -> None:
    """Let MTP layers exchange tokens by the group that gathers their counts.

    They run on the compute lane, where this group belongs; the other one belongs to the exchange
    lane. Both hold the same ranks, so results are what they were, on the standard path, too.
    """
    for moe in _mtp_experts(model):
        dispatcher = _dispatcher(moe)
        moe.ep_group = dispatcher.ep_group = dispatcher.tp_ep_group


def mtp_collectives(model: MegatronModel) -> Iterator[Collective]:
    """What the MTP layers issue in a forward, in order."""
    for moe in _mtp_experts(model):
        counts = _dispatcher(moe).tp_ep_group
        yield from router_collectives(moe)
        yield from issued(counts, GATHER_COUNTS)
        yield from issued(counts, EXCHANGE, 3)


def router_collectives(moe: MoELayer) -> Sequence[Collective]:
    """What a layer's router issues in a training forward: a reduction for each loss, to count over
    the ranks that share a sequence, or over all."""
    router = cast(TopKRouter, moe.router)
    reduced_over = {
        "aux_loss": router.tp_cp_group,
        "seq_aux_loss": router.tp_cp_group,
        "global_aux_loss": router.tp_dp_cp_group,
    }
    return tuple(
        collective
        for loss, group in reduced_over.items()
        if router.get_aux_loss_coeff(loss) > 0
        for collective in issued(group, ALL_REDUCE)
    )


def _dispatcher(moe: MoELayer) -> MoETokenDispatcher:
    assert moe.token_dispatcher is not None, "MoELayer makes one"
    return moe.token_dispatcher


def _mtp_experts(model: MegatronModel) -> Iterator[MoELayer]:
    """By call: a layer that serves several depths comes as often."""
    if not model.mtp_process:
        return
    depths = cast(int, model.config.mtp_num_layers)
    for layer in list(model.mtp.layers) * (depths if model.mtp.mtp_use_repeated_layer else 1):
        for inner in layer.modules():
            if isinstance(inner, MoELayer):
                yield inner
