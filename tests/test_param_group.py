"""A group's weights and gradients: what goes through the door, what a reduction adds."""

import pytest
import torch
import torch.distributed as dist
from sharding_support import STRATEGIES, own_rows, world_mesh
from torch import Tensor, nn

from ep_overlap.testing import RankPool
from fsdp_hooks.collectives import GroupCommunicator, new_torch_group
from fsdp_hooks.param_group import ParamGroup, ParamSlot
from fsdp_hooks.placement import Placement, placements_of


def new_group(strategy: str) -> tuple[ParamGroup, GroupCommunicator]:
    """Parameters ``[3, 2]`` and ``[5]``, a gap of padding between ranks."""
    mesh = world_mesh()
    module = nn.Module()
    slots: list[ParamSlot] = []
    for name, shape in (("a", (3, 2)), ("b", (5,))):
        param = nn.Parameter(torch.ones(shape, dtype=torch.float64))
        module.register_parameter(name, param)
        slots.append(ParamSlot(name=name, param=param, owners=((module, name),)))
    placements = placements_of(strategy)
    group = ParamGroup(
        slots,
        unit_name="unit",
        mesh=mesh,
        placements=placements.on_group_of(mesh.size()),
        reduces_each_microbatch=placements.grad is Placement.SHARD,
    )
    return group, GroupCommunicator(new_torch_group(range(mesh.size()), "test"))


def full(shape: tuple[int, ...], value: float) -> Tensor:
    return torch.full(shape, value, dtype=torch.float64)


def one_parameter_without_gradient(strategy: str) -> list[tuple[Tensor, Tensor]]:
    """Rank 0 gives a gradient of ``a`` alone, rank 1 of ``b`` alone; fresh memory holds NaN."""
    group, communicator = new_group(strategy)
    rank = dist.get_rank()
    torch.use_deterministic_algorithms(True)  # torch.empty then fills with NaN
    try:
        assert torch.empty(3).isnan().all()
        group.accumulate(rank, 0, full((3, 2) if rank == 0 else (5,), 4.0))
        group.seal(0, is_last=True)
        group.reduce(communicator, 2)
        group.publish()
    finally:
        torch.use_deterministic_algorithms(False)
    return [(own_rows(param.grad), own_rows(param.detach())) for param in group.sharded_params]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_parameter_without_gradient_contributes_zeros(ranks2: RankPool, strategy: str) -> None:
    # M#7166; transformers#48205: what a fresh buffer held before never shows.
    for grads in ranks2.run(one_parameter_without_gradient, strategy):
        for grad, weight in grads:
            assert torch.equal(grad, torch.full_like(weight, 2.0))


def contributions(strategy: str) -> list[float]:
    """Two uses in microbatch 0, one in microbatch 1; two steps. Values of ``a``'s gradient."""
    group, communicator = new_group(strategy)
    values: list[float] = []
    for _ in range(2):
        group.accumulate(0, 0, full((3, 2), 1.0))
        group.accumulate(0, 1, full((3, 2), 32.0))  # of the next microbatch, meanwhile
        group.accumulate(0, 0, full((3, 2), 2.0))
        for microbatch in (0, 1):
            group.seal(microbatch, is_last=microbatch == 1)
        num_sealed = 2 if group.reduces_each_microbatch else 1
        for _ in range(num_sealed):
            group.reduce(communicator, 1)
        assert not group.holds_contributions(is_last=True)
        assert all(param.grad is None for param in group.sharded_params) is (not values)
        group.publish()
        grad = group.sharded_params[0].grad
        assert grad is not None
        values.append(float(grad.to_local().flatten()[:1].sum()))
    return values


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_contributions_add_up_by_microbatch_and_publish_adds_to_grad(
    ranks2: RankPool, strategy: str
) -> None:
    (rank0, _) = ranks2.run(contributions, strategy)
    assert rank0 == [2 * 35.0, 2 * 2 * 35.0]  # two ranks; two steps


def dropped(strategy: str) -> bool:
    group, communicator = new_group(strategy)
    group.accumulate(0, 0, full((3, 2), 1.0))
    group.seal(0, is_last=False)
    group.accumulate(0, 1, full((3, 2), 1.0))
    if group.reduces_each_microbatch:
        group.reduce(communicator, 1)
    group.drop_grads()
    group.publish()
    return all(param.grad is None for param in group.sharded_params)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_dropped_step_leaves_no_gradient(ranks2: RankPool, strategy: str) -> None:
    assert ranks2.run(dropped, strategy) == [True, True]
