"""An optimizer's part of a state dict: by parameter name, never by index.

Hyperparameters are kept for each parameter too. A rank's groups hold the parameters of its own
experts, so on other ranks their indices mean others; names do not. (The keys are those of PyTorch's
``get_optimizer_state_dict`` with ``flatten_optimizer_state_dict=True``.)
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from fsdp_hooks.checkpoint_inventory import HeldParam, Inventory
from fsdp_hooks.checkpoint_ranks import StateDict
from fsdp_hooks.checkpoint_shard import TensorShard

Entries = Mapping[str, Mapping[str, Any]]
"""Parameter name -> what is kept of it, by name."""

_STATE: Final = "optimizer.state."
_PARAM_GROUPS: Final = "optimizer.param_groups."


@final
class NamedOptimizer:
    """An optimizer whose parameters are known by name.

    Raises:
        ValueError: it has a parameter that is not one of the module's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, inventory: Inventory) -> None:
        self._optimizer = optimizer
        by_param = {id(held.param): held for held in inventory.params}
        self._groups: list[tuple[dict[str, Any], list[HeldParam]]] = []
        for group in optimizer.param_groups:
            strangers = [param for param in group["params"] if id(param) not in by_param]
            if strangers:
                raise ValueError(
                    f"the optimizer has a parameter of shape {tuple(strangers[0].shape)} that is "
                    "not the module's; expected one built over the sharded module's parameters()"
                )
            self._groups.append((group, [by_param[id(param)] for param in group["params"]]))

    @property
    def params(self) -> list[HeldParam]:
        """All that it updates."""
        return [held for _, members in self._groups for held in members]

    def state_dict(self) -> StateDict:
        """State as it is in memory, and hyperparameters."""
        state: dict[str, dict[str, Any]] = {}
        for held in self.params:
            entries: Mapping[str, Any] = self._optimizer.state.get(held.param, {})
            if entries:
                state[held.names[0]] = {
                    key: held.shard(value) if isinstance(value, DTensor) else value
                    for key, value in entries.items()
                }
        hyper = {
            held.names[0]: {key: value for key, value in group.items() if key != "params"}
            for group, members in self._groups
            for held in members
        }
        return {"state": state, "param_groups": hyper}

    def make_room(self, metadata: Metadata) -> StateDict:
        """Allocate the state that a checkpoint has; the state dict to read it into, in place."""
        saved_state = _entries_of(metadata, _STATE)
        saved_hyper = _entries_of(metadata, _PARAM_GROUPS)
        state: dict[str, dict[str, Any]] = {}
        hyper: dict[str, dict[str, Any]] = {}
        for group, members in self._groups:
            for held in members:
                if (name := held.found_in(saved_hyper)) is not None:
                    hyper[name] = {key: _room(form) for key, form in saved_hyper[name].items()}
                if (name := held.found_in(saved_state)) is None:
                    self._optimizer.state.pop(held.param, None)
                    continue
                entries = {
                    key: self._room_for(held, key, form, group)
                    for key, form in saved_state[name].items()
                }
                self._optimizer.state[held.param] = entries
                state[name] = {
                    key: held.shard(value) if isinstance(value, DTensor) else value
                    for key, value in entries.items()
                }
        return {"state": state, "param_groups": hyper}

    def check_groups(self, hyper: Entries) -> None:
        """Refuse hyperparameters that differ within a group.

        Raises:
            ValueError: they do.
        """
        for _, members in self._groups:
            first: tuple[str, Mapping[str, Any]] | None = None
            for held in members:
                if (name := held.found_in(hyper)) is None:
                    continue
                first = first or (name, hyper[name])
                for key, value in hyper[name].items():
                    before = first[1].get(key, value)
                    if not _equal(before, value):
                        raise ValueError(
                            f"{first[0]} was saved with {key} {before!r} and {name} with "
                            f"{value!r}, and both are in one parameter group; expected parameter "
                            "groups like those that were saved"
                        )

    def load(self, state: Entries, hyper: Entries) -> None:
        """Take state and hyperparameters; a parameter that was saved without state has none."""
        for group, members in self._groups:
            for held in members:
                if (name := held.found_in(hyper)) is not None:
                    group.update(hyper[name])
            for held in members:
                if (name := held.found_in(state)) is None:
                    self._optimizer.state.pop(held.param, None)
                    continue
                self._optimizer.state[held.param] = {
                    key: self._loaded(held, key, value, group) for key, value in state[name].items()
                }

    def _loaded(self, held: HeldParam, key: str, value: Any, group: Mapping[str, Any]) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.shape != held.param.shape:
            return value.detach().to(_scalar_device(held, group), copy=True)
        room = self._sharded_room(held, key, value.dtype)
        copy_rows(value, held.shard(room))
        return room

    def _room_for(self, held: HeldParam, key: str, form: Any, group: Mapping[str, Any]) -> Any:
        if isinstance(form, TensorStorageMetadata) and form.size == held.param.shape:
            return self._sharded_room(held, key, form.properties.dtype)
        return _room(form, device=_scalar_device(held, group))

    def _sharded_room(self, held: HeldParam, key: str, dtype: torch.dtype) -> DTensor:
        """The state that is there, if it is of this kind; else a new one."""
        present = self._optimizer.state.get(held.param, {}).get(key)
        if isinstance(present, DTensor) and present.dtype is dtype:
            return present
        made = torch.zeros_like(held.param, dtype=dtype, memory_format=torch.preserve_format)
        assert isinstance(made, DTensor), "laid out like the parameter"
        return made


def copy_rows(value: Tensor, into: TensorShard) -> None:
    """Copy a whole tensor's rows, or those of a shard unless it is the same memory."""
    if not isinstance(value, TensorShard):
        into.copy_rows_of(value)
    elif value.local.data_ptr() != into.local.data_ptr():
        into.local.copy_(value.local)


def _entries_of(metadata: Metadata, prefix: str) -> dict[str, dict[str, Any]]:
    """The forms of what a checkpoint holds below ``prefix``, by parameter name and entry."""
    found: dict[str, dict[str, Any]] = {}
    for path, form in metadata.state_dict_metadata.items():
        if path.startswith(prefix):
            name, _, key = path.removeprefix(prefix).rpartition(".")
            found.setdefault(name, {})[key] = form
    return found


def saved_names(metadata: Metadata) -> Iterable[str]:
    """Names of the parameters whose hyperparameters a checkpoint holds."""
    return _entries_of(metadata, _PARAM_GROUPS)


def _room(form: Any, *, device: torch.device | None = None) -> Tensor | None:
    """Memory for a tensor; None where DCP puts an object."""
    if isinstance(form, TensorStorageMetadata):
        return torch.zeros(form.size, dtype=form.properties.dtype, device=device)
    return None


def _scalar_device(held: HeldParam, group: Mapping[str, Any]) -> torch.device:
    """Where torch's optimizers keep ``step`` and the like."""
    on_device = group.get("capturable") or group.get("fused")
    return held.param.device if on_device else torch.device("cpu")


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one.cpu(), other.cpu())
    return bool(one == other)
