"""Ring (a): how long steps take on paper, and which lane waits."""

import pytest
from lane_times import TRACED_MS, LaneTimes, lane_times, traced
from plan_shapes import shape

from ep_overlap.plan.action import Lane
from ep_overlap.plan.build import build_plan, plan_from_words
from ep_overlap.plan.order import OrderName, combined_1f1b

AS_COMPUTE, A_THIRD = 11.45, 6.6
"""Of an exchange, ms: at links as slow as compute, and at those of a third of the serial step."""
LAYERS, MICROBATCHES = 4, 8


def times_of(order: OrderName, exchange: float, num_microbatches: int = MICROBATCHES) -> LaneTimes:
    plan = build_plan(
        shape=shape("m" * LAYERS),
        num_microbatches=num_microbatches,
        order=order,
        delay_wgrad=True,
    )
    return lane_times(plan, traced(exchange))


def with_posts_between_pairs(exchange: float) -> LaneTimes:
    """The paired order, both nodes of post where a pair ends."""
    nodes = combined_1f1b(shape("m" * LAYERS), MICROBATCHES, paired=True, delay_wgrad=True)
    words = [str(node) for node in nodes]
    top = LAYERS - 1
    for backward in range(MICROBATCHES - 1):
        moved = [f"{backward}B.post", f"{backward}B.combine.L{top}", f"{backward + 1}F.post"]
        words = [word for word in words if word not in moved]
        is_last = backward == MICROBATCHES - 2
        at = words.index(f"{backward + 1}B.post" if is_last else f"{backward + 2}F.pre")
        words[at:at] = moved
    plan = plan_from_words(
        " ".join(words),
        shape=shape("m" * LAYERS),
        num_microbatches=MICROBATCHES,
        delay_wgrad=True,
    )
    return lane_times(plan, traced(exchange))


def test_a_serial_step_takes_as_long_as_its_nodes() -> None:
    compute = sum(TRACED_MS.values()) * LAYERS
    ends = (TRACED_MS[node] for node in ("F.pre", "F.post", "B.post", "B.pre"))
    once = compute - (LAYERS - 1) * sum(ends)
    plan = build_plan(shape=shape("m" * LAYERS), num_microbatches=2, order=OrderName.SERIAL)
    undelayed = sum(TRACED_MS[node] for node in ("W.mlp", "W.attn")) * LAYERS
    expected = 2 * (once - undelayed + 4 * LAYERS * 3.0)
    assert lane_times(plan, traced(3.0)).step == pytest.approx(expected)


@pytest.mark.parametrize("exchange", [AS_COMPUTE, A_THIRD])
def test_paired_is_shorter_than_plain_by_the_first_forward_and_the_last_backward(
    exchange: float,
) -> None:
    saved = times_of(OrderName.PLAIN, exchange).step - times_of(OrderName.PAIRED, exchange).step
    assert saved > 2 * LAYERS * exchange  # half of the exchanges of one microbatch


def test_posts_away_from_where_pairs_meet_keep_the_exchange_lane_busy() -> None:
    apart, between = times_of(OrderName.PAIRED, AS_COMPUTE), with_posts_between_pairs(AS_COMPUTE)
    assert (round(apart.step), round(between.step)) == (1519, 1585)
    num_pairs = MICROBATCHES - 2
    saved = between.idle_of(Lane.COMM) - apart.idle_of(Lane.COMM)
    assert saved == pytest.approx(between.step - apart.step, abs=1.0)
    assert saved / num_pairs > TRACED_MS["F.post"]


def test_where_compute_sets_the_step_the_place_of_posts_does_not_matter() -> None:
    apart, between = times_of(OrderName.PAIRED, A_THIRD), with_posts_between_pairs(A_THIRD)
    assert apart.step == pytest.approx(between.step, rel=1e-3)
    assert apart.idle_of(Lane.COMP) < 20
