"""Where parameters lie in a group's flat storage, and what part of it each rank owns.

Integers only. All numbers count elements. Drawn to scale, three parameters over two ranks::

    |<------------- shard_numel ------------>|<------------- shard_numel ------------>|
    |<------- a ------->|<--------- b (rows of 3) -------->|....|<---- c ---->|.......|
    |    rank 0                              |    rank 1                              |
                                             ^ falls between two rows of b

A shard boundary inside a parameter falls between two of its rows (a row: one index of the first
dimension). So each rank's piece of a parameter is a block of whole rows, a rectangle, which a
DTensor and a checkpoint can name. The dots are padding; nobody sees it.

Rejected: boundaries anywhere, as in FSDP1's FlatParameter (a piece may start in mid-row, so it
has no shape), and chunks per parameter, as in FSDP2 (the gathered parameters do not lie in one
piece, so every gather ends in a copy). Row-aligned flat shards are Megatron-FSDP's choice too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm, prod


@dataclass(frozen=True, kw_only=True)
class ParamExtent:
    """One parameter's place in the flat storage."""

    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.numel

    @property
    def row_numel(self) -> int:
        """Elements of one row; 1 for vectors and scalars."""
        return prod(self.shape[1:])

    def rows_within(self, start: int, stop: int) -> tuple[int, int]:
        """Rows ``[first, last)`` that lie in ``[start, stop)`` of the flat storage."""
        inner_start = min(max(start, self.start), self.stop)
        inner_stop = max(min(stop, self.stop), inner_start)
        row = max(self.row_numel, 1)
        return (inner_start - self.start) // row, (inner_stop - self.start) // row


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A group's flat storage of ``num_ranks * shard_numel`` elements."""

    extents: tuple[ParamExtent, ...]
    num_ranks: int
    shard_numel: int

    def __post_init__(self) -> None:
        for before, after in zip(self.extents, self.extents[1:], strict=False):
            assert before.stop <= after.start, "parameters overlap"
        assert not self.extents or self.extents[-1].stop <= self.numel, "storage is too short"

    @property
    def numel(self) -> int:
        return self.num_ranks * self.shard_numel

    def shard_range(self, rank: int) -> tuple[int, int]:
        return rank * self.shard_numel, (rank + 1) * self.shard_numel


def flat_layout(shapes: Sequence[tuple[int, ...]], num_ranks: int) -> Layout:
    """Lay parameters out in order, with the smallest shards that keep rows whole.

    Raises:
        ValueError: ``num_ranks`` is below 1.
    """
    if num_ranks < 1:
        raise ValueError(f"a group has at least one rank (got {num_ranks})")
    total = sum(prod(shape) for shape in shapes)
    shard_numel = -(-total // num_ranks)
    while True:
        # A parameter that spans two boundaries or more needs them whole rows apart.
        longest = [prod(shape[1:]) for shape in shapes if prod(shape) > shard_numel]
        quantum = lcm(*longest) if longest and num_ranks > 1 else 1
        shard_numel = -(-shard_numel // quantum) * quantum
        extents = _place(shapes, num_ranks, shard_numel)
        if extents is not None:
            return Layout(extents=extents, num_ranks=num_ranks, shard_numel=shard_numel)
        shard_numel += quantum


def _place(
    shapes: Sequence[tuple[int, ...]], num_ranks: int, shard_numel: int
) -> tuple[ParamExtent, ...] | None:
    """Place greedily with shards of this size; None if they are too small."""
    extents: list[ParamExtent] = []
    cursor = 0
    for shape in shapes:
        extent = ParamExtent(shape=shape, start=cursor)
        if num_ranks > 1 and shard_numel > 0 and extent.numel > 0:
            boundary = (cursor // shard_numel + 1) * shard_numel
            if extent.stop > boundary:
                row = extent.row_numel
                shift = (boundary - cursor) % row
                # Not even one row fits before the boundary: start behind it.
                start = boundary if boundary - cursor < row else cursor + shift
                extent = ParamExtent(shape=shape, start=start)
                crossings = (extent.stop - 1) // shard_numel - extent.start // shard_numel
                if crossings > 1 and shard_numel % row != 0:
                    return None
        extents.append(extent)
        cursor = extent.stop
    return tuple(extents) if cursor <= num_ranks * shard_numel else None
