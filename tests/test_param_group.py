"""A group's weights and gradients: what goes through the door, what a reduction adds."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from sharding_support import STRATEGIES, own_rows, world_mesh
from torch import Tensor, nn

from ep_overlap.testing import RankPool
from fsdp_hooks.collectives import GroupCommunicator, new_torch_group
from fsdp_hooks.counters import Counters
from fsdp_hooks.mesh import GroupMesh
from fsdp_hooks.param_group import ParamGroup, ParamSlot
from fsdp_hooks.placement import Placement, placements_of
from fsdp_hooks.precision import dtypes_of


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """A group with what reduces it."""

    group: ParamGroup
    communicator: GroupCommunicator
    each_microbatch: bool

    def seal(self, microbatch: int, *, is_last: bool) -> None:
        is_reduced = is_last or self.each_microbatch
        self.group.gradients.seal(microbatch, is_last=is_last, is_reduced=is_reduced)

    def reduce(self, divisor: int) -> None:
        self.group.gradients.reduce(self.communicator, None, divisor=divisor)


def new_group(strategy: str) -> Reduced:
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
        mesh=GroupMesh(mesh),
        placements=placements,
        outer=Placement.REPLICATE,
        dtypes=dtypes_of(torch.float64, None),
    )
    communicator = GroupCommunicator(new_torch_group(range(mesh.size()), "test"), Counters())
    each_microbatch = placements.grad is Placement.SHARD
    return Reduced(group=group, communicator=communicator, each_microbatch=each_microbatch)


def full(shape: tuple[int, ...], value: float) -> Tensor:
    return torch.full(shape, value, dtype=torch.float64)


def one_parameter_without_gradient(strategy: str) -> list[tuple[Tensor, Tensor]]:
    """Rank 0 gives a gradient of ``a`` alone, rank 1 of ``b`` alone; fresh memory holds NaN."""
    made = new_group(strategy)
    group, rank = made.group, dist.get_rank()
    torch.use_deterministic_algorithms(True)  # torch.empty then fills with NaN
    try:
        assert torch.empty(3).isnan().all()
        group.gradients.accumulate(rank, 0, full((3, 2) if rank == 0 else (5,), 4.0))
        made.seal(0, is_last=True)
        made.reduce(2)
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
    made = new_group(strategy)
    group, gradients = made.group, made.group.gradients
    values: list[float] = []
    for _ in range(2):
        gradients.accumulate(0, 0, full((3, 2), 1.0))
        gradients.accumulate(0, 1, full((3, 2), 32.0))  # of the next microbatch, meanwhile
        gradients.accumulate(0, 0, full((3, 2), 2.0))
        for microbatch in (0, 1):
            made.seal(microbatch, is_last=microbatch == 1)
        for _ in range(2 if made.each_microbatch else 1):
            made.reduce(1)
        assert not gradients.holds_contributions(is_last=True, is_reduced=True)
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
    made = new_group(strategy)
    group = made.group
    group.gradients.accumulate(0, 0, full((3, 2), 1.0))
    made.seal(0, is_last=False)
    group.gradients.accumulate(0, 1, full((3, 2), 1.0))
    if made.each_microbatch:
        made.reduce(1)
    group.drop_grads()
    group.publish()
    return all(param.grad is None for param in group.sharded_params)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_dropped_step_leaves_no_gradient(ranks2: RankPool, strategy: str) -> None:
    assert ranks2.run(dropped, strategy) == [True, True]
