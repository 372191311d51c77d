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

from fsdp_hooks.caller_stream import CallerStream
from fsdp_hooks.collectives import (
    Communicator,
    GroupCommunicator,
    NewGroup,
    connect,
    new_torch_group,
)
from fsdp_hooks.counters import Counters
from fsdp_hooks.lifecycle import Driver
from fsdp_hooks.mesh import GroupMesh
from fsdp_hooks.streams import StreamKind, default_kind, new_stream


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Where a root's lanes and communicators come from; given to ``fully_shard`` of the root.

    Raises:
        ValueError: ``prefetch_depth`` is negative.
    """

    stream_kind: StreamKind | None = None
    """None: CUDA streams on CUDA, worker threads on CPU."""
    new_group: NewGroup = new_torch_group
    """Makes the process groups of the AG and RS lanes."""
    prefetch_depth: int = 1
    """Units gathered ahead of the one in use, on the standard path."""
    max_unsharded_bytes: int | None = None
    """On the standard path nothing is gathered ahead that would bring the unsharded storage of all
    units above this. None: the depth alone bounds it."""

    def __post_init__(self) -> None:
        if self.prefetch_depth < 0:
            raise ValueError(
                f"prefetch_depth is {self.prefetch_depth}; expected at least 0, which gathers "
                "nothing ahead"
            )


@dataclass(frozen=True, kw_only=True)
class Communicators:
    """The communicators of some ranks, one for each lane that talks over them."""

    gather: Communicator
    reduce: Communicator
    rescue: Communicator
    """For the safety net, which gathers in the compute lane: it must not share the AG lane's."""


@final
class ShardContext:
    """See the module's docstring.

    Args:
        meshes: the meshes of all units' groups, in an order that is the same on every rank.
        device: of the parameters.
        grad_divisor: of the sum of gradients over all ranks.
        reduces_each_microbatch: whether each microbatch's gradients are reduced on their own.
        runtime: where streams and process groups come from.
    """

    def __init__(
        self,
        *,
        meshes: Sequence[GroupMesh],
        device: torch.device,
        grad_divisor: int,
        reduces_each_microbatch: bool,
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
        self.reduces_each_microbatch = reduces_each_microbatch
        self.driver = Driver.REST
        self.microbatch = 0
        """In stream time: whose contributions the compute lane is making."""
        self.is_last_microbatch = True
        """On the standard path: whether the next backward ends the accumulation."""
        self.compares_order = False
        """At issue: whether ranks tell each other which unit they are at before they gather or
        reduce it. In the first step they do: a rank that uses units in an order of its own would
        hang, or mix one unit's numbers with another's."""
        self.prefetch_depth = runtime.prefetch_depth
        self.max_unsharded_bytes = runtime.max_unsharded_bytes
        self.counters = Counters()
        self._communicators = _make_communicators(
            meshes, runtime.new_group, self.counters, device=device
        )

    def communicators(self, mesh: GroupMesh) -> tuple[Communicators | None, Communicators | None]:
        """Over the inner and over the outer ranks; None for a rank alone, which talks to nobody."""
        made = self._communicators
        inner, outer = (made[r.members] if r.size > 1 else None for r in (mesh.inner, mesh.outer))
        return inner, outer

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """For each number the largest of all ranks'. Collective, along every mesh in turn: it is
        of all ranks if one mesh is, as that of the dense parameters."""
        found = list(numbers)

        def agree() -> None:  # in the lane that the communicator belongs to
            nonlocal found
            for members, made in self._communicators.items():
                if len(members) > 1:
                    found = [max(all_) for all_ in zip(*made.gather.exchange(found), strict=True)]

        self.ag.run(agree, word="agree on numbers").wait()
        return found


def _make_communicators(
    meshes: Sequence[GroupMesh], new_group: NewGroup, counters: Counters, *, device: torch.device
) -> Mapping[tuple[int, ...], Communicators]:
    made: dict[tuple[int, ...], Communicators] = {}
    for ranks in (ranks for mesh in meshes for ranks in mesh.dimensions):
        # A rank alone makes groups too: torch names a group after how many its process holds, so
        # a rank that had made fewer than others could not meet them in the next.
        if ranks.members in made:
            continue
        suffix = "-".join(map(str, ranks.members))
        groups = {
            lane: new_group(ranks.members, f"{lane}-{suffix}")
            for lane in ("gather", "reduce", "rescue")
        }
        if ranks.size > 1:
            for lane in ("gather", "reduce"):  # a rescue is a miss: it may take its time
                connect(groups[lane], device)
        made[ranks.members] = Communicators(
            **{lane: GroupCommunicator(group, counters) for lane, group in groups.items()}
        )
    return made
