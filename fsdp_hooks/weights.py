"""A group's weights, from what the optimizer updates to what compute reads.

::

    main    [this rank's part]          main dtype     what the optimizer updates
      |  refresh: cast, and gather over the outer ranks        once a step
    shard   [numel / inner ranks]       compute dtype  what a gather sends
      |  gather: over the inner ranks                          once a step, or every use
    whole   [numel]                     compute dtype  what compute parameters are views of

Two of the three are one tensor wherever they hold the same: ``no_shard`` in one dtype has one
tensor in all, ``optim_grads_params`` in one dtype has no shard apart from main. Megatron-FSDP keeps
the same three buffers apart.
"""

from typing import final

import torch
from torch import Tensor

from fsdp_hooks.buffer import FlatBuffer
from fsdp_hooks.collectives import Communicator
from fsdp_hooks.layout import Layout
from fsdp_hooks.mesh import GroupMesh
from fsdp_hooks.placement import Placement, Placements


@final
class Parts:
    """Which part of a layout this rank holds, as a range of elements ``[start, stop)``.

    The layout has a piece for each part of the main weights. An inner shard is a run of pieces, one
    for each outer rank where those share out main weights, else a single one.
    """

    def __init__(self, *, mesh: GroupMesh, placements: Placements, outer: Placement) -> None:
        shards_main = placements.main is Placement.SHARD
        self._num_inner = mesh.inner.size if shards_main else 1
        self._num_outer = mesh.outer.size if outer is Placement.SHARD else 1
        self._inner = mesh.inner.position if shards_main else 0
        self._outer = mesh.outer.position if outer is Placement.SHARD else 0

    @property
    def num_pieces(self) -> int:
        """Pieces of the layout."""
        return self._num_inner * self._num_outer

    def main(self, layout: Layout) -> tuple[int, int]:
        """This rank's main weights, and its part of the gradient."""
        return layout.shard_range(self._inner * self._num_outer + self._outer)

    def shard(self, layout: Layout) -> tuple[int, int]:
        """What this rank sends to a gather, and receives from a reduction over inner ranks."""
        first = self._inner * self._num_outer
        return layout.shard_range(first)[0], layout.shard_range(first + self._num_outer - 1)[1]


@final
class Weights:
    """See the module's docstring.

    Args:
        values: ``[layout.numel]``, main dtype: the initial weights. May become the main weights.
        compute_dtype: of the shard and the whole.
        parts: what this rank holds.
        keeps_whole: whether the whole stays between uses; else release it once it has its views.
    """

    def __init__(
        self,
        layout: Layout,
        values: Tensor,
        *,
        compute_dtype: torch.dtype,
        parts: Parts,
        keeps_whole: bool,
    ) -> None:
        start, stop = parts.main(layout)
        shard_start, shard_stop = parts.shard(layout)
        has_one_dtype = compute_dtype is values.dtype
        has_whole_main = stop - start == layout.numel
        self.whole = FlatBuffer(
            layout,
            dtype=compute_dtype,
            device=values.device,
            memory=values if has_one_dtype else None,
        )
        self.main = values if has_whole_main else values[start:stop].clone()
        self.main_start = start
        if has_one_dtype and (start, stop) == (shard_start, shard_stop):
            self._shard = self.main
        elif keeps_whole:
            self._shard = self.whole.flat[shard_start:shard_stop]
        else:
            self._shard = values.new_empty(shard_stop - shard_start, dtype=compute_dtype)
        self._is_gathered = shard_stop - shard_start < layout.numel
        self.is_resident = has_one_dtype and has_whole_main
        """Whether compute reads the main weights themselves: there is nothing to fill."""
        self.releases = not keeps_whole

    @property
    def is_filled_locally(self) -> bool:
        """Whether filling the whole takes a cast and no other rank."""
        return not self.is_resident and not self._is_gathered and not self._is_split_again

    @property
    def _is_split_again(self) -> bool:
        """Whether the outer ranks share out main weights."""
        return self.main.numel() < self._shard.numel()

    def refresh(self, outer: Communicator | None) -> None:
        """AG lane: bring the shard up to date with the main weights, which have been updated.

        ``outer``: over the outer ranks; None: there is one.
        """
        if self._shard is self.main:
            return
        if not self._is_split_again:
            self._shard.copy_(self.main)
            return
        assert outer is not None, "there are outer ranks that share out main weights"
        outer.all_gather(self._shard, self.main.to(self._shard.dtype))

    def gather(self, inner: Communicator | None) -> None:
        """AG lane: allocate the whole and fill it from every inner rank's shard.

        ``inner``: over the inner ranks; None: there is one.
        """
        whole = self.whole.allocate()
        if self._is_gathered:
            assert inner is not None, "there are inner ranks that share out parameters"
            inner.all_gather(whole, self._shard)

    def release(self) -> None:
        """AG lane: give the whole back; views stay."""
        self.whole.free()
