"""What is gathered when, on the standard path: on demand, and ahead of use within a budget.

After each hook these are gathered, and all else is released:

* the root's unit, for the whole step;
* the units in use: a forward or a backward that reads their parameters runs;
* units whose forward was recomputed in this backward, until their own backward is done;
* the next ``prefetch_depth`` different units of the expected order, as far as the budget goes.

A budget is kept at issue: the AG lane runs gathers and releases in the order of their issue, so
what is issued and not released is what lives there. With a budget

* a gather ahead that does not fit is put off until something was released;
* a gather on demand always goes, and first releases what is not in use, the unit used last first,
  as far as it must;
* so unsharded bytes never exceed the larger of the budget and what is in use at one time;
* a budget is refused if a unit and those around it, the root among them, do not fit;
* a unit counts with its bytes on the rank where it has most (ranks may hold unlike experts): all
  ranks must gather in one order, so what fits is decided alike.

Without one they never exceed what is in use, what was recomputed, and ``prefetch_depth`` units.
"""

from collections import Counter
from collections.abc import Mapping
from typing import final

from torch import nn

from fsdp_hooks.lifecycle import UnitState
from fsdp_hooks.order import PrefetchOrder
from fsdp_hooks.root import FsdpRoot
from fsdp_hooks.unit import FsdpUnit


@final
class Forward:
    """One forward of the root, or all that one backward recomputes.

    Calls are counted, and not looked for in the graph: which graphs are alive is a rank's own
    affair (a kept output), and the order of reductions must not depend on it.
    """

    __slots__ = ("num_open",)

    def __init__(self) -> None:
        self.num_open: Counter[str] = Counter()
        """By unit: calls whose backward has not begun."""


@final
class Call:
    """One call of a unit that will have a backward."""

    __slots__ = ("forward",)

    def __init__(self, forward: Forward) -> None:
        self.forward = forward


@final
class Use:
    """A unit, and who uses it now."""

    __slots__ = ("count", "is_recomputed", "unit")

    def __init__(self, unit: FsdpUnit) -> None:
        self.unit = unit
        self.count = 0
        """Forwards and backwards that read the parameters now."""
        self.is_recomputed = False
        """Whether its forward was recomputed in this backward, and its own backward is near."""

    @property
    def is_live(self) -> bool:
        """Whether there is something to release."""
        return self.unit.releases and self.unit.state is UnitState.UNSHARDED


@final
class Prefetch:
    """See the module's docstring.

    Args:
        uses: of all units, by name.

    Raises:
        ValueError: the budget is too small for one unit and those around it. (At the root's build,
            which is its first use.)
    """

    def __init__(self, root: FsdpRoot, uses: Mapping[str, Use]) -> None:
        self.order = PrefetchOrder([unit.name for unit in root.inner_units])
        self._root_unit = root.root_unit
        self._caller = root.context.caller
        self._depth = root.context.prefetch_depth
        self._budget = root.context.max_unsharded_bytes
        self._bytes = _unsharded_bytes(root)
        self._uses = uses
        self._gathered: dict[str, Use] = {}
        """At least those that are live: the end of a step releases without asking here."""
        _check_budget(root, self._bytes)

    def gather(self, use: Use) -> None:
        """On demand: the caller's next work reads the parameters."""
        unit = use.unit
        if not unit.gathers:
            return
        if self._budget is not None and unit.state is UnitState.SHARDED:
            self._make_room(self._budget - self._bytes[unit.name])
        self._gathered[unit.name] = use
        self._caller.wait(unit.unshard(), word=f"wait for {unit.name}")

    def look_ahead(self) -> None:
        """Release what is not used soon, and gather what is."""
        ahead = self.order.ahead(self._depth)
        for use in self._idle():
            if use.unit.name not in ahead and not use.is_recomputed:
                self._release(use)
        for use in map(self._uses.__getitem__, ahead):
            if use.unit.state is UnitState.SHARDED:
                if not self._fits(use.unit):
                    break  # in the order of use: a smaller one behind it would take its room
                self._gathered[use.unit.name] = use
                use.unit.unshard()

    def _fits(self, unit: FsdpUnit) -> bool:
        budget = self._budget
        return budget is None or self._live_bytes() + self._bytes[unit.name] <= budget

    def _idle(self) -> list[Use]:
        """What could be released now."""
        return [
            use
            for use in self._gathered.values()
            if use.count == 0 and use.is_live and use.unit is not self._root_unit
        ]

    def _live_bytes(self) -> int:
        """Unsharded storage once the AG lane has done what was issued."""
        return sum(self._bytes[use.unit.name] for use in self._gathered.values() if use.is_live)

    def _make_room(self, max_bytes: int) -> None:
        """Release what is not in use, the unit used last first, until so much is live."""
        idle = {use.unit.name: use for use in self._idle()}
        while idle and self._live_bytes() > max_bytes:
            self._release(idle.pop(self.order.farthest(list(idle))))

    def _release(self, use: Use) -> None:
        # Behind what the caller has issued: the unit's own compute still reads the storage.
        use.unit.reshard(after=(self._caller.record(f"use of {use.unit.name}"),))
        del self._gathered[use.unit.name]


def _unsharded_bytes(root: FsdpRoot) -> Mapping[str, int]:
    """By unit; with a budget the most that any rank has, which takes a collective."""
    sizes = [unit.unsharded_bytes for unit in root.units]
    if root.context.max_unsharded_bytes is not None:
        sizes = root.context.largest(sizes)
    return {unit.name: size for unit, size in zip(root.units, sizes, strict=True)}


def _check_budget(root: FsdpRoot, unsharded_bytes: Mapping[str, int]) -> None:
    budget = root.context.max_unsharded_bytes
    if budget is None:
        return
    needed: dict[nn.Module, int] = {}
    for unit in root.units:
        for module in unit.module.modules():
            needed[module] = needed.get(module, 0) + unsharded_bytes[unit.name]
    largest = max(root.units, key=lambda unit: needed[unit.module])
    if budget < needed[largest.module]:
        raise ValueError(
            f"max_unsharded_bytes is {budget}; expected at least {needed[largest.module]}: unit "
            f"{largest.name} and those around it, the root among them, are gathered at one time. "
            "Raise the budget, or make smaller units"
        )
