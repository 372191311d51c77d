"""The ranks of a group, seen from one of them.

A mesh of one dimension is shared out by the strategy. Of two dimensions (hybrid sharding) the
strategy shares out the second, inner one, and the first, outer one holds replicas, or shares out
main weights once more::

    DeviceMesh("cpu", [[0, 1],      inner ranks of rank 2: (2, 3): gather, reduce-scatter
                       [2, 3]])     outer ranks of rank 2: (0, 2): the sums of the inner shards

The order of dimensions is that of FSDP2's hybrid sharding.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Ranks that hold parts, or copies, of one tensor."""

    members: tuple[int, ...]
    """Global ranks, in order."""
    position: int
    """This rank's place among them."""

    @property
    def size(self) -> int:
        """How many."""
        return len(self.members)


@final
class GroupMesh:
    """See the module's docstring.

    Raises:
        ValueError: the mesh has more than two dimensions.
    """

    def __init__(self, device_mesh: DeviceMesh) -> None:
        if device_mesh.ndim > 2:
            raise ValueError(
                f"the mesh has {device_mesh.ndim} dimensions; expected 1, or 2 for hybrid sharding "
                "(replicas, shards)"
            )
        self.device_mesh = device_mesh

    @cached_property
    def inner(self) -> Ranks:
        """The ranks that the strategy's shards lie over."""
        return self._ranks(self.device_mesh.ndim - 1)

    @cached_property
    def outer(self) -> Ranks:
        """The ranks that hold the same inner shard; only this one on a mesh of one dimension."""
        if self.device_mesh.ndim == 1:
            return Ranks(members=(dist.get_rank(),), position=0)
        return self._ranks(0)

    @property
    def dimensions(self) -> tuple[Ranks, ...]:
        """Inner, and outer if the mesh has it: the same number on every rank."""
        return (self.inner,) if self.device_mesh.ndim == 1 else (self.inner, self.outer)

    def _ranks(self, dim: int) -> Ranks:
        group = self.device_mesh.get_group(dim)
        members = tuple(dist.get_process_group_ranks(group))
        return Ranks(members=members, position=self.device_mesh.get_local_rank(dim))


def is_primary(tensor: DTensor) -> bool:
    """Whether this rank's rows are those that count, in a norm or a checkpoint.

    Along a mesh dimension that replicates, every rank has the same: the first one's count.
    """
    place = tensor.device_mesh.get_coordinate()
    assert place is not None, "a rank of the mesh holds the tensor"
    return all(
        index == 0
        for index, placement in zip(place, tensor.placements, strict=True)
        if placement.is_replicate()
    )
