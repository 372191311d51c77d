"""Ring (a): how long steps take on paper, and which lane waits."""

import pytest
from lane_times import TRACED_MS, LaneTimes, lane_times, traced
from plan_shapes import shape

from ep_overlap.plan.action import Lane
from ep_overlap.plan.build import build_plan, plan_from_words
from ep_overlap.plan.order import OrderName, combined_1f1b

AS_COMPUTE, FASTER = 11.45, 6.6
"""Of an exchange, ms: at a link as slow as compute (90.7 GB/s), and at one of 168.8 GB/s."""
LAYERS, MICROBATCHES = "mmmm", 8


def times_of(order: OrderName, exchange: float, layers: str = LAYERS) -> LaneTimes:
    plan = build_plan(
        shape=shape(layers),
        num_microbatches=MICROBATCHES,
        order=order,
        delay_wgrad=True,
    )
    return lane_times(plan, traced(exchange))


def with_posts_between_pairs(exchange: float, layers: str = LAYERS) -> LaneTimes:
    """The paired order, both nodes of post where a pair ends."""
    nodes = combined_1f1b(shape(layers), MICROBATCHES, paired=True, delay_wgrad=True)
    words = [str(node) for node in nodes]
    top = len(layers) - 1
    for backward in range(MICROBATCHES - 1):
        exchange_of = [f"{backward}B.combine.L{top}"] if layers[top] == "m" else []
        moved = [f"{backward}B.post", *exchange_of, f"{backward + 1}F.post"]
        words = [word for word in words if word not in moved]
        is_last = backward == MICROBATCHES - 2
        at = words.index(f"{backward + 1}B.post" if is_last else f"{backward + 2}F.pre")
        words[at:at] = moved
    plan = plan_from_words(
        " ".join(words),
        shape=shape(layers),
        num_microbatches=MICROBATCHES,
        delay_wgrad=True,
    )
    return lane_times(plan, traced(exchange))


def test_a_serial_step_takes_as_long_as_its_nodes() -> None:
    num_layers = len(LAYERS)
    compute = sum(TRACED_MS.values()) * num_layers
    ends = (TRACED_MS[node] for node in ("F.pre", "F.post", "B.post", "B.pre"))
    once = compute - (num_layers - 1) * sum(ends)
    plan = build_plan(shape=shape(LAYERS), num_microbatches=2, order=OrderName.SERIAL)
    undelayed = sum(TRACED_MS[node] for node in ("W.mlp", "W.attn")) * num_layers
    expected = 2 * (once - undelayed + 4 * num_layers * 3.0)
    assert lane_times(plan, traced(3.0)).step == pytest.approx(expected)


@pytest.mark.parametrize("exchange", [AS_COMPUTE, FASTER])
def test_paired_is_shorter_than_plain_by_the_first_forward_and_the_last_backward(
    exchange: float,
) -> None:
    saved = times_of(OrderName.PLAIN, exchange).step - times_of(OrderName.PAIRED, exchange).step
    assert saved > 2 * len(LAYERS) * exchange  # half of the exchanges of one microbatch


@pytest.mark.parametrize(
    ("layers", "ms"),
    [("mmmm", (1534, 1585)), ("dmmm", (1432, 1449)), ("mmmd", (1452, 1497))],
)
def test_posts_away_from_where_pairs_meet_keep_the_exchange_lane_busy(
    layers: str, ms: tuple[int, int]
) -> None:
    apart = times_of(OrderName.PAIRED, AS_COMPUTE, layers)
    between = with_posts_between_pairs(AS_COMPUTE, layers)
    assert (round(apart.step), round(between.step)) == ms
    saved = between.idle_of(Lane.COMM) - apart.idle_of(Lane.COMM)
    assert saved == pytest.approx(between.step - apart.step, abs=1.0)


def test_where_compute_sets_the_step_the_place_of_posts_does_not_matter() -> None:
    apart, between = times_of(OrderName.PAIRED, FASTER), with_posts_between_pairs(FASTER)
    assert apart.step == pytest.approx(between.step, rel=1e-3)
    assert apart.idle_of(Lane.COMP) < 20
