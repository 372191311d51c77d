"""``--save`` and ``--load``: a trainee and how far it has come, in a directory.

A crash leaves nothing that looks whole: everything goes into ``DIR.incomplete``, the record last,
which then takes the place of ``DIR``. An earlier checkpoint there is ``DIR.previous`` meanwhile.
"""

import shutil
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from ep_overlap.commands.checkpoint_record import CheckpointRecord, beside
from ep_overlap.commands.running import RunFailedError
from ep_overlap.commands.trainee import Trainee
from ep_overlap.commands.world import World
from fsdp_hooks.checkpoint import load_state_dict, state_dict, state_dict_to_fill
from fsdp_hooks.checkpoint_ranks import agreed


def save(directory: Path, trainee: Trainee, record: CheckpointRecord, world: World) -> None:
    """Write a checkpoint in place of ``directory``. Collective.

    Raises:
        RuntimeError: a rank could not write; on every rank. What was there is there still.
    """
    directory = directory.resolve()  # of a symbolic link, what it points to is replaced
    incomplete, previous = beside(directory, "incomplete"), beside(directory, "previous")
    is_first = world.rank == 0
    with agreed(world.control):  # no rank writes before the old files are removed
        if is_first:
            shutil.rmtree(incomplete, ignore_errors=True)
            incomplete.mkdir()
    try:
        _write(incomplete, trainee, record, world)
    except (RuntimeError, ValueError):  # on every rank
        if is_first:
            shutil.rmtree(incomplete, ignore_errors=True)
        raise
    with agreed(world.control):  # when save() returns, on any rank, the checkpoint is there
        if is_first:
            shutil.rmtree(previous, ignore_errors=True)
            if directory.exists():
                directory.rename(previous)
            incomplete.rename(directory)
            shutil.rmtree(previous, ignore_errors=True)


def _write(directory: Path, trainee: Trainee, record: CheckpointRecord, world: World) -> None:
    """All files, the record last. Collective; fails on every rank."""
    name, group = trainee.parts.global_name, world.control
    state = state_dict(trainee.module, trainee.optimizer, global_name=name, group=group)
    try:
        dcp.save(state, checkpoint_id=directory, process_group=group)
    except CheckpointException as error:
        raise RunFailedError(f"{directory}: {_first(error)}") from None
    with agreed(group):
        if world.rank == 0:
            record.write(directory)


def load(directory: Path, trainee: Trainee, world: World, *, lr: float) -> None:
    """Fill a trainee from the checkpoint in ``directory``; ``lr`` holds from now on. Collective.

    Raises:
        ValueError: the model differs from the one saved, or a rank could not read; on every rank.
    """
    reader = dcp.FileSystemReader(directory)
    name, group = trainee.parts.global_name, world.control
    with agreed(group):
        metadata = _read_metadata(reader, directory)
    state = state_dict_to_fill(
        metadata, trainee.module, trainee.optimizer, global_name=name, group=group
    )
    try:
        dcp.load(state, storage_reader=reader, process_group=group)
    except CheckpointException as error:  # on every rank
        raise _damaged(directory, _first(error)) from None
    load_state_dict(trainee.module, state, trainee.optimizer, global_name=name, group=group)
    for param_group in trainee.optimizer.param_groups:
        param_group["lr"] = lr


def _read_metadata(reader: dcp.FileSystemReader, directory: Path) -> Metadata:
    try:
        return reader.read_metadata()
    except Exception as error:  # unpickling what is damaged may raise any
        raise _damaged(directory, f".metadata: {_line_of(error)}") from error


def _first(error: CheckpointException) -> str:
    """What failed on the first rank that failed, in one line instead of all ranks' tracebacks."""
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {_line_of(cause)}"


def _line_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _damaged(directory: Path, found: str) -> ValueError:
    return ValueError(f"--load {directory}: {found}; the checkpoint is damaged, load another")
