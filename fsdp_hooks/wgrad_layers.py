"""Whose weight gradients can be managed, and how a user asks for it.

::

    manage_wgrad(model, fuse=True)         # after fully_shard: dW straight into the reduction
    with delayed_wgrad(model) as delayed:  # in a loop of one's own
        loss.backward()                    # dX alone
        delayed.flush()                    # dW; leaving does it, too

A managed layer is a layer of another class: the same object, whose class got a mixin, as
``fully_shard`` does it. Layers of other kinds, and weights that are used outside of a layer's own
forward, go on as ever: their gradients come from autograd, by the same door.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from types import FunctionType, MappingProxyType
from typing import Final, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_hooks.lifecycle import RootLifecycle, ShardedModule, lifecycle_of
from fsdp_hooks.wgrad import AutogradSink, GradSink, ManagedLayer, Wgrad, WgradQueue, managed_linear

LayerTypes = Mapping[type[nn.Module], type[ManagedLayer]]
"""For a kind of layer, the class that takes the place of its own methods."""


class ManagedLinear(ManagedLayer, nn.Linear):
    """``nn.Linear``."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (as its base class calls it)
        """``[..., in]`` to ``[..., out]``."""
        return managed_linear(self, input, self.weight, self.bias)


class ExpertLinear(ManagedLayer):
    """A linear layer for each expert, their weights in one parameter, without bias.

    Args:
        num_experts: E, of this rank.
        in_features: columns of each weight.
        out_features: rows of each weight.
        dtype: of the weights; as for ``device``, None: torch's default.
        device: where they are.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(num_experts, out_features, in_features, dtype=dtype, device=device)
        )
        for weight in self.weight:  # as ``nn.Linear`` draws each
            nn.init.kaiming_uniform_(weight, a=5**0.5)

    def forward(self, rows: Tensor, num_rows: list[int] | None = None) -> Tensor:
        """``[E, T, in]`` to ``[E, T, out]``; or, sorted by expert, ``[T, in]`` to ``[T, out]``.

        ``num_rows``: ``[E]``, how many of the sorted rows each expert has.
        """
        return managed_linear(self, rows, self.weight, num_rows=num_rows)


_OWN_TYPES: Final[LayerTypes] = MappingProxyType({nn.Linear: ManagedLinear})


def manage_wgrad(
    module: nn.Module,
    *,
    fuse: bool | None = None,
    layer_types: LayerTypes = MappingProxyType({}),
    sink: GradSink | None = None,
) -> Wgrad:
    """Let one ``Wgrad`` manage the weight gradients of all layers in ``module`` that allow it.

    Until somebody delays them, results are bit for bit what they were; with ``fuse``, within
    rounding. Call it after ``fully_shard``, with the same module; again, it returns the same one.

    Args:
        module: the whole model.
        fuse: write gradients straight into the reduction's input (of an unsharded model: into
            ``.grad``). None: as it was, at first not.
        layer_types: kinds of layers besides ``nn.Linear`` and ``ManagedLayer``.
        sink: takes the gradients; None: the module's own life cycle's.

    Raises:
        ValueError: ``module`` has no such layer; another module around or within it is managed, or
            sharded, by itself; ``fuse`` differs from what it was; ``check_sink``'s reason; it has a
            layer of Transformer Engine's that ``wgrad_transformer_engine.refuse_unfit`` names.
    """
    if not isinstance(module, ShardedModule):
        _refuse_sharded_parts(module)
        if sink is None:  # else another sharding core's, which knows them
            _refuse_sharded_params(module)
    layers = [m for m in module.modules() if isinstance(m, ManagedLayer)]
    managers = {id(m.wgrad): m.wgrad for m in layers if m.wgrad is not None}
    if len(managers) > 1:
        raise ValueError(
            f"parts of {type(module).__name__} are managed already, each by itself; call "
            "manage_wgrad on the whole model alone"
        )
    wgrad = next(iter(managers.values()), None)
    if wgrad is None:
        wgrad = Wgrad(sink or lifecycle_of(module).grad_sink, is_fused=bool(fuse))
    elif fuse is not None and fuse is not wgrad.is_fused:
        raise ValueError(
            f"manage_wgrad(fuse={fuse}), but the model is managed with fuse={wgrad.is_fused}; "
            "leave fuse out, or build the model anew"
        )
    elif sink is not None:
        check_sink(module, sink)
    types = {**_OWN_TYPES, **_transformer_engine_types(module, wgrad), **layer_types}
    for candidate in module.modules():
        if not isinstance(candidate, ManagedLayer):
            _swap_class(candidate, types)
    layers = [m for m in module.modules() if isinstance(m, ManagedLayer)]
    if not layers:
        known = ", ".join(kind.__name__ for kind in types)
        raise ValueError(
            f"{type(module).__name__} has no layer whose weight gradients can be managed; expected "
            f"one of {known}, or a ManagedLayer. Leave delayed and fused weight gradients out"
        )
    for layer in layers:
        layer.wgrad = wgrad
    return wgrad


def check_sink(module: nn.Module, sink: GradSink) -> None:
    """That gradients of managed layers reach the sharding core; its sink may be wrapped.

    Raises:
        ValueError: they go to ``.grad``, where the core would not find them.
    """
    if isinstance(sink, AutogradSink):
        return
    for layer in module.modules():
        if not isinstance(layer, ManagedLayer) or layer.wgrad is None:
            continue
        if isinstance(layer.wgrad.sink, AutogradSink):
            raise ValueError(
                f"{type(module).__name__} is managed already, and its weight gradients go to "
                ".grad, which its sharding core does not read; expected "
                "manage_wgrad(..., sink=core.grad_sink) from the first call on"
            )


def _swap_class(layer: nn.Module, types: LayerTypes) -> None:
    """Put the managed class before the layer's own, unless that has methods of its own there: it
    then computes something else."""
    cls = type(layer)
    for base, managed in types.items():
        if isinstance(layer, base):
            replaced = [name for name, what in vars(managed).items() if type(what) is FunctionType]
            if all(_method(cls, name) is _method(base, name) for name in replaced):
                has_name = cls is base and issubclass(managed, base)  # so pickle finds it
                layer.__class__ = (
                    managed if has_name else type(f"Managed{cls.__name__}", (managed, cls), {})
                )
            return


def _method(cls: type, name: str) -> object:
    return next(vars(base)[name] for base in cls.__mro__ if name in vars(base))


def _transformer_engine_types(module: nn.Module, wgrad: Wgrad) -> LayerTypes:
    """Its layers' classes, where there are such layers. Its norms and its attention, which have no
    matrices, go on as ever."""
    found = [
        (name or type(part).__name__, part)
        for name, part in module.named_modules()
        if any(base.__module__.startswith("transformer_engine.") for base in type(part).__mro__)
        and any(param.dim() > 1 for param in part.parameters(recurse=False))
    ]
    if not found:
        return {}
    # Here, not above: it is there only where some layer is its own.
    from fsdp_hooks.wgrad_transformer_engine import TRANSFORMER_ENGINE_LAYERS, refuse_unfit

    for name, layer in found:
        refuse_unfit(layer, name, is_fused=wgrad.is_fused)
    return TRANSFORMER_ENGINE_LAYERS


def _refuse_sharded_parts(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, ShardedModule):
            raise ValueError(
                f"{name} is sharded and {type(module).__name__} around it is not; call "
                "manage_wgrad on what fully_shard was called on last"
            )


def _refuse_sharded_params(module: nn.Module) -> None:
    for name, param in module.named_parameters():
        if isinstance(param, DTensor):
            raise ValueError(
                f"{name} is sharded, by what {type(module).__name__} is a part of or by something "
                "else than fully_shard; call manage_wgrad on what fully_shard was called on"
            )


@final
class DelayedWgrad:
    """Weight gradients of backwards that have run; see ``delayed_wgrad``."""

    def __init__(self, wgrad: Wgrad, root: RootLifecycle) -> None:
        self._wgrad = wgrad
        self._root = root
        self._queues = {0: WgradQueue()}
        wgrad.delay_into(self._queues[0])

    def __len__(self) -> int:
        """How many wait."""
        return sum(map(len, self._queues.values()))

    def microbatch(self, index: int) -> None:
        """The backwards from here on are this microbatch's; 0, unless somebody says otherwise.

        Raises:
            RuntimeError: ``delayed_wgrad`` has been left.
            ValueError: it is below 0.
        """
        if index < 0:
            raise ValueError(f"microbatch({index}): expected 0 or more")
        if self._wgrad.queue is None:
            raise RuntimeError(
                "microbatch() after delayed_wgrad was left: nobody would flush; call it inside"
            )
        self._wgrad.delay_into(self._queues.setdefault(index, WgradQueue()))

    def flush(self, microbatch: int | None = None) -> None:
        """Make all that wait, or those of one microbatch.

        With the last of them the backwards that left them end: gradients are reduced, and are in
        ``.grad``. Where nothing waits, nothing happens.
        """
        queues = self._queues
        flushed = queues.values() if microbatch is None else [queues.get(microbatch, WgradQueue())]
        for queue in filter(len, flushed):
            queue.flush()
            self._root.collect_postponed()
        if not len(self):
            self._root.end_postponed()

    def drop(self) -> None:
        """After a failure: forget what waits, and what its backwards made."""
        for queue in self._queues.values():  # not the queues: one takes what comes after
            queue.clear()
        self._root.abort()


@contextmanager
def delayed_wgrad(
    module: nn.Module, *, layer_types: LayerTypes = MappingProxyType({})
) -> Generator[DelayedWgrad]:
    """Backwards inside make input gradients only; ``flush()``, or the end, makes the weights'.

    For a loop of one's own; a schedule has W actions. Several backwards may run before one flush.
    Sharded gradients are reduced at the flush, those of several backwards together. Arguments: see
    ``manage_wgrad``.

    Raises:
        ValueError: see ``manage_wgrad``; or ``module`` is, or holds, a ``DistributedDataParallel``.
        RuntimeError: weight gradients are delayed already.
    """
    if any(isinstance(part, DistributedDataParallel) for part in module.modules()):
        raise ValueError(
            "delayed weight gradients of a DistributedDataParallel, which reduces them within the "
            "backward, before they are made; use fully_shard(strategy='no_shard') in its place"
        )
    wgrad = manage_wgrad(module, layer_types=layer_types)
    if wgrad.queue is not None:
        raise RuntimeError(
            "weight gradients are delayed already; leave the other delayed_wgrad first, or let "
            "the schedule's step end"
        )
    root = lifecycle_of(module)
    delayed = DelayedWgrad(wgrad, root)
    root.postpones_end = True
    try:
        yield delayed
        delayed.flush()
    except BaseException:
        delayed.drop()
        raise
    finally:
        wgrad.delay_into(None)
        root.postpones_end = False
