"""A sharding core (ZeRO-0 to 3, hybrid) whose lifecycle is public: hooks or a schedule drive it.

Public names load on first use (PEP 562), so importing the package imports no torch.
"""

import sys
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Final, override

if TYPE_CHECKING:
    from fsdp_hooks.fully_shard import fully_shard
    from fsdp_hooks.optimizer import shard_optimizer

__all__ = [
    "fully_shard",
    "shard_optimizer",
]

_HOME: Final = MappingProxyType(
    {
        "fully_shard": "fsdp_hooks.fully_shard",
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


class _Package(ModuleType):
    """Keeps public names for what they name.

    Python sets a submodule as an attribute of its package once it is imported, so the file
    ``fully_shard.py`` would take the place of the function.
    """

    @override
    def __setattr__(self, name: str, value: object) -> None:
        if name not in __all__ or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
