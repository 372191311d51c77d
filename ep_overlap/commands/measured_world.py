"""The ranks that ``bench --against megatron`` measures on: one of an emulated world, or real ones.

What differs: how many there are, whose time is the slowest, and what is known of their links. An
emulated world knows what they take, and can be run without them; of real GPUs the profiler tells
how long the exchanges of a step without overlap are on the device.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, Protocol, final

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ep_overlap.commands.arguments import BenchArguments
from ep_overlap.commands.world import World, choose_device, open_world
from ep_overlap.links.emulated import register_emulated_backend
from ep_overlap.links.emulated_speed import EmulatedLinks, parse_emulated_links
from ep_overlap.links.emulation import Emulation
from ep_overlap.links.times import CollectiveKind, CollectiveSpan
from ep_overlap.models.groups import COUNTS_GROUP

Step = Callable[[], None]

_EXCHANGE_KERNEL: Final = "SendRecv"
"""In the name of NCCL's kernel for all-to-alls."""


class MeasuredWorld(Protocol):
    """See the module's docstring."""

    device: torch.device
    rank: int
    size: int

    @property
    def has_compute_alone(self) -> bool:
        """Whether a step can be run as if links took no time."""
        ...

    def without_links(self) -> AbstractContextManager[None]:
        """Until the block ends, links take no time."""
        ...

    def link_s(self, standard_step: Step) -> float | None:
        """What the exchanges of a step without overlap take; None: nobody can tell. Collective."""
        ...

    def num_gathers(self, step: Step) -> int | None:
        """Of weights, from other ranks, in a step; None: nobody counts them. Collective."""
        ...

    def slowest(self, seconds: float) -> float:
        """Of all ranks. Collective."""
        ...

    def together(self) -> None:
        """Wait until all ranks, and their devices, are here."""
        ...

    def describe(self) -> str:
        """For reports."""
        ...


@final
class EmulatedWorld:
    """One rank of it."""

    def __init__(self, device: torch.device, size: int, emulation: Emulation) -> None:
        self.device = device
        self.rank = 0
        self.size = size
        self._emulation = emulation
        self._links = emulation.links

    @property
    def has_compute_alone(self) -> bool:
        """Yes."""
        return True

    @contextmanager
    def without_links(self) -> Generator[None]:
        """Local copies are still made."""
        self._emulation.links = EmulatedLinks()
        try:
            yield
        finally:
            self._emulation.links = self._links

    def link_s(self, standard_step: Step) -> float | None:
        """Latency, and bytes over rate; local copies apart."""
        spans = self._spans(standard_step)
        exchanges = [span for span in spans if span.kind is CollectiveKind.A2A]
        rate = self._links.a2a_bytes_per_s
        return sum(self._links.latency_s + span.wire_bytes / rate for span in exchanges)

    def num_gathers(self, step: Step) -> int:
        """Neither the dispatchers', of token counts, are among them, nor those of one rank alone:
        megatron-core's FSDP v1 gathers experts that no other rank shares, too."""
        gathers = (span for span in self._spans(step) if span.kind is CollectiveKind.AG)
        return sum(span.wire_bytes > 0 and span.group != COUNTS_GROUP for span in gathers)

    def _spans(self, step: Step) -> list[CollectiveSpan]:
        self._emulation.timed = True
        self._emulation.clear()
        step()
        spans = self._emulation.spans()
        self._emulation.timed = False
        return spans

    def slowest(self, seconds: float) -> float:
        """There is one."""
        return seconds

    def together(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def describe(self) -> str:
        """It says that it is emulated."""
        return self._links.describe(self.size)


@final
class RealWorld:
    """Ranks of this host, or of torchrun's."""

    def __init__(self, world: World) -> None:
        self.device = world.device
        self.rank = world.rank
        self.size = world.size
        self._world = world

    @property
    def has_compute_alone(self) -> bool:
        """No: real exchanges take their time."""
        return False

    def without_links(self) -> AbstractContextManager[None]:
        """Not to be had."""
        return nullcontext()

    def link_s(self, standard_step: Step) -> float | None:
        """On GPUs the time of NCCL's exchange kernels, waiting for other ranks with it."""
        if self.device.type != "cuda":
            return None
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            standard_step()
            torch.cuda.synchronize()
        exchanges_us = [
            event.device_time
            for event in profiler.events() or ()
            if event.device_type == DeviceType.CUDA and _EXCHANGE_KERNEL in event.name
        ]
        (mean_us,) = self._world.mean([sum(exchanges_us)])
        return mean_us / 1e6 or None

    def num_gathers(self, step: Step) -> None:
        """Nobody counts them."""

    def slowest(self, seconds: float) -> float:
        """Of all ranks. Collective."""
        return max(self._world.gathered(seconds))

    def together(self) -> None:
        """A message over the group for results."""
        self._world.now_s()
        self._world.gathered(None)

    def describe(self) -> str:
        """Ranks and backend."""
        backend = dist.get_backend()
        return f"{self.size} ranks over {'NCCL' if 'nccl' in backend else 'gloo'}"


@contextmanager
def measured_world(args: BenchArguments) -> Generator[MeasuredWorld]:
    """Join it until the block ends: ``--emulate none`` is this run's own ranks.

    Raises:
        ValueError: ``--device cuda`` without a GPU; ``--emulate`` does not parse.
    """
    if args.emulates_nothing:
        with open_world(args.device, speed=None) as world:
            yield RealWorld(world)
        return
    device = choose_device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    emulation = Emulation(parse_emulated_links(args.emulate))
    register_emulated_backend()
    dist.init_process_group(
        "emulated",
        rank=0,
        world_size=args.emulate_world,
        store=dist.HashStore(),  # pyright: ignore[reportPrivateImportUsage]
        pg_options=emulation,
    )
    try:
        yield EmulatedWorld(device, args.emulate_world, emulation)
    finally:
        dist.destroy_process_group()
