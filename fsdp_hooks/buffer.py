"""One flat storage: allocated and freed by resizing, seen through views that stay.

Tensors that autograd saved point into the storage. Release therefore resizes it to zero and
gathering resizes it back: the storage object, and with it every view, survives. The idea is that
of FSDP1's ``FlatParamHandle`` and FSDP2's ``alloc_storage``.
"""

from typing import final

import torch
from torch import Tensor

from fsdp_hooks.layout import Layout, ParamExtent


@final
class FlatBuffer:
    """A flat tensor of ``layout.numel`` elements, and views of its parameters.

    Args:
        layout: where the parameters lie.
        dtype: of all of them.
        device: where the storage is.
        memory: ``[layout.numel]``, to be the storage; None: a new one.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        dtype: torch.dtype,
        device: torch.device,
        memory: Tensor | None = None,
    ) -> None:
        self.layout = layout
        if memory is None:
            memory = torch.empty(layout.numel, dtype=dtype, device=device)
        self._flat = memory
        self._storage = memory.untyped_storage()
        self.nbytes = memory.nbytes
        """Bytes when allocated."""

    @property
    def is_allocated(self) -> bool:
        """Whether the storage is there; always so without elements."""
        return self.nbytes == 0 or self._storage.nbytes() > 0

    @property
    def flat(self) -> Tensor:
        """``[layout.numel]``, the whole storage."""
        assert self.is_allocated, "the flat storage is read while it is released"
        return self._flat

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is a view of this storage. Only asked while it is allocated."""
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            return False  # a subclass may have no storage to ask for
        ours = self._storage.data_ptr()
        return ours != 0 and tensor.untyped_storage().data_ptr() == ours

    def allocate(self) -> Tensor:
        """Give the storage its memory back, with undefined content, and return ``flat``.
        Idempotent."""
        if self._storage.nbytes() == 0:
            self._storage.resize_(self.nbytes)
        return self._flat

    def free(self) -> None:
        """Free the memory; the storage object and its views stay. Idempotent."""
        self._storage.resize_(0)

    def param_view(self, extent: ParamExtent) -> Tensor:
        """The parameter's elements, in its shape.

        A view of ``.data``: it has a version counter of its own, so a gather, which writes the
        same values again, does not look to autograd like a change of a saved tensor.
        """
        return self._flat.data[extent.start : extent.stop].view(extent.shape)


def rows_of(part: Tensor, extent: ParamExtent, *, start: int) -> Tensor:
    """The rows of a parameter that lie in a part of the flat storage, as a view of that part.

    Args:
        part: ``[n]``, elements ``[start, start + n)`` of the layout.
        extent: the parameter's.
        start: where the part starts; it cuts no row.

    Returns:
        ``[rows, *shape[1:]]``, possibly without rows; for a scalar parameter ``[1]`` or ``[0]``.
    """
    first, last = extent.rows_within(start, start + part.numel())
    offset = extent.start + first * extent.row_numel - start
    rows = part.data[offset : offset + (last - first) * extent.row_numel]
    return rows.view(last - first, *extent.shape[1:]) if extent.shape else rows
