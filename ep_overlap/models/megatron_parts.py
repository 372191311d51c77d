"""megatron-core's own GPTModel, cut into the parts that a schedule runs.

The parts call the layer's own methods in the order in which its ``forward`` calls them, so results
are bitwise those of the model. What differs from megatron-core's own cut
(``megatron.core.models.gpt.fine_grained_callables``): everything after the combine exchange is
``finish``, which runs with the next layer's attention on the compute lane.

::

    attn      _forward_attention, pre_mlp_layernorm, shared experts, router, dispatch_preprocess
    dispatch  token_dispatch                                                            (exchange)
    mlp       dispatch_postprocess, experts, combine_preprocess
    combine   token_combine                                                             (exchange)
    finish    combine_postprocess, shared experts' sum, mlp_bda

Shape letters: S sequence, B batch, H hidden, T tokens on the way.
"""

# GPTModel and TransformerLayer offer their pre- and post-processing and their attention under
# names with an underscore only; megatron-core's own schedule calls them too.
# pyright: reportPrivateUsage=false

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ep_overlap.models.groups import (
    ALL_REDUCE,
    EXCHANGE,
    GATHER,
    GATHER_COUNTS,
    SCATTER,
    issued,
)
from ep_overlap.models.megatron_build import global_name
from ep_overlap.models.megatron_ends import (
    exchange_with_counts,
    mtp_collectives,
    router_collectives,
    shared_weights,
    with_values,
)
from ep_overlap.models.megatron_globals import INSTALL_HINT
from ep_overlap.models.megatron_refused import refuse_unsupported
from ep_overlap.models.megatron_wgrad import WGRAD_LAYERS
from ep_overlap.plan.action import LayerKind, Node
from ep_overlap.run.layer import Carry, Collective, RandomStates, Tokens
from fsdp_hooks.wgrad_layers import LayerTypes

try:
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import CheckpointWithoutOutput, random
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from megatron.core.typed_torch import apply_module
except ImportError as error:
    raise ImportError(INSTALL_HINT) from error


@dataclass(frozen=True, kw_only=True)
class GPTBatch:
    """One microbatch's inputs; ``GPTParts.batch`` makes it. Sequences are not packed."""

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


class MegatronRandomStates:
    """As ``megatron.core.tensor_parallel.checkpoint`` saves and restores them."""

    def get(self) -> object:
        """Where they stand."""
        return random._get_all_rng_states()

    def set(self, states: object) -> None:
        """Put them where they stood."""
        random._set_all_rng_states(*cast("tuple[Any, ...]", states))


class GPTDenseLayer:
    """A TransformerLayer without experts."""

    def __init__(self, layer: TransformerLayer) -> None:
        self._layer = layer

    @property
    def kind(self) -> LayerKind:
        """Which nodes it has."""
        return LayerKind.DENSE

    @property
    def module(self) -> nn.Module:
        """The TransformerLayer."""
        return self._layer

    def collectives(self, node: Node) -> Sequence[Collective]:
        """Those of tensor parallelism: around the attention, and around the MLP."""
        return _gather_and_scatter(self._layer)

    def attn(self, state: GPTState, hidden: Tensor) -> Tensor:
        """Attention and its residual."""
        return _attention(self._layer, state, hidden)

    def mlp(self, state: GPTState, hidden: Tensor) -> Tensor:
        """Norm, MLP and residual."""
        return cast(Tensor, self._layer._forward_mlp(hidden))


class GPTMoELayer:
    """A TransformerLayer with experts."""

    def __init__(self, layer: TransformerLayer, moe: MoELayer, index: int) -> None:
        dispatcher = cast(MoEAlltoAllTokenDispatcher, moe.token_dispatcher)
        self._layer = layer
        self._index = index
        self._exchange = dispatcher.ep_group
        self._counts = dispatcher.tp_ep_group
        self._shared_experts = cast(nn.Module | None, moe.shared_experts)
        num_blocks = 1 if self._shared_experts is None else 2
        self._before_counts = (
            *_gather_and_scatter(layer) * num_blocks,
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
        """The TransformerLayer."""
        return self._layer

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
        hidden = _attention(self._layer, state, hidden)
        norm = apply_module(self._layer.pre_mlp_layernorm)
        # Not ``_forward_pre_mlp_layernorm``: it keeps what it was given on the layer.
        again = CheckpointWithoutOutput() if self._layer.recompute_pre_mlp_layernorm else None
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
        layer = self._layer
        output = self._moe(state).postprocess(combined, carry.shared)
        add = layer.mlp_bda(layer.training, layer.config.bias_dropout_fusion)
        with layer.bias_dropout_add_exec_handler():
            return add((output, None), carry.residual, layer.hidden_dropout)

    def _moe(self, state: GPTState) -> MoELayer:
        moe = state.moe[self._index]
        assert moe is not None, f"layer {self._index} has experts, but the state has no MoE for it"
        return moe


class GPTParts:
    """A GPTModel as the schedule sees it.

    On CPU, use it inside ``megatron_on_cpu``.

    Raises:
        ValueError: the model uses something that the parts leave out.
    """

    def __init__(self, model: GPTModel) -> None:
        refuse_unsupported(model)
        exchange_with_counts(model)
        self._model = model
        self._layers = [
            GPTMoELayer(layer, layer.mlp, index)
            if isinstance(layer.mlp, MoELayer)
            else GPTDenseLayer(layer)
            for index, layer in enumerate(_transformer_layers(model))
        ]
        # Made once for the longest sequence; batches hold views of it.
        longest, device = model.max_sequence_length, next(model.parameters()).device
        self._positions = torch.arange(longest, device=device).unsqueeze(0)
        self._mask = torch.ones(longest, longest, dtype=torch.bool, device=device).triu(1)

    @property
    def module(self) -> nn.Module:
        """The GPTModel."""
        return self._model

    @property
    def layers(self) -> Sequence[GPTMoELayer | GPTDenseLayer]:
        """The decoder's layers, in order."""
        return self._layers

    @property
    def wgrad_layers(self) -> LayerTypes:
        """Its local linear layers; none if they are tensor parallel."""
        return WGRAD_LAYERS if self._model.config.tensor_model_parallel_size == 1 else {}

    @property
    def draws_random(self) -> bool:
        """Whether there is dropout, or noise on the routers' inputs."""
        config = self._model.config
        has_dropout = config.hidden_dropout > 0 or config.attention_dropout > 0
        return has_dropout or config.moe_input_jitter_eps is not None

    @property
    def random_states(self) -> RandomStates | None:
        """megatron-core's: the CPU's, the device's, and those of its tracker."""
        return MegatronRandomStates() if self.draws_random else None

    @property
    def shared_weights(self) -> Sequence[nn.Parameter]:
        """The embedding's, where the output layer is tied to it or MTP layers use it, too."""
        return shared_weights(self._model)

    def collectives(self, node: Node) -> Sequence[Collective]:
        """Those of tensor parallelism, and of MTP layers, which run within ``post``."""
        tensor_parallel = self._model.pg_collection.tp
        if node is Node.PRE:
            return issued(tensor_parallel, SCATTER)
        losses = issued(tensor_parallel, ALL_REDUCE, 3)
        return (
            *mtp_collectives(self._model),
            *issued(tensor_parallel, GATHER),
            *losses,
        )

    def expert_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that belong to one expert: they go on the expert mesh.

        megatron-core marks the same ones with ``allreduce = False``, where EP is larger than 1.
        """
        for module in self._model.modules():
            if isinstance(module, MoELayer):
                yield from cast(nn.Module, module.experts).parameters()

    def global_name(self, name: str) -> str:
        """A parameter's name in the model of all expert-parallel ranks."""
        return global_name(self._model, name)

    def batch(self, tokens: Tensor, targets: Tensor) -> GPTBatch:
        """Inputs for causal attention. ``tokens``, ``targets``: ``[B, S]`` int64.

        Raises:
            ValueError: the sequences are longer than the model's.
        """
        num_sequences, seq_length = tokens.shape
        if seq_length > len(self._mask):
            raise ValueError(
                f"the batch has sequences of {seq_length} tokens; the model was built for "
                f"{len(self._mask)}"
            )
        return GPTBatch(
            tokens=tokens,
            targets=targets,
            position_ids=self._positions[:, :seq_length].expand(num_sequences, -1),
            attention_mask=self._mask[None, None, :seq_length, :seq_length],
        )

    def begin(self, batch: GPTBatch) -> GPTState:
        """A dispatcher of its own for each MoE layer.

        megatron-core's dispatcher keeps routing on itself, so two microbatches in one layer would
        overwrite each other. The copies are shallow: they share sub-modules, and the very
        dictionaries that hold them, so parameters that sharding swaps in are seen at once.
        """
        moe = [
            _with_own_dispatcher(layer.mlp) if isinstance(layer.mlp, MoELayer) else None
            for layer in _transformer_layers(self._model)
        ]
        return GPTState(batch=batch, moe=moe)

    def pre(self, state: GPTState) -> Tensor:
        """Embedding, and the rotary angles of all layers. Returns ``[S, B, H]``."""
        batch = state.batch
        hidden, state.rotary, *_ = self._model._preprocess(batch.tokens, batch.position_ids)
        return cast(Tensor, hidden)

    def post(self, state: GPTState, hidden: Tensor, *shared: Tensor) -> Tensor:
        """Final norm, MTP layers, output layer and loss of each token. Returns ``[B, S]`` float32.

        ``shared``: values for ``shared_weights``.
        """
        norm, batch = self._model.decoder.final_layernorm, state.batch
        assert norm is not None, "refused else"
        model = with_values(self._model, shared)
        return model._postprocess(
            hidden_states=apply_module(norm)(hidden),
            input_ids=batch.tokens,
            position_ids=batch.position_ids,
            labels=batch.targets,
            loss_mask=batch.loss_mask,
            attention_mask=batch.attention_mask,
            mtp_in_postprocess=model.mtp_process,
            rotary_pos_emb=state.rotary,
            rotary_pos_cos=None,
            rotary_pos_sin=None,
        )

    def whole(self, batch: GPTBatch) -> Tensor:
        """Call the GPTModel: the loss of each token, ``[B, S]`` float32."""
        return self._model(
            batch.tokens,
            batch.position_ids,
            batch.attention_mask,
            labels=batch.targets,
            loss_mask=batch.loss_mask,
        )


def mean_loss(output: Tensor, batch: GPTBatch) -> Tensor:
    """The mean of all tokens' losses: a scalar."""
    return output.mean()


def _transformer_layers(model: GPTModel) -> list[TransformerLayer]:
    return [cast(TransformerLayer, layer) for layer in model.decoder.layers]


def _gather_and_scatter(layer: TransformerLayer) -> tuple[Collective, ...]:
    """What a tensor-parallel block of two products issues."""
    tensor_parallel = layer.pg_collection.tp
    return (*issued(tensor_parallel, GATHER), *issued(tensor_parallel, SCATTER))


def _attention(layer: TransformerLayer, state: GPTState, hidden: Tensor) -> Tensor:
    hidden, _ = layer._forward_attention(
        hidden, attention_mask=state.batch.attention_mask, rotary_pos_emb=state.rotary
    )
    return hidden


def _with_own_dispatcher(moe: MoELayer) -> MoELayer:
    own = copy.copy(moe)
    own.token_dispatcher = copy.copy(moe.token_dispatcher)
    return own
