"""Sharded training against one process: gradients, weights, norms, scaling."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharding_support import (
    STRATEGIES,
    SharedGroups,
    Stack,
    clean,
    double,
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

from ep_overlap.testing import RankPool
from fsdp_hooks.accumulation import microbatch
from fsdp_hooks.collectives import NewGroup
from fsdp_hooks.grad_norm import global_grad_norm
from fsdp_hooks.optimizer import shard_optimizer
from fsdp_hooks.shard import fully_shard

TOLERANCE = 1e-12
"""float64, against one process: sums over ranks are formed in another order."""


# ---- parity with one process ---------------------------------------------------------------------


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def train_beside_one_process(
    mesh: DeviceMesh,
    strategy: str,
    make: Callable[[Any], torch.optim.Optimizer],
    groups: NewGroup,
) -> dict[str, float]:
    """Three steps of two microbatches; worst errors of gradients, weights and norm."""
    size, rank = mesh.size(), mesh.get_local_rank()
    model, reference = double(Stack), double(Stack)
    root = shard_stack(model, mesh=mesh, strategy=strategy, groups=groups)
    optimizer = shard_optimizer(make(model.parameters()))
    expected = make(reference.parameters())
    errors = {"grads": 0.0, "weights": 0.0, "norm": 0.0}
    for step in range(3):
        optimizer.zero_grad()
        expected.zero_grad()
        for k in range(2):
            with microbatch(model, is_last=k == 1):
                (token_loss(model, tokens_of(rank, 10 * step + k)) / 2).backward()
            for r in range(size):
                (token_loss(reference, tokens_of(r, 10 * step + k)) / 2 / size).backward()
        reference_grads = {n: p.grad for n, p in reference.named_parameters()}
        errors["grads"] = max(errors["grads"], worst_error(whole_grads(model), reference_grads))
        norm = global_grad_norm(model.parameters(), group=mesh.get_group())
        squares = [g.square().sum() for g in reference_grads.values() if g is not None]
        errors["norm"] = max(errors["norm"], abs(norm / float(sum(squares)) ** 0.5 - 1))
        optimizer.step()
        expected.step()
        weights = whole_weights(model)
        error = worst_error(weights, {n: p.detach() for n, p in reference.named_parameters()})
        errors["weights"] = max(errors["weights"], error)
        assert clean(root)
    return errors


def parity_on_every_size() -> dict[str, dict[str, float]]:
    """Groups of 1, 2, 3 (and the odd one out) and 4 ranks, side by side."""
    errors: dict[str, dict[str, float]] = {}
    for size in range(1, 5):
        meshes = [DeviceMesh("cpu", list(range(4))[i : i + size]) for i in range(0, 4, size)]
        mesh = meshes[dist.get_rank() // size]
        groups = SharedGroups()
        for strategy in STRATEGIES:
            for make in (sgd, adamw) if size == 3 else (sgd,):
                key = f"{strategy}, {make.__name__}, {size} ranks"
                errors[key] = train_beside_one_process(mesh, strategy, make, groups)
    return errors


def test_gradients_weights_and_norm_equal_one_process_on_1_to_4_ranks(ranks4: RankPool) -> None:
    # M#3754 (strategies agree), P#176076 and M#5976 (a row for some ranks alone), Fast-LLM#550
    # (one rank), M#6489 (norm): Block.gain has one row, the others do not divide by the ranks.
    results = ranks4.run(parity_on_every_size, timeout_s=240.0)
    assert len(results[0]) == (4 + 1) * len(STRATEGIES)
    for errors in results:
        for case, error in errors.items():
            worst = max(error["grads"], error["norm"])
            assert worst <= TOLERANCE, case
            # AdamW divides by the root of a second moment, which magnifies rounding.
            assert error["weights"] <= (1e-9 if "adamw" in case else TOLERANCE), case


class Experts(nn.Module):
    """A rank's experts: this rank holds those from ``first`` on."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_experts, 5, 5) / 4)

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        return torch.einsum("th,thk->tk", x, self.weight[expert])


class MoE(nn.Module):
    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.dense = nn.Linear(5, 5)
        self.experts = Experts(num_experts)

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        return self.experts(torch.tanh(self.dense(x)), expert)


def expert_parity(strategy: str) -> tuple[float, float, float, float]:
    """EP2 x 2 data-parallel groups. A rank computes the tokens that EP would have sent it: those
    of its EP pair that chose its expert. The dense loss of a token stays on its own rank, so the
    dense gradient is checked by a second run without exchange."""
    rank = dist.get_rank()
    dense_mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    expert_meshes = [DeviceMesh("cpu", [first, first + 2]) for first in (0, 1)]
    which = rank % 2
    torch.manual_seed(3)
    full = MoE(2).double()
    x = torch.randn(4, 6, 5, dtype=torch.float64)
    expert = torch.arange(24).reshape(4, 6) % 2
    pair = [rank - which, rank - which + 1]

    model = MoE(1).double()
    model.dense.load_state_dict(full.dense.state_dict())
    model.experts.weight.data.copy_(full.experts.weight[which : which + 1])
    experts = frozenset([model.experts.weight])

    def mesh_of(name: str, param: nn.Parameter) -> DeviceMesh:
        assert name in ("dense.weight", "dense.bias", "experts.weight")
        return expert_meshes[which] if param in experts else dense_mesh

    fully_shard(model, mesh=mesh_of, strategy=strategy)
    optimizer = shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        full.zero_grad()
        tokens = torch.cat([x[r][expert[r] == which] for r in pair])
        model(tokens, torch.zeros(len(tokens), dtype=torch.int64)).square().sum().backward()
        for r in range(4):
            (full(x[r], expert[r]).square().sum() / 4).backward()
        grads = whole_grads(model)
        expected = {
            "dense.weight": full.dense.weight.grad,
            "dense.bias": full.dense.bias.grad,
            "experts.weight": full.experts.weight.grad[which : which + 1],
        }
        norm = global_grad_norm(model.parameters())
        squares = [p.grad.square().sum() for p in full.parameters() if p.grad is not None]
        norm_error = abs(norm / float(sum(squares)) ** 0.5 - 1)
        optimizer.step()
        with torch.no_grad():
            for param in full.parameters():
                param -= 0.1 * param.grad
    weights = whole_weights(model)
    expected_weight = full.experts.weight.detach()[which : which + 1]
    weight_error = worst_error({"w": weights["experts.weight"]}, {"w": expected_weight})
    dense = worst_error({"w": grads["dense.weight"]}, {"w": expected["dense.weight"]})
    routed = worst_error({"w": grads["experts.weight"]}, {"w": expected["experts.weight"]})
    return dense, routed, norm_error, weight_error


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dense_and_expert_gradients_are_divided_by_the_full_data_parallel_size(
    ranks4: RankPool, strategy: str
) -> None:
    # M#5956, M#5656, P#160285; M#6489, P#180346 for the norm over two meshes.
    for errors in ranks4.run(expert_parity, strategy):
        assert max(errors) <= TOLERANCE


class Exact(nn.Module):
    """Small integers: every sum in float64 is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5, bias=False)
        self.second = nn.Linear(5, 3, bias=False)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.arange(param.numel()).reshape(param.shape) % 5 - 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def accumulated(strategy: str, num_microbatches: int) -> dict[str, Tensor | None]:
    model = double(Exact)
    fully_shard(model.first, mesh=world_mesh(), strategy=strategy)
    fully_shard(model, mesh=world_mesh(), strategy=strategy)
    x = torch.arange(6, dtype=torch.float64).reshape(2, 3) + dist.get_rank()
    for k in range(num_microbatches):
        with microbatch(model, is_last=k == num_microbatches - 1):
            model(x).square().sum().backward()
    return whole_grads(model)


def one_and_four(strategy: str) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    return accumulated(strategy, 1), accumulated(strategy, 4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_four_microbatches_of_the_same_data_give_exactly_four_times_one(
    ranks2: RankPool, strategy: str
) -> None:
    # M#3023, M#5949: every contribution is scaled once.
    for one, four in ranks2.run(one_and_four, strategy):
        for name, grad in one.items():
            assert grad is not None
            assert grad.abs().max() > 0
            assert torch.equal(four[name], 4 * grad), name


def grads_over_two_steps(strategy: str) -> tuple[float, float, bool]:
    model, reference = double(Stack), double(Stack)
    shard_stack(model, strategy=strategy)
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(2):
        token_loss(model, tokens_of(rank, step)).backward()
        for r in range(size):
            (token_loss(reference, tokens_of(r, step)) / size).backward()
    expected = {n: p.grad for n, p in reference.named_parameters()}
    both = worst_error(whole_grads(model), expected)
    # In place (set_to_none=False), between a forward and its backward.
    loss = token_loss(model, tokens_of(rank, 2))
    model.zero_grad(set_to_none=False)
    loss.backward()
    reference.zero_grad()
    for r in range(size):
        (token_loss(reference, tokens_of(r, 2)) / size).backward()
    expected = {n: p.grad for n, p in reference.named_parameters()}
    alone = worst_error(whole_grads(model), expected)
    model.zero_grad()
    return both, alone, all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_grad_accumulates_until_zero_grad_even_within_a_step(
    ranks2: RankPool, strategy: str
) -> None:
    for both, alone, is_none in ranks2.run(grads_over_two_steps, strategy):
        assert both <= TOLERANCE
        assert alone <= TOLERANCE
        assert is_none


def same_thrice() -> list[dict[str, Tensor | None]]:
    results = []
    mesh = own_mesh()
    for _ in range(3):
        model = double(Stack)
        shard_stack(model, mesh=mesh)
        token_loss(model, tokens_of(0)).backward()
        results.append(whole_grads(model))
    return results


def own_mesh() -> DeviceMesh:
    """A mesh of this rank alone; every rank makes all of them."""
    return [DeviceMesh("cpu", [rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


def test_a_mesh_of_one_rank_is_bitwise_repeatable(ranks2: RankPool) -> None:
    # HP#623
    for first, second, third in ranks2.run(same_thrice):
        for name, grad in first.items():
            assert grad is not None
            assert torch.equal(grad, second[name])
            assert torch.equal(grad, third[name])
