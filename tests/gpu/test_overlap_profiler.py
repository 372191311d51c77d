"""Overlap on the standard path, as torch's profiler saw it: 6 of 6 gathers and 3 of 3 reductions
run under GEMMs, on streams of their own, in the first step and in the third.

Four units on two ranks. With a GPU for each the collectives are NCCL's; on one GPU they are those
of an emulated world of two, whose hold kernel stands for the wire.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_support import take_gpu
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from ep_overlap.links.emulated import register_emulated_backend
from ep_overlap.links.emulated_speed import EmulatedLinks
from ep_overlap.links.emulation import Emulation
from ep_overlap.testing import RankPool
from fsdp_hooks.lifecycle import lifecycle_of
from fsdp_hooks.precision import MixedPrecision
from fsdp_hooks.shard import fully_shard

NUM_UNITS = 4
WIDTH, NUM_ROWS, NUM_MATRICES = 8192, 8192, 4
PROFILED_STEPS = (0, 2)

_GEMMS = ("gemm", "nvjet", "cutlass", "xmma")
_HOLD = "hold"


@dataclass(frozen=True, kw_only=True)
class Kernel:
    name: str
    stream: int
    start_us: float
    end_us: float

    @property
    def is_gemm(self) -> bool:
        return any(word in self.name.lower() for word in _GEMMS)

    @property
    def is_collective(self) -> bool:
        return self.name.startswith("ncclDevKernel") or self.name == _HOLD

    def overlaps(self, others: Sequence["Kernel"]) -> bool:
        return any(o.start_us < self.end_us and self.start_us < o.end_us for o in others)


def block() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_MATRICES)))


def profiled() -> dict[int, list[Kernel]]:
    """By step: every kernel that ran. Collective."""
    device = take_gpu()
    torch.manual_seed(0)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    model = nn.Sequential(*(block() for _ in range(NUM_UNITS)))
    model.to(device=device, dtype=torch.bfloat16)
    for unit in model:
        fully_shard(unit, mesh=mesh, mp=MixedPrecision())
    fully_shard(model, mesh=mesh, mp=MixedPrecision())
    lifecycle_of(model)
    x = torch.randn(NUM_ROWS, WIDTH, device=device, dtype=torch.bfloat16)
    # Kernels are loaded, and cuBLAS takes its memory, at first use; steps are to be alike.
    block().to(device=device, dtype=torch.bfloat16)(x).float().mean().backward()
    torch.cuda.synchronize()
    dist.barrier()
    found: dict[int, list[Kernel]] = {}
    for step in range(max(PROFILED_STEPS) + 1):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            model(x).float().mean().backward()
            torch.cuda.synchronize()
        model.zero_grad()
        if step in PROFILED_STEPS:
            found[step] = kernels_of(profiler)
    return found


def kernels_of(profiler: Any) -> list[Kernel]:
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


def check(kernels: Sequence[Kernel]) -> None:
    gemms = [kernel for kernel in kernels if kernel.is_gemm]
    collectives = [kernel for kernel in kernels if kernel.is_collective]
    ag_stream = collectives[0].stream
    gathers = [kernel for kernel in collectives if kernel.stream == ag_stream]
    reductions = [kernel for kernel in collectives if kernel.stream != ag_stream]
    assert len(gemms) >= 3 * NUM_UNITS * NUM_MATRICES - 1, "x wants no gradient"
    assert len({ag_stream, gemms[0].stream, *(kernel.stream for kernel in reductions)}) == 3
    # The first unit's gather has nothing before it; the last unit stays for its backward.
    assert [kernel.overlaps(gemms) for kernel in gathers] == [False] + [True] * 6
    # The first unit's reduction has nothing after it.
    assert [kernel.overlaps(gemms) for kernel in reductions] == [True] * 3 + [False]


def alone() -> dict[int, list[Kernel]]:
    """On one rank of an emulated world of two."""
    links = EmulatedLinks(a2a_bytes_per_s=50e9, dp_bytes_per_s=50e9, latency_s=20e-6)
    register_emulated_backend()
    dist.init_process_group(
        "emulated", rank=0, world_size=2, store=dist.HashStore(), pg_options=Emulation(links)
    )
    try:
        return profiled()
    finally:
        dist.destroy_process_group()


def test_gathers_and_reductions_run_under_gemms(gpu_ranks2: RankPool) -> None:
    has_gpus = torch.cuda.device_count() >= 2
    for found in gpu_ranks2.run(profiled) if has_gpus else [alone()]:
        assert tuple(found) == PROFILED_STEPS
        for kernels in found.values():
            check(kernels)
