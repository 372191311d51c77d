"""What a module holds in place of a released parameter: a tensor that refuses to be read.

A read of released storage would crash the process. This one raises instead, with the names.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, nn

_METADATA: Final = frozenset(
    {
        torch.Tensor.shape.__get__,
        torch.Tensor.dtype.__get__,
        torch.Tensor.device.__get__,
        torch.Tensor.requires_grad.__get__,
        torch.Tensor.grad.__get__,
        torch.Tensor.ndim.__get__,
        torch.Tensor.is_leaf.__get__,
        torch.Tensor.is_cuda.__get__,
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.__repr__,
    }
)
"""What may be asked of a released parameter: everything but its values."""


@final
class Placeholder(Tensor):
    """Shape and dtype of a parameter, without its values."""

    parameter_name: str
    unit_name: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[arg-type]
        released = next((a for a in args if isinstance(a, Placeholder)), None)
        name = "a parameter" if released is None else released.parameter_name
        unit = "its unit" if released is None else f"unit {released.unit_name}"
        raise RuntimeError(
            f"{name} is read while {unit} is released; expected {unit} to be gathered first. "
            "Call the module itself rather than its forward(), or add the unit's UNSHARD to the "
            "plan ahead of this use"
        )


def placeholder_for(param: nn.Parameter, *, name: str, unit: str) -> nn.Parameter:
    """A placeholder of ``param``'s shape and dtype. Holds no memory."""
    meta = torch.empty_like(param, device="meta", requires_grad=False)
    held = torch.Tensor._make_subclass(Placeholder, meta, param.requires_grad)
    held.parameter_name = name
    held.unit_name = unit
    # nn.Module accepts any tensor in ``_parameters``; Parameter is what annotations ask for.
    return held  # type: ignore[return-value]
