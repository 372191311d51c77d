"""Prefetch order of the standard path: which units are used next.

Registration order is a guess until the first step has recorded the real one, and backward is
guessed to be the reverse of forward. Forwards with gradients, forwards without, and backwards are
recorded apart: an evaluation between two training steps may run other units.

A forward that leaves the recorded order expects nothing from there on, so units are gathered on
demand, and its own order counts from then on. A backward may pass over units that get no gradient.
(With a schedule there is nothing to guess: its plan says when each unit is gathered.)
"""

from collections.abc import Sequence
from typing import final

Names = tuple[str, ...]
"""Unit names in the order of use, a unit as often as it is used."""


@final
class PrefetchOrder:
    """Told of each use as it begins, it tells which uses are still to come in this step.

    The root is in no order: its forward begins before all, and so does its backward.

    Args:
        names: unit names in registration order.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._guess = tuple(names)
        self._forwards: dict[bool, Names] = {}
        """What was recorded, by whether with gradients."""
        self._backward: Names | None = None
        """Of the backward that follows the forward with gradients."""
        self._with_grad = False
        self._seen: list[str] = []
        self._coming: Names = ()
        """What is expected of this step, first forwards, then backwards."""
        self._position = 0
        """The entries of ``_coming`` from here on are still to come."""
        self._num_forwards = 0

    def begin_forward(self, *, with_grad: bool) -> None:
        """The root's forward begins."""
        self._with_grad = with_grad
        self._seen = []
        forward = self._forward(with_grad=with_grad)
        self._expect((*forward, *self._backward_of(forward)) if with_grad else forward)
        self._num_forwards = len(forward)

    def on_forward(self, name: str) -> None:
        """This unit's forward begins."""
        self._seen.append(name)
        is_forward = self._position < self._num_forwards
        if is_forward and self._coming[self._position] == name:
            self._position += 1
        else:
            self.expect_nothing()

    def end_forward(self) -> bool:
        """The root's forward is over: what was seen is the order from now on.

        Returns:
            Whether it differs from what an earlier forward had recorded.
        """
        seen = tuple(self._seen)
        known = self._forwards.get(self._with_grad)
        self._forwards[self._with_grad] = seen
        if self._with_grad and seen != known:
            self._backward = None
        self._expect(self._backward_of(seen) if self._with_grad else ())
        return known is not None and seen != known

    def begin_backward(self) -> None:
        """A backward begins."""
        self._seen = []
        self._expect(self._backward_of(self._forward(with_grad=True)))

    def on_backward(self, name: str) -> None:
        """This unit's backward begins."""
        self._seen.append(name)
        if name in self._coming[self._position :]:
            self._position = self._coming.index(name, self._position) + 1
        else:
            self.expect_nothing()

    def end_backward(self) -> None:
        """The backward is over: what was seen is the order from now on."""
        self._backward = tuple(self._seen)
        self.expect_nothing()

    def expect_nothing(self) -> None:
        """Nothing is known of what comes."""
        self._expect(())

    def ahead(self, num_units: int) -> list[str]:
        """The units expected next, at most so many different ones."""
        found: dict[str, None] = {}
        for position in range(self._position, len(self._coming)):
            if len(found) == num_units:
                break
            found[self._coming[position]] = None
        return list(found)

    def farthest(self, names: Sequence[str]) -> str:
        """That one of the units whose next use is farthest, or not expected at all."""
        coming = self._coming[self._position :]
        return max(names, key=lambda name: coming.index(name) if name in coming else len(coming))

    def _expect(self, coming: Names) -> None:
        self._coming = coming
        self._position = 0
        self._num_forwards = 0

    def _forward(self, *, with_grad: bool) -> Names:
        """The expected forward. One of the other kind is a better guess than registration."""
        known = self._forwards
        return known.get(with_grad, known.get(not with_grad, self._guess))

    def _backward_of(self, forward: Names) -> Names:
        return forward[::-1] if self._backward is None else self._backward
