"""Whether gathers and reductions run under compute on GPUs, as torch's profiler saw it.

Four units on the standard path, forward and backward::

    comp  F0 F1 F2 F3 B3 B2 B1 B0        ag  0 1 2 3 . 2 1 0 .        rs  . . . . . 3 2 1 0

Of the seven gathers the first has nothing before it, and the last unit stays for its backward; of
the four reductions the last has nothing after it: 6 and 3 can run under GEMMs, and must. (The test
is that of Megatron-FSDP's communication overlap; there any one overlap is enough.)
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile

from fsdp_hooks.lifecycle import lifecycle_of
from fsdp_hooks.precision import MixedPrecision
from fsdp_hooks.shard import fully_shard

NUM_UNITS: Final = 4
NUM_GATHERS, NUM_REDUCTIONS = 6, 3
"""That can be hidden."""
PROFILED_STEPS: Final = (0, 2)
WIDTH: Final = 8192
"""Of each unit's four square matrices: 537 MB in bfloat16, so that a gather takes a millisecond."""
NUM_MATRICES: Final = 4
NUM_ROWS: Final = 8192
_SMALL_WIDTH: Final = 256

_GEMMS: Final = ("gemm", "nvjet", "cutlass", "xmma")
_HOLD: Final = "hold"
"""The kernel that stands for the wire in an emulated world."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One that ran on the device."""

    name: str
    stream: int
    start_us: float
    end_us: float

    @property
    def is_gemm(self) -> bool:
        """Of cuBLAS or CUTLASS."""
        return any(word in self.name.lower() for word in _GEMMS)

    @property
    def is_collective(self) -> bool:
        """NCCL's, or an emulated link's."""
        return self.name.startswith("ncclDevKernel") or self.name == _HOLD

    def overlaps(self, others: Sequence["Kernel"]) -> bool:
        """Whether it ran at the same time as one of them."""
        return any(o.start_us < self.end_us and self.start_us < o.end_us for o in others)


@dataclass(frozen=True, kw_only=True)
class Overlaps:
    """What was found in one step."""

    gathers: tuple[bool, ...]
    """For each, in the order of time, whether it ran under a GEMM."""
    reductions: tuple[bool, ...]
    num_streams: int
    """Of gathers, reductions and GEMMs together."""

    @property
    def are_all_there(self) -> bool:
        """Whether all that can be hidden is, each kind on a stream of its own."""
        return (
            self.gathers == (False, *(True,) * NUM_GATHERS)
            and self.reductions == (*(True,) * NUM_REDUCTIONS, False)
            and self.num_streams == len({"comp", "ag", "rs"})
        )

    def __str__(self) -> str:
        """``6 of 6 gathers (-++++++), 3 of 3 reductions (+++-), 3 streams``: each in its place."""
        gathers, reductions = _marks(self.gathers), _marks(self.reductions)
        return (
            f"{sum(self.gathers)} of {NUM_GATHERS} gathers ({gathers}), {sum(self.reductions)} of "
            f"{NUM_REDUCTIONS} reductions ({reductions}), {self.num_streams} streams"
        )


def _marks(are_hidden: Sequence[bool]) -> str:
    return "".join("+" if is_hidden else "-" for is_hidden in are_hidden)


def overlaps_of(kernels: Sequence[Kernel]) -> Overlaps:
    """Of one step's kernels, in the order of time."""
    gemms = [kernel for kernel in kernels if kernel.is_gemm]
    collectives = [kernel for kernel in kernels if kernel.is_collective]
    ag_stream = collectives[0].stream if collectives else None  # a step begins with a gather
    gathers = [kernel for kernel in collectives if kernel.stream == ag_stream]
    reductions = [kernel for kernel in collectives if kernel.stream != ag_stream]
    return Overlaps(
        gathers=tuple(kernel.overlaps(gemms) for kernel in gathers),
        reductions=tuple(kernel.overlaps(gemms) for kernel in reductions),
        num_streams=len({kernel.stream for kernel in (*gemms[:1], *collectives)}),
    )


def profiled_overlaps(mesh: DeviceMesh) -> dict[int, Overlaps]:
    """By number of step. Collective over the mesh, of GPUs, which must hold two ranks or more."""
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    model = _sharded(mesh, device, width=WIDTH)
    lifecycle_of(model)
    x = torch.randn(NUM_ROWS, WIDTH, device=device, dtype=torch.bfloat16)
    # At first use cuBLAS takes its memory, and a kernel is loaded, which waits for those that run:
    # the products' own, and the sharding core's. Steps are to be alike.
    _block(WIDTH).to(device=device, dtype=torch.bfloat16)(x).float().mean().backward()
    small = x[:_SMALL_WIDTH, :_SMALL_WIDTH]
    _sharded(mesh, device, width=_SMALL_WIDTH)(small).float().mean().backward()
    torch.cuda.synchronize()
    dist.barrier(mesh.get_group())
    found: dict[int, Overlaps] = {}
    for step in range(max(PROFILED_STEPS) + 1):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            model(x).float().mean().backward()
            torch.cuda.synchronize()
        model.zero_grad()
        if step in PROFILED_STEPS:
            found[step] = overlaps_of(_kernels(profiler))
    return found


def _sharded(mesh: DeviceMesh, device: torch.device, *, width: int) -> nn.Module:
    model = nn.Sequential(*(_block(width) for _ in range(NUM_UNITS)))
    model.to(device=device, dtype=torch.bfloat16)
    for unit in model:
        fully_shard(unit, mesh=mesh, mp=MixedPrecision())
    fully_shard(model, mesh=mesh, mp=MixedPrecision())
    return model


def _block(width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(NUM_MATRICES)))


def _kernels(profiler: Any) -> list[Kernel]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = [
        Kernel(
            name=event["name"],
            stream=event["args"]["stream"],
            start_us=event["ts"],
            end_us=event["ts"] + event["dur"],
        )
        for event in events
        if event.get("cat") == "kernel"
    ]
    return sorted(kernels, key=lambda kernel: kernel.start_us)
