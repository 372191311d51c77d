"""The standard path in unusual models, against one process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from sharding_support import (
    STRATEGIES,
    WIDTH,
    SharedGroups,
    Stack,
    clean,
    double,
    input_of,
    shard_stack,
    token_loss,
    tokens_of,
    uses_of,
    whole_grads,
    whole_weights,
    world_mesh,
    worst_error,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ep_overlap.testing import RankPool
from fsdp_hooks.accumulation import microbatch
from fsdp_hooks.context import Runtime
from fsdp_hooks.lifecycle import lifecycle_of
from fsdp_hooks.optimizer import shard_optimizer
from fsdp_hooks.root import FsdpRoot
from fsdp_hooks.shard import fully_shard

TOLERANCE = 1e-12
"""float64, against one process: sums over ranks are formed in another order."""

# ---- against one process, in unusual models ------------------------------------------------------


class Twice(nn.Module):
    """One unit is called twice in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(torch.tanh(self.second(torch.tanh(self.first(x)))))


class TiedInside(nn.Module):
    """Two names, one parameter, one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(torch.tanh(self.embed(x)))))


class Frozen(nn.Module):
    """A frozen unit, and a unit with a frozen bias; the frozen unit has an input that needs grad
    and is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = Pair()
        self.third = nn.Linear(WIDTH, WIDTH)
        self.second.requires_grad_(False)
        self.third.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.third(self.second(hidden, unused=hidden * 2))


class Pair(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, unused: Tensor) -> Tensor:
        return super().forward(x)


@dataclass(slots=True)
class Result:
    main: Tensor
    extra: Mapping[str, list[Tensor]]


class Nested(nn.Module):
    """Keyword inputs; outputs within dataclass, mapping and list; one input is handed through."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = NestedUnit()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        result, same = self.unit(inputs={"x": x * 2}, times=3)
        return self.last(result.main) + result.extra["list"][0] + same


class NestedUnit(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, *, inputs: dict[str, Tensor], times: int) -> tuple[Result, Tensor]:
        x = inputs["x"]
        main = torch.tanh(super().forward(x))
        return Result(main=main * times, extra={"list": [main.square()], "none": []}), x


class OwnAndChild(nn.Module):
    """A unit with a parameter of its own beside a child's (grouped experts)."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = Grouped()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.unit(x)))


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH))
        self.gate = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("th,ehk,te->tk", x, self.weight, self.gate(x).softmax(-1))


class Parts(nn.Module):
    """Calls a unit's sub-modules rather than the unit: the safety net gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.unit.forward(x))


class NoRootParameters(nn.Module):
    """The root owns nothing, and its inputs need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class SharedAsInput(nn.Module):
    """The root's own parameter is given to a unit as an input, every step."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.unit = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        return self.unit(x, self.scale)


class Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().forward(x) * scale


MODELS: Mapping[type[nn.Module], Sequence[str]] = {
    Twice: ("first", "second"),
    TiedInside: ("middle",),
    Frozen: ("first", "second", "third"),
    Nested: ("unit",),
    OwnAndChild: ("unit",),
    Parts: ("unit",),
    NoRootParameters: ("first", "second"),
    SharedAsInput: ("unit",),
}


def shard_units(model: nn.Module, strategy: str, groups: SharedGroups, depth: int = 1) -> FsdpRoot:
    for name in MODELS[type(model)]:
        fully_shard(model.get_submodule(name), mesh=world_mesh(), strategy=strategy)
    runtime = Runtime(new_group=groups, prefetch_depth=depth)
    fully_shard(model, mesh=world_mesh(), strategy=strategy, runtime=runtime)
    root = lifecycle_of(model)
    assert isinstance(root, FsdpRoot)
    return root


def train_unusual(cls: type[nn.Module]) -> dict[str, tuple[float, float, list[str], bool]]:
    """Two SGD steps of two microbatches."""
    results: dict[str, tuple[float, float, list[str], bool]] = {}
    groups = SharedGroups()
    rank, size = dist.get_rank(), dist.get_world_size()
    for strategy in STRATEGIES:
        model, reference = double(cls), double(cls)
        root = shard_units(model, strategy, groups)
        optimizer = shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        plain = torch.optim.SGD(reference.parameters(), lr=0.1)
        worst, is_clean = 0.0, True
        for step in range(2):
            optimizer.zero_grad()
            plain.zero_grad()
            for k in range(2):
                seed = 2 * step + k
                with microbatch(model, is_last=k == 1):
                    model(input_of(rank, seed)).square().mean().backward()
                for r in range(size):
                    (reference(input_of(r, seed)).square().mean() / size).backward()
            expected = {n: p.grad for n, p in reference.named_parameters()}
            worst = max(worst, worst_error(whole_grads(model), expected))
            optimizer.step()
            plain.step()
            is_clean = is_clean and clean(root)
        weights = worst_error(
            whole_weights(model), {n: p.detach() for n, p in reference.named_parameters()}
        )
        without = [name for name, param in model.named_parameters() if param.grad is None]
        is_balanced = is_clean and all(use.count == 0 for use in uses_of(model))
        results[strategy] = (worst, weights, without, is_balanced)
    return results


@pytest.mark.parametrize("cls", MODELS)
def test_unusual_models_equal_one_process(ranks2: RankPool, cls: type[nn.Module]) -> None:
    # Twice: fairscale#777. TiedInside: M#6164. Frozen: M#5710, P#95805, P#117510. OwnAndChild:
    # M#5636, M#4990. Parts: M#3796, M#5789. NoRootParameters: Megatron-LM pull request 5719.
    for results in ranks2.run(train_unusual, cls):
        for strategy in STRATEGIES:
            grads, weights, without, is_balanced = results[strategy]
            assert grads <= TOLERANCE
            assert weights <= TOLERANCE
            frozen = ["second.weight", "second.bias", "third.bias"] if cls is Frozen else []
            assert without == frozen
            assert is_balanced


def tied_state() -> tuple[list[str], int, int]:
    model = double(TiedInside)
    root = shard_units(model, "optim_grads_params", SharedGroups())
    model(input_of(0)).sum().backward()
    names = [name for name, _ in model.named_parameters()]
    assert model.head.weight is model.embed.weight
    return names, root.stats.num_reduce_scatters, len(root.root_unit.groups[0].slots)


def test_a_parameter_of_two_names_is_stored_and_reduced_once(ranks2: RankPool) -> None:
    # M#6164
    for names, num_reductions, num_slots in ranks2.run(tied_state):
        assert names == ["embed.weight", "middle.weight", "middle.bias", "head.bias"]
        assert num_reductions == 2
        assert num_slots == 2  # the shared weight, and the head's bias


def misses_of_parts(depth: int) -> tuple[int, int]:
    model = double(Parts)
    root = shard_units(model, "optim_grads_params", SharedGroups(), depth)
    model(input_of(0)).sum().backward()
    return root.stats.hook_misses, root.stats.num_all_gathers


@pytest.mark.parametrize(("depth", "misses", "gathers"), [(0, 2, 1 + 2 + 2), (1, 0, 1 + 1 + 1)])
def test_a_part_called_past_its_unit_counts_as_a_miss(
    ranks2: RankPool, depth: int, misses: int, gathers: int
) -> None:
    # M#3796, M#5789. Two linears gather for themselves, forward and backward; and the root. With
    # prefetch the first finds the unit there, and leaves it for the next use.
    assert ranks2.run(misses_of_parts, depth) == [(misses, gathers)] * 2


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.branch = nn.Linear(WIDTH, WIDTH)
        self.uses_branch = True

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.trunk(x))
        side = self.branch(x)
        return x + side if self.uses_branch else x


def branch_unused(strategy: str, when: int) -> tuple[float, bool]:
    """The branch's output is not part of microbatch ``when``'s loss."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model, reference = double(Branches), double(Branches)
    for module in (model.trunk, model.branch, model):
        fully_shard(module, mesh=world_mesh(), strategy=strategy)
    for k in range(2):
        model.uses_branch = reference.uses_branch = k != when
        with microbatch(model, is_last=k == 1):
            model(input_of(rank, k)).square().mean().backward()
        for r in range(size):
            (reference(input_of(r, k)).square().mean() / size).backward()
    root = lifecycle_of(model)
    assert isinstance(root, FsdpRoot)
    expected = {n: p.grad for n, p in reference.named_parameters()}
    return worst_error(whole_grads(model), expected), clean(root)


@pytest.mark.parametrize("when", [0, 1])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_unit_without_gradient_in_one_microbatch_keeps_the_others(
    ranks2: RankPool, strategy: str, when: int
) -> None:
    # P#83129; with no_shard the last microbatch reduces what an earlier one accumulated.
    for error, is_clean in ranks2.run(branch_unused, strategy, when):
        assert error <= TOLERANCE
        assert is_clean


class Recomputed(Stack):
    """Blocks are recomputed in backward."""

    mode: bool | None = None
    """``use_reentrant``; None: nothing is recomputed."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index in self.order:
            block = self.blocks[index]
            recomputes = self.mode is not None
            x = checkpoint(block, x, use_reentrant=self.mode) if recomputes else block(x)
        return self.head(x)


def recomputed_and_plain(mode: bool, order: Sequence[int]) -> tuple[bool, bool, bool]:
    models = [double(lambda: Recomputed(3, order)) for _ in range(2)]
    roots = [shard_stack(model) for model in models]
    models[0].mode = mode
    for step in range(2):
        for model in models:
            token_loss(model, tokens_of(dist.get_rank(), step)).backward()
    same = worst_error(*(whole_grads(model) for model in models)) <= TOLERANCE
    recomputed, plain = (root.stats for root in roots)
    is_clean = all(clean(root) for root in roots)
    return same, recomputed.num_reduce_scatters == plain.num_reduce_scatters, is_clean


@pytest.mark.parametrize(("mode", "order"), [(False, (0, 1, 2, 1)), (True, (0, 1, 2))])
def test_recomputed_units_gather_again_and_reduce_once(
    ranks2: RankPool, mode: bool, order: tuple[int, ...]
) -> None:
    # AM#3958; fairscale#777 (block 1 is called twice). ``mode``: use_reentrant.
    assert ranks2.run(recomputed_and_plain, mode, order) == [(True, True, True)] * 2


def test_a_unit_recomputed_twice_sums_both_contributions(ranks2: RankPool) -> None:
    # fairscale#777. With use_reentrant its forward leaves no graph, so the first of its two
    # backwards cannot know of the second: each is reduced on its own.
    for same, _, is_clean in ranks2.run(recomputed_and_plain, True, (0, 1, 2, 1)):
        assert same
        assert is_clean
