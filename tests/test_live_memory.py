"""What stays alive: whole gradients while reductions lag behind, and everything over many steps."""

import gc
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final
from weakref import finalize

import pytest
import torch
import torch.distributed as dist
from models_support import random_tokens
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ep_overlap.config import OverlapConfig
from ep_overlap.links.group import LinkSpeed, new_link_group
from ep_overlap.models.groups import new_expert_groups
from ep_overlap.models.reference import Batch, MoETransformer, ReferenceConfig, cross_entropy
from ep_overlap.schedule import OverlapSchedule
from ep_overlap.testing import RankPool
from fsdp_hooks.accumulation import microbatch
from fsdp_hooks.collectives import new_torch_group
from fsdp_hooks.context import Runtime
from fsdp_hooks.gradients import Gradients
from fsdp_hooks.lifecycle import lifecycle_of
from fsdp_hooks.optimizer import shard_optimizer
from fsdp_hooks.root import FsdpRoot
from fsdp_hooks.shard import fully_shard
from fsdp_hooks.streams import StreamKind

SEQ_LENGTH: Final = 4
SLOW: Final = LinkSpeed(bytes_per_s=1e9, latency_s=0.02)
"""Of each reduce-scatter: longer than a layer's backward, which takes some milliseconds."""


# ---- models --------------------------------------------------------------------------------------


def tiny(num_layers: int) -> MoETransformer:
    config = ReferenceConfig(
        num_layers=num_layers,
        hidden_size=8,
        num_heads=1,
        ffn_hidden_size=8,
        num_experts=2,
        topk=1,
        seq_length=SEQ_LENGTH,
        vocab_size=256,
    )
    return MoETransformer(config, new_expert_groups(1), seed=1)


def slow_to_reduce(ranks: Sequence[int], name: str) -> ProcessGroup:
    """A ``NewGroup`` whose reductions lag behind the backward that feeds them."""
    if name.startswith("reduce"):
        return new_link_group(ranks, name=name, speed=SLOW)
    return new_torch_group(ranks, name)


def shard(model: MoETransformer, runtime: Runtime, *, reduce_each: bool | None = None) -> FsdpRoot:
    """Over all ranks, with a mesh for dense parameters and one for experts: two groups a layer."""
    ranks = list(range(dist.get_world_size()))
    dense, expert = (
        DeviceMesh("cpu", ranks, mesh_dim_names=(name,)) for name in ("dense", "expert")
    )
    experts = frozenset(model.expert_parameters())

    def mesh_of(name: str, param: nn.Parameter) -> DeviceMesh:
        return expert if param in experts else dense

    for layer in model.layers:
        fully_shard(layer, mesh=mesh_of)
    fully_shard(model, mesh=mesh_of, reduce_each_microbatch=reduce_each, runtime=runtime)
    root = lifecycle_of(model)
    assert isinstance(root, FsdpRoot)
    return root


def batches(step: int, count: int) -> list[Batch]:
    pairs = [random_tokens(100 * step + index, 1, SEQ_LENGTH) for index in range(count)]
    return [Batch(tokens=tokens, targets=targets) for tokens, targets in pairs]


@final
class Trainer:
    """Steps of a model, under a schedule or (``order`` is None) on the standard path."""

    def __init__(
        self, model: MoETransformer, *, order: str | None, num_microbatches: int, kind: StreamKind
    ) -> None:
        self._model = model
        self._count = num_microbatches
        self._optimizer = shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        self._schedule = None
        if order is not None:
            config = OverlapConfig(num_microbatches=num_microbatches, order=order)
            self._schedule = OverlapSchedule(model, config, stream_kind=kind)

    def step(self, number: int) -> None:
        inputs = batches(number, self._count)
        if self._schedule is not None:
            self._schedule.step(inputs, cross_entropy)
        else:
            for index, batch in enumerate(inputs):
                with microbatch(self._model, is_last=index == len(inputs) - 1):
                    (cross_entropy(self._model(batch), batch) / len(inputs)).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


# ---- whole gradients -----------------------------------------------------------------------------


@final
class LiveGradients:
    """Counts what is alive of the whole gradients of some groups, from autograd's contribution to
    the end of its reduction: contributions, and the flat inputs that they are packed into."""

    def __init__(self, groups: Sequence[Gradients]) -> None:
        self._lock = threading.RLock()  # reentrant: a finalizer may run within
        self._bytes = 0
        self._packed = 0
        self.peak_bytes = 0
        self.peak_packed = 0
        for gradients in groups:
            self._follow(gradients)

    def _follow(self, gradients: Gradients) -> None:
        accumulate, pack = gradients.accumulate, gradients._pack

        def accumulate_counted(index: int, microbatch: int, grad: Tensor) -> None:
            self._born(grad, packed=0)
            accumulate(index, microbatch, grad)

        def pack_counted(grads: Sequence[Tensor | None]) -> Tensor:
            whole = pack(grads)
            self._born(whole, packed=1)
            return whole

        gradients.accumulate = accumulate_counted
        gradients._pack = pack_counted

    def _born(self, tensor: Tensor, *, packed: int) -> None:
        nbytes = tensor.untyped_storage().nbytes()
        finalize(tensor, self._add, -nbytes, -packed)
        self._add(nbytes, packed)

    def _add(self, nbytes: int, packed: int) -> None:
        with self._lock:
            self._bytes += nbytes
            self._packed += packed
            self.peak_bytes = max(self.peak_bytes, self._bytes)
            self.peak_packed = max(self.peak_packed, self._packed)

    @property
    def is_clear(self) -> bool:
        """Whether nothing is alive any more."""
        return self._bytes == 0 and self._packed == 0


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The most that was alive at once on one mesh."""

    sets: float
    """Bytes over those of one layer's whole gradients."""
    packed: int
    """Inputs of a reduce-scatter."""


def live_sets(
    num_layers: int, order: str | None, *, reduce_each: bool = True
) -> tuple[Peak, Peak, float]:
    """Peaks of the layers on the dense and the expert mesh, and sets of the root's gradients."""
    model = tiny(num_layers)
    runtime = Runtime(new_group=slow_to_reduce if reduce_each else new_torch_group)
    root = shard(model, runtime, reduce_each=reduce_each)
    trainer = Trainer(model, order=order, num_microbatches=3, kind=StreamKind.THREAD)
    by_mesh = [[unit.groups[place] for unit in root.inner_units] for place in (0, 1)]
    assert by_mesh[0][0].mesh.device_mesh.mesh_dim_names == ("dense",)
    assert by_mesh[1][0].mesh.device_mesh.mesh_dim_names == ("expert",)
    by_mesh.append(list(root.root_unit.groups))
    live = [LiveGradients([group.gradients for group in groups]) for groups in by_mesh]
    sizes = [groups[0].layout.numel * 4 for groups in by_mesh]
    trainer.step(0)
    assert all(count.is_clear for count in live)
    dense, expert, own = (
        Peak(sets=count.peak_bytes / size, packed=count.peak_packed)
        for count, size in zip(live, sizes, strict=True)
    )
    return dense, expert, own.sets
