"""What a unit takes and returns: the tensors in it, and what may not be returned."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Final

import torch
from torch import Tensor

from fsdp_hooks.unit import FsdpUnit

_ATOMS: Final = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)
"""What holds no tensor."""


def tensors_in(value: object) -> Iterable[Tensor]:
    """All tensors in nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


def refusal_of(unit: FsdpUnit, output: object) -> Exception | None:
    """What is wrong with a unit's output: its backward, or a later reader, would read released
    memory, which crashes the process."""
    found = list(tensors_in(output))
    if not found and not isinstance(output, (*_ATOMS, Mapping, tuple, list)):
        return TypeError(
            f"unit {unit.name} returns a {type(output).__name__}, in which no tensor is seen; "
            "expected tensors, or tuples, lists, mappings and dataclasses of them: the hook of "
            "the unit's backward hangs on them. Return one of those"
        )
    if any(unit.holds(tensor) for tensor in found):
        return RuntimeError(
            f"unit {unit.name} returns one of its parameters or a view of it, which is released "
            "when its forward ends; expected tensors of their own. Return a clone(), or move what "
            "needs the parameter into the unit"
        )
    return None
