"""DDP's buckets, gathered and reduced in lanes of a schedule.

A bucket may hold parameters of several units, and a unit be in several buckets. A bucket is reduced
with the last of its units and gathered ahead of the first, once a step: in the order of the plan,
which is the same on every rank. What a collective reads, writes and scales is DDP's own business.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, final

import torch

from fsdp_hooks.caller_stream import CallerStream
from fsdp_hooks.counters import Counters
from fsdp_hooks.lifecycle import NOTHING_DONE, ShardingStats, UnitState
from fsdp_hooks.streams import Event, StreamKind, StreamObserver, default_kind, new_stream

INSTALL_HINT: Final = "this adapter needs megatron-core 0.19: pip install 'megatron-core<0.20'"

try:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.distributed.param_and_grad_buffer import (
        _ParamAndGradBucketGroup,  # pyright: ignore[reportPrivateUsage]
    )
except ImportError as error:
    raise ImportError(INSTALL_HINT) from error

BucketGroup = _ParamAndGradBucketGroup
"""Some buckets of DDP's flat buffers, whose collectives are launched together."""


@final
class Bucket:
    """A bucket group of DDP, and what of this step has been issued for it."""

    __slots__ = ("_missing", "after", "gather_index", "group", "num_units")

    def __init__(self, group: BucketGroup) -> None:
        self.group = group
        self.num_units = 0
        """How many units have parameters in it."""
        self.begin()

    def begin(self) -> None:
        """Nothing is issued yet."""
        self._missing = self.num_units
        self.after: list[Event] = []
        """The last contributions of the units so far."""
        self.gather_index: int | None = None
        """Which of the step's gathers filled it."""

    def is_complete_with(self, after: Sequence[Event]) -> bool:
        """One more unit has given its gradients, behind these events; whether it was the last."""
        self.after += after
        self._missing -= 1
        return self._missing == 0

    # After a failure: wait for what other ranks have started, too, and forget it.

    def drain_gather(self) -> None:
        """Of the parameters."""
        handle, self.group.param_gather_handle = self.group.param_gather_handle, None
        if handle is not None:
            handle.wait()

    def drain_reduction(self) -> None:
        """Of the gradients."""
        handle, self.group.grad_reduce_handle = self.group.grad_reduce_handle, None
        if handle is not None:
            handle.wait()


@final
class BucketLanes:
    """The AG and RS lanes, and all buckets of one DDP.

    Args:
        ddp: whose buckets.
        stream_kind: of the lanes; None: CUDA streams on CUDA, worker threads on CPU.
    """

    def __init__(self, ddp: DistributedDataParallel, stream_kind: StreamKind | None) -> None:
        self._ddp = ddp
        self.gathers = ddp.ddp_config.overlap_param_gather
        """Whether parameters are gathered under forward; else the optimizer has done it."""
        self.reduces = ddp.ddp_config.overlap_grad_reduce
        """Whether gradients are reduced within the step; else ``finalize_model_grads`` does it."""
        device = next(ddp.module.parameters()).device
        kind = stream_kind or default_kind(device)
        # High priority: the parameter that compute waits for next should not queue behind it.
        self._ag = new_stream(kind, "ag", device=device, priority=-1)
        self._rs = new_stream(kind, "rs", device=device)
        self._caller = CallerStream(device)
        self._counters = Counters()
        groups = (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups)
        self.buckets = tuple(Bucket(group) for group in groups)
        self._gathered: list[Event] = []
        """Of this step, in the order of issue."""

    @property
    def stats(self) -> ShardingStats:
        """Counters."""
        return self._counters.read()

    def observe(self, observer: StreamObserver | None) -> None:
        """Let ``observer`` see the lanes."""
        for stream in (self._ag, self._rs, self._caller):
            stream.observe(observer)

    # ---- a step -------------------------------------------------------------------------------

    def begin(self) -> None:
        """Nothing is issued yet."""
        self._gathered.clear()
        for bucket in self.buckets:
            bucket.begin()
        self._caller.hold(self._ag)  # protects the shards that the optimizer may still write

    def gather(self, buckets: Sequence[Bucket], after: Sequence[Event], word: str) -> Event:
        """Issue the gathers of those whose turn has not come in this step yet. Returns the event
        behind which all of them are there."""
        ready = [bucket for bucket in buckets if bucket.gather_index is None]
        if ready:
            work = partial(self._gather, [bucket.group for bucket in ready])
            self._gathered.append(self._ag.run(work, word=word, after=after))
            for bucket in ready:
                bucket.gather_index = len(self._gathered) - 1
        # One lane, first in first out: the last event covers those before it.
        last = max((b.gather_index for b in buckets if b.gather_index is not None), default=None)
        return NOTHING_DONE if last is None else self._gathered[last]

    def reduce(self, buckets: Sequence[Bucket], after: Sequence[Event], word: str) -> Event:
        """Issue the reductions of those that have all their gradients with this unit's."""
        if not self.reduces:
            return NOTHING_DONE
        ready = [bucket for bucket in buckets if bucket.is_complete_with(after)]
        if not ready:
            return NOTHING_DONE
        # Gathers and reductions share DDP's process groups. In every plan the first reduction comes
        # behind the readers of all gathers; this says so: two lanes never use one group at once.
        behind = [event for bucket in ready for event in bucket.after] + self._gathered[-1:]
        work = partial(self._reduce, [bucket.group for bucket in ready])
        return self._rs.run(work, word=word, after=behind)

    def wait(self) -> None:
        """Let the caller wait for all that was issued.

        Raises:
            BaseException: on CPU, what a lane's work raised.
        """
        self._caller.wait_stream(self._ag)
        self._caller.wait_stream(self._rs)

    def drain(self) -> None:
        """After a failure: empty the lanes."""
        for stream in (self._ag, self._rs):
            stream.synchronize()
            stream.reset()

    # ---- queued work --------------------------------------------------------------------------

    @torch.no_grad()
    def _gather(self, groups: Sequence[BucketGroup]) -> None:
        """One that is there already, as the script has synchronized it, is not gathered again."""
        for group in groups:
            if not group.param_gather_dispatched:
                group.start_param_sync()
                self._counters.add(all_gathers=1)
        for group in groups:
            group.finish_param_sync(skip_next_bucket_dispatch=True)

    def _reduce(self, groups: Sequence[BucketGroup]) -> None:
        """The wait makes the event mean what it says. ``finish_grad_sync``, which waits again, is
        left to ``finalize_model_grads``."""
        scatters = self._ddp.ddp_config.use_distributed_optimizer and not self._ddp.force_all_reduce
        for group in groups:
            group.start_grad_sync(force_all_reduce=self._ddp.force_all_reduce)
            self._counters.add(reduce_scatters=int(scatters), all_reduces=int(not scatters))
        for group in groups:
            # None: the next one has finished it, as with ``reduce_scatter_with_fp32_accumulation``.
            if group.grad_reduce_handle is not None:
                group.grad_reduce_handle.wait()


@final
class DdpUnit:
    """Implements ``UnitLifecycle``: some parameters, wherever their buckets are. They stay there.

    Args:
        name: the module's name from the root.
        lanes: of the root.
        buckets: those that hold its parameters.
        on_seal: called in stream time when a microbatch's contributions are complete.
    """

    releases = False

    def __init__(
        self,
        name: str,
        lanes: BucketLanes,
        buckets: Sequence[Bucket],
        on_seal: Callable[[], None] | None,
    ) -> None:
        self.name = name
        self._lanes = lanes
        self._buckets = tuple(buckets)
        self._on_seal = on_seal
        for bucket in buckets:
            bucket.num_units += 1

    @property
    def state(self) -> UnitState:
        """Always unsharded: a gather fills what stays."""
        return UnitState.UNSHARDED

    @property
    def gathers(self) -> bool:
        """Whether an ``unshard`` asks other ranks, once a step."""
        return self._lanes.gathers

    def unshard(self, *, after: Sequence[Event] = (), word: str | None = None) -> Event:
        """Issue the gathers of the unit's buckets that this step has not gathered yet."""
        if not self.gathers:
            return NOTHING_DONE
        return self._lanes.gather(self._buckets, after, word or f"UNSHARD.{self.name}")

    def reshard(self, *, after: Sequence[Event] = (), word: str | None = None) -> Event:
        """Nothing is released."""
        return NOTHING_DONE

    def reduce(self, *, after: Sequence[Event] = (), word: str | None = None) -> Event:
        """Issue the reductions of the buckets that are complete with this unit; once a step."""
        return self._lanes.reduce(self._buckets, after, word or f"REDUCE.{self.name}")

    def drop_reduced(self) -> None:
        """Reductions read ``main_grad``, which stays."""

    def ensure(self) -> None:
        """Parameters stay."""

    def seal(self, microbatch: int, *, is_last: bool) -> None:
        """In stream time: this microbatch's contributions are complete."""
        if self._on_seal is not None:
            self._on_seal()
