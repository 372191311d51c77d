"""A group's gradients, from autograd's contributions to the step's gradient.

Each step goes by one lane, and none waits for a later one::

    accumulate (comp)  autograd's gradient of one parameter     -> pending[microbatch]
    or, fused: written by its maker straight into the reduction's input
    seal       (comp)  a microbatch's contributions are done    -> sealed
    reduce     (rs)    allocate, pack, launch, scale, add       -> step gradient
    take       (host)  at the end of a step

Until ``take`` nothing outside has changed: a backward, or a schedule's step, that fails is dropped
whole. What earlier backwards left for one reduction a step goes with it: the failed one has added
to their sums, and to keep a sum beside each would take the memory of all gradients once more.

What ``reduce`` reads lives until it is read. On CPU the sealed record holds it, and the RS lane is
through with it when ``reduce`` returns. On CUDA ``reduce`` has only launched the copy then, and
memory that the comp lane allocated would go back to the comp lane at once; so the unit holds what
``reduce`` returns until the comp lane has waited for the reduction (``FsdpUnit.drop_reduced``). The
kept sums need no such care: ``take`` and ``drop`` come behind both lanes.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple, final

import torch
from torch import Tensor

from fsdp_hooks.collectives import Communicator
from fsdp_hooks.layout import Layout
from fsdp_hooks.placement import Placement
from fsdp_hooks.precision import Dtypes
from fsdp_hooks.wgrad import Destination

_STEP: Final = -1
"""The key of what all microbatches of a step share, where others have a microbatch's number."""

Grads = list[Tensor | None]
"""One for each parameter of a group; None where there is no contribution."""


@final
class _Input:
    """A reduction's input that fused weight gradients are written into, ahead of the reduction.

    The comp lane allocates it, at the first write: on the RS lane the write would have to wait for
    every reduction that was issued before, and none would run under the next unit's backward.
    """

    __slots__ = ("whole", "written")

    def __init__(self, whole: Tensor, num_params: int) -> None:
        self.whole = whole
        self.written = [False] * num_params


class _Sealed(NamedTuple):
    """What one reduction reads."""

    grads: Grads
    input: _Input | None
    """Where fused gradients are; ``grads`` are added to it."""
    is_last: bool
    """Whether the step's gradient is complete with it."""


@final
class Gradients:
    """See the module's docstring.

    Args:
        layout: of the group.
        shard_numel: elements that a reduction over the inner ranks leaves here.
        main_numel: elements that this rank's main weights have.
        placement: over the inner ranks, of the main weights and so of their gradients.
        has_outer: whether outer ranks add up their sums, once a step.
        dtypes: of the group.
        device: of the parameters.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        shard_numel: int,
        main_numel: int,
        placement: Placement,
        has_outer: bool,
        dtypes: Dtypes,
        device: torch.device,
    ) -> None:
        self._layout = layout
        self._shard_numel = shard_numel
        self._main_numel = main_numel
        self._placement = placement
        self._has_outer = has_outer
        self._dtypes = dtypes
        self._device = device
        self._wire = torch.empty(0, dtype=dtypes.reduce, device=device)
        """Makes tensors like itself, which takes less than to say how they are."""
        self._pending: dict[int, Grads] = {}
        self._sealed: deque[_Sealed] = deque()
        self._accumulated: Grads | None = None
        self._awaits_outer = False
        """In the comp lane, ahead of the rs lane: whether the step's sum has yet to go outside."""
        self._inner_sum: Tensor | None = None
        """Of the step so far, where outer ranks have yet to add theirs; main dtype."""
        self._keeps = False
        """Whether backwards that have ended left some of that for the step's end."""
        self._inputs: dict[int, _Input] = {}
        """By microbatch; ``_STEP``: of all microbatches that are reduced together."""
        self._step_grad: Tensor | None = None

    def destination(
        self, index: int, microbatch: int, *, each_microbatch: bool, is_tied: bool
    ) -> Destination:
        """Comp lane: where a fused gradient of parameter ``index`` is written or added.

        Args:
            index: of the parameter.
            microbatch: whose gradient it is.
            each_microbatch: whether each microbatch is reduced on its own.
            is_tied: whether several layers hold the parameter. Over microbatches it is summed as
                other gradients are, each microbatch's first: layers may take turns otherwise.
        """
        if is_tied and not each_microbatch:
            pending = self._pending_of(microbatch)
            if (held := pending[index]) is not None:
                return Destination(held, is_fresh=False)
            shape = self._layout.extents[index].shape
            pending[index] = made = self._new_sum(shape, is_reduced_as_it_is=False)
            return Destination(made, is_fresh=True)
        key = microbatch if each_microbatch else _STEP
        if (input_ := self._inputs.get(key)) is None:
            whole = self._new_sum((self._layout.numel,), is_reduced_as_it_is=each_microbatch)
            input_ = self._inputs[key] = _Input(whole, len(self._layout.extents))
        extent = self._layout.extents[index]
        is_fresh = not input_.written[index]
        input_.written[index] = True
        return Destination(input_.whole[extent.start : extent.stop].view(extent.shape), is_fresh)

    def accumulate(self, index: int, microbatch: int, grad: Tensor) -> None:
        """Comp lane: the one door for every contribution to parameter ``index``.

        A parameter used more than once sums its contributions of a microbatch first, in the
        order of autograd (last forward use first), as one graph of the whole model would.
        """
        pending = self._pending_of(microbatch)
        held = pending[index]
        pending[index] = grad if held is None else held.add_(grad)

    def seal(self, microbatch: int, *, is_last: bool, is_reduced: bool) -> None:
        """Comp lane: hand the microbatch's contributions to ``reduce``, in a record of its own.

        Args:
            microbatch: whose contributions are complete.
            is_last: it is the step's last one.
            is_reduced: a reduction follows; else they are kept, added up in the main dtype.
        """
        grads = self._pending.pop(microbatch, None) or self._none()
        if (held := self._accumulated) is not None:
            for i, grad in enumerate(grads):
                if grad is not None:
                    before = held[i]
                    held[i] = self._own(grad) if before is None else before.add_(grad)
            grads = held
        elif not is_reduced:
            grads = [None if grad is None else self._own(grad) for grad in grads]
        self._accumulated = None if is_reduced else grads
        if is_reduced:
            self._awaits_outer = self._has_outer and not is_last
            input_ = self._inputs.pop(microbatch, None) or self._inputs.pop(_STEP, None)
            self._sealed.append(_Sealed(grads, input_, is_last))

    def reduce(
        self, inner: Communicator | None, outer: Communicator | None, *, divisor: int
    ) -> Grads:
        """RS lane: reduce the oldest sealed gradients and add them to the step's.

        A parameter without a gradient contributes zeros: another rank may have one. Outer ranks add
        up their sums once a step, in the main dtype.

        Args:
            inner: over the inner ranks; None: there is one.
            outer: over the outer ranks; None: there is one.
            divisor: of the sum over all ranks.

        Returns:
            What was read; the comp lane allocated it.

        Raises:
            RuntimeError: nothing is sealed.
        """
        if not self._sealed:
            raise RuntimeError(
                "reduce() of a unit with nothing sealed; call seal() once a microbatch's "
                "contributions are complete, then reduce()"
            )
        grads, input_, is_last = self._sealed.popleft()
        read = grads if input_ is None else [*grads, input_.whole]
        # A sum of many gradients can leave float16's range, where their mean does not.
        scales_first = self._dtypes.reduce is torch.float16 and divisor != 1
        first, then = (1.0 / divisor, 1.0) if scales_first else (None, 1.0 / divisor)
        whole = self._pack(grads, first) if input_ is None else self._complete(input_, grads, first)
        reduced = self._reduced(whole, inner)
        if outer is None:
            self._step_grad = self._added(self._step_grad, reduced, then)
            return read
        inner_sum = self._added(self._inner_sum, reduced, then)
        self._inner_sum = None if is_last else inner_sum
        if is_last:
            summed = self._summed_outside(inner_sum, outer)
            held = self._step_grad
            self._step_grad = summed if held is None else held.add_(summed)
        return read

    def take(self) -> Tensor | None:
        """Host, after every reduction: what was reduced for good, laid out like the main weights;
        what is left for the step's end is kept."""
        self._keeps = self.holds_contributions(is_last=True, is_reduced=True)
        step_grad, self._step_grad = self._step_grad, None
        return step_grad

    def holds_contributions(self, *, is_last: bool, is_reduced: bool) -> bool:
        """Whether gradients wait for ``seal``, where a reduction follows and at the end of a step
        those of earlier microbatches, too. Arguments as there."""
        if is_reduced and (self._accumulated is not None or _STEP in self._inputs):
            return True
        return bool(
            self._pending or self._inputs.keys() - {_STEP} or (is_last and self._awaits_outer)
        )

    def drop(self) -> bool:
        """After a failure: forget all contributions. Returns whether some were of backwards that
        had ended."""
        had_kept = self._keeps
        self._pending.clear()
        self._sealed.clear()
        self._step_grad = None
        self.drop_kept()
        return had_kept

    def drop_kept(self) -> None:
        """Host, between backwards: forget what earlier ones left for the step's end."""
        self._accumulated = None
        self._awaits_outer = False
        self._inner_sum = None
        self._inputs.clear()
        self._keeps = False

    def _new_sum(self, shape: Sequence[int], *, is_reduced_as_it_is: bool) -> Tensor:
        """What fused gradients are added up in: in the dtype of the wire if nothing else is done to
        it (unscaled, it can leave float16's range), in none that is narrower than its products."""
        dtypes = self._dtypes
        is_wire = is_reduced_as_it_is and dtypes.reduce is not torch.float16
        dtype = torch.promote_types(dtypes.compute, dtypes.reduce if is_wire else dtypes.main)
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _pending_of(self, microbatch: int) -> Grads:
        pending = self._pending.get(microbatch)
        if pending is None:
            pending = self._pending[microbatch] = self._none()
        return pending

    def _none(self) -> Grads:
        return [None] * len(self._layout.extents)

    def _own(self, grad: Tensor) -> Tensor:
        """A contribution as a sum over microbatches begins with it: 256 + 1 is 256 in bfloat16."""
        return grad.to(self._dtypes.main)

    def _pack(self, grads: Sequence[Tensor | None], scale: float | None) -> Tensor:
        """The flat input of the reduction, scaled before it is cast. Padding keeps what memory
        held; nobody reads it."""
        whole = self._wire.new_empty(self._layout.numel)
        views: list[Tensor] = []
        present: list[Tensor] = []
        for grad, extent in zip(grads, self._layout.extents, strict=True):
            # One call in place of a slice and its view: this runs for every gradient.
            view = whole.as_strided(extent.shape, extent.stride, extent.start)
            if grad is None:
                view.zero_()
            else:
                views.append(view)
                present.append(grad if scale is None else grad * scale)
        if views:
            torch._foreach_copy_(views, present)  # pyright: ignore[reportPrivateUsage]
        return whole

    def _complete(
        self, input_: _Input, grads: Sequence[Tensor | None], scale: float | None
    ) -> Tensor:
        """As ``_pack``, where fused gradients are written already."""
        for extent, grad, is_written in zip(
            self._layout.extents, grads, input_.written, strict=True
        ):
            view = input_.whole[extent.start : extent.stop].view(extent.shape)
            if grad is None:
                if not is_written:
                    view.zero_()
            elif is_written:
                view.add_(grad)
            else:
                view.copy_(grad)
        whole = input_.whole if scale is None else input_.whole.mul_(scale)
        return whole.to(self._dtypes.reduce)

    def _reduced(self, whole: Tensor, inner: Communicator | None) -> Tensor:
        """The sum over inner ranks. Scaling is apart: gloo has no AVG, and an expert's group is
        smaller than the number of ranks whose tokens it saw."""
        reduced = whole
        if inner is not None and self._placement is Placement.SHARD:
            reduced = whole.new_empty(self._shard_numel)
            inner.reduce_scatter(reduced, whole)
        elif inner is not None:
            inner.all_reduce(reduced)
        return reduced

    def _added(self, held: Tensor | None, reduced: Tensor, scale: float) -> Tensor:
        """The sum so far, and what was reduced last, scaled, in the main dtype."""
        if held is not None:  # in one kernel, without a tensor of that dtype between
            return held.add_(reduced, alpha=scale)
        begun = reduced.to(self._dtypes.main)
        return begun if scale == 1.0 else begun.mul_(scale)

    def _summed_outside(self, inner_sum: Tensor, outer: Communicator) -> Tensor:
        if self._main_numel == self._shard_numel:
            outer.all_reduce(inner_sum)
            return inner_sum
        summed = inner_sum.new_empty(self._main_numel)
        outer.reduce_scatter(summed, inner_sum)
        return summed
