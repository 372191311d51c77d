"""The parity table holds, every cell of it."""

import pytest
from parity_table import LAYOUTS, Layout, cells_of, worst_of_ranks

from ep_overlap.testing import RankPool


def wrong_cells(pool: RankPool, layouts: list[Layout], *, megatron: bool, num: int) -> list[str]:
    cells = worst_of_ranks(pool.run(cells_of, layouts, megatron, timeout_s=240.0))
    assert len(cells) == num
    return [str(cell) for cell in cells if not cell.is_right]


ON_TWO = [layout for layout in LAYOUTS if layout.num_ranks == 2]
ON_FOUR = [layout for layout in LAYOUTS if layout.num_ranks == 4]


@pytest.mark.parametrize(("megatron", "num"), [(False, 4 * 3 * 2), (True, 4)])
def test_two_ranks(ranks2: RankPool, megatron: bool, num: int) -> None:
    # M#3754: strategies agree; M#6487: expert groups of one rank.
    assert wrong_cells(ranks2, ON_TWO, megatron=megatron, num=num) == []


@pytest.mark.parametrize(("megatron", "num"), [(False, (4 + 4 + 3) * 3 * 2), (True, 11)])
def test_four_ranks_flat_and_hybrid(ranks4: RankPool, megatron: bool, num: int) -> None:
    assert wrong_cells(ranks4, ON_FOUR, megatron=megatron, num=num) == []
