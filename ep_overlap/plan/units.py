"""Which nodes read a unit's weights, and which give it gradients.

One unit per layer, ``L0``, ``L1``, ..., and ``root`` for what ``pre`` and ``post`` use. The output
layer may be one of its own, ``head``: else the first node waits for the weights of the last, and
the step's end for their gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from ep_overlap.plan.action import (
    HEAD_UNIT,
    ROOT_UNIT,
    Action,
    Compute,
    Node,
    Phase,
    UnitAction,
    UnitOp,
)

_WITH_WEIGHTS: Final = frozenset({Node.PRE, Node.ATTN, Node.SHARED, Node.MLP, Node.POST})
_READING: Final = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE})
_GIVING: Final = frozenset({Phase.BACKWARD, Phase.WGRAD})


def unit_of(compute: Compute) -> str:
    """The unit that a node's layer belongs to."""
    return ROOT_UNIT if compute.layer is None else f"L{compute.layer}"


def units_read(action: Action, *, has_head: bool) -> tuple[str, ...]:
    """The units whose weights the action reads.

    W nodes read activations and output gradients, never weights: a release does not wait for them.

    Args:
        has_head: whether the output layer is a unit of its own.
    """
    return _units_of(action, _READING, has_head=has_head)


def units_given(action: Action, *, has_head: bool) -> tuple[str, ...]:
    """The units that the action may give gradients to.

    With delayed W nodes, B nodes still give those of norms and biases: both count.
    """
    return _units_of(action, _GIVING, has_head=has_head)


def _units_of(action: Action, phases: frozenset[Phase], *, has_head: bool) -> tuple[str, ...]:
    if not isinstance(action, Compute) or action.node not in _WITH_WEIGHTS:
        return ()
    if action.phase not in phases:
        return ()
    head = (HEAD_UNIT,) if has_head and action.node is Node.POST else ()
    return (unit_of(action), *head)


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """One REDUCE of the list, and what it reduces. Both are indices of actions."""

    reduce: int
    unit: str
    contributions: tuple[int, ...]
    """Of one microbatch, or of all where the unit reduces once a step."""


def reductions(actions: Sequence[Action]) -> list[Reduction]:
    """What each REDUCE reduces, in issue order.

    A unit that has one REDUCE in the step reduces all microbatches at once. Otherwise the n-th
    REDUCE belongs to the microbatch whose last contribution is the n-th to come. Two microbatches
    may contribute in turn (the paired order's last two backwards), each to a buffer of its own.
    """
    given: dict[str, dict[int, list[int]]] = {}
    reduces: dict[str, list[int]] = {}
    for index, action in enumerate(actions):
        if isinstance(action, Compute):
            for unit in units_given(action, has_head=True):  # where there is one, it has a REDUCE
                given.setdefault(unit, {}).setdefault(action.microbatch, []).append(index)
        elif isinstance(action, UnitAction) and action.op is UnitOp.REDUCE:
            reduces.setdefault(action.unit, []).append(index)
    found: list[Reduction] = []
    for unit, places in reduces.items():
        shares = sorted(given.get(unit, {}).values(), key=lambda indices: indices[-1])
        if len(places) == 1:
            shares = [list(chain.from_iterable(shares))]
        for place, share in zip(places, shares, strict=False):  # check.py counts them
            found.append(Reduction(reduce=place, unit=unit, contributions=tuple(share)))
    return sorted(found, key=lambda reduction: reduction.reduce)
