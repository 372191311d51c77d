"""What a model gives the schedule: its layers, cut into parts, with a typed value at each cut.

::

    pre --h--> [ attn --Tokens--> dispatch --Tokens--> mlp --t--> combine ]--t--> finish --h--> ...
                   \\_______________________ Carry ______________________________/

``finish`` (postprocess, residual, dropout) is the first thing that the *next* layer's ``attn``, or
``post``, does: so it runs on the compute lane, and the exchange lane carries exchanges only.

Shape letters: S sequence, B batch, H hidden, T tokens (S * B * top-k before dispatch; what this
rank's experts received after it).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, final

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ep_overlap.plan.action import LayerKind, Node
from fsdp_hooks.wgrad_layers import LayerTypes


class Tokens(NamedTuple):
    """Routed tokens: the hand-off from attn to dispatch, and from dispatch to mlp."""

    tokens: Tensor
    """``[T, H]``"""
    probs: Tensor | None
    """``[T]``: the router's weight of each token, where the experts' side applies it."""


class TokenGrads(NamedTuple):
    """The gradients of ``Tokens``; None where none came."""

    tokens: Tensor | None
    """``[T, H]``"""
    probs: Tensor | None
    """``[T]``"""


class Carry(NamedTuple):
    """What attn hands past the exchange, to ``finish``."""

    residual: Tensor
    """``[S, B, H]``"""
    shared: Tensor | None
    """``[S, B, H]``: the shared experts' output, for layers that have some."""


class RandomStates(Protocol):
    """The generators that forwards draw from."""

    def get(self) -> object:
        """Where they stand."""
        ...

    def set(self, states: object) -> None:
        """Put them where they stood."""
        ...


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective that a node's forward issues.

    An exchange's backward issues its reverse on the same group; a gather of counts has none.
    """

    group: ProcessGroup
    op: str
    """torch.distributed's name: ``all_to_all_single``, ``all_gather_into_tensor``, ..."""


@final
class JoinedModules(nn.ModuleList):
    """A layer that its model holds as several modules.

    It is none of the model's modules itself. Shard each one; the plan's unit of the layer is all of
    their units (``joined.py``).
    """


def modules_of(layer: nn.Module) -> Sequence[nn.Module]:
    """What of the model to shard for a layer (``LayerParts.module``): itself, or each module of
    ``JoinedModules``."""
    return tuple(layer) if isinstance(layer, JoinedModules) else (layer,)


class LayerParts(Protocol):
    """What dense and MoE layers share."""

    @property
    def kind(self) -> LayerKind:
        """``DENSE``: the layer is a ``DenseLayerParts``; else a ``MoELayerParts``."""
        ...

    @property
    def module(self) -> nn.Module:
        """The layer itself, or ``JoinedModules``; its parameters are those that the parts read."""
        ...

    def collectives(self, node: Node) -> Sequence[Collective]:
        """The collectives of ``node``'s forward, in issue order."""
        ...


class MoELayerParts[StateT](LayerParts, Protocol):
    """A layer with experts. ``state`` is the microbatch's own (see ``ModelParts.begin``)."""

    @property
    def shared_experts(self) -> nn.Module | None:
        """What every token visits, as part of ``attn``; None unless the kind is ``MOE_SHARED``."""
        ...

    def attn(self, state: StateT, hidden: Tensor) -> tuple[Tokens, Carry]:
        """Attention, norm, router, gather of token counts, permute. ``hidden``: ``[S, B, H]``."""
        ...

    # No graph is made of an exchange: its backward is a method, too (see ``exchange_node.py``).
    # What both return is looked at in the first step alone: they must be alike in every step.

    def dispatch(self, state: StateT, tokens: Tokens) -> Tokens:
        """The exchange that brings tokens to their experts, and nothing else: what it would compute
        its backward would not know of."""
        ...

    def dispatch_backward(self, state: StateT, grads: TokenGrads) -> TokenGrads:
        """Its reverse: brings the gradients home. The tokens' are better sent first."""
        ...

    def mlp(self, state: StateT, tokens: Tokens) -> Tensor:
        """Sort by expert, run the experts, unsort. Returns ``[T, H]``."""
        ...

    def combine(self, state: StateT, tokens: Tensor) -> Tensor:
        """The exchange that brings tokens home, and nothing else. Returns ``[T, H]``."""
        ...

    def combine_backward(self, state: StateT, grad: Tensor) -> Tensor:
        """Its reverse: brings the gradient to the experts. Returns ``[T, H]``."""
        ...

    def finish(self, state: StateT, combined: Tensor, carry: Carry) -> Tensor:
        """Unpermute, shared experts' sum, residual; no weights. Returns ``[S, B, H]``."""
        ...


class DenseLayerParts[StateT](LayerParts, Protocol):
    """A layer without experts."""

    def attn(self, state: StateT, hidden: Tensor) -> Tensor:
        """Attention and its residual. ``[S, B, H]`` to ``[S, B, H]``."""
        ...

    def mlp(self, state: StateT, hidden: Tensor) -> Tensor:
        """Norm, MLP and residual. ``[S, B, H]`` to ``[S, B, H]``."""
        ...


class ModelParts[BatchT, StateT](Protocol):
    """A model as the schedule sees it."""

    @property
    def module(self) -> nn.Module:
        """The whole model; where sharding and ``no_sync`` are looked for."""
        ...

    @property
    def layers(self) -> Sequence[MoELayerParts[StateT] | DenseLayerParts[StateT]]:
        """In forward order."""
        ...

    @property
    def wgrad_layers(self) -> LayerTypes:
        """Kinds of layers, besides ``nn.Linear``, whose weight gradients can be delayed and fused
        (see ``fsdp_hooks.manage_wgrad``)."""
        ...

    @property
    def draws_random(self) -> bool:
        """Whether forwards draw random numbers, as dropout does. Two forwards may not take turns
        then: each would draw numbers that are the other's on the standard path."""
        ...

    @property
    def random_states(self) -> RandomStates | None:
        """Of the generators that forwards draw from, for recompute to draw again what was drawn;
        None where nothing is drawn."""
        ...

    @property
    def replays_graphs(self) -> bool:
        """Whether pieces of its nodes are replayed from CUDA graphs (``cuda_graph.py``), which hold
        their weights' addresses and make their weights' gradients."""
        ...

    @property
    def shared_weights(self) -> Sequence[nn.Parameter]:
        """What ``pre`` and ``post`` both use, such as a tied embedding; asked within ``pre``.

        They are handed to ``post`` as values, so autograd adds up a microbatch's gradient and
        leaves it in ``.grad`` once, as in one graph. Else there would be two backward calls, and a
        core that adds to a sum of all microbatches would round otherwise.
        """
        ...

    @property
    def head(self) -> nn.Module | None:
        """The output layer, which may be a unit of its own; None where ``pre`` uses its weights.

        What else uses it, such as heads of multi-token prediction, runs in ``post``.
        """
        ...

    def collectives(self, node: Node) -> Sequence[Collective]:
        """The collectives of the forward of ``pre`` or ``post``, in issue order."""
        ...

    def begin(self, batch: BatchT) -> StateT:
        """State of one microbatch in flight: inputs, and what routing keeps between nodes. What
        carries a gradient goes by hand-off, never by the state.

        Several are alive at once; nothing that a microbatch changes may be shared between two.
        """
        ...

    def pre(self, state: StateT) -> Tensor:
        """Embedding. Returns ``[S, B, H]``."""
        ...

    def post(self, state: StateT, hidden: Tensor, *shared: Tensor) -> Tensor:
        """Final norm and output layer (and the loss, where the model computes it).

        ``shared``: the values to use in place of ``shared_weights``; none: the weights themselves.
        """
        ...

    def whole(self, batch: BatchT) -> Tensor:
        """Call the module itself, hooks and all: what the schedule's results are compared with."""
        ...
