"""Construction on ``meta``: a unit gets its memory when it is sharded, and not before.

::

    with torch.device("meta"):
        model = Model()                         # no memory
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)           # one layer whole, then its shard
    fully_shard(model, mesh=mesh)

As FSDP1's ``param_init_fn``. Tied parameters stay tied.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

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
def materialize(
    modules: Sequence[tuple[str, nn.Module]],
    mesh_of: Callable[[str, nn.Parameter], DeviceMesh],
    init_fn: InitFn,
) -> None:
    """Give memory to what is on ``meta``, and values to the modules that hold it.

    Args:
        modules: ``(prefix of its parameters' names, module)``, of one unit.
        mesh_of: a parameter's mesh; all go to the device of the first one's.
        init_fn: called once for each module that held something on ``meta``.

    Raises:
        ValueError: a module cannot fill itself.
    """
    named = ((f"{prefix}{n}", p) for prefix, m in modules for n, p in m.named_parameters("", False))
    if (first := next(named, None)) is None:
        return
    device = mesh_of(*first).device_type
    made: dict[nn.Parameter, nn.Parameter] = {}
    for _, module in modules:
        params = [(n, p) for n, p in module.named_parameters(recurse=False) if _is_meta(p)]
        buffers = [(n, b) for n, b in module.named_buffers(recurse=False) if b.is_meta]
        for name, param in params:
            if param not in made:
                made[param] = _with_memory(param, device)
            setattr(module, name, made[param])
        for name, buffer in buffers:
            setattr(module, name, torch.empty_like(buffer, device=device))
        if params or buffers:
            init_fn(module)


def _is_meta(param: nn.Parameter) -> bool:
    """A relinquished parameter, which no unit may take, answers no such question."""
    return not isinstance(param, Placeholder) and param.is_meta


def _with_memory(param: nn.Parameter, device: str) -> nn.Parameter:
    memory: Tensor = torch.empty_like(param, device=device)
    made = nn.Parameter(memory, requires_grad=param.requires_grad)
    vars(made).update(vars(param))  # frameworks mark parameters
    return made
