"""Gathers: as few as an exhaustive search finds, in time, within the budget, and placed early."""

from functools import cache

import pytest
from plan_shapes import shape, zero3

from ep_overlap.plan.action import ROOT_UNIT, Action, UnitAction, UnitOp
from ep_overlap.plan.build import build_plan
from ep_overlap.plan.lower import Sharding, Strategy
from ep_overlap.plan.order import OrderName, combined_1f1b, forward_only, serial
from ep_overlap.plan.residency import default_budget, split_groups

ORDERS = ("serial", "plain", "paired", "forward")


def order_of(name: str, num_layers: int, num_microbatches: int) -> list[Action]:
    model = shape("m" * num_layers)
    if name == "serial":
        return [*serial(model, num_microbatches)]
    if name == "forward":
        return [*forward_only(model, num_microbatches)]
    return [*combined_1f1b(model, num_microbatches, paired=name == "paired")]


def groups_by_hand(name: str, num_layers: int, num_microbatches: int) -> list[frozenset[int]]:
    """The layers needed side by side, step by step, from what each order is meant to do."""
    up = [frozenset({layer}) for layer in range(num_layers)]
    down = up[::-1]
    pair = [frozenset({layer, num_layers - 1 - layer}) for layer in range(num_layers)]
    if name == "forward":
        return up * num_microbatches
    if name == "serial":
        return (up + down) * num_microbatches
    num_pairs = max(num_microbatches - (2 if name == "paired" else 1), 0)
    return up + pair * num_pairs + down


def fewest_gathers(groups: list[frozenset[int]], budget: int, num_layers: int) -> int:
    """Exhaustive search over all residencies, by dynamic programming over sets of layers."""
    masks = [sum(1 << layer for layer in group) for group in groups]
    cost = {0: 0}
    for index, mask in enumerate(masks):
        both = mask | masks[min(index + 1, len(masks) - 1)]
        need = both if both.bit_count() <= budget else mask
        sets = _supersets(need, budget, num_layers)
        cost = {
            held: min(past + (held & ~before).bit_count() for before, past in cost.items())
            for held in sets
        }
    return min(cost.values())


@cache
def _supersets(need: int, budget: int, num_layers: int) -> tuple[int, ...]:
    every = range(1 << num_layers)
    return tuple(held for held in every if held & need == need and held.bit_count() <= budget)


def num_layer_gathers(name: str, num_layers: int, num_microbatches: int, budget: int) -> int:
    plan = build_plan(
        shape=shape("m" * num_layers),
        num_microbatches=num_microbatches,
        order=OrderName.PAIRED if name == "forward" else OrderName(name),
        sharding=zero3(budget),
        evaluate=name == "forward",
    )
    assert plan.num_gathers[ROOT_UNIT] == 1
    return sum(plan.num_gathers.values()) - 1


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5])
def test_groups_are_the_steps_of_the_order(name: str, num_layers: int) -> None:
    for num_microbatches in (1, 2, 3, 4):
        groups = split_groups(order_of(name, num_layers, num_microbatches))
        by_hand = groups_by_hand(name, num_layers, num_microbatches)
        assert [group.units for group in groups] == [
            frozenset(f"L{layer}" for layer in group) for group in by_hand
        ]


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5])
def test_gathers_are_as_few_as_an_exhaustive_search_finds(name: str, num_layers: int) -> None:
    for num_microbatches in (1, 2, 3, 4):
        groups = groups_by_hand(name, num_layers, num_microbatches)
        for budget in range(max(len(group) for group in groups), num_layers + 2):
            assert num_layer_gathers(name, num_layers, num_microbatches, budget) == fewest_gathers(
                groups, budget, num_layers
            ), (num_microbatches, budget)


@pytest.mark.parametrize(
    ("name", "budget", "gathers"),
    [
        ("plain", 2, 100),
        ("plain", 3, 83),
        ("plain", 4, 68),
        ("paired", 2, 88),
        ("paired", 3, 73),
        ("paired", 4, 60),
    ],
)
def test_eight_layers_and_microbatches_take_these_gathers(
    name: str, budget: int, gathers: int
) -> None:
    assert num_layer_gathers(name, 8, 8, budget) == gathers
    assert fewest_gathers(groups_by_hand(name, 8, 8), budget, 8) == gathers


@pytest.mark.parametrize(
    ("name", "num_layers", "num_microbatches", "budget"),
    [
        ("plain", 8, 8, 4),
        ("paired", 8, 8, 4),
        ("serial", 8, 8, 2),
        ("forward", 8, 8, 2),
        ("plain", 3, 8, 3),
        ("paired", 8, 2, 2),  # no steady pairs: layers one by one
        ("serial", 1, 2, 1),
    ],
)
def test_default_budget_is_this_groups_units_and_the_next(
    name: str, num_layers: int, num_microbatches: int, budget: int
) -> None:
    assert default_budget(split_groups(order_of(name, num_layers, num_microbatches))) == budget


def test_gathers_and_releases_come_as_early_as_the_budget_allows() -> None:
    plan = build_plan(
        shape=shape("mmmm"), num_microbatches=2, order=OrderName.PLAIN, sharding=zero3(2)
    )
    text = " ".join(str(action) for action in plan.actions)
    # L1, wanted by the second group, is gathered before the first begins.
    assert text.startswith("UNSHARD.root UNSHARD.L0 UNSHARD.L1 0F.pre 0F.attn.L0 ")
    # In a steady pair each slot goes to the next pair at the moment it is free.
    assert " 1F.mlp.L0 RESHARD.L0 UNSHARD.L1 1F.combine.L0 0B.attn.L3 RESHARD.L3 " in text
    assert " 0B.attn.L3 RESHARD.L3 UNSHARD.L2 REDUCE.L3 0B.combine.L2 " in text
    assert text.endswith(" 1B.attn.L0 RESHARD.L0 REDUCE.L0 1B.pre REDUCE.root RESHARD.root")


def test_a_release_does_not_wait_for_delayed_wgrad() -> None:
    plan = build_plan(
        shape=shape("mm"),
        num_microbatches=1,
        order=OrderName.SERIAL,
        delay_wgrad=True,
        sharding=zero3(1),
    )
    text = " ".join(str(action) for action in plan.actions)
    assert " 0B.attn.L1 RESHARD.L1 UNSHARD.L0 0W.attn.L1 REDUCE.L1 " in text


def test_serial_fits_one_unit() -> None:
    plan = build_plan(
        shape=shape("mmm"), num_microbatches=1, order=OrderName.SERIAL, sharding=zero3(1)
    )
    live: set[str] = set()
    for action in plan.actions:
        if isinstance(action, UnitAction) and action.unit != ROOT_UNIT:
            if action.op is UnitOp.UNSHARD:
                live.add(action.unit)
            live -= {action.unit} if action.op is UnitOp.RESHARD else set()
            assert len(live) <= 1
    # L2 stays from its forward to its backward.
    assert plan.num_gathers == {ROOT_UNIT: 1, "L0": 2, "L1": 2, "L2": 1}


@pytest.mark.parametrize(
    ("order", "num_microbatches", "unshard", "last"),
    [
        # A layer ahead of its use, behind the layers that are used before it.
        (OrderName.SERIAL, 1, "0F.mlp.L1 UNSHARD.head 0F.combine.L1", "0B.post"),
        (OrderName.PLAIN, 2, "0F.mlp.L1 UNSHARD.head 0F.combine.L1", "1B.post"),
        (OrderName.PAIRED, 2, "1F.mlp.L1 UNSHARD.head 1F.combine.L1", "1B.post"),
    ],
)
def test_the_head_comes_a_layer_ahead_of_its_use_and_is_reduced_right_behind_it(
    order: OrderName, num_microbatches: int, unshard: str, last: str
) -> None:
    plan = build_plan(
        shape=shape("mmm"),
        num_microbatches=num_microbatches,
        order=order,
        sharding=Sharding(strategy=Strategy.OPTIM_GRADS_PARAMS, has_head=True),
    )
    text = " ".join(str(action) for action in plan.actions)
    assert text.startswith("UNSHARD.root UNSHARD.L0 "), "what comes first waits for the embedding"
    assert unshard in text, text
    assert f"{last} RESHARD.head REDUCE.head" in text, text
    assert plan.num_gathers["head"] == plan.num_gathers[ROOT_UNIT] == 1
    place = {str(action): index for index, action in enumerate(plan.actions)}
    assert place["UNSHARD.head"] in plan.waits[place["0F.post"]]
    assert text.endswith("REDUCE.root RESHARD.root")
    assert text.count("REDUCE.head") == num_microbatches


def test_a_budget_below_the_need_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"reads 2 units side by side \(L0, L2\), so expected at"):
        build_plan(shape=shape("mmm"), num_microbatches=2, sharding=zero3(1), order=OrderName.PLAIN)
