"""State dicts of sharded modules: saved on any ranks and strategy, loaded on any other."""

import pickle
import re
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharding_support import (
    STRATEGIES,
    VOCAB,
    WIDTH,
    SharedGroups,
    Stack,
    double,
    root_of,
    shard_stack,
    token_loss,
    tokens_of,
    world_mesh,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh

from ep_overlap.testing import RankPool
from fsdp_hooks.accumulation import microbatch
from fsdp_hooks.checkpoint import load_state_dict, state_dict, state_dict_to_fill
from fsdp_hooks.checkpoint_ranks import batches, flattened
from fsdp_hooks.checkpoint_shard import TensorShard
from fsdp_hooks.collectives import NewGroup
from fsdp_hooks.optimizer import shard_optimizer
from fsdp_hooks.precision import MixedPrecision
from fsdp_hooks.shard import fully_shard

BATCH = 4
"""Sequences of a step, over all ranks and microbatches: the same on every layout."""

State = dict[Any, Any]
"""A full state dict, flattened."""


class Net(Stack):
    """Beside a stack's uneven shapes: a frozen parameter, buffers, extra state."""

    scale: Tensor
    scratch: Tensor

    def __init__(self) -> None:
        super().__init__(num_blocks=2)
        self.blocks[0].gain.requires_grad_(False)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.note = "new"

    def get_extra_state(self) -> str:
        return self.note

    def set_extra_state(self, state: str) -> None:
        self.note = state

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.scale.sum()


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, amsgrad=True)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def nadam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.NAdam(params, lr=1e-2)


Make = Callable[[Any], torch.optim.Optimizer]


def sharded(
    strategy: str, mesh: DeviceMesh, groups: NewGroup, make: Make = adamw, seed: int = 0
) -> tuple[Net, torch.optim.Optimizer]:
    model = double(Net, seed)
    shard_stack(model, mesh=mesh, strategy=strategy, groups=groups)
    trained = [param for param in model.parameters() if param.requires_grad]
    return model, shard_optimizer(make(trained))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, step: int) -> None:
    """One step; with fewer ranks, more microbatches."""
    size, rank = mesh.size(), mesh.get_local_rank()
    optimizer.zero_grad()
    for k in range(BATCH // size):
        with microbatch(model, is_last=k == BATCH // size - 1):
            loss = token_loss(model, tokens_of(k * size + rank, step))
            (loss / (BATCH // size)).backward()
    optimizer.step()


def whole(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> State:
    return flattened(state_dict(model, optimizer, full=True, group=mesh.get_group()))


def mesh_of_size(size: int) -> DeviceMesh:
    """This rank's among meshes of ``size`` neighbours; every rank makes all of them."""
    ranks = list(range(dist.get_world_size()))
    meshes = [DeviceMesh("cpu", ranks[i : i + size]) for i in range(0, len(ranks), size)]
    return meshes[dist.get_rank() // size]


def same(ours: State, theirs: State) -> list[Any]:
    """The paths of what is not equal bit for bit."""
    assert ours.keys() == theirs.keys()
    return [path for path, value in ours.items() if not alike(value, theirs[path])]


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    return one == other


def close(ours: State, theirs: State) -> bool:
    """Equal to rounding in float64; AdamW divides by a root, which magnifies it."""
    assert ours.keys() == theirs.keys()
    tensors = [(v, theirs[path]) for path, v in ours.items() if isinstance(v, Tensor)]
    return all(torch.allclose(a, b, rtol=1e-7, atol=1e-10) for a, b in tensors)


# ---- between numbers of ranks and strategies -----------------------------------------------------


def save_after_two_steps(
    directory: Path, strategies: Sequence[str] = STRATEGIES, make: Make = adamw
) -> dict[str, tuple[State, State]]:
    """Whole states after two steps, which are saved, and after the third."""
    mesh, groups, states = world_mesh(), SharedGroups(), {}
    for strategy in strategies:
        model, optimizer = sharded(strategy, mesh, groups, make)
        model.scale += 1
        model.note = "old"
        for step in range(2):
            train(model, optimizer, mesh, step)
        dcp.save(state_dict(model, optimizer), checkpoint_id=directory / strategy)
        saved = whole(model, optimizer, mesh)
        train(model, optimizer, mesh, 2)
        states[strategy] = saved, whole(model, optimizer, mesh)
    return states


def read(
    directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, mesh: DeviceMesh
) -> None:
    group = mesh.get_group()
    reader = dcp.FileSystemReader(directory)
    state = state_dict_to_fill(reader.read_metadata(), model, optimizer, group=group)
    dcp.load(state, storage_reader=reader, process_group=group)
    load_state_dict(model, state, optimizer, group=group)


Pairs = Sequence[tuple[str, str]]
"""Strategies that saved and that load."""

SAME: Pairs = [(strategy, strategy) for strategy in STRATEGIES]
NEXT: Pairs = list(zip(STRATEGIES, STRATEGIES[1:] + STRATEGIES[:1], strict=True))
ALL: Pairs = list(product(STRATEGIES, STRATEGIES))


def load_everywhere(
    directory: Path, size: int, pairs: Pairs, make: Make = adamw
) -> dict[tuple[str, str], tuple[State, State, str]]:
    """States as loaded and after one more step, and extra state."""
    mesh, groups, states = mesh_of_size(size), SharedGroups(), {}
    for saved, strategy in pairs:
        model, optimizer = sharded(strategy, mesh, groups, make, seed=1)
        read(directory / saved, model, optimizer, mesh)
        loaded = whole(model, optimizer, mesh)
        train(model, optimizer, mesh, 2)
        states[saved, strategy] = loaded, whole(model, optimizer, mesh), model.note
    return states


Saved = tuple[Path, dict[str, tuple[State, State]]]


@pytest.fixture(scope="module")
def saved(ranks2: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    directory = tmp_path_factory.mktemp("saved")
    return directory, ranks2.run(save_after_two_steps, directory)[0]


def check_loaded(saved: Saved, found: dict[Any, Any], *, is_same_layout: bool) -> None:
    for (source, strategy), (loaded, stepped, note) in found.items():
        before, after = saved[1][source]
        assert same(loaded, before) == [], (source, strategy)
        assert note == "old"
        if is_same_layout and source == strategy:
            assert same(stepped, after) == [], strategy
        else:
            assert close(stepped, after), (source, strategy)
        assert same(stepped, before) != []


def test_what_two_ranks_saved_goes_on_bit_for_bit_on_two(ranks2: RankPool, saved: Saved) -> None:
    pairs = [*SAME, *NEXT]
    check_loaded(saved, ranks2.run(load_everywhere, saved[0], 2, pairs)[0], is_same_layout=True)


def test_what_two_ranks_saved_four_ranks_load(ranks4: RankPool, saved: Saved) -> None:
    check_loaded(saved, ranks4.run(load_everywhere, saved[0], 4, ALL)[0], is_same_layout=False)


def test_what_two_ranks_saved_one_rank_loads(ranks4: RankPool, saved: Saved) -> None:
    for found in ranks4.run(load_everywhere, saved[0], 1, SAME):
        check_loaded(saved, found, is_same_layout=False)


def test_a_saved_state_holds_every_tensor_whole_and_nothing_else(saved: Saved) -> None:
    """Every element once, no padding, no buffer that is not persistent."""
    directory, states = saved
    names = {"model." + name for name in double(Net).state_dict()}
    for strategy in STRATEGIES:
        metadata = dcp.FileSystemReader(directory / strategy).read_metadata()
        forms = metadata.state_dict_metadata
        assert {name for name in forms if name.startswith("model.")} == names
        assert set(forms) == {".".join(path) for path in states[strategy][0]}
        for path, value in states[strategy][0].items():
            form = forms[".".join(path)]
            if isinstance(value, Tensor):
                assert form.size == value.shape
                assert sum(chunk.sizes.numel() for chunk in form.chunks) == value.numel()
        bytes_written = sum(
            value.nbytes for value in states[strategy][0].values() if isinstance(value, Tensor)
        )
        # Each tensor comes with a header of torch.save's.
        data = sum(file.stat().st_size for file in (directory / strategy).glob("*.distcp"))
        assert bytes_written < data < bytes_written + 4000 * len(states[strategy][0])


@pytest.mark.parametrize("make", [sgd, momentum, nadam], ids=lambda make: make.__name__)
def test_optimizers_with_other_state_go_on_too(
    ranks2: RankPool, ranks4: RankPool, tmp_path: Path, make: Make
) -> None:
    saved, loads = STRATEGIES[-1], STRATEGIES[0]
    states = ranks2.run(save_after_two_steps, tmp_path, [saved], make)[0]
    found = ranks4.run(load_everywhere, tmp_path, 4, [(saved, loads)], make)[0]
    check_loaded((tmp_path, states), found, is_same_layout=False)


# ---- what PyTorch itself writes and reads --------------------------------------------------------


def test_plain_torch_reads_it(saved: Saved) -> None:
    """Weights, and the optimizer's state by torch's own functions, in a process without ranks."""
    directory, states = saved
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    for strategy in STRATEGIES:
        before, _ = states[strategy]
        model = double(Net, 1)
        optimizer = adamw([param for param in model.parameters() if param.requires_grad])
        state = {
            "model": model.state_dict(),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        }
        with pytest.warns(UserWarning, match="load in a single process"):
            dcp.load(state, checkpoint_id=directory / strategy)
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
        for name, param in model.named_parameters():
            assert torch.equal(param, before["model", name])
            for key, value in optimizer.state.get(param, {}).items():
                assert torch.equal(value, before["optimizer", "state", name, key])
        assert len(optimizer.state) == len(optimizer.param_groups[0]["params"])


def read_and_show(directory: Path) -> list[State]:
    mesh, groups = world_mesh(), SharedGroups()
    states = []
    for strategy in STRATEGIES:
        model, optimizer = sharded(strategy, mesh, groups, seed=1)
        read(directory, model, optimizer, mesh)
        states.append(whole(model, optimizer, mesh))
    return states


def test_what_plain_torch_wrote_is_read(ranks4: RankPool, tmp_path: Path) -> None:
    model = double(Net)
    optimizer = adamw([param for param in model.parameters() if param.requires_grad])
    token_loss(model, tokens_of(0)).backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=options)
    with pytest.warns(UserWarning, match="save in a single process"):
        dcp.save(
            {"model": model.state_dict(), "optimizer": optimizer_state}, checkpoint_id=tmp_path
        )
    for state in ranks4.run(read_and_show, tmp_path)[0]:
        for name, param in model.named_parameters():
            assert torch.equal(state["model", name], param)
            for key, value in optimizer.state.get(param, {}).items():
                assert torch.equal(state["optimizer", "state", name, key], value)


# ---- whole state dicts ---------------------------------------------------------------------------


def reload_whole(strategy: str, only_on_first: bool) -> tuple[int, list[Any], list[Any], bool]:
    """Names that other ranks than the first were given; differences; whether forward follows."""
    mesh, groups = world_mesh(), SharedGroups()
    model, optimizer = sharded(strategy, mesh, groups)
    train(model, optimizer, mesh, 0)
    state = state_dict(model, optimizer, full=True)
    num_given = len(state)
    before = flattened(state)
    if not only_on_first:
        box = [state]
        dist.broadcast_object_list(box)
        state = box[0]
    other, other_optimizer = sharded(strategy, mesh, groups, seed=1)
    with torch.no_grad():
        other(tokens_of(0))  # compute weights are those of another seed
    load_state_dict(other, state, other_optimizer)
    with torch.no_grad():
        follows = torch.equal(other(tokens_of(0)), model(tokens_of(0)))
    differences = same(whole(other, other_optimizer, mesh), before)
    train(model, optimizer, mesh, 1)
    train(other, other_optimizer, mesh, 1)
    stepped = same(whole(other, other_optimizer, mesh), whole(model, optimizer, mesh))
    return num_given, differences, stepped, follows


@pytest.mark.parametrize("only_on_first", [True, False], ids=["on rank 0", "on all ranks"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_whole_state_dict_is_on_rank_0_and_loads_from_there_or_everywhere(
    ranks2: RankPool, strategy: str, only_on_first: bool
) -> None:
    results = ranks2.run(reload_whole, strategy, only_on_first)
    assert [num_given for num_given, *_ in results] == [2, 0]
    assert [rest for _, *rest in results] == [[[], [], True]] * 2


def forward_between_microbatches(strategy: str) -> bool:
    """Compute weights that later microbatches of a step would go on with are brought up to date."""
    mesh, groups = world_mesh(), SharedGroups()
    model, _ = sharded(strategy, mesh, groups)
    other, _ = sharded(strategy, mesh, groups, seed=1)
    with microbatch(model, is_last=False):
        token_loss(model, tokens_of(0)).backward()
    load_state_dict(model, state_dict(other))
    with torch.no_grad(), microbatch(model, is_last=False):
        return torch.equal(model(tokens_of(0)), other(tokens_of(0)))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_loading_refreshes_compute_weights_at_once(ranks2: RankPool, strategy: str) -> None:
    assert ranks2.run(forward_between_microbatches, strategy) == [True, True]


def train_twins_on_a_whole_state() -> tuple[bool, list[Any]]:
    """A whole state holds memory of its own: a model that goes on does not change it."""
    mesh, groups = mesh_of_size(1), SharedGroups()
    model, optimizer = sharded("no_shard", mesh, groups)
    train(model, optimizer, mesh, 0)
    state = whole(model, optimizer, mesh)
    kept = pickle.loads(pickle.dumps(state))
    train(model, optimizer, mesh, 1)
    other, other_optimizer = sharded("no_shard", mesh, groups, seed=1)
    group = mesh.get_group()
    load_state_dict(other, state_dict(model, optimizer, group=group), other_optimizer, group=group)
    before = whole(model, optimizer, mesh)
    train(other, other_optimizer, mesh, 2)
    return same(state, kept) == [], same(whole(model, optimizer, mesh), before)


def test_loading_copies(ranks2: RankPool) -> None:
    assert ranks2.run(train_twins_on_a_whole_state) == [(True, []), (True, [])]


# ---- tied parameters -----------------------------------------------------------------------------


class Tied(Stack):
    def __init__(self) -> None:
        super().__init__(num_blocks=1)
        self.head.weight = self.embed.weight


def tied_states() -> tuple[list[str], list[str], bool, bool]:
    mesh, groups = world_mesh(), SharedGroups()
    models = [double(Tied, seed) for seed in (0, 1)]
    for model in models:
        shard_stack(model, mesh=mesh, groups=groups)
    first, second = models
    optimizer = shard_optimizer(momentum(first.parameters()))
    train(first, optimizer, mesh, 0)
    state = state_dict(first, optimizer, full=True)
    box = [state]
    dist.broadcast_object_list(box)
    state = box[0]
    names = sorted(name for name in state["model"] if "blocks" not in name)
    slots = sorted(name for name in state["optimizer"]["state"] if "blocks" not in name)
    agree = torch.equal(state["model"]["embed.weight"], state["model"]["head.weight"])
    del state["model"]["embed.weight"]  # as others write it who keep one name
    load_state_dict(second, state)
    return names, slots, agree, same(whole_model(second), whole_model(first)) == []


def whole_model(model: nn.Module) -> State:
    return flattened(state_dict(model, full=True))


def test_a_tied_parameter_has_an_entry_for_each_name_and_loads_from_any(ranks2: RankPool) -> None:
    for names, slots, agree, equal in ranks2.run(tied_states):
        assert names == ["embed.weight", "head.bias", "head.weight"]
        assert slots == ["embed.weight", "head.bias"]
        assert agree
        assert equal


# ---- expert parallelism --------------------------------------------------------------------------


class LocalExperts(nn.Module):
    """Experts named by their place on this rank, as megatron-core's SequentialMLP does it."""

    def __init__(self, first: int, num_experts: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.dense = nn.Linear(WIDTH, 3).double()
        self.experts = nn.ModuleList()
        self.first = first
        for expert in range(first, first + num_experts):
            torch.manual_seed(expert)
            self.experts.append(nn.Linear(WIDTH, VOCAB).double())

    def global_name(self, name: str) -> str:
        head, _, tail = name.partition("experts.")
        if not tail:
            return name
        index, _, rest = tail.partition(".")
        return f"{head}experts.{int(index) + self.first}.{rest}"

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x).sum() + sum(expert(x).square().sum() for expert in self.experts)


def experts_on(ep_size: int) -> tuple[LocalExperts, torch.optim.Optimizer]:
    """Four experts over ``ep_size`` ranks, each group of experts on every ``ep_size``-th rank."""
    ranks = list(range(dist.get_world_size()))
    which = dist.get_rank() % ep_size
    meshes = [DeviceMesh("cpu", ranks[first::ep_size]) for first in range(ep_size)]
    dense = world_mesh()
    model = LocalExperts(which * 4 // ep_size, 4 // ep_size)
    experts = frozenset(model.experts.parameters())
    fully_shard(model, mesh=lambda _, p: meshes[which] if p in experts else dense)
    groups = [
        {"params": list(model.experts.parameters()), "lr": 0.01},
        {"params": list(model.dense.parameters()), "lr": 0.02},
    ]
    return model, shard_optimizer(torch.optim.AdamW(groups))


def save_experts(directory: Path, ep_size: int) -> State:
    model, optimizer = experts_on(ep_size)
    model(torch.ones(2, WIDTH, dtype=torch.float64)).backward()
    optimizer.step()
    name = model.global_name
    dcp.save(state_dict(model, optimizer, global_name=name), checkpoint_id=directory)
    return flattened(state_dict(model, optimizer, full=True, global_name=name))


def load_experts(directory: Path, ep_size: int) -> tuple[State, list[float]]:
    model, optimizer = experts_on(ep_size)
    name = model.global_name
    reader = dcp.FileSystemReader(directory)
    state = state_dict_to_fill(reader.read_metadata(), model, optimizer, global_name=name)
    dcp.load(state, storage_reader=reader)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    load_state_dict(model, state, optimizer, global_name=name)
    rates = sorted(group["lr"] for group in optimizer.param_groups)
    return flattened(state_dict(model, optimizer, full=True, global_name=name)), rates


def test_experts_go_from_one_expert_parallel_size_to_another(
    ranks2: RankPool, ranks4: RankPool, tmp_path: Path
) -> None:
    before = ranks2.run(save_experts, tmp_path, 2)[0]
    names = {path[1] for path in before if path[0] == "model"}
    assert {f"experts.{k}.weight" for k in range(4)} <= names
    assert len({before["model", f"experts.{k}.weight"].sum().item() for k in range(4)}) == 4
    for pool, ep_size in ((ranks2, 1), (ranks2, 2), (ranks4, 2), (ranks4, 4)):
        after, rates = pool.run(load_experts, tmp_path, ep_size)[0]
        assert same(after, before) == [], ep_size
        assert rates == [0.01, 0.02]


def save_experts_by_local_names() -> str:
    model, _ = experts_on(2)
    with pytest.raises(ValueError, match="global_name") as caught:
        state_dict(model)
    return str(caught.value)


def test_two_parameters_of_one_name_are_refused_on_every_rank(ranks2: RankPool) -> None:
    first, second = ranks2.run(save_experts_by_local_names)
    assert first == second
    assert "experts.0.weight is one parameter on ranks [0] and another on ranks [1]" in first


# ---- hybrid sharding, main weights beside compute weights ----------------------------------------


def mixed(strategy: str, mesh: DeviceMesh, outer: str, seed: int) -> tuple[Stack, Any]:
    torch.manual_seed(seed)
    model = Stack(num_blocks=1)
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    for module in (model.blocks[0], model):
        fully_shard(module, mesh=mesh, strategy=strategy, outer_strategy=outer, mp=precision)
    return model, shard_optimizer(adamw(model.parameters()))


def step_mixed(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    token_loss(model, tokens_of(dist.get_rank(), step)).backward()
    optimizer.step()


def hybrid_round_trip(directory: Path, outer: str) -> list[tuple[list[Any], list[Any], bool]]:
    """Saved by 2 x 2 ranks, bf16 beside fp32; loaded by the same and by 4 in one dimension."""
    ranks = torch.arange(4)
    hybrid, flat = DeviceMesh("cpu", ranks.reshape(2, 2)), DeviceMesh("cpu", ranks)
    model, optimizer = mixed("optim_grads_params", hybrid, outer, seed=0)
    step_mixed(model, optimizer, 0)
    dcp.save(state_dict(model, optimizer), checkpoint_id=directory)
    saved = flattened(state_dict(model, optimizer, full=True))
    with torch.no_grad():
        expected = model(tokens_of(0))
    step_mixed(model, optimizer, 1)
    stepped = flattened(state_dict(model, optimizer, full=True))
    results = []
    layouts = [("optim_grads_params", hybrid, outer)] + [(s, flat, "no_shard") for s in STRATEGIES]
    for strategy, mesh, over in layouts:
        other, other_optimizer = mixed(strategy, mesh, over, seed=1)
        with torch.no_grad():
            other(tokens_of(0))  # compute weights are those of another seed
        reader = dcp.FileSystemReader(directory)
        state = state_dict_to_fill(reader.read_metadata(), other, other_optimizer)
        dcp.load(state, storage_reader=reader)
        load_state_dict(other, state, other_optimizer)
        with torch.no_grad():
            follows = torch.equal(other(tokens_of(0)), expected)
        loaded = flattened(state_dict(other, other_optimizer, full=True))
        step_mixed(other, other_optimizer, 1)
        after = flattened(state_dict(other, other_optimizer, full=True))
        on = {value.dtype for path, value in loaded.items() if path[0] == "model"}
        assert on <= {torch.float32}
        results.append((same(loaded, saved), same(after, stepped), follows))
    return results


@pytest.mark.parametrize("outer", ["no_shard", "optim"])
def test_hybrid_sharding_saves_main_weights_and_loading_refreshes_compute_weights(
    ranks4: RankPool, tmp_path: Path, outer: str
) -> None:
    for results in ranks4.run(hybrid_round_trip, tmp_path, outer):
        assert [loaded for loaded, _, _ in results] == [[]] * (1 + len(STRATEGIES))
        assert all(follows for _, _, follows in results)
        assert results[0][1] == []  # the same layout goes on bit for bit


def test_whole_tensors_travel_in_batches_of_bounded_size() -> None:
    sizes = {(name,): size for name, size in (("a", 3), ("b", 4), ("c", 9), ("d", 0), ("e", 1))}
    found = [[name for (name,) in batch] for batch in batches(sizes, 8)]
    assert found == [["a", "b"], ["c"], ["d", "e"]]
    assert list(batches({})) == []


# ---- refusals ------------------------------------------------------------------------------------


def misfits() -> list[str]:
    """What is said of each state that does not fit, on this rank."""
    mesh, groups = world_mesh(), SharedGroups()
    model, optimizer = sharded("optim_grads_params", mesh, groups)
    train(model, optimizer, mesh, 0)
    before = whole(model, optimizer, mesh)
    good = state_dict(model, optimizer, full=True)
    said: list[str] = []

    def load(change: Callable[[Any], None], strict: bool = True) -> None:
        state = pickle.loads(pickle.dumps(good))
        if state:
            change(state)
        try:
            load_state_dict(model, state, optimizer, strict=strict)
        except ValueError as error:
            said.append(str(error))
        else:
            said.append("loaded")

    def renamed(state: Any) -> None:
        state["model"]["brain.weight"] = state["model"].pop("head.weight")

    def reshaped(state: Any) -> None:
        state["model"]["head.weight"] = torch.zeros(3, 2)

    def stateless(state: Any) -> None:
        del state["optimizer"]

    def torn(state: Any) -> None:
        state["optimizer"]["param_groups"]["head.bias"]["lr"] = 5.0

    load(renamed)
    load(renamed, strict=False)
    load(reshaped, strict=False)
    load(stateless)
    load(torn)
    assert same(whole(model, optimizer, mesh), before) == []
    return said


def test_a_state_that_does_not_fit_is_refused_by_name_on_every_rank(ranks2: RankPool) -> None:
    first, second = ranks2.run(misfits)
    assert first == second
    wrong_names, loose, wrong_shape, no_optimizer, torn = first
    assert wrong_names == (
        "rank 0: the state does not fit the module: missing head.weight; unexpected brain.weight; "
        "strict=False loads what fits by name"
    )
    assert loose == "loaded"
    assert "shapes differ: head.weight (3, 2), expected (7, 5)" in wrong_shape
    assert "without optimizer state embed.weight, blocks.0.norm.weight" in no_optimizer
    assert re.search(r"embed.weight was saved with lr 0.01 and head.bias with 5.0", torn)


def refusals() -> list[str]:
    mesh = mesh_of_size(1)
    group = mesh.get_group()
    model = double(Net)
    stranger = torch.optim.SGD(double(Net).parameters(), lr=1.0)
    said: list[str] = []

    def note(call: Callable[[], object]) -> None:
        try:
            call()
        except (ValueError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")

    note(lambda: state_dict(model, group=group))
    shard_stack(model, mesh=mesh)
    note(lambda: state_dict(model.blocks[0], group=group))
    note(lambda: state_dict(model, stranger, group=group))
    shard = state_dict(model, group=group)["model"]["head.weight"]
    assert isinstance(shard, TensorShard)
    assert shard.shape == (7, 5)
    note(lambda: shard + 1)
    note(lambda: pickle.dumps(shard))
    loss = token_loss(model, tokens_of(0))
    note(lambda: state_dict(model, group=group))
    loss.backward()
    root_of(model)
    return said


def test_wrong_uses_are_told_what_to_do(ranks2: RankPool) -> None:
    for said in ranks2.run(refusals):
        not_sharded, inner, stranger, arithmetic, pickled, mid_step = said
        assert "ValueError: Net is not sharded" in not_sharded
        assert "is a unit of ShardedNet; expected the outermost" in inner
        assert "not the module's; expected one built over" in stranger
        assert "RuntimeError: rows 0..7 of a sharded tensor of shape (7, 5)" in arithmetic
        assert "state_dict(module, full=True)" in pickled
        assert "RuntimeError: a step is under way (hooks)" in mid_step


# ---- one rank fails ------------------------------------------------------------------------------


def lone_failures() -> tuple[list[str], float]:
    """What is said on this rank of calls that are wrong on one rank alone; the longest took (s)."""
    mesh, groups, rank = world_mesh(), SharedGroups(), dist.get_rank()
    model, optimizer = sharded("no_shard", mesh, groups)
    stranger = sgd(double(Net).parameters())
    names = {name: name for name, _ in model.named_parameters()} if rank else {}
    said: list[str] = []
    longest_s = 0.0

    def note(call: Callable[[], object]) -> None:
        nonlocal longest_s
        start_s = perf_counter()
        try:
            call()
        except (ValueError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")
        longest_s = max(longest_s, perf_counter() - start_s)

    note(lambda: state_dict(model, stranger if rank == 1 else optimizer))
    note(lambda: state_dict(model, global_name=lambda name: names[name]))
    rows = state_dict(model)
    note(lambda: load_state_dict(model, rows if rank == 0 else {}))
    if rank == 0:
        model.set_extra_state(lambda: None)  # pyright: ignore[reportArgumentType]
    note(lambda: state_dict(model, full=True))
    model.note = "new"
    if rank == 1:
        token_loss(model, tokens_of(0))
    note(lambda: state_dict(model))
    root_of(model).abort()
    assert same(whole_model(model), flattened(state_dict(model, full=True))) == []
    return said, longest_s


def test_what_is_wrong_on_one_rank_is_raised_on_all_at_once(ranks2: RankPool) -> None:
    (first, first_s), (second, second_s) = ranks2.run(lone_failures)
    assert first == second
    stranger, unnamed, rows, extra_state, mid_step = first
    assert "ValueError: rank 1: the optimizer has a parameter of shape (7, 5)" in stranger
    assert unnamed == "RuntimeError: rank 0: KeyError: 'embed.weight'"
    assert "RuntimeError: rank 0: rows 0..7 of a sharded tensor" in rows
    assert re.match(r"RuntimeError: rank 0: \w+: .*lambda", extra_state)
    assert "RuntimeError: rank 1: a step is under way (hooks)" in mid_step
    assert max(first_s, second_s) < 10
