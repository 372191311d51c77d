"""Units of FSDP v1's parameter groups, gathered, released and reduced in lanes of a schedule.

FSDP v1 keeps parameters and gradients in groups ("buckets"): with ``optim_grads_params`` those of a
layer, its experts' apart; else whatever is alike, over many layers. A bucket is gathered with the
first of its units, and reduced with the last. What a collective reads, writes and scales is FSDP
v1's own business, and so is which bucket is gathered already.

Its pipelines are not made for several threads. The AG lane alone calls the one for parameters, the
RS lane alone the one for gradients::

    comp  autograd's, or a delayed, gradient -> held by the unit and its microbatch
    comp  ``seal``                           -> handed to the buckets
    rs    ``REDUCE.unit``                    -> copied to the bucket's input, reduced, added
"""

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fsdp_hooks.adapters.megatron_ddp_buckets import INSTALL_HINT
from fsdp_hooks.caller_stream import CallerStream
from fsdp_hooks.counters import Counters
from fsdp_hooks.lifecycle import NOTHING_DONE, UnitState
from fsdp_hooks.streams import Event, StreamKind, StreamObserver, default_kind, new_stream
from fsdp_hooks.wgrad import Destination

try:
    from megatron.core.distributed.fsdp.src.megatron_fsdp import MegatronFSDP
    from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import (
        BucketStatus,
        ParameterGroup,
    )
except ImportError as error:
    raise ImportError(INSTALL_HINT) from error

Grads = dict[nn.Parameter, Tensor]


@final
class Bucket:
    """A parameter group, and what of this step has come for it."""

    def __init__(self, index: int, group: ParameterGroup) -> None:
        self.index = index
        self.group = group
        self.num_units = 0
        """How many units have parameters in it."""
        self.begin()

    def begin(self) -> None:
        """Nothing has come yet."""
        self._missing: dict[int, int] = {}
        self._after: dict[int, list[Event]] = {}
        self.sealed: dict[int, Grads] = {}
        """In stream time: by reduction of the step, what it reads."""

    def is_complete_with(self, reduction: int, after: Sequence[Event]) -> bool:
        """One more unit has given its part of a reduction, behind these events; whether it was the
        last."""
        self._after.setdefault(reduction, []).extend(after)
        missing = self._missing[reduction] = self._missing.get(reduction, self.num_units) - 1
        return missing == 0

    def take_after(self, reduction: int) -> list[Event]:
        """Behind what it is complete."""
        return self._after.pop(reduction)

    def pack(self, reduction: int) -> list[Tensor]:
        """On the RS lane: fill the reduction's input, as FSDP v1's ``_grad_acc``. Returns what was
        read."""
        grads = self.sealed.pop(reduction, {})
        buffer = self.group.main_grad_buffer
        assert buffer is not None, "only buckets that take gradients are reduced"
        for param in self.group.params:
            grad = grads.get(param)
            if buffer.is_data_distributed:
                # An input of its own for each reduction: what memory held must go.
                main_grad = main_grad_of(param)
                _ = main_grad.zero_() if grad is None else main_grad.copy_(grad)
            elif grad is not None:
                main_grad_of(param).add_(grad)
        return list(grads.values())


def main_grad_of(param: nn.Parameter) -> Tensor:
    """Where FSDP v1 wants a gradient."""
    return cast(Any, param).get_main_grad()


@final
class FsdpLanes:
    """The AG and RS lanes, and all buckets of one FSDP.

    Where FSDP v1 gathers and reduces over one process group, both are one lane: a group's
    collectives must be issued by one thread, in one order. Gathers that are to run beside
    reductions need groups of their own: ``dp_cp_ag``, ``expt_dp_ag`` of the process groups given.

    Args:
        fsdp: whose buckets.
        stream_kind: of the lanes; None: CUDA streams on CUDA, worker threads on CPU.
    """

    def __init__(self, fsdp: MegatronFSDP, stream_kind: StreamKind | None) -> None:
        self.fsdp = fsdp
        self.counters = Counters()
        self.strategy: str = fsdp.data_parallel_sharding_strategy
        self.reduces_each_microbatch = self.strategy in ("optim_grads", "optim_grads_params")
        groups = fsdp.param_and_grad_buffer.parameter_groups
        self.buckets = tuple(Bucket(index, group) for index, group in enumerate(groups))
        device = next(iter(fsdp.raw_param.values())).device
        kind = stream_kind or default_kind(device)
        self.runs_after_launch = kind is StreamKind.CUDA
        # High priority: the parameter that compute waits for next should not queue behind it.
        self.ag = new_stream(kind, "ag", device=device, priority=-1)
        self.rs = self.ag
        if not _have_one_group(groups):
            self.rs = new_stream(kind, "rs", device=device)
        self._caller = CallerStream(device)
        self.last_reduction: Event = NOTHING_DONE
        """Of this step, in the order of issue."""

    def observe(self, observer: StreamObserver | None) -> None:
        """Let ``observer`` see the lanes."""
        for stream in (self.ag, self.rs, self._caller):
            stream.observe(observer)

    def begin(self) -> None:
        """Nothing has come yet."""
        self.last_reduction = NOTHING_DONE
        for bucket in self.buckets:
            bucket.begin()
        self._caller.hold(self.ag)  # protects the shards that the optimizer may still write

    def wait(self) -> None:
        """Let the caller wait for all that was issued.

        Raises:
            BaseException: on CPU, what a lane's work raised.
        """
        self._caller.wait_stream(self.ag)
        self._caller.wait_stream(self.rs)

    def drain(self) -> None:
        """After a failure: empty the lanes."""
        for stream in (self.ag, self.rs):
            stream.synchronize()
            stream.reset()

    # ---- queued work --------------------------------------------------------------------------

    @torch.no_grad()
    def gather(self, params: Sequence[nn.Parameter], buckets: Sequence[Bucket]) -> None:
        """Those that are there, or under way, are not gathered again."""
        gathers = self.fsdp.all_gather_pipeline
        status = [gathers.bucket_status[gathers.get_bucket_key(b.index, False)] for b in buckets]
        self.fsdp.all_gather_and_wait_parameters_ready(list(params), prefetch=False)
        absent = (BucketStatus.EMPTY, BucketStatus.PRESERVED)
        self.counters.add(all_gathers=sum(each in absent for each in status))

    @torch.no_grad()
    def reduce(self, buckets: Sequence[Bucket], reduction: int) -> list[Tensor]:
        """Returns what was read."""
        read: list[Tensor] = []
        if self.reduces_each_microbatch:
            for bucket in buckets:
                read += bucket.pack(reduction)
        reductions = self.fsdp.grad_reduce_pipeline
        params: list[Tensor] = [param for bucket in buckets for param in bucket.group.params]
        reductions.reduce_gradients(params)
        # The wait makes the event mean what it says, and frees the input.
        reductions.wait_for_previous_grad_reduce(0)
        scatters = self.strategy != "no_shard"
        num = len(buckets)
        self.counters.add(reduce_scatters=num * scatters, all_reduces=num * (not scatters))
        return read

    # ---- after a failure, with drained lanes --------------------------------------------------

    def forget_gathers(self) -> None:
        """Wait for what other ranks have started, too, and release all units."""
        gathers = self.fsdp.all_gather_pipeline
        for key, status in gathers.bucket_status.items():
            if status is BucketStatus.COMMUNICATING:
                # None: it failed before FSDP v1 had an event of it.
                event, _ = gathers.param_gather_event_map.pop(key, (None, None))
                if event is not None:
                    event.wait()
                gathers.bucket_status[key] = BucketStatus.READY_TO_USE
        self.fsdp.synchronize_param_gather()

    def forget_reductions(self) -> None:
        """As ``forget_gathers``, and zero the gradients."""
        self.last_reduction = NOTHING_DONE  # it may hold a failure, and the frames it came from
        reductions = self.fsdp.grad_reduce_pipeline
        reductions.wait_for_previous_grad_reduce(0)
        for ready in reductions.bucket_grad_ready_params:
            ready.clear()
        reductions.reset()
        self.fsdp.zero_grad_buffer()


@final
class MegatronFsdpUnit:
    """Implements ``UnitLifecycle``: some parameters, wherever their buckets are.

    Args:
        name: the module's name from the root.
        module: a layer that FSDP v1 releases as a whole; None: parameters stay once gathered.
        params: the compute parameters ("raw").
        lanes: of the root.
        buckets: those that hold them.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module | None,
        params: Sequence[nn.Parameter],
        lanes: FsdpLanes,
        buckets: Mapping[nn.Parameter, Bucket],
    ) -> None:
        self.name = name
        self._module = module
        self.params = tuple(params)
        self._lanes = lanes
        self._bucket_of = buckets
        unique = {bucket.index: bucket for bucket in buckets.values()}
        self._buckets = tuple(unique[index] for index in sorted(unique))
        self._reduced = tuple(b for b in self._buckets if b.group.main_grad_buffer is not None)
        for bucket in self._reduced:
            bucket.num_units += 1
        self.releases = module is not None
        self.gathers = lanes.strategy != "no_shard"
        self._being_reduced: deque[list[Tensor]] = deque()
        self.begin()

    def begin(self) -> None:
        """Nothing is issued yet."""
        self._state = self._stream_state = UnitState.SHARDED
        self._gathered: Event = NOTHING_DONE
        self._num_sealed = self._num_reductions = 0
        self._held: dict[int, Grads] = {}
        self._being_reduced.clear()

    def forget(self) -> None:
        """After a failure: what is gathered was released whole, and nothing is held."""
        if self.releases and self._stream_state is UnitState.UNSHARDED:
            self._lanes.counters.add(unsharded_bytes=-self._unsharded_bytes)
        self.begin()

    @property
    def state(self) -> UnitState:
        """The issued state; parameters that are not gathered are always there."""
        return self._state if self.gathers else UnitState.UNSHARDED

    @property
    def holds_contributions(self) -> bool:
        """Whether gradients wait for ``seal``."""
        return bool(self._held)

    @property
    def _unsharded_bytes(self) -> int:
        buffers = [bucket.group.model_weight_buffer for bucket in self._buckets]
        return sum(
            buffer.bucket_index.size * buffer.dtype.itemsize
            for buffer in buffers
            if buffer is not None and buffer.is_data_distributed
        )

    # ---- issued by the host -------------------------------------------------------------------

    def unshard(self, *, after: Sequence[Event] = (), word: str | None = None) -> Event:
        """Issue the gather of the buckets that are not there. Idempotent."""
        if self.gathers and self._state is UnitState.SHARDED:
            self._state = UnitState.UNSHARDED
            word = word or f"UNSHARD.{self.name}"
            self._gathered = self._lanes.ag.run(self._fill, word=word, after=after)
        return self._gathered

    def reshard(self, *, after: Sequence[Event] = (), word: str | None = None) -> Event:
        """Issue the release of a layer; what is no layer stays, as FSDP v1 keeps it.

        Raises:
            RuntimeError: the unit is not unsharded.
        """
        if not self.releases:
            return NOTHING_DONE
        if self._state is UnitState.SHARDED:
            raise RuntimeError(
                f"reshard() of unit {self.name}: its state is sharded, expected unsharded; call "
                "unshard() first"
            )
        self._state = UnitState.SHARDED
        return self._lanes.ag.run(self._release, word=word or f"RESHARD.{self.name}", after=after)

    def reduce(self, *, after: Sequence[Event] = (), word: str | None = None) -> Event:
        """Issue the reductions of the buckets that are complete with this unit.

        Where none is, the event is that of the last reduction before: whoever waits for it takes
        all reductions so far to be done, and lets go of what they read.
        """
        reduction = self._num_reductions
        self._num_reductions += 1
        ready = [b for b in self._reduced if b.is_complete_with(reduction, after)]
        if not ready:
            self._keep([])
            return self._lanes.last_reduction
        behind = [event for bucket in ready for event in bucket.take_after(reduction)]
        work = partial(self._reduce, ready, reduction)
        word = word or f"REDUCE.{self.name}"
        self._lanes.last_reduction = self._lanes.rs.run(work, word=word, after=behind)
        return self._lanes.last_reduction

    def drop_reduced(self) -> None:
        """Let go of what the oldest reduction read: the comp lane has waited for it."""
        if self._being_reduced:
            self._being_reduced.popleft()

    # ---- in stream time, on the compute lane --------------------------------------------------

    def ensure(self) -> None:
        """The safety net: FSDP v1 has one process group for all gathers, which is the AG lane's, so
        none can be made here.

        Raises:
            RuntimeError: the parameters are not there.
        """
        if self.gathers and self._stream_state is UnitState.SHARDED:
            self._lanes.counters.add(hook_misses=1)
            raise RuntimeError(
                f"unit {self.name} is read while it is sharded, and only the AG lane may gather "
                "it; put its UNSHARD ahead of the reader"
            )

    def hold(self, microbatch: int, param: nn.Parameter, grad: Tensor) -> None:
        """A contribution, whoever made it; its memory is the unit's now."""
        grads = self._held.setdefault(microbatch, {})
        before = grads.get(param)
        grads[param] = grad if before is None else before.add_(grad)

    def destination(self, microbatch: int, param: nn.Parameter) -> Destination:
        """Where a fused contribution is written or added."""
        grads = self._held.setdefault(microbatch, {})
        if (before := grads.get(param)) is not None:
            return Destination(before, is_fresh=False)
        buffer = self._bucket_of[param].group.main_grad_buffer
        assert buffer is not None, "a frozen weight has no gradient"
        grads[param] = made = torch.empty(
            param.shape,
            dtype=torch.promote_types(param.dtype, buffer.dtype),
            device=param.device,
        )
        return Destination(made, is_fresh=True)

    def seal(self, microbatch: int, *, is_last: bool) -> None:
        """This microbatch's contributions are complete. Reduced once a step, they are added up
        where FSDP v1 adds them up."""
        grads = self._held.pop(microbatch, {})
        reduction = self._num_sealed
        self._num_sealed += 1
        for param, grad in grads.items():
            if self._lanes.reduces_each_microbatch:
                self._bucket_of[param].sealed.setdefault(reduction, {})[param] = grad
            else:
                main_grad_of(param).add_(grad)

    # ---- queued work --------------------------------------------------------------------------

    def _fill(self) -> None:
        self._lanes.gather(self.params, self._buckets)
        if self.releases and self._stream_state is UnitState.SHARDED:
            self._lanes.counters.add(unsharded_bytes=self._unsharded_bytes)
        self._stream_state = UnitState.UNSHARDED

    def _release(self) -> None:
        assert self._module is not None, "only layers are released"
        self._lanes.fsdp.post_backward_release_module(self._module)
        self._lanes.counters.add(unsharded_bytes=-self._unsharded_bytes)
        self._stream_state = UnitState.SHARDED

    def _reduce(self, buckets: Sequence[Bucket], reduction: int) -> None:
        self._keep(self._lanes.reduce(buckets, reduction))

    def _keep(self, read: list[Tensor]) -> None:
        if self._lanes.runs_after_launch:
            # Given back now, the comp lane would write over what the RS lane has yet to read.
            self._being_reduced.append(read)


def _have_one_group(groups: Sequence[ParameterGroup]) -> bool:
    """Whether gathers and reductions share a process group of several ranks."""
    weights = [g.model_weight_buffer for g in groups if g.model_weight_buffer is not None]
    grads = [g.main_grad_buffer for g in groups if g.main_grad_buffer is not None]
    gathering, reducing = (
        {cast(ProcessGroup, buffer.data_parallel_group) for buffer in buffers}
        for buffers in (weights, grads)
    )
    return any(group.size() > 1 for group in gathering & reducing)
