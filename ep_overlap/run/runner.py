"""Walks a plan's actions: looks each one up and issues it, deciding nothing.

All that can be known before a step is worked out when the program is built: which stream, which
work, which events. A step is then one loop over tuples.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import final

from ep_overlap.plan.action import Compute, Lane, Phase, Sync, UnitAction, UnitOp
from ep_overlap.plan.lifetimes import release_points
from ep_overlap.plan.plan import Plan
from ep_overlap.run.node import NodeRun
from ep_overlap.run.wgrad import WgradRun
from ep_overlap.run.wiring import NodeKey
from fsdp_hooks.lifecycle import UnitLifecycle
from fsdp_hooks.streams import Event, Stream, Work, completed

Drop = Callable[[], None]

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
        awaited = frozenset(index for waits in plan.waits for index in waits)
        launches = (
            self._launch_of(
                action,
                streams=streams,
                nodes=nodes,
                again=again,
                wgrads=wgrads,
                units=units,
                record=index in awaited,
                host_waits_for_sizes=runs_after_launch,
            )
            for index, action in enumerate(plan.actions)
        )
        self._steps = tuple(zip(launches, plan.waits, strict=True))
        self._drops: Mapping[int, Sequence[Drop]] = {}
        if runs_after_launch:
            self._drops = _drops(plan, nodes, again, wgrads, units)
            for node in (*nodes.values(), *again.values()):
                node.keeps_used = True
            for wgrad in wgrads.values():
                wgrad.queue.keeps_used = True

    def run(self) -> None:
        """Issue every action in order. Returns when all are issued, not when they are done."""
        events: list[Event] = []
        if not self._drops:
            for launch, waits in self._steps:
                events.append(launch([events[index] for index in waits]))
            return
        for index, (launch, waits) in enumerate(self._steps):
            events.append(launch([events[earlier] for earlier in waits]))
            for drop in self._drops.get(index, ()):
                drop()

    @staticmethod
    def _launch_of(
        action: Compute | UnitAction | Sync,
        *,
        streams: Mapping[Lane, Stream],
        nodes: Mapping[NodeKey, NodeRun],
        again: Mapping[NodeKey, NodeRun],
        wgrads: Mapping[NodeKey, WgradRun],
        units: Mapping[str, UnitLifecycle],
        record: bool,
        host_waits_for_sizes: bool,
    ) -> Launch:
        word = str(action)
        match action:
            case Compute():
                key = (action.microbatch, action.node, action.layer)
                match action.phase:
                    case Phase.FORWARD:
                        work = nodes[key].forward
                    case Phase.BACKWARD:
                        work = _node_of(action, nodes, again).backward
                    case Phase.WGRAD:
                        work = wgrads[key].run
                    case Phase.RECOMPUTE:
                        work = again[key].forward
                return _launch_on(streams[action.lane], work, word=word, record=record)
            case UnitAction():
                unit = units[action.unit]
                issue = {
                    UnitOp.UNSHARD: unit.unshard,
                    UnitOp.RESHARD: unit.reshard,
                    UnitOp.REDUCE: unit.reduce,
                }[action.op]
                return lambda after: issue(after=after, word=word)
            case Sync():
                return _wait_on_host if host_waits_for_sizes else _nothing_to_wait_for


def _node_of(
    action: Compute, nodes: Mapping[NodeKey, NodeRun], again: Mapping[NodeKey, NodeRun]
) -> NodeRun:
    """The node of F, or where layers are recomputed that of R and B."""
    key = (action.microbatch, action.node, action.layer)
    return again[key] if key in again and action.phase is not Phase.FORWARD else nodes[key]


def _drops(
    plan: Plan,
    nodes: Mapping[NodeKey, NodeRun],
    again: Mapping[NodeKey, NodeRun],
    wgrads: Mapping[NodeKey, WgradRun],
    units: Mapping[str, UnitLifecycle],
) -> Mapping[int, Sequence[Drop]]:
    """For each action, what may let go of what it read once the action is issued."""
    found: dict[int, list[Drop]] = {}
    for reader, point in enumerate(release_points(plan.actions)):
        action = plan.actions[reader]
        if point is None:
            continue
        if isinstance(action, Compute):
            key = (action.microbatch, action.node, action.layer)
            is_wgrad = action.phase is Phase.WGRAD
            node = wgrads[key].queue if is_wgrad else _node_of(action, nodes, again)
            drop = node.drop_used
        elif isinstance(action, UnitAction):
            drop = units[action.unit].drop_reduced
        else:
            continue
        found.setdefault(point, []).append(drop)
    return found


def _launch_on(stream: Stream, work: Work, *, word: str, record: bool) -> Launch:
    run = stream.run
    # Not functools.partial, which takes three times as long when keywords meet keywords.
    return lambda after: run(work, word=word, after=after, record=record)


def _wait_on_host(after: Sequence[Event]) -> Event:
    # Protects the launch of dispatch: its buffers are sized by what attn computed.
    for event in after:
        event.wait()
    return _DONE


def _nothing_to_wait_for(after: Sequence[Event]) -> Event:
    return _DONE


_DONE = completed("SYNC")
