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
    from fsdp_hooks.wgrad import ManagedLayer, managed_linear
    from fsdp_hooks.wgrad_layers import ExpertLinear, delayed_wgrad, manage_wgrad

__all__ = [
    "ExpertLinear",
    "GradScaler",
    "ManagedLayer",
    "MixedPrecision",
    "clip_grad_norm_",
    "delayed_wgrad",
    "fully_shard",
    "load_state_dict",
    "manage_wgrad",
    "managed_linear",
    "microbatch",
    "shard_optimizer",
    "state_dict",
    "state_dict_to_fill",
]

_HOME: Final = MappingProxyType(
    {
        "ExpertLinear": "fsdp_hooks.wgrad_layers",
        "GradScaler": "fsdp_hooks.grad_scaler",
        "ManagedLayer": "fsdp_hooks.wgrad",
        "MixedPrecision": "fsdp_hooks.precision",
        "clip_grad_norm_": "fsdp_hooks.grad_norm",
        "delayed_wgrad": "fsdp_hooks.wgrad_layers",
        "fully_shard": "fsdp_hooks.shard",
        "load_state_dict": "fsdp_hooks.checkpoint",
        "manage_wgrad": "fsdp_hooks.wgrad_layers",
        "managed_linear": "fsdp_hooks.wgrad",
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
