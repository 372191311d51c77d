"""megatron-core's layers, cut into the parts that a schedule runs.

The parts call the layers' own methods in the order in which their ``forward`` calls them, so
results are bitwise those of the model. What differs from megatron-core's own cut
(``megatron.core.models.gpt.fine_grained_callables``): everything after the combine exchange is
``finish``, which runs with the next layer's attention on the compute lane.

::

    attn      _forward_attention, pre_mlp_layernorm, shared experts, router, dispatch_preprocess
    dispatch  token_dispatch                                                            (exchange)
    mlp       dispatch_postprocess, experts, combine_preprocess
    combine   token_combine                                                             (exchange)
    finish    combine_postprocess, shared experts' sum, mlp_bda

A GPTModel has all of it in one TransformerLayer, a HybridModel in two: see ``Halves``.

Shape letters: S sequence, B batch, H hidden, T tokens on the way.
"""

# TransformerLayer offers its attention under a name with an underscore only; megatron-core's own
# schedule calls it too.
# pyright: reportPrivateUsage=false

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast, final

from torch import Tensor, nn

from ep_overlap.models.groups import EXCHANGE, GATHER, GATHER_COUNTS, SCATTER, issued
from ep_overlap.models.megatron_ends import router_collectives
from ep_overlap.models.megatron_globals import INSTALL_HINT
from ep_overlap.plan.action import LayerKind, Node
from ep_overlap.run.layer import Carry, Collective, Tokens

try:
    from megatron.core.tensor_parallel import CheckpointWithoutOutput
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from megatron.core.typed_torch import apply_module
except ImportError as error:
    raise ImportError(INSTALL_HINT) from error


@dataclass(frozen=True, kw_only=True)
class GPTBatch:
    """One microbatch's inputs; the parts' ``batch`` makes it. Sequences are not packed."""

    tokens: Tensor
    """``[B, S]`` int64"""
    targets: Tensor | None
    """``[B, S]`` int64; None: the output is the scores of each token, not its loss."""
    position_ids: Tensor
    """``[B, S]`` int64"""
    attention_mask: Tensor | None
    """``[1, 1, S, S]`` bool: True where a token must not look; None: the layers know it."""
    loss_mask: Tensor | None = None
    """``[B, S]``: which tokens count in the losses of multi-token prediction."""


@dataclass(kw_only=True, slots=True)
class GPTState:
    """One microbatch in flight."""

    batch: GPTBatch
    moe: list[MoELayer | None]
    """For each layer, its MoE with a dispatcher of this microbatch's own; None where dense."""
    rotary: Tensor | None = None
    """``[S, 1, 1, ...]``, the same for all layers; set by ``pre``."""


class Halves(NamedTuple):
    """A layer of a schedule as the model holds it."""

    attention: TransformerLayer
    """Whose norm, attention and residual come first."""
    rest: TransformerLayer
    """Whose norm, MLP or experts, and residual follow; the same one in a GPTModel."""
    module: nn.Module
    """All of it (see ``LayerParts.module``)."""


@final
class MegatronDenseLayer:
    """Attention and an MLP."""

    moe: None = None

    def __init__(self, halves: Halves) -> None:
        self._halves = halves

    @property
    def kind(self) -> LayerKind:
        """Which nodes it has."""
        return LayerKind.DENSE

    @property
    def module(self) -> nn.Module:
        """See ``Halves``."""
        return self._halves.module

    def collectives(self, node: Node) -> Sequence[Collective]:
        """Those of tensor parallelism: around the attention, and around the MLP."""
        return _gather_and_scatter(self._halves.attention)

    def attn(self, state: GPTState, hidden: Tensor) -> Tensor:
        """Attention and its residual."""
        return _attention(self._halves.attention, state, hidden)

    def mlp(self, state: GPTState, hidden: Tensor) -> Tensor:
        """Norm, MLP and residual."""
        return cast(Tensor, self._halves.rest._forward_mlp(hidden))


@final
class MegatronMoELayer:
    """Attention and experts.

    Args:
        halves: the second one's ``mlp`` is ``moe``.
        moe: its experts.
        index: of the schedule's layers.
    """

    def __init__(self, halves: Halves, moe: MoELayer, index: int) -> None:
        dispatcher = cast(MoEAlltoAllTokenDispatcher, moe.token_dispatcher)
        self.moe = moe
        self._halves = halves
        self._index = index
        self._exchange = dispatcher.ep_group
        self._counts = dispatcher.tp_ep_group
        self._shared_experts = cast(nn.Module | None, moe.shared_experts)
        num_blocks = 1 if self._shared_experts is None else 2
        self._before_counts = (
            *_gather_and_scatter(halves.attention) * num_blocks,
            *router_collectives(moe),
        )

    @property
    def kind(self) -> LayerKind:
        """Which nodes it has."""
        return LayerKind.MOE if self.shared_experts is None else LayerKind.MOE_SHARED

    @property
    def shared_experts(self) -> nn.Module | None:
        """megatron-core's ``SharedExpertMLP``."""
        return self._shared_experts

    @property
    def module(self) -> nn.Module:
        """See ``Halves``."""
        return self._halves.module

    def collectives(self, node: Node) -> Sequence[Collective]:
        """Tensor parallelism's and the router's, one gather of counts; tokens and their weights
        out; results back."""
        match node:
            case Node.ATTN:
                return (*self._before_counts, *issued(self._counts, GATHER_COUNTS))
            case Node.DISPATCH:
                return issued(self._exchange, EXCHANGE, 2)
            case Node.COMBINE:
                return issued(self._exchange, EXCHANGE)
            case _:
                return ()

    def attn(self, state: GPTState, hidden: Tensor) -> tuple[Tokens, Carry]:
        """Attention, norm, shared experts, router, gather of token counts, permute."""
        moe = self._moe(state)
        hidden = _attention(self._halves.attention, state, hidden)
        rest = self._halves.rest
        norm = apply_module(rest.pre_mlp_layernorm)
        # Not ``_forward_pre_mlp_layernorm``: it keeps what it was given on the layer.
        again = CheckpointWithoutOutput() if rest.recompute_pre_mlp_layernorm else None
        normed = norm(hidden) if again is None else again.checkpoint(norm, hidden)
        shared = moe.shared_experts_compute(normed)
        probs, routing_map = moe.route(normed)
        tokens, token_probs = moe.preprocess(normed, probs, routing_map)
        if again is not None:
            # Whichever of these gets its gradient first. megatron-core waits for the gradient of
            # the MoE's output, which is of another node here.
            for made in (tokens, token_probs, shared):
                if made is not None:
                    again.discard_output_and_register_recompute(made)
        return Tokens(tokens, token_probs), Carry(hidden, shared)

    # With one rank, megatron-core's exchange sends nothing and its autograd function returns its
    # input; torch makes that a view with a place in the graph, which a segment's output needs.

    def dispatch(self, state: GPTState, tokens: Tokens) -> Tokens:
        """Send tokens, and their weights, to the ranks of their experts."""
        assert tokens.probs is not None, "attn made them"
        return Tokens(*self._moe(state).dispatch(tokens.tokens, tokens.probs))

    def mlp(self, state: GPTState, tokens: Tokens) -> Tensor:
        """Sort by expert, run the experts, unsort."""
        assert tokens.probs is not None, "dispatch brought them"
        output, _ = self._moe(state).routed_experts_compute(tokens.tokens, tokens.probs)
        return output

    def combine(self, state: GPTState, tokens: Tensor) -> Tensor:
        """Send the results back where their tokens came from."""
        return self._moe(state).combine(tokens)

    def finish(self, state: GPTState, combined: Tensor, carry: Carry) -> Tensor:
        """Unpermute, add the shared experts' output and the residual."""
        layer = self._halves.rest
        output = self._moe(state).postprocess(combined, carry.shared)
        add = layer.mlp_bda(layer.training, layer.config.bias_dropout_fusion)
        with layer.bias_dropout_add_exec_handler():
            return add((output, None), carry.residual, layer.hidden_dropout)

    def _moe(self, state: GPTState) -> MoELayer:
        moe = state.moe[self._index]
        assert moe is not None, f"layer {self._index} has experts, but the state has no MoE for it"
        return moe


def layer_of(halves: Halves, index: int) -> MegatronMoELayer | MegatronDenseLayer:
    """Its parts, by what the second half consists of."""
    moe = halves.rest.mlp
    if isinstance(moe, MoELayer):
        return MegatronMoELayer(halves, moe, index)
    return MegatronDenseLayer(halves)


def _gather_and_scatter(layer: TransformerLayer) -> tuple[Collective, ...]:
    """What a tensor-parallel block of two products issues."""
    tensor_parallel = layer.pg_collection.tp
    return (*issued(tensor_parallel, GATHER), *issued(tensor_parallel, SCATTER))


def _attention(layer: TransformerLayer, state: GPTState, hidden: Tensor) -> Tensor:
    hidden, _ = layer._forward_attention(
        hidden, attention_mask=state.batch.attention_mask, rotary_pos_emb=state.rotary
    )
    return hidden


def with_own_dispatcher(moe: MoELayer) -> MoELayer:
    """A shallow copy (see ``MegatronParts.begin``)."""
    own = copy.copy(moe)
    own.token_dispatcher = copy.copy(moe.token_dispatcher)
    return own
