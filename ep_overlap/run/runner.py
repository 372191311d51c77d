"""Walks a plan's actions: looks each one up and issues it, deciding nothing.

All that can be known before a step is worked out when the program is built: which stream, which
work, which events. A step is then one loop over tuples.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch

from ep_overlap.plan.action import Action, Compute, Lane, Phase, Sync, UnitAction, UnitOp
from ep_overlap.plan.lifetimes import release_points, wait_points
from ep_overlap.plan.plan import Plan
from ep_overlap.run.node import NodeRun
from ep_overlap.run.wgrad import WgradRun
from ep_overlap.run.wiring import NodeKey
from fsdp_hooks.lifecycle import UnitLifecycle
from fsdp_hooks.streams import UNRECORDED, Event, Stream, Work

Drop = Callable[[], None]

Follow = Callable[[Event], None]

Launch = Callable[[Sequence[Event]], Event]
"""Issues one action behind some events; returns the event of its completion."""


@final
class Program:
    """A plan bound to streams, nodes and units.

    Args:
        plan: what to do.
        streams: of the comp and the comm lane.
        nodes: all nodes of all microbatches; where layers are recomputed, those of F.
        again: the nodes of R and B of layers that are recomputed; else empty.
        wgrads: all W nodes; empty where weight gradients are not delayed.
        units: by the plan's names; empty without sharding.
        runs_after_launch: whether work runs after it was launched, as on CUDA: then ``SYNC``
            blocks the host, which must know split sizes to launch, and what crosses lanes lives
            until its own lane follows the reader. A CPU worker does all of its work when it runs.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        streams: Mapping[Lane, Stream],
        nodes: Mapping[NodeKey, NodeRun],
        again: Mapping[NodeKey, NodeRun],
        wgrads: Mapping[NodeKey, WgradRun],
        units: Mapping[str, UnitLifecycle],
        runs_after_launch: bool,
    ) -> None:
        self.plan = plan
        bound = _Bound(streams=streams, nodes=nodes, again=again, wgrads=wgrads, units=units)
        awaited = frozenset(index for waits in plan.waits for index in waits)
        launches = [
            bound.launch_of(action, record=index in awaited, host_waits_for_sizes=runs_after_launch)
            for index, action in enumerate(plan.actions)
        ]
        waits = plan.waits
        follows: Mapping[int, Sequence[tuple[Follow, int]]] = {}
        drops: Mapping[int | None, Sequence[Drop]] = {}
        if runs_after_launch:
            follows, waits = _follows(plan, streams)
            drops = _drops(plan, bound)
            for node in (*nodes.values(), *again.values()):
                node.keeps_used = True
        self._steps = tuple(
            (launch, waits[index], tuple(follows.get(index, ())), tuple(drops.get(index, ())))
            for index, launch in enumerate(launches)
        )
        self._last_drops = tuple(drops.get(None, ()))

    def run(self) -> None:
        """Issue every action in order. Returns when all are issued, not when they are done."""
        # Else the engine hands each backward on a GPU to that device's thread, and waits for it:
        # 16% of the host's time of a step (docs/gpu.md).
        with torch.autograd.set_multithreading_enabled(False):
            self._issue()

    def _issue(self) -> None:
        events: list[Event] = []
        for launch, waits, follows, drops in self._steps:
            events.append(launch([events[index] for index in waits]))
            for follow, awaited in follows:
                follow(events[awaited])
            for drop in drops:
                drop()

    def drop_rest(self) -> None:
        """When every lane has been told to wait for all: let go of what none had waited for."""
        for drop in self._last_drops:
            drop()


@dataclass(frozen=True, kw_only=True)
class _Bound:
    """What carries a plan's actions out; the fields are ``Program``'s arguments."""

    streams: Mapping[Lane, Stream]
    nodes: Mapping[NodeKey, NodeRun]
    again: Mapping[NodeKey, NodeRun]
    wgrads: Mapping[NodeKey, WgradRun]
    units: Mapping[str, UnitLifecycle]

    def launch_of(self, action: Action, *, record: bool, host_waits_for_sizes: bool) -> Launch:
        """How an action is issued. ``record``: whether another lane waits for it."""
        word = str(action)
        match action:
            case Compute():
                # By position: a partial takes three times as long when keywords meet keywords.
                return partial(self.streams[action.lane].run, self._work_of(action), word, record)
            case UnitAction():
                unit = self.units[action.unit]
                issue = {
                    UnitOp.UNSHARD: unit.unshard,
                    UnitOp.RESHARD: unit.reshard,
                    UnitOp.REDUCE: unit.reduce,
                }[action.op]
                return lambda after: issue(after=after, word=word)
            case Sync():
                return _wait_on_host if host_waits_for_sizes else _nothing_to_wait_for

    def drop_of(self, action: Action) -> Drop | None:
        """How an action lets go of what it read of another lane; None: it read nothing."""
        match action:
            case Compute(phase=Phase.WGRAD):
                return self.wgrads[_key_of(action)].queue.drop_used
            case Compute(phase=Phase.BACKWARD):
                return self._node_of(action).drop_used
            case Compute():
                return self._node_of(action).drop_read
            case UnitAction():
                return self.units[action.unit].drop_reduced
            case Sync():
                return None

    def _work_of(self, action: Compute) -> Work:
        match action.phase:
            case Phase.FORWARD | Phase.RECOMPUTE:
                return self._node_of(action).forward
            case Phase.BACKWARD:
                return self._node_of(action).backward
            case Phase.WGRAD:
                return self.wgrads[_key_of(action)].run

    def _node_of(self, action: Compute) -> NodeRun:
        """The node of F, or where layers are recomputed that of R and B."""
        key = _key_of(action)
        is_again = key in self.again and action.phase is not Phase.FORWARD
        return self.again[key] if is_again else self.nodes[key]


def _key_of(action: Compute) -> NodeKey:
    return action.microbatch, action.node, action.layer


def _drops(plan: Plan, bound: _Bound) -> Mapping[int | None, Sequence[Drop]]:
    """For each action, what may let go of what it read once the action is issued, and the waits
    that follow it. None: what only the end of the step lets go of."""
    found: dict[int | None, list[Drop]] = {}
    for action, point in zip(plan.actions, release_points(plan.actions), strict=True):
        if (drop := bound.drop_of(action)) is not None:
            found.setdefault(point, []).append(drop)
    return found


def _follows(
    plan: Plan, streams: Mapping[Lane, Stream]
) -> tuple[Mapping[int, Sequence[tuple[Follow, int]]], Sequence[Sequence[int]]]:
    """For each action, the waits that follow its issue; and what is left to wait for at the issue,
    of actions that are none of a stream's own."""
    follows: dict[int, list[tuple[Follow, int]]] = {}
    left: list[Sequence[int]] = []
    for action, points in zip(plan.actions, wait_points(plan.actions), strict=True):
        if isinstance(action, Compute):
            for awaited, point in points.items():
                follows.setdefault(point, []).append((streams[action.lane].follow, awaited))
            left.append(())
        else:
            left.append(tuple(points))
    return follows, left


def _wait_on_host(after: Sequence[Event]) -> Event:
    # Protects the launch of dispatch: its buffers are sized by what attn computed.
    for event in after:
        event.wait()
    return UNRECORDED


def _nothing_to_wait_for(after: Sequence[Event]) -> Event:
    return UNRECORDED
