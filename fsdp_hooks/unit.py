"""A unit: the parameters that are gathered, released and reduced together.

``unshard``, ``reshard`` and ``reduce`` issue: they move the issued state and queue work.
``ensure``, ``accumulate`` and ``seal`` run in stream time, inside the work of the compute lane.
"""

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import final
from weakref import ref

from torch import Tensor, nn

from fsdp_hooks.collectives import Communicator
from fsdp_hooks.context import ShardContext
from fsdp_hooks.lifecycle import NOTHING_DONE, UnitState
from fsdp_hooks.param_group import ParamGroup
from fsdp_hooks.streams import Event
from fsdp_hooks.wgrad import Destination


@final
class FsdpUnit:
    """Implements ``UnitLifecycle`` for one module.

    Args:
        name: the module's name from the root (``root`` for the root itself).
        module: what was sharded; the groups' parameters are its own and its children's, less
            those of inner units.
        groups: one for each dtype, mesh and requires_grad.
        context: of the root.
    """

    def __init__(
        self,
        *,
        name: str,
        module: nn.Module,
        groups: Sequence[ParamGroup],
        context: ShardContext,
    ) -> None:
        self.name = name
        self.module = module
        self.groups = tuple(groups)
        self.releases = any(group.releases for group in groups)
        """Whether a reshard frees memory."""
        self.gathers = any(group.gathers for group in groups)
        """Whether compute parameters must be filled from other ranks, before every use or once a
        step."""
        self.is_trainable = any(group.requires_grad for group in groups)
        """Whether any of its parameters takes a gradient."""
        self.unsharded_bytes = sum(g.weights.whole.nbytes for g in groups if g.releases)
        """Storage that a gather allocates and a release frees."""
        self._context = context
        self._state = UnitState.SHARDED
        self._stream_state = UnitState.SHARDED
        self._is_fresh = False
        """In stream time: whether shards are those of the current main weights."""
        self._gathered: Event = NOTHING_DONE
        self._being_reduced: deque[Sequence[Tensor | None]] = deque()
        self._words = {op: f"{op}.{name}" for op in ("UNSHARD", "RESHARD", "REDUCE")}
        for number, group in enumerate(self.groups):
            group.name_unit(name)
            if group.requires_grad:
                for index, param in enumerate(group.compute_params):
                    param.register_post_accumulate_grad_hook(_Door(self, number, index))

    @property
    def state(self) -> UnitState:
        """The issued state."""
        return self._state

    @property
    def reduces_each_microbatch(self) -> bool:
        """Whether each microbatch's gradients are reduced on their own."""
        return self._context.reduces_each_microbatch

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is a view of storage that the unit's release frees."""
        return any(group.releases and group.weights.whole.holds(tensor) for group in self.groups)

    def holds_contributions(self, *, is_last: bool) -> bool:
        """Whether gradients wait for ``seal``; at the end of a step those of earlier microbatches
        count."""
        is_reduced = is_last or self.reduces_each_microbatch
        return any(
            group.gradients.holds_contributions(is_last=is_last, is_reduced=is_reduced)
            for group in self.groups
        )

    # ---- issued by the host -------------------------------------------------------------------

    def unshard(self, *, after: Sequence[Event] = (), word: str | None = None) -> Event:
        """Issue the gather. Idempotent. Returns the event behind which parameters are there."""
        if not self.gathers or self._state is UnitState.UNSHARDED:
            return self._gathered
        self._state = UnitState.UNSHARDED
        gather = partial(self._fill, self._context.compares_order)
        self._gathered = self._context.ag.run(
            gather, word=word or self._words["UNSHARD"], after=after
        )
        return self._gathered

    def reshard(self, *, after: Sequence[Event] = (), word: str | None = None) -> Event:
        """Issue the release, behind ``after`` (the last readers).

        Raises:
            RuntimeError: the unit is not unsharded.
        """
        if not self.releases:
            return NOTHING_DONE
        if self._state is not UnitState.UNSHARDED:
            raise RuntimeError(
                f"reshard() of unit {self.name}: its state is {self._state.value}, expected "
                f"{UnitState.UNSHARDED.value}; call unshard() first"
            )
        self._state = UnitState.SHARDED
        return self._context.ag.run(self._release, word=word or self._words["RESHARD"], after=after)

    def reduce(self, *, after: Sequence[Event] = (), word: str | None = None) -> Event:
        """Issue the reduction of the oldest sealed gradients, behind ``after``."""
        reduce = partial(self._reduce, self._context.compares_order)
        return self._context.rs.run(reduce, word=word or self._words["REDUCE"], after=after)

    def drop_reduced(self) -> None:
        """Let go of what the oldest reduction read: the comp lane has waited for it."""
        if self._being_reduced:
            self._being_reduced.popleft()

    # ---- in stream time, on the compute lane --------------------------------------------------

    def ensure(self) -> None:
        """The safety net under a schedule: parameters are there when this returns.

        A gather here is a miss. No gather of the unit may be queued and unfinished meanwhile: a
        plan's checker proves that each reader waits for it, and a driver of one's own has to see to
        it (``after=`` of the reader). It cannot be checked here. Where compute runs in a worker the
        host is ahead, so an issued state of UNSHARDED may be that of a later use, which this one
        rightly does not wait for; and whether a gather has finished is a matter of timing.
        """
        if self._stream_state is UnitState.UNSHARDED or not self.gathers:
            return
        self._context.counters.add(hook_misses=1)
        self._fill(False, is_rescue=True)

    def accumulate(self, group: ParamGroup, index: int, grad: Tensor) -> None:
        """The door for a contribution, whoever made it."""
        group.gradients.accumulate(index, self._context.microbatch, grad)

    def destination(self, group: ParamGroup, index: int) -> Destination:
        """Where a fused weight gradient goes. The caller writes it before it does anything else."""
        return group.destination(
            index, self._context.microbatch, each_microbatch=self.reduces_each_microbatch
        )

    def seal(self, microbatch: int, *, is_last: bool) -> None:
        """This microbatch's contributions are complete."""
        is_reduced = is_last or self.reduces_each_microbatch
        for group in self.groups:
            if group.requires_grad:
                group.gradients.seal(microbatch, is_last=is_last, is_reduced=is_reduced)

    def collect(self) -> None:
        """Add up what has come, in the main dtype; more of the same reduction is to come."""
        for group in self.groups:
            if group.requires_grad:
                group.gradients.seal(0, is_last=False, is_reduced=False)

    # ---- queued work --------------------------------------------------------------------------

    def _fill(self, compares: bool, is_rescue: bool = False) -> None:
        for group in self.groups:
            if group.gathers:
                over = self._context.communicators(group.mesh)
                inner, outer = (c and (c.rescue if is_rescue else c.gather) for c in over)
                if compares:
                    self._compare("UNSHARD", inner, outer)
                if not self._is_fresh:
                    group.weights.refresh(outer)
                group.weights.gather(inner)
                group.install(group.compute_params)
        self._is_fresh = True
        if self._stream_state is UnitState.SHARDED:
            self._context.counters.add(unsharded_bytes=self.unsharded_bytes)
        self._stream_state = UnitState.UNSHARDED

    def _release(self) -> None:
        for group in self.groups:
            if group.releases:
                group.install(group.placeholders)
                group.weights.release()
        if self._stream_state is UnitState.UNSHARDED:
            self._context.counters.add(unsharded_bytes=-self.unsharded_bytes)
        self._stream_state = UnitState.SHARDED

    def _reduce(self, compares: bool) -> None:
        read: list[Tensor | None] = []
        for group in self.groups:
            if group.requires_grad:
                inner, outer = (c and c.reduce for c in self._context.communicators(group.mesh))
                if compares:
                    self._compare("REDUCE", inner, outer)
                read += group.gradients.reduce(inner, outer, divisor=self._context.grad_divisor)
        if self._context.runs_after_launch:
            # Given back now, the comp lane would write over what the RS lane has yet to read.
            self._being_reduced.append(read)

    def _compare(self, op: str, *communicators: Communicator | None) -> None:
        """Whether all ranks of a mesh are at this unit.

        Raises:
            RuntimeError: some are at another one; on every rank of the mesh.
        """
        own = self._words[op]
        words = {own}
        for communicator in communicators:
            if communicator is not None:
                words = words.union(*communicator.exchange(words))
        if others := sorted(words - {own}):
            raise RuntimeError(
                f"this rank comes to {own}, others to {', '.join(others)}; expected every rank to "
                "use the units in one order. Let forward() call them in an order that does not "
                "depend on the rank or its data"
            )

    # ---- begin, end, abort; called with drained lanes -----------------------------------------

    def check_at_rest(self) -> None:
        """The module holds the parameters that it was sharded with.

        Raises:
            RuntimeError: one of them was replaced, converted or frozen since.
        """
        for group in self.groups:
            group.check_sharded_params()

    def swap_in(self, *, is_fresh: bool) -> None:
        """Compute parameters where they are filled, placeholders where they must be.

        ``is_fresh``: main weights are those that an earlier forward of this step has seen.
        """
        if not is_fresh:
            self._forget_weights()
        for group in self.groups:
            if not is_fresh and group.weights.is_filled_locally:
                group.weights.refresh(None)
            must_fill = group.gathers and self._stream_state is UnitState.SHARDED
            group.install(group.placeholders if must_fill else group.compute_params)

    def swap_out(self) -> None:
        """Back to the sharded parameters, with this step's gradient in their ``.grad``."""
        if self.releases and self._stream_state is UnitState.UNSHARDED:
            self._release()  # gathered by the safety net: no release was issued
        self._being_reduced.clear()
        for group in self.groups:
            group.publish()
            group.install(group.sharded_params)

    def abandon(self) -> bool:
        """After a failure: release, and forget all contributions (``Gradients.drop``)."""
        if self.releases:
            self._release()
        self._forget_weights()
        self._being_reduced.clear()
        had_kept = False
        for group in self.groups:
            had_kept |= group.drop_grads()
            group.install(group.sharded_params)
        return had_kept

    def _forget_weights(self) -> None:
        """What was filled counts no more; what releases has released it already."""
        self._state = self._stream_state = UnitState.SHARDED
        self._is_fresh = False
        self._gathered = NOTHING_DONE  # it may hold a failure, and that the frames it came from


@final
class _Door:
    """What autograd calls once it has added a gradient to a compute parameter.

    Python's garbage collector does not see what a parameter's hooks hold, so this holds no way
    back to the parameter: weakly the unit, and the places of group and parameter in it.
    """

    __slots__ = ("_group", "_index", "_unit")

    def __init__(self, unit: FsdpUnit, group: int, index: int) -> None:
        self._unit = ref(unit)
        self._group = group
        self._index = index

    def __call__(self, param: Tensor) -> None:
        # None: the layer delayed its weight gradient; whoever makes it brings it to the door.
        if (grad := param.grad) is not None:
            param.grad = None
            unit = self._unit()
            assert unit is not None, "a unit lives as long as its parameters are trained"
            unit.accumulate(unit.groups[self._group], self._index, grad)
