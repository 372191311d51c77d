"""The standard path in unusual steps: other orders of calls, failures, two drivers."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

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
    own_rows,
    shard_stack,
    token_loss,
    tokens_of,
    uses_of,
    whole_grads,
    whole_weights,
    worst_error,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ep_overlap.testing import RankPool
from fsdp_hooks.accumulation import microbatch
from fsdp_hooks.lifecycle import Driver, lifecycle_of
from fsdp_hooks.optimizer import shard_optimizer
from fsdp_hooks.root import FsdpRoot

TOLERANCE = 1e-12
"""float64, against one process: sums over ranks are formed in another order."""

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
    """Keeps an inner output, for a loss that the root does not return. Its backward reads ``mix``,
    a weight of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.mix(self.embed(tokens)))
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


def repeated_after_failure(is_hybrid: bool, strategies: Sequence[str]) -> list[str]:
    """Steps of three microbatches, of which the second, or the last, fails, with one unit reduced,
    or kept; then the whole step again. What differs from the same without failures."""
    groups = SharedGroups()
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]]) if is_hybrid else None
    found: list[str] = []
    for strategy in strategies:
        model, undisturbed = double(Stack), double(Stack)
        for each in (model, undisturbed):
            shard_stack(each, mesh=mesh, strategy=strategy, groups=groups)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        keeps = is_hybrid or strategy in ("no_shard", "optim")
        for failing in (1, 2):
            for each in (model, undisturbed):
                each.zero_grad()
            for seed in range(failing):
                backward_of(model, seed, is_last=False)
            fail_in_backward(model, is_last=failing == 2)
            optimizer.zero_grad()
            for seed in range(3):
                told = pytest.warns(UserWarning, match="repeat the whole step")
                with told if keeps and seed == 0 else nullcontext():
                    backward_of(model, seed, is_last=seed == 2)
            for seed in range(3):
                backward_of(undisturbed, seed, is_last=seed == 2)
            found += [
                f"{name} of {strategy}"
                for (name, ours), theirs in zip(
                    model.named_parameters(), undisturbed.parameters(), strict=True
                )
                if not torch.equal(own_rows(ours.grad), own_rows(theirs.grad))
            ]
    return found


def backward_of(model: Stack, seed: int, *, is_last: bool) -> None:
    with microbatch(model, is_last=is_last):
        token_loss(model, tokens_of(dist.get_rank(), seed)).backward()


def fail_in_backward(model: Stack, *, is_last: bool) -> None:
    """In the second of three blocks: the third is through."""

    def fail(*_: object) -> None:
        raise ValueError("x")

    handle = model.blocks[1].up.register_full_backward_hook(fail)
    with pytest.raises(ValueError, match="x"):
        backward_of(model, 9, is_last=is_last)
    handle.remove()


def test_a_step_is_repeated_after_a_backward_that_failed(ranks2: RankPool) -> None:
    assert ranks2.run(repeated_after_failure, False, STRATEGIES) == [[], []]


def test_a_step_whose_outer_ranks_had_yet_to_add_is_repeated(ranks4: RankPool) -> None:
    strategies = ("no_shard", "optim_grads_params")
    assert ranks4.run(repeated_after_failure, True, strategies) == [[]] * 4


def zeroed_within_a_step(by: str) -> bool:
    """Whether the step's gradient is that of its second microbatch alone."""
    model, alone = double(Stack), double(Stack)
    for each in (model, alone):
        shard_stack(each, strategy="optim")
    optimizer = shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    backward_of(model, 0, is_last=False)
    optimizer.zero_grad() if by == "optimizer" else model.zero_grad()
    backward_of(model, 1, is_last=True)
    backward_of(alone, 1, is_last=True)
    return equal(whole_grads(model), whole_grads(alone))


@pytest.mark.parametrize(("by", "drops"), [("module", True), ("optimizer", False)])
def test_what_is_kept_for_one_reduction_a_step_is_the_modules_to_drop(
    ranks2: RankPool, by: str, drops: bool
) -> None:
    assert ranks2.run(zeroed_within_a_step, by) == [drops] * 2


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
    weights = root.inner_units[2].groups[0].weights
    shard, weights._shard = weights._shard, torch.empty(1, dtype=torch.float32)
    message = ""
    try:
        token_loss(model, tokens_of(rank))
    except BaseException as error:  # noqa: BLE001
        message = " ".join(getattr(error, "__notes__", []))
    at_rest = clean(root) and root.context.driver is Driver.REST
    weights._shard = shard
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
