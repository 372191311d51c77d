"""One node of one microbatch: forward, backward, and the autograd boundary between nodes.

::

    forward    received = detach(sent by the producers);   sent = function(*received)
    backward   autograd.backward(roots=sent, grads=what the consumers left on their leaves)

What is handed over is the same storage as what was made, as a new leaf. The consumer's backward
leaves the gradient on the leaf; the producer's backward starts from there. Gradients of several
hand-offs enter one backward call as its roots, so sums are formed in autograd's own order.

Neither backward reads the value itself. Once the consumer's forward is through, it goes, unless
somebody's graph has saved it::

    sent    tensor of the producer   ->   the edge of its graph that the gradient enters by
    leaf    the same storage         ->   a shape without memory, to take the gradient

So of what is exchanged, and sorted again where it arrives, nothing waits for the backward.
Megatron-LM resizes the storage of such inputs to zero, in the nodes of which it knows.

An exchange is a node without a graph (``exchange_node.py``).

Roots and gradients only: activation checkpointing refuses ``backward(inputs=...)``. The boundary
is that of Megatron-LM's ``ScheduleNode``; the typed hand-offs and states are ours.
"""

from collections.abc import Callable, Collection, Sequence
from enum import Enum
from typing import Final, NamedTuple, cast, final

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fsdp_hooks.wgrad import storage_id

Bundle = tuple[Tensor | None, ...]
"""A hand-off's value: a named tuple such as ``Tokens``; None where an optional field is absent."""

Root = Tensor | GradientEdge
"""What a backward starts from."""

MIN_BYTES: Final = 2**16
"""Of what is let go of. The host takes some 5 us for it, which less memory is not worth."""

Hook = Callable[[], None]


class Hidden(NamedTuple):
    """The hand-off of a single tensor."""

    hidden: Tensor
    """``[S, B, H]``, or ``[T, H]`` between mlp, combine and finish."""


class NodeState(Enum):
    """Where a node of one microbatch stands."""

    IDLE = "idle"
    """Nothing is held."""
    FORWARD_DONE = "forward done"
    """Its piece of graph, if it has one, is alive, and what it sent is held until its backward."""


class HandOff:
    """One value on its way from the node that makes it to the one node that takes it.

    Args:
        name: microbatch and maker, such as ``1.attn.L0``; by it a test loses one gradient.
        bundle_type: of the value. The first of its members, if it has any, is always there.
    """

    __slots__ = ("_received", "_roots", "_sent", "bundle_type", "has_large", "name")

    def __init__(self, name: str, bundle_type: type[Bundle] = Hidden) -> None:
        self.name = name
        self.bundle_type = bundle_type
        self._sent: Bundle = ()
        self._received: Bundle = ()
        self._roots: Sequence[Root | None] = ()
        """For each of ``_sent``; it itself, while it is held."""
        self.has_large = False
        """Whether there is something to let go of."""

    def send(self, bundle: Bundle) -> None:
        """Keep the value for its consumer, and for the backward."""
        self._sent = self._roots = bundle

    def receive(self) -> Bundle:
        """The value, cut off from the graph that made it, as new leaves."""
        sent = self._sent
        leaves: list[Tensor | None] = []
        has_large = False
        for tensor in sent:
            if tensor is None:
                leaves.append(None)
                continue
            leaf = tensor.detach()
            if tensor.requires_grad:
                leaf.requires_grad = True
            if tensor.nbytes >= MIN_BYTES:
                has_large = True
            leaves.append(leaf)
        self.has_large = has_large
        # ``_make`` of a named tuple, without the call: this runs for every hand-off.
        self._received = received = tuple.__new__(type(sent), leaves)
        if not has_large:
            return received
        # What a graph saves is a view, so that the leaf may lose its memory.
        given = [leaf if leaf is None else leaf.view_as(leaf) for leaf in leaves]
        return tuple.__new__(type(sent), given)

    def let_go(self) -> None:
        """After the consumer's forward: drop the value, unless some graph or the model has it.

        Saved by a graph it must be held here, too: the graph may be let go of while its lane still
        reads it, and memory of another lane (``plan/lifetimes.py``) with it.
        """
        if not self.has_large:
            return
        for index, (sent, leaf) in enumerate(zip(self._sent, self._received)):  # noqa: B905
            if sent is not None and leaf is not None and sent.nbytes >= MIN_BYTES:
                storage = sent.untyped_storage()
                if num_references(storage) == _OWN_REFERENCES:
                    del storage
                    self._keep_edge(index, sent)
                    leaf.data = sent.new_empty(1).expand(sent.shape)

    def _keep_edge(self, index: int, sent: Tensor) -> None:
        """Of what was sent, keep only where its gradient enters."""
        roots = list(self._roots)
        roots[index] = get_gradient_edge(sent) if sent.requires_grad else None
        self._roots = roots
        kept = list(self._sent)
        kept[index] = None
        self._sent = tuple(kept)

    @property
    def held(self) -> Bundle:
        """The value; None where it was let go of."""
        return self._sent

    def take(self) -> Bundle:
        """The value itself, which is then let go: no backward will come for it."""
        sent = self._sent
        self.clear()
        return sent

    def roots(self, roots: list[Root], grads: list[Tensor]) -> None:
        """Add what was sent, with the gradients that came back, and let go of both."""
        for root, received in zip(self._roots, self._received):  # noqa: B905 (made pairwise above)
            if root is not None and received is not None and (grad := received.grad) is not None:
                roots.append(root)
                grads.append(grad)
                # A model may keep a piece of the consumer's graph, and that the leaf.
                received.grad = None
        # ``clear``, without the call, as this runs for every hand-off.
        self._sent = self._received = self._roots = ()

    def clear(self) -> None:
        """Hold nothing."""
        self._sent = self._received = self._roots = ()


def num_references(storage: torch.UntypedStorage) -> int:
    """How many there are, those of views and of the caller included."""
    return int(torch._C._storage_Use_Count(storage._cdata))  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownArgumentType]


_OWN_REFERENCES: Final = 3
"""To a storage that only a hand-off has: of the tensor sent, of its leaf, and of the asking."""


@final
class LayerInput(HandOff):
    """What a recomputed layer starts from, and all that is kept of its first forward.

    The first forward sends it, without a graph. R reads it, and leaves the gradient here. Then the
    layer below, recomputed in turn, sends it again, with the graph that its backward starts from.
    """

    __slots__ = ()

    def send(self, bundle: Bundle) -> None:
        """Keep the value, as one whose gradient is wanted; in evaluation no R will come for it."""
        if not torch.is_grad_enabled():
            return
        (hidden,) = bundle
        assert hidden is not None, "a layer's input"
        if not hidden.requires_grad:
            bundle = Hidden(hidden.detach().requires_grad_())
        super().send(bundle)

    def let_go(self) -> None:
        """It is what the layer is recomputed from."""


@final
class LossEnd:
    """Where the last node's output goes: the loss, whose gradient is one."""

    __slots__ = ("_loss",)

    bundle_type: Final = Hidden

    def __init__(self) -> None:
        self._loss: Tensor | None = None

    def send(self, bundle: Bundle) -> None:
        """Keep the loss for its backward."""
        if torch.is_grad_enabled():  # else no backward will come for it
            self._loss = bundle[0]

    def roots(self, roots: list[Root], grads: list[Tensor]) -> None:
        """Add the loss, with its own gradient, and let go of it."""
        assert self._loss is not None, "the loss is sent before its backward"
        roots.append(self._loss)
        grads.append(torch.ones_like(self._loss))
        self.clear()

    def clear(self) -> None:
        """Hold nothing."""
        self._loss = None


Outlet = HandOff | LossEnd

_RUN_ENGINE: Final = Variable._execution_engine.run_backward  # pyright: ignore[reportPrivateUsage]
_ALL_LEAVES_ONCE: Final = (
    False,  # keep_graph
    False,  # create_graph
    (),  # inputs: all leaves
    True,  # allow_unreachable
    True,  # accumulate_grad
)


class NodeRun:
    """A node of one microbatch in flight; built once, run every step.

    Args:
        name: the word of its forward, for errors.
        function: takes the bundles of ``inlets``, returns those of ``outlets``, in order.
        inlets: what it receives.
        outlets: what it sends.
        keeps_graph: False for the first forward of what is recomputed.
    """

    __slots__ = (
        "_function",
        "_inlets",
        "_is_checked",
        "_keeps_graph",
        "_outlets",
        "_read",
        "_reads",
        "_state",
        "_used",
        "borrowed",
        "keeps_used",
        "name",
        "post_backward_hooks",
        "pre_backward_hooks",
        "pre_forward_hooks",
    )

    def __init__(
        self,
        name: str,
        function: Callable[..., Sequence[Bundle]],
        *,
        inlets: Sequence[HandOff],
        outlets: Sequence[Outlet],
        keeps_graph: bool = True,
    ) -> None:
        self.name = name
        self._function = function
        self._inlets = tuple(inlets)
        self._outlets = tuple(outlets)
        self._keeps_graph = keeps_graph
        self._is_checked = False
        self._state = NodeState.IDLE
        self._read: Sequence[object] = ()
        self._used: Sequence[object] = ()
        self._reads = False
        """Where ``keeps_used``: whether ``drop_read`` is yet to come for the last forward."""
        self.keeps_used = False
        """Whether what the node read of other lanes lives until ``drop_read`` and ``drop_used``
        (see ``plan/lifetimes.py``): where work runs after it was launched."""
        self.borrowed: Collection[int] = ()
        """The ``storage_id``s of it, from the backward on: a W node may read it, too."""
        # A node knows hooks, not who made them. They run in the node's own stream time.
        self.pre_forward_hooks: tuple[Hook, ...] = ()
        self.pre_backward_hooks: tuple[Hook, ...] = ()
        self.post_backward_hooks: tuple[Hook, ...] = ()

    @property
    def state(self) -> NodeState:
        """Where it stands."""
        return self._state

    def forward(self) -> None:
        """Run the function on detached inputs and hand the results on.

        Raises:
            RuntimeError: the last forward's backward has not run.
            ValueError: the function returned something else than bundles for its outlets. Looked
                for in the first forward: a model's parts are alike in every step.
        """
        if self._state is not NodeState.IDLE:
            raise self._out_of_order("forward", NodeState.IDLE)
        for hook in self.pre_forward_hooks:
            hook()
        # Grad mode is asked for once, not in each hand-off: this is the host's time for every node.
        if self._keeps_graph and torch.is_grad_enabled():
            sent = self._function(*[inlet.receive() for inlet in self._inlets])
            if not self._is_checked:
                self._check(sent)
            self._state = NodeState.FORWARD_DONE
            if self.keeps_used:
                self._reads = True
            else:
                for inlet in self._inlets:
                    if inlet.has_large:
                        inlet.let_go()
        else:
            received = [inlet.take() for inlet in self._inlets]
            with torch.no_grad():
                sent = self._function(*received)
            if not self._is_checked:
                self._check(sent)
            if self.keeps_used:
                self._read = received
        for outlet, bundle in zip(self._outlets, sent, strict=True):
            outlet.send(bundle)

    def backward(self) -> None:
        """Run autograd over this node's piece of graph, and let the piece go.

        Raises:
            RuntimeError: no forward has run.
        """
        if self._state is not NodeState.FORWARD_DONE:
            raise self._out_of_order("backward", NodeState.FORWARD_DONE)
        for hook in self.pre_backward_hooks:
            hook()
        roots: list[Root] = []
        grads: list[Tensor] = []
        for outlet in self._outlets:
            outlet.roots(roots, grads)
        if self.keeps_used:
            held = [tensor for inlet in self._inlets for tensor in inlet.held if tensor is not None]
            self.borrowed = frozenset(map(storage_id, (*grads, *held)))
            # Nobody has waited for the forward yet: what it read lives as long as what this reads.
            self._used = (*grads, *held) if self._reads else grads
        if roots:
            # ``torch.autograd.backward(roots, grads)`` without its checks of shapes. They cost as
            # much as the engine's own work on a small node, and compare each gradient with the
            # tensor whose leaf it was left on. ``ScheduleNode`` calls the engine in the same way.
            _RUN_ENGINE(tuple(roots), tuple(grads), *_ALL_LEAVES_ONCE)
        self._state = NodeState.IDLE
        for hook in self.post_backward_hooks:
            hook()

    def _check(self, sent: Sequence[Bundle]) -> None:
        is_sequence = isinstance(cast(object, sent), Sequence)
        if not is_sequence or len(sent) != len(self._outlets):
            got = f"{len(sent)} values" if is_sequence else name_of(sent)
            raise ValueError(
                f"{self.name} returned {got}, expected {len(self._outlets)} values: see "
                "ep_overlap.run.layer"
            )
        for bundle, outlet in zip(sent, self._outlets, strict=True):
            if (wrong := _wrong_bundle(bundle, outlet.bundle_type)) is not None:
                raise ValueError(f"{self.name} returned {wrong}: see ep_overlap.run.layer")
        self._is_checked = True

    def drop_read(self) -> None:
        """Let go of what the forward read: the lane that made it now waits for this node."""
        self._read = ()
        self._reads = False
        for inlet in self._inlets:
            inlet.let_go()

    def drop_used(self) -> None:
        """Let go of the gradients that the backward read, likewise."""
        self._used = ()

    def reset(self) -> None:
        """After a failure: hold nothing."""
        for outlet in self._outlets:
            outlet.clear()
        self._read = self._used = ()
        self._reads = False
        self._state = NodeState.IDLE

    def _out_of_order(self, call: str, expected: NodeState) -> RuntimeError:
        return RuntimeError(
            f"{call} of {self.name}: its state is {self._state.value!r}, expected "
            f"{expected.value!r}. Run each node's forward once, then its backward once"
        )


def _wrong_bundle(bundle: object, expected: type[Bundle]) -> str | None:
    """What is wrong with what a model returned, whatever its annotations say: another type, or the
    first member is absent, or a member is no tensor."""
    if not isinstance(bundle, expected):
        return f"{name_of(bundle)}, expected {expected.__name__}"
    for index, member in enumerate(bundle):
        if not isinstance(cast(object, member), Tensor) and (index == 0 or member is not None):
            return f"{name_of(member)} in its {expected.__name__}, expected a tensor"
    return None


def name_of(value: object) -> str:
    """How to call a value of a wrong type."""
    return "None" if value is None else type(value).__name__


def forget_failed_backward() -> None:
    """Let PyTorch's engine drop what was ready to run in this thread when a backward failed.

    It keeps such pieces of graph, with their tensors, until the thread's next backward.
    """
    with torch.inference_mode(False), torch.enable_grad():
        torch.ones((), requires_grad=True).clone().backward()
