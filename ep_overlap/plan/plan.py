"""``Plan``: one step as a value, complete, printable, the same on every rank."""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from ep_overlap.plan.action import Action, Node, Phase, UnitAction, UnitOp
from ep_overlap.plan.lower import Sharding
from ep_overlap.plan.order import ModelShape, computes_of
from ep_overlap.plan.residency import split_groups
from ep_overlap.plan.units import unit_of

_COMMENT_COLUMN: Final = 20


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one step does, in issue order. ``build_plan`` makes one."""

    shape: ModelShape
    order: str
    """An ``OrderName``, ``forward`` for evaluation, ``own`` for an order file."""
    num_microbatches: int
    sharding: Sharding | None
    """None: nothing is sharded, and gradients are not reduced by the plan."""
    actions: tuple[Action, ...]
    waits: tuple[tuple[int, ...], ...]
    """For each action the earlier actions, by index, that its lane waits for (``edges.waits``)."""

    @property
    def is_forward_only(self) -> bool:
        """Whether the plan evaluates: no backward, no reductions."""
        return not any(node.phase is Phase.BACKWARD for node in computes_of(self.actions))

    @property
    def delayed(self) -> frozenset[tuple[Node, int | None]]:
        """The nodes, with their layers, whose weight gradients are nodes of their own (W)."""
        return frozenset(
            (action.node, action.layer)
            for action in computes_of(self.actions)
            if action.phase is Phase.WGRAD
        )

    @property
    def recomputes(self) -> bool:
        """Whether layers are run again (R) before their backward."""
        return any(node.phase is Phase.RECOMPUTE for node in computes_of(self.actions))

    @property
    def max_unsharded_units(self) -> int | None:
        """The budget of layer units in force; None where weights are not sharded."""
        if self.sharding is None or not self.sharding.strategy.shards_params:
            return None
        return self.sharding.budget(self.actions)

    @property
    def num_gathers(self) -> Mapping[str, int]:
        """How often each unit is gathered in this step, by unit."""
        return Counter(
            action.unit
            for action in self.actions
            if isinstance(action, UnitAction) and action.op is UnitOp.UNSHARD
        )

    @property
    def title(self) -> str:
        """One line: order, sizes, sharding."""
        kinds = " + ".join(f"{len(list(run))} {kind}" for kind, run in groupby(self.shape.layers))
        parts = [f"{self.order}: layers {kinds}", f"microbatches {self.num_microbatches}"]
        if self.delayed:
            is_experts_alone = all(node is Node.MLP for node, _ in self.delayed)
            parts.append("experts' wgrad delayed" if is_experts_alone else "delayed wgrad")
        if self.recomputes:
            parts.append("recomputed")
        if self.sharding is not None:
            parts.append(str(self.sharding.strategy))
        if self.max_unsharded_units is not None:
            parts.append(f"at most {self.max_unsharded_units} layers unsharded")
        return ", ".join(parts)

    def text(self) -> str:
        """One word a line, its waits behind it as a comment; ``parse_words`` reads it back."""
        lines = [f"# {self.title}"]
        for action, waited in zip(self.actions, self.waits, strict=True):
            line = str(action)
            if waited:
                names = " ".join(str(self.actions[index]) for index in waited)
                line = f"{line:<{_COMMENT_COLUMN}}# after {names}"
            lines.append(line)
        return "\n".join(lines) + "\n"

    def order_text(self) -> str:
        """The nodes alone, a layer's step on a line: what an order file holds."""
        order = computes_of(self.actions)
        starts = [0]
        for group in split_groups(order)[:-1]:
            start = group.last + 1
            while unit_of(order[start]) in group.units:
                start += 1
            starts.append(start)
        lines = [f"# {self.title}"]
        for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
            if start < end:  # two pairs of the same two layers are one line
                lines.append(" ".join(str(node) for node in order[start:end]))
        return "\n".join(lines) + "\n"

    @property
    def digest(self) -> str:
        """SHA-256 of the text, as hex.

        Ranks with the same digest issue the same actions in the same order, lane by lane: every
        communicator that belongs to one lane then sees the same order on all of them.
        """
        return hashlib.sha256(self.text().encode()).hexdigest()
