"""Weight gradients that are nodes of a schedule, and fused ones under a schedule."""

import pytest
from wgrad_table import FLAT, cells_of, worst_of_ranks
from ep_overlap.testing import RankPool
from fsdp_hooks.placement import STRATEGIES

ON_TWO, ON_FOUR = FLAT

def wrong_cells(pool, layout, megatron, strategies):
    cells = worst_of_ranks(pool.run(cells_of, layout, megatron, strategies, timeout_s=120.0))
    assert len(cells) == 5 * len(strategies)
    return [str(cell) for cell in cells if not cell.is_right]


def test_two_ranks_of_the_table(ranks2: RankPool) -> None:
    assert wrong_cells(ranks2, ON_TWO, False, STRATEGIES) == []


def test_two_ranks_of_megatrons_model_in_the_table(ranks2: RankPool) -> None:
    assert wrong_cells(ranks2, ON_TWO, True, ("no_shard", "optim_grads_params")) == []


def test_four_ranks_of_the_table(ranks4: RankPool) -> None:
    assert wrong_cells(ranks4, ON_FOUR, False, ("optim",)) == []
