"""Transformer Engine's linear layers, with weight gradients that can be delayed and fused.

Its layers make weight gradients by kernels of their own. While ``delay_wgrad_compute()`` of a
layer's ``wgrad_store`` says so, their backward leaves it what the product needs, and the product::

    backward of a layer    store.put([x, dY], product)
    plain, delayed         dW = product(x, dY)            bit for bit what its backward makes
    fused                  g^T x written, or added, where the sink says

The store is replaced by one that asks ``Wgrad``. So ``main_grad``, ``grad_added_to_main_grad`` and
``is_first_microbatch``, by which Transformer Engine itself fuses, play no part: whether a gradient
overwrites or is added is the sink's word alone. Without any of it a layer runs as it always did.

Import needs Transformer Engine; ``manage_wgrad`` imports it when it meets such a layer.
"""

# Transformer Engine is untyped, and the backward that runs is told by a private name of torch.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportPrivateUsage=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from collections.abc import Callable, Sequence
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, Final, NamedTuple, NoReturn, cast, override

import torch
import transformer_engine.pytorch as te
from torch import Tensor, nn

from fsdp_hooks.wgrad import ManagedLayer, Wgrad, leaf_of, write_product

MIN_VERSION: Final = (2, 10)

Product = Callable[..., tuple[Any, ...]]
"""Transformer Engine's: ``product(x, dY) -> (dW, db, ...)``; of a grouped layer
``product(xs, dYs, outs) -> (outs, dbs, ...)``."""


class _Made(NamedTuple):
    """A weight gradient of one matrix product that is yet to be made."""

    wgrad: Wgrad
    weights: Sequence[nn.Parameter]
    """Each ``[out_i, in]``: the rows of one matrix."""
    biases: Sequence[nn.Parameter]
    """Each ``[out_i]``, whose gradient the product makes, too; none if the backward made it."""
    activation: Tensor
    """``[T, in]``"""
    grad_output: Tensor
    """``[T, sum of out_i]``"""
    product: Product

    @property
    def operands(self) -> Sequence[Tensor]:
        """See ``Pending``."""
        return self.activation, self.grad_output

    def make(self) -> None:
        """Make it and bring it to the sink."""
        sizes = [len(weight) for weight in self.weights]
        sink = self.wgrad.sink
        if self.wgrad.is_fused:
            parts = self.grad_output.split(sizes, dim=-1)
            for weight, part in zip(self.weights, parts, strict=True):
                into, is_fresh = sink.destination(weight)
                write_product(into, part, self.activation, overwrite=is_fresh)
            bias_grad = self.grad_output.sum(0) if self.biases else None
        else:
            made, bias_grad, *_ = self.product(self.activation, self.grad_output)
            for weight, part in zip(self.weights, made.split(sizes), strict=True):
                sink.add(weight, part)
        # Where its backward makes the bias's gradient, the product gives an empty one, or none.
        if bias_grad is not None and bias_grad.numel() > 0:
            for bias, part in zip(self.biases, bias_grad.split(sizes), strict=True):
                sink.add(bias, part)


class _MadeGrouped(NamedTuple):
    """The weight gradients of all experts, in one grouped product."""

    wgrad: Wgrad
    weights: Sequence[nn.Parameter]
    """E, each ``[out, in]``"""
    biases: Sequence[nn.Parameter]
    """E, each ``[out]``; or none."""
    activations: list[Tensor]
    """E, each ``[T_e, in]``"""
    grad_outputs: list[Tensor]
    """E, each ``[T_e, out]``"""
    product: Product

    @property
    def operands(self) -> Sequence[Tensor]:
        """See ``Pending``."""
        return *self.activations, *self.grad_outputs

    def make(self) -> None:
        """Make them and bring them to the sink."""
        sink = self.wgrad.sink
        if self.wgrad.is_fused:
            found = [sink.destination(weight) for weight in self.weights]
            adds = not all(is_fresh for _, is_fresh in found)
            if adds:
                for into, is_fresh in found:
                    if is_fresh:
                        into.zero_()
            outs = [into for into, _ in found]
        else:
            adds = False
            first = self.weights[0]
            dtype = self.grad_outputs[0].dtype
            outs = list(first.new_empty(len(self.weights), *first.shape, dtype=dtype).unbind())
        _, bias_grads, *_ = self.product(self.activations, self.grad_outputs, outs, accumulate=adds)
        if not self.wgrad.is_fused:
            for weight, made in zip(self.weights, outs, strict=True):
                sink.add(weight, made)
        # Not strict: without biases the product gives an empty gradient for each expert.
        for bias, made in zip(self.biases, bias_grads, strict=False):
            sink.add(bias, made)


class WgradStore:
    """Takes the place of Transformer Engine's own store of that name in a layer."""

    __slots__ = ("_layer",)

    def __init__(self, layer: ManagedLayer) -> None:
        self._layer = layer

    def delay_wgrad_compute(self) -> bool:
        """Asked in the forward, which then keeps the store for the backward, and again there."""
        wgrad = self._layer.wgrad
        is_backward = torch._C._current_graph_task_id() != _NO_BACKWARD
        return wgrad is not None and (not is_backward or wgrad.takes_gradients)

    def put(self, operands: Sequence[Any], product: Product) -> None:
        """Backward: what a weight gradient is made of. See the module's docstring.

        Raises:
            RuntimeError: the operands are quantized (FP8), or of the grouped-tensor path.
        """
        layer, wgrad = self._layer, self._layer.wgrad
        assert wgrad is not None, "delay_wgrad_compute() said so"
        if isinstance(layer, ManagedGroupedLinear):
            made = self._grouped(layer, wgrad, operands, product)
        else:
            activation, grad_output = operands[:2]
            self._refuse_quantized(activation, grad_output)
            activation = activation.reshape(-1, activation.shape[-1])
            grad_output = grad_output.reshape(-1, grad_output.shape[-1])
            weights, biases = self._params(layer, activation, grad_output)
            made = _Made(wgrad, weights, biases, activation, grad_output, product)
        wgrad.take(layer, made, leaf_of(made.weights[0]))

    @property
    def context(self) -> NoReturn:
        """Refused; see ``pop``."""
        self._refuse_flush()

    def pop(self) -> NoReturn:
        """Refused: it is what a layer's ``backward_dw`` calls.

        Raises:
            RuntimeError: always.
        """
        self._refuse_flush()

    def _refuse_flush(self) -> NoReturn:
        raise RuntimeError(
            f"backward_dw() of {type(self._layer).__name__}, whose weight gradients manage_wgrad "
            "manages; expected a flush of its queue: delayed.flush(), or the schedule's W actions"
        )

    def _params(
        self, layer: ManagedLayer, activation: Tensor, grad_output: Tensor
    ) -> tuple[Sequence[nn.Parameter], Sequence[nn.Parameter]]:
        """The weights, and the biases, that the product of these is for. ``activation``:
        ``[T, in]``; ``grad_output``: ``[T, out]``."""
        te_layer = cast(Any, layer)
        if isinstance(layer, ManagedLayerNormMLP):
            shape = (grad_output.shape[-1], activation.shape[-1])
            is_first = tuple(te_layer.fc1_weight.shape) == shape
            weight = te_layer.fc1_weight if is_first else te_layer.fc2_weight
            bias = te_layer.fc1_bias if is_first else te_layer.fc2_bias
            return [weight], [bias] if te_layer.use_bias else []
        weights = [getattr(te_layer, name) for name in te_layer.weight_names]
        # Where the layer leaves the bias to its caller, or adds it after the product, autograd
        # makes its gradient.
        has_bias = te_layer.use_bias and te_layer.apply_bias and not te_layer.gemm_bias_unfused_add
        return weights, [getattr(te_layer, name) for name in te_layer.bias_names if has_bias]

    def _grouped(
        self, layer: "ManagedGroupedLinear", wgrad: Wgrad, operands: Sequence[Any], product: Product
    ) -> _MadeGrouped:
        activations, grad_outputs = operands[:2]
        if not isinstance(activations, (list, tuple)):
            raise RuntimeError(
                f"{type(layer).__name__} took its grouped-tensor path; expected lists of tensors. "
                "Build it with use_grouped_tensor=False"
            )
        self._refuse_quantized(*activations, *grad_outputs)
        te_layer = cast(Any, layer)
        experts = range(te_layer.num_gemms)
        has_bias = te_layer.use_bias and te_layer.apply_bias
        return _MadeGrouped(
            wgrad,
            [getattr(te_layer, f"weight{e}") for e in experts],
            [getattr(te_layer, f"bias{e}") for e in experts if has_bias],
            list(activations),
            list(grad_outputs),
            product,
        )

    def _refuse_quantized(self, *operands: object) -> None:
        for operand in operands:
            if type(operand) not in (Tensor, nn.Parameter):
                raise RuntimeError(
                    f"{type(self._layer).__name__} works on a {type(operand).__name__}; expected "
                    "plain tensors where weight gradients are delayed or fused: leave FP8 and FP4 "
                    "out, or both of these"
                )


_NO_BACKWARD: Final = -1


class _Managed(ManagedLayer):
    """What they share. A property of the class comes before what the layer holds by that name."""

    @property
    def wgrad_store(self) -> WgradStore:
        """Where its backward leaves what weight gradients are made of."""
        return WgradStore(self)


class ManagedLinear(_Managed, te.Linear):
    """``te.Linear``; megatron-core's ``TELinear`` and those derived from it."""


class ManagedLayerNormLinear(_Managed, te.LayerNormLinear):
    """``te.LayerNormLinear``; megatron-core's ``TELayerNormColumnParallelLinear``."""


class ManagedLayerNormMLP(_Managed, te.LayerNormMLP):
    """``te.LayerNormMLP``."""


class ManagedGroupedLinear(_Managed, te.GroupedLinear):
    """``te.GroupedLinear``; megatron-core's ``TEGroupedLinear`` and those derived from it."""

    def _get_weight_tensors(self) -> list[Tensor]:
        weights = cast("list[Tensor]", super()._get_weight_tensors())
        if self.wgrad is None or not torch.is_grad_enabled():
            return weights
        return list(cast("tuple[Tensor, ...]", _Gate.apply(self.wgrad, *weights)))


class _Gate(torch.autograd.Function):
    """Lets the gradients of weights through unless the store has taken what they are made of.

    Transformer Engine's grouped backward then returns memory that nothing was written to.
    """

    @staticmethod
    @override
    def forward(ctx: Any, wgrad: Wgrad, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.wgrad = wgrad
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.wgrad.takes_gradients:
            return (None, *(None for _ in grads))
        return (None, *grads)


TRANSFORMER_ENGINE_LAYERS: Final = MappingProxyType[type[nn.Module], type[ManagedLayer]](
    {
        te.LayerNormLinear: ManagedLayerNormLinear,
        te.LayerNormMLP: ManagedLayerNormMLP,
        te.GroupedLinear: ManagedGroupedLinear,
        te.Linear: ManagedLinear,
    }
)


def refuse_unfit(layer: nn.Module, name: str, *, is_fused: bool) -> None:
    """Name what of a Transformer Engine layer rules delayed and fused weight gradients out.

    Args:
        layer: one with weight matrices.
        name: its own, in the model.
        is_fused: whether gradients are to be written straight where they go.

    Raises:
        ValueError: Transformer Engine is older than ``MIN_VERSION``; the layer is of another kind
            (its op fuser's among them), was built to fuse by itself or for grouped tensors; or it
            is a ``LayerNormMLP`` with two weights of one shape or, fused, with biases.
    """
    kind, te_layer = type(layer).__name__, cast(Any, layer)
    installed = version("transformer_engine")
    if tuple(int(part) for part in installed.split(".")[:2]) < MIN_VERSION:
        raise ValueError(
            f"{name} is Transformer Engine {installed}'s {kind}; expected "
            f"{'.'.join(map(str, MIN_VERSION))} or newer where weight gradients are delayed or "
            "fused. Update it, or leave both out"
        )
    if not isinstance(layer, tuple(TRANSFORMER_ENGINE_LAYERS)):
        known = ", ".join(each.__name__ for each in TRANSFORMER_ENGINE_LAYERS)
        raise ValueError(
            f"{name} is Transformer Engine's {kind}, whose weight gradients can be neither delayed "
            f"nor fused; expected one of {known}. Build the model without its op fuser "
            "(use_transformer_engine_op_fuser), or leave both out"
        )
    if te_layer.fuse_wgrad_accumulation:
        raise ValueError(
            f"{name} was built with fuse_wgrad_accumulation=True, so it would write to main_grad; "
            "expected False. Build the model with gradient_accumulation_fusion=False and let "
            "manage_wgrad(fuse=True) do it"
        )
    # The oldest releases have no such path, and no attribute that says so.
    if isinstance(layer, te.GroupedLinear) and getattr(te_layer, "use_grouped_tensor", False):
        raise ValueError(
            f"{name} was built with use_grouped_tensor=True; expected False where weight gradients "
            "are delayed or fused"
        )
    if isinstance(layer, te.LayerNormMLP):
        if te_layer.fc1_weight.shape == te_layer.fc2_weight.shape:
            raise ValueError(
                f"{name} has two weights of shape {tuple(te_layer.fc1_weight.shape)}, whose "
                "gradients could not be told apart; expected a ffn_hidden_size other than "
                "hidden_size, or te.LayerNormLinear and te.Linear"
            )
        if is_fused and te_layer.use_bias:
            raise ValueError(
                f"{name} has biases, whose gradients a te.LayerNormMLP makes now in its backward, "
                "now with the weights'; expected bias=False where weight gradients are fused"
            )
