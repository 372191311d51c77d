"""State dicts of a sharded module and its optimizer, for any number of ranks and any strategy.

Sharded, each rank writing and reading its own rows::

    dcp.save(state_dict(model, optimizer), checkpoint_id=directory)

    reader = dcp.FileSystemReader(directory)
    state = state_dict_to_fill(reader.read_metadata(), model, optimizer)
    dcp.load(state, storage_reader=reader)
    load_state_dict(model, state, optimizer)

Whole, ordinary tensors on rank 0::

    state = state_dict(model, optimizer, full=True)
    load_state_dict(model, state, optimizer)

All functions are collective over ``group``. See docs/checkpoints.md.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fsdp_hooks.checkpoint_inventory import GlobalName, Inventory, unchanged
from fsdp_hooks.checkpoint_optimizer import NamedOptimizer, copy_rows, saved_names
from fsdp_hooks.checkpoint_ranks import (
    StateDict,
    agreed,
    everyone,
    gather_whole,
    spread_whole,
)

_MODEL: Final = "model."
_NAMES_SHOWN: Final = 4


def state_dict(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    full: bool = False,
    global_name: GlobalName = unchanged,
    group: ProcessGroup | None = None,
) -> StateDict:
    """The state of a sharded module, by name: ``{"model": ..., "optimizer": ...}``.

    Args:
        module: the outermost sharded module, between steps.
        optimizer: over its parameters.
        full: ordinary tensors on the CPU of rank 0, and ``{}`` on the others. Else each rank's own
            rows as ``TensorShard``, which are views: what ``dcp.save`` takes.
        global_name: makes names unique over expert-parallel ranks, where they are not.
        group: the ranks of the model; default: the world.

    Raises:
        ValueError: the module is not the outermost sharded one, the optimizer is over other
            parameters, or two ranks use one name for different parameters.
        RuntimeError: a step is under way.
    """
    inventory, named = _inventory(module, optimizer, global_name, group)
    state: StateDict = {"model": _model_state(inventory)}
    if named is not None:
        state["optimizer"] = named.state_dict()
    return gather_whole(state, group) if full else state


def state_dict_to_fill(
    metadata: Metadata,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
    global_name: GlobalName = unchanged,
    group: ProcessGroup | None = None,
) -> StateDict:
    """What ``dcp.load`` fills from a checkpoint with this metadata; then call ``load_state_dict``.

    The entries are views: ``dcp.load`` writes into the main weights and the optimizer's state,
    which is made here where the optimizer has none yet. What the checkpoint holds beside ``model``
    and ``optimizer`` is the caller's.

    Raises:
        ValueError: names are missing or unexpected and ``strict``, or shapes differ; on all ranks.
        RuntimeError: a step is under way.
    """
    inventory, named = _inventory(module, optimizer, global_name, group)
    forms = metadata.state_dict_metadata.items()
    shapes = {
        path.removeprefix(_MODEL): form.size if isinstance(form, TensorStorageMetadata) else None
        for path, form in forms
        if path.startswith(_MODEL)
    }
    hyper_names = frozenset(saved_names(metadata))
    _check(inventory, named, shapes, hyper_names, strict=strict, group=group)
    present = {name: value for name, value in _model_state(inventory).items() if name in shapes}
    state: StateDict = {"model": present}
    if named is not None:
        with agreed(group):  # a rank may lack the memory, and dcp.load waits for all
            state["optimizer"] = named.make_room(metadata)
    return state


@torch.no_grad()
def load_state_dict(
    module: nn.Module,
    state: StateDict,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
    global_name: GlobalName = unchanged,
    group: ProcessGroup | None = None,
) -> None:
    """Take over a state: one that ``dcp.load`` has filled, or a full one.

    The next forward computes with the new weights. Values are converted to the dtype that is there.

    Args:
        module: the outermost sharded module, between steps.
        state: as ``state_dict`` or ``state_dict_to_fill`` gave it. A full one may be given on all
            ranks, or on rank 0 alone with ``{}`` on the others.
        optimizer: takes state and hyperparameters; without it they are left alone.
        strict: False: load what fits by name. Shapes must fit all the same.
        global_name: as for ``state_dict``.
        group: the ranks of the model; default: the world.

    Raises:
        ValueError: names are missing or unexpected and ``strict``, or shapes differ; on all ranks,
            before anything has changed.
        RuntimeError: a step is under way.
    """
    inventory, named = _inventory(module, optimizer, global_name, group)
    state = spread_whole(state, group)
    weights: Mapping[str, Any] = state.get("model", {})
    state_of: Mapping[str, Any] = state.get("optimizer", {}).get("state", {})
    hyper: Mapping[str, Any] = state.get("optimizer", {}).get("param_groups", {})
    shapes = {n: value.shape if isinstance(value, Tensor) else None for n, value in weights.items()}
    _check(inventory, named, shapes, frozenset(hyper), strict=strict, group=group)
    if named is not None:
        with agreed(group):
            named.check_groups(hyper)
    for held in inventory.params:
        for name in held.names:
            if name in weights:
                copy_rows(weights[name], held.shard(held.param))
    others = {
        local_name: weights[name]
        for name, (local_name, _) in inventory.others.items()
        if name in weights
    }
    # Past any override in the sharded class: buffers and extra state, by torch's own rules.
    nn.Module.load_state_dict(module, others, strict=False)
    if named is not None:
        named.load(state_of, hyper)
    inventory.root.refresh_compute_weights()


def _inventory(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    global_name: GlobalName,
    group: ProcessGroup | None,
) -> tuple[Inventory, NamedOptimizer | None]:
    """The module and the optimizer by name. Collective, so that no rank is refused alone."""
    inventory = Inventory.of(module, global_name, group)
    with agreed(group):
        named = None if optimizer is None else NamedOptimizer(optimizer, inventory)
    return inventory, named


def _model_state(inventory: Inventory) -> StateDict:
    """Parameters, each under all its names; buffers and extra state."""
    state: StateDict = {}
    for held in inventory.params:
        state |= dict.fromkeys(held.names, held.shard(held.param))
    return state | {name: value for name, (_, value) in inventory.others.items()}


def _check(
    inventory: Inventory,
    named: NamedOptimizer | None,
    shapes: Mapping[str, torch.Size | None],
    hyper_names: frozenset[str],
    *,
    strict: bool,
    group: ProcessGroup | None,
) -> None:
    """Compare what is offered with what is here. Collective, so that no rank goes on alone."""
    problems = list(_unlike_shapes(inventory, shapes))
    if strict:
        missing = [held.names[0] for held in inventory.params if held.found_in(shapes) is None]
        missing += [name for name in inventory.others if name not in shapes]
        problems += _listed("missing", missing)
        problems += _listed("unexpected", sorted(shapes.keys() - inventory.every_name))
    if strict and named is not None:
        names = dict.fromkeys(hyper_names)
        missing = [held.names[0] for held in named.params if held.found_in(names) is None]
        problems += _listed("without optimizer state", missing)
        every_name = {n for held in named.params for n in held.names}
        every_name = frozenset().union(*everyone(every_name, group))
        extra = sorted(hyper_names - every_name)
        problems += _listed("not in this optimizer", extra)
    advice = "; strict=False loads what fits by name" if strict else ""
    with agreed(group):
        if problems:
            raise ValueError(f"the state does not fit the module: {'; '.join(problems)}{advice}")


def _unlike_shapes(inventory: Inventory, shapes: Mapping[str, torch.Size | None]) -> Iterable[str]:
    here = {name: held.param.shape for held in inventory.params for name in held.names}
    here |= {
        n: value.shape for n, (_, value) in inventory.others.items() if isinstance(value, Tensor)
    }
    unlike = [
        f"{name} {tuple(shape)}, expected {tuple(here[name])}"
        for name, shape in shapes.items()
        if shape is not None and name in here and shape != here[name]
    ]
    return _listed("shapes differ:", unlike)


def _listed(title: str, names: Iterable[str]) -> list[str]:
    """One line for all of them; none if there are none."""
    found = list(names)
    shown = ", ".join(found[:_NAMES_SHOWN])
    more = f" and {len(found) - _NAMES_SHOWN} more" if len(found) > _NAMES_SHOWN else ""
    return [f"{title} {shown}{more}"] if found else []
