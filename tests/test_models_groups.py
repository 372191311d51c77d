"""The expert groups, and the moves of tokens."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ep_overlap.models.exchange import all_to_all, gather_counts, reorder
from ep_overlap.models.groups import ExpertGroups, lone_expert_groups, new_expert_groups


def bare_group(rank: int, size: int) -> dist.ProcessGroup:
    return dist.ProcessGroup(dist.HashStore(), rank, size)


@pytest.fixture
def rank_2_of_4() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("rank_2_of_4")
def test_every_rank_makes_all_groups_in_one_order_and_keeps_its_own():
    made = []

    def new_group(ranks: list[int], *, group_desc: str) -> object:
        made.append((group_desc, ranks))
        return bare_group(ranks.index(2), len(ranks)) if 2 in ranks else None

    groups = new_expert_groups(2, new_group=new_group)
    assert made == [
        ("ep_exchange", [0, 1]),
        ("ep_counts", [0, 1]),
        ("ep_exchange", [2, 3]),
        ("ep_counts", [2, 3]),
    ]
    assert (groups.rank, groups.size) == (0, 2)


@pytest.mark.usefixtures("rank_2_of_4")
@pytest.mark.parametrize("size", [3, 8, 0])
def test_a_world_that_does_not_divide_is_refused(size: int):
    with pytest.raises(ValueError, match=f"world size 4 is not a multiple of .* {size}"):
        new_expert_groups(size)


def test_expert_parallel_size_1_needs_no_torch_distributed():
    assert not dist.is_initialized()
    groups = new_expert_groups(1)
    assert (groups.rank, groups.size) == (0, 1)


def test_one_group_for_both_lanes_is_refused():
    group = bare_group(0, 2)
    with pytest.raises(ValueError, match="one group, which two threads would use at once"):
        ExpertGroups(exchange=group, counts=group)


def test_groups_of_different_ranks_are_refused():
    with pytest.raises(ValueError, match=r"got \(size, rank\) \(2, 0\) and \(2, 1\)"):
        ExpertGroups(exchange=bare_group(0, 2), counts=bare_group(1, 2))


def test_reorder_and_its_inverse_undo_each_other_forward_and_backward():
    order = torch.tensor([2, 0, 3, 1])
    rows = torch.arange(8.0).view(4, 2).requires_grad_()
    moved = reorder(rows, order)
    assert torch.equal(moved, rows[order])
    assert torch.equal(reorder(moved, order, inverse=True), rows)
    grad = torch.arange(8.0).view(4, 2) + 10
    moved.backward(grad)
    assert torch.equal(rows.grad[order], grad)
    rows.grad = None
    reorder(rows, order, inverse=True).backward(grad)
    assert torch.equal(rows.grad, grad[order])


def test_with_one_rank_an_exchange_is_a_view_with_a_place_in_the_graph():
    group = lone_expert_groups().exchange
    rows = torch.ones(3, 2, requires_grad=True)
    received = all_to_all(rows, [3], [3], group)
    assert received.grad_fn is not None
    assert received.data_ptr() == rows.data_ptr()
    assert gather_counts(torch.tensor([1, 2]), group).tolist() == [[1, 2]]
