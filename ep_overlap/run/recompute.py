"""Nodes of a model whose layers are recomputed: each layer's forward twice, a graph of it once.

::

    F    attn_i = finish_(i-1), then attn       no graph; what finish makes is kept: the LayerInput
         dispatch_i, mlp_i, combine_i           no graph; nothing is kept
    R    attn_i, dispatch_i, mlp_i, combine_i   from the LayerInput, with a graph
         finish_i                               sends the next LayerInput again, now with a graph
    B    finish_i, combine_i, mlp_i, dispatch_i, attn_i    as ever, over what R built

``pre`` and ``post`` keep their graphs. Between F and R a layer and microbatch has one ``[S, B, H]``
tensor, and what the model keeps in its state. All that draws random numbers (attn, mlp, finish)
runs on the compute lane, and R draws them from where the generators stood in F; they are put back
afterwards, so that F nodes of other microbatches draw as without recompute. As
``torch.utils.checkpoint`` and ``megatron.core.tensor_parallel.checkpoint`` do.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from ep_overlap.plan.action import Compute, Node, Phase
from ep_overlap.run.layer import (
    Carry,
    DenseLayerParts,
    ModelParts,
    MoELayerParts,
    RandomStates,
    Tokens,
)
from ep_overlap.run.node import Bundle, HandOff, Hidden, LayerInput, LossEnd, NodeRun
from ep_overlap.run.slot import MicrobatchSlot
from ep_overlap.run.wiring import MoEHandOffs, NodeKey, hidden_of, wire_exchanges


def wire_recomputed(
    slot: MicrobatchSlot, parts: ModelParts[Any, Any]
) -> tuple[dict[NodeKey, NodeRun], dict[NodeKey, NodeRun]]:
    """All nodes of one microbatch, connected: those of F, ``pre`` and ``post`` with their B; and
    those of R and B."""
    wiring = _Wiring(slot, parts)
    return wiring.first, wiring.again


def _refuse_weights(output: Tensor, name: str) -> None:
    """Of R's finish, a node of its own, whose weights nobody would gather or reduce for.

    Raises:
        ValueError: the graph that made ``output`` ends in a parameter.
    """
    seen: set[object] = set()
    reached = [output.grad_fn]
    while reached:
        if (node := reached.pop()) is None or node in seen:
            continue
        seen.add(node)
        is_leaf = node.name() == "torch::autograd::AccumulateGrad"
        weight = cast(Any, node).variable if is_leaf else None
        if isinstance(weight, nn.Parameter):
            raise ValueError(
                f"{name} uses a parameter of shape {list(weight.shape)}; expected sums and "
                "permutations alone (see ep_overlap.run.layer) where layers are recomputed. Let "
                "mlp use it, or leave recompute_granularity out"
            )
        reached += [before for before, _ in node.next_functions]


@final
class _Draws:
    """What draws random numbers in F, and the same ones in R."""

    def __init__(self, states: RandomStates | None) -> None:
        self._states = states
        self._stood: object = None

    def first[**P, R](self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """In F."""
        if self._states is not None:
            self._stood = self._states.get()
        return function(*args, **kwargs)

    def again[**P, R](self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """In R."""
        if self._states is None:
            return function(*args, **kwargs)
        stand = self._states.get()
        self._states.set(self._stood)
        try:
            return function(*args, **kwargs)
        finally:
            self._states.set(stand)


@final
class _Wiring:
    """Walks the model from pre to post. ``_below`` is what the layer below hands over in F, and
    ``_finish`` what is left to do with it."""

    def __init__(self, slot: MicrobatchSlot, parts: ModelParts[Any, Any]) -> None:
        self._slot = slot
        self._parts = parts
        self.first: dict[NodeKey, NodeRun] = {}
        self.again: dict[NodeKey, NodeRun] = {}
        self._below: list[HandOff] = [self._handoff("pre")]
        self._finish: Callable[..., Tensor] = hidden_of
        self._input = LayerInput(f"{slot.index}.input.L0")
        self._pre()
        for index, layer in enumerate(parts.layers):
            if layer.kind.has_experts:
                self._moe_layer(index, cast(MoELayerParts[Any], layer))
            else:
                self._dense_layer(index, cast(DenseLayerParts[Any], layer))
        self._post()

    def _handoff(self, name: str) -> HandOff:
        return HandOff(f"{self._slot.index}.{name}")

    def _draws(self) -> _Draws:
        return _Draws(self._parts.random_states)

    def _add(
        self,
        phase: Phase,
        node: Node,
        layer: int | None,
        function: Callable[..., Sequence[Bundle]],
        inlets: Sequence[HandOff],
        outlets: Sequence[HandOff | LossEnd],
        *,
        keeps_graph: bool = True,
    ) -> NodeRun:
        word = str(Compute(self._slot.index, phase, node, layer))
        run = NodeRun(word, function, inlets=inlets, outlets=outlets, keeps_graph=keeps_graph)
        nodes = self.first if phase is Phase.FORWARD else self.again
        nodes[self._slot.index, node, layer] = run
        return run

    def _pre(self) -> None:
        slot, parts = self._slot, self._parts
        self._weights = HandOff(f"{slot.index}.weights", tuple)

        def pre() -> Sequence[Bundle]:
            hidden = parts.pre(slot.state)
            return (Hidden(hidden), tuple(parts.shared_weights), Hidden(hidden.detach()))

        outlets = [self._input, self._weights, *self._below]
        run = self._add(Phase.FORWARD, Node.PRE, None, pre, [], outlets)
        run.post_backward_hooks = (slot.let_go,)

    def _post(self) -> None:
        slot, parts = self._slot, self._parts
        below, finish, last = self._below, self._finish, self._input

        def post(shared: tuple[Tensor, ...], *previous: Bundle) -> Sequence[Bundle]:
            with torch.no_grad():
                hidden = Hidden(finish(*previous))
            if torch.is_grad_enabled():
                last.send(hidden)
                (leaf,) = last.receive()
                hidden = Hidden(cast(Tensor, leaf))
            output = parts.post(slot.state, hidden.hidden, *shared)
            return (Hidden(slot.compute_loss(output)),)

        run = self._add(Phase.FORWARD, Node.POST, None, post, [self._weights, *below], [LossEnd()])
        # No backward goes through what it took from F nodes.
        run.post_backward_hooks = tuple(handoff.clear for handoff in below)

    def _attn(
        self,
        index: int,
        attn: Callable[..., Sequence[Bundle]],
        sent: Sequence[HandOff],
        sent_again: Sequence[HandOff],
    ) -> None:
        """The attn of F, which begins with the layer below, and that of R, which does not."""
        draws, finish = self._draws(), self._finish

        def first(*previous: Bundle) -> Sequence[Bundle]:
            hidden = finish(*previous)
            made = draws.first(attn, hidden)
            return (*made, Hidden(hidden)) if index > 0 else made  # pre keeps the first one

        def again(hidden: Hidden) -> Sequence[Bundle]:
            return draws.again(attn, hidden.hidden)

        kept = [self._input] if index > 0 else []
        outlets = [*sent, *kept]
        self._add(Phase.FORWARD, Node.ATTN, index, first, self._below, outlets, keeps_graph=False)
        self._add(Phase.RECOMPUTE, Node.ATTN, index, again, [self._input], sent_again)
        self._input = LayerInput(f"{self._slot.index}.input.L{index + 1}")

    def _dense_layer(self, index: int, layer: DenseLayerParts[Any]) -> None:
        slot, draws = self._slot, self._draws()
        attended, attended_again = (self._handoff(f"attn.L{index}") for _ in range(2))
        output = self._handoff(f"mlp.L{index}")

        def attn(hidden: Tensor) -> Sequence[Bundle]:
            return (Hidden(layer.attn(slot.state, hidden)),)

        def mlp(hidden: Hidden) -> Sequence[Bundle]:
            return (Hidden(draws.first(layer.mlp, slot.state, hidden.hidden)),)

        def mlp_again(hidden: Hidden) -> Sequence[Bundle]:
            return (Hidden(draws.again(layer.mlp, slot.state, hidden.hidden)),)

        self._attn(index, attn, [attended], [attended_again])
        self._add(Phase.FORWARD, Node.MLP, index, mlp, [attended], [output], keeps_graph=False)
        self._add(Phase.RECOMPUTE, Node.MLP, index, mlp_again, [attended_again], [self._input])
        self._below, self._finish = [output], hidden_of

    def _moe_layer(self, index: int, layer: MoELayerParts[Any]) -> None:
        slot = self._slot
        of_mlp, of_finish = self._draws(), self._draws()

        def attn(hidden: Tensor) -> Sequence[Bundle]:
            return layer.attn(slot.state, hidden)

        def mlp(tokens: Tokens) -> Sequence[Bundle]:
            return (Hidden(of_mlp.first(layer.mlp, slot.state, tokens)),)

        def mlp_again(tokens: Tokens) -> Sequence[Bundle]:
            return (Hidden(of_mlp.again(layer.mlp, slot.state, tokens)),)

        def finish(tokens: Hidden, carry: Carry) -> Tensor:
            return of_finish.first(layer.finish, slot.state, tokens.hidden, carry)

        is_checked = False

        def finish_again(tokens: Hidden, carry: Carry) -> Sequence[Bundle]:
            nonlocal is_checked
            output = of_finish.again(layer.finish, slot.state, tokens.hidden, carry)
            if not is_checked:
                _refuse_weights(output, f"finish of layer {index}")
                is_checked = True
            return (Hidden(output),)

        sent, again = (MoEHandOffs.new(slot.index, index) for _ in range(2))
        self._attn(index, attn, [sent.routed, sent.carried], [again.routed, again.carried])
        for phase, handoffs, of_experts in (
            (Phase.FORWARD, sent, mlp),
            (Phase.RECOMPUTE, again, mlp_again),
        ):
            keeps_graph = phase is Phase.RECOMPUTE
            inlets, outlets = [handoffs.dispatched], [handoffs.expert_output]
            self._add(phase, Node.MLP, index, of_experts, inlets, outlets, keeps_graph=keeps_graph)
            nodes = self.first if phase is Phase.FORWARD else self.again
            nodes |= wire_exchanges(slot, layer, index, handoffs, phase, keeps_graph=keeps_graph)
        inlets = [again.combined, again.carried]
        self._add(Phase.RECOMPUTE, Node.FINISH, index, finish_again, inlets, [self._input])
        self._below, self._finish = [sent.combined, sent.carried], finish
