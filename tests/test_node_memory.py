"""What a hand-off holds: nothing that no backward reads."""

from collections.abc import Callable, Iterator
from typing import Any, override

import pytest
import schedule_support as support
import torch
import torch.distributed as dist
from torch import Tensor, is_tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ep_overlap.config import OverlapConfig
from ep_overlap.links.emulated import register_emulated_backend
from ep_overlap.models.groups import ExpertGroups, lone_expert_groups, new_expert_groups
from ep_overlap.models.reference import Batch, MoETransformer, ReferenceConfig, cross_entropy
from ep_overlap.run.node import MIN_BYTES, HandOff, Hidden, LossEnd, NodeRun
from ep_overlap.run.runner import Program
from ep_overlap.schedule import OverlapSchedule
from fsdp_hooks.streams import StreamKind
from fsdp_hooks.wgrad import WgradQueue, storage_id
from fsdp_hooks.wgrad_layers import manage_wgrad


class Made(TorchDispatchMode):
    """Notes the memory of all large tensors that operations make."""

    def __init__(self, made: list[StorageWeakRef]) -> None:
        super().__init__()
        self._made = made

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {storage_id(each) for each in tree_leaves(args) if is_tensor(each)}
        for each in tree_leaves(result):
            is_large = is_tensor(each) and each.nbytes >= MIN_BYTES
            if is_large and storage_id(each) not in known:
                self._made.append(StorageWeakRef(each.untyped_storage()))
        return result


LARGE = (64, MIN_BYTES // 64 // 4)
SMALL = (4, 4)


class Pair:
    """A node that makes a value, and one that takes it to a loss."""

    def __init__(self, consume: Callable[[Tensor], Tensor], shape: tuple[int, int]) -> None:
        self.weight = torch.linspace(-1, 1, shape[0] * shape[1]).view(shape).requires_grad_()
        self.storage: StorageWeakRef | None = None
        value = HandOff("value")
        self.maker = NodeRun("0F.pre", self._make, inlets=[], outlets=[value])
        self.taker = NodeRun(
            "0F.post",
            lambda given: (Hidden(consume(given.hidden)),),
            inlets=[value],
            outlets=[LossEnd()],
        )

    def _make(self) -> list[Hidden]:
        made = 2 * self.weight
        self.storage = StorageWeakRef(made.untyped_storage())
        return [Hidden(made)]

    def forward(self) -> None:
        self.maker.forward()
        self.taker.forward()

    def backward(self) -> Tensor:
        self.taker.backward()
        self.maker.backward()
        assert self.weight.grad is not None
        return self.weight.grad

    @property
    def is_held(self) -> bool:
        assert self.storage is not None
        return not self.storage.expired()


def expected(consume: Callable[[Tensor], Tensor], shape: tuple[int, int]) -> Tensor:
    pair = Pair(consume, shape)
    consume(2 * pair.weight).backward()
    assert pair.weight.grad is not None
    return pair.weight.grad


def saves_nothing(value: Tensor) -> Tensor:
    return value.sum() * 3


def saves_it(value: Tensor) -> Tensor:
    return value.square().sum()


def saves_a_view_of_it(value: Tensor) -> Tensor:
    return value[3:].square().sum() + value[:3].sum()


@pytest.mark.parametrize(
    ("consume", "is_held"), [(saves_nothing, False), (saves_it, True), (saves_a_view_of_it, True)]
)
def test_a_value_goes_after_the_consumers_forward_unless_its_graph_has_it(
    consume: Callable[[Tensor], Tensor], is_held: bool
) -> None:
    pair = Pair(consume, LARGE)
    pair.forward()
    assert pair.is_held == is_held
    assert torch.equal(pair.backward(), expected(consume, LARGE))
    assert not pair.is_held


def test_a_small_value_is_not_worth_the_hosts_time() -> None:
    pair = Pair(saves_nothing, SMALL)
    pair.forward()
    assert pair.is_held
    assert torch.equal(pair.backward(), expected(saves_nothing, SMALL))


def test_where_work_runs_after_its_launch_a_value_waits_for_drop_read() -> None:
    pair = Pair(saves_nothing, LARGE)
    pair.taker.keeps_used = True
    pair.forward()
    assert pair.is_held
    pair.taker.drop_read()
    assert not pair.is_held
    assert torch.equal(pair.backward(), expected(saves_nothing, LARGE))


@pytest.mark.parametrize("drop_read_first", [False, True])
def test_what_nobody_has_waited_for_when_the_backward_comes_lives_until_drop_used(
    drop_read_first: bool,
) -> None:
    """An order of one's own may have the backward before the lane that made the value waits."""
    pair = Pair(saves_it, LARGE)
    pair.taker.keeps_used = True
    pair.forward()
    if drop_read_first:
        pair.taker.drop_read()
    grad = pair.backward()
    assert pair.is_held is not drop_read_first
    pair.taker.drop_read()
    assert pair.is_held is not drop_read_first
    pair.taker.drop_used()
    assert torch.equal(grad, expected(saves_it, LARGE))
    assert not pair.is_held


def test_a_value_that_somebody_else_has_stays_whole() -> None:
    kept: list[Tensor] = []

    def keeps_it(value: Tensor) -> Tensor:
        kept.append(value)
        return value.sum()

    pair = Pair(keeps_it, LARGE)
    pair.forward()
    assert torch.equal(kept[0], 2 * pair.weight)
    pair.backward()
    assert torch.equal(kept[0], 2 * pair.weight)


def test_a_gradient_goes_with_its_backward_though_the_model_keeps_the_graph_it_came_from() -> None:
    kept: list[Tensor] = []
    grads: list[StorageWeakRef] = []

    def keeps_graph(value: Tensor) -> Tensor:
        value.register_hook(lambda grad: grads.append(StorageWeakRef(grad.untyped_storage())))
        kept.append(value * 2)
        return value.square().sum()

    pair = Pair(keeps_graph, LARGE)
    pair.forward()
    pair.taker.backward()
    assert [ref.expired() for ref in grads] == [False]
    pair.maker.backward()
    assert kept[0].grad_fn is not None
    assert [ref.expired() for ref in grads] == [True]


@pytest.mark.parametrize(("is_borrowed", "is_held"), [(True, True), (False, False)])
def test_a_flush_holds_what_it_read_of_another_streams_memory(
    is_borrowed: bool, is_held: bool
) -> None:
    layer = nn.Linear(8, 8, bias=False)
    wgrad = manage_wgrad(nn.Sequential(layer))
    queue = WgradQueue()
    wgrad.delay_into(queue)
    x = torch.ones(4, 8)
    storage = StorageWeakRef(x.untyped_storage())
    borrowed = {storage_id(x)} if is_borrowed else {storage_id(layer.weight)}
    layer(x).sum().backward()
    del x
    assert not storage.expired()
    queue.flush(borrowed)
    assert storage.expired() != is_held
    queue.drop_used()
    assert storage.expired()
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, torch.full((8, 8), 4.0))


# ---- in a schedule -------------------------------------------------------------------------------


def large_model(groups: ExpertGroups) -> tuple[MoETransformer, list[Batch]]:
    config = ReferenceConfig(
        num_layers=2,
        hidden_size=64,
        num_heads=2,
        ffn_hidden_size=96,
        num_experts=4,
        topk=2,
        seq_length=64,
        moe_layer_freq=1,
        dtype=torch.float32,
    )
    model = MoETransformer(config, groups, seed=3)
    tokens = torch.arange(8 * 64).view(8, 64) % 251
    return model, [Batch(tokens=tokens + k, targets=tokens.roll(-1, 1) + k) for k in range(2)]


def alive_after_forward(order: str) -> tuple[set[str], set[str], set[str]]:
    """Of one microbatch: what nodes sent; what of it is alive as post ends; and what of that no
    graph has saved."""
    model, batches = large_model(new_expert_groups(2))
    sent: dict[str, StorageWeakRef] = {}
    saved: set[int] = set()
    alive: set[str] = set()

    def probe(name: str, value: Any) -> None:
        if name == "post":  # the last one of the forward
            alive.update(name for name, ref in sent.items() if not ref.expired())
            return
        for index, tensor in enumerate(support.tensors_in(value)):
            if tensor.nbytes >= MIN_BYTES:
                sent[f"{name}.{index}"] = StorageWeakRef(tensor.untyped_storage())

    def note(tensor: Tensor) -> Tensor:
        saved.add(storage_id(tensor))
        return tensor

    support.tap(model, probe)
    config = OverlapConfig(num_microbatches=1, order=order, overlap=order != "serial")
    schedule = OverlapSchedule(model, config, stream_kind=StreamKind.INLINE)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        schedule.step(batches[:1], cross_entropy)
    return set(sent), alive, {name for name in alive if sent[name].cdata not in saved}


@pytest.fixture
def emulated_world() -> Iterator[None]:
    """Of two ranks: its exchanges copy, and no thread of theirs keeps a tensor a little longer."""
    register_emulated_backend()
    dist.init_process_group("emulated", rank=0, world_size=2, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("emulated_world")
@pytest.mark.parametrize("order", ["serial", "plain", "paired"])
def test_of_a_microbatch_in_flight_only_what_graphs_have_saved_is_alive(order: str) -> None:
    sent, alive, unsaved = alive_after_forward(order)
    assert unsaved <= {"combine.L1.0", "attn.L1.1"}, "post, which has not ended, reads those"
    # Tokens are sorted by expert where they arrive, and the experts' results sorted back.
    assert {"attn.L0.0", "dispatch.L0.0", "mlp.L0.0", "combine.L0.0"} <= sent - alive


@pytest.mark.usefixtures("emulated_world")
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("order", ["plain", "paired"])
def test_where_work_runs_after_its_launch_a_step_leaves_nothing(order: str, delay: bool) -> None:
    """Such a program, run at once: what each node read goes as the plan says, the last with the
    step."""
    model, batches = large_model(new_expert_groups(2))
    config = OverlapConfig(num_microbatches=2, order=order, delay_wgrad=delay)
    schedule = OverlapSchedule(model, config, stream_kind=StreamKind.INLINE)
    schedule.step(batches, cross_entropy)  # with gradients in place
    expected = support.gradients(model)
    model.zero_grad(set_to_none=False)
    schedule._training = Program(  # pyright: ignore[reportPrivateUsage]
        schedule.plan,
        streams=schedule._streams,  # pyright: ignore[reportPrivateUsage]
        nodes=schedule._nodes,  # pyright: ignore[reportPrivateUsage]
        again={},
        wgrads=schedule._wgrads,  # pyright: ignore[reportPrivateUsage]
        units={},
        runs_after_launch=True,
    )
    made: list[StorageWeakRef] = []
    most = 0
    with Made(made):
        for _ in range(2):
            schedule.step(batches, cross_entropy)
            most = max(most, len(made))
    assert most > 100
    assert [ref for ref in made if not ref.expired()] == []
    halves = [2 * grad for grad in expected.values()]
    assert all(map(torch.allclose, support.gradients(model).values(), halves))


@pytest.mark.parametrize("order", ["plain", "paired"])
@pytest.mark.parametrize("kind", [StreamKind.INLINE, StreamKind.THREAD])
def test_gradients_are_those_of_the_standard_path(order: str, kind: StreamKind) -> None:
    ours, batches = large_model(lone_expert_groups())
    theirs, _ = large_model(lone_expert_groups())
    schedule = OverlapSchedule(
        ours, OverlapConfig(num_microbatches=2, order=order), stream_kind=kind
    )
    losses = schedule.step(batches, cross_entropy).losses
    expected = support.standard_step(theirs, batches, cross_entropy)
    assert all(map(torch.equal, losses, expected))
    assert support.unequal(support.gradients(ours), support.gradients(theirs)) == []
