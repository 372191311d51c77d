"""megatron-core's models, cut into the parts that a schedule runs: what all share, and GPTModel.

``megatron_layers.py`` has the layers, ``megatron_ends.py`` what is around them, and
``megatron_hybrid.py`` HybridModel.
"""

# GPTModel offers its pre- and post-processing under names with an underscore only; megatron-core's
# own schedule calls them too.
# pyright: reportPrivateUsage=false

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from ep_overlap.models.groups import ALL_REDUCE, GATHER, SCATTER, issued
from ep_overlap.models.megatron_build import MegatronModel, global_name
from ep_overlap.models.megatron_ends import (
    exchange_with_counts,
    mtp_collectives,
    shared_weights,
    with_values,
)
from ep_overlap.models.megatron_globals import INSTALL_HINT
from ep_overlap.models.megatron_graphs import graphed_attention
from ep_overlap.models.megatron_layers import (
    GPTBatch,
    GPTState,
    Halves,
    MegatronDenseLayer,
    MegatronMoELayer,
    called_attention,
    layer_of,
)
from ep_overlap.models.megatron_refused import refuse_unsupported
from ep_overlap.models.megatron_wgrad import WGRAD_LAYERS
from ep_overlap.plan.action import Node
from ep_overlap.run.layer import Collective, RandomStates
from fsdp_hooks.wgrad_layers import LayerTypes

try:
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from megatron.core.typed_torch import apply_module
except ImportError as error:
    raise ImportError(INSTALL_HINT) from error


class MegatronRandomStates:
    """As ``megatron.core.tensor_parallel.checkpoint`` saves and restores them."""

    def get(self) -> object:
        """Where they stand."""
        return random._get_all_rng_states()

    def set(self, states: object) -> None:
        """Put them where they stood."""
        random._set_all_rng_states(*cast("tuple[Any, ...]", states))


class MegatronParts[ModelT: MegatronModel](ABC):
    """A model as the schedule sees it; what does not depend on which one it is.

    On CPU, use it inside ``megatron_on_cpu``.

    Args:
        model: has been looked at (``refuse_unsupported``).
        layers: its decoder's, in order.
        cuda_graphs: whether attention is replayed from CUDA graphs (``megatron_graphs.py``).

    Raises:
        ValueError: ``cuda_graphs``, and attention is none that can be replayed.
    """

    def __init__(self, model: ModelT, layers: Sequence[Halves], *, cuda_graphs: bool) -> None:
        exchange_with_counts(model)
        self._model = model
        self.replays_graphs = cuda_graphs
        graphed = partial(graphed_attention, aside=cache(torch.cuda.Stream))
        attention_of = graphed if cuda_graphs else called_attention
        self._layers = [
            layer_of(halves, index, attention_of) for index, halves in enumerate(layers)
        ]
        # Made once for the longest sequence; batches hold views of it.
        longest, device = model.max_sequence_length, next(model.parameters()).device
        self._positions = torch.arange(longest, device=device).unsqueeze(0)
        self._mask = torch.ones(longest, longest, dtype=torch.bool, device=device).triu(1)

    @property
    def module(self) -> ModelT:
        """The model."""
        return self._model

    @property
    def layers(self) -> Sequence[MegatronMoELayer | MegatronDenseLayer]:
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
        """megatron-core's: the CPU's, the device's, and those of its tracker. Routing by random
        scores, for measuring, draws from them as well."""
        config = self._model.config
        routes_at_random = (
            config.moe_router_force_load_balancing or config.moe_router_force_biased is not None
        )
        return MegatronRandomStates() if self.draws_random or routes_at_random else None

    @property
    def shared_weights(self) -> Sequence[nn.Parameter]:
        """The embedding's, where the output layer is tied to it or MTP layers use it, too."""
        return shared_weights(self._model)

    @property
    def head(self) -> nn.Module | None:
        """The output layer, unless it is tied to the embedding."""
        model = self._model
        is_tied = model.share_embeddings_and_output_weights
        return None if is_tied else cast(nn.Module, model.output_layer)

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
        """Its inputs; the rest comes as its layers run."""
        return GPTState(batch=batch)

    @abstractmethod
    def pre(self, state: GPTState) -> Tensor:
        """Embedding, and the rotary angles of all layers. Returns ``[S, B, H]``."""

    @abstractmethod
    def post(self, state: GPTState, hidden: Tensor, *shared: Tensor) -> Tensor:
        """Final norm, MTP layers, output layer and loss of each token. Returns ``[B, S]`` float32.

        ``shared``: values for ``shared_weights``.
        """

    def whole(self, batch: GPTBatch) -> Tensor:
        """Call the model: the loss of each token, ``[B, S]`` float32."""
        return self._model(
            batch.tokens,
            batch.position_ids,
            batch.attention_mask,
            labels=batch.targets,
            loss_mask=batch.loss_mask,
        )


@final
class GPTParts(MegatronParts[GPTModel]):
    """A GPTModel as the schedule sees it.

    On CPU, use it inside ``megatron_on_cpu``.

    Args:
        model: as a script has built it.
        cuda_graphs: whether attention is replayed from CUDA graphs: for a step whose time is the
            host's. On a GPU, with Transformer Engine's layers.

    Raises:
        ValueError: the model uses something that the parts leave out.
    """

    def __init__(self, model: GPTModel, *, cuda_graphs: bool = False) -> None:
        refuse_unsupported(model)
        layers = (cast(TransformerLayer, layer) for layer in model.decoder.layers)
        halves = [Halves(layer, layer, layer) for layer in layers]
        super().__init__(model, halves, cuda_graphs=cuda_graphs)

    def pre(self, state: GPTState) -> Tensor:
        """As there."""
        batch = state.batch
        hidden, state.rotary, *_ = self._model._preprocess(batch.tokens, batch.position_ids)
        return cast(Tensor, hidden)

    def post(self, state: GPTState, hidden: Tensor, *shared: Tensor) -> Tensor:
        """As there."""
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


def mean_loss(output: Tensor, batch: GPTBatch) -> Tensor:
    """The mean of all tokens' losses: a scalar."""
    return output.mean()
