"""Prefetch order of the standard path: which unit is used next.

Registration order is a guess until the first step has recorded the real one. A later step that
leaves the recorded order gathers on demand from there on, and its own order counts from then on.
(With a schedule there is nothing to guess: its plan says when each unit is gathered.)
"""

from collections.abc import Sequence
from typing import final


@final
class PrefetchOrder:
    """The order of the units' forwards, a unit as often as it is called; backward is the reverse.

    The root is in no order: its forward begins before all, and so does its backward.

    Args:
        names: unit names in registration order.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._order = list(names)
        self._is_guess = True
        self._seen: list[str] = []
        self._on_track = True
        self._position = 0
        """In backward: the entries of ``_order`` before this one are still to come."""

    def begin_forward(self) -> str | None:
        """The root's forward begins. Returns the unit expected first."""
        self._seen = []
        self._on_track = True
        return self._order[0] if self._order else None

    def on_forward(self, name: str) -> str | None:
        """Note that this unit's forward begins. Returns the one expected next, if any."""
        num_before = len(self._seen)
        self._seen.append(name)
        self._on_track = self._on_track and self._order[num_before : num_before + 1] == [name]
        num_seen = num_before + 1
        return self._order[num_seen] if self._on_track and num_seen < len(self._order) else None

    def end_forward(self) -> bool:
        """The root's forward is over: what was seen is the order from now on.

        Returns:
            Whether it differs from what an earlier forward had recorded.
        """
        is_news = self._seen != self._order and not self._is_guess
        self._order = self._seen
        self._is_guess = False
        return is_news

    def begin_backward(self) -> str | None:
        """A backward begins. Returns the unit expected first, if it starts from the root."""
        self._position = len(self._order)
        return self._order[-1] if self._order else None

    def on_backward(self, name: str) -> str | None:
        """This unit's backward begins. Returns the one expected next, if any."""
        to_come = self._order[: self._position]
        if name not in to_come:
            return None
        self._position = len(to_come) - 1 - to_come[::-1].index(name)
        return self._order[self._position - 1] if self._position else None
