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


@dataclass(frozen=True, kw_only=True)
class Communicators:
    """One mesh's communicators, one for each lane that talks over it."""

    gather: Communicator
    reduce: Communicator
    rescue: Communicator
    """For the safety net, which gathers in the compute lane: it must not share the AG lane's."""


@final
class Counters:
    """Mutable counters; each field is written by one lane only, so none needs a lock."""

    def __init__(self) -> None:
        self.num_all_gathers = 0
        self.num_reduce_scatters = 0
        self.num_all_reduces = 0
        self.hook_misses = 0
        self.unsharded_bytes = 0
        self.peak_unsharded_bytes = 0

    def add_unsharded(self, num_bytes: int) -> None:
        """Unsharded storage came, or (negative) went."""
        self.unsharded_bytes += num_bytes
        self.peak_unsharded_bytes = max(self.peak_unsharded_bytes, self.unsharded_bytes)

    def read(self) -> ShardingStats:
        """The counters as of now."""
        return ShardingStats(
            num_all_gathers=self.num_all_gathers,
            num_reduce_scatters=self.num_reduce_scatters,
            num_all_reduces=self.num_all_reduces,
            hook_misses=self.hook_misses,
            unsharded_bytes=self.unsharded_bytes,
            peak_unsharded_bytes=self.peak_unsharded_bytes,
        )


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
