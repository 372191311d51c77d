"""The table of weight gradients on GPUs: overlap, delayed, fused, both, bit for bit.

``wgrad_table.py``'s, with local and Transformer Engine's layers, in float32 and bfloat16.
"""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import wgrad_table
from gpu_support import take_gpu
from schedule_support import Groups

from ep_overlap.testing import RankPool
from fsdp_hooks.placement import STRATEGIES
from fsdp_hooks.precision import MixedPrecision

TF32_TOLERANCE = 5e-3
"""Fused against unfused: Transformer Engine makes float32 products in TF32, and fused ones are not
made by it."""
MODELS = ("reference", "local", "transformer_engine")


def cells(model: str, bf16: bool) -> list[wgrad_table.Cell]:
    """Every strategy and column of one model. Collective."""
    from ep_overlap.models.megatron_globals import megatron_globals

    device, groups = take_gpu(), Groups()
    is_megatron = model != "reference"
    found: list[wgrad_table.Cell] = []
    with megatron_globals() if is_megatron else nullcontext():
        for strategy in STRATEGIES:
            case = wgrad_table.case_of(strategy, megatron=is_megatron)
            case = replace(case, device=device, transformer_engine=model == "transformer_engine")
            if bf16:
                case = replace(case, dtype=torch.bfloat16, mp=MixedPrecision())
            found += wgrad_table.overlapped("", case, groups)
    return found


def check(ranks: RankPool, model: str, bf16: bool) -> None:
    columns = wgrad_table.COLUMNS[1:]
    for by_rank in ranks.run(cells, model, bf16):
        wrong = {f"{c.case}, {c.column}": c.differences[:3] for c in by_rank if c.differences}
        assert not wrong
        most = TF32_TOLERANCE if model == "transformer_engine" and not bf16 else None
        far = {
            f"{c.case}, {c.column}": c.error
            for c in by_rank
            if c.error is not None and not c.error <= (most or c.tolerance)
        }
        assert not far
        assert len(by_rank) == len(STRATEGIES) * len(columns)


@pytest.mark.parametrize("bf16", [False, True], ids=["wide", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_are_bit_for_bit_the_standard_path(
    gpu_ranks2: RankPool, model: str, bf16: bool
) -> None:
    check(gpu_ranks2, model, bf16)


@pytest.mark.parametrize("model", MODELS)
def test_four_ranks_are_bit_for_bit_the_standard_path(gpu_ranks4: RankPool, model: str) -> None:
    check(gpu_ranks4, model, bf16=model == "transformer_engine")
