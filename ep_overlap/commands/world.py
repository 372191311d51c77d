"""The ranks of a command-line run: process groups, links, and a model sharded over them.

On CPU every group is a ``LinkGroup``: it measures each collective and, on demand, paces it. Each
model gets groups of its own, because a process group belongs to one stream.
"""

import os
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from time import perf_counter
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ep_overlap.commands.arguments import DeviceChoice
from ep_overlap.links.group import LinkGroup, new_link_group
from ep_overlap.links.speed import LinkSpeed, Wire
from ep_overlap.links.times import CollectiveKind
from fsdp_hooks.collectives import new_torch_group

GROUP_TIMEOUT: Final = timedelta(minutes=5)


@final
@dataclass(frozen=True, kw_only=True)
class World:
    """This process among the ranks of the run."""

    rank: int
    size: int
    device: torch.device
    speed: LinkSpeed | None
    """Of every link; None: as fast as they are."""
    control: ProcessGroup
    """For results and clocks; not timed, used by the main thread alone."""
    links: list[LinkGroup] = field(default_factory=list)
    """All that were made, in order."""
    reusable: dict[tuple[tuple[int, ...], str], ProcessGroup] | None = None
    """Groups by ranks and name, of models that run one after another; None: each model gets its
    own."""

    def new_group(
        self, ranks: Sequence[int], *, name: str, kind: CollectiveKind | None, wire: Wire | None
    ) -> ProcessGroup:
        """A group for one lane; only its members call."""
        if self.reusable is None:
            return self._made(ranks, name=name, kind=kind, wire=wire)
        key = tuple(ranks), name
        if key not in self.reusable:
            self.reusable[key] = self._made(ranks, name=name, kind=kind, wire=wire)
        return self.reusable[key]

    def _made(
        self, ranks: Sequence[int], *, name: str, kind: CollectiveKind | None, wire: Wire | None
    ) -> ProcessGroup:
        if self.device.type == "cuda":
            return new_torch_group(ranks, name)
        link = new_link_group(
            ranks,
            name=name,
            kind=kind,
            speed=self.speed,
            wire=None if self.speed is None else wire,
            timeout=GROUP_TIMEOUT,
        )
        self.links.append(link)
        return link

    def now_s(self) -> float:
        """The time, once all work that was issued is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return perf_counter()

    def mean(self, values: Sequence[float]) -> list[float]:
        """Elementwise mean over ranks."""
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.control)
        return (total / self.size).tolist()

    def gathered(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values


@contextmanager
def open_world(device: DeviceChoice, *, speed: LinkSpeed | None) -> Generator[World]:
    """Join the run's ranks (environment as torchrun sets it) until the block ends.

    Raises:
        ValueError: ``--device cuda`` without a GPU.
    """
    chosen = choose_device(device)
    with ExitStack() as stack:
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        else:
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        dist.init_process_group(_backend(chosen), timeout=GROUP_TIMEOUT)
        stack.callback(dist.destroy_process_group)
        yield World(
            rank=dist.get_rank(),
            size=dist.get_world_size(),
            device=chosen,
            speed=speed,
            control=new_torch_group(range(dist.get_world_size()), "control", backend="gloo"),
        )


def choose_device(choice: DeviceChoice) -> torch.device:
    """This rank's device.

    Raises:
        ValueError: a GPU is asked for and there is none.
    """
    if choice is DeviceChoice.CPU or (
        choice is DeviceChoice.AUTO and not torch.cuda.is_available()
    ):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            "--device cuda: expected a GPU, got a torch that sees none; use --device cpu"
        )
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def _backend(device: torch.device) -> str:
    """gloo, and NCCL for GPUs unless ranks share one, which NCCL refuses."""
    if device.type == "cpu":
        return "gloo"
    num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return "gloo" if num_local_ranks > torch.cuda.device_count() else "cpu:gloo,cuda:nccl"


@dataclass(frozen=True, kw_only=True)
class Meshes:
    """Data-parallel meshes: of ordinary parameters, and of a rank's experts."""

    dense: DeviceMesh
    expert: DeviceMesh

    @classmethod
    def of(cls, world: World, expert_parallel_size: int) -> "Meshes":
        """Dense: all ranks. Expert: the ranks that hold the same experts. Collective."""
        everyone = list(range(world.size))
        same_experts = everyone[world.rank % expert_parallel_size :: expert_parallel_size]
        return cls(
            dense=_mesh(world, everyone, "dense"), expert=_mesh(world, same_experts, "expert")
        )


def _mesh(world: World, ranks: list[int], name: str) -> DeviceMesh:
    return DeviceMesh.from_group(new_torch_group(ranks, f"mesh-{name}"), world.device.type)


def local_part(tensor: Tensor | nn.Parameter) -> Tensor:
    """What this rank holds of a sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
