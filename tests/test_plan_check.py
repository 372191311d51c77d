"""The checker: each kind of damage gets its own error, at its own place in the grid."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plan_shapes import plans, shape, zero3

from ep_overlap.plan.action import Action, Compute, Node, Phase, UnitOp, parse_action
from ep_overlap.plan.build import build_plan
from ep_overlap.plan.check import PlanError, check, collective_order
from ep_overlap.plan.edges import dependencies, waits
from ep_overlap.plan.lower import Sharding, Strategy
from ep_overlap.plan.order import OrderName
from ep_overlap.plan.plan import Plan

Damage = Callable[[list[Action]], None]

PLAN = build_plan(
    shape=shape("mmd"),
    num_microbatches=2,
    order=OrderName.PLAIN,
    delay_wgrad=True,
    sharding=zero3(2),
)


def place(actions: list[Action], word: str, nth: int = 0) -> int:
    return [i for i, action in enumerate(actions) if str(action) == word][nth]


def drop(word: str, nth: int = 0) -> Damage:
    return lambda actions: actions.__delitem__(place(actions, word, nth))


def insert(word: str, before: str) -> Damage:
    return lambda actions: actions.insert(place(actions, before), parse_action(word))


def move(word: str, before: str, nth: int = 0) -> Damage:
    def damage(actions: list[Action]) -> None:
        action = actions.pop(place(actions, word, nth))
        actions.insert(place(actions, before), action)

    return damage


def swap(first: str, second: str) -> Damage:
    def damage(actions: list[Action]) -> None:
        i, j = place(actions, first), place(actions, second)
        actions[i], actions[j] = actions[j], actions[i]

    return damage


def damaged(plan: Plan, damage: Damage) -> Plan:
    actions = list(plan.actions)
    damage(actions)
    return replace(plan, actions=tuple(actions), waits=waits(actions))


def marked_word(error: PlanError) -> str:
    """The one word of the one marked row."""
    rows = [line.split() for line in str(error).splitlines() if line.startswith(">")]
    assert len(rows) == 1
    _, step, word = rows[0]
    assert int(step) == error.step
    return word


@pytest.mark.parametrize(
    ("damage", "reason", "marked"),
    [
        (drop("0F.mlp.L1"), "0F.mlp.L1 is missing", "0F.combine.L1"),
        (drop("1B.attn.L1"), "1B.attn.L1 is missing", "1B.combine.L0"),
        (drop("1B.pre"), "1B.pre is missing", "1W.attn.L0"),
        (drop("0W.mlp.L0"), "0W.mlp.L0 is missing", "0B.mlp.L0"),
        (
            insert("0F.attn.L0", before="0F.post"),
            "0F.attn.L0 is issued twice, first at step 4",
            "0F.attn.L0",
        ),
        (insert("0F.dispatch.L2", before="0F.mlp.L2"), "is not a node of this", "0F.dispatch.L2"),
        (insert("2F.pre", before="0F.post"), "2F.pre is not a node of this plan", "2F.pre"),
        (
            insert("0R.attn.L0", before="0B.attn.L0"),
            "0R.dispatch.L0 is missing",
            "0B.dispatch.L0",
        ),
        (
            move("0F.combine.L0", before="0F.mlp.L0"),
            "0F.combine.L0 is issued before 0F.mlp.L0, which it needs",
            "0F.combine.L0",
        ),
        (
            move("0B.post", before="0F.post"),
            "0B.post is issued before 0F.post, which it needs",
            "0B.post",
        ),
        (
            swap("0B.mlp.L2", "0W.mlp.L2"),
            "0W.mlp.L2 is issued before 0B.mlp.L2, which it needs",
            "0W.mlp.L2",
        ),
        (drop("1SYNC.L1"), "1F.dispatch.L1 has no 1SYNC.L1 before it", "1F.dispatch.L1"),
        (insert("0SYNC.L2", before="0F.mlp.L2"), "belongs to no forward dispatch", "0SYNC.L2"),
        (insert("0SYNC.L0", before="0F.mlp.L0"), "0SYNC.L0 is issued twice", "0SYNC.L0"),
        (
            move("0SYNC.L0", before="0F.mlp.L0"),
            "0F.dispatch.L0 is issued before 0SYNC.L0, which it needs",
            "0F.dispatch.L0",
        ),
        (
            drop("UNSHARD.L1"),
            "0F.attn.L1 reads unit L1, which is not gathered",
            "0F.attn.L1",
        ),
        (
            move("RESHARD.L0", before="0F.mlp.L0"),
            "0F.mlp.L0 reads unit L0, which is not gathered; released at step 7",
            "0F.mlp.L0",
        ),
        (insert("UNSHARD.L0", before="0F.mlp.L0"), "gathered already, at step 1", "UNSHARD.L0"),
        (insert("RESHARD.L2", before="0F.mlp.L0"), "RESHARD.L2: released, but not", "RESHARD.L2"),
        (insert("RESHARD.L1", before="0F.mlp.L0"), "without a reader between", "RESHARD.L1"),
        (drop("RESHARD.root"), "unit root is never released after this", "UNSHARD.root"),
        (
            move("UNSHARD.L2", before="0F.attn.L0"),
            "3 layers gathered, budget 2: L0, L1, L2",
            "UNSHARD.L2",
        ),
        (drop("REDUCE.L1"), "REDUCE.L1 is missing: expected 2 a step, got 1", "0W.attn.L1"),
        (drop("REDUCE.L1", 1), "REDUCE.L1 is missing: expected 2 a step, got 1", "1W.attn.L1"),
        (
            insert("REDUCE.L1", before="0F.attn.L0"),
            "REDUCE.L1 once too often: expected 2 a step, got 3",
            "REDUCE.L1",
        ),
        (
            move("REDUCE.L1", before="0W.attn.L1"),
            "REDUCE.L1 is issued before 0W.attn.L1, which it needs",
            "REDUCE.L1",
        ),
    ],
)
def test_damage_is_named_and_marked(damage: Damage, reason: str, marked: str) -> None:
    with pytest.raises(PlanError, match=re.escape(reason)) as caught:
        check(damaged(PLAN, damage))
    assert marked_word(caught.value) == marked


def test_the_undamaged_plan_passes() -> None:
    check(PLAN)


def test_stale_waits_are_refused() -> None:
    with pytest.raises(PlanError, match="waits are not those of its actions"):
        check(replace(PLAN, waits=((),) * len(PLAN.actions)))


def test_gathers_without_sharded_weights_are_refused() -> None:
    whole = Sharding(strategy=Strategy.NO_SHARD, reduce_each_microbatch=True)
    with pytest.raises(PlanError, match=r"UNSHARD\.root, but the weights of this plan are not"):
        check(replace(PLAN, sharding=whole))


def test_releasing_weights_that_stay_is_refused() -> None:
    plan = replace(PLAN, sharding=Sharding(strategy=Strategy.OPTIM_GRADS))
    with pytest.raises(PlanError, match=r"RESHARD\.L0, but the weights of this plan are not"):
        check(plan)


def test_reducing_each_microbatch_where_once_a_step_was_asked_is_refused() -> None:
    once = Sharding(
        strategy=Strategy.OPTIM_GRADS_PARAMS, max_unsharded_units=2, reduce_each_microbatch=False
    )
    with pytest.raises(PlanError, match="once too often: expected 1 a step, got 2"):
        check(replace(PLAN, sharding=once))


@settings(max_examples=150, deadline=None)
@given(plans(), st.data())
def test_dropping_any_action_is_refused(plan: Plan, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(plan.actions) - 1))
    dropped = plan.actions[index]
    is_wgrad = isinstance(dropped, Compute) and dropped.phase is Phase.WGRAD
    assume(not (is_wgrad and plan.num_microbatches == 1))  # that one may be made in its B as well
    with pytest.raises(PlanError):
        check(damaged(plan, lambda actions: actions.__delitem__(index)))


@settings(max_examples=150, deadline=None)
@given(plans(), st.data())
def test_doubling_any_action_is_refused(plan: Plan, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(plan.actions) - 1))
    other = data.draw(st.integers(index + 1, len(plan.actions)))
    with pytest.raises(PlanError):
        check(damaged(plan, lambda actions: actions.insert(other, actions[index])))


@settings(max_examples=150, deadline=None)
@given(plans(), st.data())
def test_putting_an_action_before_what_it_needs_is_refused(plan: Plan, data: st.DataObject) -> None:
    edges = [
        (before, after)
        for after, needed in enumerate(dependencies(plan.actions))
        for before in needed
        if not str(plan.actions[before]).startswith("REDUCE")  # back-pressure yields to the order
    ]
    before, after = data.draw(st.sampled_from(edges))
    with pytest.raises(PlanError):
        check(damaged(plan, lambda actions: actions.insert(before, actions.pop(after))))


def test_collectives_of_a_communicator_are_listed_in_issue_order() -> None:
    plan = build_plan(shape=shape("m"), num_microbatches=1, order=OrderName.PLAIN)
    order = collective_order(
        plan,
        {
            Node.ATTN: (("counts", "all_gather_into_tensor"), ("counts", "all_reduce")),
            Node.DISPATCH: (("ep", "all_to_all_single"), ("ep", "all_to_all_single")),
            Node.COMBINE: (("ep", "all_to_all_single"),),
        },
    )
    assert order == {
        "counts": [
            ("0F.attn.L0", "all_gather_into_tensor"),
            ("0F.attn.L0", "all_reduce"),
            ("0B.attn.L0", "all_reduce"),
            ("0B.attn.L0", "reduce_scatter_tensor"),
        ],
        "ep": [
            ("0F.dispatch.L0", "all_to_all_single"),
            ("0F.dispatch.L0", "all_to_all_single"),
            ("0F.combine.L0", "all_to_all_single"),
            ("0B.combine.L0", "all_to_all_single"),
            ("0B.dispatch.L0", "all_to_all_single"),
            ("0B.dispatch.L0", "all_to_all_single"),
        ],
    }


def test_a_communicator_used_from_two_lanes_is_refused() -> None:
    table = {
        Node.ATTN: (("ep", "all_gather_into_tensor"),),
        Node.DISPATCH: (("ep", "all_to_all_single"),),
    }
    with pytest.raises(PlanError, match=r"'ep' is used by 0F\.attn\.L0 on lane comp") as caught:
        collective_order(PLAN, table)
    assert marked_word(caught.value) == "0F.dispatch.L0"


def test_gathers_and_reductions_need_a_communicator_each() -> None:
    gathers = {UnitOp.UNSHARD: (("dp", "all_gather_into_tensor"),)}
    assert len(collective_order(PLAN, gathers)["dp"]) == sum(PLAN.num_gathers.values())
    both = {**gathers, UnitOp.REDUCE: (("dp", "reduce_scatter_tensor"),)}
    with pytest.raises(PlanError, match="on lane ag and by REDUCE"):
        collective_order(PLAN, both)
