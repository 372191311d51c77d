"""The standard path: in which order hooks gather, release and reduce, and what stays alive."""

import gc
import time
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharding_support import (
    WIDTH,
    Stack,
    clean,
    double,
    equal,
    input_of,
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
from fsdp_hooks.collectives import Communicator
from fsdp_hooks.lifecycle import lifecycle_of
from fsdp_hooks.optimizer import shard_optimizer
from fsdp_hooks.root import FsdpRoot
from fsdp_hooks.shard import fully_shard
from fsdp_hooks.streams import StreamKind

TOLERANCE = 1e-12
"""float64, against one process: sums over ranks are formed in another order."""

# ---- order ---------------------------------------------------------------------------------------

FORWARD_BACKWARD = """
UNSHARD.root UNSHARD.blocks.0
UNSHARD.blocks.1 F0 RESHARD.blocks.0
UNSHARD.blocks.2 F1 RESHARD.blocks.1
F2
UNSHARD.blocks.1 B2 REDUCE.blocks.2 RESHARD.blocks.2
UNSHARD.blocks.0 B1 REDUCE.blocks.1 RESHARD.blocks.1
B0 REDUCE.blocks.0 RESHARD.blocks.0
REDUCE.root RESHARD.root
"""
"""What one forward and backward issues, and the units' own work between. The gather of the next
unit is issued before this one's work, the release of the former before that. The last unit is used
next by its own backward, so it stays."""


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
        # The guess was block 0; all are gathered on demand.
        assert first[:2] == ["UNSHARD.root", "UNSHARD.blocks.0"]
        assert first[2:5] == ["UNSHARD.blocks.2", "RESHARD.blocks.0", "F2"]
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
        assert num_gathers == 2 * (1 + 2 * num_blocks - 1)  # the last block stays
        assert num_reductions == 2 * (1 + num_blocks)


# ---- memory --------------------------------------------------------------------------------------


class SlowReductions:
    """A ``Communicator`` whose reductions take 20 ms."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.exchange = inner.exchange

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
        counts.append(sum(len(g.gradients._sealed) for unit in root.units for g in unit.groups))

    for block in model.blocks:
        block.down.register_forward_hook(lambda _, __, out: out.register_hook(count) and None)
    token_loss(model, tokens_of(0)).backward()
    return max(counts)


def test_whole_gradients_do_not_pile_up_behind_a_slow_link(ranks2: RankPool) -> None:
    # L#158: bounded by a constant, whatever the depth.
    for num_alive in ranks2.run(whole_gradients_alive, 8):
        assert num_alive <= 1


def saved_tensors_survive() -> tuple[bool, bool]:
    """Releases free the storage and gathers write it: views that autograd saved stay valid."""
    model = double(Stack)
    root = shard_stack(model)
    loss = token_loss(model, tokens_of(dist.get_rank()))
    units = root.inner_units[:-1]  # the last one stays for its backward
    root.context.ag.synchronize()  # the release is queued
    freed = all(not g.weights.whole.is_allocated for unit in units for g in unit.groups)
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


def graph_goes_without_collector(has_backward: bool) -> bool:
    model = double(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=world_mesh())
    model(input_of(0)).sum().backward()
    gc.collect()
    gc.disable()
    try:
        x = (input_of(0).requires_grad_() * 2).tanh()
        activations = [weakref.ref(x)]
        handle = model[0].register_forward_hook(
            lambda _, __, out: activations.append(weakref.ref(out))
        )
        loss = model(x).square().sum()
        handle.remove()
        if has_backward:
            loss.backward()
        del x, loss
        return all(activation() is None for activation in activations)
    finally:
        gc.enable()


@pytest.mark.parametrize("has_backward", [True, False])
def test_a_graph_goes_without_a_run_of_the_garbage_collector(
    ranks2: RankPool, has_backward: bool
) -> None:
    # M#4909, M#4908.
    assert ranks2.run(graph_goes_without_collector, has_backward) == [True, True]


def kept_by_one_rank() -> tuple[list[str], bool]:
    """Rank 0 alone keeps the graph of an earlier forward."""
    rank = dist.get_rank()
    model, reference = double(Stack), double(Stack)
    root = shard_stack(model)
    shard_stack(reference)
    kept = model(tokens_of(rank))
    if rank == 1:
        del kept
    with issued(root) as recording:
        token_loss(model, tokens_of(rank)).backward()
    token_loss(reference, tokens_of(rank)).backward()
    reduced = [word for word in recording.words if word.startswith("REDUCE")]
    return reduced, equal(whole_grads(model), whole_grads(reference))


def test_the_order_of_reductions_does_not_depend_on_what_a_rank_keeps(ranks2: RankPool) -> None:
    (ours, is_right), (theirs, is_right_too) = ranks2.run(kept_by_one_rank)
    assert ours == theirs
    assert len(ours) == 4
    assert is_right
    assert is_right_too


def exception_is_kept() -> bool:
    """A hook fails in backward, and somebody keeps the exception with its frames."""
    rank = dist.get_rank()
    model, reference = double(Stack), double(Stack)
    root = shard_stack(model)
    shard_stack(reference)
    kept: list[BaseException] = []
    for name in ("reduce", "seal"):
        unit, calls = root.inner_units[1], iter((True,))
        method = getattr(unit, name)

        def fails(*args: Any, method: Any = method, calls: Any = calls, **kwargs: Any) -> Any:
            if next(calls, False):
                raise OSError("no more")
            return method(*args, **kwargs)

        setattr(unit, name, fails)
        try:
            token_loss(model, tokens_of(rank)).backward()
        except OSError as error:
            kept.append(error)
    token_loss(model, tokens_of(rank)).backward()
    token_loss(reference, tokens_of(rank)).backward()
    return len(kept) == 2 and clean(root) and equal(whole_grads(model), whole_grads(reference))


def test_the_next_step_is_clean_though_an_exception_is_kept(ranks2: RankPool) -> None:
    assert ranks2.run(exception_is_kept) == [True, True]


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
