"""Which units are resident when: the fewest gathers within a budget of units.

The plan knows every future use, so the unit to give up is Belady's choice: the one that is used
again farthest in the future (L. A. Belady, "A study of replacement algorithms for a
virtual-storage computer", IBM Systems Journal 5(2), 1966). That rule is optimal for units of equal
size.

A *group* is a stretch of the order whose units are needed side by side: one layer in a lone pass,
the two layers of a steady pair. ``tests/test_plan_residency.py`` compares the number of gathers
with an exhaustive search under the same rules.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from ep_overlap.plan.action import Action, Compute, Node, Phase
from ep_overlap.plan.units import unit_of, units_read

_ENTERS: Final = frozenset({(Phase.FORWARD, Node.ATTN), (Phase.RECOMPUTE, Node.ATTN)})


@dataclass(frozen=True, kw_only=True)
class Group:
    """A stretch of the order, as the places of its nodes that read weights."""

    readers: tuple[tuple[int, str], ...]
    """(index in the order, unit), in issue order. Root and head are pinned, so not among them."""

    @property
    def units(self) -> frozenset[str]:
        """The units that the group reads."""
        return frozenset(unit for _, unit in self.readers)

    @property
    def last(self) -> int:
        """Index of the last reader: behind it the next group begins."""
        return self.readers[-1][0]


@dataclass(frozen=True, kw_only=True)
class Window:
    """One stay of a unit: from a gather to its release."""

    unit: str
    first_group: int
    """The first group that reads it."""
    first_reader: int
    last_reader: int
    """Both are indices in the order."""


def split_groups(order: Sequence[Action]) -> list[Group]:
    """Cut the order into groups: runs in which every pass enters its layer before any leaves it.

    A pass enters a layer with the first node that reads its weights (attn.F, mlp.B; attn.R where
    it is recomputed) and leaves with the last (mlp.F, attn.B). A new group starts at an entry that
    follows a leaving.
    """
    recomputed = {
        (action.microbatch, action.layer)
        for action in order
        if isinstance(action, Compute) and action.phase is Phase.RECOMPUTE
    }
    groups: list[Group] = []
    readers: list[tuple[int, str]] = []
    leaving = False
    for index, action in enumerate(order):
        if not isinstance(action, Compute) or action.layer is None:
            continue
        if not units_read(action, has_head=False):
            continue
        step = (action.phase, action.node)
        is_again = (action.microbatch, action.layer) in recomputed
        enters = step in _ENTERS or (step == (Phase.BACKWARD, Node.MLP) and not is_again)
        if enters and leaving:
            groups.append(Group(readers=tuple(readers)))
            readers = []
        # Between mlp.R and mlp.B a recomputed pass stays.
        stays = is_again and step in ((Phase.RECOMPUTE, Node.MLP), (Phase.BACKWARD, Node.MLP))
        leaving = not enters and (leaving or not stays)
        readers.append((index, unit_of(action)))
    if readers:
        groups.append(Group(readers=tuple(readers)))
    return groups


def default_budget(groups: Sequence[Group]) -> int:
    """The smallest budget under which every gather is issued one whole group ahead.

    That is this group's units plus the next group's: 4 where pairs follow pairs, 2 in a serial
    order, fewer where the model has fewer layers.
    """
    return max(len(need) for need in _needs(groups, budget=None))


def residency(groups: Sequence[Group], *, budget: int) -> list[Window]:
    """The stays of all units, by first reader, with the fewest gathers that ``budget`` allows.

    While a group runs, its own units are resident, and the next group's as well if both fit the
    budget together (they are gathered one group ahead).

    Raises:
        ValueError: a group alone needs more units than the budget.
    """
    widest = max(groups, key=lambda group: len(group.units))
    if budget < len(widest.units):
        raise ValueError(
            f"max_unsharded_units is too small: this order reads {len(widest.units)} units side "
            f"by side ({', '.join(sorted(widest.units))}), so expected at least "
            f"{len(widest.units)}, got {budget}; raise max_unsharded_units, or use the serial "
            "order, which needs 1"
        )
    needs = _needs(groups, budget=budget)
    resident = _keep(needs, budget=budget)
    return _windows(groups, resident)


def _needs(groups: Sequence[Group], *, budget: int | None) -> list[frozenset[str]]:
    """What must be resident in each group: its units, and the next group's if both fit."""
    needs: list[frozenset[str]] = []
    for index, group in enumerate(groups):
        both = group.units.union(*(ahead.units for ahead in groups[index + 1 : index + 2]))
        needs.append(both if budget is None or len(both) <= budget else group.units)
    return needs


def _keep(needs: Sequence[frozenset[str]], *, budget: int) -> list[frozenset[str]]:
    """What is resident in each group: give up, when a unit must go, by Belady's rule."""
    next_needs: list[dict[str, int]] = []  # of each group: the next group that needs the unit
    upcoming: dict[str, int] = {}
    for index in reversed(range(len(needs))):
        next_needs.append(dict(upcoming))
        upcoming.update(dict.fromkeys(needs[index], index))
    next_needs.reverse()

    resident: list[frozenset[str]] = []
    held: frozenset[str] = frozenset()
    for need, next_need in zip(needs, next_needs, strict=True):
        spare = sorted(held - need, key=lambda unit: (next_need.get(unit, inf), unit))
        held = need.union(spare[: budget - len(need)])
        resident.append(held)
    return resident


def _windows(groups: Sequence[Group], resident: Sequence[frozenset[str]]) -> list[Window]:
    """Stays, each cut to its readers: a unit given up leaves right after its last use."""
    windows: list[Window] = []
    open_windows: dict[str, Window] = {}
    for index, (group, held) in enumerate(zip(groups, resident, strict=True)):
        for unit in open_windows.keys() - held:
            windows.append(open_windows.pop(unit))
        for reader, unit in group.readers:
            window = open_windows.get(unit)
            open_windows[unit] = Window(
                unit=unit,
                first_group=index if window is None else window.first_group,
                first_reader=reader if window is None else window.first_reader,
                last_reader=reader,
            )
    windows += open_windows.values()
    return sorted(windows, key=lambda window: window.first_reader)
