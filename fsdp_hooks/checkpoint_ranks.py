"""What the ranks tell each other about a state dict: names, problems, whole tensors.

Objects travel, not tensors: it works on every backend. They travel in batches, which bounds the
memory.

A state dict is::

    {"model": {name: value},
     "optimizer": {"state": {name: {"exp_avg": value, ...}},
                   "param_groups": {name: {"lr": value, ...}}}}
"""

import pickle
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_hooks.checkpoint_shard import TensorShard

StateDict = dict[str, Any]
Path = tuple[str, ...]
"""``("model", name)``, or ``("optimizer", "state" or "param_groups", name, entry)``."""

OPTIMIZER_PARTS: Final = ("state", "param_groups")

BATCH_BYTES: Final = 64 * 1024 * 1024
"""How much of the whole tensors travels at a time."""


def everyone[T](value: T, group: ProcessGroup | None) -> list[T]:
    """Every rank's value, in rank order. Collective."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


@contextmanager
def agreed(group: ProcessGroup | None) -> Generator[None]:
    """A block that fails on every rank if it fails on one, so that none waits for another.

    Collective at its end; a collective within it would wait for the rank that failed.

    Raises:
        ValueError, RuntimeError: on every rank, with the text of the first that failed. What is no
            ``ValueError`` there is told as a ``RuntimeError``.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 (raised below, once every rank knows)
        problem = error
    for rank, found in enumerate(everyone(None if problem is None else _told(problem), group)):
        if found is not None:
            kind, text = found
            where = f"rank {rank}: " if dist.get_world_size(group) > 1 else ""
            raise kind(where + text) from problem


def _told(problem: Exception) -> tuple[type[Exception], str]:
    """How the others can raise it too: an exception of another type might not travel."""
    for kind in (ValueError, RuntimeError):
        if isinstance(problem, kind):
            return kind, str(problem)
    return RuntimeError, f"{type(problem).__name__}: {problem}"


def flattened(state: StateDict) -> dict[Path, Any]:
    """The values of a state dict by path."""
    flat: dict[Path, Any] = {("model", name): v for name, v in state.get("model", {}).items()}
    for part in OPTIMIZER_PARTS:
        for name, entries in state.get("optimizer", {}).get(part, {}).items():
            flat |= {("optimizer", part, name, key): value for key, value in entries.items()}
    return flat


def nested(flat: Mapping[Path, Any]) -> StateDict:
    """The state dict with these values: the inverse of ``flattened``."""
    state: StateDict = {}
    for path, value in flat.items():
        inner = state
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = value
    return state


def gather_whole(state: StateDict, group: ProcessGroup | None) -> StateDict:
    """On rank 0 the state dict of all ranks, ordinary tensors on the CPU; ``{}`` elsewhere."""
    flat = flattened(state)
    with agreed(group):  # or a rank whose extra state cannot travel would leave the others waiting
        pickle.dumps([value for value in flat.values() if not isinstance(value, Tensor)])
    rank = dist.get_rank(group)
    sizes: dict[Path, int] = {}
    first_holders: dict[Path, int] = {}
    for holder, of_rank in enumerate(everyone({p: _num_bytes(v) for p, v in flat.items()}, group)):
        for path, size in of_rank.items():
            sizes.setdefault(path, size)
            first_holders.setdefault(path, holder)
    result: dict[Path, Any] = {}
    for batch in batches(sizes):
        mine = {
            path: _portable(flat[path])
            for path in batch
            if path in flat and (isinstance(flat[path], TensorShard) or first_holders[path] == rank)
        }
        parts = _gathered(mine, group)
        if rank == 0:
            result |= {path: _assembled([p[path] for p in parts if path in p]) for path in batch}
    return nested(result)


def spread_whole(state: StateDict, group: ProcessGroup | None) -> StateDict:
    """A state dict on every rank, given there or on rank 0 alone. Collective.

    Raises:
        ValueError: some ranks have one and others not, and rank 0 is not the only one.
        RuntimeError: rank 0 alone gave one, and it holds rows instead of whole tensors.
    """
    given = everyone(bool(state), group)
    if all(given):
        return state
    holders = [rank for rank, has_one in enumerate(given) if has_one]
    if holders != [0]:
        raise ValueError(
            f"ranks {holders} of {len(given)} gave a state dict; expected all of them, or rank 0 "
            "alone and {} on the others"
        )
    with agreed(group):
        flat = flattened(state)
        for value in flat.values():
            if isinstance(value, TensorShard):
                raise RuntimeError(value.refusal())
    sizes = _broadcast({path: _num_bytes(value) for path, value in flat.items()}, group)
    result: dict[Path, Any] = {}
    for batch in batches(sizes):
        mine = {path: _on_cpu(flat[path]) for path in batch} if flat else {}
        result |= _broadcast(mine, group)
    return nested(result)


_Piece = tuple[torch.Size, int, Tensor | None]
"""Global shape, first row, and the rows, or None where another rank has them too."""


def _portable(value: Any) -> Any:
    """What travels of a value: a piece of a sharded tensor; else the value, boxed, on the CPU."""
    if isinstance(value, TensorShard):
        # A clone: pickling a view takes the whole flat storage along.
        rows = value.local.cpu().clone() if value.is_primary else None
        piece: _Piece = (value.shape, value.first_row, rows)
        return piece
    return [_on_cpu(value)]


def _assembled(parts: list[Any]) -> Any:
    if isinstance(parts[0], list):
        return parts[0][0]  # the same on every rank
    shape: torch.Size = parts[0][0]
    pieces = [(first, rows) for _, first, rows in parts if rows is not None]
    whole = torch.empty(shape, dtype=pieces[0][1].dtype)
    for first, rows in pieces:
        whole[first : first + rows.shape[0]] = rows
    num_rows = sum(rows.shape[0] for _, rows in pieces)
    assert num_rows == shape[0] or whole.numel() == 0, "each row is on one primary rank"
    return whole


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _num_bytes(value: Any) -> int:
    """Of the whole tensor."""
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def batches(sizes: Mapping[Path, int], limit: int = BATCH_BYTES) -> Iterator[list[Path]]:
    """Paths that travel together: tensors of up to ``limit`` bytes, or one larger one."""
    batch: list[Path] = []
    batch_bytes = 0
    for path, size in sizes.items():
        if batch and batch_bytes + size > limit:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(path)
        batch_bytes += size
    if batch:
        yield batch


def _gathered(value: Any, group: ProcessGroup | None) -> list[Any]:
    """On rank 0 every rank's value; elsewhere nothing."""
    is_first = dist.get_rank(group) == 0
    values: list[Any] | None = [None] * dist.get_world_size(group) if is_first else None
    dist.gather_object(value, values, group=group, group_dst=0)
    return values or []


def _broadcast(value: Any, group: ProcessGroup | None) -> Any:
    """Rank 0's value."""
    box = [value]
    dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]
