"""What --check-parity compares, and how it names what differs."""

from json import loads
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ep_overlap.cli import main
from ep_overlap.commands import parity
from ep_overlap.commands.parity import Difference, Parity, compare, difference_of
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
        if found.parity is Parity.BITWISE:
            found = compare(((), ()), models, world, gradients=False, step=3)
        return f"{found.parity} {found.as_json()}"

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


def json(tensor: str, how: str) -> dict[str, Any]:
    return {"tensor": tensor, "rank": 1, "step": 3, "how": how}


def test_what_differs_is_named_on_all_ranks(ranks2: RankPool) -> None:
    rounding, quarter = (f"differs by {x} of its largest entry" for x in ("9.5e-07", "2.5e-01"))
    for found in ranks2.run(found_on_two_ranks):
        assert found == {
            "nothing": "bitwise None",
            "a gradient": f"close {json('gradient of 1.bias', rounding)}",
            "no gradient": f"failed {json('gradient of 0.weight', 'is missing')}",
            "a weight": f"failed {json('weight 0.bias', 'is not finite, or not where expected')}",
            "a loss": f"failed {json('loss of microbatch 1', quarter)}",
        }


NAN = torch.tensor([1.0, torch.nan])


@pytest.mark.parametrize(
    ("ours", "theirs", "amount", "how"),
    [
        (NAN, NAN.clone(), 0.0, "is equal"),
        (None, None, 0.0, "is absent, as expected"),
        (NAN, torch.tensor([1.0, 2.0]), inf, "is not finite, or not where expected"),
        (NAN, None, inf, "is there, expected none"),
        (
            torch.ones(2),
            torch.ones(2, 1, dtype=torch.bfloat16),
            inf,
            "is (2,) of torch.float32, expected (2, 1) of torch.bfloat16",
        ),
        (torch.tensor([-0.0, 1.0]), torch.tensor([0.0, 1.0]), 5e-324, "the sign of zeros"),
        (torch.tensor([0.0, 3.0]), torch.zeros(2), inf, "has an entry of 3.0e+00, expected zeros"),
        # Each under- or overflows in its own type.
        (torch.tensor([6e4], dtype=torch.half), torch.tensor([-6e4], dtype=torch.half), 2.0, "by"),
        (torch.tensor([1e-45, 3e5]), torch.tensor([0.0, 3e5]), 1e-45 / 3e5, "by 4.7e-51 of"),
        # Its quotient does in every type.
        (
            torch.tensor([2.0, 5e-324], dtype=torch.double),
            torch.tensor([2.0, 0.0], dtype=torch.double),
            5e-324,
            "by",
        ),
    ],
    ids=str,
)
def test_a_difference_is_told_for_what_it_is(
    ours: Tensor | None, theirs: Tensor | None, amount: float, how: str
) -> None:
    found, told = difference_of(ours, theirs)
    assert found == pytest.approx(amount, rel=0.5, abs=0.0)
    assert how in told


@pytest.mark.parametrize(
    ("amount", "expected"),
    [(0.0, Parity.BITWISE), (5e-324, Parity.CLOSE), (1e-5, Parity.CLOSE), (1.1e-5, Parity.FAILED)],
)
def test_a_difference_is_rounding_up_to_the_tolerance(amount: float, expected: Parity) -> None:
    found = Difference(amount=amount, how="", tensor="a", rank=0, step=1)
    assert found.parity is expected


@pytest.mark.usefixtures("rank")
def test_the_first_step_that_is_as_bad_as_any_is_named_by_its_number_in_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What follows, and may be larger, follows from it."""
    command = (
        "train --model reference --hidden-size 32 --moe-ffn-hidden-size 48 --seq-length 16 "
        f"--num-attention-heads 2 --num-layers 1 --save {tmp_path / 'saved'} --train-iters 2"
    )
    assert main(command.split()) == 0
    amounts = iter([0.0, 0.0, 1e-6, 3e-6, 1e-3, 1e-4, 1.0, 1.0])

    def compared(*given: object, step: int, **named: object) -> Difference:
        return Difference(amount=next(amounts), how="differs", tensor="a", rank=0, step=step)

    monkeypatch.setattr(parity, "compare", compared)
    result = tmp_path / "result.json"
    command = command.replace("--train-iters 2", "--train-iters 6").replace("--save", "--load")
    assert main([*command.split(), "--check-parity", "--json", str(result)]) == 1
    assert next(amounts, None) is None
    told = {"tensor": "a", "rank": 0, "step": 5, "how": "differs"}
    assert loads(result.read_text())["parity_difference"] == told
