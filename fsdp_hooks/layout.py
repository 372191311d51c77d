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
from functools import cached_property
from math import lcm, prod


@dataclass(frozen=True, kw_only=True)
class ParamExtent:
    """One parameter's place in the flat storage."""

    shape: tuple[int, ...]
    start: int

    @cached_property
    def stride(self) -> tuple[int, ...]:
        """Elements from one index to the next, of each dimension: as of a contiguous tensor."""
        return tuple(prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))

    @property
    def numel(self) -> int:
        """Elements in all."""
        return prod(self.shape)

    @property
    def stop(self) -> int:
        """Where the next parameter may start."""
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
        """Elements in all."""
        return self.num_ranks * self.shard_numel

    def shard_range(self, rank: int) -> tuple[int, int]:
        """The part of the storage ``[start, stop)`` that ``rank`` owns."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel


def flat_layout(shapes: Sequence[tuple[int, ...]], num_ranks: int) -> Layout:
    """Lay parameters out in order, with small shards that keep rows whole.

    Raises:
        ValueError: ``num_ranks`` is below 1.
    """
    if num_ranks < 1:
        raise ValueError(f"a group has at least one rank (got {num_ranks})")
    total = sum(prod(shape) for shape in shapes)
    smallest = -(-total // num_ranks)
    while True:
        shard_numel = _next_shard_numel(shapes, smallest) if num_ranks > 1 else smallest
        extents, end = _place(shapes, shard_numel)
        overflow = end - num_ranks * shard_numel
        if overflow <= 0:
            return Layout(extents=extents, num_ranks=num_ranks, shard_numel=shard_numel)
        smallest = shard_numel + max(overflow // num_ranks, 1)


def _next_shard_numel(shapes: Sequence[tuple[int, ...]], smallest: int) -> int:
    """The first shard size, from ``smallest`` on, that cuts no row whatever the offsets.

    A parameter longer than a shard may hold two boundaries, which are then one shard apart: whole
    rows. With unlike rows a multiple of all of them is far off, and it takes less padding to make
    shards as long as the parameter.
    """
    quantum = 1
    sizes: list[int] = []
    for shape in sorted((s for s in shapes if prod(s) > 0), key=prod, reverse=True):
        # Those before this parameter may be longer than a shard; it, and those behind it, may not.
        sizes.append(_round_up(max(smallest, prod(shape)), quantum))
        if prod(shape) <= smallest:
            return min(sizes)
        quantum = lcm(quantum, prod(shape[1:]))
    return min([*sizes, _round_up(smallest, quantum)])  # all of them may be longer


def _round_up(number: int, quantum: int) -> int:
    return -(-number // quantum) * quantum


def _place(
    shapes: Sequence[tuple[int, ...]], shard_numel: int
) -> tuple[tuple[ParamExtent, ...], int]:
    """Place greedily with shards of this size. Returns the extents, and where the last one ends."""
    extents: list[ParamExtent] = []
    cursor = 0
    for shape in shapes:
        numel, row = prod(shape), prod(shape[1:])
        if numel > 0:
            before_boundary = shard_numel - cursor % shard_numel
            if before_boundary < min(row, numel):
                cursor += before_boundary  # not even one row fits: start behind the boundary
            elif before_boundary < numel:
                cursor += before_boundary % row
        extents.append(ParamExtent(shape=shape, start=cursor))
        cursor += numel
    return tuple(extents), cursor
