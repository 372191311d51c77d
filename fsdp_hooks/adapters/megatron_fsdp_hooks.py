"""The hooks of megatron-core's FSDP v1, which stand aside while a schedule drives.

They are on every module and on every parameter, and FSDP v1 keeps no handles of most: those of one
class of modules are filed under one name. So each is wrapped where it hangs, and stays in its place
among the hooks of others. At rest a wrapped hook does what it did.
"""

from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from typing import Any, Protocol, cast, final

from torch import nn

from fsdp_hooks.adapters.megatron_ddp_buckets import INSTALL_HINT

try:
    from megatron.core.distributed.fsdp.src.megatron_fsdp import MegatronFSDP
except ImportError as error:
    raise ImportError(INSTALL_HINT) from error

Hook = Callable[..., Any]


class Taker(Protocol):
    """Who drives, seen from a parameter."""

    def take(self, param: nn.Parameter) -> None:
        """In stream time: autograd has added a gradient to the parameter's ``.grad``."""
        ...


@final
class Switch:
    """Who drives one FSDP: all of its hooks read this."""

    __slots__ = ("driver",)

    def __init__(self) -> None:
        self.driver: Taker | None = None
        """None: its own hooks. Set within a step alone, as garbage collection does not see what
        hooks of parameters hold."""


@final
class ModuleHook:
    """A hook of FSDP v1 on a module: gathers, releases, and what marks a backward."""

    __slots__ = ("_hook", "switch")

    def __init__(self, hook: Hook, switch: Switch) -> None:
        self._hook = hook
        self.switch = switch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._hook(*args, **kwargs) if self.switch.driver is None else None


@final
class ParamHook:
    """FSDP v1's ``register_post_accumulate_grad_hook``: adds a gradient up and reduces it."""

    __slots__ = ("_hook", "switch")

    def __init__(self, hook: Hook, switch: Switch) -> None:
        self._hook = hook
        self.switch = switch

    def __call__(self, param: nn.Parameter) -> None:
        driver = self.switch.driver
        if driver is None:
            self._hook(param)
        else:
            driver.take(param)


def switch_of(fsdp: MegatronFSDP) -> Switch:
    """The one of this FSDP, which sets its hooks aside; made at the first call."""
    of_params = [_param_hooks(param) for param in cast(Any, fsdp).raw_param.values()]
    for hooks in of_params:
        for hook in hooks.values():
            if isinstance(hook, ParamHook):
                return hook.switch
    switch = Switch()
    for hooks in of_params:
        _wrap(hooks, ParamHook, switch)
    for hooks in _module_hooks(fsdp.module):
        _wrap(hooks, ModuleHook, switch)
    return switch


def _wrap(
    hooks: MutableMapping[int, Hook],
    wrapper: Callable[[Hook, Switch], Hook],
    switch: Switch,
) -> None:
    for key, hook in list(hooks.items()):
        function = cast(Hook, hook.func) if isinstance(hook, partial) else hook
        if function.__module__ == MegatronFSDP.__module__:
            hooks[key] = wrapper(hook, switch)


def _param_hooks(param: nn.Parameter) -> MutableMapping[int, Hook]:
    return cast(Any, param)._post_accumulate_grad_hooks or {}


def _module_hooks(root: nn.Module) -> Iterator[MutableMapping[int, Hook]]:
    for module in root.modules():
        yield module._forward_pre_hooks  # pyright: ignore[reportPrivateUsage]
        yield module._forward_hooks  # pyright: ignore[reportPrivateUsage]
