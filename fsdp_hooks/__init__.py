"""A sharding core (ZeRO-0 to 3, hybrid) whose lifecycle is public: hooks or a schedule drive it.

Public names load on first use (PEP 562), so importing the package imports no torch. No public name
is also the name of a submodule: importing that submodule would replace the name.
"""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from fsdp_hooks.entry import fully_shard
    from fsdp_hooks.optimizer import shard_optimizer

__all__ = [
    "fully_shard",
    "shard_optimizer",
]

_HOME: Final = MappingProxyType(
    {
        "fully_shard": "fsdp_hooks.entry",
        "shard_optimizer": "fsdp_hooks.optimizer",
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
