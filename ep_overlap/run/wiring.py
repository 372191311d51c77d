"""From a model's parts to nodes: which node of a microbatch hands what to which.

One MoE layer between its neighbours; a dense layer is ``attn --Hidden--> mlp``::

    --Hidden--> attn --Tokens--> dispatch --Tokens--> mlp --Hidden--> combine --Hidden--> next
                   \\_____________________________ Carry _____________________________/

*next* is the next layer's attn, or post. It begins with this layer's ``finish``. Weights that pre
and post share go from pre to post as values.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ep_overlap.plan.action import NODES_OF, WGRADS_OF, Compute, LayerKind, Node, Phase
from ep_overlap.run.layer import Carry, DenseLayerParts, ModelParts, MoELayerParts, Tokens
from ep_overlap.run.node import Bundle, HandOff, Hidden, LossEnd, NodeRun
from ep_overlap.run.wgrad import WgradRun
from fsdp_hooks.wgrad import WgradQueue

LossFn = Callable[[Tensor, Any], Tensor]
"""``(output, batch) -> scalar``; divided by the number of microbatches."""

NodeKey = tuple[int, Node, int | None]
"""Microbatch, node, layer."""


@final
class MicrobatchSlot:
    """One place for a microbatch in flight: its batch and state now, its loss afterwards.

    Batch and state go with the microbatch's last node, not at the end of the step: a model may
    keep routing and even pieces of graph in its state.
    """

    def __init__(self, index: int, parts: ModelParts[Any, Any], loss_divisor: int) -> None:
        self.index = index
        self._parts = parts
        self._loss_divisor = loss_divisor
        self._batch: Any = None
        self.state: Any = None
        """What ``ModelParts.begin`` returned."""
        self._loss_fn: LossFn | None = None
        self._loss: Tensor | None = None

    def begin(self, batch: Any, loss_fn: LossFn) -> None:
        """Take a microbatch in."""
        self._batch = batch
        self._loss_fn = loss_fn
        self._loss = None
        try:
            self.state = self._parts.begin(batch)
        except BaseException as error:
            error.add_note(f"raised in begin of microbatch {self.index}")
            raise

    def compute_loss(self, output: Tensor) -> Tensor:
        """The loss, divided; undivided it is kept for the caller.

        Raises:
            ValueError: it is no scalar tensor.
        """
        assert self._loss_fn is not None, "begin() comes first"
        loss = cast(object, self._loss_fn(output, self._batch))
        if not isinstance(loss, Tensor):
            raise ValueError(
                f"loss_fn returned {type(loss).__name__}, expected a scalar tensor; return the loss"
            )
        if loss.numel() != 1:
            raise ValueError(
                f"loss_fn returned a tensor of shape {tuple(loss.shape)}, expected a scalar; take "
                "its mean"
            )
        self._loss = loss.detach()
        if not torch.is_grad_enabled():  # evaluation: nothing of this microbatch follows
            self.let_go()
        return loss / self._loss_divisor

    def take_loss(self) -> Tensor:
        """The microbatch's loss, undivided."""
        loss = self._loss
        assert loss is not None, f"post of microbatch {self.index} has not run"
        self._loss = None
        return loss

    def let_go(self) -> None:
        """The microbatch's last node is done: hold nothing but the loss."""
        self._batch = None
        self.state = None
        self._loss_fn = None

    def clear(self) -> None:
        """Hold nothing."""
        self.let_go()
        self._loss = None


def check_parts(parts: ModelParts[Any, Any]) -> tuple[LayerKind, ...]:
    """The kind of each layer.

    Raises:
        ValueError: a layer lacks one of its kind's nodes, or nodes of two lanes use one process
            group: two lanes have no order between them, so ranks could issue in different orders
            (and one gloo group used from two threads mixes their data).
    """
    kinds: list[LayerKind] = []
    users: list[tuple[ProcessGroup, Compute]] = []
    for index, layer in enumerate(parts.layers):
        needed = [str(node) for node in NODES_OF[layer.kind]]
        if layer.kind.has_experts:
            needed.append("finish")
        missing = [name for name in needed if not callable(_member(layer, name))]
        if missing:
            raise ValueError(
                f"layer {index} ({type(layer).__name__}) is {layer.kind} but has no "
                f"{', '.join(missing)}; expected the methods {', '.join(needed)}. Add what is "
                "missing, or let its kind be another"
            )
        kinds.append(layer.kind)
        for node in NODES_OF[layer.kind]:
            user = Compute(0, Phase.FORWARD, node, index)
            for collective in layer.collectives(node):
                _check_lane(collective.group, user, users)
    for node in (Node.PRE, Node.POST):
        for collective in parts.collectives(node):
            _check_lane(collective.group, Compute(0, Phase.FORWARD, node), users)
    return tuple(kinds)


def _check_lane(
    group: ProcessGroup, user: Compute, users: list[tuple[ProcessGroup, Compute]]
) -> None:
    """Note who uses a group; refuse a second lane."""
    first = next((before for known, before in users if known is group), None)
    if first is None:
        users.append((group, user))
    elif first.lane is not user.lane:
        raise ValueError(
            f"{first} (lane {first.lane}) and {user} (lane {user.lane}) use one process group; "
            "give each lane a group of its own over the same ranks"
        )


def _member(layer: object, name: str) -> object:
    """Attribute by name, without running properties of other names."""
    return next((vars(cls)[name] for cls in type(layer).__mro__ if name in vars(cls)), None)


def wire(slot: MicrobatchSlot, parts: ModelParts[Any, Any]) -> dict[NodeKey, NodeRun]:
    """All nodes of one microbatch, connected."""
    return _Wiring(slot, parts).nodes


def wire_wgrad(
    slot: MicrobatchSlot, parts: ModelParts[Any, Any], delayed: Collection[tuple[Node, int | None]]
) -> dict[NodeKey, WgradRun]:
    """All W nodes of one microbatch, each with a queue of its own. ``delayed``: what has some."""
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
            wgrads[slot.index, node, index] = WgradRun(queue)
    return wgrads


@final
class _Wiring:
    """Walks the model from pre to post, each node's outlets being the next one's inlets."""

    def __init__(self, slot: MicrobatchSlot, parts: ModelParts[Any, Any]) -> None:
        self._slot = slot
        self.nodes: dict[NodeKey, NodeRun] = {}
        first, weights = self._handoff("pre"), self._handoff("weights")

        def pre() -> Sequence[Bundle]:
            return (Hidden(parts.pre(slot.state)), tuple(parts.shared_weights))

        self._add(Node.PRE, None, pre, [], [first, weights])
        self.nodes[slot.index, Node.PRE, None].post_backward_hooks = (slot.let_go,)
        inlets: list[HandOff] = [first]
        finish: Callable[..., Tensor] = _hidden
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

    def _handoff(self, name: str) -> HandOff:
        return HandOff(f"{self._slot.index}.{name}")

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
        return [output], _hidden

    def _moe_layer(
        self,
        index: int,
        layer: MoELayerParts[Any],
        inlets: Sequence[HandOff],
        finish: Callable[..., Tensor],
    ) -> tuple[list[HandOff], Callable[..., Tensor]]:
        slot = self._slot
        routed, carried = self._handoff(f"attn.L{index}"), self._handoff(f"carry.L{index}")
        dispatched = self._handoff(f"dispatch.L{index}")
        expert_output = self._handoff(f"mlp.L{index}")
        combined = self._handoff(f"combine.L{index}")

        def attn(*previous: Bundle) -> Sequence[Bundle]:
            return layer.attn(slot.state, finish(*previous))

        def dispatch(tokens: Tokens) -> Sequence[Bundle]:
            return (layer.dispatch(slot.state, tokens),)

        def mlp(tokens: Tokens) -> Sequence[Bundle]:
            return (Hidden(layer.mlp(slot.state, tokens)),)

        def combine(tokens: Hidden) -> Sequence[Bundle]:
            return (Hidden(layer.combine(slot.state, tokens.hidden)),)

        def finish_this(tokens: Hidden, carry: Carry) -> Tensor:
            return layer.finish(slot.state, tokens.hidden, carry)

        self._add(Node.ATTN, index, attn, inlets, [routed, carried])
        self._add(Node.DISPATCH, index, dispatch, [routed], [dispatched])
        self._add(Node.MLP, index, mlp, [dispatched], [expert_output])
        self._add(Node.COMBINE, index, combine, [expert_output], [combined])
        return [combined, carried], finish_this


def _hidden(hidden: Hidden) -> Tensor:
    """The ``finish`` of pre and of dense layers: there is nothing left to do."""
    return hidden.hidden
