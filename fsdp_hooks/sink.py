"""Brings weight gradients that autograd does not carry to the doors of their units."""

from collections.abc import Iterable, Mapping
from typing import final

from torch import Tensor, nn

from fsdp_hooks.param_group import ParamGroup
from fsdp_hooks.unit import FsdpUnit
from fsdp_hooks.wgrad import Destination


@final
class UnitSink:
    """Implements ``GradSink`` for the compute parameters of one root."""

    def __init__(self, units: Iterable[FsdpUnit]) -> None:
        self._doors: Mapping[nn.Parameter, tuple[FsdpUnit, ParamGroup, int]] = {
            param: (unit, group, index)
            for unit in units
            for group in unit.groups
            if group.requires_grad
            for index, param in enumerate(group.compute_params)
        }

    def add(self, weight: nn.Parameter, grad: Tensor) -> None:
        """As what ``register_post_accumulate_grad_hook`` brings."""
        unit, group, index = self._doors[weight]
        unit.accumulate(group, index, grad)

    def destination(self, weight: nn.Parameter) -> Destination:
        """A view of the reduction's input."""
        unit, group, index = self._doors[weight]
        return unit.destination(group, index)
