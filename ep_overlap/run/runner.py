"""Walks a plan's actions: looks each one up and issues it, deciding nothing.

All that can be known before a step is worked out when the program is built: which stream, which
work, which events. A step is then one loop over tuples.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import final

from ep_overlap.plan.action import Compute, Lane, Phase, Sync, UnitAction, UnitOp
from ep_overlap.plan.plan import Plan
from ep_overlap.run.node import NodeRun
from ep_overlap.run.wiring import NodeKey
from fsdp_hooks.lifecycle import UnitLifecycle
from fsdp_hooks.streams import Event, Stream, completed

Launch = Callable[..., Event]
"""``launch(after=events)`` issues one action and returns the event of its completion; without
events to wait for, ``launch()``."""


@final
class Program:
    """A plan bound to streams, nodes and units.

    Args:
        plan: what to do.
        streams: of the comp and the comm lane.
        nodes: all nodes of all microbatches.
        units: by the plan's names; empty without sharding.
        host_waits_for_sizes: whether ``SYNC`` blocks the host: on CUDA it must know split sizes
            to launch; a CPU worker reads them when it runs.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        streams: Mapping[Lane, Stream],
        nodes: Mapping[NodeKey, NodeRun],
        units: Mapping[str, UnitLifecycle],
        host_waits_for_sizes: bool,
    ) -> None:
        self.plan = plan
        awaited = frozenset(index for waits in plan.waits for index in waits)
        launches = (
            self._launch_of(
                action,
                streams=streams,
                nodes=nodes,
                units=units,
                record=index in awaited,
                host_waits_for_sizes=host_waits_for_sizes,
            )
            for index, action in enumerate(plan.actions)
        )
        self._steps = tuple(zip(launches, plan.waits, strict=True))

    def run(self) -> None:
        """Issue every action in order. Returns when all are issued, not when they are done."""
        events: list[Event] = []
        for launch, waits in self._steps:
            events.append(launch(after=[events[index] for index in waits]) if waits else launch())

    @staticmethod
    def _launch_of(
        action: Compute | UnitAction | Sync,
        *,
        streams: Mapping[Lane, Stream],
        nodes: Mapping[NodeKey, NodeRun],
        units: Mapping[str, UnitLifecycle],
        record: bool,
        host_waits_for_sizes: bool,
    ) -> Launch:
        word = str(action)
        match action:
            case Compute():
                node = nodes[action.microbatch, action.node, action.layer]
                work = node.forward if action.phase is Phase.FORWARD else node.backward
                return partial(streams[action.lane].run, work, word=word, record=record)
            case UnitAction():
                unit = units[action.unit]
                issue = {
                    UnitOp.UNSHARD: unit.unshard,
                    UnitOp.RESHARD: unit.reshard,
                    UnitOp.REDUCE: unit.reduce,
                }[action.op]
                return partial(issue, word=word)
            case Sync():
                return _wait_on_host if host_waits_for_sizes else _nothing_to_wait_for


def _wait_on_host(*, after: Sequence[Event] = ()) -> Event:
    # Protects the launch of dispatch: its buffers are sized by what attn computed.
    for event in after:
        event.wait()
    return _DONE


def _nothing_to_wait_for(*, after: Sequence[Event] = ()) -> Event:
    return _DONE


_DONE = completed("SYNC")
