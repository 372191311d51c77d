"""The names of a sharded module's tensors, and which rows of them this rank holds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, final

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fsdp_hooks.checkpoint_ranks import agreed, everyone
from fsdp_hooks.checkpoint_shard import TensorShard, tensor_shard
from fsdp_hooks.lifecycle import Driver, lifecycle_of
from fsdp_hooks.param_group import ParamGroup
from fsdp_hooks.root import FsdpRoot

GlobalName = Callable[[str], str]
"""A name in this rank's module -> the name in the whole model, unique over ranks."""


def unchanged(name: str) -> str:
    """The name, which is unique over ranks already."""
    return name


@final
@dataclass(frozen=True, kw_only=True)
class HeldParam:
    """One sharded parameter."""

    names: tuple[str, ...]
    """In the whole model; several if it is tied. Its optimizer state goes by the first."""
    param: DTensor
    group: ParamGroup
    index: int

    def shard(self, tensor: DTensor) -> TensorShard:
        """This rank's rows of the parameter, or of a tensor laid out like it."""
        first, last = self.group.rows(self.index)
        local = tensor.to_local().detach()
        assert local.shape[0] == last - first, "laid out like the parameter"
        return tensor_shard(
            local, shape=tensor.shape, first_row=first, is_primary=self.group.is_primary
        )

    def found_in(self, names: Mapping[str, Any]) -> str | None:
        """The first of its names that is there."""
        return next((name for name in self.names if name in names), None)


@final
@dataclass(frozen=True, kw_only=True)
class Inventory:
    """What a state dict of this rank's module is made of."""

    root: FsdpRoot
    params: tuple[HeldParam, ...]
    others: Mapping[str, tuple[str, Any]]
    """Persistent buffers and extra state: name in the whole model -> name here, and value."""
    every_name: frozenset[str]
    """Of the whole model, over all ranks."""

    @classmethod
    def of(cls, module: nn.Module, global_name: GlobalName, group: ProcessGroup | None) -> Self:
        """Take stock. Collective.

        Raises, on every rank:
            ValueError: the module is not the outermost sharded one; or two parameters of different
                ranks go by one name.
            RuntimeError: a step is under way.
        """
        with agreed(group):
            root = _root_at_rest(module)
            held, others = _holdings(module, root, global_name)
        every_name = _every_name(held, others, group)
        return cls(root=root, params=tuple(held), others=others, every_name=every_name)


def _holdings(
    module: nn.Module, root: FsdpRoot, global_name: GlobalName
) -> tuple[list[HeldParam], dict[str, tuple[str, Any]]]:
    """``Inventory.params`` and ``Inventory.others``."""
    places = {
        id(param): (params, index)
        for unit in root.units
        for params in unit.groups
        for index, param in enumerate(params.sharded_params)
    }
    names: dict[nn.Parameter, list[str]] = {}
    local_names: set[str] = set()
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(global_name(name))
        local_names.add(name)
    held: list[HeldParam] = []
    for param, aliases in names.items():
        assert isinstance(param, DTensor), f"{aliases[0]} belongs to no unit"
        params, index = places[id(param)]
        held.append(HeldParam(names=tuple(aliases), param=param, group=params, index=index))
    others = {
        global_name(name): (name, value)
        for name, value in nn.Module.state_dict(module, keep_vars=True).items()
        if name not in local_names
    }
    return held, others


def _root_at_rest(module: nn.Module) -> FsdpRoot:
    root = lifecycle_of(module)
    if not isinstance(root, FsdpRoot):
        raise ValueError(
            f"{type(module).__name__} is not sharded; expected the module that fully_shard was "
            "applied to last. An ordinary module has state_dict() of its own"
        )
    if root.root_unit.module is not module:
        raise ValueError(
            f"{type(module).__name__} is a unit of {type(root.root_unit.module).__name__}; "
            "expected the outermost sharded module, whose names a checkpoint goes by"
        )
    if root.context.driver is not Driver.REST:
        raise RuntimeError(
            f"a step is under way ({root.context.driver.value}); expected it at rest. Save and "
            "load after the step's last backward"
        )
    return root


def _every_name(
    held: list[HeldParam], others: Mapping[str, Any], group: ProcessGroup | None
) -> frozenset[str]:
    """All ranks' names. A name that two meshes use is two parameters: rows would mix silently."""
    mine: dict[str, tuple[int, ...]] = dict.fromkeys(others, ())
    for one in held:
        ranks = tuple(one.param.device_mesh.mesh.flatten().tolist())
        mine |= dict.fromkeys(one.names, ranks)
    seen: dict[str, tuple[int, ...]] = {}
    problem = None
    for of_rank in everyone(mine, group):
        for name, ranks in of_rank.items():
            if (before := seen.setdefault(name, ranks)) != ranks and problem is None:
                problem = (
                    f"{name} is one parameter on ranks {list(before)} and another on ranks "
                    f"{list(ranks)}; expected names unique over ranks. Pass global_name=, which "
                    "gives an expert its index in the whole model, or group=, the ranks of one "
                    "model"
                )
    if problem is not None:  # every rank found the same
        raise ValueError(problem)
    return frozenset(seen)
