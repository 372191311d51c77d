"""What --check-parity compares, and how it names what differs."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ep_overlap.commands.parity import Difference, Parity, compare
from ep_overlap.commands.world import World
from ep_overlap.testing import RankPool
from fsdp_hooks.collectives import new_torch_group

TINY = 2.0**-20


def twins() -> tuple[nn.Module, nn.Module]:
    """Equal, with equal gradients."""
    made: list[nn.Module] = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        made.append(model)
    return made[0], made[1]


def world_of_all() -> World:
    ranks = range(dist.get_world_size())
    return World(
        rank=dist.get_rank(),
        size=len(ranks),
        device=torch.device("cpu"),
        speed=None,
        control=new_torch_group(ranks, "control"),
    )


def found_on_two_ranks() -> dict[str, str]:
    """What rank 1 alone has otherwise, and what every rank is told."""
    world = world_of_all()
    is_last = world.rank == 1
    equal = (torch.tensor(1.0), torch.tensor(2.0))

    def told(models: tuple[nn.Module, nn.Module], losses: tuple[Tensor, ...] = equal) -> str:
        found = compare((losses, equal), models, world, gradients=True, step=3)
        weights = compare(((), ()), models, world, gradients=False, step=3)
        return f"{found}; {weights}"

    results = {"nothing": told(twins())}
    models = twins()
    if is_last:
        models[0].get_parameter("1.bias").grad = torch.tensor([1.0 + TINY])
    results["a gradient"] = told(models)
    models = twins()
    if is_last:
        models[0].get_parameter("0.weight").grad = None
    results["no gradient"] = told(models)
    models = twins()
    if is_last:
        with torch.no_grad():
            models[0].get_parameter("0.bias").fill_(torch.nan)
    results["a weight"] = told(models)
    losses = (torch.tensor(1.0), torch.tensor(2.5 if is_last else 2.0))
    results["a loss"] = told(twins(), losses)
    return results


def test_what_differs_is_named_on_all_ranks(ranks2: RankPool) -> None:
    unlike = "is missing, not finite, or of another shape or dtype"
    for found in ranks2.run(found_on_two_ranks):
        assert found == {
            "nothing": "bitwise; bitwise",
            "a gradient": "close: gradient of 1.bias on rank 1 in step 3 differs by 9.5e-07 of its "
            "largest entry; bitwise",
            "no gradient": f"failed: gradient of 0.weight on rank 1 in step 3 {unlike}; bitwise",
            "a weight": f"bitwise; failed: 0.bias on rank 1 in step 3 {unlike}",
            "a loss": "failed: loss of microbatch 1 on rank 1 in step 3 differs by 2.5e-01 of its "
            "largest entry; bitwise",
        }


@pytest.mark.parametrize(
    ("amount", "parity"),
    [(0.0, Parity.BITWISE), (1e-5, Parity.CLOSE), (1.1e-5, Parity.FAILED)],
)
def test_a_difference_is_rounding_up_to_the_tolerance(amount: float, parity: Parity) -> None:
    assert Difference(amount=amount, where="a").parity is parity
