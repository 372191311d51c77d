"""Shared weights in a real model: MTP layers on the standard path, with every kind of weight
gradient. The whole table: ``python tests/wgrad_mtp.py``."""

import pytest
from wgrad_mtp import (
    NUM_MICROBATCHES,
    NUM_USES,
    Making,
    Run,
    by_model,
    cases,
    largest_difference,
    train_all,
)

from ep_overlap.testing import RankPool

NUM_STEPS = 4
ROUNDING = 2e-6
"""Relative; float32, after steps of AdamW that move each weight by up to ``LR``."""


@pytest.fixture(scope="module")
def runs(ranks2: RankPool) -> list[Run]:
    """Of rank 0; figures are means over ranks."""
    by_rank = ranks2.run(train_all, list(cases()), NUM_STEPS, timeout_s=240.0)
    assert [run.steps for run in by_rank[0]] == [run.steps for run in by_rank[1]]
    return by_rank[0]


def test_every_weight_gradient_goes_the_way_that_was_asked_for(runs: list[Run]) -> None:
    for run in runs:
        num_uses = NUM_USES * NUM_MICROBATCHES * NUM_STEPS
        assert run.num_delayed == (num_uses if run.case.making.is_delayed else 0), run.case
        assert run.num_written == (num_uses if run.case.making.is_fused else 0), run.case


def test_main_and_mtp_losses_fall(runs: list[Run]) -> None:
    for run in runs:
        first, last = run.steps[0], run.steps[-1]
        assert last.main_loss < first.main_loss - 0.2
        assert all(b < a - 0.1 for a, b in zip(first.mtp_losses, last.mtp_losses, strict=True))
        assert len({first.main_loss, *first.mtp_losses}) == 3


def test_delayed_is_bitwise_plain_with_embeddings_of_its_own(runs: list[Run]) -> None:
    same = [each for each in by_model(runs) if not each[0].case.is_tied]
    assert len(same) == 2
    for plain, fused, delayed, both in same:
        assert delayed.case.making is Making.DELAYED
        assert delayed.steps == plain.steps
        assert both.steps == fused.steps


def test_all_ways_are_equal_within_rounding(runs: list[Run]) -> None:
    for same in by_model(runs):
        for run in same:
            assert largest_difference(run, same[0]) < ROUNDING, run.case


def test_strategies_agree_within_rounding(runs: list[Run]) -> None:
    for is_tied in (False, True):
        first, second = (same[0] for same in by_model(runs) if same[0].case.is_tied is is_tied)
        assert first.case.strategy != second.case.strategy
        assert largest_difference(second, first) < ROUNDING
