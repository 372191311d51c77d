"""A weight that is used more than once has the gradient that torch.autograd gives it, however the
gradients of its layers are made and in whatever order, sharded or not."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from itertools import product

import pytest
import torch.distributed as dist
from sharding_support import (
    STRATEGIES,
    Grads,
    SharedGroups,
    clean,
    root_of,
    whole_grads,
    world_mesh,
    worst_error,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from wgrad_support import (
    MAX_ERROR,
    SHARING,
    Cell,
    Shard,
    Shares,
    by_autograd,
    cells,
    counted,
    grads_of,
    make_sharing,
    step,
    tokens_of,
)

from ep_overlap.testing import RankPool
from fsdp_hooks.accumulation import microbatch
from fsdp_hooks.context import Runtime
from fsdp_hooks.lifecycle import ShardedModule
from fsdp_hooks.shard import fully_shard
from fsdp_hooks.wgrad_layers import delayed_wgrad, manage_wgrad

MODES: Mapping[str, tuple[bool, bool]] = {
    "delayed": (True, False),
    "fused": (False, True),
    "both": (True, True),
}
"""Whether delayed, and whether fused."""


def unsharded(model: nn.Module) -> nn.Module:
    return model


def gradients_of(kind: type[Shares], cell: Cell, shard: Shard, *, uses_plainly: bool) -> Grads:
    """Of one step, whole; and each managed use went once through the sink."""
    model = shard(make_sharing(kind, uses_plainly=uses_plainly))
    is_sharded = isinstance(model, ShardedModule)
    batches = batches_of(dist.get_rank() if is_sharded else 0, cell)
    with counted(model, fuse=cell.fused) as sink:
        num_waited = step(model, cell, batches)
    num_uses = kind.num_uses * len(batches)
    assert num_waited == (num_uses if cell.delayed else 0)
    assert (sink.num_written, sink.num_added) == expected_counts(cell, num_uses)
    assert not is_sharded or clean(root_of(model))
    return whole_grads(model)


def expected_counts(cell: Cell, num_uses: int) -> tuple[int, int]:
    """Writes to destinations, and gradients given."""
    if cell.fused:
        return num_uses, 0
    return 0, num_uses if cell.delayed else 0


def batches_of(rank: int, cell: Cell) -> list[Tensor]:
    return [tokens_of(10 * rank + k) for k in range(cell.num_microbatches)]


@pytest.mark.parametrize("uses_plainly", [False, True], ids=["layers alone", "plain uses too"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", SHARING, ids=lambda kind: kind.__name__)
def test_a_shared_weight_sums_all_its_uses_as_autograd_does(
    kind: type[Shares], mode: str, uses_plainly: bool
) -> None:
    delayed, fused = MODES[mode]
    for cell in cells(delayed=delayed, fused=fused):
        reference = make_sharing(kind, uses_plainly=uses_plainly)
        expected = by_autograd(reference, batches_of(0, cell))
        got = gradients_of(kind, cell, unsharded, uses_plainly=uses_plainly)
        assert worst_error(got, expected) <= MAX_ERROR, cell
        # One microbatch of layers alone: the same products, added in the same order.
        if not fused and cell.num_microbatches == 1 and not uses_plainly and kind is not SHARING[0]:
            assert worst_error(got, expected) == 0.0, cell


@pytest.mark.parametrize("kind", SHARING, ids=lambda kind: kind.__name__)
def test_a_managed_model_whose_gradients_nobody_delays_or_fuses_is_bitwise_plain(
    kind: type[Shares],
) -> None:
    batches = [tokens_of(k) for k in range(3)]
    expected = by_autograd(make_sharing(kind, uses_plainly=True), batches)
    model = make_sharing(kind, uses_plainly=True)
    step(model, Cell(delayed=False, fused=False), batches)
    assert worst_error(grads_of(model), expected) == 0.0


# ---- sharded -------------------------------------------------------------------------------------


def sharded_cells(strategy: str) -> Iterator[Cell]:
    """All that differ where everything is sharded; elsewhere one of each mode."""
    for delayed, fused in MODES.values():
        several = [c for c in cells(delayed=delayed, fused=fused) if c.num_microbatches > 1]
        yield from several if strategy == "optim_grads_params" else several[-1:]


def errors_of(strategy: str) -> list[str]:
    """Cells whose gradients differ from those of one process, or that fail."""
    groups, size, wrong = SharedGroups(), dist.get_world_size(), list[str]()

    def shard(model: nn.Module) -> nn.Module:
        assert isinstance(model, Shares)
        for unit in model.units_now():
            fully_shard(unit, mesh=world_mesh(), strategy=strategy)
        runtime = Runtime(new_group=groups)
        return fully_shard(model, mesh=world_mesh(), strategy=strategy, runtime=runtime)

    for kind, uses_plainly, cell in product(SHARING, (False, True), sharded_cells(strategy)):
        reference = make_sharing(kind, uses_plainly=uses_plainly)
        everyones = [batch for rank in range(size) for batch in batches_of(rank, cell)]
        summed = by_autograd(reference, everyones)
        expected = {name: None if g is None else g / size for name, g in summed.items()}
        got = gradients_of(kind, cell, shard, uses_plainly=uses_plainly)
        if (error := worst_error(got, expected)) > MAX_ERROR:
            wrong.append(f"{kind.__name__}, {uses_plainly=}, {cell}: {error}")
    return wrong


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_sharded_shared_weight_sums_all_its_uses_as_one_process_does(
    ranks2: RankPool, strategy: str
) -> None:
    for wrong in ranks2.run(errors_of, strategy):
        assert wrong == []


def refusals_of_parts() -> list[str]:
    """Of what was sharded as part of something larger: managed or not."""
    messages: list[str] = []
    for is_managed in (False, True):
        model = make_sharing(SHARING[0], uses_plainly=False)
        fully_shard(model, mesh=world_mesh())
        if is_managed:
            manage_wgrad(model)
        try:
            manage_wgrad(model.get_submodule("inner"), fuse=not is_managed)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_an_unsharded_part_of_a_sharded_model_is_refused(ranks2: RankPool) -> None:
    # Its gradients would go past the reductions, or wait for a flush that ends nothing.
    for messages in ranks2.run(refusals_of_parts):
        assert len(messages) == 2
        assert all("call manage_wgrad on what fully_shard was called on" in m for m in messages)


def refusal_of_torchs_data_parallel() -> str:
    model = DistributedDataParallel(make_sharing(SHARING[0], uses_plainly=False))
    try:
        with delayed_wgrad(model):
            model(tokens_of(dist.get_rank())).backward()
    except ValueError as error:
        return str(error)
    return f"not refused; gradients: {list(grads_of(model))}"


def test_a_model_that_torch_reduces_within_its_backward_is_refused(ranks2: RankPool) -> None:
    # What comes after it would stay each rank's own, and ranks would part.
    for message in ranks2.run(refusal_of_torchs_data_parallel):
        assert "fully_shard(strategy='no_shard')" in message


def reductions_of_full_and_split_backwards(fuse: bool) -> list[tuple[float, int]]:
    """With gradients reduced once a step, and each microbatch: error, and reductions."""
    results: list[tuple[float, int]] = []
    for strategy in ("optim", "optim_grads_params"):
        model = make_sharing(SHARING[1], uses_plainly=False)
        fully_shard(model, mesh=world_mesh(), strategy=strategy)
        manage_wgrad(model, fuse=fuse)
        batches = [tokens_of(k) for k in range(3)]
        for k, batch in enumerate(batches):
            with (
                microbatch(model, is_last=k == 2),
                delayed_wgrad(model) if k == 1 else nullcontext(),
            ):
                model(batch).backward()
        expected = by_autograd(make_sharing(SHARING[1], uses_plainly=False), batches)
        error = worst_error(whole_grads(model), expected)
        results.append((error, root_of(model).stats.num_reduce_scatters))
    return results


@pytest.mark.parametrize("fuse", [False, True])
def test_full_and_split_backwards_are_reduced_once_after_the_last(
    ranks2: RankPool, fuse: bool
) -> None:
    # P#139415: it was miscounted which backward is the last.
    for results in ranks2.run(reductions_of_full_and_split_backwards, fuse):
        assert [num for _, num in results] == [1, 3]
        assert all(error <= MAX_ERROR for error, _ in results)


def gradients_after_a_failure(fuse: bool) -> list[tuple[bool, float]]:
    """Whether nothing is left of it, and the error of the next use."""
    results: list[tuple[bool, float]] = []
    for strategy in ("no_shard", "optim_grads_params"):
        model = make_sharing(SHARING[1], uses_plainly=False)
        fully_shard(model, mesh=world_mesh(), strategy=strategy)
        manage_wgrad(model, fuse=fuse)
        with suppress(PlannedError), delayed_wgrad(model):
            model(tokens_of(1)).backward()
            raise PlannedError
        is_clean = clean(root_of(model)) and all(p.grad is None for p in model.parameters())
        with delayed_wgrad(model):
            model(tokens_of(0)).backward()
        expected = by_autograd(make_sharing(SHARING[1], uses_plainly=False), [tokens_of(0)])
        results.append((is_clean, worst_error(whole_grads(model), expected)))
    return results


class PlannedError(Exception):
    """A failure that a test wants."""


@pytest.mark.parametrize("fuse", [False, True])
def test_a_sharded_failure_leaves_the_next_use_clean(ranks2: RankPool, fuse: bool) -> None:
    for results in ranks2.run(gradients_after_a_failure, fuse):
        assert all(is_clean and error <= MAX_ERROR for is_clean, error in results)
