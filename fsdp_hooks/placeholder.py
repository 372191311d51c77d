"""Tensors that refuse to be read, where a read would give freed or outdated memory.

A read of released storage would crash the process. These raise instead, with the names.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, final, override

import torch
from torch import Tensor, nn


def _getter(name: str) -> object:
    """What a torch function is called with when this property of a tensor is read."""
    return vars(torch._C.TensorBase)[name].__get__  # pyright: ignore[reportPrivateUsage]


_DEVICE: Final = _getter("device")
_IS_CUDA: Final = _getter("is_cuda")
_GRAD: Final = _getter("grad")
_METADATA: Final = frozenset(
    {
        _GRAD,
        _getter("shape"),
        _getter("dtype"),
        _getter("requires_grad"),
        _getter("ndim"),
        _getter("is_leaf"),
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.nelement,
        torch.Tensor.element_size,
        torch.Tensor.is_floating_point,
    }
)
"""What may be asked of a placeholder: everything but its values."""


class Placeholder(Tensor):
    """What a module holds in place of a released parameter: shape and dtype without values."""

    parameter_name: str
    unit_name: str
    true_device: torch.device
    """Where the parameter is when it is gathered. (A placeholder is on ``meta``.)"""
    readable: ClassVar = _METADATA

    def refusal(self) -> str:
        """Why it cannot be read, and what to do."""
        return (
            f"{self.parameter_name} is read while unit {self.unit_name} is released; expected the "
            "unit to be gathered first. Call the module itself rather than its forward(), or add "
            "the unit's UNSHARD to the plan ahead of this use"
        )

    @override
    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"{type(self).__name__}({self.parameter_name} of unit {self.unit_name})"

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        held = next(_placeholders((args, tuple((kwargs or {}).values()))))
        if func == _DEVICE:
            return held.true_device
        if func == _IS_CUDA:
            return held.true_device.type == "cuda"
        if func in held.readable:
            with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
                return func(*args, **(kwargs or {}))
        raise RuntimeError(held.refusal())


@final
class Relinquished(Placeholder):
    """What becomes of the parameter that a module had before it was sharded. Whoever still holds
    it is told so: an optimizer that was built too early, a module that shares the weight.

    Its gradient cannot be read either: an optimizer skips a parameter whose gradient is None, so
    ``step`` and ``zero_grad`` would do nothing, and say nothing.
    """

    readable: ClassVar = _METADATA - {_GRAD}

    @override
    def refusal(self) -> str:
        return (
            f"{self.parameter_name} was sharded with unit {self.unit_name}, and this is the "
            "parameter from before; expected the module's own. Build optimizers after "
            "fully_shard, and share parameters within one unit only"
        )


def placeholder_for(param: nn.Parameter, *, name: str, unit: str) -> nn.Parameter:
    """A placeholder of ``param``'s shape and dtype. Holds no memory."""
    meta = torch.empty_like(param, device="meta", requires_grad=False)
    held = torch.Tensor._make_subclass(Placeholder, meta, param.requires_grad)
    _label(held, name=name, unit=unit, device=param.device)
    # nn.Module accepts any tensor in ``_parameters``; Parameter is what annotations ask for.
    return held  # pyright: ignore[reportReturnType]


def relinquish(param: nn.Parameter, *, name: str, unit: str) -> None:
    """Turn a parameter that has been sharded into ``Relinquished``, and free its memory."""
    device = param.device
    param.grad = None
    param.data = torch.empty(0, dtype=param.dtype, device=device)
    # As ``nn.UninitializedParameter`` does: whoever holds the object must see the change.
    param.__class__ = Relinquished  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(param, Relinquished)
    _label(param, name=name, unit=unit, device=device)


def _label(held: Placeholder, *, name: str, unit: str, device: torch.device) -> None:
    held.parameter_name = name
    held.unit_name = unit
    held.true_device = device


def _placeholders(values: Iterable[Any]) -> Iterator[Placeholder]:
    """The placeholders in nested tuples and lists, as arguments of a torch function."""
    for value in values:
        if isinstance(value, Placeholder):
            yield value
        elif isinstance(value, tuple | list):
            yield from _placeholders(value)
