"""Bugs that others have met, as models and meshes: shared, missing and odd parameters, hybrid
meshes, construction on ``meta``. The tags are those of ``docs/bug_kinds.md``."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from sharding_support import (
    STRATEGIES,
    VOCAB,
    WIDTH,
    Grads,
    SharedGroups,
    Stack,
    clean,
    double,
    equal,
    root_of,
    token_loss,
    tokens_of,
    world_mesh,
    worst_error,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ep_overlap.testing import RankPool
from fsdp_hooks.accumulation import microbatch
from fsdp_hooks.collectives import NewGroup
from fsdp_hooks.context import Runtime
from fsdp_hooks.grad_norm import global_grad_norm
from fsdp_hooks.optimizer import shard_optimizer
from fsdp_hooks.precision import MixedPrecision
from fsdp_hooks.shard import fully_shard

TOLERANCE = 1e-12
"""float64, against one process: sums over ranks are formed in another order."""
AFTER_ADAMW = 1e-9
"""AdamW divides by the root of a second moment, which magnifies rounding."""
FLOAT32_TOLERANCE = 1e-6


# ---- whole tensors, whatever the mesh ------------------------------------------------------------


def from_all_ranks(model: nn.Module, of: Callable[[DTensor], Tensor | None]) -> Grads:
    """Whole tensors by name, from the rows of every rank; ranks that hold the same rows agree bit
    for bit, and no row is missing. Collective."""
    mine: dict[str, tuple[int, Tensor]] = {}
    shapes: dict[str, torch.Size] = {}
    for unit in root_of(model).units:
        prefix = "" if unit.name == "root" else f"{unit.name}."
        for group in unit.groups:
            for index, (slot, param) in enumerate(
                zip(group.slots, group.sharded_params, strict=True)
            ):
                assert isinstance(param, DTensor)
                name = f"{prefix}{slot.name}"
                shapes[name] = param.shape
                if (tensor := of(param)) is not None:
                    assert isinstance(tensor, DTensor)
                    mine[name] = (group.rows(index)[0], tensor.detach().to_local())
    of_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_rank, mine)
    result: Grads = dict.fromkeys(shapes)
    for name, shape in shapes.items():
        parts = [rows[name] for rows in of_rank if name in rows]
        if not parts:
            continue
        whole = torch.full(shape, torch.nan, dtype=parts[0][1].dtype)
        for first, rows in parts:
            held = whole[first : first + len(rows)]
            assert held.isnan().all() or torch.equal(held, rows), name
            held.copy_(rows)
        assert not whole.isnan().any(), name
        result[name] = whole
    return result


def all_grads(model: nn.Module) -> Grads:
    return from_all_ranks(model, lambda param: param.grad)


def all_weights(model: nn.Module) -> Grads:
    return from_all_ranks(model, lambda param: param)


# ---- parameters that are shared, missing or few --------------------------------------------------


class Ends(nn.Module):
    """One row first and last in the group, fewer than there are ranks; and a parameter that nobody
    uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(1, WIDTH))
        self.up = nn.Linear(WIDTH, WIDTH)
        self.idle = nn.Parameter(torch.ones(3))
        self.last = nn.Parameter(torch.ones(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(x * self.first)) * self.last


class Registered(nn.Module):
    """One parameter under two names of one module, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.b = self.a

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.a) @ self.b + self.frozen


class Forked(nn.Module):
    """Rank 0 uses one branch, the others the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, rank: int) -> Tensor:
        return x + (self.left if rank == 0 else self.right)(x)


class Odd(nn.Module):
    """The head is tied to the embedding, ``registered`` is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.ends = Ends()
        self.registered = Registered()
        self.forked = Forked()
        self.head = nn.Linear(WIDTH, VOCAB)
        self.head.weight = self.embed.weight
        self.rank = 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.registered(self.ends(self.embed(tokens)))
        x = self.registered(self.forked(x, rank=self.rank))
        return self.head(x)

    @property
    def inner(self) -> Sequence[nn.Module]:
        return self.ends, self.registered, self.forked


@dataclass(frozen=True, kw_only=True)
class Master:
    """The same model in one process: main weights, and a model that computes."""

    main: nn.Module
    compute: Odd

    @classmethod
    def of(cls, dtype: torch.dtype) -> Self:
        models: list[Odd] = []
        for own in (torch.float64 if dtype is torch.float64 else torch.float32, dtype):
            torch.manual_seed(0)
            models.append(Odd().to(own))
        main, compute = models
        return cls(main=main, compute=compute)

    def backward(self, rank: int, tokens: Tensor, divisor: int) -> None:
        """Add one rank's and microbatch's gradient, in the main dtype."""
        with torch.no_grad():
            for ours, theirs in zip(self.compute.parameters(), self.main.parameters(), strict=True):
                ours.copy_(theirs)
        self.compute.rank = rank
        self.compute.zero_grad()
        token_loss(self.compute, tokens).backward()
        for ours, theirs in zip(self.compute.parameters(), self.main.parameters(), strict=True):
            if not theirs.requires_grad:
                continue
            if theirs.grad is None:
                theirs.grad = torch.zeros_like(theirs)
            if ours.grad is not None:
                theirs.grad += ours.grad.to(theirs.dtype) / divisor


def train_odd(strategy: str, dtype: torch.dtype, groups: SharedGroups) -> tuple[float, float]:
    """Two AdamW steps of three microbatches. Worst errors of gradients and weights."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mp = None if dtype is torch.float64 else MixedPrecision(param_dtype=dtype)
    master = Master.of(dtype)
    torch.manual_seed(0)
    model = Odd() if mp else Odd().double()
    for module in model.inner:
        fully_shard(module, mesh=world_mesh(), strategy=strategy, mp=mp)
    runtime = Runtime(new_group=groups)
    fully_shard(model, mesh=world_mesh(), strategy=strategy, mp=mp, runtime=runtime)
    model.rank = rank
    assert model.registered.a is model.registered.b
    optimizer = shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    plain = torch.optim.AdamW(master.main.parameters(), lr=0.01)
    grads = 0.0
    for step in range(2):
        optimizer.zero_grad()
        plain.zero_grad()
        for k in range(3):
            with microbatch(model, is_last=k == 2):
                token_loss(model, tokens_of(rank, 3 * step + k)).backward()
            for r in range(size):
                master.backward(r, tokens_of(r, 3 * step + k), size)
        expected = {n: p.grad for n, p in master.main.named_parameters()}
        grads = max(grads, worst_error(all_grads(model), expected))
        optimizer.step()
        plain.step()
        assert clean(root_of(model))
    weights = {n: p.detach() for n, p in master.main.named_parameters()}
    return grads, worst_error(all_weights(model), weights)


def train_odd_with_every_strategy(dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    groups = SharedGroups()
    return {strategy: train_odd(strategy, dtype, groups) for strategy in STRATEGIES}


@pytest.mark.parametrize(
    ("pool_name", "dtype", "grads", "weights"),
    [
        ("ranks2", torch.bfloat16, FLOAT32_TOLERANCE, 1e-4),
        ("ranks4", torch.float64, TOLERANCE, AFTER_ADAMW),
    ],
)
def test_tied_twice_named_twice_called_idle_and_rare_parameters_equal_one_process(
    pool_name: str,
    dtype: torch.dtype,
    grads: float,
    weights: float,
    request: pytest.FixtureRequest,
) -> None:
    # M#6164 (registered twice), fairscale#777 (called twice), M#7166 (used on some ranks), M#5976,
    # TE#3207, M#6215 (a row for some ranks alone, first and last), P#176076 (tied, uneven), M#5710.
    pool: RankPool = request.getfixturevalue(pool_name)
    for results in pool.run(train_odd_with_every_strategy, dtype):
        assert len(results) == len(STRATEGIES)
        for strategy, errors in results.items():
            assert errors[0] <= grads, strategy
            assert errors[1] <= weights, strategy


# ---- hybrid meshes -------------------------------------------------------------------------------


def hybrid_stack(mesh: DeviceMesh, strategy: str, outer: str, groups: NewGroup) -> Stack:
    model = double(Stack)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, strategy=strategy, outer_strategy=outer)
    runtime = Runtime(new_group=groups)
    fully_shard(model, mesh=mesh, strategy=strategy, outer_strategy=outer, runtime=runtime)
    return model


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def one_process(make: Callable[[Any], torch.optim.Optimizer]) -> list[tuple[Grads, Grads]]:
    """Gradients and weights after each of three steps of two microbatches on four ranks."""
    model = double(Stack)
    optimizer = make(model.parameters())
    found: list[tuple[Grads, Grads]] = []
    for step in range(3):
        optimizer.zero_grad()
        for k in range(2):
            for rank in range(4):
                (token_loss(model, tokens_of(rank, 10 * step + k)) / 2 / 4).backward()
        grads: Grads = {n: p.grad for n, p in model.named_parameters()}
        optimizer.step()
        found.append((grads, {n: p.detach().clone() for n, p in model.named_parameters()}))
    return found


def train_hybrid(
    model: Stack,
    make: Callable[[Any], torch.optim.Optimizer],
    expected: Sequence[tuple[Grads, Grads]],
) -> tuple[float, float, float]:
    """Worst errors of gradients, norm and weights, over three steps."""
    optimizer = shard_optimizer(make(model.parameters()))
    errors: list[tuple[float, float, float]] = []
    for step, (grads, weights) in enumerate(expected):
        optimizer.zero_grad()
        for k in range(2):
            with microbatch(model, is_last=k == 1):
                (token_loss(model, tokens_of(dist.get_rank(), 10 * step + k)) / 2).backward()
        norm = float(torch.nn.utils.get_total_norm([g for g in grads.values() if g is not None]))
        of_grads = worst_error(all_grads(model), grads)
        of_norm = abs(global_grad_norm(model) / norm - 1)
        optimizer.step()
        assert clean(root_of(model))
        errors.append((of_grads, of_norm, worst_error(all_weights(model), weights)))
    first, second, third = zip(*errors, strict=True)
    return max(first), max(second), max(third)


def hybrids() -> dict[str, tuple[float, float, float]]:
    """Two by two ranks; and inner or outer groups of one rank."""
    groups, found = SharedGroups(), dict[str, tuple[float, float, float]]()
    square, column, row = (
        DeviceMesh("cpu", torch.arange(4).reshape(shape)) for shape in ((2, 2), (4, 1), (1, 4))
    )
    cases = [
        (square, strategy, outer)
        for strategy in STRATEGIES
        for outer in ("no_shard", "optim")
        if (strategy, outer) != ("no_shard", "optim")
    ]
    cases += [(mesh, "optim_grads_params", "optim") for mesh in (column, row)]
    for make in (sgd, adamw):
        expected = one_process(make)
        for mesh, strategy, outer in cases:
            model = hybrid_stack(mesh, strategy, outer, groups)
            case = f"{make.__name__} {tuple(mesh.shape)} {strategy} {outer}"
            found[case] = train_hybrid(model, make, expected)
    return found


def test_hybrid_meshes_equal_one_process(ranks4: RankPool) -> None:
    # M#6489, VeOmni#184 (norm over replicas), M#3754 (strategies agree), M#3023 (scaled once).
    for results in ranks4.run(hybrids, timeout_s=120.0):
        assert len(results) == 2 * (7 + 2)
        for case, (grads, norm, weights) in results.items():
            assert max(grads, norm) <= TOLERANCE, case
            assert weights <= (AFTER_ADAMW if "adamw" in case else TOLERANCE), case


def hybrid_of_single_shards() -> list[bool]:
    """Shard groups of one rank, with prefetch: three runs."""
    groups, mesh = SharedGroups(), DeviceMesh("cpu", [[0], [1]])
    runs: list[Grads] = []
    for _ in range(3):
        model = hybrid_stack(mesh, "optim_grads_params", "optim", groups)
        token_loss(model, tokens_of(dist.get_rank())).backward()
        runs.append(all_grads(model))
    return [equal(runs[0], other) for other in runs[1:]]


def test_shard_groups_of_one_rank_are_bitwise_repeatable(ranks2: RankPool) -> None:
    # HP#623
    assert ranks2.run(hybrid_of_single_shards) == [[True, True]] * 2


def reductions_behind_a_slow_lane() -> tuple[int, bool]:
    """Of a step of two microbatches; the lane is held up while the last backward issues them."""
    model = hybrid_stack(
        DeviceMesh("cpu", [[0], [1]]), "optim_grads_params", "optim", SharedGroups()
    )
    root = root_of(model)
    for k in range(2):
        with microbatch(model, is_last=k == 1):
            loss = token_loss(model, tokens_of(dist.get_rank(), k))
            root.context.rs.run(lambda: time.sleep(0.2), word="hold")
            loss.backward()
    return root.stats.num_reduce_scatters, clean(root)


def test_outer_ranks_reduce_each_unit_once_a_step_however_late(ranks2: RankPool) -> None:
    # What the host reads of a lane that lags differs by rank; with it, the number of reductions.
    assert ranks2.run(reductions_behind_a_slow_lane) == [(1 + 3, True)] * 2
