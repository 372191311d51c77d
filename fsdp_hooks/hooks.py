"""Module hooks: the standard path, and the safety net. They call only the life cycle.

One forward and backward of three units, prefetch one ahead::

    caller  | L0.F | L1.F | L2.F | loss | L2.B | L1.B | L0.B | end-of-backward callback
    ag      L0 L1    L2                  L1     L0
    rs                                          L2     L1     L0

L2 is used next by its own backward, so it stays. See ``prefetch.py``.

The end of a backward is autograd's own callback, queued by the first hook that runs in it. The
root's post-backward hook would not do: it may run before its descendants finish, or never, when
the root owns no trainable parameter (Megatron-LM pull request 5719).
"""

import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, final
from weakref import ref

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge

from fsdp_hooks.lifecycle import Driver, UnitState
from fsdp_hooks.prefetch import Call, Forward, Prefetch, Use
from fsdp_hooks.root import FsdpRoot
from fsdp_hooks.streams import Event
from fsdp_hooks.unit import FsdpUnit
from fsdp_hooks.unit_output import refusal_of, tensors_in

MAX_REDUCTIONS_IN_FLIGHT: Final = 1
"""On the standard path: reductions issued and not waited for, while the next unit's gradients are
made. As a schedule's (``REDUCE_DEPTH``): one set is filled, one is reduced. FSDP2 does likewise."""


class _Running(NamedTuple):
    """A forward that runs."""

    module: nn.Module
    use: Use
    is_outermost: bool
    """Whether no other call within the same unit is around it: that one gathers and watches."""


@final
class _Backward:
    """A backward that runs."""

    __slots__ = ("num_awaited", "past", "recomputed", "unfinished")

    def __init__(self) -> None:
        self.num_awaited: dict[Call, int] = {}
        """Of calls whose backward has begun: input gradients that are yet to come."""
        self.unfinished: dict[str, Use] = {}
        """Units whose backward has begun, in that order."""
        self.past: list[tuple[Use, Call]] = []
        """Those that are through, but for gradients of parameters that are still on their way."""
        self.recomputed = Forward()


@final
class _End:
    """Autograd's end-of-backward callback. Autograd alone holds it, so if the backward fails, it is
    gone. (No frame binds it either: a traceback that somebody keeps holds its frames' variables.)
    """

    __slots__ = ("__weakref__", "_call")

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self) -> None:
        self._call()


@final
class _Reach:
    """How hooks on a graph reach the model's: firmly until a backward has begun there, then weakly.

    A module may keep a tensor of the graph, as megatron-core's routers keep probabilities. If the
    graph kept the model for good, neither would go: the garbage collector does not see graphs.
    """

    __slots__ = ("_firm", "_hooks", "_unit_name")

    def __init__(self, hooks: "ModuleHooks", use: Use) -> None:
        self._firm: tuple[ModuleHooks, Use] | None = (hooks, use)
        self._hooks = ref(hooks)
        self._unit_name = use.unit.name

    def __call__(self) -> "tuple[ModuleHooks, Use]":
        if self._firm is not None:
            return self._firm
        hooks = self._hooks()
        if hooks is None:
            raise RuntimeError(
                f"a second backward through unit {self._unit_name}, whose model is gone; keep the "
                "model until the last backward through what it computed"
            )
        return hooks, hooks.use_of(self._unit_name)

    def loosen(self) -> None:
        """A backward has begun, which holds the hooks until it ends."""
        self._firm = None


@final
class ModuleHooks:
    """The hooks of one root."""

    def __init__(self, root: FsdpRoot) -> None:
        self._root = root
        self._context = root.context
        self._uses = {unit.name: Use(unit) for unit in root.units}
        self._prefetch = Prefetch(root, self._uses)
        self._order = self._prefetch.order
        self._has_warned = False
        self._uncompared = {True, False}
        """Forwards with gradients (and their backwards) and without: those whose order has yet to
        be compared with other ranks'. Once each: which step is its first, all ranks agree on."""
        self._running: list[_Running] = []
        self._forward = Forward()
        self._backward: _Backward | None = None
        self._end: ref[_End] | None = None
        """Of ``_backward``; dead if that has failed."""
        self._num_aborts = 0
        """The root's, when ``_backward`` began: another now says that somebody has dropped it."""
        self._reducing: deque[tuple[FsdpUnit, Event]] = deque()
        for use in self._uses.values():
            self._install(use)

    def use_of(self, unit_name: str) -> Use:
        """What is known of a unit's calls."""
        return self._uses[unit_name]

    def _install(self, use: Use) -> None:
        module = use.unit.module
        module.register_forward_pre_hook(self._pre_hook(use), prepend=True)
        module.register_forward_hook(self._post_hook(use), with_kwargs=True)
        owners = {owner for group in use.unit.groups for owner in group.owners()}
        for owner in module.modules():  # not over the set: ranks must agree on every order
            if owner in owners and owner is not module:
                owner.register_forward_pre_hook(self._pre_hook(use), prepend=True)
                # ``always_call``: an ordinary module has no ``unwind`` of its own.
                owner.register_forward_hook(
                    self._post_hook(use), with_kwargs=True, always_call=True
                )

    def _pre_hook(self, use: Use) -> Callable[..., None]:
        def pre_forward(module: nn.Module, args: tuple[Any, ...]) -> None:
            if self._context.driver is Driver.SCHEDULE:
                use.unit.ensure()
            else:
                self._enter(module, use)

        return pre_forward

    def _post_hook(self, use: Use) -> Callable[..., None]:
        def post_forward(
            module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: object
        ) -> None:
            # Not ours: a schedule's, or that of a call which another pre-hook stopped before ours.
            if self._running and self._running[-1].module is module:
                self._leave((args, kwargs), output)

        return post_forward

    # ---- forward ------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """How many forwards run."""
        return len(self._running)

    def unwind(self, depth: int) -> None:
        """A forward raised: leave the calls above ``depth``, as a forward without gradients."""
        while len(self._running) > depth:
            self._leave((), None, raised=True)

    def _enter(self, module: nn.Module, use: Use) -> None:
        """A unit's forward begins; or a part of it is called by itself, which then counts as one
        (a schedule of one's own, a wrapper that calls ``module.forward``)."""
        backward = self._backward_around()
        if backward is not None:
            self._leave_past_units(backward)
        elif not self._running:
            self._begin_forward()
        is_outermost = all(running.use is not use for running in self._running)
        self._running.append(_Running(module, use, is_outermost))
        if not is_outermost:
            return
        unit = use.unit
        use.count += 1
        if module is not unit.module and unit.releases and unit.state is UnitState.SHARDED:
            self._context.counters.add(hook_misses=1)
        self._prefetch.gather(use)
        # A recomputed forward is no news: the order is that of backwards then.
        if backward is None and self._running[0].module is self._root.root_unit.module:
            if unit is self._root.root_unit:
                self._order.begin_forward(with_grad=torch.is_grad_enabled())
            else:
                self._order.on_forward(unit.name)
        self._prefetch.look_ahead()

    def _backward_around(self) -> _Backward | None:
        """The backward that this forward is part of. A recomputed forward may be the first to hear
        of it."""
        backward = self._running_backward()
        # Autograd's number of the backward that runs in this thread, or -1.
        in_graph = torch._C._current_graph_task_id() >= 0  # pyright: ignore[reportPrivateUsage]
        return self._begin_backward() if backward is None and in_graph else backward

    def _begin_forward(self) -> None:
        if self._context.driver is Driver.REST:
            self._root.begin(Driver.HOOKS)
        else:
            # A forward without its backward yet. The optimizer may have stepped since, so nothing
            # that it left gathered is trusted.
            self._root.begin_another_forward()
        self._context.compares_order = torch.is_grad_enabled() in self._uncompared
        self._order.expect_nothing()
        self._forward = Forward()

    def _leave(self, inputs: object, output: object, *, raised: bool = False) -> None:
        module, use, is_outermost = self._running.pop()
        if not is_outermost:
            return
        use.count -= 1
        in_backward = self._running_backward() is not None  # recomputation
        ends_forward = not self._running and not in_backward
        error = refusal_of(use.unit, output) if use.unit.releases else None
        if error is not None:
            inputs, output = (), None
        elif ends_forward and not raised and module is self._root.root_unit.module:
            self._note_order()
        has_backward = torch.is_grad_enabled() and self._watch(use, inputs, output)
        if ends_forward and not has_backward:
            self._root.end()
            if not (raised or torch.is_grad_enabled()):
                self._uncompared.discard(False)
        else:
            use.is_recomputed = in_backward
            self._prefetch.look_ahead()
        if error is not None:
            raise error

    def _note_order(self) -> None:
        if self._order.end_forward() and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "the order of units differs from the step before: units were gathered on demand, "
                "without overlap; the new order counts from now on (said once)",
                stacklevel=2,
            )

    # Note [hooks in a graph]
    # What hangs on a graph must go when the graph goes, without a run of the garbage collector.
    # So a hook never reaches the node that it hangs on, nor one downstream.
    # (``register_multi_grad_hook`` in its mode "all" does: each of its hooks holds the nodes of
    # all its tensors.) Here the hooks on a unit's outputs hold the nodes of its inputs, as
    # autograd's own edges do, and the hooks on the inputs hold none. A leaf outlives the graph,
    # and its hooks would stay: those of a leaf hang on its node. Where one unit's output is the
    # next one's input, both hang on one node. Hooks on a tensor run before those on its node: the
    # next unit is finished, and released, before this one is gathered.

    def _watch(self, use: Use, inputs: object, output: object) -> bool:
        """Hang the hooks of the unit's backward on the graph. See Note [hooks in a graph].

        Returns:
            Whether there will be a backward.
        """
        given = [t for t in tensors_in(inputs) if t.requires_grad]
        # An input that is handed through gets its gradient after the unit's backward, not before.
        made = [t for t in tensors_in(output) if t.requires_grad and all(t is not g for g in given)]
        if not made:
            return False
        call = Call(self._forward if self._backward is None else self._backward.recomputed)
        call.forward.num_open[use.unit.name] += 1
        nodes = tuple(get_gradient_edge(t).node for t in given)

        reach = _Reach(self, use)

        def on_output_grads(grads: Any) -> None:
            hooks, use = reach()
            hooks._pre_backward(use, call, nodes)
            reach.loosen()

        def on_input_grad(grad: Any) -> None:
            hooks, use = reach()
            hooks._count_input(use, call, is_leaf=False)

        def on_leaf_grad(grads: Any) -> None:
            hooks, use = reach()
            hooks._count_input(use, call, is_leaf=True)

        for node in dict.fromkeys(get_gradient_edge(t).node for t in made):
            node.register_prehook(on_output_grads)
        for tensor, node in zip(given, nodes, strict=True):
            if tensor.is_leaf:
                node.register_prehook(on_leaf_grad)
            else:
                tensor.register_hook(on_input_grad)
        return True

    # ---- backward -----------------------------------------------------------------------------

    def _running_backward(self) -> _Backward | None:
        """The backward that runs. If the last one failed, its step is dropped here.

        Raises:
            RuntimeError: it failed within ``delayed_wgrad``, whose queues hold weight gradients of
                the step that is dropped.
        """
        if self._end is not None and self._end() is None:
            self._reset()
            was_dropped = self._root.num_aborts != self._num_aborts
            self._root.abort()
            if self._root.postpones_end and not was_dropped:
                raise RuntimeError(
                    "a backward failed inside delayed_wgrad, and the loop goes on; this step's "
                    "gradients are dropped. Let the failure leave delayed_wgrad, and repeat the "
                    "whole step"
                )
        return self._backward

    def _queue_end(self) -> None:
        """Ask autograd for a call when the backward that runs is over."""
        end = _End(self._end_of_backward)
        self._end = ref(end)
        self._num_aborts = self._root.num_aborts
        Variable._execution_engine.queue_callback(end)  # pyright: ignore[reportPrivateUsage]

    def _begin_backward(self) -> _Backward:
        self._queue_end()
        self._backward = backward = _Backward()
        self._context.compares_order = True in self._uncompared
        if self._context.driver is Driver.REST:  # an earlier backward's end swapped out
            self._root.begin(Driver.HOOKS)
        self._root.pre_backward(0)
        self._order.begin_backward()
        # No hook of the root need fire where the loss was taken from an inner output.
        self._prefetch.gather(self._uses[self._root.root_unit.name])
        return backward

    def _pre_backward(self, use: Use, call: Call, nodes: Sequence[Node]) -> None:
        backward = self._running_backward() or self._begin_backward()
        if call in backward.num_awaited:
            return  # the first gradient to arrive needed the weights already
        self._leave_past_units(backward)
        # Which inputs this backward reaches only the engine knows; torch's own hooks ask it so.
        backward.num_awaited[call] = sum(
            map(torch._C._will_engine_execute_node, nodes)  # pyright: ignore[reportPrivateUsage]
        )
        call.forward.num_open[use.unit.name] -= 1
        use.count += 1
        backward.unfinished[use.unit.name] = use
        self._prefetch.gather(use)
        if use.unit is not self._root.root_unit:
            self._order.on_backward(use.unit.name)
        self._prefetch.look_ahead()

    def _count_input(self, use: Use, call: Call, *, is_leaf: bool) -> None:
        backward = self._running_backward()
        if backward is None or call not in backward.num_awaited:
            return  # this backward reached the unit's inputs, and not by its outputs
        backward.num_awaited[call] -= 1
        if backward.num_awaited[call] > 0:
            return
        if is_leaf:
            # Autograd takes leaves as they come, parameters too, and all before the next unit.
            backward.past.append((use, call))
        else:
            self._post_backward(backward, use, call)

    def _leave_past_units(self, backward: _Backward) -> None:
        while backward.past:
            self._post_backward(backward, *backward.past.pop())

    def _post_backward(self, backward: _Backward, use: Use, call: Call) -> None:
        use.count -= 1
        use.is_recomputed = False
        # With another call of the same forward still open, its contribution may be yet to come, or
        # never come: then the unit is finished at the end.
        if use.count == 0 and not call.forward.num_open[use.unit.name]:
            del backward.unfinished[use.unit.name]
            self._seal(use.unit)
        self._prefetch.look_ahead()

    def _seal(self, unit: FsdpUnit) -> None:
        is_last = self._context.is_last_microbatch
        caller = self._context.caller
        if self._root.postpones_end:
            return  # its weights' gradients are yet to be made
        unit.seal(0, is_last=is_last)
        if not unit.is_trainable or not (is_last or unit.reduces_each_microbatch):
            return
        reduced = unit.reduce(after=(caller.record(f"backward of {unit.name}"),))
        self._reducing.append((unit, reduced))
        # Whole gradients live until they are reduced: on a slow link, one set for each unit.
        if len(self._reducing) > MAX_REDUCTIONS_IN_FLIGHT:
            oldest, reduced = self._reducing.popleft()
            caller.wait(reduced, word="wait for a reduction")
            oldest.drop_reduced()

    def _end_of_backward(self) -> None:
        """Finish the units whose inputs needed no gradient, in the order of backward; then end."""
        backward = self._backward
        assert backward is not None, "autograd ends what has begun"
        try:
            self._order.end_backward()
            self._leave_past_units(backward)
            for use in backward.unfinished.values():
                self._seal(use.unit)
            for unit in self._root.units:
                # Contributions that came by no output of the unit, or in an earlier microbatch.
                if unit.holds_contributions(is_last=self._context.is_last_microbatch):
                    self._seal(unit)
        except BaseException:
            self._reset()
            self._root.abort()
            raise
        self._reset()
        if self._root.postpones_end:
            self._root.collect_postponed()
            self._root.release_units()
        else:
            self._root.end()
        if self._context.is_last_microbatch:
            self._uncompared.discard(True)

    def _reset(self) -> None:
        """No backward runs any more."""
        self._backward = self._end = None
        self._reducing.clear()
        for use in self._uses.values():
            use.count = 0
            use.is_recomputed = False
