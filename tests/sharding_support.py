"""What the tests of the sharding core share: small float64 models, whole tensors, recordings."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ep_overlap.testing import Recording, record
from fsdp_hooks.collectives import NewGroup, new_torch_group
from fsdp_hooks.context import Runtime
from fsdp_hooks.lifecycle import ShardedModule, ShardingStats, lifecycle_of
from fsdp_hooks.root import FsdpRoot
from fsdp_hooks.shard import fully_shard
from fsdp_hooks.streams import Span, StreamKind

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
WIDTH = 5
VOCAB = 7

Grads = dict[str, Tensor | None]
"""Whole gradients (or weights) by name; None where there is none."""


def double[ModuleT: nn.Module](make: Callable[[], ModuleT], seed: int = 0) -> ModuleT:
    """Build in float64 from a seed."""
    torch.manual_seed(seed)
    return make().double()


class Block(nn.Module):
    """Uneven shapes; ``gain`` has one row, fewer than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 7)
        self.gain = nn.Parameter(torch.ones(1, WIDTH))
        self.down = nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * self.gain


class Stack(nn.Module):
    """Embedding and head are the root's own; blocks are run in ``order``."""

    def __init__(self, num_blocks: int = 3, order: Sequence[int] | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.order = list(range(num_blocks) if order is None else order)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index in self.order:
            x = self.blocks[index](x)
        return self.head(x)


def world_mesh() -> DeviceMesh:
    return DeviceMesh("cpu", list(range(dist.get_world_size())))


class SharedGroups:
    """Makes each lane's group once: models that are used one after another can share them, and
    connecting ranks is what takes time here."""

    def __init__(self) -> None:
        self._made: dict[str, ProcessGroup] = {}

    def __call__(self, ranks: Sequence[int], name: str) -> ProcessGroup:
        if name not in self._made:
            self._made[name] = new_torch_group(ranks, name)
        return self._made[name]


def shard_stack(
    model: Stack,
    *,
    mesh: DeviceMesh | None = None,
    strategy: str = "optim_grads_params",
    kind: StreamKind | None = None,
    groups: NewGroup = new_torch_group,
) -> FsdpRoot:
    """Each block a unit, and the root. Returns the root."""
    mesh = mesh or world_mesh()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, strategy=strategy)
    fully_shard(
        model, mesh=mesh, strategy=strategy, runtime=Runtime(stream_kind=kind, new_group=groups)
    )
    return root_of(model)


def root_of(model: nn.Module) -> FsdpRoot:
    root = lifecycle_of(model)
    assert isinstance(root, FsdpRoot)
    return root


def wholes(tensors: Mapping[str, Tensor | None]) -> Grads:
    """Sharded tensors, put together from every rank's rows. Collective; None stays None."""
    result = dict(tensors)
    sharded = {name: t for name, t in tensors.items() if isinstance(t, DTensor)}
    for mesh in dict.fromkeys(tensor.device_mesh for tensor in sharded.values()):
        mine = {name: t.to_local().detach() for name, t in sharded.items() if t.device_mesh == mesh}
        group = mesh.get_group()
        parts: list[dict[str, Tensor]] = [{}] * dist.get_world_size(group)
        dist.all_gather_object(parts, mine, group=group)
        for name in mine:
            is_replicated = sharded[name].placements[0].is_replicate()
            rows = [part[name] for part in parts]
            result[name] = rows[0] if is_replicated else torch.cat(rows)
    return result


def whole_grads(model: nn.Module) -> Grads:
    return wholes({name: param.grad for name, param in model.named_parameters()})


def whole_weights(model: nn.Module) -> Grads:
    return wholes({name: param.detach() for name, param in model.named_parameters()})


def worst_error(got: Grads, expected: Grads) -> float:
    """Largest difference, relative to the tensor's largest entry; infinite if one is missing."""
    assert got.keys() == expected.keys()
    worst = 0.0
    for name, ours in got.items():
        theirs = expected[name]
        if ours is None or theirs is None:
            worst = max(worst, 0.0 if ours is theirs else float("inf"))
        else:
            assert ours.shape == theirs.shape, name
            scale = theirs.abs().max().clamp_min(1e-30)
            worst = max(worst, float((ours - theirs).abs().max() / scale))
    return worst


def tokens_of(rank: int, seed: int = 0) -> Tensor:
    """int64 ``[4, 3]``."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randint(0, VOCAB, (4, 3), generator=generator)


def token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def clean(root: FsdpRoot) -> bool:
    """Between steps nothing unsharded is alive."""
    stats: ShardingStats = root.stats
    released = all(
        not group.weights.whole.is_allocated
        for unit in root.units
        for group in unit.groups
        if group.releases
    )
    return released and stats.unsharded_bytes == 0


class Words:
    """A ``StreamObserver`` that records every piece of work as it is issued."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def on_issue(self, lane: str, word: str) -> None:
        self._recording.add(word, lane)

    def on_span(self, span: Span) -> None:
        return None


@contextmanager
def issued(root: FsdpRoot) -> Iterator[Recording]:
    """Record what is issued, and the forwards and backwards of the units between."""
    handles: list[torch.utils.hooks.RemovableHandle] = []
    with record() as recording:
        for unit in root.inner_units:
            word = unit.name.removeprefix("blocks.")

            def forward(_: nn.Module, __: object, word: str = word) -> None:
                recording.add(f"F{word}", "comp")

            # Within the unit: a hook on its output might run before its own.
            def backward(_: nn.Module, __: object, out: Tensor, word: str = word) -> None:
                out.register_hook(lambda _: recording.add(f"B{word}", "comp"))

            handles.append(unit.module.register_forward_pre_hook(forward))
            handles.append(unit.module.get_submodule("down").register_forward_hook(backward))
        root.observe(Words(recording))
        yield recording
        root.observe(None)
    for handle in handles:
        handle.remove()


def own_rows(tensor: Tensor | None) -> Tensor:
    """This rank's part of a sharded tensor."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach()


def equal(ours: Grads, theirs: Grads) -> bool:
    """Bitwise."""
    assert ours.keys() == theirs.keys()
    return all(
        a is b if a is None or b is None else torch.equal(a, b)
        for a, b in ((ours[name], theirs[name]) for name in ours)
    )


def input_of(rank: int, seed: int = 0) -> Tensor:
    """float64 ``[3, WIDTH]``."""
    generator = torch.Generator().manual_seed(1000 * seed + rank + 1)
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=generator)


def uses_of(model: nn.Module) -> list[Any]:
    """What the hooks know of each unit."""
    assert isinstance(model, ShardedModule)
    return list(model.fsdp_membership.hooks._uses.values())
