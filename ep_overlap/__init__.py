"""The combined 1F1B schedule: hides the expert-parallel exchange of MoE training under compute.

Public names load on first use (PEP 562), so importing the package imports no torch.
"""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ep_overlap.config import OverlapConfig
    from ep_overlap.plan.build import build_plan
    from ep_overlap.schedule import OverlapSchedule

__all__ = [
    "OverlapConfig",
    "OverlapSchedule",
    "build_plan",
]

_HOME: Final = MappingProxyType(
    {
        "OverlapConfig": "ep_overlap.config",
        "OverlapSchedule": "ep_overlap.schedule",
        "build_plan": "ep_overlap.plan.build",
    }
)
"""The module that defines each public name."""


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value  # the next access finds it without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
