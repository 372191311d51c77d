"""``fully_shard``: what the module holds, what is refused at wrap time, lifetimes."""

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharding_support import (
    Block,
    SharedGroups,
    Stack,
    clean,
    double,
    root_of,
    shard_stack,
    token_loss,
    tokens_of,
    whole_grads,
    whole_weights,
    world_mesh,
    worst_error,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ep_overlap.testing import RankPool
from fsdp_hooks.context import Runtime
from fsdp_hooks.lifecycle import Driver, ShardedModule
from fsdp_hooks.optimizer import shard_optimizer
from fsdp_hooks.placeholder import Relinquished
from fsdp_hooks.precision import MixedPrecision
from fsdp_hooks.shard import fully_shard

TOLERANCE = 1e-12
"""float64, against one process: sums over ranks are formed in another order."""


# ---- what the module holds -----------------------------------------------------------------------


def at_rest() -> None:
    model, reference = double(Stack), double(Stack)
    attribute_before = object()
    model.head.weight.__dict__["mark"] = attribute_before
    names = [name for name, _ in reference.named_parameters()]
    shard_stack(model)
    params = dict(model.named_parameters())
    assert list(params) == names
    assert list(model.state_dict()) == list(reference.state_dict())
    assert isinstance(model, Stack)
    assert isinstance(model, ShardedModule)
    assert type(model).__name__ == "ShardedStack"
    assert params["head.weight"].__dict__["mark"] is attribute_before
    weights = whole_weights(model)
    for name, param in reference.named_parameters():
        assert isinstance(params[name], DTensor)
        assert params[name].shape == param.shape
        assert torch.equal(weights[name], param.detach())
    rows = sum(p.to_local().numel() for p in params.values())
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, rows)
    assert sum(counts) == sum(p.numel() for p in reference.parameters())
    for training in (False, True):
        model.train(training)
        assert all(block.training is training for block in model.blocks)
    token_loss(model, tokens_of(dist.get_rank())).backward()
    after = dict(model.named_parameters())
    for name, param in after.items():  # the same objects, and a gradient even without rows
        assert param is params[name]
        assert isinstance(param.grad, DTensor)
        assert param.grad.shape == param.shape
        assert param.grad.to_local().shape == param.to_local().shape


def test_at_rest_the_module_holds_dtensors_of_its_names_and_shapes(ranks4: RankPool) -> None:
    ranks4.run(at_rest)


def memory_after_wrapping() -> tuple[int, bool, bool]:
    model = double(Stack)
    before = [param for _, param in model.named_parameters()]
    storages = [param.untyped_storage().nbytes() for param in before]
    kept = sum(storages)
    optimizer = torch.optim.SGD(before, lr=0.1)
    shard_stack(model)
    emptied = all(isinstance(param, Relinquished) and param.shape == (0,) for param in before)
    with pytest.raises(RuntimeError, match=r"head.weight was sharded with unit .*Build optim"):
        before[-2].sum()
    with pytest.raises(ValueError, match="SGD was built before fully_shard"):
        shard_optimizer(optimizer)
    return kept, emptied, clean(root_of(model))


def test_the_parameters_from_before_are_freed_and_say_so(ranks2: RankPool) -> None:
    for kept, emptied, is_clean in ranks2.run(memory_after_wrapping):
        assert kept > 0
        assert emptied
        assert is_clean


# ---- what is refused -----------------------------------------------------------------------------


def refusals() -> dict[str, str]:
    mesh = world_mesh()
    messages: dict[str, str] = {}

    def note(case: str, call: Callable[[], object]) -> None:
        try:
            call()
        except ValueError as error:
            messages[case] = str(error)
        else:
            messages[case] = "nothing was raised"

    def tied() -> nn.ModuleDict:
        model = nn.ModuleDict({"embed": nn.Embedding(4, 4), "head": nn.Linear(4, 4)})
        model["head"].weight = model["embed"].weight
        return model

    def embed_then_root() -> None:
        model = tied()
        fully_shard(model["embed"], mesh=mesh)
        fully_shard(model, mesh=mesh)

    def two_inner() -> None:
        model = tied()
        fully_shard(model["head"], mesh=mesh)
        fully_shard(model["embed"], mesh=mesh)

    def tied_afterwards() -> None:
        model = nn.ModuleDict({"embed": nn.Embedding(4, 4), "head": nn.Linear(4, 4)})
        fully_shard(model["embed"], mesh=mesh)
        model["head"].weight = model["embed"].weight
        fully_shard(model, mesh=mesh)

    note("tied, inner and root", embed_then_root)
    note("tied, two inner", two_inner)
    note("tied afterwards", tied_afterwards)

    once = fully_shard(nn.Linear(2, 2), mesh=mesh)
    note("twice", lambda: fully_shard(once, mesh=mesh))
    note("zero9", lambda: fully_shard(nn.Linear(2, 2), mesh=mesh, strategy="zero9"))
    cuda = DeviceMesh("cuda", [0, 1], _init_backend=False)
    note("another device", lambda: fully_shard(nn.Linear(2, 2), mesh=cuda))
    cube = DeviceMesh("cpu", [[[0, 1]]])
    note("three dimensions", lambda: fully_shard(nn.Linear(2, 2), mesh=cube))
    for outer in ("optim", "grads"):
        note(outer, lambda o=outer: fully_shard(nn.Linear(2, 2), mesh=mesh, outer_strategy=o))
    for_both = {"mesh": DeviceMesh("cpu", [[0, 1]]), "strategy": "no_shard"}
    note(
        "no_shard in optim",
        lambda: fully_shard(nn.Linear(2, 2), outer_strategy="optim", **for_both),
    )
    note("integers", lambda: MixedPrecision(reduce_dtype=torch.int32))
    note("a dtype's name", lambda: MixedPrecision(param_dtype="bf16"))
    for divisor in ("2", float("nan"), True):
        note(
            f"divisor {divisor!r}",
            lambda d=divisor: fully_shard(nn.Linear(2, 2), mesh=mesh, grad_divisor=d),
        )
    note("no", lambda: fully_shard(nn.Linear(2, 2), mesh=mesh, reduce_each_microbatch="no"))
    note("a device", lambda: fully_shard(nn.Linear(2, 2), mesh="cpu"))
    for name, value in (
        ("grad_divisor", 2),
        ("reduce_each_microbatch", True),
        ("runtime", Runtime()),
    ):
        chain = nn.Sequential(nn.Linear(2, 2))
        fully_shard(chain[0], mesh=mesh, **{name: value})
        fully_shard(chain, mesh=mesh)
        note(f"inner {name}", lambda chain=chain: root_of(chain))
    note("divisor", lambda: fully_shard(nn.Linear(2, 2), mesh=mesh, grad_divisor=0))
    on_meta = nn.ParameterDict({"w": nn.Parameter(torch.empty(2, device="meta"))})
    note("meta", lambda: fully_shard(on_meta, mesh=mesh))
    scalar = nn.ParameterDict({"s": nn.Parameter(torch.tensor(1.0))})
    note("scalar", lambda: fully_shard(scalar, mesh=mesh))

    flat = torch.randn(4, 3)
    overlapping = nn.ParameterDict({"whole": nn.Parameter(flat), "part": nn.Parameter(flat[1])})
    note("overlap", lambda: fully_shard(overlapping, mesh=mesh))
    grouped = nn.Linear(3, 4)
    grouped.views = [grouped.weight.detach()[i] for i in range(4)]
    note("views", lambda: fully_shard(grouped, mesh=mesh))
    assert type(grouped) is nn.Linear  # a refused module is as it was
    assert torch.isfinite(grouped.weight).all()

    two_roots = nn.Sequential(nn.Linear(2, 2))
    fully_shard(two_roots[0], mesh=mesh)
    two_roots[0](torch.ones(1, 2))
    fully_shard(two_roots, mesh=mesh)
    note("inner used first", lambda: root_of(two_roots))
    return messages


EXPECTED_REFUSALS = {
    "tied, inner and root": (
        "parameter head.weight of ModuleDict is shared with unit Embedding, as its weight"
    ),
    "tied, two inner": "parameter weight of Embedding is shared with unit Linear, as its weight",
    "tied afterwards": "parameter head.weight of ModuleDict is a DTensor",
    "twice": "ShardedLinear is sharded already",
    "zero9": "unknown strategy 'zero9'",
    "another device": "parameter weight is on cpu and its mesh on cuda; expected one kind",
    "three dimensions": "the mesh has 3 dimensions",
    "optim": "outer_strategy 'optim' has no outer ranks on a mesh of one dimension",
    "no_shard in optim": "use strategy 'optim' on a mesh of one dimension",
    "grads": "unknown outer_strategy 'grads'; expected one of no_shard, optim",
    "integers": "reduce_dtype is torch.int32",
    "a dtype's name": "param_dtype is 'bf16'; expected a floating-point dtype, such as torch.bf",
    "divisor '2'": "grad_divisor is '2'; expected a whole number of at least 1",
    "divisor nan": "grad_divisor is nan; expected a whole number of at least 1",
    "divisor True": "grad_divisor is True; expected a whole number of at least 1",
    "no": "reduce_each_microbatch is 'no'; expected True, False or None",
    "a device": "mesh is 'cpu'; expected a DeviceMesh, such as init_device_mesh('cpu', (2,))",
    "inner grad_divisor": "fully_shard of ShardedLinear was given grad_divisor",
    "inner reduce_each_microbatch": "fully_shard of ShardedLinear was given reduce_each_microbatch",
    "inner runtime": "fully_shard of ShardedLinear was given runtime",
    "divisor": "grad_divisor is 0",
    "meta": "ParameterDict is on meta and has no reset_parameters()",
    "scalar": "parameter s of ParameterDict is a scalar",
    "overlap": "overlap in memory",
    "views": "Linear.views shares memory with parameter weight",
    "inner used first": "already belongs to another root",
}


def test_what_cannot_work_is_refused_at_wrap_time_by_name(ranks2: RankPool) -> None:
    # accelerate#4171, P#176257 (tied over two units); M#6228 (views of one tensor).
    for messages in ranks2.run(refusals):
        assert messages.keys() == EXPECTED_REFUSALS.keys()
        for case, expected in EXPECTED_REFUSALS.items():
            assert expected in messages[case], case


def optimizer_refusals() -> dict[str, str]:
    model = fully_shard(nn.Linear(4, 4), mesh=world_mesh())
    messages: dict[str, str] = {}
    for optimizer in (
        torch.optim.LBFGS(model.parameters()),
        torch.optim.Adafactor(model.parameters()),
        torch.optim.Muon([model.weight]),
        torch.optim.SparseAdam(model.parameters()),
    ):
        try:
            shard_optimizer(optimizer)
        except ValueError as error:
            messages[type(optimizer).__name__] = str(error)
    return messages


def test_optimizers_that_need_whole_tensors_are_refused_by_name(ranks2: RankPool) -> None:
    (messages, _) = ranks2.run(optimizer_refusals)
    assert messages.keys() == {"LBFGS", "Adafactor", "Muon", "SparseAdam"}
    for name in ("LBFGS", "Adafactor", "Muon", "SparseAdam"):
        assert messages[name].startswith(f"{name} needs whole tensors")


def changed_after_wrapping() -> dict[str, str]:
    messages: dict[str, str] = {}

    def note(case: str, change: Callable[[Stack], object]) -> None:
        model = double(Stack)
        root = shard_stack(model)
        change(model)
        try:
            model(tokens_of(0))
        except RuntimeError as error:
            messages[case] = str(error)
        assert root.context.driver is Driver.REST
        assert root.stats.num_all_gathers == 0

    def assign(model: Stack) -> None:
        plain = double(Stack)
        model.load_state_dict(plain.state_dict(), assign=True)

    note("assigned", assign)
    note("converted", lambda model: model.float())
    note("frozen", lambda model: model.head.requires_grad_(False))
    return messages


def test_parameters_changed_behind_its_back_are_refused_before_any_collective(
    ranks2: RankPool,
) -> None:
    # transformers#48237, M#5534 (load_state_dict(assign=True) breaks the buffers).
    for messages in ranks2.run(changed_after_wrapping):
        assert messages["assigned"].startswith("parameter embed.weight was replaced, converted")
        assert messages["converted"].startswith("parameter embed.weight was replaced, converted")
        assert messages["frozen"].startswith("parameter head.weight was replaced, converted")


# ---- lifetimes -----------------------------------------------------------------------------------


def make_and_drop(num_models: int) -> tuple[int, int, int]:
    """Live models, threads and tensors' bytes that are left over."""
    mesh = world_mesh()
    runtime = Runtime(new_group=SharedGroups())
    gc.collect()
    alive: list[weakref.ref[nn.Module]] = []
    storages: list[weakref.ref[Tensor]] = []
    threads = set(threading.enumerate())
    for index in range(num_models):
        model = double(lambda: Stack(num_blocks=1), seed=index)
        fully_shard(model.blocks[0], mesh=mesh)
        fully_shard(model, mesh=mesh, runtime=runtime)
        reference = double(lambda: Stack(num_blocks=1), seed=index)
        token_loss(model, tokens_of(0)).backward()
        token_loss(reference, tokens_of(0)).backward()
        expected = {n: p.grad for n, p in reference.named_parameters()}
        # P#176225: nothing of the former model shows in the next.
        assert worst_error(whole_grads(model), expected) <= TOLERANCE
        alive.append(weakref.ref(model))
        storages.extend(
            weakref.ref(param)
            for unit in root_of(model).units
            for group in unit.groups
            for param in group.compute_params
        )
        del model, expected, reference
        if index % 10 == 9:
            gc.collect()
    gc.collect()
    streams = [t for t in threading.enumerate() if t not in threads and "stream-" in t.name]
    for thread in streams:
        thread.join(timeout=1)
    num_alive = sum(ref() is not None for ref in alive)
    num_storages = sum(ref() is not None for ref in storages)
    return num_alive, num_storages, sum(thread.is_alive() for thread in streams)


class Keeper(nn.Module):
    """Keeps a tensor of its last graph, as megatron-core's routers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.linear(x)
        return self.kept.relu()


def keep_and_drop(strategy: str) -> tuple[bool, bool, str]:
    """Whether a model is alive after its backward and after it is dropped, and what a backward
    through what is left of it says."""
    model = nn.Sequential(Keeper(), Keeper())
    for block in model:
        fully_shard(block, mesh=world_mesh(), strategy=strategy)
    fully_shard(model, mesh=world_mesh(), strategy=strategy)
    loss = model(torch.ones(2, 4)).sum()
    loss.backward(retain_graph=True)
    alive = weakref.ref(model)
    loss.backward(retain_graph=True)  # reached weakly, as long as somebody keeps the model
    was_alive = alive() is not None
    del model, block
    gc.collect()
    try:
        loss.backward()
    except RuntimeError as error:
        return was_alive, alive() is not None, str(error)
    return was_alive, alive() is not None, ""


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_a_model_that_keeps_a_part_of_its_graph_goes_all_the_same(
    ranks2: RankPool, strategy: str
) -> None:
    for was_alive, is_alive, message in ranks2.run(keep_and_drop, strategy):
        assert (was_alive, is_alive) == (True, False)
        assert message.startswith("a second backward through unit ")
        assert message.endswith("keep the model until the last backward through what it computed")


def test_fifty_models_made_and_dropped_leave_nothing(ranks2: RankPool) -> None:
    for num_alive, num_storages, num_threads in ranks2.run(make_and_drop, 50):
        assert (num_alive, num_storages, num_threads) == (0, 0, 0)


def two_roots_at_once() -> tuple[float, float]:
    """Forward of one, forward of the other, backward of the first, backward of the second."""
    rank, size = dist.get_rank(), dist.get_world_size()
    models = [double(Stack, seed) for seed in (1, 2)]
    references = [double(Stack, seed) for seed in (1, 2)]
    for model in models:
        shard_stack(model)
    losses = [token_loss(model, tokens_of(rank)) for model in models]
    for loss in losses:
        loss.backward()
    for reference in references:
        for r in range(size):
            (token_loss(reference, tokens_of(r)) / size).backward()
    first, second = (
        worst_error(whole_grads(model), {n: p.grad for n, p in reference.named_parameters()})
        for model, reference in zip(models, references, strict=True)
    )
    return first, second


def test_two_roots_in_one_process_work_at_once(ranks2: RankPool) -> None:
    for errors in ranks2.run(two_roots_at_once):
        assert max(errors) <= TOLERANCE


def deep_copy_of_a_plain_block_and_of_a_placeholder() -> str:
    model = double(Stack)
    root = shard_stack(model)
    root.begin(Driver.HOOKS)
    held = model.blocks[0].up.weight
    assert repr(held) == "Placeholder(up.weight of unit blocks.0)"
    assert held.device == torch.device("cpu")
    assert (held.shape, held.dtype) == ((7, 5), torch.float64)
    try:
        copy.deepcopy(held)
    except RuntimeError as error:
        message = str(error)
    else:
        message = "no error"
    with pytest.raises(RuntimeError, match=r"unit blocks\.0"):
        torch.stack([held, held])
    root.end()
    assert isinstance(double(Block), Block)
    return message


def test_a_placeholder_shows_its_names_and_refuses_to_be_read(ranks2: RankPool) -> None:
    for message in ranks2.run(deep_copy_of_a_plain_block_and_of_a_placeholder):
        assert message.startswith("up.weight is read while unit blocks.0 is released")


# ---- communicators -------------------------------------------------------------------------------


def issued_when_a_root_is_made(backend: str) -> list[tuple[str, str]]:
    """Collectives, and the group's name, as if groups had this backend."""
    seen: list[tuple[str, str]] = []

    def noting(name: str) -> Callable[..., Any]:
        collective = getattr(dist, name)

        def noted(*args: Any, group: dist.ProcessGroup, **kwargs: Any) -> Any:
            seen.append((name, group.group_desc))
            return collective(*args, group=group, **kwargs)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda group: backend)
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
            patch.setattr(dist, name, noting(name))
        shard_stack(Stack())
    return seen


def test_nccl_connects_ranks_when_communicators_are_made_and_gloo_has_no_need(
    ranks2: RankPool,
) -> None:
    kinds = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
    for seen in ranks2.run(issued_when_a_root_is_made, "cpu:gloo,cuda:nccl"):
        # What a rescue talks over is left: it is a miss, and may take its time.
        assert seen == [(kind, f"{lane}-0-1") for lane in ("gather", "reduce") for kind in kinds]
    assert ranks2.run(issued_when_a_root_is_made, "gloo") == [[], []]
