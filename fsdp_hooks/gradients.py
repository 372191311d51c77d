"""A group's gradients, from autograd's contributions to the step's gradient.

Each step goes by one lane, and none waits for a later one::

    accumulate (comp)  autograd's gradient of one parameter     -> pending[microbatch]
    seal       (comp)  a microbatch's contributions are done    -> sealed
    reduce     (rs)    allocate, pack, launch, scale, add       -> step gradient
    take       (host)  at the end of a step

Until ``take`` nothing outside the step has changed: a step that fails can be dropped whole.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from fsdp_hooks.collectives import Communicator
from fsdp_hooks.layout import Layout
from fsdp_hooks.placement import Placement
from fsdp_hooks.precision import Dtypes

Grads = list[Tensor | None]
"""One for each parameter of a group; None where there is no contribution."""


class _Sealed(NamedTuple):
    """What one reduction reads."""

    grads: Grads
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
        self._pending: dict[int, Grads] = {}
        self._accumulated: Grads | None = None
        self._sealed: deque[_Sealed] = deque()
        self._awaits_outer = False
        """In the comp lane, ahead of the rs lane: whether the step's sum has yet to go outside."""
        self._inner_sum: Tensor | None = None
        """Of the step so far, where outer ranks have yet to add theirs; main dtype."""
        self._step_grad: Tensor | None = None

    def accumulate(self, index: int, microbatch: int, grad: Tensor) -> None:
        """Comp lane: the one door for every contribution to parameter ``index``.

        A parameter used more than once sums its contributions of a microbatch first, in the
        order of autograd (last forward use first), as one graph of the whole model would.
        """
        pending = self._pending.get(microbatch)
        if pending is None:
            pending = self._pending[microbatch] = self._none()
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
            self._sealed.append(_Sealed(grads, is_last))

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
        grads, is_last = self._sealed.popleft()
        # A sum of many gradients can leave float16's range, where their mean does not.
        scales_first = self._dtypes.reduce is torch.float16 and divisor != 1
        whole = self._pack(grads, 1.0 / divisor if scales_first else None)
        reduced = self._reduced(whole, inner)
        if not scales_first and divisor != 1:
            reduced.mul_(1.0 / divisor)
        if outer is None:
            held = self._step_grad
            self._step_grad = reduced if held is None else held.add_(reduced)
            return grads
        held = self._inner_sum
        inner_sum = reduced if held is None else held.add_(reduced)
        self._inner_sum = None if is_last else inner_sum
        if is_last:
            summed = self._summed_outside(inner_sum, outer)
            held = self._step_grad
            self._step_grad = summed if held is None else held.add_(summed)
        return grads

    def take(self) -> Tensor | None:
        """Host, after every reduction: the step's gradient, laid out like the main weights."""
        step_grad, self._step_grad = self._step_grad, None
        return step_grad

    def holds_contributions(self, *, is_last: bool) -> bool:
        """Whether gradients wait for ``seal``, or an end of the step for what was accumulated."""
        return bool(self._pending) or (
            is_last and (self._accumulated is not None or self._awaits_outer)
        )

    def drop(self) -> None:
        """After a failure: forget all of this step's contributions."""
        self._pending.clear()
        self._sealed.clear()
        self._step_grad = None
        self.drop_kept()

    def drop_kept(self) -> None:
        """Host, between backwards: forget what earlier microbatches left for the step's end."""
        self._accumulated = None
        self._awaits_outer = False
        self._inner_sum = None

    def _none(self) -> Grads:
        return [None] * len(self._layout.extents)

    def _own(self, grad: Tensor) -> Tensor:
        """A contribution as a sum over microbatches begins with it: 256 + 1 is 256 in bfloat16."""
        return grad.to(self._dtypes.main)

    def _pack(self, grads: Sequence[Tensor | None], scale: float | None) -> Tensor:
        """The flat input of the reduction, scaled before it is cast. Padding keeps what memory
        held; nobody reads it."""
        whole = torch.empty(self._layout.numel, dtype=self._dtypes.reduce, device=self._device)
        views: list[Tensor] = []
        present: list[Tensor] = []
        for grad, extent in zip(grads, self._layout.extents, strict=True):
            view = whole[extent.start : extent.stop].view(extent.shape)
            if grad is None:
                view.zero_()
            else:
                views.append(view)
                present.append(grad if scale is None else grad * scale)
        if views:
            torch._foreach_copy_(views, present)  # pyright: ignore[reportPrivateUsage]
        return whole

    def _reduced(self, whole: Tensor, inner: Communicator | None) -> Tensor:
        """The sum over inner ranks. Scaling is apart: gloo has no AVG, and an expert's group is
        smaller than the number of ranks whose tokens it saw."""
        reduced = whole
        if inner is not None and self._placement is Placement.SHARD:
            reduced = whole.new_empty(self._shard_numel)
            inner.reduce_scatter(reduced, whole)
        elif inner is not None:
            inner.all_reduce(reduced)
        return reduced.to(self._dtypes.main)

    def _summed_outside(self, inner_sum: Tensor, outer: Communicator) -> Tensor:
        if self._main_numel == self._shard_numel:
            outer.all_reduce(inner_sum)
            return inner_sum
        summed = inner_sum.new_empty(self._main_numel)
        outer.reduce_scatter(summed, inner_sum)
        return summed
