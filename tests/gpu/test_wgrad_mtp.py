"""The source's own check of fused weight gradients, with Transformer Engine's layers.

A GPT of 2 layers and 2 layers of multi-token prediction; ``python tests/wgrad_mtp.py`` is the table
of the local layers.
"""

from dataclasses import replace

import pytest
import wgrad_mtp
from gpu_support import take_gpu

from ep_overlap.testing import RankPool

TOLERANCE = 5e-3
"""Relative. Transformer Engine's float32 products are made in TF32, the fused ones are not."""


def runs(is_tied: bool) -> list[wgrad_mtp.Run]:
    """Every making, on both strategies. Collective."""
    device = take_gpu()
    chosen = [
        replace(case, device=device, transformer_engine=True)
        for case in wgrad_mtp.cases()
        if case.is_tied == is_tied
    ]
    return wgrad_mtp.train_all(chosen, num_steps=5)


@pytest.mark.parametrize("is_tied", [False, True], ids=["own", "tied"])
def test_losses_and_norms_are_alike_however_gradients_are_made(
    gpu_ranks2: RankPool, is_tied: bool
) -> None:
    for found in gpu_ranks2.run(runs, is_tied):
        for plain, *others in wgrad_mtp.by_model(found):
            for run in others:
                assert wgrad_mtp.largest_difference(run, plain) <= TOLERANCE, run.case
                assert (run.num_written > 0) == run.case.making.is_fused
                assert (run.num_delayed > 0) == run.case.making.is_delayed
        for run in found:
            first, last = run.steps[0], run.steps[-1]
            print(run.case, first.values, last.values)
            assert last.main_loss < first.main_loss
