"""Uses are counted per unit: in which order forwards and backwards come makes no difference."""

import random
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import pytest
import torch
import torch.distributed as dist
from sharding_support import (
    STRATEGIES,
    WIDTH,
    Grads,
    SharedGroups,
    Stack,
    clean,
    double,
    equal,
    input_of,
    root_of,
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

from ep_overlap.testing import RankPool
from fsdp_hooks.accumulation import microbatch
from fsdp_hooks.collectives import Communicator
from fsdp_hooks.context import Runtime
from fsdp_hooks.lifecycle import UnitState
from fsdp_hooks.optimizer import shard_optimizer
from fsdp_hooks.root import FsdpRoot
from fsdp_hooks.shard import fully_shard

TOLERANCE = 1e-12
"""float64, against one process: sums over ranks are formed in another order."""

# ---- interleavings -------------------------------------------------------------------------------


def interleavings(num_microbatches: int) -> list[list[int]]:
    """All orders of forwards and backwards: the first mention of a microbatch is its forward."""
    twice = [k for k in range(num_microbatches) for _ in range(2)]
    return [list(order) for order in sorted(set(permutations(twice)))]


def summed(seeds: Sequence[int]) -> Grads:
    """Whole gradients of these microbatches, in one process."""
    model, size = double(Stack), dist.get_world_size()
    for seed in seeds:
        for r in range(size):
            (token_loss(model, tokens_of(r, seed)) / size).backward()
    return {name: param.grad for name, param in model.named_parameters()}


def drive(model: Stack, order: Sequence[int]) -> None:
    losses: dict[int, Tensor] = {}
    backwards = len(set(order))
    for k in order:
        if k not in losses:
            losses[k] = token_loss(model, tokens_of(dist.get_rank(), k))
        else:
            backwards -= 1
            with microbatch(model, is_last=backwards == 0):
                losses[k].backward()


def errors_of_orders(orders: Sequence[Sequence[int]], strategy: str) -> list[tuple[float, bool]]:
    groups = SharedGroups()
    expected = summed(sorted(set(orders[0])))
    results: list[tuple[float, bool]] = []
    for order in orders:
        model = double(Stack)
        root = shard_stack(model, strategy=strategy, groups=groups)
        drive(model, order)
        drained = clean(root) and all(use.count == 0 for use in uses_of(model))
        results.append((worst_error(whole_grads(model), expected), drained))
    return results


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num_microbatches", [2, 3])
def test_any_interleaving_of_forwards_and_backwards_is_right(
    ranks2: RankPool, num_microbatches: int, strategy: str
) -> None:
    # P#139404
    orders = interleavings(num_microbatches)
    orders = random.Random(0).sample(orders, min(len(orders), 12))
    for results in ranks2.run(errors_of_orders, orders, strategy):
        for error, drained in results:
            assert error <= TOLERANCE
            assert drained


def forward_within_backward() -> tuple[float, bool]:
    """While block 1's backward of one microbatch runs, the next one's forward does: it must not
    free the weights."""
    model = double(Stack)
    root = shard_stack(model)
    rank = dist.get_rank()
    later: list[Tensor] = []

    def run_next(grad: Tensor) -> None:
        if not later:
            with torch.enable_grad():
                later.append(token_loss(model, tokens_of(rank, 1)))

    for _ in range(2):  # the second time the order is known
        model.zero_grad()
        later.clear()
        handle = model.blocks[1].down.register_forward_hook(
            lambda _, __, output: output.register_hook(run_next) and None
        )
        loss = token_loss(model, tokens_of(rank, 0))
        handle.remove()
        loss.backward()
        later[0].backward()
    error = worst_error(whole_grads(model), summed([0, 1]))
    return error, clean(root) and all(use.count == 0 for use in uses_of(model))


def test_a_forward_within_a_units_backward_leaves_its_weights(ranks2: RankPool) -> None:
    assert all(error <= TOLERANCE and ok for error, ok in ranks2.run(forward_within_backward))


# ---- units without gradient ----------------------------------------------------------------------


class Branches(nn.Module):
    """A frozen unit first, whose backward never comes; a branch that the loss may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.trunk = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.branch = nn.Linear(WIDTH, WIDTH)
        self.uses_branch = True

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.trunk(self.frozen(x)))
        side = self.branch(x)
        return x + side if self.uses_branch else x


def live_in_trunks_backward() -> tuple[list[list[str]], list[int], bool]:
    """What is gathered within the trunk's backward, and all-gathers, for each of three steps; in
    the third the branch gets no gradient."""
    model = double(Branches)
    for module in (model.frozen, model.trunk, model.branch, model):
        fully_shard(module, mesh=world_mesh())
    root = root_of(model)
    seen: list[list[str]] = []

    def look(_: Tensor) -> None:
        units = root.inner_units
        seen.append([u.name for u in units if u.releases and u.state is UnitState.UNSHARDED])

    model.trunk[0].register_forward_hook(lambda _, __, output: output.register_hook(look) and None)
    gathers: list[int] = []
    for step in range(3):
        before = root.stats.num_all_gathers
        model.uses_branch = step != 2
        model(input_of(dist.get_rank(), step)).sum().backward()
        gathers.append(root.stats.num_all_gathers - before)
    return seen, gathers, clean(root)


def test_a_unit_without_gradient_is_released_before_the_next_backward(ranks2: RankPool) -> None:
    # P#83129. The branch stayed for its own backward, which did not come.
    for seen, gathers, is_clean in ranks2.run(live_in_trunks_backward):
        # The reverse of forward was the guess: the frozen unit was gathered for nothing, once.
        assert seen == [["frozen", "trunk"], ["trunk"], ["trunk"]]
        assert gathers == [3 + 2, 3 + 1, 3 + 1]
        assert is_clean


# ---- failures ------------------------------------------------------------------------------------


def messages_of_failed_forward() -> tuple[list[str], int, int]:
    """A forward that raises half way is no new order."""
    model = double(Stack)
    root = shard_stack(model)
    gathers: list[int] = []

    def fail(*_: object) -> None:
        raise ValueError("x")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            before = root.stats.num_all_gathers
            token_loss(model, tokens_of(0, step)).backward()
            gathers.append(root.stats.num_all_gathers - before)
            handle = model.blocks[1].register_forward_hook(fail)
            with pytest.raises(ValueError, match="x"):
                model(tokens_of(0, step))
            handle.remove()
    return [str(w.message) for w in caught], gathers[0], gathers[2]


def test_a_forward_that_fails_is_no_new_order(ranks2: RankPool) -> None:
    for messages, first, last in ranks2.run(messages_of_failed_forward):
        assert messages == []
        assert first == last == 1 + 3 + 2


# ---- shared weights and heads (MTP) --------------------------------------------------------------


class Heads(nn.Module):
    """A trunk, a main head tied to the embedding, and extra heads that share its final norm."""

    def __init__(self, num_extra: int | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.extra = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_extra or 0))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight
        self.off: set[int] = set()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.trunk(self.embed(tokens)))
        outputs = [self.head(self.norm(hidden))]
        for index, layer in enumerate(self.extra):
            hidden = layer(hidden)
            if index not in self.off:
                outputs.append(self.head(self.norm(hidden)))
        return torch.stack(outputs).square().mean()


def train_heads(num_extra: int | None, strategy: str) -> tuple[float, float, bool]:
    """Two AdamW steps of two microbatches; in one of them the last extra head is off."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model, reference = (double(lambda: Heads(num_extra)) for _ in range(2))
    for module in (model.trunk, *model.extra, model):
        fully_shard(module, mesh=world_mesh(), strategy=strategy)
    optimizer = shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    worst = 0.0
    for step in range(2):
        optimizer.zero_grad()
        plain.zero_grad()
        for k in range(2):
            model.off = reference.off = {(num_extra or 0) - 1} if step == k else set()
            with microbatch(model, is_last=k == 1):
                model(tokens_of(rank, 2 * step + k) % WIDTH).backward()
            for r in range(size):
                (reference(tokens_of(r, 2 * step + k) % WIDTH) / size).backward()
        expected = {n: p.grad for n, p in reference.named_parameters()}
        worst = max(worst, worst_error(whole_grads(model), expected))
        optimizer.step()
        plain.step()
    weights = {n: p.detach() for n, p in reference.named_parameters()}
    return worst, worst_error(whole_weights(model), weights), clean(root_of(model))


def train_all_heads() -> list[tuple[float, float, bool]]:
    return [train_heads(n, strategy) for n in (None, 0, 1, 2) for strategy in STRATEGIES]


@pytest.mark.parametrize("pool_name", ["ranks2", "ranks4"])
def test_extra_heads_with_tied_weight_and_shared_norm_equal_one_process(
    pool_name: str, request: pytest.FixtureRequest
) -> None:
    # M#7166 (a head is off), M#5912 (none and zero heads), P#176076 (5 rows, tied, over 4 ranks)
    pool: RankPool = request.getfixturevalue(pool_name)
    for results in pool.run(train_all_heads):
        for grads, weights, is_clean in results:
            assert grads <= TOLERANCE
            assert weights <= 1e-9  # AdamW divides by the root of small second moments
            assert is_clean


# ---- buffers in use ------------------------------------------------------------------------------


class Late:
    """A ``Communicator`` that fills outputs with NaN first, and reads inputs after a while."""

    def __init__(self, inner: Communicator, delay_s: float) -> None:
        self._inner = inner
        self._delay_s = delay_s
        self.exchange = inner.exchange

    def all_gather(self, output: Tensor, shard: Tensor) -> None:
        output.fill_(float("nan"))
        time.sleep(self._delay_s)
        self._inner.all_gather(output, shard)

    def reduce_scatter(self, output: Tensor, whole: Tensor) -> None:
        output.fill_(float("nan"))
        time.sleep(self._delay_s)
        self._inner.reduce_scatter(output, whole)

    def all_reduce(self, tensor: Tensor) -> None:
        time.sleep(self._delay_s)
        self._inner.all_reduce(tensor)


def with_late_lanes(gather_s: float, reduce_s: float, depth: int) -> Grads:
    model = double(lambda: Stack(4))
    for block in model.blocks:
        fully_shard(block, mesh=world_mesh())
    fully_shard(model, mesh=world_mesh(), runtime=Runtime(prefetch_depth=depth))
    root: FsdpRoot = root_of(model)
    context = root.context
    context._communicators = {
        ranks: replace(c, gather=Late(c.gather, gather_s), reduce=Late(c.reduce, reduce_s))
        for ranks, c in context._communicators.items()
    }
    for step in range(2):
        with microbatch(model, is_last=step == 1):
            token_loss(model, tokens_of(dist.get_rank(), step)).backward()
    return whole_grads(model)


def late_equals_early() -> list[bool]:
    early = with_late_lanes(0.0, 0.0, 1)
    delays = ((0.005, 0.0, 1), (0.0, 0.02, 1), (0.005, 0.02, 3))
    return [equal(early, with_late_lanes(*delay)) for delay in delays]


def test_no_buffer_is_read_before_it_is_there_or_reused_while_it_is_read(ranks2: RankPool) -> None:
    # M#5222, M#7400: gathers and reductions at one time, each as slow as it likes.
    assert ranks2.run(late_equals_early) == [[True] * 3] * 2
