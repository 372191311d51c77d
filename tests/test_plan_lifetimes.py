import pytest

from ep_overlap.plan.action import Lane, LayerKind, parse_action
from ep_overlap.plan.build import build_plan
from ep_overlap.plan.edges import dependencies
from ep_overlap.plan.lifetimes import release_points
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
    assert point is not None
    assert str(actions[point]) == "0B.attn.L0"


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
        assert actions[point].lane is allocating[actions[reader].lane]
        assert reader in before[point]
        earlier = range(reader + 1, point)
        assert not any(
            reader in before[i] and actions[i].lane is actions[point].lane for i in earlier
        ), "it could go sooner"
