"""From a model's parts to nodes: which node of a microbatch hands what to which.

One MoE layer between its neighbours; a dense layer is ``attn --Hidden--> mlp``::

    --Hidden--> attn --Tokens--> dispatch --Tokens--> mlp --Hidden--> combine --Hidden--> next
                   \\_____________________________ Carry _____________________________/

*next* is the next layer's attn, or post. It begins with this layer's ``finish``. Weights that pre
and post share go from pre to post as values.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Self, cast, final

from torch import Tensor

from ep_overlap.plan.action import WGRADS_OF, Compute, Node, Phase
from ep_overlap.run.exchange_node import ExchangeInput, ExchangeOutput, ExchangeRun
from ep_overlap.run.layer import (
    Carry,
    DenseLayerParts,
    ModelParts,
    MoELayerParts,
    TokenGrads,
    Tokens,
)
from ep_overlap.run.node import Bundle, HandOff, Hidden, LossEnd, NodeRun
from ep_overlap.run.slot import MicrobatchSlot
from ep_overlap.run.wgrad import WgradRun
from fsdp_hooks.wgrad import WgradQueue

NodeKey = tuple[int, Node, int | None]
"""Microbatch, node, layer."""


def wire(slot: MicrobatchSlot, parts: ModelParts[Any, Any]) -> dict[NodeKey, NodeRun]:
    """All nodes of one microbatch, connected."""
    return _Wiring(slot, parts).nodes


def wire_wgrad(
    slot: MicrobatchSlot,
    parts: ModelParts[Any, Any],
    delayed: Collection[tuple[Node, int | None]],
    with_backward: Callable[[NodeKey], NodeRun],
) -> dict[NodeKey, WgradRun]:
    """All W nodes of one microbatch, each with a queue of its own.

    Args:
        slot: the microbatch's.
        parts: the model's.
        delayed: what has some.
        with_backward: the node whose backward the plan runs.
    """
    wgrads: dict[NodeKey, WgradRun] = {}
    for index, layer in enumerate(parts.layers):
        nodes = (node for node in WGRADS_OF[layer.kind] if (node, index) in delayed)
        queues = {node: WgradQueue() for node in nodes}
        if Node.SHARED in queues and Node.ATTN in queues:
            shared_experts = cast(MoELayerParts[Any], layer).shared_experts
            assert shared_experts is not None, f"layer {index} says that it has shared experts"
            # They run within attn: its backward leaves their gradients to a W node of their own.
            aside = dict.fromkeys(shared_experts.modules(), queues[Node.SHARED])
            queues[Node.ATTN] = WgradQueue(aside)
        for node, queue in queues.items():
            runs_in = Node.ATTN if node is Node.SHARED else node
            run = with_backward((slot.index, runs_in, index))
            wgrads[slot.index, node, index] = WgradRun(queue, run)
    return wgrads


class MoEHandOffs(NamedTuple):
    """Between the nodes of one MoE layer."""

    routed: ExchangeInput
    carried: HandOff
    dispatched: ExchangeOutput
    expert_output: ExchangeInput
    combined: ExchangeOutput

    @classmethod
    def new(cls, microbatch: int, layer: int) -> Self:
        """All of them, empty: each has its maker's name, but attn's second one."""
        attn, carry, dispatch, mlp, combine = (
            f"{microbatch}.{name}.L{layer}"
            for name in ("attn", "carry", "dispatch", "mlp", "combine")
        )
        return cls(
            ExchangeInput(attn, Tokens),
            HandOff(carry, Carry),
            ExchangeOutput(dispatch, Tokens),
            ExchangeInput(mlp),
            ExchangeOutput(combine),
        )


def wire_exchanges(
    slot: MicrobatchSlot,
    layer: MoELayerParts[Any],
    index: int,
    handoffs: MoEHandOffs,
    phase: Phase,
    *,
    keeps_graph: bool = True,
) -> dict[NodeKey, NodeRun]:
    """Dispatch and combine of one layer: of F, or where it is recomputed also of R."""

    def dispatch(tokens: Tokens) -> Sequence[Bundle]:
        return (layer.dispatch(slot.state, tokens),)

    def dispatch_backward(grads: Bundle) -> Bundle:
        return layer.dispatch_backward(slot.state, TokenGrads(*grads))

    def combine(tokens: Hidden) -> Sequence[Bundle]:
        return (Hidden(layer.combine(slot.state, tokens.hidden)),)

    def combine_backward(grads: Bundle) -> Bundle:
        (grad,) = grads
        assert grad is not None, "a backward is asked for where a gradient came"
        return (layer.combine_backward(slot.state, grad),)

    nodes: dict[NodeKey, NodeRun] = {}
    for node, exchange, reverse, inlet, outlet in (
        (Node.DISPATCH, dispatch, dispatch_backward, handoffs.routed, handoffs.dispatched),
        (Node.COMBINE, combine, combine_backward, handoffs.expert_output, handoffs.combined),
    ):
        nodes[slot.index, node, index] = ExchangeRun(
            str(Compute(slot.index, phase, node, index)),
            exchange,
            reverse,
            inlet=inlet,
            outlet=outlet,
            keeps_graph=keeps_graph,
        )
    return nodes


@final
class _Wiring:
    """Walks the model from pre to post, each node's outlets being the next one's inlets."""

    def __init__(self, slot: MicrobatchSlot, parts: ModelParts[Any, Any]) -> None:
        self._slot = slot
        self.nodes: dict[NodeKey, NodeRun] = {}
        first, weights = self._handoff("pre"), self._handoff("weights", tuple)

        def pre() -> Sequence[Bundle]:
            return (Hidden(parts.pre(slot.state)), tuple(parts.shared_weights))

        self._add(Node.PRE, None, pre, [], [first, weights])
        self.nodes[slot.index, Node.PRE, None].post_backward_hooks = (slot.let_go,)
        inlets: list[HandOff] = [first]
        finish: Callable[..., Tensor] = hidden_of
        for index, layer in enumerate(parts.layers):
            if layer.kind.has_experts:
                inlets, finish = self._moe_layer(
                    index, cast(MoELayerParts[Any], layer), inlets, finish
                )
            else:
                inlets, finish = self._dense_layer(
                    index, cast(DenseLayerParts[Any], layer), inlets, finish
                )
        end = finish

        def post(shared: tuple[Tensor, ...], *previous: Bundle) -> Sequence[Bundle]:
            output = parts.post(slot.state, end(*previous), *shared)
            return (Hidden(slot.compute_loss(output)),)

        self._add(Node.POST, None, post, [weights, *inlets], [LossEnd()])

    def _handoff(self, name: str, bundle_type: type[Bundle] = Hidden) -> HandOff:
        return HandOff(f"{self._slot.index}.{name}", bundle_type)

    def _add(
        self,
        node: Node,
        layer: int | None,
        function: Callable[..., Sequence[Bundle]],
        inlets: Sequence[HandOff],
        outlets: Sequence[HandOff | LossEnd],
    ) -> None:
        word = str(Compute(self._slot.index, Phase.FORWARD, node, layer))
        self.nodes[self._slot.index, node, layer] = NodeRun(
            word, function, inlets=inlets, outlets=outlets
        )

    def _dense_layer(
        self,
        index: int,
        layer: DenseLayerParts[Any],
        inlets: Sequence[HandOff],
        finish: Callable[..., Tensor],
    ) -> tuple[list[HandOff], Callable[..., Tensor]]:
        slot = self._slot
        attended, output = self._handoff(f"attn.L{index}"), self._handoff(f"mlp.L{index}")

        def attn(*previous: Bundle) -> Sequence[Bundle]:
            return (Hidden(layer.attn(slot.state, finish(*previous))),)

        def mlp(hidden: Hidden) -> Sequence[Bundle]:
            return (Hidden(layer.mlp(slot.state, hidden.hidden)),)

        self._add(Node.ATTN, index, attn, inlets, [attended])
        self._add(Node.MLP, index, mlp, [attended], [output])
        return [output], hidden_of

    def _moe_layer(
        self,
        index: int,
        layer: MoELayerParts[Any],
        inlets: Sequence[HandOff],
        finish: Callable[..., Tensor],
    ) -> tuple[list[HandOff], Callable[..., Tensor]]:
        slot = self._slot
        handoffs = MoEHandOffs.new(slot.index, index)

        def attn(*previous: Bundle) -> Sequence[Bundle]:
            return layer.attn(slot.state, finish(*previous))

        def mlp(tokens: Tokens) -> Sequence[Bundle]:
            return (Hidden(layer.mlp(slot.state, tokens)),)

        def finish_this(tokens: Hidden, carry: Carry) -> Tensor:
            return layer.finish(slot.state, tokens.hidden, carry)

        self._add(Node.ATTN, index, attn, inlets, [handoffs.routed, handoffs.carried])
        self._add(Node.MLP, index, mlp, [handoffs.dispatched], [handoffs.expert_output])
        self.nodes |= wire_exchanges(slot, layer, index, handoffs, Phase.FORWARD)
        return [handoffs.combined, handoffs.carried], finish_this


def hidden_of(hidden: Hidden) -> Tensor:
    """The ``finish`` of pre and of dense layers: there is nothing left to do."""
    return hidden.hidden
