"""Compares a step with its baseline: losses, every gradient, every weight, on every rank."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, final

import torch
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


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The largest of what was compared."""

    amount: float
    """Relative to the tensor's largest entry; 0: equal bit for bit; inf: of another shape or dtype,
    not finite, or there on one side alone."""
    where: str
    """The tensor, the rank and the step."""

    @property
    def parity(self) -> Parity:
        """What it amounts to; only 0 is bitwise."""
        if self.amount == 0.0:
            return Parity.BITWISE
        return Parity.CLOSE if self.amount <= CLOSE_TOLERANCE else Parity.FAILED

    def __str__(self) -> str:
        if self.parity is Parity.BITWISE:
            return str(self.parity)
        if self.amount == float("inf"):
            return (
                f"{self.parity}: {self.where} is missing, not finite, or of another shape or dtype"
            )
        return f"{self.parity}: {self.where} differs by {self.amount:.1e} of its largest entry"


def compare(
    losses: tuple[Sequence[Tensor], Sequence[Tensor]],
    modules: tuple[nn.Module, nn.Module],
    world: World,
    *,
    gradients: bool,
    step: int,
) -> Difference:
    """The worst of all ranks. Collective. ``gradients``: compare ``.grad``, else the weights."""
    ours, theirs = modules
    pairs: list[tuple[str, Tensor | None, Tensor | None]] = [
        (f"loss of microbatch {index}", *pair)
        for index, pair in enumerate(zip(*losses, strict=True))
    ]
    for (name, own), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        pairs.append(
            (f"gradient of {name}", own.grad, other.grad) if gradients else (name, own, other)
        )
    here = _largest(
        Difference(amount=_difference(*pair), where=f"{what} on rank {world.rank} in step {step}")
        for what, *pair in pairs
    )
    return _largest(world.gathered(here))


def _largest(found: Iterable[Difference]) -> Difference:
    """The first of the largest."""
    return max(found, key=lambda difference: difference.amount)


def _difference(ours: Tensor | None, theirs: Tensor | None) -> float:
    """See ``Difference.amount``."""
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else float("inf")
    ours, theirs = local_part(ours), local_part(theirs)
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
        self.worst = Difference(amount=0.0, where="")
        self._modules = (trainee.module, twin.module)
        self._twin = twin
        self._stepper = stepper
        self._world = world
        self._num_steps = 0

    def step(
        self,
        pairs: Sequence[tuple[Tensor, Tensor]],
        losses: Sequence[Tensor],
    ) -> None:
        """The twin's step on the same ``pairs`` of tokens and targets; losses and gradients are
        compared. Collective."""
        twin = self._twin
        self._num_steps += 1
        twin.optimizer.zero_grad()
        expected = self._stepper.step([twin.make_batch(*pair) for pair in pairs]).losses
        self._note((losses, expected), gradients=True)

    def after_update(self) -> None:
        """The trainee's optimizer has stepped: so does the twin's, and weights are compared.
        Collective."""
        self._twin.optimizer.step()
        self._note(((), ()), gradients=False)

    def _note(self, losses: tuple[Sequence[Tensor], Sequence[Tensor]], *, gradients: bool) -> None:
        found = compare(
            losses, self._modules, self._world, gradients=gradients, step=self._num_steps
        )
        self.worst = _largest((self.worst, found))
