"""megatron-core's own ``DistributedDataParallel`` behind the life cycle of a schedule.

DDP and its distributed optimizer stay what they are: buffers, buckets, collectives, scaling. What
changes within a step is who calls them. DDP's hooks count what arrives in the one backward of the
last microbatch; under a schedule each node is a backward of its own, those of two microbatches take
turns, and a delayed weight gradient never comes to a hook.

======================================  ======================================================
DDP's own driver                        under a schedule
======================================  ======================================================
forward pre-hooks gather a bucket's     ``UNSHARD.unit``: ahead of the unit's first reader, on
parameters, and start the next one's    the AG lane
backward hooks add to ``main_grad``     the door of this file, and its sink, do
the last arrival starts a bucket's      ``REDUCE.unit`` of the last unit in the bucket, on the
reduction                               RS lane
``finalize_model_grads``                the same, by the same caller, after the step
======================================  ======================================================

The switches mean what they mean there. Without ``overlap_grad_reduce`` nothing is reduced before
``finalize_model_grads``; without ``overlap_param_gather`` the optimizer has gathered. No schedule
calls ``no_sync``: all microbatches of a step are one accumulation, reduced at its end.

Sums are bit for bit those of ``forward_backward_no_pipelining``: a microbatch's gradient of a
parameter is added to ``main_grad`` as a whole. Autograd brings it whole; of an output layer that
several heads share, delayed gradients come one by one, and are summed first, until the node's end.
(A weight that two nodes use is theirs to share by value: ``ModelParts.shared_weights``.)
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from enum import Enum
from typing import final
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fsdp_hooks.adapters.megatron_ddp_buckets import (
    INSTALL_HINT,
    Bucket,
    BucketGroup,
    BucketLanes,
    DdpUnit,
)
from fsdp_hooks.adapters.megatron_ddp_refused import refuse_unsupported
from fsdp_hooks.lifecycle import Driver, ShardingStats
from fsdp_hooks.streams import StreamKind, StreamObserver
from fsdp_hooks.wgrad import Destination, GradSink

try:
    from megatron.core.distributed import DistributedDataParallel
except ImportError as error:
    raise ImportError(INSTALL_HINT) from error


class _Turn(Enum):
    """Whose DDP is."""

    REST = "rest"
    """Its own hooks': between steps of schedules."""
    TRAINING = "training"
    """A schedule's step: its nodes' backwards add to ``main_grad``."""
    EVALUATION = "evaluation"
    """A schedule's forwards alone: gradients are somebody else's, and stay as they are."""


@final
class MegatronDdp:
    """Implements ``RootLifecycle`` for a model that ``DistributedDataParallel`` wraps.

    ::

        parts = GPTParts(ddp.module)
        layers = [layer.module for layer in parts.layers]
        schedule = OverlapSchedule(parts, config, lifecycle=MegatronDdp(ddp, layers))

        ddp.zero_grad_buffer()
        schedule.step(microbatches, loss_fn)
        finalize_model_grads([ddp])
        optimizer.step()

    One of them serves all schedules of a model. At rest DDP's own hooks work as ever.

    Args:
        ddp: around the whole model.
        layers: those of the schedule, in order; each is a unit, and what is left is the root's.
        stream_kind: of the AG and RS lanes; None: CUDA streams on CUDA, worker threads on CPU.

    Raises:
        ValueError: DDP has settings that a schedule cannot follow, or that are not tested; a layer
            is not a part of the model, or shares a parameter with another.
    """

    reduces_each_microbatch = False

    def __init__(
        self,
        ddp: DistributedDataParallel,
        layers: Sequence[nn.Module],
        *,
        stream_kind: StreamKind | None = None,
    ) -> None:
        refuse_unsupported(ddp)
        roots, of_layers = _owned_params(ddp.module, layers)
        self._ddp = ddp
        self._lanes = BucketLanes(ddp, stream_kind)
        self._root_params = roots
        self._turn = _Turn.REST
        self._aside: dict[nn.Parameter, BucketGroup] = {}
        """While a schedule drives: what DDP's hooks look parameters up in at rest."""
        self._pending: dict[nn.Parameter, Tensor] = {}
        """In stream time: sums of the node's delayed gradients of root parameters."""
        self.postpones_end = False
        self.grad_sink: GradSink = self
        self.root_unit = DdpUnit("root", self._lanes, self._holding(roots), self._add_pending)
        names = {module: name for name, module in ddp.module.named_modules()}
        self._units: Mapping[nn.Module, DdpUnit] = {
            layer: DdpUnit(names[layer], self._lanes, self._holding(params), None)
            for layer, params in zip(layers, of_layers, strict=True)
        }
        handles = [
            param.register_post_accumulate_grad_hook(_Door(self)) for param in ddp.params_with_grad
        ]
        finalize(self, _remove, handles)  # a script may ask for a new schedule at every step

    def _holding(self, params: frozenset[nn.Parameter]) -> Sequence[Bucket]:
        return [b for b in self._lanes.buckets if not params.isdisjoint(b.group.params)]

    # ---- RootLifecycle ------------------------------------------------------------------------

    @property
    def strategy(self) -> str:
        """``optim`` where parameters are gathered once a step under forward; else ``no_shard``:
        they are there, as the optimizer has gathered them, or nobody has to."""
        return "optim" if self._lanes.gathers else "no_shard"

    @property
    def stats(self) -> ShardingStats:
        """Counters of collectives under a schedule; that of a bucket group counts once."""
        return self._lanes.stats

    @property
    def inner_units(self) -> Sequence[DdpUnit]:
        """The layers'."""
        return tuple(self._units.values())

    def unit_of(self, module: nn.Module) -> DdpUnit | None:
        """A layer's unit."""
        return self._units.get(module)

    def observe(self, observer: StreamObserver | None) -> None:
        """Let ``observer`` see the AG and RS lanes."""
        self._lanes.observe(observer)

    def begin(self, driver: Driver) -> None:
        """Set DDP's hooks aside.

        Raises:
            RuntimeError: another step is at work; the last one's gradients were not finalized, or
                not zeroed since; or gradients are not to be reduced (``no_sync``).
        """
        if not self._ddp.param_to_bucket_group:
            raise RuntimeError(
                "a step begins while a schedule is at work on this model; let its step end first"
            )
        turn = _Turn.TRAINING if torch.is_grad_enabled() else _Turn.EVALUATION
        if turn is _Turn.TRAINING:
            self._check_gradients_at_rest()
        # DDP's forward and backward hooks pass over parameters that are not in this mapping.
        self._aside, self._ddp.param_to_bucket_group = self._ddp.param_to_bucket_group, {}
        self._turn = turn
        self._lanes.begin()

    def _check_gradients_at_rest(self) -> None:
        groups = [bucket.group for bucket in self._lanes.buckets]
        if self._lanes.reduces and not all(group.is_last_microbatch for group in groups):
            raise RuntimeError(
                "a step begins within no_sync, and a schedule's step reduces all of its "
                "microbatches' gradients at its end; leave no_sync first"
            )
        if any(group.grad_reduce_handle is not None for group in groups):
            state = "are still being reduced"
        elif any(group.grad_reduce_finished for group in groups):
            state = "are still there, reduced"
        else:
            return
        raise RuntimeError(
            f"a step begins, and the last one's gradients {state}; after each step call "
            "finalize_model_grads and optimizer.step, and ddp.zero_grad_buffer before the next"
        )

    def pre_backward(self, microbatch: int) -> None:
        """In stream time: the contributions that follow are of another node."""
        self._add_pending()

    def end(self) -> None:
        """Wait for what was issued, and let DDP's hooks work again. Gradients are in ``main_grad``,
        to be finalized as after megatron-core's own ``forward_backward_func``."""
        self._lanes.wait()
        assert not self._pending, "the root's last node is sealed"
        if self._turn is _Turn.EVALUATION:
            self._forget_gathers()
        self._hand_back()

    def abort(self) -> None:
        """Drain the lanes and zero the gradients: DDP is as at the start of an iteration.

        What was in ``main_grad`` before this step goes, too. An evaluation that fails has no
        gradients, and leaves those of training.
        """
        with ExitStack() as undo:  # all of it, whatever fails on the way; the last one first
            undo.callback(self._hand_back)
            undo.callback(self._forget_gathers)
            if self._turn is _Turn.TRAINING:
                # Behind the reductions' end, which may write what it zeroes.
                undo.callback(self._drop_gradients)
                for bucket in self._lanes.buckets:
                    undo.callback(bucket.drain_reduction)
            for bucket in self._lanes.buckets:
                undo.callback(bucket.drain_gather)
            self._lanes.drain()

    def _forget_gathers(self) -> None:
        """Else DDP gathers again only after the next ``finalize_model_grads``, and the optimizer
        may step before: on gradients that were there, or as a script goes on after a failure."""
        if self._lanes.gathers:
            self._ddp.reset_param_sync_dispatch_state()

    def _drop_gradients(self) -> None:
        self._pending.clear()
        for param in self._ddp.params_with_grad:
            param.grad = None
        self._ddp.zero_grad_buffer()

    def _hand_back(self) -> None:
        if self._turn is not _Turn.REST:
            self._ddp.param_to_bucket_group, self._aside = self._aside, {}
            self._turn = _Turn.REST

    def refresh_compute_weights(self) -> None:
        """The optimizer writes them, between steps."""

    def collect_postponed(self) -> None:
        """Only a schedule brings delayed weight gradients here."""

    def end_postponed(self) -> None:
        """Only a schedule brings delayed weight gradients here."""

    # ---- contributions, in stream time --------------------------------------------------------

    @property
    def is_driven(self) -> bool:
        """Whether a schedule's step is under way."""
        return self._turn is not _Turn.REST

    def add(self, weight: nn.Parameter, grad: Tensor) -> None:
        """A delayed weight gradient (``GradSink``).

        Raises:
            RuntimeError: no step of a schedule is under way.
        """
        self._check_driven()
        if weight not in self._root_params:
            _main_grad(weight).add_(grad)
            return
        held = self._pending.get(weight)
        self._pending[weight] = grad if held is None else held.add_(grad)

    def _add_pending(self) -> None:
        for param, grad in self._pending.items():
            _main_grad(param).add_(grad)
        self._pending.clear()

    def destination(self, weight: nn.Parameter) -> Destination:
        """A fused one is added to ``main_grad`` itself, as megatron-core's
        ``gradient_accumulation_fusion`` adds it. Raises as ``add``."""
        self._check_driven()
        return Destination(_main_grad(weight), is_fresh=False)

    def _check_driven(self) -> None:
        if not self.is_driven:
            raise RuntimeError(
                "a weight gradient is brought to DDP, and no step that it belongs to is under way; "
                "delay and fuse weight gradients in a schedule's step only, and give all schedules "
                "of a model the same MegatronDdp"
            )


@final
class _Door:
    """What autograd calls once it has added a gradient to a parameter: before DDP's own hook, which
    then finds nothing. Holds the core weakly, as garbage collection does not see hooks."""

    __slots__ = ("_core",)

    def __init__(self, core: MegatronDdp) -> None:
        self._core = ref(core)

    def __call__(self, param: Tensor) -> None:
        core = self._core()
        if core is None or not core.is_driven:
            return
        assert isinstance(param, nn.Parameter), "hooks are on parameters"
        grad, param.grad = param.grad, None
        # None: the weight gradient is delayed, or fused; the sink takes it.
        if grad is not None and not _is_added(param):
            _main_grad(param).add_(grad)


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _main_grad(param: nn.Parameter) -> Tensor:
    """Where DDP sums the gradients of a step; its dtype may be wider."""
    return param.main_grad  # pyright: ignore[reportAttributeAccessIssue] (DDP sets it)


def _is_added(param: nn.Parameter) -> bool:
    """Whether a fused kernel has added the gradient to ``main_grad``, and what autograd carries is
    a placeholder: DDP's own test (``_make_backward_post_hook``). The second mark is optional."""
    is_added: bool = param.grad_added_to_main_grad  # pyright: ignore[reportAttributeAccessIssue]
    return is_added and not vars(param).get("zero_out_wgrad", False)


def _owned_params(
    module: nn.Module, layers: Sequence[nn.Module]
) -> tuple[frozenset[nn.Parameter], list[frozenset[nn.Parameter]]]:
    """The root's parameters, and each layer's.

    Raises:
        ValueError: a layer is no part of the module, or shares a parameter with what is not its.
    """
    names = {param: name for name, param in module.named_parameters()}
    of_layers = [frozenset(layer.parameters()) for layer in layers]
    others = list(module.modules())
    for index, layer in enumerate(layers):
        inside = set(layer.modules())
        if layer not in others:
            raise ValueError(
                f"layer {index} ({type(layer).__name__}) is not a part of the module that DDP "
                "wraps, or is in another layer; give the layers of ddp.module"
            )
        others = [other for other in others if other not in inside]
    roots = frozenset(param for part in others for param in part.parameters(recurse=False))
    seen: set[nn.Parameter] = set()
    for params in (roots, *of_layers):
        if shared := sorted(names[param] for param in params & seen):
            raise ValueError(
                f"{', '.join(shared)}: shared by a layer and another, or by a layer and what is "
                "outside of all; a schedule reduces each layer on its own. Share none"
            )
        seen |= params
    return roots, of_layers
