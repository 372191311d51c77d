"""``--save`` and ``--load``: a trainee and how far it has come, in a directory.

A crash leaves nothing that looks whole: everything goes into ``DIR.incomplete``, the record last,
which then takes the place of ``DIR``. An earlier checkpoint there is ``DIR.previous`` meanwhile.
"""

import shutil
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ep_overlap.commands.checkpoint_record import CheckpointRecord
from ep_overlap.commands.trainee import Trainee
from ep_overlap.commands.world import World
from fsdp_hooks.checkpoint import load_state_dict, state_dict, state_dict_to_fill


def save(directory: Path, trainee: Trainee, record: CheckpointRecord, world: World) -> None:
    """Write a checkpoint in place of ``directory``. Collective."""
    incomplete = directory.with_name(directory.name + ".incomplete")
    previous = directory.with_name(directory.name + ".previous")
    if world.rank == 0:
        shutil.rmtree(incomplete, ignore_errors=True)
        incomplete.mkdir()
    dist.barrier(world.control)  # or a rank's file could be written before the old ones are removed
    state = state_dict(
        trainee.module,
        trainee.optimizer,
        global_name=trainee.parts.global_name,
        group=world.control,
    )
    dcp.save(state, checkpoint_id=incomplete, process_group=world.control)
    if world.rank == 0:
        record.write(incomplete)
        shutil.rmtree(previous, ignore_errors=True)
        if directory.exists():
            directory.rename(previous)
        incomplete.rename(directory)
        shutil.rmtree(previous, ignore_errors=True)
    dist.barrier(world.control)  # when save() returns, on any rank, the checkpoint is there


def load(directory: Path, trainee: Trainee, world: World, *, lr: float) -> None:
    """Fill a trainee from the checkpoint in ``directory``; ``lr`` holds from now on. Collective.

    Raises:
        ValueError: the model differs from the one saved.
    """
    reader = dcp.FileSystemReader(directory)
    name, group = trainee.parts.global_name, world.control
    state = state_dict_to_fill(
        reader.read_metadata(), trainee.module, trainee.optimizer, global_name=name, group=group
    )
    dcp.load(state, storage_reader=reader, process_group=group)
    load_state_dict(trainee.module, state, trainee.optimizer, global_name=name, group=group)
    for param_group in trainee.optimizer.param_groups:
        param_group["lr"] = lr
