"""What all units of one root share: lanes, communicators, counters, and who drives.

::

    comp  (the schedule's, or the caller)   compute, accumulate, seal
    ag    UNSHARD.L1 RESHARD.L0 ...         gathers and releases, in one order
    rs    REDUCE.L3 REDUCE.L2 ...           allocate, pack, launch

Unsharded storage is allocated and freed on the AG lane, in stream order after its last reader;
so no memory is tied to another stream, and the number of live units is bounded by the order of
that one queue.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_hooks.collectives import Communicator, GroupCommunicator, NewGroup, new_torch_group
from fsdp_hooks.lifecycle import Driver, ShardingStats
from fsdp_hooks.streams import CallerStream, StreamKind, default_kind, new_stream


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Where a root's lanes and communicators come from; given to ``fully_shard`` of the root."""

    stream_kind: StreamKind | None = None
    """None: CUDA streams on CUDA, worker threads on CPU."""
    new_group: NewGroup = new_torch_group
    """Makes the process groups of the AG and RS lanes."""
    prefetch_depth: int = 1
    """Units gathered ahead of the one in use, on the standard path."""
    max_unsharded_bytes: int | None = None
    """On the standard path nothing is gathered ahead that would bring the unsharded storage of all
    units above this. None: the depth alone bounds it."""


@dataclass(frozen=True, kw_only=True)
class Communicators:
    """One mesh's communicators, one for each lane that talks over it."""

    gather: Communicator
    reduce: Communicator
    rescue: Communicator
    """For the safety net, which gathers in the compute lane: it must not share the AG lane's."""


@final
class Counters:
    """Mutable counters; the AG, RS and comp lanes write them, each under the lock."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._stats = ShardingStats()

    def add(
        self,
        *,
        all_gathers: int = 0,
        reduce_scatters: int = 0,
        all_reduces: int = 0,
        hook_misses: int = 0,
        unsharded_bytes: int = 0,
    ) -> None:
        """Count what happened."""
        with self._lock:
            stats = self._stats
            live = stats.unsharded_bytes + unsharded_bytes
            self._stats = ShardingStats(
                num_all_gathers=stats.num_all_gathers + all_gathers,
                num_reduce_scatters=stats.num_reduce_scatters + reduce_scatters,
                num_all_reduces=stats.num_all_reduces + all_reduces,
                hook_misses=stats.hook_misses + hook_misses,
                unsharded_bytes=live,
                peak_unsharded_bytes=max(stats.peak_unsharded_bytes, live),
            )

    def read(self) -> ShardingStats:
        """The counts so far."""
        return self._stats


@final
class ShardContext:
    """See the module's docstring.

    Args:
        meshes: the meshes of all units' groups, in an order that is the same on every rank.
    """

    def __init__(
        self,
        *,
        meshes: Sequence[DeviceMesh],
        device: torch.device,
        grad_divisor: int,
        runtime: Runtime,
    ) -> None:
        kind = runtime.stream_kind or default_kind(device)
        self.runs_after_launch = kind is StreamKind.CUDA
        """Whether work runs after the host has launched it."""
        # High priority: the parameter that compute waits for next should not queue behind it.
        self.ag = new_stream(kind, "ag", device=device, priority=-1)
        self.rs = new_stream(kind, "rs", device=device)
        self.caller = CallerStream(device)
        self.grad_divisor = grad_divisor
        self.driver = Driver.REST
        self.microbatch = 0
        """In stream time: whose contributions the compute lane is making."""
        self.is_last_microbatch = True
        """On the standard path: whether the next backward ends the accumulation."""
        self.counters = Counters()
        self._communicators = _make_communicators(meshes, runtime.new_group)

    def communicators(self, mesh: DeviceMesh) -> Communicators:
        """Those of a mesh's ranks."""
        return self._communicators[ranks_of(mesh)]


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """Global ranks of a one-dimensional mesh, in mesh order."""
    return tuple(dist.get_process_group_ranks(mesh.get_group()))


def _make_communicators(
    meshes: Sequence[DeviceMesh], new_group: NewGroup
) -> Mapping[tuple[int, ...], Communicators]:
    made: dict[tuple[int, ...], Communicators] = {}
    for mesh in meshes:
        ranks = ranks_of(mesh)
        if ranks in made:
            continue
        made[ranks] = Communicators(
            **{
                lane: GroupCommunicator(new_group(ranks, f"{lane}-{'-'.join(map(str, ranks))}"))
                for lane in ("gather", "reduce", "rescue")
            }
        )
    return made
