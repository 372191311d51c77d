"""How many bytes a rank puts on the wire in a collective, or takes from it, whichever is more."""

from collections.abc import Sequence

from torch import Tensor


def nbytes(tensors: Sequence[Tensor]) -> int:
    """Of all tensors together."""
    return sum(tensor.nbytes for tensor in tensors)


def foreign_bytes(tensor: Tensor, splits: Sequence[int], rank: int, size: int) -> int:
    """Bytes of ``tensor`` that belong to other ranks; ``splits`` along dim 0, empty when even."""
    if len(splits) == 0:  # not "not splits": megatron-core passes numpy arrays
        return tensor.nbytes * (size - 1) // size
    rows = sum(splits)
    return int(tensor.nbytes * (rows - splits[rank]) // rows) if rows else 0


def rooted_bytes(shard_bytes: int, size: int, *, is_root: bool) -> int:
    """Gather and scatter: the root moves a shard for every other rank, the others their own."""
    return shard_bytes * (size - 1) if is_root else shard_bytes


def passed_on_bytes(tensor_bytes: int, size: int) -> int:
    """Broadcast and reduce: in a pipelined ring each rank passes the whole tensor on once."""
    return tensor_bytes if size > 1 else 0
