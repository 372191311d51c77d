"""The entry point: ``fully_shard(module)``, applied bottom-up, like FSDP2's.

::

    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)           # the root: what no inner unit owns
    optimizer = shard_optimizer(torch.optim.AdamW(model.parameters()))
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast, final, override

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_hooks.context import Runtime, ShardContext
from fsdp_hooks.hooks import ModuleHooks
from fsdp_hooks.lifecycle import ShardedModule
from fsdp_hooks.materialize import InitFn, materialize, reset_parameters
from fsdp_hooks.mesh import GroupMesh
from fsdp_hooks.module_state import hook_module_state
from fsdp_hooks.param_group import ParamGroup, ParamSlot
from fsdp_hooks.placeholder import Relinquished
from fsdp_hooks.placement import Placement, outer_placement_of, placements_of
from fsdp_hooks.precision import MixedPrecision, dtypes_of
from fsdp_hooks.root import FsdpRoot
from fsdp_hooks.unit import FsdpUnit
from fsdp_hooks.wgrad import ManagedLayer

MeshOf = Callable[[str, nn.Parameter], DeviceMesh]
"""Parameter name (from the sharded module) and parameter -> its mesh: dense or expert."""


_GroupKey = tuple[DeviceMesh, torch.dtype, torch.device, bool]


@dataclass(frozen=True, kw_only=True)
class _Recipe:
    """What ``fully_shard`` was asked for, until the root puts the pieces together."""

    strategy: str
    groups: tuple[ParamGroup, ...]
    grad_divisor: int | None
    reduce_each_microbatch: bool | None
    runtime: Runtime | None


@final
@dataclass(kw_only=True)
class _Membership:
    """A sharded module's recipe, and the root that it turned out to belong to."""

    recipe: _Recipe
    root: FsdpRoot | None = None
    hooks: ModuleHooks | None = None


class _Sharded(ShardedModule):
    """Mixed into the class of a sharded module."""

    fsdp_membership: _Membership

    @property
    def lifecycle(self) -> FsdpRoot:
        if self.fsdp_membership.root is None:
            _build_root(self)
        assert self.fsdp_membership.root is not None
        return self.fsdp_membership.root

    @override
    def __call__(self, *args: object, **kwargs: object) -> object:
        if self.fsdp_membership.hooks is None:  # first use: whoever is called first is the root
            _build_root(self)
        hooks = self.fsdp_membership.hooks
        assert hooks is not None
        depth = hooks.depth
        try:
            return super().__call__(*args, **kwargs)
        except BaseException:
            hooks.unwind(depth)
            raise

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        # Between a forward and its backward the module does not hold the sharded parameters.
        for member in self.modules():
            if isinstance(member, _Sharded):
                for group in member.fsdp_membership.recipe.groups:
                    group.zero_grad(set_to_none=set_to_none)


def fully_shard[ModuleT: nn.Module](
    module: ModuleT,
    *,
    mesh: DeviceMesh | MeshOf,
    strategy: str = "optim_grads_params",
    outer_strategy: str = "no_shard",
    mp: MixedPrecision | None = None,
    grad_divisor: int | None = None,
    reduce_each_microbatch: bool | None = None,
    init_fn: InitFn = reset_parameters,
    runtime: Runtime | None = None,
) -> ModuleT:
    """Make ``module`` a unit: its parameters, less those of inner units, are sharded together.

    The module is changed in place: its class becomes a subclass of its own class and of
    ``ShardedModule``, and its parameters become DTensors with the original names and global
    shapes. Build optimizers afterwards.

    Args:
        module: applied bottom-up; the last call, on the outermost module, makes the root.
        mesh: data-parallel ranks, or a function of name and parameter for models whose experts live
            on another mesh than the rest. Of two dimensions for hybrid sharding: replicas, shards.
        strategy: Megatron's ``--data-parallel-sharding-strategy``, over the inner ranks.
        outer_strategy: what the outer ranks of a two-dimensional mesh share out: nothing, or the
            main weights with their optimizer states (``optim``).
        mp: dtypes; None: everything in the parameters' own.
        grad_divisor: gradients are summed over ranks and divided by this; default: the size of
            the root's largest mesh, which is right for dense and expert gradients alike (experts
            see the tokens of all expert-parallel ranks). For the root only.
        reduce_each_microbatch: reduce gradients after every microbatch, or once a step (whole
            gradients are kept meanwhile); default: by strategy, see ``placement.py``. For the root
            only.
        init_fn: fills the parameters of a module that is on ``meta``; it is called for each module
            that has some of its own, unit by unit, so no more than a unit is ever whole. Seed it
            the same on the ranks of a mesh.
        runtime: streams, process groups, prefetch; for the root only.

    Raises:
        ValueError: a strategy is unknown, or has nothing to share out, a module is sharded twice,
            the mesh is none, has more than two dimensions, or one where ``outer_strategy`` asks for
            two, or a parameter cannot be sharded: a scalar, on another device than its mesh, shared
            with another unit, sharing memory with another tensor of the module.
    """
    placements = placements_of(strategy)
    outer = outer_placement_of(outer_strategy)
    if strategy == "no_shard" and outer is Placement.SHARD:
        raise ValueError(
            f"outer_strategy {outer_strategy!r} with strategy 'no_shard' shares main weights over "
            "outer ranks alone; use strategy 'optim' on a mesh of one dimension, over those ranks"
        )
    _check_reduction(grad_divisor, reduce_each_microbatch)
    _check_module(module)
    mesh_of = _mesh_function(mesh)
    own = (child for _, child in _outside_of_units(module, ""))
    materialize(own, _device_type(module, mesh), init_fn)
    groups = [
        ParamGroup(
            members,
            unit_name=_title(module),
            mesh=_checked_mesh(group_mesh, outer_strategy),
            placements=placements,
            outer=outer,
            dtypes=dtypes_of(dtype, mp),
        )
        for (group_mesh, dtype, *_), members in _grouped(_own_parameters(module), mesh_of).items()
    ]
    for group in groups:
        group.install(group.sharded_params)
        group.relinquish(_title(module))
    hook_module_state(module, groups)
    cls = type(module)
    sharded = type(f"Sharded{cls.__name__}", (_Sharded, cls), {})
    module.__class__ = cast("type[ModuleT]", sharded)
    recipe = _Recipe(
        strategy=strategy,
        groups=tuple(groups),
        grad_divisor=grad_divisor,
        reduce_each_microbatch=reduce_each_microbatch,
        runtime=runtime,
    )
    cast(_Sharded, module).fsdp_membership = _Membership(recipe=recipe)
    return module


def _check_reduction(grad_divisor: object, reduce_each_microbatch: object) -> None:
    """Neither would be noticed later: gradients would only be others."""
    if grad_divisor is not None and (type(grad_divisor) is not int or grad_divisor < 1):
        raise ValueError(f"grad_divisor is {grad_divisor!r}; expected a whole number of at least 1")
    if not isinstance(reduce_each_microbatch, bool | None):
        raise ValueError(
            f"reduce_each_microbatch is {reduce_each_microbatch!r}; expected True, False or None"
        )


def _mesh_function(mesh: DeviceMesh | MeshOf) -> MeshOf:
    if isinstance(mesh, DeviceMesh):
        return lambda name, param: mesh
    if not callable(cast(object, mesh)):
        raise ValueError(
            f"mesh is {mesh!r}; expected a DeviceMesh, such as init_device_mesh('cpu', (2,)), or "
            "a function of name and parameter that returns one"
        )
    return mesh


def _check_module(module: nn.Module) -> None:
    if isinstance(module, ShardedModule):
        raise ValueError(f"{_title(module)} is sharded already; call fully_shard once a module")
    if any(isinstance(m, ManagedLayer) and m.wgrad is not None for m in module.modules()):
        raise ValueError(
            f"weight gradients of {_title(module)} are managed already, and would go past its "
            "reductions; expected manage_wgrad after fully_shard. Call it last, on the whole model"
        )


def _own_parameters(module: nn.Module) -> list[ParamSlot]:
    """Parameters that no inner unit owns, each with all its holders, in registration order."""
    holders: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    names: dict[nn.Parameter, str] = {}
    for prefix, child in _outside_of_units(module, ""):
        for attribute, param in child.named_parameters(recurse=False, remove_duplicate=False):
            holders.setdefault(param, []).append((child, attribute))
            names.setdefault(param, f"{prefix}{attribute}")
    for param, name in names.items():
        _check_parameter(param, f"parameter {name} of {_title(module)}")
    _check_memory(names, list(module.modules()))
    return [
        ParamSlot(name=names[param], param=param, owners=tuple(owners))
        for param, owners in holders.items()
    ]


def _check_parameter(param: Tensor, title: str) -> None:
    if isinstance(param, Relinquished):
        raise ValueError(
            f"{title} is shared with unit {param.unit_name}, as its {param.parameter_name}; "
            "expected both uses in one unit. Apply fully_shard to a module that contains both, "
            "and not to either alone"
        )
    if isinstance(param, DTensor):
        raise ValueError(
            f"{title} is a DTensor: sharded already, with a module around it or one that shares "
            "it; expected a plain parameter. Call fully_shard on inner modules first, and share "
            "parameters within one unit only"
        )
    if param.dim() == 0:
        raise ValueError(
            f"{title} is a scalar; expected at least one dimension. Make it a vector of one element"
        )


def _check_memory(names: Mapping[nn.Parameter, str], modules: Sequence[nn.Module]) -> None:
    """Sharding moves parameters to storage of its own; views of the old one would go stale."""
    spans = sorted(
        (param.data_ptr(), param.data_ptr() + param.numel() * param.element_size(), name)
        for param, name in names.items()
        if param.numel() > 0 and param.is_contiguous()
    )
    for (_, stop, name), (start, _, other) in pairwise(spans):
        if start < stop:
            raise ValueError(
                f"parameters {name} and {other} overlap in memory; expected separate ones. Make "
                "one the parameter, and take views of it in forward()"
            )
    homes = {p.untyped_storage().data_ptr(): name for p, name in names.items() if p.numel() > 0}
    for module in modules:
        for attribute, value in (*vars(module).items(), *module.named_buffers(recurse=False)):
            held = value if isinstance(value, list | tuple) else (value,)
            for tensor in held:
                if type(tensor) is not Tensor or tensor.numel() == 0:
                    continue
                if (name := homes.get(tensor.untyped_storage().data_ptr())) is not None:
                    raise ValueError(
                        f"{_title(module)}.{attribute} shares memory with parameter {name}, which "
                        "moves when it is sharded; expected no views kept beside a parameter. "
                        "Take views of it in forward()"
                    )


def _device_type(module: nn.Module, mesh: DeviceMesh | MeshOf) -> str:
    """Where a unit's tensors go if they are on meta; buffers may come without parameters."""
    if isinstance(mesh, DeviceMesh):
        return mesh.device_type
    for prefix, child in _outside_of_units(module, ""):
        for name, param in child.named_parameters(recurse=False):
            return mesh(f"{prefix}{name}", param).device_type
    inner = (child for child in module.modules() if isinstance(child, _Sharded))
    groups = (group for child in inner for group in child.fsdp_membership.recipe.groups)
    return next((group.mesh.device_mesh.device_type for group in groups), "cpu")


def _outside_of_units(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    found = [(prefix, module)]
    for name, child in module.named_children():
        if not isinstance(child, ShardedModule):
            found += _outside_of_units(child, f"{prefix}{name}.")
    return found


def _grouped(slots: Sequence[ParamSlot], mesh_of: MeshOf) -> dict[_GroupKey, list[ParamSlot]]:
    groups: dict[_GroupKey, list[ParamSlot]] = {}
    for slot in slots:
        param = slot.param
        mesh = mesh_of(slot.name, param)
        if param.device.type != mesh.device_type:
            # DTensor would copy the rows to the mesh's device: an optimizer would train the copy.
            raise ValueError(
                f"parameter {slot.name} is on {param.device.type} and its mesh on "
                f"{mesh.device_type}; expected one kind of device. Move the module first: "
                f"module.to({mesh.device_type!r})"
            )
        key = (mesh, param.dtype, param.device, param.requires_grad)
        groups.setdefault(key, []).append(slot)
    return groups


def _checked_mesh(mesh: DeviceMesh, outer_strategy: str) -> GroupMesh:
    if mesh.ndim == 1 and outer_strategy != "no_shard":
        raise ValueError(
            f"outer_strategy {outer_strategy!r} has no outer ranks on a mesh of one dimension; "
            "expected two dimensions (replicas, shards). Leave outer_strategy out"
        )
    return GroupMesh(mesh)


def _title(module: nn.Module) -> str:
    return type(module).__name__


def _build_root(module: _Sharded) -> None:
    """Join all units below ``module`` under one context."""
    members = [m for m in module.modules() if isinstance(m, _Sharded)]
    for member in members:
        if member.fsdp_membership.root is not None:
            raise ValueError(
                f"{_title(member)} already belongs to another root; call fully_shard on the "
                "outermost module, and use that module first"
            )
    recipe = module.fsdp_membership.recipe
    for member in members:
        if (own := member.fsdp_membership.recipe.strategy) != recipe.strategy:
            raise ValueError(
                f"{_title(member)} is sharded with strategy {own!r}, {_title(module)} around it "
                f"with {recipe.strategy!r}; use one strategy for all units"
            )
        if member is not module:
            _check_inner_recipe(member)
    groups = [group for member in members for group in member.fsdp_membership.recipe.groups]
    if not groups:
        raise ValueError(f"{_title(module)} has no parameters to shard")
    context = ShardContext(
        meshes=[group.mesh for group in groups],
        device=groups[0].compute_params[0].device,
        grad_divisor=recipe.grad_divisor or max(g.mesh.device_mesh.size() for g in groups),
        reduces_each_microbatch=_reduces_each_microbatch(recipe),
        runtime=recipe.runtime or Runtime(),
    )
    names = {m: name for name, m in module.named_modules()}
    units = [
        FsdpUnit(
            name="root" if member is module else names[member],
            module=member,
            groups=member.fsdp_membership.recipe.groups,
            context=context,
        )
        for member in members
    ]
    root = FsdpRoot(strategy=recipe.strategy, units=units[1:], root_unit=units[0], context=context)
    hooks = ModuleHooks(root)
    for member in members:
        member.fsdp_membership.root = root
        member.fsdp_membership.hooks = hooks


def _reduces_each_microbatch(recipe: _Recipe) -> bool:
    if recipe.reduce_each_microbatch is not None:
        return recipe.reduce_each_microbatch
    # By Megatron's custom: with whole gradients on every rank, once a step is enough.
    return placements_of(recipe.strategy).grad is Placement.SHARD


def _check_inner_recipe(member: _Sharded) -> None:
    """What is the root's to say must not be said, and ignored, elsewhere."""
    recipe = member.fsdp_membership.recipe
    for name, value in (
        ("grad_divisor", recipe.grad_divisor),
        ("reduce_each_microbatch", recipe.reduce_each_microbatch),
        ("runtime", recipe.runtime),
    ):
        if value is not None:
            raise ValueError(
                f"fully_shard of {_title(member)} was given {name}, but a module around it is the "
                f"root; expected {name} at the root. Give it to the outermost fully_shard only"
            )
