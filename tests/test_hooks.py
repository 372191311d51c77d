"""The standard path: module hooks that gather, prefetch, release and reduce."""

import gc
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

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
    issued,
    shard_stack,
    token_loss,
    tokens_of,
    whole_grads,
    whole_weights,
    world_mesh,
    worst_error,
)
from torch import Tensor, nn

from ep_overlap.testing import RankPool
from fsdp_hooks.accumulation import microbatch
from fsdp_hooks.collectives import Communicator
from fsdp_hooks.context import Runtime
from fsdp_hooks.fully_shard import fully_shard
from fsdp_hooks.lifecycle import Driver, lifecycle_of
from fsdp_hooks.optimizer import shard_optimizer
from fsdp_hooks.root import FsdpRoot
from fsdp_hooks.streams import StreamKind

TOLERANCE = 1e-12
"""float64, against one process: sums over ranks are formed in another order."""

Grads = dict[str, Tensor | None]


def equal(ours: Grads, theirs: Grads) -> bool:
    """Bitwise."""
    assert ours.keys() == theirs.keys()
    return all(
        a is b if a is None or b is None else torch.equal(a, b)
        for a, b in ((ours[name], theirs[name]) for name in ours)
    )


# ---- order ---------------------------------------------------------------------------------------

FORWARD_BACKWARD = """
UNSHARD.root UNSHARD.blocks.0
UNSHARD.blocks.1 F0 RESHARD.blocks.0
UNSHARD.blocks.2 F1 RESHARD.blocks.1
F2 RESHARD.blocks.2
UNSHARD.blocks.2
UNSHARD.blocks.1 B2 REDUCE.blocks.2 RESHARD.blocks.2
UNSHARD.blocks.0 B1 REDUCE.blocks.1 RESHARD.blocks.1
B0 REDUCE.blocks.0 RESHARD.blocks.0
REDUCE.root RESHARD.root
"""
"""What one forward and backward issues, and the units' own work between. The gather of the next
unit is issued before this one's work, the release of the former before that."""


def words_of_two_steps(num_blocks: int, order: Sequence[int] | None) -> list[list[str]]:
    model = double(lambda: Stack(num_blocks, order))
    root = shard_stack(model, kind=StreamKind.INLINE)
    steps: list[list[str]] = []
    for _ in range(2):
        with issued(root) as recording:
            token_loss(model, tokens_of(dist.get_rank())).backward()
        steps.append([word for word in recording.words if not word.startswith("end of")])
        assert clean(root)
    return steps


def test_one_unit_is_gathered_ahead_in_forward_and_in_backward(ranks2: RankPool) -> None:
    # M#3796, M#3797: one gather for each window of use, one reduction for each unit.
    for steps in ranks2.run(words_of_two_steps, 3, None):
        for words in steps:
            assert words == FORWARD_BACKWARD.split()


def test_units_registered_out_of_order_are_prefetched_in_real_order_from_step_two(
    ranks2: RankPool,
) -> None:
    # P#137348: registered 0, 1, 2 and run 2, 0, 1.
    order = (2, 0, 1)
    for first, second in ranks2.run(words_of_two_steps, 3, order):
        # The guess was block 0; the others are gathered on demand.
        assert first[:4] == ["UNSHARD.root", "UNSHARD.blocks.0", "UNSHARD.blocks.2", "F2"]
        expected = FORWARD_BACKWARD
        for position, index in enumerate(order):
            for letter in ("F", "B", "blocks."):
                expected = expected.replace(f"{letter}{position}", f"{letter}#{index}")
        assert second == expected.replace("#", "").split()


def order_right_and_skipped() -> tuple[float, float, int, list[str]]:
    """Out of order, then one unit skipped, with SGD between: no stale copy is used."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model, reference = double(lambda: Stack(3, (2, 0, 1))), double(lambda: Stack(3, (2, 0, 1)))
    root = shard_stack(model)
    optimizer = shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    orders = ((2, 0, 1), (2, 1), (2, 0, 1), (2, 0, 1), (0, 1, 2), (0, 1, 2))
    worst = 0.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, order in enumerate(orders):
            model.order, reference.order = list(order), list(order)
            optimizer.zero_grad()
            plain.zero_grad()
            token_loss(model, tokens_of(rank, step)).backward()
            for r in range(size):
                (token_loss(reference, tokens_of(r, step)) / size).backward()
            expected = {n: p.grad for n, p in reference.named_parameters()}
            worst = max(worst, worst_error(whole_grads(model), expected))
            optimizer.step()
            plain.step()
            assert clean(root)
    weights = worst_error(
        whole_weights(model), {n: p.detach() for n, p in reference.named_parameters()}
    )
    messages = [str(w.message) for w in caught]
    return worst, weights, root.stats.hook_misses, messages


def test_a_wrong_guess_of_the_next_unit_leaves_no_stale_copy(ranks2: RankPool) -> None:
    # P#137348
    for grads, weights, num_misses, messages in ranks2.run(order_right_and_skipped):
        assert max(grads, weights) <= TOLERANCE
        assert num_misses == 0
        assert len(messages) == 1  # of three changes
        assert messages[0].startswith("the order of units differs from the step before")


def peaks(num_blocks: int) -> tuple[int, int, int, int]:
    model = double(lambda: Stack(num_blocks))
    root = shard_stack(model)
    for _ in range(2):
        token_loss(model, tokens_of(0)).backward()
    stats = root.stats
    assert clean(root)
    bound = root.root_unit.unsharded_bytes + 2 * root.inner_units[0].unsharded_bytes
    return stats.peak_unsharded_bytes, bound, stats.num_all_gathers, stats.num_reduce_scatters


@pytest.mark.parametrize("num_blocks", [3, 8])
def test_the_root_one_unit_and_its_successor_are_all_that_is_unsharded(
    ranks2: RankPool, num_blocks: int
) -> None:
    # L#158: bounded, whatever the depth. M#3796: gathers are counted.
    for peak, bound, num_gathers, num_reductions in ranks2.run(peaks, num_blocks):
        assert peak == bound
        assert num_gathers == 2 * (1 + 2 * num_blocks)
        assert num_reductions == 2 * (1 + num_blocks)


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


def shard_units(model: nn.Module, strategy: str, groups: SharedGroups) -> FsdpRoot:
    for name in MODELS[type(model)]:
        fully_shard(model.get_submodule(name), mesh=world_mesh(), strategy=strategy)
    fully_shard(model, mesh=world_mesh(), strategy=strategy, runtime=Runtime(new_group=groups))
    root = lifecycle_of(model)
    assert isinstance(root, FsdpRoot)
    return root


def input_of(rank: int, seed: int = 0) -> Tensor:
    """float64 ``[3, WIDTH]``."""
    generator = torch.Generator().manual_seed(1000 * seed + rank + 1)
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=generator)


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


def uses_of(model: nn.Module) -> list[object]:
    hooks = model.fsdp_membership.hooks
    return list(hooks._uses.values())


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


def misses_of_parts() -> tuple[int, int]:
    model = double(Parts)
    root = shard_units(model, "optim_grads_params", SharedGroups())
    model(input_of(0)).sum().backward()
    return root.stats.hook_misses, root.stats.num_all_gathers


def test_a_part_called_past_its_unit_counts_as_a_miss(ranks2: RankPool) -> None:
    # M#3796, M#5789. Two linears gather for themselves, forward and backward; and the root.
    for num_misses, num_gathers in ranks2.run(misses_of_parts):
        assert num_misses == 1  # the first of them had been prefetched
        assert num_gathers == 1 + 2 + 2


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


# ---- forwards and backwards in other orders ------------------------------------------------------


def gradients(
    drive: Callable[[Stack], None], strategy: str = "optim_grads_params"
) -> tuple[Grads, FsdpRoot]:
    model = double(Stack)
    root = shard_stack(model, strategy=strategy)
    drive(model)
    assert clean(root)
    assert root.context.driver is Driver.REST
    return whole_grads(model), root


def both_orders(strategy: str) -> bool:
    rank = dist.get_rank()

    def in_turn(model: Stack) -> None:
        for k in range(2):
            with microbatch(model, is_last=k == 1):
                token_loss(model, tokens_of(rank, k)).backward()

    def forwards_first(model: Stack) -> None:
        losses = [token_loss(model, tokens_of(rank, k)) for k in range(2)]
        for k, loss in enumerate(losses):
            with microbatch(model, is_last=k == 1):
                loss.backward()

    return equal(gradients(in_turn, strategy)[0], gradients(forwards_first, strategy)[0])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_forwards_then_two_backwards_equal_one_after_the_other(
    ranks2: RankPool, strategy: str
) -> None:
    # P#139404
    assert ranks2.run(both_orders, strategy) == [True, True]


def reductions_under_nesting() -> list[int]:
    model = double(Stack)
    root = shard_stack(model, strategy="no_shard")
    counts: list[int] = []

    def step() -> None:
        token_loss(model, tokens_of(0)).backward()
        counts.append(root.stats.num_all_reduces)

    with microbatch(model, is_last=False):
        step()
        with microbatch(model, is_last=False):
            step()
        step()
        with microbatch(model, is_last=True):
            step()
        step()
    step()
    return counts


def test_the_outer_context_is_back_in_force_after_the_inner_one(ranks2: RankPool) -> None:
    # cosmos-framework#161, #162: four units, reduced in the inner True and in the step outside.
    for counts in ranks2.run(reductions_under_nesting):
        assert counts == [0, 0, 0, 4, 4, 8]


def with_and_without_evaluation(mode: str) -> bool:
    rank = dist.get_rank()
    results: list[Grads] = []
    for evaluates in (False, True):
        model = double(Stack)
        root = shard_stack(model)
        optimizer = shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        for step in range(3):
            optimizer.zero_grad()
            loss = token_loss(model, tokens_of(rank, step))
            if evaluates and mode == "between forward and backward":
                with torch.no_grad():
                    token_loss(model, tokens_of(rank, 9))
            loss.backward()
            if evaluates:
                match mode:
                    case "no_grad":
                        with torch.no_grad():
                            token_loss(model.eval(), tokens_of(rank, 9))
                        model.train()
                    case "inference_mode":
                        with torch.inference_mode():
                            token_loss(model, tokens_of(rank, 9))
                    case "forward without backward":
                        token_loss(model, tokens_of(rank, 9))
                    case _:
                        pass
            optimizer.step()
            assert mode == "forward without backward" or clean(root)
        results.append(whole_weights_at_rest(model))
    return equal(*results)


def whole_weights_at_rest(model: nn.Module) -> Grads:
    lifecycle_of(model).abort()  # a forward without backward keeps the root gathered
    return whole_weights(model)


@pytest.mark.parametrize(
    "mode",
    [
        "no_grad",
        "inference_mode",
        "forward without backward",
        "between forward and backward",
    ],
)
def test_evaluation_leaves_training_bitwise_the_same(ranks2: RankPool, mode: str) -> None:
    # M#3155, M#4717; P#137348 for the forward whose gathered root the optimizer outdates.
    assert ranks2.run(with_and_without_evaluation, mode) == [True, True]


class InnerLoss(Stack):
    """Keeps an inner output, for a loss that the root does not return."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index in self.order:
            x = self.blocks[index](x)
            if index == 1:
                self.kept = x
        return self.head(x)


def loss_of_inner_output() -> tuple[float, list[str], bool]:
    rank, size = dist.get_rank(), dist.get_world_size()
    model, reference = double(InnerLoss), double(InnerLoss)
    root = shard_stack(model)
    for _ in range(2):
        model(tokens_of(rank))
        kept = model.kept
        kept.square().mean().backward(retain_graph=True)
        kept.mean().backward()  # a second backward, which again does not pass the root's output
        for r in range(size):
            reference(tokens_of(r))
            (reference.kept.square().mean() / size).backward(retain_graph=True)
            (reference.kept.mean() / size).backward()
    expected = {n: p.grad for n, p in reference.named_parameters()}
    missing = [n for n, g in whole_grads(model).items() if g is None]
    got = {n: g for n, g in whole_grads(model).items() if "head" not in n}
    return (
        worst_error(got, {n: g for n, g in expected.items() if "head" not in n}),
        missing,
        clean(root),
    )


def test_a_backward_from_an_inner_output_ends_with_every_reduction(ranks2: RankPool) -> None:
    # P#144535. The root's embedding gets its gradient though no hook of the root fired.
    for error, missing, is_clean in ranks2.run(loss_of_inner_output):
        assert error <= TOLERANCE
        # Block 2 took no part. Nor did the head, but its unit reduced, for the embedding.
        assert len(missing) == 7
        assert all(name.startswith("blocks.2.") for name in missing)
        assert is_clean


# ---- memory --------------------------------------------------------------------------------------


class SlowReductions:
    """A ``Communicator`` whose reductions take 20 ms."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.num_ranks = inner.num_ranks
        self.rank = inner.rank

    def all_gather(self, output: Tensor, shard: Tensor) -> None:
        self._inner.all_gather(output, shard)

    def reduce_scatter(self, output: Tensor, whole: Tensor) -> None:
        time.sleep(0.02)
        self._inner.reduce_scatter(output, whole)

    def all_reduce(self, tensor: Tensor) -> None:
        self._inner.all_reduce(tensor)


def whole_gradients_alive(num_blocks: int) -> int:
    """The most units whose whole gradients wait, seen from the backward of each unit."""
    model = double(lambda: Stack(num_blocks))
    root = shard_stack(model)
    context = root.context
    context._communicators = {
        ranks: replace(c, reduce=SlowReductions(c.reduce))
        for ranks, c in context._communicators.items()
    }
    counts: list[int] = []

    def count(grad: Tensor) -> None:
        counts.append(sum(len(g._sealed) for unit in root.units for g in unit.groups))

    for block in model.blocks:
        block.down.register_forward_hook(lambda _, __, out: out.register_hook(count) and None)
    token_loss(model, tokens_of(0)).backward()
    return max(counts)


def test_whole_gradients_do_not_pile_up_behind_a_slow_link(ranks2: RankPool) -> None:
    # L#158: bounded by a constant, whatever the depth.
    for num_alive in ranks2.run(whole_gradients_alive, 8):
        assert 1 <= num_alive <= 2


def saved_tensors_survive() -> tuple[bool, bool]:
    """Releases free the storage and gathers write it: views that autograd saved stay valid."""
    model = double(Stack)
    root = shard_stack(model)
    loss = token_loss(model, tokens_of(dist.get_rank()))
    units = root.inner_units
    root.context.ag.synchronize()  # the release is queued
    freed = all(not g.storage.is_allocated for unit in units for g in unit.groups)
    versions = [p._version for unit in root.units for g in unit.groups for p in g.compute_params]
    for unit in units:  # gathered and released once more before the backward
        unit.unshard()
        unit.reshard()
    loss.backward()
    after = [p._version for unit in root.units for g in unit.groups for p in g.compute_params]
    disturbed = whole_grads(model)
    plain = double(Stack)
    shard_stack(plain)
    token_loss(plain, tokens_of(dist.get_rank())).backward()
    return freed and versions == after, equal(disturbed, whole_grads(plain))


def test_saved_tensors_survive_release_and_gathering(ranks2: RankPool) -> None:
    assert ranks2.run(saved_tensors_survive) == [(True, True)] * 2


def graph_goes_without_collector(has_backward: bool) -> tuple[bool, int]:
    model = double(NoRootParameters)
    shard_units(model, "optim_grads_params", SharedGroups())
    model(input_of(0)).sum().backward()
    gc.collect()
    gc.disable()
    try:
        x = (input_of(0).requires_grad_() * 2).tanh()
        activations = [weakref.ref(x)]
        handle = model.first.register_forward_hook(
            lambda _, __, out: activations.append(weakref.ref(out))
        )
        loss = model(x).square().sum()
        handle.remove()
        if has_backward:
            loss.backward()
        del x, loss
        num_alive = sum(a() is not None for a in activations)
        num_open = sum(len(use.open_calls) for use in uses_of(model))
    finally:
        gc.enable()
    return num_alive == 0, num_open


@pytest.mark.parametrize("has_backward", [True, False])
def test_a_graph_goes_without_a_run_of_the_garbage_collector(
    ranks2: RankPool, has_backward: bool
) -> None:
    # M#4909, M#4908. Without backward too: its calls are open no more.
    assert ranks2.run(graph_goes_without_collector, has_backward) == [(True, 0)] * 2


class ReturnsWeight(nn.Linear):
    def __init__(self, what: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.what = what

    def forward(self, x: Tensor) -> object:
        match self.what:
            case "parameter":
                return super().forward(x), self.weight
            case "view":
                return {"out": super().forward(x), "row": self.weight[0]}
            case "clone":
                return super().forward(x), self.weight.clone()
            case _:
                return Opaque()


class Opaque:
    pass


def what_units_return() -> dict[str, str]:
    messages: dict[str, str] = {}
    for what in ("parameter", "view", "clone", "opaque"):
        for is_inner in (False, True):
            unit = ReturnsWeight(what).double()
            fully_shard(unit, mesh=world_mesh())
            model: nn.Module = unit
            if is_inner:
                model = nn.Sequential(unit)
                fully_shard(model, mesh=world_mesh())
            try:
                model(input_of(0))
            except (RuntimeError, TypeError) as error:
                messages[f"{what}, inner={is_inner}"] = str(error)
                root = lifecycle_of(model)
                assert isinstance(root, FsdpRoot)
                assert is_inner is False or clean(root)
    return messages


def test_a_unit_that_returns_its_released_weights_is_refused(ranks2: RankPool) -> None:
    # P#173794
    for messages in ranks2.run(what_units_return):
        for what in ("parameter", "view"):
            for is_inner in (False, True):
                assert "returns one of its parameters" in messages[f"{what}, inner={is_inner}"]
        assert "unit 0 returns a Opaque" in messages["opaque, inner=True"]
        assert "clone, inner=True" not in messages


# ---- failures ------------------------------------------------------------------------------------


def step_after_failure(where: str, strategy: str) -> tuple[str, bool, bool]:
    """Fail once, the same on all ranks; then two clean steps, compared with undisturbed ones."""
    rank = dist.get_rank()
    model, undisturbed = double(Stack), double(Stack)
    root = shard_stack(model, strategy=strategy)
    shard_stack(undisturbed, strategy=strategy)

    def fail(*_: object) -> None:
        raise ValueError("x")

    token_loss(model, tokens_of(rank)).backward()
    token_loss(undisturbed, tokens_of(rank)).backward()
    message = ""
    if where == "forward":
        handle = model.blocks[1].up.register_forward_hook(fail)
    else:
        handle = model.blocks[1].up.register_full_backward_hook(fail)
    try:
        token_loss(model, tokens_of(rank, 1)).backward()
    except ValueError as error:
        message = str(error)
    handle.remove()
    is_clean_at_once = clean(root)
    for step in (2, 3):
        token_loss(model, tokens_of(rank, step)).backward()
        token_loss(undisturbed, tokens_of(rank, step)).backward()
        assert clean(root)
    same = equal(whole_grads(model), whole_grads(undisturbed))
    assert all(use.count == 0 for use in uses_of(model))
    return message, is_clean_at_once, same


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception_the_next_step_is_as_if_nothing_had_happened(
    ranks2: RankPool, where: str, strategy: str
) -> None:
    # P#83151: the exception comes out as it was raised.
    for message, is_clean_at_once, same in ranks2.run(step_after_failure, where, strategy):
        assert message == "x"
        assert same
        if where == "forward":
            assert is_clean_at_once


def second_backward_after_failure() -> tuple[bool, bool]:
    """F0 F1, B0 fails, B1 runs: B1's gradients are there and B0's are not."""
    rank = dist.get_rank()
    model, alone = double(Stack), double(Stack)
    root = shard_stack(model)
    shard_stack(alone)
    losses = [token_loss(model, tokens_of(rank, k)) for k in range(2)]
    fails = [True]

    def fail_once(*_: object) -> None:
        if fails.pop():
            raise ValueError("x")

    # On the first microbatch's graph alone.
    node = losses[0].grad_fn
    assert node is not None
    node.register_hook(lambda *_: fail_once())
    for loss in losses:
        try:
            loss.backward()
        except ValueError:
            assert root.context.driver is Driver.HOOKS
    token_loss(alone, tokens_of(rank, 1)).backward()
    return equal(whole_grads(model), whole_grads(alone)), clean(root)


def test_a_backward_after_a_failed_one_starts_anew(ranks2: RankPool) -> None:
    assert ranks2.run(second_backward_after_failure) == [(True, True)] * 2


def failed_lane() -> tuple[str, bool, bool]:
    """A gather fails on every rank: the step is dropped, the next one is clean."""
    rank = dist.get_rank()
    model, undisturbed = double(Stack), double(Stack)
    root = shard_stack(model)
    shard_stack(undisturbed)
    group = root.inner_units[2].groups[0]
    main, group._main = group._main, torch.empty(1, dtype=torch.float32)
    message = ""
    try:
        token_loss(model, tokens_of(rank))
    except BaseException as error:  # noqa: BLE001
        message = " ".join(getattr(error, "__notes__", []))
    at_rest = clean(root) and root.context.driver is Driver.REST
    group._main = main
    token_loss(model, tokens_of(rank)).backward()
    token_loss(undisturbed, tokens_of(rank)).backward()
    return message, at_rest, equal(whole_grads(model), whole_grads(undisturbed))


def test_a_failed_gather_comes_out_with_its_word_and_ends_the_step(ranks2: RankPool) -> None:
    for message, at_rest, same in ranks2.run(failed_lane):
        assert "raised in UNSHARD.blocks.2" in message
        assert at_rest
        assert same


# ---- two drivers ---------------------------------------------------------------------------------


def begin_twice() -> list[str]:
    model = double(Stack)
    root = shard_stack(model)
    messages: list[str] = []
    for first, second in ((Driver.HOOKS, Driver.SCHEDULE), (Driver.SCHEDULE, Driver.SCHEDULE)):
        root.begin(first)
        try:
            root.begin(second)
        except RuntimeError as error:
            messages.append(str(error))
        root.end()
    unit = root.inner_units[0]
    try:
        unit.reshard()
    except RuntimeError as error:
        messages.append(str(error))
    return messages


def test_begin_within_a_step_raises_and_so_does_a_release_of_what_is_not_gathered(
    ranks2: RankPool,
) -> None:
    for hooks, schedule, reshard in ranks2.run(begin_twice):
        assert hooks.startswith("begin(schedule) while hooks drives the step")
        assert schedule.startswith("begin(schedule) while schedule drives the step")
        assert reshard.startswith("reshard() of unit blocks.0: its state is sharded, expected")


def by_hand(model: Stack, root: FsdpRoot, tokens: Tensor, skipped: Sequence[str] = ()) -> None:
    """A schedule of the simplest kind: gather all, forward, backward, reduce all."""
    root.begin(Driver.SCHEDULE)
    for unit in root.units:
        if unit.name not in skipped:
            unit.unshard().wait()
            unit.unshard().wait()  # idempotent
    root.pre_backward(5)
    token_loss(model, tokens).backward()
    for unit in root.units:
        unit.seal(5, is_last=True)
        unit.reduce()
    root.end()


def alternate() -> tuple[bool, int, int, bool]:
    rank = dist.get_rank()
    mixed, standard = double(Stack), double(Stack)
    root = shard_stack(mixed)
    shard_stack(standard)
    for step in range(4):
        token_loss(standard, tokens_of(rank, step)).backward()
        if step % 2:
            token_loss(mixed, tokens_of(rank, step)).backward()
        else:
            by_hand(mixed, root, tokens_of(rank, step))
    same = equal(whole_grads(mixed), whole_grads(standard))
    misses = root.stats.hook_misses
    by_hand(mixed, root, tokens_of(rank, 4), skipped=["blocks.1"])
    return same, misses, root.stats.hook_misses, clean(root)


def test_the_standard_path_and_a_schedule_may_alternate(ranks2: RankPool) -> None:
    # P#164756, P#165467: gathering twice is idempotent. The last step left out a gather, which
    # the safety net made good, once, and which the end released.
    for same, misses, misses_after, is_clean in ranks2.run(alternate):
        assert same
        assert misses == 0
        assert misses_after == 1
        assert is_clean
