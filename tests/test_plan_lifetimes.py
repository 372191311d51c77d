import pytest
from plan_shapes import shape

from ep_overlap.plan.action import Lane, LayerKind, parse_action
from ep_overlap.plan.build import build_plan
from ep_overlap.plan.edges import dependencies, waits
from ep_overlap.plan.lifetimes import release_points, wait_points
from ep_overlap.plan.lower import Sharding, Strategy
from ep_overlap.plan.order import ModelShape, OrderName


def plan_actions(order: OrderName, num_layers: int = 3, num_microbatches: int = 3):
    return build_plan(
        shape=ModelShape(layers=(LayerKind.MOE,) * num_layers),
        num_microbatches=num_microbatches,
        order=order,
        sharding=Sharding(strategy=Strategy.OPTIM_GRADS_PARAMS),
    ).actions


def test_a_gradient_that_comm_reads_lives_until_comp_waits_for_its_reader() -> None:
    actions = plan_actions(OrderName.SERIAL, num_layers=1, num_microbatches=1)
    points = release_points(actions)
    reader = actions.index(parse_action("0B.dispatch.L0"))
    point = points[reader]
    assert point == reader, "comp has nothing between the two: it waits at once"


def test_what_attn_read_is_given_back_before_mlp_is_issued() -> None:
    """comm waits for attn.F when it is issued, not when dispatch.F is: mlp.B may use its memory."""
    plan = build_plan(
        shape=ModelShape(layers=(LayerKind.MOE,) * 3), num_microbatches=3, order=OrderName.PLAIN
    )
    actions = plan.actions
    reader = actions.index(parse_action("1F.attn.L1"))
    assert str(actions[reader + 1]) == "0B.mlp.L1"
    assert release_points(actions)[reader] == reader
    dispatch = actions.index(parse_action("1F.dispatch.L1"))
    assert wait_points(actions)[dispatch][reader] == reader


@pytest.mark.parametrize("order", list(OrderName))
def test_a_lane_waits_for_what_the_plan_says_behind_what_it_does_before(order: OrderName) -> None:
    actions = plan_actions(order)
    points = wait_points(actions)
    assert [tuple(each) for each in points] == list(waits(actions))
    last_on_lane: dict[Lane, int] = {}
    for index, action in enumerate(actions):
        for awaited, point in points[index].items():
            assert awaited <= point < index
            assert point == awaited or point == last_on_lane[action.lane]
        last_on_lane[action.lane] = index


@pytest.mark.parametrize("order", list(OrderName))
def test_no_tensor_is_dropped_before_its_lane_is_known_to_follow_the_reader(
    order: OrderName,
) -> None:
    actions = plan_actions(order)
    direct = dependencies(actions)
    last_on_lane: dict[Lane, int] = {}
    # Everything that must be done before an action starts, from the unreduced dependencies.
    before: list[set[int]] = []
    for index, action in enumerate(actions):
        done = set(direct[index])
        if action.lane in last_on_lane:
            done.add(last_on_lane[action.lane])
        if action.lane is not Lane.HOST:
            last_on_lane[action.lane] = index
        before.append(done.union(*(before[i] for i in done)))
    points = release_points(actions)
    released = {actions[i].lane for i, point in enumerate(points) if point is not None}
    assert released == {Lane.COMP, Lane.COMM, Lane.RS}
    for reader, point in enumerate(points):
        if point is None:
            continue
        allocating = {Lane.COMM: Lane.COMP, Lane.COMP: Lane.COMM, Lane.RS: Lane.COMP}
        lane = allocating[actions[reader].lane]
        following = [i for i, action in enumerate(actions) if action.lane is lane]
        first = next(i for i in following if reader in before[i])
        previous = max((i for i in following if i < first), default=0)
        assert max(reader, previous) <= point < first
        assert reader == point or point in (previous, *direct[first]), "it could go sooner"


@pytest.mark.parametrize("layers", ["mmmm", "dmm", "mmd"])
@pytest.mark.parametrize("delay_wgrad", [False, True])
@pytest.mark.parametrize("order", [OrderName.PLAIN, OrderName.PAIRED])
def test_what_post_reads_is_given_back_before_an_mlp_takes_its_memory(
    order: OrderName, delay_wgrad: bool, layers: str
) -> None:
    """Logits and combine's result side by side are the largest that a forward leaves."""
    plan = build_plan(shape=shape(layers), num_microbatches=5, order=order, delay_wgrad=delay_wgrad)
    released = release_points(plan.actions)
    words = [str(action) for action in plan.actions]
    for microbatch in range(1, 4):  # in the steady pairs
        post = words.index(f"{microbatch}F.post")
        until = released[post]
        assert until is not None
        assert not [word for word in words[post:until] if ".mlp." in word]
