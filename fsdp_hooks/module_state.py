"""``state_dict()`` and ``load_state_dict()`` of a sharded module itself, made right.

Their tensors would be DTensors, whose rows everybody takes for those of ``torch.chunk``
(``dcp.save`` would write them to the wrong places). So a module gives ``TensorShard``, which
``torch.distributed.checkpoint`` saves and fills, and takes those, whole tensors, or DTensors of its
own kind. ``checkpoint.py`` does more: optimizers, checks of names and shapes, whole tensors out.
"""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_hooks.checkpoint_shard import TensorShard, tensor_shard
from fsdp_hooks.param_group import ParamGroup


def hook_module_state(module: nn.Module, groups: Sequence[ParamGroup]) -> None:
    """Let a unit's module give and take its parameters as told above."""
    paths = {child: path for path, child in module.named_modules(remove_duplicate=False)}
    held = {
        f"{paths[owner]}.{attribute}".lstrip("."): _Held(group=group, index=index)
        for group in groups
        for index, slot in enumerate(group.slots)
        for owner, attribute in slot.owners
    }

    def within(state: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, _Held]]:
        for name, of_unit in held.items():
            if (key := f"{prefix}{name}") in state:
                yield key, of_unit

    # torch marks the hooks that it is given, which it cannot do with methods.
    def after_state_dict(
        module: nn.Module, state: MutableMapping[str, Any], prefix: str, metadata: object
    ) -> None:
        for key, of_unit in within(state, prefix):
            state[key] = of_unit.shard(state[key])

    def before_load(
        module: nn.Module, state: MutableMapping[str, Any], prefix: str, *rest: object
    ) -> None:
        for key, of_unit in within(state, prefix):
            state[key] = of_unit.sharded(state[key], key)

    module.register_state_dict_post_hook(after_state_dict)
    module.register_load_state_dict_pre_hook(before_load)


@dataclass(frozen=True, kw_only=True)
class _Held:
    """One parameter of the unit."""

    group: ParamGroup
    index: int

    def shard(self, value: object) -> object:
        """What ``state_dict()`` gives for it: this rank's rows."""
        if not isinstance(value, DTensor):
            return value
        return tensor_shard(
            value.to_local(),
            shape=value.shape,
            first_row=self.group.rows(self.index)[0],
            is_primary=self.group.is_primary,
        )

    def sharded(self, given: object, key: str) -> object:
        """What ``load_state_dict()`` was given for it, as a DTensor of its own kind.

        Raises:
            RuntimeError: shards of another layout.
        """
        first, last = self.group.rows(self.index)
        if not isinstance(given, Tensor) or isinstance(given, DTensor):
            return given
        if given.shape != self.group.sharded_params[self.index].shape:
            return given  # torch's own message says what is wrong
        if not isinstance(given, TensorShard):
            return self.group.as_sharded(self.index, given[first:last])
        if (given.first_row, given.local.shape[0]) != (first, last - first):
            raise RuntimeError(
                f"{key}: expected rows {first} to {last}, got those from {given.first_row} on; "
                "they are of a module that is sharded otherwise. Load whole tensors instead: "
                "fsdp_hooks.state_dict(module, full=True)"
            )
        return self.group.as_sharded(self.index, given.local)
