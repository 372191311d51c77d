"""The root: all units of a module, and the beginning and end of a step."""

import warnings
from collections.abc import Mapping, Sequence
from typing import final

from torch import nn

from fsdp_hooks.context import ShardContext
from fsdp_hooks.lifecycle import Driver, ShardingStats, UnitState
from fsdp_hooks.sink import UnitSink
from fsdp_hooks.streams import StreamObserver
from fsdp_hooks.unit import FsdpUnit
from fsdp_hooks.wgrad import GradSink


@final
class FsdpRoot:
    """Implements ``RootLifecycle``.

    Args:
        units: inner units in registration order.
        root_unit: of the parameters that no inner unit owns (there may be none).
    """

    def __init__(
        self,
        *,
        strategy: str,
        units: Sequence[FsdpUnit],
        root_unit: FsdpUnit,
        context: ShardContext,
    ) -> None:
        self.strategy = strategy
        self.root_unit = root_unit
        self.inner_units = tuple(units)
        self.context = context
        self.grad_sink: GradSink = UnitSink(self.units)
        self.postpones_end = False
        self.num_aborts = 0
        """How many steps have been dropped."""
        self._has_current_weights = False
        """Whether compute weights were filled within ``microbatch(is_last=False)``: no optimizer
        has stepped since."""
        self._by_module: Mapping[nn.Module, FsdpUnit] = {unit.module: unit for unit in self.units}

    @property
    def units(self) -> tuple[FsdpUnit, ...]:
        """All units, the root's own first."""
        return (self.root_unit, *self.inner_units)

    @property
    def reduces_each_microbatch(self) -> bool:
        """Whether each microbatch's gradients are reduced on their own."""
        return self.context.reduces_each_microbatch

    @property
    def stats(self) -> ShardingStats:
        """Counters since the root was built."""
        return self.context.counters.read()

    def observe(self, observer: StreamObserver | None) -> None:
        """Let ``observer`` see the AG and RS lanes, and the caller's waits."""
        context = self.context
        for lane in (context.ag, context.rs, context.caller):
            lane.observe(observer)

    def unit_of(self, module: nn.Module) -> FsdpUnit | None:
        """The unit that ``module`` itself was sharded as."""
        return self._by_module.get(module)

    def begin(self, driver: Driver) -> None:
        """Swap compute parameters (or placeholders, where they must be gathered) onto the modules.

        Raises:
            RuntimeError: a step is under way already, or the module's parameters are not those
                that it was sharded with.
        """
        if self.context.driver is not Driver.REST:
            raise RuntimeError(
                f"begin({driver.value}) while {self.context.driver.value} drives the step; "
                "expected it at rest. Finish the backward of the step under way, or drop it: "
                "lifecycle_of(module).abort()"
            )
        for unit in self.units:
            unit.check_at_rest()
        self._swap_in(is_fresh=self._note_forward())
        self.context.driver = driver

    def _note_forward(self) -> bool:
        """A forward begins. Whether compute weights are those that it may read."""
        is_fresh = self._has_current_weights
        self._has_current_weights = not self.context.is_last_microbatch
        return is_fresh

    def _swap_in(self, *, is_fresh: bool) -> None:
        for unit in self.units:
            unit.swap_in(is_fresh=is_fresh)
        # Gathers read main weights, which the optimizer, in the caller's stream, may still write.
        self.context.caller.hold(self.context.ag)

    def pre_backward(self, microbatch: int) -> None:
        """In stream time: the contributions that follow belong to this microbatch."""
        self.context.microbatch = microbatch

    def end(self) -> None:
        """Release what is still gathered, wait for every reduction, publish gradients, swap back.

        On CUDA this orders streams and does not block the host.

        Raises:
            BaseException: what a gather or a reduction of the step raised; the step is dropped.
        """
        context = self.context
        try:
            self.release_units()
            # The optimizer, in the caller's stream, must not read gradients before they are
            # reduced nor change main weights while a gather still reads them.
            for stream in (context.rs, context.ag):
                context.caller.wait_stream(stream)
            for unit in self.units:
                unit.swap_out()
        except BaseException:
            self.abort()
            raise
        context.driver = Driver.REST
        if context.is_last_microbatch:
            self.refresh_compute_weights()

    def collect_postponed(self) -> None:
        """A postponed backward, or its weight gradients, are through: add up what they made."""
        for unit in self.units:
            unit.collect()

    def end_postponed(self) -> None:
        """All weight gradients are made: reduce what waits for it, and end."""
        context = self.context
        is_last = context.is_last_microbatch
        for unit in self.units:
            if unit.holds_contributions(is_last=is_last):
                unit.seal(0, is_last=is_last)
                if is_last or unit.reduces_each_microbatch:
                    unit.reduce(after=(context.caller.record(f"backward of {unit.name}"),))
        if context.driver is not Driver.SCHEDULE:
            self.end()

    def refresh_compute_weights(self) -> None:
        """Main weights have changed: the next forward brings compute weights up to date.

        Needed only between the microbatches of one step. A new step, and a forward outside of
        ``microbatch(is_last=False)``, asks nobody: the optimizer, or ``load_state_dict``, may have
        written, and which rank can tell that another has?
        """
        self._has_current_weights = False

    def begin_another_forward(self) -> None:
        """While an earlier one has had no backward: release what that one left.

        Nor does what it filled count any more, where it stays: there may be no backward to come
        (a validation loss), and the optimizer may have stepped since.
        """
        self.release_units()
        if not self._note_forward():
            self.context.caller.wait_stream(self.context.ag)
            self._swap_in(is_fresh=False)

    def release_units(self) -> None:
        """Issue the release of every unit that is still gathered, behind the caller's work."""
        for unit in self.units:
            if unit.releases and unit.state is UnitState.UNSHARDED:
                unit.reshard(after=(self.context.caller.record("end"),))

    def abort(self) -> None:
        """Drain the lanes and drop what is under way: nothing gathered, none of its gradients.

        Warns if gradients of earlier backwards, which waited for the step's one reduction, go with
        it. What is in ``.grad`` stays.
        """
        self.num_aborts += 1
        for stream in (self.context.ag, self.context.rs):
            stream.synchronize()
            stream.reset()
        had_kept = [unit.abandon() for unit in self.units]
        self.refresh_compute_weights()
        self.context.driver = Driver.REST
        self.context.microbatch = 0
        if any(had_kept):
            warnings.warn(
                "a backward failed, and the gradients of this step's earlier microbatches, which "
                "waited for its one reduction, are dropped with it: repeat the whole step",
                stacklevel=2,
            )
