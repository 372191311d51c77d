"""Compares a step with its baseline: losses, every gradient, every weight, on every rank."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf, ulp
from typing import Any, Final, final

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
    """Of one tensor; or the largest of several."""

    amount: float
    """Relative to the expected tensor's largest entry; 0: equal bit for bit; inf: no matter of
    rounding."""
    how: str
    """In words, of which the tensor is the subject."""
    tensor: str
    rank: int
    step: int
    """As the progress bar counts."""

    @property
    def parity(self) -> Parity:
        """What it amounts to; only 0 is bitwise."""
        if self.amount == 0.0:
            return Parity.BITWISE
        return Parity.CLOSE if self.amount <= CLOSE_TOLERANCE else Parity.FAILED

    def as_json(self) -> dict[str, Any] | None:
        """Where and how it is; None where there is none."""
        if self.parity is Parity.BITWISE:
            return None
        return {"tensor": self.tensor, "rank": self.rank, "step": self.step, "how": self.how}


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
        if gradients:
            pairs.append((f"gradient of {name}", own.grad, other.grad))
        else:
            pairs.append((f"weight {name}", own, other))
    found: list[Difference] = []
    for tensor, *pair in pairs:
        amount, how = difference_of(*pair)
        found.append(Difference(amount=amount, how=how, tensor=tensor, rank=world.rank, step=step))
    return _largest(world.gathered(_largest(found)))


def _is_worse(first: Parity, second: Parity) -> bool:
    """Whether the first is less alike."""
    order = list(Parity)
    return order.index(first) > order.index(second)


def _largest(found: Iterable[Difference]) -> Difference:
    """The first of the largest."""
    return max(found, key=lambda difference: difference.amount)


def difference_of(ours: Tensor | None, theirs: Tensor | None) -> tuple[float, str]:
    """``Difference.amount`` and ``how``."""
    if ours is None or theirs is None:
        if ours is theirs:
            return 0.0, "is absent, as expected"
        return inf, "is missing" if ours is None else "is there, expected none"
    ours, theirs = local_part(ours.detach()), local_part(theirs.detach())
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return inf, f"is {_form(ours)}, expected {_form(theirs)}"
    if torch.equal(_bits(ours), _bits(theirs)):  # of values, NaN equals nothing
        return 0.0, "is equal"
    ours, theirs = ours.double(), theirs.double()
    if not (ours.isfinite().all() and theirs.isfinite().all()):
        return inf, "is not finite, or not where expected"
    apart, largest = float((ours - theirs).abs().max()), float(theirs.abs().max())
    if apart == 0.0:
        return ulp(0.0), "differs in the sign of zeros"
    if largest == 0.0:
        return inf, f"has an entry of {apart:.1e}, expected zeros"
    amount = max(apart / largest, ulp(0.0))  # the quotient may underflow; 0 is for equal bits
    return amount, f"differs by {amount:.1e} of its largest entry"


def _form(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@final
class Baseline:
    """The same model beside it on the standard path, compared after every step.

    Args:
        trainee: what is tried.
        twin: built by the same recipe.
        stepper: the twin's.
        world: the ranks that both are on.
        steps_before: of the trainee, before the first that is compared.
    """

    def __init__(
        self,
        trainee: Trainee,
        twin: Trainee,
        stepper: StandardStep,
        world: World,
        *,
        steps_before: int = 0,
    ) -> None:
        self.difference: Difference | None = None
        """The largest of the first step that was as bad as any: what follows may follow from it.
        None: nothing has been compared."""
        self._modules = (trainee.module, twin.module)
        self._twin = twin
        self._stepper = stepper
        self._world = world
        self._num_steps = steps_before

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
        if self.difference is None or _is_worse(found.parity, self.difference.parity):
            self.difference = found
