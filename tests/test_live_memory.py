"""What stays alive: whole gradients while reductions lag behind, and everything over many steps."""

import gc
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final
from weakref import finalize, ref

import pytest
import schedule_support as support
import torch
import torch.distributed as dist
from models_support import random_tokens
from schedule_support import Case
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ep_overlap.config import OverlapConfig
from ep_overlap.links.group import LinkSpeed, new_link_group
from ep_overlap.models.groups import new_expert_groups
from ep_overlap.models.reference import Batch, MoETransformer, ReferenceConfig, cross_entropy
from ep_overlap.run.node import NodeRun
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
SLOW: Final = LinkSpeed(bytes_per_s=1e9, latency_s=0.01)
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
        internals: Any = gradients
        accumulate, pack = internals.accumulate, internals._pack

        def accumulate_counted(index: int, microbatch: int, grad: Tensor) -> None:
            self._born(grad, packed=0)
            accumulate(index, microbatch, grad)

        def pack_counted(*args: Any) -> Tensor:
            whole = pack(*args)
            self._born(whole, packed=1)
            return whole

        internals.accumulate, internals._pack = accumulate_counted, pack_counted

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
    num_layers: int, order: str | None, reduce_each: bool = True
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


ON_BOTH_PATHS: Final = ("plain", "paired", "serial", None)
"""Orders of a schedule; None: the standard path."""

MOST_SETS: Final = 3
"""One being made by backward; one being reduced, as contributions and packed."""


@pytest.mark.parametrize("order", ON_BOTH_PATHS)
@pytest.mark.parametrize("num_layers", [4, 32])
def test_a_slow_link_leaves_three_sets_of_whole_gradients_alive_at_any_depth(
    ranks2: RankPool, num_layers: int, order: str | None
) -> None:
    for dense, expert, root in ranks2.run(live_sets, num_layers, order):
        for peak in (dense, expert):
            assert 2 <= peak.sets <= MOST_SETS
            assert peak.packed == 1
        assert root <= MOST_SETS


@pytest.mark.parametrize("order", ON_BOTH_PATHS)
@pytest.mark.parametrize("num_layers", [4, 32])
def test_reducing_at_the_end_of_a_step_keeps_a_set_of_each_unit(
    ranks2: RankPool, num_layers: int, order: str | None
) -> None:
    # The last microbatch's contributions come on top, and the packed input of a reduction; the
    # paired order has two backwards at work at the end.
    on_top = 3 if order == "paired" else 2
    for dense, expert, _ in ranks2.run(live_sets, num_layers, order, False):
        for peak in (dense, expert):
            assert num_layers + 1 <= peak.sets <= num_layers + on_top
            assert peak.packed == 1


# ---- graphs --------------------------------------------------------------------------------------


class Held:
    """What a graph holds."""


class Marked(torch.autograd.Function):
    """Passes a value on; its place in the graph holds a ``Held``."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, held: list[ref[Held]]) -> Tensor:
        ctx.held = Held()
        held.append(ref(ctx.held))
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def live_attention_graphs() -> dict[str, int]:
    """How many are alive behind the backward of each attn of megatron-core's model: the dispatcher
    keeps values of the router beyond it."""
    from ep_overlap.models.megatron_cpu import megatron_on_cpu
    from ep_overlap.models.megatron_layers import MegatronMoELayer

    case = Case(megatron=True, order="serial", layers=2, microbatches=2)
    held: list[ref[Held]] = []
    live: dict[str, int] = {}
    attn, backward = MegatronMoELayer.attn, NodeRun.backward

    def marked(self: MegatronMoELayer, state: Any, hidden: Tensor) -> Any:
        return attn(self, state, Marked.apply(hidden, held))

    def counted(self: NodeRun) -> None:
        backward(self)
        if ".attn." in self.name:
            live[self.name] = sum(each() is not None for each in held)

    gc.disable()
    try:
        with megatron_on_cpu(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(MegatronMoELayer, "attn", marked)
            patch.setattr(NodeRun, "backward", counted)
            parts = support.build(case)
            schedule = OverlapSchedule(parts, case.config, stream_kind=StreamKind.INLINE)
            schedule.step(support.batches(parts, case, 0), support.loss_of(case))
    finally:
        gc.enable()
    return live


def test_an_attentions_graph_goes_with_its_backward(ranks2: RankPool) -> None:
    expected = {"0F.attn.L1": 1, "0F.attn.L0": 0, "1F.attn.L1": 1, "1F.attn.L0": 0}
    assert ranks2.run(live_attention_graphs) == [expected] * 2


# ---- many steps ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Census:
    """What is alive between two steps."""

    num_tensors: int
    num_bytes: int
    """Of their storages, each counted once."""
    num_objects: int
    """That the garbage collector knows, tensors included."""
    num_blocks: int
    """Of Python's allocator: objects that the garbage collector does not know have some too."""


def census() -> Census:
    # Empties the interpreter's free lists, as a full collection does, and frees no garbage: it is
    # frozen.
    gc.freeze()
    gc.collect()
    num_blocks = sys.getallocatedblocks()
    gc.unfreeze()
    objects = gc.get_objects()
    # By type, and no attribute is read: a placeholder refuses, and so does what it relinquished.
    tensors = [thing for thing in objects if issubclass(type(thing), Tensor)]
    # The local parts of DTensors are tensors of their own; other subclasses hold no memory.
    plain = [thing for thing in tensors if type(thing) in (Tensor, nn.Parameter)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in plain}
    return Census(
        num_tensors=len(tensors),
        num_bytes=sum(storages.values()),
        num_objects=len(objects),
        num_blocks=num_blocks,
    )


def censuses(
    order: str | None, kind: StreamKind, num_microbatches: int, steps: Sequence[int]
) -> list[Census]:
    """After each of these numbers of steps, with the garbage collector off."""
    model = tiny(1)
    shard(model, Runtime(stream_kind=kind))
    trainer = Trainer(model, order=order, num_microbatches=num_microbatches, kind=kind)
    found: list[Census] = []
    gc.collect()
    gc.disable()
    try:
        for number in range(max(steps)):
            trainer.step(number)
            if number + 1 in steps:
                found.append(census())
    finally:
        gc.enable()
    return found


MOST_OBJECTS_A_STEP: Final = 0.9
"""From step 10 on, of those that the collector knows. About 50 in all; in a process that has run
many tests a few hundred, which is no part of a step: one kept in each would be 990."""


def assert_flat(counts: Sequence[Census]) -> None:
    """The same tensors and bytes after any number of steps."""
    first = counts[0]
    assert first.num_tensors > 0
    assert {count.num_tensors for count in counts} == {first.num_tensors}
    assert {count.num_bytes for count in counts} == {first.num_bytes}


MOST_BLOCKS_A_STEP: Final = 1.6
"""From step 100 to step 1,000. torch and Python keep small untracked objects for later use, ever
fewer: 570 in all under a schedule, 60 on the standard path. One kept in each seal would be 1,800 on
top."""


@pytest.mark.parametrize("order", ["plain", None])
def test_memory_is_flat_over_a_thousand_steps(ranks2: RankPool, order: str | None) -> None:
    steps = (10, 100, 1000)
    for counts in ranks2.run(censuses, order, StreamKind.INLINE, 1, steps, timeout_s=300.0):
        assert_flat(counts)
        num_objects = counts[-1].num_objects - counts[0].num_objects
        assert num_objects <= MOST_OBJECTS_A_STEP * (steps[-1] - steps[0])
        num_blocks = counts[-1].num_blocks - counts[-2].num_blocks
        assert num_blocks <= MOST_BLOCKS_A_STEP * (steps[-1] - steps[-2])


@pytest.mark.parametrize("order", ["paired", None])
def test_memory_is_flat_with_threads_and_microbatches(ranks2: RankPool, order: str | None) -> None:
    steps = (10, 40, 100)
    for counts in ranks2.run(censuses, order, StreamKind.THREAD, 3, steps, timeout_s=120.0):
        assert_flat(counts)
