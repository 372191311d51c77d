"""The life cycle of a sharded module: who may call what, when; and the null object.

Two drivers call the same methods. Module hooks (``hooks.py``, the standard path) and a schedule
differ only in timing:

=======================  =====================================  ==================================
handle                   standard path                          schedule
=======================  =====================================  ==================================
``root.begin``           the first forward pre-hook             once, before the first action
``unit.unshard``         the unit's forward pre-hook, and the   ``UNSHARD.unit``, ahead of use
                         hook on its output's gradient
``unit.ensure``          not called: a sub-module that is       fine-grained pre-hooks on every
                         called past its unit gathers and       sub-module that owns parameters,
                         releases as the unit would             and each node: the safety net
``unit.reshard``         every hook, for units that are         ``RESHARD.unit``
                         neither in use nor expected next
``root.pre_backward``    the first hook on an output's          before each node's backward
                         gradient
``unit.accumulate``      ``register_post_accumulate_grad_hook`` the same
``unit.seal``            when the unit's gradients are done     after the unit's last node of a
                                                                microbatch
``unit.reduce``          right after ``seal``                   ``REDUCE.unit``
``root.end``             autograd's end-of-backward callback    after the last action
``root.abort``           a hook that finds a backward broken    on the way out of a failure
                         off
=======================  =====================================  ==================================

A unit has two states. The *issued* state is moved by the host when it issues, and checked for
legal moves. The *stream* state is moved by the queued work itself; what runs inside a node reads
only that one. On CUDA both coincide on the host.

The handles are those of Megatron-FSDP (M-LM pull request 3797), as methods with generic names.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol, final

from torch import nn

from fsdp_hooks.streams import Event, StreamObserver, completed
from fsdp_hooks.wgrad import AutogradSink, GradSink


class UnitState(Enum):
    """Where a unit's parameters are. A gather leads from either state to UNSHARDED, and does
    nothing in it; a release leads from UNSHARDED to SHARDED, and raises elsewhere."""

    SHARDED = "sharded"
    """Each rank holds its shard. At rest the module holds DTensors; within a step, placeholders
    that raise when they are read. No unsharded storage."""
    UNSHARDED = "unsharded"
    """The module holds compute parameters, views of the unit's unsharded storage, which the AG
    lane filled. In the issued sense: a gather has been issued and no release since."""


class Driver(Enum):
    """Who calls the handles."""

    REST = "rest"
    """Nobody: between steps. The module holds its sharded parameters."""
    HOOKS = "hooks"
    """Module hooks: the standard path."""
    SCHEDULE = "schedule"
    """A schedule. Unit-level module hooks stand aside; the safety net stays."""


@dataclass(frozen=True, kw_only=True)
class ShardingStats:
    """Counters since the root was built."""

    num_all_gathers: int = 0
    num_reduce_scatters: int = 0
    num_all_reduces: int = 0
    hook_misses: int = 0
    """Gathers that the safety net had to do because no plan and no hook had."""
    unsharded_bytes: int = 0
    """Unsharded storage alive now, of units that release theirs."""
    peak_unsharded_bytes: int = 0


class UnitLifecycle(Protocol):
    """One unit: the parameters that are gathered, released and reduced together."""

    @property
    def name(self) -> str:
        """The unit's name from the root."""
        ...

    @property
    def state(self) -> UnitState:
        """The issued state."""
        ...

    @property
    def releases(self) -> bool:
        """Whether a reshard frees memory; False where parameters stay resident."""
        ...

    @property
    def gathers(self) -> bool:
        """Whether an unshard asks other ranks: before every use where parameters are released, once
        a step where only main weights are shards."""
        ...

    def unshard(self, *, after: Sequence[Event] = (), word: str | None = None) -> Event:
        """Issue the gather on the AG lane. Idempotent: a second call returns the same event.

        ``word``: what a trace calls it; default: ``UNSHARD.`` and the unit's name.
        """
        ...

    def reshard(self, *, after: Sequence[Event] = (), word: str | None = None) -> Event:
        """Issue the release on the AG lane; ``after``: the unit's last readers.

        Raises:
            RuntimeError: the unit is not unsharded.
        """
        ...

    def reduce(self, *, after: Sequence[Event] = (), word: str | None = None) -> Event:
        """Issue the reduction of the oldest sealed gradients on the RS lane.

        Raises:
            RuntimeError: nothing is sealed; in stream time, so the event brings it.
        """
        ...

    def drop_reduced(self) -> None:
        """Let go of the gradients that the oldest reduction read: the lane that made them has
        waited for it. Only where work runs after its launch (CUDA) is anything held."""
        ...

    def ensure(self) -> None:
        """The safety net, in stream time: gather here and now if nobody has. A counted miss."""
        ...

    def seal(self, microbatch: int, *, is_last: bool) -> None:
        """In stream time: this microbatch's contributions are complete; hand them to ``reduce``."""
        ...


class RootLifecycle(Protocol):
    """A whole module: its units, and the beginning and end of a step."""

    @property
    def strategy(self) -> str | None:
        """``data_parallel_sharding_strategy`` by Megatron's name; None without sharding."""
        ...

    @property
    def reduces_each_microbatch(self) -> bool:
        """Whether each microbatch's gradients are reduced on their own, or once a step."""
        ...

    @property
    def stats(self) -> ShardingStats:
        """Counters since the root was built."""
        ...

    @property
    def root_unit(self) -> UnitLifecycle | None:
        """The unit of the parameters that no inner unit owns; None without sharding."""
        ...

    @property
    def inner_units(self) -> Sequence[UnitLifecycle]:
        """The other units, in registration order."""
        ...

    @property
    def grad_sink(self) -> GradSink:
        """Takes the weight gradients that autograd does not carry (``wgrad.py``)."""
        ...

    postpones_end: bool
    """On the standard path: whether a backward's end waits for ``end_postponed``, because some of
    its weight gradients are yet to be made."""

    def collect_postponed(self) -> None:
        """Some of them are made: add them up as those of a microbatch of its own."""
        ...

    def end_postponed(self) -> None:
        """All are made: reduce, publish, and swap back, as the backwards' end would have."""
        ...

    def observe(self, observer: StreamObserver | None) -> None:
        """Let ``observer`` see the lanes that are the sharding's own."""
        ...

    def unit_of(self, module: nn.Module) -> UnitLifecycle | None:
        """The unit that ``module`` itself was sharded as."""
        ...

    def begin(self, driver: Driver) -> None:
        """Swap: compute parameters onto the modules in place of the sharded ones.

        Raises:
            RuntimeError: another driver is at work.
        """
        ...

    def pre_backward(self, microbatch: int) -> None:
        """In stream time: the contributions that follow belong to this microbatch."""
        ...

    def end(self) -> None:
        """Wait for every reduction, publish ``.grad``, put the sharded parameters back."""
        ...

    def refresh_compute_weights(self) -> None:
        """Main weights have changed in the middle of a step: the next forward must see it."""
        ...

    def abort(self) -> None:
        """After a failure, with drained streams: drop gradients since ``begin``, release all."""
        ...


class ShardedModule(nn.Module, ABC):
    """What ``fully_shard`` makes of a module's class. ``isinstance`` tells; nothing is probed."""

    @property
    @abstractmethod
    def lifecycle(self) -> RootLifecycle:
        """The root that this module belongs to, built at first use with this module as root."""


def lifecycle_of(module: nn.Module) -> RootLifecycle:
    """The life cycle of ``module``; ``NoSharding`` for a module that nobody sharded."""
    return module.lifecycle if isinstance(module, ShardedModule) else NoSharding(module)


@final
class NoSharding:
    """The null object: parameters are always there, gradients stay where autograd puts them."""

    strategy: None = None
    reduces_each_microbatch: bool = False
    root_unit: None = None
    inner_units: Sequence[UnitLifecycle] = ()
    stats: ShardingStats = ShardingStats()

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.grad_sink: GradSink = AutogradSink()
        self.postpones_end = False

    def collect_postponed(self) -> None:
        """They are added up where they go."""

    def end_postponed(self) -> None:
        """Gradients are where they go."""

    def observe(self, observer: StreamObserver | None) -> None:
        """Nobody to observe."""

    def unit_of(self, module: nn.Module) -> None:
        """There are no units."""

    def begin(self, driver: Driver) -> None:
        """Nothing to swap."""

    def pre_backward(self, microbatch: int) -> None:
        """Nothing to note."""

    def end(self) -> None:
        """Nothing to wait for."""

    def refresh_compute_weights(self) -> None:
        """There are no others."""

    def abort(self) -> None:
        """Drop the gradients of the step that failed.

        With them go those that earlier steps left in ``.grad``: autograd adds to the same tensor.
        """
        self._module.zero_grad(set_to_none=True)


NOTHING_DONE: Final = completed()
"""The event of a handle that had nothing to issue."""
