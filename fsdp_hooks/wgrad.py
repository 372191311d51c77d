"""Weight gradients: made at once or later, in a tensor of their own or straight where they go.

::

    backward of a layer    dX = g W          at once, autograd passes it on
                           (g, x)            at once -> dW = g^T x,  or kept in a queue
    flush of the queue                       dW = g^T x, in the order in which they came

    dW                     plain: a new tensor, given to the sink (at once: to autograd)
                           fused: written into, or added to, the tensor that the sink names

Between backward and flush a queue holds the layer's activation and output gradient, nothing else:
no graph, and not the weight's values, which may be released meanwhile.

Delayed weight gradients are those of zero bubble pipelines (arXiv 2401.10241) and of Transformer
Engine's ``WeightGradStore``; fused ones those of Megatron-LM's ``gradient_accumulation_fusion``.
Both need kernels or modules of their own there.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple, NoReturn, Protocol, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node
from torch.nn import functional as F


class Destination(NamedTuple):
    """Where a fused weight gradient goes."""

    tensor: Tensor
    """``[*weight.shape]``, contiguous; its dtype may be another than the weight's."""
    is_fresh: bool
    """Whether its content is undefined: the gradient overwrites, else it is added."""


class GradSink(Protocol):
    """The door for every weight gradient that autograd does not carry."""

    def add(self, weight: nn.Parameter, grad: Tensor) -> None:
        """Take a gradient, and the ownership of its memory. ``grad``: ``[*weight.shape]``."""
        ...

    def destination(self, weight: nn.Parameter) -> Destination:
        """Where to write or add the next gradient. The caller fills it before it asks again."""
        ...


@final
class AutogradSink:
    """Gradients go where autograd leaves them, in ``.grad``; hooks of the parameter do not run."""

    def add(self, weight: nn.Parameter, grad: Tensor) -> None:
        """As autograd: the first one becomes ``.grad``, later ones are added."""
        if weight.grad is None:
            weight.grad = grad.to(weight.dtype)
        else:
            weight.grad.add_(grad)

    def destination(self, weight: nn.Parameter) -> Destination:
        """``.grad`` itself."""
        if weight.grad is not None:
            return Destination(weight.grad, is_fresh=False)
        weight.grad = grad = torch.empty_like(weight, memory_format=torch.contiguous_format)
        return Destination(grad, is_fresh=True)


class Pending(Protocol):
    """A weight gradient that is yet to be made."""

    @property
    def operands(self) -> Sequence[Tensor]:
        """The activations and output gradients that it is made of."""
        ...

    @property
    def weights(self) -> Sequence[nn.Parameter]:
        """Whose it is."""
        ...

    def make(self) -> None:
        """Make it and bring it to its sink."""
        ...


@final
class WgradQueue:
    """Weight gradients that wait, first in, first out: a node's of one microbatch, or a user's.

    Args:
        aside: layers whose gradients go to another queue, which is flushed on its own.
    """

    __slots__ = ("_aside", "_used", "_waiting")

    def __init__(self, aside: Mapping[nn.Module, "WgradQueue"] | None = None) -> None:
        self._aside = aside
        self._waiting: deque[Pending] = deque()
        self._used: list[Pending] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, layer: nn.Module, pending: Pending) -> None:
        """Append what ``layer`` left to be made."""
        queue = self if self._aside is None else self._aside.get(layer, self)
        queue._waiting.append(pending)

    def flush(self, borrowed: Collection[int] = ()) -> None:
        """Make all that waits. Nothing waits for a layer that did not run, a frozen one, or after
        another flush: then nothing happens.

        Args:
            borrowed: ``storage_id``s of memory that is another stream's, where work runs after its
                launch: what is read of it lives until ``drop_used``, for that stream must wait
                before the memory is given back.
        """
        waiting = self._waiting
        with torch.no_grad():
            while waiting:
                pending = waiting.popleft()
                pending.make()
                if borrowed and any(storage_id(each) in borrowed for each in pending.operands):
                    self._used.append(pending)

    def drop_used(self) -> None:
        """Let go of what the last flush read of another stream's memory."""
        self._used.clear()

    def clear(self) -> None:
        """After a failure: hold nothing."""
        self._waiting.clear()
        self._used.clear()


def storage_id(tensor: Tensor) -> int:
    """Of the memory that a tensor looks at; it lives as long as some tensor does."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


@final
class Wgrad:
    """When and where the weight gradients of a module's layers are made.

    Args:
        sink: takes them.
        is_fused: whether they are written straight where they go.
    """

    __slots__ = ("is_fused", "queue", "sink")

    def __init__(self, sink: GradSink, *, is_fused: bool) -> None:
        self.sink = sink
        self.is_fused = is_fused
        self.queue: WgradQueue | None = None
        """In stream time: what takes the gradients of the backward that runs; None: they are made
        at once."""

    def __reduce__(self) -> tuple[Callable[[GradSink, bool], "Wgrad"], tuple[GradSink, bool]]:
        """A copy of a model, or one from a file, delays nothing: nobody would flush it."""
        return _not_delayed, (self.sink, self.is_fused)

    def delay_into(self, queue: WgradQueue | None) -> None:
        """In stream time: what the backwards from here on leave goes to ``queue``."""
        self.queue = queue

    @property
    def takes_gradients(self) -> bool:
        """In stream time: whether gradients go by the sink; else autograd carries them."""
        return self.queue is not None or self.is_fused

    def take(self, layer: nn.Module, pending: Pending, leaf: Node) -> None:
        """Backward, where autograd is not to carry it: make the gradient or queue it.

        ``leaf``: the weight's, which the backward may not be asked to reach.

        Raises:
            RuntimeError: the weight has hooks, which would see no gradient.
        """
        if _is_asked_for(leaf):
            if type(self.sink) is AutogradSink:
                for weight in pending.weights:
                    _refuse_hooks(weight)
            if self.queue is not None:
                self.queue.put(layer, pending)
            else:
                pending.make()


def _not_delayed(sink: GradSink, is_fused: bool) -> Wgrad:
    return Wgrad(sink, is_fused=is_fused)


def leaf_of(weight: nn.Parameter) -> Node:
    """The end of the graph where the weight's gradient arrives."""
    return torch.autograd.graph.get_gradient_edge(weight).node


def _is_asked_for(leaf: Node) -> bool:
    """Whether the backward that runs is to end in this weight's ``.grad``. Not where
    ``backward(inputs=...)`` or ``torch.autograd.grad`` ask for others'.

    Raises:
        RuntimeError: ``torch.autograd.grad`` asks for this one's.
    """
    try:
        return torch._C._will_engine_execute_node(leaf)  # pyright: ignore[reportPrivateUsage]
    except RuntimeError as error:
        raise RuntimeError(
            "torch.autograd.grad() asks for a weight's gradient that is delayed, or fused, so "
            "autograd does not carry it; call backward(), which leaves it in .grad"
        ) from error


def _refuse_hooks(weight: nn.Parameter) -> None:
    # Autograd calls them with None, or before there is a gradient.
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:  # pyright: ignore[reportPrivateUsage]
        raise RuntimeError(
            f"a weight of shape {tuple(weight.shape)} has a hook, and autograd, which would call "
            "it, does not carry its delayed or fused gradient; remove the hook (register_hook, "
            "register_post_accumulate_grad_hook) and do its work after the flush"
        )


class ManagedLayer(nn.Module):
    """A layer whose weight gradients a ``Wgrad`` manages. ``isinstance`` tells; nothing is probed.

    A module of one's own derives from it and calls ``managed_linear`` in its forward.
    """

    wgrad: Wgrad | None = None
    """Given by ``manage_wgrad``; None: nobody manages it."""

    @property
    def fuses_wgrad(self) -> bool:
        """Whether its weight's gradients are written straight where they go, use by use."""
        return self.wgrad is not None and self.wgrad.is_fused


class Contribution(NamedTuple):
    """One use of one weight, as its gradient needs it. Of the weight only the identity counts."""

    layer: ManagedLayer
    wgrad: Wgrad
    """The layer's."""
    weight: nn.Parameter
    activation: Tensor
    """``[T, in]``, or ``[E, T, in]`` with a weight for each of E experts."""
    grad_output: Tensor
    """``[T, out]``, or ``[E, T, out]``."""
    num_rows: Sequence[int] | None
    """``[E]``, where E experts share the rows of ``[T, ...]``: how many each has."""
    versions: tuple[int, int]
    """Of ``activation`` and ``grad_output``, counted up by every write to their memory."""

    @property
    def operands(self) -> Sequence[Tensor]:
        """See ``Pending``."""
        return self.activation, self.grad_output

    @property
    def weights(self) -> Sequence[nn.Parameter]:
        """See ``Pending``."""
        return (self.weight,)

    def make(self) -> None:
        """Make the gradient and bring it to the sink.

        Raises:
            RuntimeError: what it is made of was written to since the backward.
        """
        if self.versions != (self.activation._version, self.grad_output._version):
            self._refuse_overwritten()
        sink = self.wgrad.sink
        if self.wgrad.is_fused:
            tensor, is_fresh = sink.destination(self.weight)
            try:
                self._write(tensor, overwrite=is_fresh)
            except BaseException:  # out of memory: what the memory held is no gradient
                if is_fresh:
                    tensor.zero_()
                raise
        else:
            sink.add(self.weight, self.product())

    def _refuse_overwritten(self) -> NoReturn:
        activation, grad = self.activation._version, self.grad_output._version
        raise RuntimeError(
            f"a delayed weight gradient of shape {tuple(self.weight.shape)} is to be made of an "
            "activation and an output gradient that were written to since the backward: versions "
            f"{activation} and {grad}, expected {self.versions[0]} and {self.versions[1]}. Flush "
            "before memory is used again: an input buffer, or the .grad of a parameter to which "
            "autograd gave the gradient's memory (one that is added by a view; add a clone of it)"
        )

    def product(self) -> Tensor:
        """``g^T x`` in a tensor of its own, in the operands' dtype: as autograd makes it."""
        made = self.grad_output.new_empty(self.weight.shape)
        self._write(made, overwrite=True)
        return made

    def _write(self, into: Tensor, *, overwrite: bool) -> None:
        if self.num_rows is None:
            write_product(into, self.grad_output, self.activation, overwrite=overwrite)
            return
        grads, rows = self.grad_output.split(self.num_rows), self.activation.split(self.num_rows)
        for expert, (grad, some_rows) in enumerate(zip(grads, rows, strict=True)):
            write_product(into[expert], grad, some_rows, overwrite=overwrite)


def write_product(into: Tensor, grad: Tensor, rows: Tensor, *, overwrite: bool) -> None:
    """``into = grad^T rows``, or ``into += grad^T rows``; sums are formed in the wider dtype.

    Args:
        into: ``[out, in]``, or ``[E, out, in]``.
        grad: ``[T, out]``, or ``[E, T, out]``.
        rows: ``[T, in]``, or ``[E, T, in]``.
        overwrite: whether what ``into`` holds is undefined.
    """
    multiply, add = (torch.mm, torch.addmm) if into.dim() == 2 else (torch.bmm, torch.baddbmm)
    kwargs: dict[str, Any] = {}
    if into.dtype is not grad.dtype:
        if torch.promote_types(into.dtype, grad.dtype) is not into.dtype:
            made = multiply(grad.mT, rows)  # narrow operands would be rounded before the product
            into.copy_(made) if overwrite else into.add_(made)
            return
        if into.is_cuda and into.dtype is torch.float32:
            kwargs = {"out_dtype": into.dtype}  # one GEMM that reads the narrow operands
        else:
            grad, rows = grad.to(into.dtype), rows.to(into.dtype)
    if overwrite:
        multiply(grad.mT, rows, out=into, **kwargs)
    else:
        add(into, grad.mT, rows, out=into, **kwargs)


def managed_linear(
    layer: ManagedLayer,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    num_rows: Sequence[int] | None = None,
) -> Tensor:
    """``rows W^T + bias`` whose weight gradient ``layer.wgrad`` manages.

    Where there is nothing to manage (nobody manages the layer, no gradients are wanted, the weight
    is frozen or computed from others, complex, or on ``meta``; a transform of ``torch.func`` runs)
    it is the plain operation.

    Args:
        rows: ``[..., in]``; with a weight for each expert ``[E, T, in]``, or ``[T, in]`` together
            with ``num_rows``.
        weight: ``[out, in]``, or ``[E, out, in]``.
        bias: ``[out]``; only for a single weight.
        num_rows: ``[E]``: how many rows each expert has, in the order of experts.

    Returns:
        ``[..., out]``, bit for bit what ``torch.nn.functional.linear`` returns (or ``bmm``, or
        ``mm`` expert by expert).

    Raises:
        ValueError: a bias with a weight for each expert.
    """
    if bias is not None and weight.dim() != _MATRIX:
        raise ValueError(
            f"a bias with a weight of shape {tuple(weight.shape)}; expected one matrix. Add the "
            "bias outside"
        )
    is_managed = layer.wgrad is not None and type(weight) is nn.Parameter and weight.requires_grad
    is_plain = weight.is_meta or weight.is_complex() or _is_transformed()
    if is_plain or not (is_managed and torch.is_grad_enabled()):
        return _forward(rows, weight, bias, num_rows)
    if torch.is_autocast_enabled(rows.device.type) and rows.dtype is not torch.float64:
        rows = rows.to(torch.get_autocast_dtype(rows.device.type))
    num_rows = None if num_rows is None else tuple(num_rows)  # a list may be filled anew before W
    return _Linear.apply(rows, weight, bias, (layer, layer.wgrad), num_rows)  # type: ignore[no-any-return]


def _is_transformed() -> bool:
    """Whether ``vmap``, ``grad`` or another transform of ``torch.func`` runs: they take no function
    with a ``ctx``, and their gradients are values that they return."""
    return torch._C._are_functorch_transforms_active()  # pyright: ignore[reportPrivateUsage]


_MATRIX: Final = 2


def _forward(
    rows: Tensor, weight: Tensor, bias: Tensor | None, num_rows: Sequence[int] | None
) -> Tensor:
    if weight.dim() == _MATRIX:
        return F.linear(rows, weight, bias)
    if num_rows is None:
        return torch.bmm(rows, weight.mT)
    some_rows = rows.split(num_rows)
    return torch.cat([torch.mm(r, w.t()) for r, w in zip(some_rows, weight, strict=True)])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: nn.Parameter,
        bias: Tensor | None,
        managed: tuple[ManagedLayer, Wgrad],
        num_rows: Sequence[int] | None,
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        # The parameter itself: a saved tensor may come back as another object.
        ctx.weight, ctx.managed, ctx.num_rows = weight, managed, num_rows
        out = _forward(rows, weight, bias, num_rows)
        # Autograd refuses in-place operations on a view that was made in here; ``F.linear`` makes
        # one of more than two dimensions with a bias.
        return torch.ops.aten._unsafe_view(out, out.shape) if out._is_view() else out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (torch's decorator)
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        rows = rows.detach()  # else it, and what is a view of it, would keep the graph before it
        wants_rows, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        grad = grads[0]
        if weight.dim() == _MATRIX:
            shape = rows.shape
            rows, grad = rows.reshape(-1, shape[-1]), grad.reshape(-1, grad.shape[-1])
        else:
            shape = None
        weight_values = weight if weight.dtype is grad.dtype else weight.to(grad.dtype)
        grad_rows = grad_weight = grad_bias = None
        if wants_rows:
            grad_rows = _grad_rows(grad, weight_values, ctx.num_rows)
            grad_rows = grad_rows if shape is None else grad_rows.view(shape)
        if wants_bias:
            grad_bias = grad.sum(0)
        if wants_weight:
            layer, wgrad = ctx.managed
            versions = (rows._version, grad._version)
            made_of = Contribution(layer, wgrad, ctx.weight, rows, grad, ctx.num_rows, versions)
            if wgrad.takes_gradients:
                wgrad.take(layer, made_of, ctx.next_functions[1][0])
            else:
                grad_weight = made_of.product()
        return grad_rows, grad_weight, grad_bias, None, None


def _grad_rows(grad: Tensor, weight: Tensor, num_rows: Sequence[int] | None) -> Tensor:
    if weight.dim() == _MATRIX:
        return torch.mm(grad, weight)
    if num_rows is None:
        return torch.bmm(grad, weight)
    some = grad.split(num_rows)
    return torch.cat([torch.mm(g, w) for g, w in zip(some, weight, strict=True)])
