"""Construction on ``meta``: a unit gets its memory when it is sharded, and not before.

::

    with torch.device("meta"):
        model = Model()                         # no memory
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)           # one layer whole, then its shard
    fully_shard(model, mesh=mesh)

As FSDP1's ``param_init_fn``. Tied parameters stay tied, and so do a unit's tied buffers.
"""

from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from fsdp_hooks.placeholder import Placeholder

InitFn = Callable[[nn.Module], None]
"""Fills a module's own parameters and buffers, not those of its children."""


@runtime_checkable
class Resettable(Protocol):
    """A module that can fill its own parameters, as those of ``torch.nn`` that have some do."""

    def reset_parameters(self) -> None:
        """Draw the initial values."""
        ...


def reset_parameters(module: nn.Module) -> None:
    """The default: the module's own ``reset_parameters()``.

    Raises:
        ValueError: it has none.
    """
    if not isinstance(module, Resettable):
        raise ValueError(
            f"{type(module).__name__} is on meta and has no reset_parameters(); expected one, or "
            "init_fn of fully_shard to fill its own parameters and buffers"
        )
    module.reset_parameters()


@torch.no_grad()
def materialize(modules: Iterable[nn.Module], device: str, init_fn: InitFn) -> None:
    """Give memory to what is on ``meta``, and values to the modules that hold it.

    Args:
        modules: of one unit.
        device: where their memory is to be.
        init_fn: called once for each module that held something on ``meta``.

    Raises:
        ValueError: a module cannot fill itself.
    """
    made: dict[Tensor, Tensor] = {}
    for module in modules:
        params = module.named_parameters(recurse=False, remove_duplicate=False)
        buffers = module.named_buffers(recurse=False, remove_duplicate=False)
        on_meta = [(name, tensor) for name, tensor in (*params, *buffers) if _is_meta(tensor)]
        for name, tensor in on_meta:
            if tensor not in made:
                made[tensor] = _with_memory(tensor, device)
            setattr(module, name, made[tensor])
        if on_meta:
            init_fn(module)


def _is_meta(tensor: Tensor) -> bool:
    """A relinquished parameter, which no unit may take, answers no such question."""
    return not isinstance(tensor, Placeholder) and tensor.is_meta


def _with_memory(tensor: Tensor, device: str) -> Tensor:
    memory: Tensor = torch.empty_like(tensor, device=device)
    if not isinstance(tensor, nn.Parameter):
        return memory
    made = nn.Parameter(memory, requires_grad=tensor.requires_grad)
    vars(made).update(vars(tensor))  # frameworks mark parameters
    return made
