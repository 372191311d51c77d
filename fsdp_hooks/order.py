"""Prefetch order of the standard path: which unit is used next.

Registration order is a guess until the first step has recorded the real one. (With a schedule
there is nothing to guess: its plan says when each unit is gathered.)
"""

from collections.abc import Sequence
from typing import final


@final
class PrefetchOrder:
    """The order of the units' forwards; backward runs it in reverse.

    Args:
        names: unit names in registration order.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._order = list(names)
        self._seen: list[str] = []

    def on_forward(self, name: str) -> str | None:
        """Note that this unit's forward begins. Returns the one expected next.

        The root is in no order: its forward begins before all, its backward before all.
        """
        if name not in self._order:
            return self._order[0] if self._order else None
        if name not in self._seen:
            self._seen.append(name)
        return self._neighbour(name, 1)

    def on_backward(self, name: str) -> str | None:
        """Returns the unit whose backward is expected after this one's."""
        if name not in self._order:
            return self._order[-1] if self._order else None
        return self._neighbour(name, -1)

    def end_forward(self) -> None:
        """The root's forward is over: what was seen is the order from now on."""
        unseen = [name for name in self._order if name not in self._seen]
        self._order = self._seen + unseen
        self._seen = []

    def _neighbour(self, name: str, step: int) -> str | None:
        position = self._order.index(name) + step
        return self._order[position] if 0 <= position < len(self._order) else None
