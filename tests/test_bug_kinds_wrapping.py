"""Bugs that others have met when a model is made and wrapped: construction on ``meta`` (values,
ties, buffers, how much is whole at one time), and views. Tags as in ``docs/bug_kinds.md``."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharding_support import (
    SharedGroups,
    equal,
    root_of,
    whole_grads,
    whole_weights,
    world_mesh,
    worst_error,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ep_overlap.testing import RankPool
from fsdp_hooks.context import Runtime
from fsdp_hooks.optimizer import shard_optimizer
from fsdp_hooks.precision import MixedPrecision
from fsdp_hooks.shard import fully_shard

WIDTH = 8
NUM_LAYERS = 6


class Layer(nn.Module):
    """Its buffers are filled by modules of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.norm(x)))


class Ramp(nn.Module):
    """Buffers alone; the two are one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ramp", torch.empty(WIDTH), persistent=False)
        self.register_buffer("same", self.ramp)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.arange(WIDTH, out=self.ramp)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.ramp + self.same


class Tied(nn.Module):
    """Draws once for both."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.decode = self.encode
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.encode)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.encode) @ self.decode.T


class Model(nn.Module):
    """Made in the order in which its units are sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.ramp = Ramp()
        self.tied = Tied()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.tied(self.ramp(x))


def on_meta() -> Model:
    with torch.device("meta"):
        return Model()


def shard(model: Model, groups: SharedGroups | None = None, **options: Any) -> None:
    for layer in model.layers:
        fully_shard(layer, mesh=world_mesh(), **options)
    runtime = Runtime(new_group=groups or SharedGroups())
    fully_shard(model, mesh=world_mesh(), runtime=runtime, **options)


def data() -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator)


# ---- values, ties, buffers -----------------------------------------------------------------------


def beside_plain(strategy: str) -> dict[str, bool]:
    """The same seed for both."""
    groups = SharedGroups()
    torch.manual_seed(7)
    plain = Model()
    shard(plain, groups, strategy=strategy)
    model = on_meta()
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    torch.manual_seed(7)
    shard(model, groups, strategy=strategy)
    buffers = dict(model.named_buffers())
    found = {
        "weights": equal(whole_weights(model), whole_weights(plain)),
        "buffers": equal(buffers, dict(plain.named_buffers())),
        "tied": model.tied.encode is model.tied.decode and model.ramp.ramp is model.ramp.same,
        "not persistent": "ramp.ramp" not in model.state_dict(),
    }
    for each in (plain, model):
        each(data()).square().mean().backward()
    return found | {
        "gradients": equal(whole_grads(model), whole_grads(plain)),
        "one slot": [len(g.slots) for g in root_of(model).root_unit.groups] == [1],
    }


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_a_model_from_meta_is_the_plain_one_of_the_same_seed(
    ranks2: RankPool, strategy: str
) -> None:
    # M#6164, P#176257: what is tied stays tied, buffers too.
    for found in ranks2.run(beside_plain, strategy):
        assert found == dict.fromkeys(found, True)


class Embedded(nn.Module):
    """The root's unit has a buffer and no parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.ramp = Ramp()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.ramp(x))


def buffers_of_a_root_without_parameters() -> list[Tensor]:
    """With a mesh, and with a function that gives one for each parameter."""
    mesh, found = world_mesh(), list[Tensor]()

    def mesh_of(name: str, param: nn.Parameter) -> DeviceMesh:
        return mesh

    for given in (mesh, mesh_of):
        with torch.device("meta"):
            model = Embedded()
        fully_shard(model.linear, mesh=given)
        fully_shard(model, mesh=given)
        model(data()).sum().backward()
        found.append(model.ramp.ramp)
    return found


def test_buffers_of_a_root_without_parameters_get_memory(ranks2: RankPool) -> None:
    for ramps in ranks2.run(buffers_of_a_root_without_parameters):
        assert [ramp.tolist() for ramp in ramps] == [list(range(WIDTH))] * 2


# ---- memory --------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """The most storage that was alive at one time, of all that was made within."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # Not of a subclass: a DTensor has a storage without memory, a placeholder one on meta.
        if type(result) in (Tensor, nn.Parameter) and result.device.type == "cpu":
            ref = StorageWeakRef(result.untyped_storage())
            self._made[ref.cdata] = ref
        self.peak = max(self.peak, self.now)
        return result

    @property
    def now(self) -> int:
        """Bytes alive; a released storage has none."""
        self._made = {key: ref for key, ref in self._made.items() if not ref.expired()}
        alive = (torch.UntypedStorage._new_with_weak_ptr(key) for key in self._made)
        return sum(storage.nbytes() for storage in alive if storage is not None)


class Wide(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(num_layers)))


def peak_of(num_layers: int, mp: MixedPrecision | None) -> tuple[float, float]:
    """Bytes while wrapping, at the peak and afterwards, in layers of float32."""
    with torch.device("meta"):
        model = Wide(num_layers)
    with LiveBytes() as live:
        for layer in model.layers:
            fully_shard(layer, mesh=world_mesh(), mp=mp)
        fully_shard(model, mesh=world_mesh(), mp=mp)
        kept = live.now
    return live.peak / (4 * 64 * 64), kept / (4 * 64 * 64)


def peaks(mp: MixedPrecision | None) -> list[tuple[float, float]]:
    return [peak_of(num_layers, mp) for num_layers in (1, 8)]


@pytest.mark.parametrize(
    ("mp", "shard", "whole"),
    [(None, 1 / 2, 2.0), (MixedPrecision(param_dtype=torch.bfloat16), 3 / 4, 2.5)],
)
def test_one_unit_is_whole_at_a_time(
    ranks2: RankPool, mp: MixedPrecision | None, shard: float, whole: float
) -> None:
    """``whole``: the values as drawn, and the flat storage that they move to, of one unit."""
    for (peak_of_one, kept_of_one), (peak, kept) in ranks2.run(peaks, mp):
        assert kept_of_one == pytest.approx(shard, abs=0.01)
        assert kept == pytest.approx(8 * shard, abs=0.01)
        assert peak_of_one <= whole + shard + 0.01
        assert peak <= whole + 8 * shard + 0.01


# ---- refusals ------------------------------------------------------------------------------------


class Stubborn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.weight


def stubborn() -> tuple[str, float]:
    """Refused by name; with an ``init_fn`` it works."""
    with torch.device("meta"):
        models = [Stubborn(), Stubborn()]
    with pytest.raises(ValueError, match="has no reset_parameters") as raised:
        fully_shard(models[0], mesh=world_mesh())
    seen: list[nn.Module] = []

    def fill(module: nn.Module) -> None:
        seen.append(module)
        for param in module.parameters(recurse=False):
            nn.init.constant_(param, 0.5)

    fully_shard(models[1], mesh=world_mesh(), init_fn=fill)
    assert seen == [models[1], models[1].linear]  # each for its own parameters
    constants: dict[str, Tensor | None] = {
        name: torch.full(param.shape, 0.5) for name, param in models[1].named_parameters()
    }
    return str(raised.value), worst_error(whole_weights(models[1]), constants)


def test_a_module_that_cannot_fill_itself_is_refused_by_name(ranks2: RankPool) -> None:
    for message, error in ranks2.run(stubborn):
        assert message.startswith("Stubborn is on meta and has no reset_parameters()")
        assert "init_fn of fully_shard" in message
        assert error == 0.0


# ---- views ---------------------------------------------------------------------------------------


class Viewed(nn.Module):
    """Four experts' weights are pieces of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(4, WIDTH, WIDTH) / 2
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        for expert, piece in zip(self.experts, flat, strict=True):
            expert.weight = nn.Parameter(piece)
        self.scale = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for expert in self.experts:
            x = torch.tanh(expert(x))
        return self.scale(x)


def train_viewed() -> tuple[bool, list[str]]:
    """Two steps as in one process; then what is refused: a buffer, and a view in an inner unit."""
    torch.manual_seed(0)
    model = Viewed()
    torch.manual_seed(0)
    reference = Viewed()
    fully_shard(model, mesh=world_mesh())
    optimizer = shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.25))
    plain = torch.optim.SGD(reference.parameters(), lr=0.25)
    x = torch.ones(2, WIDTH)  # the same on every rank
    for _ in range(2):
        for module, steps in ((model, optimizer), (reference, plain)):
            steps.zero_grad()
            module(x).square().sum().backward()
            steps.step()
    with torch.no_grad():
        follows = torch.equal(model(x), reference(x))

    buffered = nn.Linear(WIDTH, WIDTH)
    buffered.register_buffer("row", buffered.weight.detach()[0])
    nested = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    nested.flat = nn.Parameter(torch.ones(WIDTH))
    nested[0].view = nested.flat.detach()[:2]
    fully_shard(nested[0], mesh=world_mesh())
    messages: list[str] = []
    for module in (buffered, nested):
        with pytest.raises(ValueError, match="shares memory with parameter") as raised:
            fully_shard(module, mesh=world_mesh())
        messages.append(str(raised.value))
    return follows, messages


def test_pieces_of_one_tensor_train_and_views_that_would_go_stale_are_refused(
    ranks2: RankPool,
) -> None:
    # M#6228
    for follows, (buffer, view) in ranks2.run(train_viewed):
        assert follows
        assert buffer.startswith("Linear.row shares memory with parameter weight")
        assert view.startswith("ShardedLinear.view shares memory with parameter flat")
