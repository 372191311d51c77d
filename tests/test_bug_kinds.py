"""Bugs that others have met, as numbers and weights: what is added in which dtype, how it is
scaled, and which weights the next forward sees. The tags are those of ``docs/bug_kinds.md``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

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
    equal,
    input_of,
    root_of,
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
from fsdp_hooks.context import Runtime
from fsdp_hooks.lifecycle import lifecycle_of
from fsdp_hooks.optimizer import shard_optimizer
from fsdp_hooks.precision import MixedPrecision
from fsdp_hooks.shard import fully_shard

BF16 = MixedPrecision(param_dtype=torch.bfloat16)


# ---- in which dtype ------------------------------------------------------------------------------


class Scale(nn.Module):
    """Its gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))

    def forward(self, x: float) -> Tensor:
        return (self.weight * x).sum()


@dataclass(frozen=True, kw_only=True)
class Wire:
    """What ranks give in each microbatch, and how it is added."""

    given: Sequence[Sequence[float]]
    """Of rank 0, and of every other rank."""
    mp: MixedPrecision
    divisor: int


def sums(wire: Wire) -> dict[tuple[str, bool], Tensor]:
    """By strategy, and whether each microbatch is reduced."""
    groups, found = SharedGroups(), dict[tuple[str, bool], Tensor]()
    for strategy, each in product(STRATEGIES, (True, False)):
        model = Scale()
        fully_shard(
            model,
            mesh=world_mesh(),
            strategy=strategy,
            mp=wire.mp,
            grad_divisor=wire.divisor,
            reduce_each_microbatch=each,
            runtime=Runtime(new_group=groups),
        )
        values = wire.given[min(dist.get_rank(), 1)]
        for k, value in enumerate(values):
            with microbatch(model, is_last=k == len(values) - 1):
                model(value).backward()
        grad = whole_grads(model)["weight"]
        assert grad is not None
        found[strategy, each] = grad
    return found


@pytest.mark.parametrize(
    ("wire", "expected"),
    [
        (Wire(given=[(256, 1), (0, 0)], mp=BF16, divisor=1), 257),
        (Wire(given=[(256, 0), (0, 1)], mp=BF16, divisor=1), 257),
        (Wire(given=[(256, 2), (0, 0)], mp=BF16, divisor=2), 129),
        # Ranks' sum, and one rank's sum over microbatches, are beyond float16; the mean is not.
        (
            Wire(
                given=[(40000,), (40000,)],
                mp=MixedPrecision(reduce_dtype=torch.float16),
                divisor=2,
            ),
            40000,
        ),
        (
            Wire(
                given=[(40000, 40000), (0, 0)],
                mp=MixedPrecision(reduce_dtype=torch.float16),
                divisor=2,
            ),
            40000,
        ),
    ],
    ids=["microbatches", "ranks", "mean", "float16 ranks", "float16 microbatches"],
)
def test_gradients_are_added_up_in_the_main_dtype(
    ranks2: RankPool, wire: Wire, expected: float
) -> None:
    # L#149, L#153, M#6624: 256 + 1 is 256 in bfloat16.
    for found in ranks2.run(sums, wire):
        assert len(found) == 2 * len(STRATEGIES)
        for case, grad in found.items():
            assert grad.dtype is torch.float32, case
            assert torch.equal(grad, torch.full((3, 2), float(expected))), case


def schedule_in_bf16() -> dict[str, list[str]]:
    """The schedule against the standard path, and the dtype of main gradients."""
    groups, found = Groups(), dict[str, list[str]]()
    for strategy, each in product(STRATEGIES, (True, False)):
        case = Case(
            strategy=strategy,
            order="paired",
            microbatches=3,
            ep=2,
            mp=BF16,
            reduce_each=each,
        )
        found[str(case)] = support.differences(case, num_steps=2, groups=groups)
    return found


def test_a_schedule_in_bf16_is_bitwise_the_standard_path(ranks2: RankPool) -> None:
    # L#149, M#6624, M#6336: with the test above, main gradients and fresh weights on both paths.
    for found in ranks2.run(schedule_in_bf16):
        assert found == {case: [] for case in found}


# ---- fresh weights -------------------------------------------------------------------------------


class Routed(nn.Module):
    """A router in float32 beside bfloat16, and a frozen scale: three groups in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.Parameter((torch.randn(3, WIDTH, WIDTH) / 2).bfloat16())
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5).bfloat16(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        assert (self.router.weight.dtype, self.experts.dtype) == (torch.float32, torch.bfloat16)
        gates = self.router(x.float()).softmax(-1).bfloat16()
        return torch.einsum("th,ehk,te->tk", x, self.experts, gates) * self.scale


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unit = Routed()
        self.last = nn.Linear(WIDTH, WIDTH).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.unit(x))


def mixed(strategy: str, groups: SharedGroups) -> Mixed:
    torch.manual_seed(1)
    model, mp = Mixed(), MixedPrecision()
    fully_shard(model.unit, mesh=world_mesh(), strategy=strategy, mp=mp)
    runtime = Runtime(new_group=groups)
    fully_shard(model, mesh=world_mesh(), strategy=strategy, mp=mp, runtime=runtime)
    return model


def bf16_input(rank: int, seed: int) -> Tensor:
    return input_of(rank, seed).bfloat16()


def plain_like(model: Mixed) -> Mixed:
    """A plain model of the sharded one's current main weights. Collective."""
    plain = Mixed()
    plain.load_state_dict({n: w for n, w in whole_weights(model).items() if w is not None})
    return plain


def train_mixed(strategy: str, groups: SharedGroups) -> list[str]:
    """What is wrong in two steps of two microbatches."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model, wrong = mixed(strategy, groups), list[str]()
    optimizer = shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.05))

    def compare(when: str) -> None:
        """An evaluation sees main weights as they are now, on every rank."""
        plain = plain_like(model)
        with torch.no_grad():
            if not torch.equal(model(bf16_input(rank, 9)), plain(bf16_input(rank, 9))):
                wrong.append(f"stale weights {when}")

    compare("at first")
    for step in range(2):
        optimizer.zero_grad()
        expected: Grads = {n: None for n, _ in model.named_parameters()}
        for k in range(2):
            with microbatch(model, is_last=k == 1):
                model(bf16_input(rank, 2 * step + k)).float().square().mean().backward()
            for r in range(size):
                plain = plain_like(model)
                plain(bf16_input(r, 2 * step + k)).float().square().mean().backward()
                for name, param in plain.named_parameters():
                    if param.grad is not None:
                        held = expected[name]
                        grad = param.grad.float() / size
                        expected[name] = grad if held is None else held + grad
        if worst_error(whole_grads(model), expected) > 1e-6:
            wrong.append(f"gradients of step {step}")
        if {p.grad.dtype for p in model.parameters() if p.grad is not None} != {torch.float32}:
            wrong.append("a main gradient is not float32")
        before = whole_weights(model)
        optimizer.step()
        compare(f"after step {step}")
        after = whole_weights(model)
        same = [name for name in before if torch.equal(after[name], before[name])]
        if same != ["unit.scale"]:
            wrong.append(f"not trained: {same}")
        with torch.no_grad():  # as an average of weights would be written
            for param in model.parameters():
                param.mul_(0.5)
        compare(f"after a direct write of step {step}")
        if not clean(root_of(model)):
            wrong.append("something is left unsharded")
    return wrong


def train_mixed_with_every_strategy() -> dict[str, list[str]]:
    groups = SharedGroups()
    return {strategy: train_mixed(strategy, groups) for strategy in STRATEGIES}


def test_two_dtypes_and_frozen_parameters_in_one_unit_train_on_fresh_weights(
    ranks2: RankPool,
) -> None:
    # M#6336 (compute copies are refreshed), L#104, M#5710 (frozen beside trained).
    for found in ranks2.run(train_mixed_with_every_strategy):
        assert found == {strategy: [] for strategy in STRATEGIES}


@dataclass(frozen=True, kw_only=True)
class Stacked:
    """A stack of blocks, its sharding, and an optimizer."""

    strategy: str
    mp: MixedPrecision | None
    groups: SharedGroups

    def make(self) -> tuple[Stack, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Stack()
        for block in model.blocks:
            fully_shard(block, mesh=world_mesh(), strategy=self.strategy, mp=self.mp)
        fully_shard(
            model,
            mesh=world_mesh(),
            strategy=self.strategy,
            mp=self.mp,
            runtime=Runtime(new_group=self.groups),
        )
        return model, shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))


def backward(model: Stack, step: int, num_microbatches: int) -> None:
    for k in range(num_microbatches):
        with microbatch(model, is_last=k == num_microbatches - 1):
            token_loss(model, tokens_of(dist.get_rank(), 10 * step + k)).backward()


def evaluated(stacked: Stacked, mode: str) -> Grads:
    """Weights after three steps, each with an evaluation between backward and optimizer."""
    model, optimizer = stacked.make()
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step, 2)
        if mode == "after backward, and no backward of its own":
            token_loss(model, tokens_of(dist.get_rank(), 99))
        optimizer.step()
        if mode == "after the optimizer":
            with torch.no_grad():
                token_loss(model, tokens_of(dist.get_rank(), 99))
    lifecycle_of(model).abort()  # a forward without backward keeps the root gathered
    return whole_weights(model)


def failed(stacked: Stacked, mode: str) -> Grads:
    """Weights after two steps; between them one that fails in its second microbatch, or is given
    up after its first."""
    model, optimizer = stacked.make()

    def fail(*_: object) -> None:
        raise ValueError("x")

    for step in range(2):
        if step == 1 and mode != "undisturbed":
            with microbatch(model, is_last=False):
                token_loss(model, tokens_of(dist.get_rank(), 50)).backward()
            up = model.blocks[1].up
            match mode:
                case "in forward":
                    handle = up.register_forward_hook(fail)
                case "in backward":
                    handle = up.register_full_backward_hook(fail)
                case _:
                    handle = None
            if handle is not None:
                with pytest.raises(ValueError, match="x"):
                    token_loss(model, tokens_of(dist.get_rank(), 51)).backward()
                handle.remove()
        model.zero_grad()
        backward(model, step, 3)
        optimizer.step()
        assert clean(root_of(model))
    return whole_weights(model)


def unlike_the_first(
    run: Callable[[Stacked, str], Grads], modes: Sequence[str]
) -> list[tuple[str, bool, str]]:
    """Whatever differs by a bit from the first mode."""
    groups, found = SharedGroups(), list[tuple[str, bool, str]]()
    for strategy, mp in product(STRATEGIES, (None, BF16)):
        stacked = Stacked(strategy=strategy, mp=mp, groups=groups)
        first, *others = (run(stacked, mode) for mode in modes)
        found += [
            (strategy, mp is None, mode)
            for mode, other in zip(modes[1:], others, strict=True)
            if not equal(first, other)
        ]
    return found


EVALUATIONS = ("none", "after backward, and no backward of its own", "after the optimizer")


def test_an_evaluation_anywhere_leaves_no_stale_weights(ranks2: RankPool) -> None:
    # M#3155, M#4717, P#137348: the optimizer outdates what a forward left gathered.
    assert ranks2.run(unlike_the_first, evaluated, EVALUATIONS) == [[], []]


FAILURES = ("undisturbed", "in forward", "in backward", "given up")


def test_a_step_that_fails_or_is_given_up_leaves_the_next_one_bitwise_clean(
    ranks2: RankPool,
) -> None:
    # P#83151. Whether a microbatch is the last one survives the failure too.
    assert ranks2.run(unlike_the_first, failed, FAILURES) == [[], []]
