"""A sharding core whose life cycle is public: module hooks or a schedule drive it.

Public names load on first use (PEP 562), so importing the package imports no torch.
"""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from fsdp_hooks.accumulation import microbatch
    from fsdp_hooks.checkpoint import load_state_dict, state_dict, state_dict_to_fill
    from fsdp_hooks.grad_norm import clip_grad_norm_
    from fsdp_hooks.grad_scaler import GradScaler
    from fsdp_hooks.optimizer import shard_optimizer
    from fsdp_hooks.precision import MixedPrecision
    from fsdp_hooks.shard import fully_shard

__all__ = [
    "GradScaler",
    "MixedPrecision",
    "clip_grad_norm_",
    "fully_shard",
    "load_state_dict",
    "microbatch",
    "shard_optimizer",
    "state_dict",
    "state_dict_to_fill",
]

_HOME: Final = MappingProxyType(
    {
        "GradScaler": "fsdp_hooks.grad_scaler",
        "MixedPrecision": "fsdp_hooks.precision",
        "clip_grad_norm_": "fsdp_hooks.grad_norm",
        "fully_shard": "fsdp_hooks.shard",
        "load_state_dict": "fsdp_hooks.checkpoint",
        "microbatch": "fsdp_hooks.accumulation",
        "shard_optimizer": "fsdp_hooks.optimizer",
        "state_dict": "fsdp_hooks.checkpoint",
        "state_dict_to_fill": "fsdp_hooks.checkpoint",
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
