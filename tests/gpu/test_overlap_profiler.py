"""6 of 6 gathers and 3 of 3 reductions run under GEMMs, in the first step and in the third.

With a GPU for each rank the collectives are NCCL's; on one GPU they are those of an emulated world
of two, whose hold kernel stands for the wire.
"""

import torch
import torch.distributed as dist
from gpu_support import take_gpu
from torch.distributed.device_mesh import init_device_mesh

from ep_overlap.links.emulated import register_emulated_backend
from ep_overlap.links.emulated_speed import EmulatedLinks
from ep_overlap.links.emulation import Emulation
from ep_overlap.report.overlap_proof import PROFILED_STEPS, Overlaps, profiled_overlaps
from ep_overlap.testing import RankPool


def found() -> dict[int, Overlaps]:
    """Collective."""
    take_gpu()
    return profiled_overlaps(init_device_mesh("cuda", (dist.get_world_size(),)))


def alone() -> dict[int, Overlaps]:
    """On one rank of an emulated world of two."""
    links = EmulatedLinks(a2a_bytes_per_s=200e9, dp_bytes_per_s=200e9, latency_s=20e-6)
    register_emulated_backend()
    dist.init_process_group(
        "emulated", rank=0, world_size=2, store=dist.HashStore(), pg_options=Emulation(links)
    )
    try:
        return found()
    finally:
        dist.destroy_process_group()


def test_gathers_and_reductions_run_under_gemms(gpu_ranks2: RankPool) -> None:
    has_gpus = torch.cuda.device_count() >= 2
    for overlaps in gpu_ranks2.run(found) if has_gpus else [alone()]:
        assert tuple(overlaps) == PROFILED_STEPS
        assert [str(step) for step in overlaps.values() if not step.are_all_there] == []
