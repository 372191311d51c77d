"""megatron-core's layers, cut into the parts that a schedule runs.

The parts call the layers' own methods in the order in which their ``forward`` calls them, so
results are bitwise those of the model. What differs from megatron-core's own cut
(``megatron.core.models.gpt.fine_grained_callables``): everything after the combine exchange is
``finish``, which runs with the next layer's attention on the compute lane.

::

    attn      _forward_attention, pre_mlp_layernorm, shared experts, router, dispatch_preprocess
    dispatch  token_dispatch; back: all_to_all, splits exchanged                        (exchange)
    mlp       dispatch_postprocess, experts, combine_preprocess
    combine   token_combine; back: likewise                                             (exchange)
    finish    combine_postprocess, shared experts' sum, mlp_bda

A GPTModel has all of it in one TransformerLayer, a HybridModel in two: see ``Halves``.

Shape letters: S sequence, B batch, H hidden, T tokens on the way.
"""

# TransformerLayer offers its attention under a name with an underscore only; megatron-core's own
# schedule calls it too.
# pyright: reportPrivateUsage=false

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast, final

from torch import Tensor, nn

from ep_overlap.models.groups import EXCHANGE, GATHER, GATHER_COUNTS, SCATTER, issued
from ep_overlap.models.megatron_ends import router_collectives
from ep_overlap.models.megatron_globals import INSTALL_HINT
from ep_overlap.plan.action import LayerKind, Node
from ep_overlap.run.layer import Carry, Collective, TokenGrads, Tokens

try:
    from megatron.core.tensor_parallel import CheckpointWithoutOutput, all_to_all
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


class Splits(NamedTuple):
    """How many tokens go to each rank and come from it, as megatron-core has them."""

    sent: Sequence[int] | None
    received: Sequence[int] | None


@dataclass(kw_only=True, slots=True)
class GPTState:
    """One microbatch in flight."""

    batch: GPTBatch
    moe: dict[int, MoELayer] = field(default_factory=dict[int, MoELayer])
    """By layer, from its attn to its finish: its MoE with a dispatcher of this microbatch's own."""
    splits: dict[int, Splits] = field(default_factory=dict[int, Splits])
    """By layer, set by its dispatch: for the reverses of dispatch and combine."""
    rotary: Tensor | None = None
    """``[S, 1, 1, ...]``, the same for all layers; set by ``pre``."""


class Halves(NamedTuple):
    """A layer of a schedule as the model holds it. In a HybridModel one half may be missing."""

    attention: TransformerLayer | None
    """Whose norm, attention and residual come first."""
    rest: TransformerLayer | None
    """Whose norm, MLP or experts, and residual follow; the same one in a GPTModel."""
    module: nn.Module
    """All of it (see ``LayerParts.module``)."""


Attention = Callable[[Tensor, Any, Any], Tensor]
"""``(hidden, attention_mask, rotary)`` to hidden, ``[S, B, H]``: norm, attention and residual."""

AttentionOf = Callable[[TransformerLayer], Attention]
"""How a layer's attention is run."""


@final
class MegatronDenseLayer:
    """Attention and an MLP, or one of them: the other's node hands on what it gets."""

    def __init__(self, halves: Halves, attention_of: AttentionOf) -> None:
        self._halves = halves
        self._attention = _attention_or_identity(halves, attention_of)

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
        half = self._halves.attention if node is Node.ATTN else self._halves.rest
        return () if half is None else _gather_and_scatter(half)

    def attn(self, state: GPTState, hidden: Tensor) -> Tensor:
        """Attention and its residual."""
        return self._attention(hidden, state.batch.attention_mask, state.rotary)

    def mlp(self, state: GPTState, hidden: Tensor) -> Tensor:
        """Norm, MLP and residual."""
        rest = self._halves.rest
        return hidden if rest is None else cast(Tensor, rest._forward_mlp(hidden))


@final
class MegatronMoELayer:
    """Attention and experts, or experts alone.

    Args:
        halves: the second one's ``mlp`` is ``moe``.
        moe: its experts.
        index: of the schedule's layers.
        attention_of: see there.
    """

    def __init__(
        self, halves: Halves, moe: MoELayer, index: int, attention_of: AttentionOf
    ) -> None:
        dispatcher = cast(MoEAlltoAllTokenDispatcher, moe.token_dispatcher)
        assert halves.rest is not None, "it holds the experts"
        self._moe = moe
        self._halves = halves
        self._rest = halves.rest
        self._attention = _attention_or_identity(halves, attention_of)
        self._index = index
        self._exchange = dispatcher.ep_group
        self._counts = dispatcher.tp_ep_group
        self._shared_experts = cast(nn.Module | None, moe.shared_experts)
        num_blocks = (halves.attention is not None) + (self._shared_experts is not None)
        self._before_counts = (
            *_gather_and_scatter(halves.rest) * num_blocks,
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
        moe = state.moe[self._index] = with_own_dispatcher(self._moe)
        hidden = self._attention(hidden, state.batch.attention_mask, state.rotary)
        norm = apply_module(self._rest.pre_mlp_layernorm)
        # Not ``_forward_pre_mlp_layernorm``: it keeps what it was given on the layer.
        again = CheckpointWithoutOutput() if self._rest.recompute_pre_mlp_layernorm else None
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

    def dispatch(self, state: GPTState, tokens: Tokens) -> Tokens:
        """Send tokens, and their weights, to the ranks of their experts."""
        assert tokens.probs is not None, "attn made them"
        moe = self._routed(state)
        dispatched = Tokens(*moe.dispatch(tokens.tokens, tokens.probs))
        dispatcher = cast(Any, moe.token_dispatcher)  # it calls them tensors, which they were
        state.splits[self._index] = Splits(dispatcher.input_splits, dispatcher.output_splits)
        return dispatched

    def dispatch_backward(self, state: GPTState, grads: TokenGrads) -> TokenGrads:
        """Bring their gradients home, the tokens' first."""
        sent, received = state.splits[self._index]
        return TokenGrads(
            *(
                None if grad is None else all_to_all(self._exchange, grad, sent, received)
                for grad in grads
            )
        )

    def mlp(self, state: GPTState, tokens: Tokens) -> Tensor:
        """Sort by expert, run the experts, unsort."""
        assert tokens.probs is not None, "dispatch brought them"
        output, _ = self._routed(state).routed_experts_compute(tokens.tokens, tokens.probs)
        return output

    def combine(self, state: GPTState, tokens: Tensor) -> Tensor:
        """Send the results back where their tokens came from."""
        return self._routed(state).combine(tokens)

    def combine_backward(self, state: GPTState, grad: Tensor) -> Tensor:
        """Send their gradients to the experts."""
        sent, received = state.splits[self._index]
        return all_to_all(self._exchange, grad, received, sent)

    def finish(self, state: GPTState, combined: Tensor, carry: Carry) -> Tensor:
        """Unpermute, add the shared experts' output and the residual."""
        layer = self._rest
        output = self._routed(state).postprocess(combined, carry.shared)
        # Its routing goes here, not with the microbatch: a graph keeps what its backward needs.
        del state.moe[self._index]
        add = layer.mlp_bda(layer.training, layer.config.bias_dropout_fusion)
        with layer.bias_dropout_add_exec_handler():
            return add((output, None), carry.residual, layer.hidden_dropout)

    def _routed(self, state: GPTState) -> MoELayer:
        moe = state.moe.get(self._index)
        assert moe is not None, f"layer {self._index}: its parts run from attn to finish, once each"
        return moe


def layer_of(
    halves: Halves, index: int, attention_of: AttentionOf
) -> MegatronMoELayer | MegatronDenseLayer:
    """Its parts, by what the second half consists of."""
    if halves.rest is not None and isinstance(halves.rest.mlp, MoELayer):
        return MegatronMoELayer(halves, halves.rest.mlp, index, attention_of)
    return MegatronDenseLayer(halves, attention_of)


def _gather_and_scatter(layer: TransformerLayer) -> tuple[Collective, ...]:
    """What a tensor-parallel block of two products issues."""
    tensor_parallel = layer.pg_collection.tp
    return (*issued(tensor_parallel, GATHER), *issued(tensor_parallel, SCATTER))


def called_attention(layer: TransformerLayer) -> Attention:
    """By megatron-core's own method."""

    def attention(hidden: Tensor, attention_mask: Any, rotary: Any) -> Tensor:
        hidden, _ = layer._forward_attention(
            hidden, attention_mask=attention_mask, rotary_pos_emb=rotary
        )
        return hidden

    return attention


def _attention_or_identity(halves: Halves, attention_of: AttentionOf) -> Attention:
    if halves.attention is None:
        return lambda hidden, attention_mask, rotary: hidden
    return attention_of(halves.attention)


def with_own_dispatcher(moe: MoELayer) -> MoELayer:
    """A shallow copy, for one microbatch.

    megatron-core's dispatcher keeps routing on itself, so two microbatches in one layer would
    overwrite each other. The copies share sub-modules, and the very dictionaries that hold them, so
    parameters that sharding swaps in are seen at once.
    """
    own = _shallow(moe)
    assert own.token_dispatcher is not None, "MoELayer makes one"
    own.token_dispatcher = _shallow(own.token_dispatcher)
    return own


def _shallow[T](original: T) -> T:
    """``copy.copy``, without its way over pickling's protocol: it is made for every microbatch."""
    own = object.__new__(type(original))
    vars(own).update(vars(original))
    return own
