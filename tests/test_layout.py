"""Where parameters lie in flat storage, and who owns which rows."""

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_hooks.buffer import FlatBuffer, rows_of
from fsdp_hooks.layout import Layout, ParamExtent, flat_layout

shapes = st.lists(
    st.one_of(
        st.just(()),
        st.tuples(st.integers(0, 40)),
        st.tuples(st.integers(0, 12), st.integers(0, 12)),
        st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5)),
    ).map(tuple),
    max_size=8,
)


def drawing(layout: Layout) -> str:
    """One letter an element, dots for padding, a bar between ranks."""
    row = ["."] * layout.numel
    for letter, extent in zip("abcdefgh", layout.extents, strict=False):
        row[extent.start : extent.stop] = letter * extent.numel
    ranks = [layout.shard_range(rank) for rank in range(layout.num_ranks)]
    return "|".join("".join(row[start:stop]) for start, stop in ranks)


@pytest.mark.parametrize(
    ("given_shapes", "num_ranks", "expected"),
    [
        # A boundary falls between two rows of b.
        ([(5,), (4, 3), (4,)], 2, "aaaaa.bbbbbb|bbbbbbcccc.."),
        # Not one row of b fits behind a; c has rows of one element, and is cut anywhere.
        ([(4,), (1, 5), (6,)], 3, "aaaa..|bbbbbc|ccccc."),
        # One row for four ranks; an empty parameter; a scalar.
        ([(1, 5), (0, 3), ()], 4, "aaaaa|c....|.....|....."),
        ([(5,), (4, 3), (4,)], 1, "aaaaabbbbbbbbbbbbcccc"),
    ],
)
def test_drawing(given_shapes: list[tuple[int, ...]], num_ranks: int, expected: str) -> None:
    assert drawing(flat_layout(given_shapes, num_ranks)) == expected


@given(shapes, st.integers(1, 9))
def test_parameters_keep_their_order_and_do_not_overlap(
    given_shapes: list[tuple[int, ...]], num_ranks: int
) -> None:
    layout = flat_layout(given_shapes, num_ranks)
    assert [extent.shape for extent in layout.extents] == given_shapes
    cursor = 0
    for extent in layout.extents:
        assert extent.start >= cursor
        assert extent.stop - extent.start == prod(extent.shape)
        cursor = extent.stop
    assert cursor <= layout.numel == layout.shard_numel * num_ranks


@given(shapes, st.integers(1, 9))
def test_no_row_is_cut_and_every_row_has_one_owner(
    given_shapes: list[tuple[int, ...]], num_ranks: int
) -> None:
    layout = flat_layout(given_shapes, num_ranks)
    for extent in layout.extents:
        rows = extent.shape[0] if extent.shape else 1
        owned: list[int] = []
        for rank in range(num_ranks):
            start, stop = layout.shard_range(rank)
            first, last = extent.rows_within(start, stop)
            owned += range(first, last)
            for row in range(first, last):  # all of it lies in the owner's shard
                assert start <= extent.start + row * extent.row_numel
                assert extent.start + (row + 1) * extent.row_numel <= stop
        if extent.numel > 0:
            assert owned == list(range(rows))
        else:
            assert owned == []


@given(shapes, st.integers(1, 9))
def test_padding_is_bounded(given_shapes: list[tuple[int, ...]], num_ranks: int) -> None:
    layout = flat_layout(given_shapes, num_ranks)
    total = sum(prod(shape) for shape in given_shapes)
    longest = max((prod(shape) for shape in given_shapes), default=0)
    widest = max((prod(shape[1:]) for shape in given_shapes if prod(shape)), default=1)
    even = -(-total // num_ranks)
    # Each boundary wastes less than a row, unless shards must be as long as a parameter.
    assert layout.shard_numel <= max(even, longest) + 2 * widest
    if num_ranks == 1 or widest == 1:
        assert layout.shard_numel == even


def test_unlike_rows_do_not_blow_the_padding_up() -> None:
    # Each parameter is longer than an even shard, and the rows' least common multiple is 7436429.
    primes = (7, 11, 13, 17, 19, 23)
    layout = flat_layout([(100, prime) for prime in primes], 64)
    assert layout.shard_numel <= 2300


def test_equal_rows_need_no_more_than_a_row_of_padding() -> None:
    layout = flat_layout([(64, 48), (48,), (192, 48), (192,), (48, 192)], 8)
    total = sum(extent.numel for extent in layout.extents)
    assert total <= layout.numel <= total + 8 * 192


def test_large_shapes_are_laid_out_at_once() -> None:
    layout = flat_layout([(8, 4096, 1407), (8, 1407, 4096), (50257, 4096), (4096,)], 7)
    total = sum(extent.numel for extent in layout.extents)
    assert layout.numel <= 1.6 * total


def test_a_group_without_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least one rank \(got 0\)"):
        flat_layout([(2,)], 0)


def test_extents_that_overlap_fail_the_layouts_own_check() -> None:
    extents = (ParamExtent(shape=(4,), start=0), ParamExtent(shape=(4,), start=3))
    with pytest.raises(AssertionError, match="parameters overlap"):
        Layout(extents=extents, num_ranks=1, shard_numel=8)


@settings(max_examples=50)
@given(shapes, st.integers(1, 5))
def test_views_of_a_buffer_survive_release_and_every_rank_sees_its_rows(
    given_shapes: list[tuple[int, ...]], num_ranks: int
) -> None:
    layout = flat_layout(given_shapes, num_ranks)
    buffer = FlatBuffer(layout, dtype=torch.float64, device=torch.device("cpu"))
    views = [buffer.param_view(extent) for extent in layout.extents]
    for _ in range(2):
        if layout.numel:
            buffer.free()
            assert not buffer.is_allocated
            with pytest.raises(AssertionError, match="read while it is released"):
                _ = buffer.flat
        buffer.allocate()
        buffer.flat.copy_(torch.arange(layout.numel))
        for view, extent in zip(views, layout.extents, strict=True):
            expected = torch.arange(extent.start, extent.stop, dtype=torch.float64)
            assert torch.equal(view, expected.view(extent.shape))
            parts = [layout.shard_range(rank) for rank in range(num_ranks)]
            rows = [rows_of(buffer.flat[a:b], extent, start=a) for a, b in parts]
            assert torch.equal(torch.cat([r.flatten() for r in rows]), expected)
            assert all(row.shape[1:] == extent.shape[1:] for row in rows)
            if extent.numel:
                assert buffer.holds(view)
    assert not buffer.holds(torch.zeros(3))
