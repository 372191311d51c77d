"""Bugs that others have met where something else than a module call drives: life cycles by hand,
losses that are injected or counted by token, orders that must not depend on a rank. The tags are
those of ``docs/bug_kinds.md``."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import schedule_support as support
import torch
import torch.distributed as dist
from schedule_support import Case, Groups
from sharding_support import (
    STRATEGIES,
    WIDTH,
    Grads,
    SharedGroups,
    Stack,
    clean,
    double,
    input_of,
    root_of,
    shard_stack,
    token_loss,
    tokens_of,
    whole_grads,
    world_mesh,
    worst_error,
)
from torch import Tensor, nn
from torch.nn import functional as F

from ep_overlap.schedule import OverlapSchedule
from ep_overlap.testing import RankPool
from fsdp_hooks.accumulation import microbatch
from fsdp_hooks.collectives import Communicator
from fsdp_hooks.context import Runtime
from fsdp_hooks.lifecycle import Driver, lifecycle_of
from fsdp_hooks.shard import fully_shard

TOLERANCE = 1e-12
"""float64, against one process: sums over ranks are formed in another order."""


# ---- contributions that come late ----------------------------------------------------------------

Queue = list[tuple[int, Tensor, Tensor]]
"""Microbatch, input and output gradient of a weight gradient that is yet to be made."""


class _Delayed(torch.autograd.Function):
    """A linear map without bias whose backward leaves the weight's gradient to the queue."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, queue: Queue, microbatch: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.queue, ctx.microbatch = queue, microbatch
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        ctx.queue.append((ctx.microbatch, x, grads[0]))
        return grads[0] @ weight, None, None, None


class DelayedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.queue: Queue = []
        self.microbatch = 0
        self.delays = True

    def forward(self, x: Tensor) -> Tensor:
        if not self.delays:
            return x @ self.weight.T
        return _Delayed.apply(x, self.weight, self.queue, self.microbatch)


class Delaying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.delayed = DelayedLinear()

    def forward(self, x: Tensor) -> Tensor:
        return self.delayed(torch.tanh(self.first(x))).square().mean()


def delayed_weight_gradients(strategy: str) -> tuple[float, bool]:
    """Both microbatches' backwards first, then both weight gradients, the later one first."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model, reference = double(Delaying), double(Delaying)
    fully_shard(model.delayed, mesh=world_mesh(), strategy=strategy)
    fully_shard(model, mesh=world_mesh(), strategy=strategy)
    root, reference.delayed.delays = root_of(model), False
    (delayed,) = root.inner_units
    root.begin(Driver.SCHEDULE)
    for unit in root.units:
        unit.unshard().wait()
    for k in range(2):
        model.delayed.microbatch = k
        root.pre_backward(k)
        model(input_of(rank, k)).backward()
    for k, x, grad in reversed(model.delayed.queue):
        root.pre_backward(k)
        delayed.accumulate(delayed.groups[0], 0, grad.T @ x)
    for k in range(2):
        for unit in root.units:
            unit.seal(k, is_last=k == 1)
            if k == 1 or unit.reduces_each_microbatch:
                unit.reduce()
    root.end()
    for k in range(2):
        for r in range(size):
            (reference(input_of(r, k)) / size).backward()
    expected: Grads = {n: p.grad for n, p in reference.named_parameters()}
    return worst_error(whole_grads(model), expected), clean(root)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_weight_gradient_that_is_made_later_is_reduced(ranks2: RankPool, strategy: str) -> None:
    # M#6697, M#6484: autograd's hook fires without a gradient, which comes afterwards.
    for error, is_clean in ranks2.run(delayed_weight_gradients, strategy):
        assert error <= TOLERANCE
        assert is_clean


# ---- past the module's call ----------------------------------------------------------------------


class Past(nn.Module):
    """Calls ``forward`` of a unit that holds its parameters itself."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.is_past = True

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.unit.forward(x) if self.is_past else self.unit(x))


def past_the_call() -> tuple[str, int, bool]:
    model = double(Past)
    fully_shard(model.unit, mesh=world_mesh())
    fully_shard(model, mesh=world_mesh(), runtime=Runtime(prefetch_depth=0))
    with pytest.raises(RuntimeError) as raised:
        model(input_of(0))
    gathers = root_of(model).stats.num_all_gathers
    model.is_past = False
    model(input_of(0)).sum().backward()
    return str(raised.value), gathers, clean(root_of(model))


def test_a_units_own_forward_says_to_call_the_module(ranks2: RankPool) -> None:
    # M#5789, M#5808
    for message, gathers, is_clean in ranks2.run(past_the_call):
        assert message.startswith("weight is read while unit unit is released")
        assert "Call the module itself rather than its forward()" in message
        assert gathers == 1  # the root's
        assert is_clean


# ---- one order on every rank ---------------------------------------------------------------------

Log = dict[str, list[tuple[str, int]]]
"""By lane: the collectives in order, and their size in elements."""


class Logged:
    """A ``Communicator`` that notes what it is asked for."""

    def __init__(self, inner: Communicator, log: list[tuple[str, int]]) -> None:
        self._inner = inner
        self._log = log
        self.exchange = inner.exchange

    def all_gather(self, output: Tensor, shard: Tensor) -> None:
        self._log.append(("all-gather", output.numel()))
        self._inner.all_gather(output, shard)

    def reduce_scatter(self, output: Tensor, whole: Tensor) -> None:
        self._log.append(("reduce-scatter", whole.numel()))
        self._inner.reduce_scatter(output, whole)

    def all_reduce(self, tensor: Tensor) -> None:
        self._log.append(("all-reduce", tensor.numel()))
        self._inner.all_reduce(tensor)


def collectives(case: Case) -> tuple[int, Log]:
    """This process's hash of a text, and what it issued in two steps, one on each path."""
    parts = support.reference(case)
    for index, layer in enumerate(parts.layers):
        # A second group in each unit, another one in each.
        list(layer.module.parameters())[index].requires_grad_(False)
    support.shard(parts, case, Groups())
    context, log = lifecycle_of(parts.module).context, Log()
    for ranks, made in context._communicators.items():
        lanes: dict[str, Any] = {}
        for lane in ("gather", "reduce"):
            entries = log.setdefault(f"{lane} over {ranks}", [])
            lanes[lane] = Logged(getattr(made, lane), entries)
        context._communicators[ranks] = replace(made, **lanes)
    loss_fn = support.loss_of(case)
    support.standard_step(parts, support.batches(parts, case, 0), loss_fn)
    OverlapSchedule(parts, case.config).step(support.batches(parts, case, 1), loss_fn)
    return hash("units in a set"), log


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_issue_the_same_collectives_in_one_order_whatever_their_hash_seed(
    ranks2: RankPool, strategy: str
) -> None:
    # M#6336 (units iterated from a set), M#2218 (under a schedule the plan orders reductions).
    case = Case(strategy=strategy, order="paired", layers=5, microbatches=2)
    (first_hash, first), (second_hash, second) = ranks2.run(collectives, case)
    if "PYTHONHASHSEED" not in os.environ:
        assert first_hash != second_hash
    assert first == second
    assert any(first.values())


ORDERS = ((0, 1, 2), (1, 0, 2))
"""In which the two ranks call the blocks."""


def unlike_orders(strategy: str, evaluates: bool) -> tuple[str, bool]:
    """The error of a first step, and whether there are no gradients after it."""
    rank = dist.get_rank()
    model = double(Stack)
    root = shard_stack(model, strategy=strategy)
    model.order = list(ORDERS[rank])
    with pytest.raises(RuntimeError) as raised, torch.set_grad_enabled(not evaluates):
        token_loss(model, tokens_of(rank)).backward()
    root.abort()
    assert clean(root)
    return str(raised.value), all(param.grad is None for param in model.parameters())


GATHERS = ("UNSHARD.blocks.2", "UNSHARD.blocks.0")
"""What the ranks come to after the root and blocks 0 and 1: one by a guess, the other by need."""
REDUCTIONS = ("REDUCE.blocks.1", "REDUCE.blocks.0")


@pytest.mark.parametrize(
    ("strategy", "evaluates", "words"),
    [
        ("optim_grads_params", False, GATHERS),
        ("optim_grads_params", True, GATHERS),
        ("optim", False, REDUCTIONS),  # each is gathered once: 0 and 1 come first on both ranks
        ("no_shard", False, REDUCTIONS),
    ],
)
def test_units_called_in_an_order_of_one_ranks_own_raise_on_all_before_numbers_mix(
    ranks2: RankPool, strategy: str, evaluates: bool, words: tuple[str, str]
) -> None:
    # M#2218. The blocks are of one size: their gathers would go through, with wrong weights.
    results = ranks2.run(unlike_orders, strategy, evaluates)
    for (message, has_no_grads), own, other in zip(results, words, words[::-1], strict=True):
        assert message.startswith(f"this rank comes to {own}, others to {other}; expected every")
        assert has_no_grads


class Exchanges:
    """A ``Communicator`` that counts how often ranks tell each other where they are."""

    def __init__(self, inner: Communicator, counts: Counter[str], lane: str) -> None:
        self._inner = inner
        self._counts = counts
        self._lane = lane
        self.all_gather = inner.all_gather
        self.reduce_scatter = inner.reduce_scatter
        self.all_reduce = inner.all_reduce

    def exchange[T](self, value: T) -> list[T]:
        self._counts[self._lane] += 1
        return self._inner.exchange(value)


def exchanges() -> list[dict[str, int]]:
    """Of two steps, two evaluations, and another step; two microbatches each."""
    model = double(Stack)
    context = shard_stack(model).context
    counts: Counter[str] = Counter()
    for ranks, made in context._communicators.items():
        lanes = {
            lane: Exchanges(getattr(made, lane), counts, lane) for lane in ("gather", "reduce")
        }
        context._communicators[ranks] = replace(made, **lanes)
    found: list[dict[str, int]] = []
    for evaluates in (False, False, True, True, False):
        counts.clear()
        for k in range(2):
            with torch.set_grad_enabled(not evaluates), microbatch(model, is_last=k == 1):
                loss = token_loss(model, tokens_of(dist.get_rank(), k))
                if not evaluates:
                    loss.backward()
        found.append(dict(counts))
    return found


def test_ranks_compare_their_order_in_a_first_step_and_a_first_evaluation_alone(
    ranks2: RankPool,
) -> None:
    # Two microbatches: the root, three blocks and, in backward, two of them again; four reductions.
    first = {"gather": 2 * 6, "reduce": 2 * 4}
    for counts in ranks2.run(exchanges):
        assert counts == [first, {}, {"gather": 4}, {}, {}]


# ---- losses --------------------------------------------------------------------------------------


class _Inject(torch.autograd.Function):
    """Hands logits through; in backward the auxiliary loss gets the gradient ``scale``."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(loss)
        ctx.scale = scale
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (loss,) = ctx.saved_tensors
        return grads[0], torch.full_like(loss, ctx.scale), None


def balance(parts: Any, scale: float) -> None:
    """Give each router a load-balance loss."""
    for layer in parts.layers:
        router = layer.router

        def forward(hidden: Tensor, router: Any = router) -> Tensor:
            logits = F.linear(hidden, router.weight)
            loss = logits.softmax(-1).flatten(0, -2).mean(0).square().sum()
            return _Inject.apply(logits, loss, scale)

        router.forward = forward


def with_injected_loss(case: Case) -> tuple[list[str], list[str]]:
    """What differs between the paths; and router gradients that the loss did not change."""
    loss_fn, groups = support.loss_of(case), Groups()
    steps: list[Callable[[Any, Sequence[Any]], object]] = [
        lambda parts, inputs: OverlapSchedule(parts, case.config).step(inputs, loss_fn),
        lambda parts, inputs: support.standard_step(parts, inputs, loss_fn),
        lambda parts, inputs: support.standard_step(parts, inputs, loss_fn),
    ]
    found: list[dict[str, Tensor]] = []
    for step, scale in zip(steps, (0.3, 0.3, 0.0), strict=True):
        parts = support.build(case, groups)
        balance(parts, scale)
        step(parts, support.batches(parts, case, 0))
        found.append(support.gradients(parts))
    ours, theirs, without = found
    routers = [name for name in ours if name.endswith("router.weight")]
    assert len(routers) == case.layers
    held = [name for name in routers if ours[name].numel() > 0]  # a rank may have no rows
    unchanged = [name for name in held if torch.equal(ours[name], without[name])]
    return support.unequal(ours, theirs), unchanged


@pytest.mark.parametrize("strategy", [None, "no_shard", "optim_grads_params"])
def test_the_gradient_of_an_injected_loss_arrives_under_the_schedule(
    ranks2: RankPool, strategy: str | None
) -> None:
    # AM#1408, M#5047
    case = Case(strategy=strategy, order="paired", layers=2, microbatches=3, ep=2)
    assert ranks2.run(with_injected_loss, case) == [([], []), ([], [])]


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.main = nn.Linear(WIDTH, WIDTH)
        self.extra = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Sums over tokens; the extra head has one token fewer."""
        x = torch.tanh(self.trunk(x))
        return self.main(x).square().sum(), self.extra(x[1:]).square().sum()


NUM_TOKENS = ((3, 4), (5, 2))
"""Of each rank and microbatch."""


def tokens(rank: int, k: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + k)
    shape = (NUM_TOKENS[rank][k], WIDTH)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def loss_by_token(model: nn.Module, rank: int, k: int) -> Tensor:
    """This rank's part of global sums over global counts."""
    main, extra = model(tokens(rank, k))
    count = sum(map(sum, NUM_TOKENS))
    return main / count + extra / (count - 4)


def losses_by_token() -> dict[str, float]:
    groups, errors = SharedGroups(), dict[str, float]()
    reference = double(TwoHeads)
    for rank in range(2):
        for k in range(2):
            loss_by_token(reference, rank, k).backward()
    expected: Grads = {n: p.grad for n, p in reference.named_parameters()}
    for strategy in STRATEGIES:
        model = double(TwoHeads)
        for child in model.children():
            fully_shard(child, mesh=world_mesh(), strategy=strategy)
        fully_shard(
            model,
            mesh=world_mesh(),
            strategy=strategy,
            grad_divisor=1,
            runtime=Runtime(new_group=groups),
        )
        for k in range(2):
            with microbatch(model, is_last=k == 1):
                loss_by_token(model, dist.get_rank(), k).backward()
        errors[strategy] = worst_error(whole_grads(model), expected)
    return errors


def test_losses_by_token_over_unequal_counts_need_no_divisor(ranks2: RankPool) -> None:
    # M#2417, M#3159, miles#3231; P#126600 (microbatches of unequal size)
    for errors in ranks2.run(losses_by_token):
        assert len(errors) == len(STRATEGIES)
        assert max(errors.values()) <= TOLERANCE
