"""Module hooks: the standard path, and the safety net. They call only the life cycle.

One forward and backward of three units, prefetch one ahead::

    caller  | L0.F | L1.F | L2.F | loss | L2.B | L1.B | L0.B | end-of-backward callback
    ag      L0 L1    L2                  (L2) L1   L0
    rs                                           L2     L1     L0

The end of a backward is autograd's own callback, queued by the first hook that runs in it. The
root's post-backward hook would not do: it may run before its descendants finish, or never, when
the root owns no trainable parameter (Megatron-LM pull request 5719).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from fsdp_hooks.lifecycle import Driver, UnitState
from fsdp_hooks.order import PrefetchOrder
from fsdp_hooks.root import FsdpRoot
from fsdp_hooks.unit import FsdpUnit


@final
class ModuleHooks:
    """The hooks of one root. ``remove()`` takes them all off again."""

    def __init__(self, root: FsdpRoot) -> None:
        self._root = root
        self._context = root.context
        self._units = {unit.name: unit for unit in root.inner_units}
        self._order = PrefetchOrder([unit.name for unit in root.inner_units])
        self._depth = 0
        self._in_backward = False
        self._unfinished: dict[str, FsdpUnit] = {}
        """Units whose backward has begun in the backward that runs."""
        self._handles: list[RemovableHandle] = []
        for unit in root.units:
            self._install(unit)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _install(self, unit: FsdpUnit) -> None:
        module = unit.module
        self._handles.append(
            module.register_forward_pre_hook(self._bind(self._pre_forward, unit), prepend=True)
        )
        self._handles.append(
            module.register_forward_hook(
                self._bind(self._post_forward, unit), with_kwargs=True, always_call=False
            )
        )
        owners = {owner for group in unit.groups for slot in group.slots for owner, _ in slot.owners}
        for owner in module.modules():  # not over the set: ranks must agree on every order
            if owner in owners and owner is not module:
                self._handles.append(
                    owner.register_forward_pre_hook(self._bind(self._safety_net, unit))
                )

    @staticmethod
    def _bind(hook: Callable[..., None], unit: FsdpUnit) -> Callable[..., None]:
        def call(module: nn.Module, *arguments: Any) -> None:
            hook(unit, *arguments)

        return call

    # ---- the safety net -----------------------------------------------------------------------

    def _safety_net(self, unit: FsdpUnit, args: tuple[Any, ...]) -> None:
        match self._context.driver:
            case Driver.SCHEDULE:
                unit.ensure()
            case Driver.HOOKS:
                if unit.uses == 0:
                    unit.ensure()
            case Driver.REST:
                raise RuntimeError(
                    f"a sub-module of unit {unit.name} is called outside of a step; expected a "
                    "call of the sharded module itself. Call the unit's module or the root"
                )

    # ---- forward ------------------------------------------------------------------------------

    def _pre_forward(self, unit: FsdpUnit, args: tuple[Any, ...]) -> None:
        context = self._context
        if context.driver is Driver.SCHEDULE:
            unit.ensure()
            return
        if self._in_backward and unit is self._root.root_unit:
            # A backward that raised never reached its callback. Start clean, not half gathered.
            self._abandon()
        if context.driver is Driver.REST:
            self._root.begin(Driver.HOOKS)
        self._depth += 1
        unit.uses += 1
        self._gather(unit)
        self._prefetch(self._order.on_forward(unit.name))

    def _post_forward(
        self, unit: FsdpUnit, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: object
    ) -> None:
        if self._context.driver is Driver.SCHEDULE:
            return
        self._depth -= 1
        unit.uses -= 1
        outermost = self._depth == 0
        if outermost:
            self._order.end_forward()
        outputs = [t for t in _tensors(output) if t.requires_grad]
        if torch.is_grad_enabled() and outputs:
            unit.open_forwards += 1
            # "any": the first gradient to arrive already needs the weights.
            register_multi_grad_hook(
                outputs, self._bind_grad(self._pre_backward, unit), mode="any"
            )
            inputs = [t for t in _tensors((args, dict(kwargs))) if t.requires_grad]
            if inputs:
                register_multi_grad_hook(inputs, self._bind_grad(self._post_backward, unit))
            if not outermost:  # the root's weights are wanted again at once
                self._release(unit)
        elif outermost:
            self._root.end()
        else:
            self._release(unit)

    @staticmethod
    def _bind_grad(hook: Callable[[FsdpUnit], None], unit: FsdpUnit) -> Callable[[Any], None]:
        def call(grads: Any) -> None:
            hook(unit)

        return call

    # ---- backward -----------------------------------------------------------------------------

    def _pre_backward(self, unit: FsdpUnit) -> None:
        if not self._in_backward:
            self._in_backward = True
            if self._context.driver is Driver.REST:  # an earlier backward's end swapped out
                self._root.begin(Driver.HOOKS)
            self._root.pre_backward(0)
            Variable._execution_engine.queue_callback(self._end_of_backward)
        self._unfinished[unit.name] = unit
        unit.uses += 1
        self._gather(unit)
        self._prefetch(self._order.on_backward(unit.name))

    def _post_backward(self, unit: FsdpUnit) -> None:
        unit.uses -= 1
        unit.open_forwards -= 1
        # With other forwards of the unit still open, this backward may contain another of its
        # calls, whose contribution is yet to come: then it is finished at the end.
        if unit.open_forwards == 0:
            self._finish(unit)
        else:
            self._release(unit)

    def _finish(self, unit: FsdpUnit) -> None:
        del self._unfinished[unit.name]
        is_last = self._context.is_last_microbatch
        unit.seal(0, is_last=is_last)
        if is_last or unit.reduces_each_microbatch:
            unit.reduce(after=(self._context.caller.record(f"backward of {unit.name}"),))
        self._release(unit)

    def _end_of_backward(self) -> None:
        """Finish the units whose inputs needed no gradient, in the order of backward; then end."""
        for unit in tuple(self._unfinished.values()):
            unit.uses = 0
            self._finish(unit)
        self._in_backward = False
        self._root.end()

    def _abandon(self) -> None:
        self._in_backward = False
        self._unfinished.clear()
        self._depth = 0
        self._root.abort()

    # ---- gather and release -------------------------------------------------------------------

    def _gather(self, unit: FsdpUnit) -> None:
        if not unit.releases:
            return
        gathered = unit.unshard()
        self._context.caller.wait(gathered, word=f"wait for {unit.name}")

    def _prefetch(self, name: str | None) -> None:
        if name is not None:
            unit = self._units[name]
            if unit.releases:
                unit.unshard()

    def _release(self, unit: FsdpUnit) -> None:
        if unit.releases and unit.uses == 0 and unit.state is UnitState.UNSHARDED:
            # Behind what the caller has issued: the unit's own compute still reads the storage.
            unit.reshard(after=(self._context.caller.record(f"use of {unit.name}"),))


def _tensors(value: object) -> Iterable[Tensor]:
    """All tensors in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
