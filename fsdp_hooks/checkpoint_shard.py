"""This rank's rows of a tensor, as ``torch.distributed.checkpoint`` (DCP) understands them.

DCP's own handling of a DTensor takes its rows for those of ``torch.chunk``. Ours follow the flat
layout, so they are named here: global shape, first row, rows. Padding has no name, so none is ever
written.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NoReturn, final, override

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@final
class TensorShard(Tensor):
    """Rows of a tensor, as an entry of a state dict: DCP saves and fills them, nothing else.

    Implements DCP's ``_Checkpointable``. It is a ``Tensor`` because DCP looks rows up in tensors
    alone. It has the global shape and no values of its own, so every other use is refused.
    """

    local: Tensor
    """``[rows, ...]``: the rows themselves, a view of what they belong to: filled in place."""
    first_row: int
    """Where they start in the whole tensor."""
    is_primary: bool
    """Whether this rank's rows count where several ranks hold the same."""

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """DCP: what this rank can write. DCP drops what another rank offers too."""
        chunks = self.__create_chunk_list__()
        if prod(self.shape) == 0:  # no rank has rows, and yet the checkpoint must know the tensor
            chunks = [ChunkStorageMetadata(torch.Size([0] * self.dim()), self.shape)]
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self.local),
                    size=self.shape,
                ),
            )
            for chunk in chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """DCP: where this rank's rows lie; empty if it has none."""
        if self.local.numel() == 0:
            return []
        offsets = torch.Size([self.first_row] + [0] * (self.dim() - 1))
        return [ChunkStorageMetadata(offsets, self.local.shape)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """DCP: the memory to read from or write to."""
        assert index.offset is None or index.offset[0] == self.first_row, "rows of another rank"
        return self.local

    def copy_rows_of(self, whole: Tensor) -> None:
        """Fill this rank's rows from the whole tensor."""
        self.local.copy_(whole[self.first_row : self.first_row + self.local.shape[0]])

    def refusal(self) -> str:
        """Why it cannot be used like a tensor, and what to do."""
        stop = self.first_row + self.local.shape[0]
        return (
            f"rows {self.first_row}..{stop} of a sharded tensor of shape {tuple(self.shape)} were "
            "used as if they were the whole; expected torch.distributed.checkpoint.save or load. "
            "For ordinary tensors: fsdp_hooks.state_dict(module, full=True)"
        )

    @override
    def __repr__(self, *, tensor_contents: object = None) -> str:
        stop = self.first_row + self.local.shape[0]
        return f"TensorShard(rows {self.first_row}..{stop} of {tuple(self.shape)}, {self.dtype})"

    @override
    def __reduce_ex__(self, proto: object) -> NoReturn:
        raise RuntimeError(self.refusal())

    @override
    def __deepcopy__(self, memo: object) -> NoReturn:
        raise RuntimeError(self.refusal())

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        given = (*args, *(kwargs or {}).values())
        flat = (
            v for value in given for v in (value if isinstance(value, tuple | list) else [value])
        )
        held = next(value for value in flat if isinstance(value, TensorShard))
        raise RuntimeError(held.refusal())


def tensor_shard(
    local: Tensor, *, shape: Sequence[int], first_row: int, is_primary: bool
) -> TensorShard:
    """Name ``local`` as the rows from ``first_row`` on of a tensor of ``shape``."""
    assert local.shape[1:] == torch.Size(shape[1:]), "rows of another tensor"
    assert first_row + local.shape[0] <= shape[0], "more rows than the tensor has"
    made: object = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
        TensorShard, tuple(shape), dtype=local.dtype, device=local.device
    )
    assert isinstance(made, TensorShard)
    made.local = local.detach()
    made.first_row = first_row
    made.is_primary = is_primary
    return made
