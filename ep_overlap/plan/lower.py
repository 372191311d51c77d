"""Passes that complete an order: actions in, actions out.

``add_sync`` puts the host's waits for split sizes in; ``add_sharding`` puts gathers, releases and
reductions in. Both only insert: the nodes keep their order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from numbers import Integral

from ep_overlap.plan.action import (
    HEAD_UNIT,
    ROOT_UNIT,
    Action,
    Compute,
    Node,
    Phase,
    Sync,
    UnitAction,
    UnitOp,
)
from ep_overlap.plan.residency import Group, Window, default_budget, residency, split_groups
from ep_overlap.plan.units import units_given, units_read


class Strategy(StrEnum):
    """What is sharded, by Megatron's names (``--data-parallel-sharding-strategy``)."""

    NO_SHARD = "no_shard"
    OPTIM = "optim"
    OPTIM_GRADS = "optim_grads"
    OPTIM_GRADS_PARAMS = "optim_grads_params"

    @property
    def shards_params(self) -> bool:
        """Whether weights are gathered before use and released after."""
        return self is Strategy.OPTIM_GRADS_PARAMS

    @property
    def shards_main(self) -> bool:
        """Whether the weights that the optimizer updates are shards: those that compute reads must
        then be gathered, once a step or before every use."""
        return self is not Strategy.NO_SHARD

    @property
    def shards_grads(self) -> bool:
        """Whether a rank keeps only its shard of the gradients."""
        return self in (Strategy.OPTIM_GRADS, Strategy.OPTIM_GRADS_PARAMS)


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How a plan's units are sharded.

    Raises:
        ValueError: ``max_unsharded_units`` is below 1, or there is no such strategy.
    """

    strategy: Strategy
    max_unsharded_units: int | None = None
    """Budget of layer units gathered at once, where parameters are sharded; root and head are
    pinned and counted apart. None: this group's units and the next's
    (``residency.default_budget``)."""
    reduce_each_microbatch: bool | None = None
    """None: every microbatch where gradients are sharded, else once a step."""
    has_head: bool = False
    """Whether the output layer is a unit of its own."""

    def __post_init__(self) -> None:
        check_budget(self.max_unsharded_units)
        if self.strategy not in list(Strategy):
            known = ", ".join(Strategy)
            raise ValueError(f"unknown strategy {self.strategy!r}; expected one of {known}")
        object.__setattr__(self, "strategy", Strategy(self.strategy))  # its name is one, too

    @property
    def reduces_each_microbatch(self) -> bool:
        """``reduce_each_microbatch`` with its default filled in."""
        if self.reduce_each_microbatch is not None:
            return self.reduce_each_microbatch
        return self.strategy.shards_grads

    def budget(self, order: Sequence[Action]) -> int:
        """How many layer units may be gathered at once in this order."""
        if self.max_unsharded_units is not None:
            return self.max_unsharded_units
        return default_budget(split_groups(order))


def is_count(value: object) -> bool:
    """Whether it is a whole number of at least 1, which True is not."""
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 1


def check_budget(max_unsharded_units: int | None) -> None:
    """What can be said of a budget before there is an order.

    Raises:
        ValueError: it is no whole number of at least 1.
    """
    if max_unsharded_units is not None and not is_count(max_unsharded_units):
        raise ValueError(
            f"max_unsharded_units must be at least 1, got {max_unsharded_units!r}; leave it out "
            "for the default"
        )


def add_sync(actions: Sequence[Action]) -> list[Action]:
    """Make the host wait for the split sizes right before each forward dispatch, first or again,
    not earlier: what was issued in between keeps the compute lane busy meanwhile."""
    lowered: list[Action] = []
    for action in actions:
        if (
            isinstance(action, Compute)
            and action.node is Node.DISPATCH
            and action.phase is not Phase.BACKWARD
            and action.layer is not None
        ):
            lowered.append(Sync(action.microbatch, action.layer, action.phase))
        lowered.append(action)
    return lowered


def add_sharding(actions: Sequence[Action], sharding: Sharding) -> list[Action]:
    """Add the unit actions that the strategy asks for.

    Raises:
        ValueError: the budget is below what one group of the order needs.
    """
    has_head = sharding.has_head
    lowered = add_reduce(
        actions, each_microbatch=sharding.reduces_each_microbatch, has_head=has_head
    )
    if sharding.strategy.shards_params:
        # After add_reduce, so that at one place gathers, which compute waits for, come first.
        lowered = add_residency(lowered, budget=sharding.budget(actions), has_head=has_head)
    elif sharding.strategy.shards_main:
        lowered = add_weight_sync(lowered, has_head=has_head)
    return lowered


def add_reduce(actions: Sequence[Action], *, each_microbatch: bool, has_head: bool) -> list[Action]:
    """Reduce each unit right after the last node that gives it gradients: of every microbatch,
    or of the step."""
    last: dict[tuple[str, int | None], int] = {}
    for index, action in enumerate(actions):
        if isinstance(action, Compute):
            for unit in units_given(action, has_head=has_head):
                last[unit, action.microbatch if each_microbatch else None] = index
    complete: dict[int, list[str]] = {}  # behind an action
    for (unit, _), index in last.items():
        complete.setdefault(index, []).append(unit)
    lowered: list[Action] = []
    for index, action in enumerate(actions):
        lowered.append(action)
        lowered += (UnitAction(UnitOp.REDUCE, unit) for unit in complete.get(index, ()))
    return lowered


def add_residency(actions: Sequence[Action], *, budget: int, has_head: bool) -> list[Action]:
    """Gather every unit before its readers and release it after, with the fewest gathers.

    Within the stays that ``residency`` chose, everything happens as early as it can: a release
    right after the stay's last reader, a gather as soon as a slot is free, but no earlier than
    the start of the group before its first reader. The root stays for the whole step; the head
    comes a group ahead of the first ``post`` and stays until the last.

    Raises:
        ValueError: the budget is below what one group of the order needs.
    """
    groups = split_groups(actions)
    placers = [_Placer(residency(groups, budget=budget), budget=budget)]
    if has_head:
        placers.append(_Placer([_stay_of_head(actions, groups)], budget=1))
    groups_begun_behind = {group.last: index + 1 for index, group in enumerate(groups)}
    lowered: list[Action] = [UnitAction(UnitOp.UNSHARD, ROOT_UNIT)]
    for placer in placers:
        lowered += placer.gather(group=0)
    group = 0
    for index, action in enumerate(actions):
        lowered.append(action)
        group = groups_begun_behind.get(index, group)
        for placer in placers:
            lowered += placer.release(reader=index)
            lowered += placer.gather(group=group)
    return [*lowered, UnitAction(UnitOp.RESHARD, ROOT_UNIT)]


def _stay_of_head(actions: Sequence[Action], groups: Sequence[Group]) -> Window:
    """The head's one stay, as if the first ``post`` were a group of its own."""
    readers = [i for i, a in enumerate(actions) if HEAD_UNIT in units_read(a, has_head=True)]
    num_groups_before = sum(group.last < readers[0] for group in groups)
    return Window(
        unit=HEAD_UNIT,
        first_group=num_groups_before,
        first_reader=readers[0],
        last_reader=readers[-1],
    )


def add_weight_sync(actions: Sequence[Action], *, has_head: bool) -> list[Action]:
    """Gather every unit once, ahead of its first reader, to stay: the optimizer has changed main
    weights since the last step."""
    read = (unit for action in actions for unit in units_read(action, has_head=False))
    num_layers = len(set(read) - {ROOT_UNIT})
    return [
        action
        for action in add_residency(actions, budget=num_layers, has_head=has_head)
        if not (isinstance(action, UnitAction) and action.op is UnitOp.RESHARD)
    ]


class _Placer:
    """Issues the gathers and releases of a list of stays, never above the budget."""

    def __init__(self, windows: Sequence[Window], *, budget: int) -> None:
        self._waiting = list(reversed(windows))  # the next to gather last
        self._leaving = {window.last_reader: window.unit for window in windows}
        self._num_free = budget

    def gather(self, *, group: int) -> list[Action]:
        """Gather what this group and the next read, as far as slots are free."""
        gathered: list[Action] = []
        while self._waiting and self._num_free and self._waiting[-1].first_group <= group + 1:
            gathered.append(UnitAction(UnitOp.UNSHARD, self._waiting.pop().unit))
            self._num_free -= 1
        return gathered

    def release(self, *, reader: int) -> list[Action]:
        """Release the unit whose stay ends with this reader, if any."""
        unit = self._leaving.get(reader)
        if unit is None:
            return []
        self._num_free += 1
        return [UnitAction(UnitOp.RESHARD, unit)]
