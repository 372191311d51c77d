"""A node that exchanges tokens, and its backward, which is the exchange the other way round.

::

    forward    sent = exchange(detach(sent by the producer))                            no graph
    backward   the producer is given reverse(what the consumer left on its leaves)

Gradients only travel in an exchange: there is nothing for autograd to form. Without a graph the
model's parts say in which order they travel. Autograd takes the latest first: the small exchange of
probs, and behind it the tokens' begins too late to find free multiprocessors.
"""

from collections.abc import Callable, Sequence
from typing import Final, cast, final

import torch
from torch import Tensor

from ep_overlap.run.node import (
    MIN_BYTES,
    Bundle,
    HandOff,
    Hidden,
    NodeRun,
    NodeState,
    Root,
    name_of,
    num_references,
)

Reverse = Callable[[Bundle], Bundle]
"""From the gradients of what an exchange returned to those of what it took; None where none is."""

Shapes = Sequence[tuple[torch.dtype, torch.Size] | None]
"""Of a bundle's members; None where one is absent."""

_OWN_REFERENCES: Final = 2
"""To a storage that only an ``ExchangeInput`` has: of the tensor sent, and of the asking."""


@final
class ExchangeInput(HandOff):
    """What an exchange takes; its gradient is not left on a leaf, but given back."""

    __slots__ = ("grads", "wanted")

    def __init__(self, name: str, bundle_type: type[Bundle] = Hidden) -> None:
        super().__init__(name, bundle_type)
        self.wanted: Sequence[bool] = ()
        """Of which members a gradient is wanted; of the last that was received."""
        self.grads: Bundle = ()
        """What the exchange gives back, for the producer's backward."""

    def receive(self) -> Bundle:
        """The value, cut off from the graph that made it, and not the start of another."""
        sent = self._sent
        detached: list[Tensor | None] = []
        wanted: list[bool] = []
        has_large = False
        for tensor in sent:
            if tensor is None:
                detached.append(None)
                wanted.append(False)
                continue
            detached.append(tensor.detach())
            wanted.append(tensor.requires_grad)
            if tensor.nbytes >= MIN_BYTES:
                has_large = True
        self.has_large = has_large
        self.wanted = wanted
        return tuple.__new__(type(sent), detached)

    def let_go(self) -> None:
        """As every hand-off does; no leaf is left behind."""
        if not self.has_large:
            return
        for index, sent in enumerate(self._sent):
            if sent is not None and sent.nbytes >= MIN_BYTES:
                storage = sent.untyped_storage()
                if num_references(storage) == _OWN_REFERENCES:
                    del storage
                    self._keep_edge(index, sent)

    def roots(self, roots: list[Root], grads: list[Tensor]) -> None:
        """Add what was sent, with the gradients that were given, and let go of both."""
        for root, grad in zip(self._roots, self.grads):  # noqa: B905 (the first ones are checked)
            if root is not None and grad is not None:
                roots.append(root)
                grads.append(grad)
        self._sent = self._roots = self.grads = ()

    def clear(self) -> None:
        """Hold nothing."""
        super().clear()
        self.grads = ()


@final
class ExchangeOutput(HandOff):
    """What an exchange brings: of no graph, so that no gradient enters where it was made."""

    __slots__ = ()

    def send(self, bundle: Bundle) -> None:
        """Keep the value for its consumer; no gradient will come: an evaluation, or the first
        forward of what is recomputed."""
        self.bring(bundle, (False,) * len(bundle))

    def bring(self, brought: Bundle, wanted: Sequence[bool]) -> None:
        """Keep the value for its consumer, with leaves for the gradients that are wanted of it.

        Leaves, not what was brought: that may be the model's, to be written to again.
        """
        leaves: list[Tensor | None] = []
        has_large = False
        for tensor, is_wanted in zip(brought, wanted):  # noqa: B905 (the first ones are checked)
            if tensor is None:
                leaves.append(None)
                continue
            leaf = tensor.detach()
            if is_wanted:
                leaf.requires_grad = True
            if tensor.nbytes >= MIN_BYTES:
                has_large = True
            leaves.append(leaf)
        self.has_large = has_large
        self._sent = brought
        self._received = tuple.__new__(type(brought), leaves)

    def receive(self) -> Bundle:
        """The leaves; of what is large a view, as ``HandOff.receive`` gives."""
        received = self._received
        if not self.has_large:
            return received
        given = [leaf if leaf is None else leaf.view_as(leaf) for leaf in received]
        return tuple.__new__(type(received), given)

    def take_grads(self) -> Bundle | None:
        """The gradients that came back, None where none did, and let go of the value. None: none
        came at all."""
        grads: list[Tensor | None] = []
        came = False
        for leaf in self._received:
            if leaf is None or (grad := leaf.grad) is None:
                grads.append(None)
            else:
                # A model may keep a piece of the consumer's graph, and that the leaf.
                leaf.grad = None
                grads.append(grad)
                came = True
        self._sent = self._received = ()
        return tuple(grads) if came else None

    def _keep_edge(self, index: int, sent: Tensor) -> None:
        # No gradient enters here; and the edge of a tensor without a graph would hold it.
        kept = list(self._sent)
        kept[index] = None
        self._sent = tuple(kept)


@final
class ExchangeRun(NodeRun):
    """An exchange of one microbatch in flight.

    Args:
        name: the word of its forward, for errors.
        exchange: takes the bundle of ``inlet``, returns that of ``outlet``, alone in a tuple.
        reverse: its backward.
        inlet: what it receives.
        outlet: what it sends.
        keeps_graph: False for the first forward of what is recomputed: no backward comes for it.
    """

    __slots__ = ("_inlet", "_is_trusted", "_outlet", "_reverse", "_taken")

    def __init__(
        self,
        name: str,
        exchange: Callable[..., Sequence[Bundle]],
        reverse: Reverse,
        *,
        inlet: ExchangeInput,
        outlet: ExchangeOutput,
        keeps_graph: bool = True,
    ) -> None:
        super().__init__(name, exchange, inlets=[inlet], outlets=[outlet], keeps_graph=keeps_graph)
        self._inlet = inlet
        self._outlet = outlet
        self._reverse = reverse
        self._is_trusted = False
        """Whether a forward and its backward have been looked at."""
        self._taken: Shapes = ()
        """What its gradients must be like; until then."""

    def forward(self) -> None:
        """Exchange, and hand the result on as what a gradient may be wanted of.

        Raises:
            RuntimeError: the last forward's backward has not run.
            ValueError: as ``NodeRun.forward``; or there is a graph, which no backward would reach.
        """
        if not (self._keeps_graph and torch.is_grad_enabled()):
            super().forward()
            return
        if self._state is not NodeState.IDLE:
            raise self._out_of_order("forward", NodeState.IDLE)
        for hook in self.pre_forward_hooks:
            hook()
        inlet = self._inlet
        made = self._function(inlet.receive())
        if not self._is_trusted:
            self._check(made)
            self._check_sent(made[0])
        self._state = NodeState.FORWARD_DONE
        if self.keeps_used:
            self._reads = True
        elif inlet.has_large:
            inlet.let_go()
        self._outlet.bring(made[0], inlet.wanted)

    def backward(self) -> None:
        """Send the gradients home.

        Raises:
            RuntimeError: no forward has run.
            ValueError: the gradients that come home are not those of what was sent out.
        """
        if self._state is not NodeState.FORWARD_DONE:
            raise self._out_of_order("backward", NodeState.FORWARD_DONE)
        for hook in self.pre_backward_hooks:
            hook()
        inlet = self._inlet
        grads = self._outlet.take_grads()
        if self.keeps_used:
            self._used = (grads, inlet.held) if self._reads else (grads,)
        if grads is not None:
            given = self._reverse(grads)
            if not self._is_trusted:
                self._check_given(grads, given)
                self._is_trusted = True
            inlet.grads = given
        self._state = NodeState.IDLE
        for hook in self.post_backward_hooks:
            hook()

    def _check_sent(self, sent: Bundle) -> None:  # it is of the outlet's type
        self._taken = taken = _shapes(self._inlet.held)
        if [member is None for member in taken] != [member is None for member in sent]:
            raise ValueError(
                f"{self.name} took {taken}, but returned {_shapes(sent)}, expected as many: see "
                "ep_overlap.run.layer"
            )
        if any(member is not None and member.requires_grad for member in sent):
            raise ValueError(
                f"{self.name} made a graph, expected an exchange and nothing else: no backward "
                "goes through it but its reverse. Let attn or mlp compute, see "
                "ep_overlap.run.layer"
            )

    def _check_given(self, grads: Bundle, given: Bundle) -> None:
        expected = [
            None if grad is None else taken for grad, taken in zip(grads, self._taken, strict=True)
        ]
        is_bundle = isinstance(cast(object, given), tuple) and not any(
            member is not None and not isinstance(cast(object, member), Tensor) for member in given
        )
        got = _shapes(given) if is_bundle else _types(given)
        if got != expected:
            raise ValueError(
                f"the backward of {self.name} returned {got}, expected gradients of {expected}: "
                "see ep_overlap.run.layer"
            )
        if any(member is not None and member.requires_grad for member in given):
            raise ValueError(
                f"the backward of {self.name} made a graph, which no backward would reach; let "
                "attn or mlp compute, see ep_overlap.run.layer"
            )


def _shapes(bundle: Bundle) -> Shapes:
    return [None if member is None else (member.dtype, member.shape) for member in bundle]


def _types(given: object) -> str | list[str]:
    if not isinstance(given, tuple):
        return name_of(given)
    return [name_of(member) for member in cast(tuple[object, ...], given)]
