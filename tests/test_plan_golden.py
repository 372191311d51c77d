"""Ring (a): whole plans against text files, and what the orders are for."""

import pytest
from plan_goldens import GOLDEN, golden_plans
from plan_shapes import shape

from ep_overlap.plan.action import Action, Compute, Lane, Phase
from ep_overlap.plan.edges import dependencies
from ep_overlap.plan.order import combined_1f1b, computes_of, forward_only, serial

PLANS = golden_plans()


@pytest.mark.parametrize("name", PLANS)
def test_plan_is_the_golden_one(name: str) -> None:
    assert PLANS[name].text() == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


def test_every_golden_file_has_its_plan() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(PLANS)


def words(order: list[Compute]) -> str:
    return " ".join(str(node) for node in order)


def test_serial_runs_w_right_after_its_b() -> None:
    assert words(serial(shape("m"), 1, delay_wgrad=True)) == (
        "0F.pre 0F.attn.L0 0F.dispatch.L0 0F.mlp.L0 0F.combine.L0 0F.post"
        " 0B.post 0B.combine.L0 0B.mlp.L0 0W.mlp.L0 0B.dispatch.L0 0B.attn.L0 0B.pre 0W.attn.L0"
    )


def test_plain_steady_pair_is_megatrons_with_pre_ahead_of_the_last_wgrad() -> None:
    order = words(combined_1f1b(shape("mm"), 2, paired=False, delay_wgrad=True))
    assert (
        " 1F.pre 0B.post"
        " 0B.combine.L1 1F.attn.L0 0B.mlp.L1 1F.dispatch.L0 0W.mlp.L1 0B.dispatch.L1"
        " 1F.mlp.L0 1F.combine.L0 0B.attn.L1 0W.attn.L1"
        " 0B.combine.L0 1F.attn.L1 0B.mlp.L0 1F.dispatch.L1 0W.mlp.L0 0B.dispatch.L0"
        " 1F.mlp.L1 1F.combine.L1 0B.attn.L0 0B.pre 0W.attn.L0"
        " 1F.post 1B.post "
    ) in order


def test_paired_interleaves_the_first_two_forwards_and_the_last_two_backwards() -> None:
    assert words(combined_1f1b(shape("m"), 2, paired=True)) == (
        "0F.pre 1F.pre"
        " 0F.attn.L0 1F.attn.L0 0F.dispatch.L0 0F.mlp.L0 1F.dispatch.L0 0F.combine.L0"
        " 1F.mlp.L0 1F.combine.L0"
        " 0F.post 0B.post 0B.combine.L0 1F.post 1B.post 1B.combine.L0"
        " 0B.mlp.L0 0B.dispatch.L0 1B.mlp.L0 1B.dispatch.L0 0B.attn.L0 0B.pre"
        " 1B.attn.L0 1B.pre"
    )


def test_paired_ends_a_forward_late_and_begins_a_backward_early() -> None:
    order = words(combined_1f1b(shape("mm"), 4, paired=True))
    assert " 0F.post 0B.post 0B.combine.L1 2F.pre 2F.attn.L0 0B.mlp.L1 " in order
    assert " 0B.combine.L0 1F.post 2F.attn.L1 0B.mlp.L0 " in order
    assert (
        " 2F.mlp.L1 2F.combine.L1 1B.post 1B.combine.L1 0B.attn.L0 0B.pre"
        " 3F.pre 3F.attn.L0 1B.mlp.L1 "
    ) in order
    assert " 1B.combine.L0 2F.post 3F.attn.L1 1B.mlp.L0 " in order
    assert (
        " 3F.mlp.L1 3F.combine.L1 2B.post 2B.combine.L1 1B.attn.L0 1B.pre"
        " 3F.post 3B.post 3B.combine.L1 2B.mlp.L1 "
    ) in order


@pytest.mark.parametrize("paired", [False, True])
def test_one_microbatch_degrades_to_serial(paired: bool) -> None:
    assert combined_1f1b(shape("mdm"), 1, paired=paired) == serial(shape("mdm"), 1)


def test_forward_only_has_no_backward() -> None:
    order = forward_only(shape("md"), 2)
    assert words(order[8:]) == (
        "1F.pre 1F.attn.L0 1F.dispatch.L0 1F.mlp.L0 1F.combine.L0 1F.attn.L1 1F.mlp.L1 1F.post"
    )


def exposed(actions: list[Compute]) -> list[Compute]:
    """Exchanges with nothing on the compute lane between what feeds them and what reads them."""
    needed = dependencies(actions)
    comp = [index for index, action in enumerate(actions) if action.lane is Lane.COMP]
    bare: list[Compute] = []
    for index, action in enumerate(actions):
        if action.lane is not Lane.COMM:
            continue
        feeder = max(i for i in needed[index] if actions[i].phase is action.phase)
        reader = min(i for i in comp if index in needed[i] and actions[i].phase is action.phase)
        if not any(feeder < i < reader for i in comp):
            bare.append(action)
    return bare


@pytest.mark.parametrize("delay_wgrad", [False, True])
def test_plain_exposes_the_exchanges_of_the_first_forward_and_the_last_backward_alone(
    delay_wgrad: bool,
) -> None:
    bare = exposed(combined_1f1b(shape("mmm"), 4, paired=False, delay_wgrad=delay_wgrad))
    first = {node for node in bare if (node.microbatch, node.phase) == (0, Phase.FORWARD)}
    last = {node for node in bare if (node.microbatch, node.phase) == (3, Phase.BACKWARD)}
    assert len(first) == 6
    # Delayed W nodes hide those of the last backward, but for the first combine.
    assert len(last) == (1 if delay_wgrad else 6)
    assert set(bare) == first | last


@pytest.mark.parametrize("num_microbatches", [2, 3, 5])
def test_paired_exposes_no_exchange(num_microbatches: int) -> None:
    assert exposed(combined_1f1b(shape("mmm"), num_microbatches, paired=True)) == []


def test_computes_of_leaves_other_actions_out() -> None:
    plan = PLANS["paired_sharded_2_units"]
    actions: list[Action] = list(plan.actions)
    assert computes_of(actions) == combined_1f1b(shape("mmmmm"), 3, paired=True)
