"""Delayed weight gradients of a sharded model that is simply called: values, when they are there,
what is gathered meanwhile, and what a failure leaves. Fused ones: ``test_wgrad_sharded_fused.py``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from sharding_support import (
    STRATEGIES,
    Grads,
    SharedGroups,
    Stack,
    clean,
    double,
    equal,
    own_rows,
    root_of,
    shard_stack,
    token_loss,
    tokens_of,
    worst_error,
)
from torch import Tensor, nn

from ep_overlap.testing import RankPool
from fsdp_hooks.accumulation import microbatch
from fsdp_hooks.lifecycle import Driver
from fsdp_hooks.root import FsdpRoot
from fsdp_hooks.wgrad import Destination, GradSink
from fsdp_hooks.wgrad_layers import DelayedWgrad, delayed_wgrad, manage_wgrad

MAX_ERROR = 1e-12
FLUSHES = ("each", "reverse", "end", "leave")
"""After each backward; one after the other, the last microbatch's first; all at once; by leaving
the context."""
NUM_LAYERS = 7
"""Linear ones, of a stack of three blocks: two in each, and the head."""


def new_stack(strategy: str, groups: SharedGroups) -> Stack:
    model = double(Stack)
    shard_stack(model, strategy=strategy, groups=groups)
    return model


def local_grads(model: nn.Module) -> Grads:
    """This rank's rows."""
    return {
        name: None if param.grad is None else own_rows(param.grad).clone()
        for name, param in model.named_parameters()
    }


def error_of(model: nn.Module, expected: Grads) -> float:
    """Of this rank's rows: the largest, relative to those; infinite if a gradient is missing."""
    whole = {name: grad for name, grad in expected.items() if grad is None or grad.numel()}
    got = local_grads(model)
    return worst_error({name: got[name] for name in whole}, whole)


def own_tokens(seed: int) -> Tensor:
    return tokens_of(dist.get_rank(), seed)


@dataclass(frozen=True, kw_only=True)
class How:
    """A step of a training loop."""

    num: int = 1
    """Microbatches."""
    flush: str = "each"
    says_last: bool = True
    """Whether the loop says which microbatch is the step's last one."""

    def accumulating(self, model: nn.Module, index: int) -> AbstractContextManager[None]:
        if not self.says_last:
            return nullcontext()
        return microbatch(model, is_last=index == self.num - 1)


def plain_step(model: nn.Module, how: How) -> None:
    for index in range(how.num):
        with how.accumulating(model, index):
            token_loss(model, own_tokens(index)).backward()


def _look_away(delayed: DelayedWgrad) -> None:
    return None


def delayed_step(
    model: nn.Module, how: How, look: Callable[[DelayedWgrad], None] = _look_away
) -> None:
    """``look`` is called after every backward, with its weight gradients yet to be made."""
    with delayed_wgrad(model) as delayed:
        for index in range(how.num):
            with how.accumulating(model, index):
                delayed.microbatch(index)
                token_loss(model, own_tokens(index)).backward()
                look(delayed)
                if how.flush == "each":
                    delayed.flush(index)
        if how.flush == "reverse":
            for index in reversed(range(how.num)):
                delayed.flush(index)
        elif how.flush == "end":
            delayed.flush()


# ---- values --------------------------------------------------------------------------------------


def steps() -> Iterator[How]:
    yield How()
    for flush, says_last in product(FLUSHES, (True, False)):
        yield How(num=3, flush=flush, says_last=says_last)


def wrong_values(fuse: bool) -> list[str]:
    groups, found = SharedGroups(), list[str]()
    for strategy in STRATEGIES:
        ours, theirs = new_stack(strategy, groups), new_stack(strategy, groups)
        manage_wgrad(ours, fuse=fuse)
        for how in steps():
            for model in (ours, theirs):
                model.zero_grad()
            plain_step(theirs, how)
            delayed_step(ours, how)
            expected = local_grads(theirs)
            # One at a time, gradients are added up and reduced as ever.
            is_exact = not fuse and (how.flush == "each" or how.num == 1)
            error = error_of(ours, expected)
            if error > MAX_ERROR or (is_exact and not equal(local_grads(ours), expected)):
                found.append(f"{strategy} {how}: {error}")
            if not clean(root_of(ours)):
                found.append(f"{strategy} {how}: something is gathered")
    return found


@pytest.mark.parametrize("fuse", [False, True])
def test_delayed_gradients_are_the_plain_ones_whenever_they_are_made(
    ranks2: RankPool, fuse: bool
) -> None:
    assert ranks2.run(wrong_values, fuse) == [[], []]


def flush_between_forward_and_backward(model: nn.Module, how: How) -> None:
    """F0 B0, F1 W0 B1, F2 W1 B2, W2."""
    with delayed_wgrad(model) as delayed:
        for index in range(how.num):
            with how.accumulating(model, index):
                loss = token_loss(model, own_tokens(index))
                delayed.flush()
                loss.backward()


def forwards_first(model: nn.Module, how: How) -> None:
    """F0 F1 F2 B0 B1 B2 W."""
    with delayed_wgrad(model):
        losses = [token_loss(model, own_tokens(index)) for index in range(how.num)]
        for loss in losses:
            loss.backward()


def flush_without_need(model: nn.Module, how: How) -> None:
    """W, then F B W W each."""
    with delayed_wgrad(model) as delayed:
        delayed.flush()
        for index in range(how.num):
            with how.accumulating(model, index):
                token_loss(model, own_tokens(index)).backward()
                delayed.flush()
                delayed.flush()


LOOPS = (
    (flush_between_forward_and_backward, How(num=3)),
    (flush_between_forward_and_backward, How(num=3, says_last=False)),
    (forwards_first, How(num=3, says_last=False)),
    (flush_without_need, How(num=2)),
)


def wrong_loops(fuse: bool) -> list[str]:
    groups, found = SharedGroups(), list[str]()
    for strategy, (loop, how) in product(STRATEGIES, LOOPS):
        ours, theirs = new_stack(strategy, groups), new_stack(strategy, groups)
        manage_wgrad(ours, fuse=fuse)
        plain_step(theirs, how)
        for _ in range(2):  # the second step meets what the first one has left
            ours.zero_grad()
            loop(ours, how)
            if (error := error_of(ours, local_grads(theirs))) > MAX_ERROR:
                found.append(f"{strategy} {loop.__name__} {how}: {error}")
        if not clean(root_of(ours)):
            found.append(f"{strategy} {loop.__name__} {how}: something is gathered")
    return found


@pytest.mark.parametrize("fuse", [False, True])
def test_forwards_backwards_and_flushes_may_come_in_other_orders(
    ranks2: RankPool, fuse: bool
) -> None:
    assert ranks2.run(wrong_loops, fuse) == [[], []]


# ---- between backward and flush ------------------------------------------------------------------


def note_between(
    root: FsdpRoot, at_rest: Sequence[nn.Parameter], wrong: list[str], delayed: DelayedWgrad
) -> None:
    root.context.ag.synchronize()  # releases are issued; wait until they have run
    groups = [group for unit in root.units for group in unit.groups]
    computed = [param for group in groups for param in group.compute_params]
    if any(param.grad is not None for param in (*at_rest, *computed)):
        wrong.append("a .grad before the flush")
    if not clean(root):
        wrong.append(f"{root.stats.unsharded_bytes} bytes are gathered")


def wrong_between() -> list[str]:
    groups, found = SharedGroups(), list[str]()
    for strategy, num in product(STRATEGIES, (1, 3)):
        model = new_stack(strategy, groups)
        root, at_rest = root_of(model), list(model.parameters())
        wrong: list[str] = []
        with delayed_wgrad(model) as delayed:
            for index in range(num):
                token_loss(model, own_tokens(index)).backward()
                note_between(root, at_rest, wrong, delayed)
                assert len(delayed) == (index + 1) * NUM_LAYERS
            before = root.stats
            delayed.flush()
            after = root.stats
        if after.num_all_gathers != before.num_all_gathers or after.hook_misses:
            wrong.append("weights were gathered for their gradients")
        if after.num_reduce_scatters + after.num_all_reduces != len(root.units):
            wrong.append("not one reduction of each unit")
        if any(param.grad is None for param in at_rest):
            wrong.append("no gradient after the flush")
        found += [f"{strategy} {num}: {what}" for what in wrong]
    return found


def test_until_the_flush_there_is_no_gradient_and_nothing_is_gathered_for_it(
    ranks2: RankPool,
) -> None:
    assert ranks2.run(wrong_between) == [[], []]


def collectives_of(model: Stack, step: Callable[[], None]) -> tuple[int, int]:
    """All-gathers, and reductions."""
    root = root_of(model)
    before = root.stats
    step()
    after = root.stats
    return (
        after.num_all_gathers - before.num_all_gathers,
        after.num_reduce_scatters
        + after.num_all_reduces
        - before.num_reduce_scatters
        - before.num_all_reduces,
    )


def counted_collectives() -> dict[str, list[tuple[int, int]]]:
    """By strategy: of a plain step, a delayed one, and one that flushes at the end."""
    groups = SharedGroups()
    found: dict[str, list[tuple[int, int]]] = {}
    for strategy in STRATEGIES:
        model = new_stack(strategy, groups)
        plain, each, end = (How(num=3, flush=flush) for flush in ("", "each", "end"))
        plain_step(model, plain)  # the first step records the order
        found[strategy] = [
            collectives_of(model, partial(plain_step, model, plain)),
            collectives_of(model, partial(delayed_step, model, each)),
            collectives_of(model, partial(delayed_step, model, end)),
        ]
    return found


def test_a_delay_adds_no_collective_and_one_flush_reduces_each_unit_once(ranks2: RankPool) -> None:
    for found in ranks2.run(counted_collectives):
        assert found == {
            "no_shard": [(0, 4)] * 3,
            "optim": [(4, 4)] * 3,
            "optim_grads": [(4, 12), (4, 12), (4, 4)],
            # Each microbatch: the root once; blocks in forward, and all but the last in backward.
            "optim_grads_params": [(18, 12), (18, 12), (18, 4)],
        }


# ---- evaluation within ---------------------------------------------------------------------------


def note_evaluation(
    model: Stack, expected: Tensor, wrong: list[str], delayed: DelayedWgrad
) -> None:
    before = len(delayed)
    with torch.no_grad():
        loss = token_loss(model, own_tokens(9))
    if not torch.equal(loss, expected):
        wrong.append("another loss")
    if len(delayed) != before:
        wrong.append(f"{len(delayed) - before} gradients of an evaluation")


def wrong_around_evaluation(fuse: bool) -> list[str]:
    groups, found = SharedGroups(), list[str]()
    for strategy, flush, says_last in product(STRATEGIES, ("each", "end"), (True, False)):
        ours, theirs = new_stack(strategy, groups), new_stack(strategy, groups)
        manage_wgrad(ours, fuse=fuse)
        how = How(num=2, flush=flush, says_last=says_last)
        plain_step(theirs, how)
        with torch.no_grad():
            expected = token_loss(theirs, own_tokens(9))
        wrong: list[str] = []
        evaluate = partial(note_evaluation, ours, expected, wrong)
        for _ in range(2):  # the second step meets what the first one has left
            ours.zero_grad()
            delayed_step(ours, how, evaluate)
            if (error := error_of(ours, local_grads(theirs))) > MAX_ERROR:
                found.append(f"{strategy} {how}: {error}")
        if not clean(root_of(ours)):
            wrong.append("something is gathered")
        found += [f"{strategy} {how}: {what}" for what in wrong]
    return found


@pytest.mark.parametrize("fuse", [False, True])
def test_an_evaluation_between_backward_and_flush_changes_no_gradient(
    ranks2: RankPool, fuse: bool
) -> None:
    assert ranks2.run(wrong_around_evaluation, fuse) == [[], []]


# ---- failures ------------------------------------------------------------------------------------


class OddError(Exception):
    pass


class FailingSink:
    """Fails at the ``num``-th gradient; a ``GradSink``."""

    def __init__(self, sink: GradSink, num: int) -> None:
        self._sink = sink
        self._num_left = num

    def _count(self) -> None:
        self._num_left -= 1
        if self._num_left == 0:
            raise OddError

    def add(self, weight: nn.Parameter, grad: Tensor) -> None:
        self._count()
        self._sink.add(weight, grad)

    def destination(self, weight: nn.Parameter) -> Destination:
        self._count()
        return self._sink.destination(weight)


def _odd(*_: object) -> None:
    raise OddError


def fail_between(model: Stack, delayed: DelayedWgrad) -> None:
    token_loss(model, own_tokens(1)).backward()
    raise OddError


def fail_in_forward(model: Stack, delayed: DelayedWgrad) -> None:
    handle = model.blocks[1].register_forward_pre_hook(_odd)
    try:
        token_loss(model, own_tokens(1))
    finally:
        handle.remove()


def fail_in_backward(model: Stack, delayed: DelayedWgrad) -> None:
    def watch(module: nn.Module, args: object, out: Tensor) -> None:
        out.register_hook(_odd)

    handle = model.blocks[1].register_forward_hook(watch)
    try:
        token_loss(model, own_tokens(1)).backward()
    finally:
        handle.remove()


def fail_in_a_backward_and_go_on(model: Stack, delayed: DelayedWgrad) -> None:
    with suppress(OddError):
        fail_in_backward(model, delayed)
    with pytest.raises(RuntimeError, match="failed inside delayed_wgrad, and the loop goes on"):
        token_loss(model, own_tokens(2))
    raise OddError


def fail_in_flush(model: Stack, delayed: DelayedWgrad) -> None:
    token_loss(model, own_tokens(1)).backward()
    wgrad = manage_wgrad(model)
    before = wgrad.sink
    wgrad.sink = FailingSink(before, NUM_LAYERS + 3)
    try:
        delayed.flush()
    finally:
        wgrad.sink = before


def fail_after_one_of_two_flushes(model: Stack, delayed: DelayedWgrad) -> None:
    delayed.microbatch(1)
    token_loss(model, own_tokens(1)).backward()
    delayed.flush(0)
    raise OddError


def fail_after_a_flush_and_an_evaluation(model: Stack, delayed: DelayedWgrad) -> None:
    delayed.microbatch(1)
    token_loss(model, own_tokens(1)).backward()
    delayed.flush(0)
    with torch.no_grad():
        token_loss(model, own_tokens(2))
    raise OddError


FAILURES = (
    fail_between,
    fail_in_forward,
    fail_in_backward,
    fail_in_a_backward_and_go_on,
    fail_in_flush,
    fail_after_one_of_two_flushes,
    fail_after_a_flush_and_an_evaluation,
)


def wrong_after_failures(fuse: bool) -> list[str]:
    """Each failure has one backward before it, with all its weight gradients waiting."""
    groups, found = SharedGroups(), list[str]()
    for strategy, fail in product(STRATEGIES, FAILURES):
        ours, theirs = new_stack(strategy, groups), new_stack(strategy, groups)
        for model in (ours, theirs):
            manage_wgrad(model, fuse=fuse)
        where = f"{strategy} {fail.__name__}"
        with suppress(OddError), delayed_wgrad(ours) as delayed, microbatch(ours, is_last=False):
            token_loss(ours, own_tokens(0)).backward()
            fail(ours, delayed)
            found.append(f"{where}: it did not fail")
        root = root_of(ours)
        if not clean(root) or root.context.driver is not Driver.REST or root.postpones_end:
            found.append(f"{where}: not at rest")
        if len(delayed) or manage_wgrad(ours).queue is not None:
            found.append(f"{where}: something waits")
        if any(param.grad is not None for param in ours.parameters()):
            found.append(f"{where}: a gradient")
        for how in (How(num=2), How(num=2, flush="end")):
            for model in (ours, theirs):
                delayed_step(model, how)
            if not equal(local_grads(ours), local_grads(theirs)):
                found.append(f"{where}: then {how}")
            for model in (ours, theirs):
                model.zero_grad()
                plain_step(model, how)
            if not equal(local_grads(ours), local_grads(theirs)):
                found.append(f"{where}: then a plain step")
    return found


@pytest.mark.parametrize("fuse", [False, True])
def test_a_failure_with_gradients_waiting_leaves_nothing_and_the_next_steps_are_right(
    ranks2: RankPool, fuse: bool
) -> None:
    assert ranks2.run(wrong_after_failures, fuse) == [[], []]
