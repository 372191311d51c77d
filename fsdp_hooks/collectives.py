"""The only caller of parameter and gradient collectives; swappable.

A communicator belongs to one lane: two collectives on one communicator run in the order in which
the host launches them, whatever their streams, so gathers and reductions have one each.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_hooks.counters import Counters

NewGroup = Callable[[Sequence[int], str], ProcessGroup]
"""``(global ranks, name) -> group``. Called by the members only."""


class Communicator(Protocol):
    """What the sharding core asks of a group of ranks. Calls return when the result is there
    (CPU), or when it is enqueued on the current stream (CUDA)."""

    def all_gather(self, output: Tensor, shard: Tensor) -> None:
        """``output[num_ranks * n]`` from every rank's ``shard[n]``."""
        ...

    def reduce_scatter(self, output: Tensor, whole: Tensor) -> None:
        """``output[n]``: this rank's shard of the sum over ranks of ``whole[num_ranks * n]``."""
        ...

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over ranks, in place."""
        ...

    def exchange[T](self, value: T) -> list[T]:
        """Every rank's value, in rank order. The host waits: for a first step, and not counted."""
        ...


@final
class GroupCommunicator:
    """A communicator over a torch process group (gloo, NCCL, or a ``LinkGroup``)."""

    def __init__(self, group: ProcessGroup, counters: Counters) -> None:
        self._group = group
        self._counters = counters

    def all_gather(self, output: Tensor, shard: Tensor) -> None:
        """See ``Communicator``."""
        dist.all_gather_into_tensor(output, shard, group=self._group)
        self._counters.add(all_gathers=1)

    def reduce_scatter(self, output: Tensor, whole: Tensor) -> None:
        """See ``Communicator``."""
        dist.reduce_scatter_tensor(output, whole, group=self._group)
        self._counters.add(reduce_scatters=1)

    def all_reduce(self, tensor: Tensor) -> None:
        """See ``Communicator``."""
        dist.all_reduce(tensor, group=self._group)
        self._counters.add(all_reduces=1)

    def exchange[T](self, value: T) -> list[T]:
        """See ``Communicator``."""
        values: list[T] = [value] * self._group.size()
        dist.all_gather_object(values, value, group=self._group)
        return values


def connect(group: ProcessGroup, device: torch.device) -> None:
    """Let NCCL connect the group's ranks; elsewhere nothing. Collective.

    Else it does so in the first collective of a kind, which holds the host for tenths of a second:
    in a first step, between two launches, so that the device runs dry.
    """
    if "nccl" not in dist.get_backend_config(group):
        return
    whole, shard = torch.zeros(group.size(), device=device), torch.zeros(1, device=device)
    dist.all_gather_into_tensor(whole, shard, group=group)
    dist.reduce_scatter_tensor(shard, whole, group=group)
    dist.all_reduce(shard, group=group)


def new_torch_group(ranks: Sequence[int], name: str, *, backend: str | None = None) -> ProcessGroup:
    """A plain process group; called by its members only. ``backend``: default the world's."""
    group = dist.new_group(
        list(ranks), backend=backend, use_local_synchronization=True, group_desc=name
    )
    assert isinstance(group, ProcessGroup), f"rank is not in {list(ranks)}"
    return group
