"""Compares a step with its baseline: losses, every gradient, every weight, on every rank."""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ep_overlap.commands.trainee import StandardStep, Trainee
from ep_overlap.commands.world import World, local_part

CLOSE_TOLERANCE: Final = 1e-5
"""Largest difference, relative to the tensor's largest entry, that counts as rounding in fp32."""


class Parity(StrEnum):
    """How alike two steps are."""

    BITWISE = "bitwise"
    CLOSE = "close"
    FAILED = "failed"


def compare(
    losses: tuple[Sequence[Tensor], Sequence[Tensor]],
    modules: tuple[nn.Module, nn.Module],
    world: World,
    *,
    gradients: bool,
) -> Parity:
    """The worst of all ranks. Collective. ``gradients``: compare ``.grad``, else the weights."""
    worst = _worst(zip(*losses, strict=True))
    pairs = zip(*(list(module.parameters()) for module in modules), strict=True)
    for ours, theirs in pairs:
        if not gradients:
            worst = max(worst, _difference(local_part(ours), local_part(theirs)))
        elif (ours.grad is None) != (theirs.grad is None):
            worst = float("inf")
        elif ours.grad is not None and theirs.grad is not None:
            worst = max(worst, _difference(local_part(ours.grad), local_part(theirs.grad)))
    everywhere = torch.tensor(worst, dtype=torch.float64)
    dist.all_reduce(everywhere, op=dist.ReduceOp.MAX, group=world.control)
    return classify(float(everywhere))


def classify(difference: float) -> Parity:
    """What a largest relative difference amounts to; only 0 is bitwise."""
    if difference == 0.0:
        return Parity.BITWISE
    return Parity.CLOSE if difference <= CLOSE_TOLERANCE else Parity.FAILED


def worse(first: Parity, second: Parity) -> Parity:
    """The less alike of two."""
    order = list(Parity)
    return max(first, second, key=order.index)


def _worst(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    return max((_difference(a, b) for a, b in pairs), default=0.0)


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """0 only if equal bit for bit; else relative to the largest entry; inf where not finite, or of
    another shape or type."""
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return float("inf")
    if torch.equal(_bits(ours), _bits(theirs)):  # of values, NaN equals nothing
        return 0.0
    largest = theirs.abs().max().clamp_min(torch.finfo(theirs.dtype).tiny)
    difference = float(((ours - theirs).abs().max() / largest).item())
    return difference if difference == difference and difference > 0 else float("inf")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


@final
class Baseline:
    """The same model beside it on the standard path, compared after every step.

    Args:
        trainee: what is tried.
        twin: built by the same recipe.
        stepper: the twin's.
        world: the ranks that both are on.
    """

    def __init__(
        self, trainee: Trainee, twin: Trainee, stepper: StandardStep, world: World
    ) -> None:
        self.parity = Parity.BITWISE
        self._modules = (trainee.module, twin.module)
        self._twin = twin
        self._stepper = stepper
        self._world = world

    def step(
        self,
        pairs: Sequence[tuple[Tensor, Tensor]],
        losses: Sequence[Tensor],
    ) -> None:
        """The twin's step on the same ``pairs`` of tokens and targets; losses and gradients are
        compared. Collective."""
        twin = self._twin
        twin.optimizer.zero_grad()
        expected = self._stepper.step([twin.make_batch(*pair) for pair in pairs]).losses
        found = compare((losses, expected), self._modules, self._world, gradients=True)
        self.parity = worse(self.parity, found)

    def after_update(self) -> None:
        """The trainee's optimizer has stepped: so does the twin's, and weights are compared.
        Collective."""
        self._twin.optimizer.step()
        found = compare(((), ()), self._modules, self._world, gradients=False)
        self.parity = worse(self.parity, found)
