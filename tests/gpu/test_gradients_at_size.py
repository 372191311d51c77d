"""A GPTModel of usual widths, Transformer Engine's layers, bf16: every gradient and loss of ours is
megatron-core's, bit for bit. One rank of an emulated world of eight."""

import gc

import gradients_at_size
import torch
import torch.distributed as dist
from gpu_support import take_gpu
from gradients_at_size import Found, Sizes

from ep_overlap.testing import RankPool


def found() -> list[Found]:
    """On the first rank alone."""
    if dist.get_rank() != 0:
        return []
    results = gradients_at_size.found(Sizes(), take_gpu())
    gc.collect()
    torch.cuda.empty_cache()  # the ranks are used again
    return results


def test_every_way_is_bit_for_bit_megatrons_standard_step(gpu_ranks2: RankPool) -> None:
    results, _ = gpu_ranks2.run(found)
    assert [(each.name, each.differences) for each in results] == [
        ("plain", ()),
        ("plain, delayed", ()),
        ("paired", ()),
        ("paired, delayed", ()),
        ("paired, fused", ()),
        ("paired, fused, delayed", ()),
    ]
    for each in results:  # what did nothing would be equal, too
        assert (each.num_written > 0) == ("fused" in each.name), each.name
        if "fused" not in each.name:
            assert (each.num_added > 0) == ("delayed" in each.name), each.name
