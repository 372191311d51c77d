"""Byte batches: right neighbours, the same again, others on other ranks, and clear refusals."""

from pathlib import Path

import pytest
import torch

from ep_overlap.commands.data import DEFAULT_CORPUS_BYTES, VOCAB_SIZE, ByteBatches, load_bytes


def batches(
    num_bytes: int = 5000, *, seed: int = 1, rank: int = 0, num_ranks: int = 2
) -> ByteBatches:
    """Over bytes whose neighbours tell where they are."""
    tokens = (torch.arange(num_bytes) * 7 % 251).to(torch.uint8)
    return ByteBatches(
        tokens=tokens,
        seq_length=16,
        micro_batch_size=3,
        seed=seed,
        rank=rank,
        num_ranks=num_ranks,
    )


def test_targets_are_the_inputs_one_byte_on() -> None:
    (inputs, targets), *others = batches().microbatches(0, 4)
    assert len(others) == 3
    assert inputs.shape == targets.shape == (3, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(targets, (inputs + 7) % 251)


def test_an_iteration_is_the_same_without_those_before_it() -> None:
    for iteration in (0, 1, 1000):
        again = batches().microbatches(iteration, 2)
        for (a, b), (c, d) in zip(batches().microbatches(iteration, 2), again, strict=True):
            assert torch.equal(a, c)
            assert torch.equal(b, d)


def test_no_two_microbatches_of_any_rank_or_iteration_are_alike() -> None:
    seen = [
        tuple(inputs.flatten().tolist())
        for rank in range(2)
        for iteration in range(8)
        for inputs, _ in batches(rank=rank).microbatches(iteration, 4)
    ]
    assert len(set(seen)) == 2 * 8 * 4


def test_another_seed_gives_other_data() -> None:
    (first, _), (second, _) = (batches(seed=s).microbatches(0, 1)[0] for s in (1, 2))
    assert not torch.equal(first, second)


def test_ranks_together_see_the_rows_that_one_rank_alone_would_see() -> None:
    alone = torch.cat([inputs for inputs, _ in batches(num_ranks=1).microbatches(0, 4)])
    shared = torch.cat(
        [
            batches(rank=rank).microbatches(0, 2)[microbatch][0]
            for microbatch in range(2)
            for rank in range(2)
        ]
    )
    assert torch.equal(alone, shared)


def test_every_part_of_the_text_is_used() -> None:
    seen = batches(num_bytes=251).microbatches(0, 200)
    inputs, targets = (torch.cat(parts) for parts in zip(*seen, strict=True))
    assert set(inputs.unique().tolist()) == set(range(251)) - {250 * 7 % 251}  # the last byte
    assert set(targets.unique().tolist()) == set(range(251)) - {0}  # the first


def test_a_file_is_read_byte_by_byte(tmp_path: Path) -> None:
    path = tmp_path / "text.bin"
    path.write_bytes(bytes(range(VOCAB_SIZE)))
    tokens = load_bytes(path)
    assert tokens.dtype == torch.uint8
    assert tokens.tolist() == list(range(VOCAB_SIZE))


def test_the_default_text_is_python_source_and_the_same_each_time() -> None:
    tokens = load_bytes(None)
    assert tokens.numel() == DEFAULT_CORPUS_BYTES
    assert torch.equal(tokens, load_bytes(None))
    assert b"import" in bytes(tokens[:20000].tolist())


def test_a_text_of_one_sequence_and_a_byte_is_enough_and_no_less() -> None:
    (inputs, _), *_ = batches(num_bytes=17).microbatches(0, 1)
    assert inputs.tolist() == [[i * 7 for i in range(16)]] * 3
    with pytest.raises(
        ValueError,
        match=r"^the data is too short for --seq-length 16: expected at "
        r"least 17 bytes, got 16$",
    ):
        batches(num_bytes=16)


def test_missing_and_empty_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^data file .*gone: expected a readable file, got: No "):
        load_bytes(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"expected a readable file, got: Is a directory$"):
        load_bytes(tmp_path)
    empty = tmp_path / "empty"
    empty.touch()
    with pytest.raises(ValueError, match=r"^data file .*empty: expected at least 2 bytes, got 0$"):
        load_bytes(empty)


def test_a_rank_outside_its_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^rank must be in 0\.\.1, got 2$"):
        batches(rank=2)
