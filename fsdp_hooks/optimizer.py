"""Optimizers over sharded parameters: a step runs on this rank's rows, as plain tensors.

Stepping over DTensors works in part only: torch's multi-tensor kernels refuse a list on several
meshes (dense and expert), some optimizers use operations that DTensor has no rule for (Rprop, the
fused SGD and Adagrad), and dispatch costs more than the arithmetic of a small parameter.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_hooks.placeholder import Relinquished

_NEED_WHOLE_TENSORS: Final = frozenset({"LBFGS", "Adafactor", "Muon", "SparseAdam"})

_State = dict[str, Any]
"""What an optimizer keeps for one parameter."""


def shard_optimizer[OptimizerT: Optimizer](
    optimizer: OptimizerT, *, elementwise: bool = False
) -> OptimizerT:
    """Prepare an optimizer that was built over a sharded module's parameters.

    A step then updates this rank's main weights. For its time the parameters, their gradients and
    states are the plain local tensors of the DTensors; before and after it ``param_groups`` and
    ``state`` are what torch makes of sharded parameters, so learning rate schedulers,
    ``add_param_group``, ``state_dict`` and ``load_state_dict`` work as ever, before and after
    this call. A closure runs before the exchange. A copy of the optimizer (``copy.deepcopy``)
    loses this and has to be prepared again.

    Args:
        optimizer: built after ``fully_shard``.
        elementwise: says that what the optimizer does to an element depends on that element's
            weight, gradient and state alone. All of ``torch.optim`` do, but those refused; of
            another class it cannot be seen from outside, and one that takes norms or matrix
            products of a parameter would take them of this rank's rows, and train wrong.

    Returns:
        The same optimizer.

    Raises:
        ValueError: it needs whole tensors, which a shard is not (by class name, that of a base
            class too); or it was built before ``fully_shard``.
    """
    name = type(optimizer).__name__
    if not _NEED_WHOLE_TENSORS.isdisjoint(cls.__name__ for cls in type(optimizer).__mro__):
        raise ValueError(
            f"{name} needs whole tensors; expected an elementwise optimizer of torch.optim, such "
            "as AdamW or SGD (not built yet for sharded parameters)"
        )
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if isinstance(param, Relinquished):
            raise ValueError(f"{name} was built before fully_shard. {param.refusal()}")
    if not (elementwise or _is_of_torch(type(optimizer))):
        warnings.warn(
            f"{name} is no optimizer of torch.optim; on a sharded parameter it sees this rank's "
            "rows alone. If it is elementwise, say so: shard_optimizer(optimizer, "
            "elementwise=True)",
            stacklevel=2,
        )
    step = _StepOnRows()
    optimizer.register_step_pre_hook(step.before)
    optimizer.register_step_post_hook(step.after)
    optimizer.register_state_dict_pre_hook(step.restore)
    optimizer.register_load_state_dict_pre_hook(step.before_load)
    return optimizer


def _is_of_torch(cls: type[Optimizer]) -> bool:
    """Whether it, or a class that it refines, is an optimizer of ``torch.optim``."""
    return any(
        base.__module__.startswith("torch.optim.") and base is not Optimizer
        for base in cls.__mro__
        if issubclass(base, Optimizer)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Exchange:
    """A parameter, and the rows that stand in its place during a step."""

    param: DTensor
    rows: Tensor


@final
class _StepOnRows:
    """Exchanges an optimizer's DTensors for their rows, and back.

    A step that raises leaves the rows there; the next step, ``state_dict`` or ``load_state_dict``
    puts the parameters back first. Two of these on one optimizer are as good as one.
    """

    def __init__(self) -> None:
        self._exchanged: list[_Exchange] = []
        self._params_of: list[tuple[dict[str, Any], list[Tensor]]] = []
        """A group of ``param_groups`` and the parameters that the caller put there."""

    @torch.no_grad()
    def before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run the closure, if there is one, then put rows in the place of parameters."""
        self.restore(optimizer)
        args, kwargs = _with_closure_called(args, kwargs)
        for group in optimizer.param_groups:
            params: list[Tensor] = group["params"]
            rows = [self._exchange(param, optimizer.state) for param in params]
            if any(row is not param for row, param in zip(rows, params, strict=True)):
                self._params_of.append((group, params))
                group["params"] = rows
        return args, kwargs

    def after(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Put the parameters back."""
        self.restore(optimizer)

    def before_load(self, optimizer: Optimizer, state_dict: object) -> None:
        """Put back what a step that raised has left."""
        self.restore(optimizer)

    @torch.no_grad()
    def restore(self, optimizer: Optimizer) -> None:
        """The parameters back in their groups, the states that the step has made as DTensors."""
        for group, params in self._params_of:
            # What was added since, after a step that raised, stays.
            group["params"] = params + group["params"][len(params) :]
        for exchange in self._exchanged:
            if exchange.rows.grad is None:
                exchange.param.grad = None  # zero_grad, after a step that raised
            exchange.rows.grad = None
            made: _State | None = optimizer.state.pop(exchange.rows, None)
            if made is not None:
                held: _State = optimizer.state.get(exchange.param, {})
                optimizer.state[exchange.param] = {
                    key: _as_sharded(value, held.get(key), exchange) for key, value in made.items()
                }
        self._params_of.clear()
        self._exchanged.clear()

    def _exchange(self, param: Tensor, state: dict[Tensor, _State]) -> Tensor:
        grad = param.grad
        if not isinstance(param, DTensor) or grad is None:
            return param  # a step passes over parameters without a gradient
        rows = param.to_local()
        rows.grad = _local(grad)
        self._exchanged.append(_Exchange(param=param, rows=rows))
        if param in state:
            state[rows] = {key: _local(value) for key, value in state[param].items()}
        return rows


def _with_closure_called(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``(optimizer, closure)`` with a closure that repeats the loss: backward and ``zero_grad``
    must find the sharded parameters."""
    is_positional = len(args) > 1
    closure: Callable[[], Any] | None = args[1] if is_positional else kwargs.get("closure")
    if closure is None:
        return args, dict(kwargs)
    with torch.enable_grad():
        loss = closure()

    def repeat() -> Any:
        return loss

    if is_positional:
        return (args[0], repeat, *args[2:]), dict(kwargs)
    return args, {**kwargs, "closure": repeat}


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _as_sharded(value: Any, held: Any, exchange: _Exchange) -> Any:
    """A state's value for keeping: a DTensor where it has one entry for each element."""
    if isinstance(held, DTensor) and held.to_local() is value:
        return held
    if not isinstance(value, Tensor) or value.shape != exchange.rows.shape:
        return value
    param = exchange.param
    return DTensor.from_local(
        value,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
