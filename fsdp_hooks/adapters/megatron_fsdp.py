"""megatron-core's own FSDP v1 (``FullyShardedDataParallel``) behind the life cycle of a schedule.

FSDP v1 and the optimizer over it stay what they are: buckets, collectives, scaling, main weights.
What changes within a step is who calls them. Under megatron-core's own overlapped schedule hooks of
every sub-module gather, on demand where a backward is under way, and the schedule calls four
handles by hand; here a plan does all of it.

=================================  ============================  =================================
handle                             FSDP v1's function            called by its own drivers
=================================  ============================  =================================
``root.begin``                     ``_replace_param_with_raw_``  at the start of ``forward``; once
                                   ``if_needed``                 by its schedule
``unit.unshard``                   ``all_gather_and_wait_``      pre-hooks of forward, hooks on
                                   ``parameters_ready``          outputs, both with prefetch
``unit.reshard``, after forward    ``post_backward_release_``    hooks on a layer and its input;
and after backward alike           ``module``                    its schedule, after each layer
``root.pre_backward``              none: it marks modules so     ``pre_backward``: a hook on the
                                   that hooks do not prefetch    root's output; its schedule
``unit.reduce``                    ``get_main_grad``,            hooks on parameters, and
                                   ``reduce_gradients``          ``post_backward`` for what is left
``root.end``                       none: all is reduced          ``finish_grad_sync``, by
                                                                 ``finalize_model_grads``
``root.abort``                     ``synchronize_param_gather``  never
                                   ``zero_grad_buffer``
=================================  ============================  =================================

``finalize_model_grads`` comes after the step, from the same caller as ever, and so does the swap
back to sharded parameters, which it makes. Gradients are bit for bit those of
``forward_backward_no_pipelining``: each microbatch's are reduced on their own and added up in that
order, or, without sharded gradients, added up and reduced once.

Where the optimizer starts the next gathers itself (``fsdp_all_gather_in_start_param_sync``), it
goes as far ahead as FSDP v1 prefetches, and a budget of unsharded units holds only from there on.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from enum import Enum
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from fsdp_hooks.adapters.megatron_ddp_buckets import INSTALL_HINT
from fsdp_hooks.adapters.megatron_fsdp_hooks import switch_of
from fsdp_hooks.adapters.megatron_fsdp_refused import owned_params, refuse_unsupported
from fsdp_hooks.adapters.megatron_fsdp_unit import FsdpLanes, MegatronFsdpUnit
from fsdp_hooks.lifecycle import Driver, ShardingStats
from fsdp_hooks.streams import StreamKind, StreamObserver
from fsdp_hooks.wgrad import Destination, GradSink

try:
    from megatron.core.distributed import FullyShardedDataParallel
    from megatron.core.distributed.fsdp.src.megatron_fsdp import MegatronFSDP
except ImportError as error:
    raise ImportError(INSTALL_HINT) from error


class _Turn(Enum):
    """Whose FSDP is."""

    REST = "rest"
    """Its own hooks': between steps of schedules."""
    TRAINING = "training"
    """A schedule's step."""
    EVALUATION = "evaluation"
    """A schedule's forwards alone: gradients are somebody else's, and stay as they are."""


@final
class MegatronFsdp:
    """Implements ``RootLifecycle`` for a model that ``FullyShardedDataParallel`` wraps.

    ::

        parts = GPTParts(model)  # before it is wrapped, or of the innermost .module
        layers = [layer.module for layer in parts.layers]
        schedule = OverlapSchedule(parts, config, lifecycle=MegatronFsdp(fsdp, layers))

        fsdp.zero_grad_buffer()
        schedule.step(microbatches, loss_fn)
        finalize_model_grads([fsdp])
        optimizer.step()

    At rest FSDP v1's own hooks work as ever.

    Args:
        fsdp: around the whole model.
        layers: those of the schedule, in order; each is a unit, and what is left is the root's.
        stream_kind: of the AG and RS lanes; None: CUDA streams on CUDA, worker threads on CPU.

    Raises:
        ValueError: FSDP v1 has settings that a schedule cannot follow, or that are not tested; or
            the layers are not its units.
    """

    def __init__(
        self,
        fsdp: FullyShardedDataParallel,
        layers: Sequence[nn.Module],
        *,
        stream_kind: StreamKind | None = None,
    ) -> None:
        refuse_unsupported(fsdp, layers)
        self._fsdp: MegatronFSDP = cast(Any, fsdp).module
        owned = owned_params(self._fsdp, layers)
        self._lanes = FsdpLanes(self._fsdp, stream_kind)
        self._turn = _Turn.REST
        self._microbatch = 0
        self._switch = switch_of(self._fsdp)
        self.reduces_each_microbatch = self._lanes.reduces_each_microbatch
        self.postpones_end = False
        self.grad_sink: GradSink = self
        buckets = {param: bucket for bucket in self._lanes.buckets for param in bucket.group.params}

        def unit(name: str, layer: nn.Module | None, params: Sequence[nn.Parameter]):
            released = layer if self.strategy == "optim_grads_params" else None
            its_buckets = {param: buckets[param] for param in params}
            return MegatronFsdpUnit(name, released, params, self._lanes, its_buckets)

        self.root_unit = unit("root", None, owned.roots)
        names = {module: name for name, module in self._fsdp.module.named_modules()}
        self._units: Mapping[nn.Module, MegatronFsdpUnit] = {
            layer: unit(names[layer], layer, params)
            for layer, params in zip(layers, owned.of_layers, strict=True)
        }
        self._unit_of: Mapping[nn.Parameter, MegatronFsdpUnit] = {
            param: unit for unit in self._all_units for param in unit.params
        }

    # ---- RootLifecycle ------------------------------------------------------------------------

    @property
    def strategy(self) -> str:
        """Of FSDP v1."""
        return self._lanes.strategy

    @property
    def stats(self) -> ShardingStats:
        """Counters of collectives under a schedule; those of a bucket count once."""
        return self._lanes.counters.read()

    @property
    def inner_units(self) -> Sequence[MegatronFsdpUnit]:
        """The layers'."""
        return tuple(self._units.values())

    @property
    def _all_units(self) -> Sequence[MegatronFsdpUnit]:
        return (self.root_unit, *self.inner_units)

    def unit_of(self, module: nn.Module) -> MegatronFsdpUnit | None:
        """A layer's unit."""
        return self._units.get(module)

    def observe(self, observer: StreamObserver | None) -> None:
        """Let ``observer`` see the AG and RS lanes."""
        self._lanes.observe(observer)

    def begin(self, driver: Driver) -> None:
        """Compute parameters onto the modules; FSDP v1's hooks stand aside.

        Raises:
            RuntimeError: another step is at work on this model; or gradients that are reduced once
                a step are those of the last one, not finalized, or not zeroed since.
        """
        if self._switch.driver is not None:
            raise RuntimeError(
                "a step begins while a schedule is at work on this model; let its step end first"
            )
        turn = _Turn.TRAINING if torch.is_grad_enabled() else _Turn.EVALUATION
        if turn is _Turn.TRAINING and not self.reduces_each_microbatch:
            self._check_gradients_at_rest()
        # Private, and what megatron-core's own schedule calls; the public start_param_sync gathers.
        self._fsdp._replace_param_with_raw_if_needed()  # pyright: ignore[reportPrivateUsage]
        self._switch.driver = self
        self._turn = turn
        for unit in self._all_units:
            unit.begin()
        self._lanes.begin()

    def _check_gradients_at_rest(self) -> None:
        """Where they are reduced in place, a sum that holds reduced ones is wrong."""
        named = self._fsdp.param_and_grad_buffer.optimizer_named_parameters
        if self._fsdp.microbatch_count:
            state = "are not finalized"
        elif any(param.grad is not None for _, param in named):
            state = "are still there, reduced"
        else:
            return
        raise RuntimeError(
            f"a step begins, and the last one's gradients {state}; after each step call "
            "finalize_model_grads and optimizer.step, and fsdp.zero_grad_buffer before the next"
        )

    def pre_backward(self, microbatch: int) -> None:
        """In stream time: the contributions that follow belong to this microbatch."""
        self._microbatch = microbatch

    def end(self) -> None:
        """Wait for what was issued, and let FSDP v1's hooks work again. Reduced gradients are in
        its buffers, to be finalized as after megatron-core's own ``forward_backward_func``."""
        self._lanes.wait()
        assert not any(unit.holds_contributions for unit in self._all_units), "all is sealed"
        if self._turn is _Turn.TRAINING:
            self._fsdp.microbatch_count += 1  # as its ``post_backward``; finalizing zeroes it
        self._hand_back()

    def abort(self) -> None:
        """Drain the lanes, release all, zero the gradients: FSDP v1 is as at the start of an
        iteration.

        What earlier steps have left in its buffers goes, too. An evaluation that fails has no
        gradients, and leaves those of training.
        """
        with ExitStack() as undo:  # all of it, whatever fails on the way; the last one first
            undo.callback(self._hand_back)
            for unit in self._all_units:
                undo.callback(unit.forget)
            if self._turn is _Turn.TRAINING:
                undo.callback(self._drop_gradients)
            undo.callback(self._lanes.forget_gathers)
            self._lanes.drain()

    def _drop_gradients(self) -> None:
        for param in self._unit_of:
            param.grad = None
        self._lanes.forget_reductions()
        self._fsdp.microbatch_count = 0

    def _hand_back(self) -> None:
        if self._switch.driver is self:
            self._switch.driver = None
            self._turn = _Turn.REST

    def refresh_compute_weights(self) -> None:
        """The optimizer writes them, between steps."""

    def collect_postponed(self) -> None:
        """Only a schedule brings delayed weight gradients here."""

    def end_postponed(self) -> None:
        """Only a schedule brings delayed weight gradients here."""

    # ---- contributions, in stream time --------------------------------------------------------

    def take(self, param: nn.Parameter) -> None:
        """What autograd has brought, before FSDP v1's hook, which stands aside."""
        grad, param.grad = param.grad, None
        if grad is not None:  # None: delayed, or fused; the sink takes it
            self._unit_of[param].hold(self._microbatch, param, grad)

    def add(self, weight: nn.Parameter, grad: Tensor) -> None:
        """A delayed weight gradient (``GradSink``).

        Raises:
            RuntimeError: no step of a schedule is under way.
        """
        self._check_driven()
        self._unit_of[weight].hold(self._microbatch, weight, grad)

    def destination(self, weight: nn.Parameter) -> Destination:
        """A fused one gets a tensor of its own, which the reduction copies. Raises as ``add``."""
        self._check_driven()
        return self._unit_of[weight].destination(self._microbatch, weight)

    def _check_driven(self) -> None:
        if self._turn is not _Turn.TRAINING:
            raise RuntimeError(
                "a weight gradient is brought to FSDP, and no step that it belongs to is under "
                "way; delay and fuse weight gradients in a schedule's step only, and give all "
                "schedules of a model the same MegatronFsdp"
            )
