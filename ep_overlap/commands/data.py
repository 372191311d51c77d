"""Byte tokens of text files, cut into batches that any rank can make for any iteration.

Shape letters: N bytes of the text, B micro-batch size, S sequence length.
"""

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

VOCAB_SIZE: Final = 256
"""One token a byte."""

DEFAULT_CORPUS_BYTES: Final = 4 * 1024 * 1024
"""How much of the default text is read."""

_NOT_SOURCES: Final = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}
)


def load_bytes(path: Path | None) -> Tensor:
    """Read a file as tokens, uint8 ``[N]``; None reads sources of Python's standard library.

    Raises:
        ValueError: the file is missing, unreadable or empty.
    """
    if path is None:
        content = _standard_library(DEFAULT_CORPUS_BYTES)
    else:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ValueError(
                f"data file {path}: expected a readable file, got: {error.strerror}"
            ) from error
    if not content:
        raise ValueError(f"data file {path}: expected at least 2 bytes, got 0")
    # frombuffer shares memory with its argument, and warns unless that is writable.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _standard_library(max_bytes: int) -> bytes:
    """The first ``max_bytes`` of the ``.py`` files, in the order of their relative paths."""
    root = Path(sysconfig.get_path("stdlib"))
    sources = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    content = bytearray()
    for source in sources:
        if len(content) >= max_bytes:
            break
        if _NOT_SOURCES.isdisjoint(source.parts):
            content += (root / source).read_bytes()
    return bytes(content[:max_bytes])


@dataclass(frozen=True, kw_only=True)
class ByteBatches:
    """The batches of one data-parallel rank, each a function of its position alone.

    No generator is advanced: iteration 1000 costs what iteration 0 costs, so a resumed run sees
    exactly what an uninterrupted one would have seen.

    Raises:
        ValueError: the text has fewer than ``seq_length + 1`` bytes.
    """

    tokens: Tensor
    """uint8 ``[N]``, see ``load_bytes``."""
    seq_length: int
    micro_batch_size: int
    seed: int
    rank: int
    """This rank's place among those that see different data."""
    num_ranks: int

    def __post_init__(self) -> None:
        num_bytes = self.tokens.numel()
        if num_bytes < self.seq_length + 1:
            raise ValueError(
                f"the data is too short for --seq-length {self.seq_length}: expected at least "
                f"{self.seq_length + 1} bytes, got {num_bytes}"
            )
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"rank must be in 0..{self.num_ranks - 1}, got {self.rank}")

    def microbatches(self, iteration: int, num_microbatches: int) -> list[tuple[Tensor, Tensor]]:
        """The (inputs, targets) of one iteration, int64 ``[B, S]`` each, targets one byte ahead."""
        first = iteration * num_microbatches
        return [self._microbatch(first + i) for i in range(num_microbatches)]

    def _microbatch(self, index: int) -> tuple[Tensor, Tensor]:
        first_row = (index * self.num_ranks + self.rank) * self.micro_batch_size
        num_starts = self.tokens.numel() - self.seq_length
        rows = [
            self.tokens[start : start + self.seq_length + 1]
            for start in (
                _hash(self.seed, first_row + row) % num_starts
                for row in range(self.micro_batch_size)
            )
        ]
        batch = torch.stack(rows).long()
        return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


def _hash(seed: int, index: int) -> int:
    """Position ``index`` of splitmix64's stream for ``seed`` (Steele, Lea and Flood, 2014)."""
    mask = (1 << 64) - 1
    mixed = (_mix(seed & mask) + (index + 1) * 0x9E3779B97F4A7C15) & mask
    return _mix(mixed)


def _mix(value: int) -> int:
    mask = (1 << 64) - 1
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)
