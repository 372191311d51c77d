"""Fused weight gradients of a sharded model that is simply called: where they are written, what a
weight without a gradient has, and in which dtype they add up."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, override

import pytest
import schedule_support as support
import torch
import torch.distributed as dist
from schedule_support import Case, Groups
from sharding_support import (
    STRATEGIES,
    Grads,
    SharedGroups,
    Stack,
    double,
    equal,
    input_of,
    own_rows,
    root_of,
    shard_stack,
    token_loss,
    world_mesh,
)
from test_schedule_parity import prefer
from test_wgrad_sharded import (
    MAX_ERROR,
    NUM_LAYERS,
    OddError,
    fail_in_backward,
    local_grads,
    own_tokens,
)
from torch import Tensor, nn
from torch.utils import deterministic
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ep_overlap.schedule import OverlapSchedule
from ep_overlap.testing import RankPool
from fsdp_hooks.accumulation import microbatch
from fsdp_hooks.collectives import GroupCommunicator
from fsdp_hooks.context import Runtime
from fsdp_hooks.gradients import Gradients
from fsdp_hooks.precision import MixedPrecision
from fsdp_hooks.shard import fully_shard
from fsdp_hooks.wgrad import Destination
from fsdp_hooks.wgrad_layers import delayed_wgrad, manage_wgrad

EACH = ("optim_grads", "optim_grads_params")
"""Reduce each microbatch."""


def step(model: nn.Module, num: int, *, delay: bool = False) -> None:
    with delayed_wgrad(model) if delay else nullcontext() as delayed:
        for index in range(num):
            with microbatch(model, is_last=index == num - 1):
                token_loss(model, own_tokens(index)).backward()
                if delayed is not None:
                    delayed.flush()


# ---- where they are written ----------------------------------------------------------------------


@dataclass(kw_only=True)
class Seen:
    """What one step did. The tensors live, so that no memory is used twice."""

    written: list[Tensor] = field(default_factory=list[Tensor])
    """What fused gradients were written into."""
    reduced: list[Tensor] = field(default_factory=list[Tensor])
    """Inputs of reductions."""
    num_packs: int = 0
    accumulated: list[str] = field(default_factory=list[str])
    """Parameters whose gradients came in a tensor of their own."""


@contextmanager
def seen_in(model: nn.Module) -> Iterator[Seen]:
    seen = Seen()
    names = {
        id(group.gradients): [slot.name for slot in group.slots]
        for unit in root_of(model).units
        for group in unit.groups
    }
    destination, accumulate, pack = Gradients.destination, Gradients.accumulate, Gradients._pack
    scatter, all_reduce = GroupCommunicator.reduce_scatter, GroupCommunicator.all_reduce

    def noting_destination(self: Gradients, *args: Any, **kwargs: Any) -> Destination:
        found = destination(self, *args, **kwargs)
        seen.written.append(found.tensor)
        return found

    def noting_accumulate(self: Gradients, index: int, *args: Any) -> None:
        seen.accumulated.append(names[id(self)][index])
        accumulate(self, index, *args)

    def noting_pack(self: Gradients, *args: Any) -> Tensor:
        seen.num_packs += 1
        return pack(self, *args)

    def noting_scatter(self: GroupCommunicator, output: Tensor, whole: Tensor) -> None:
        seen.reduced.append(whole)
        scatter(self, output, whole)

    def noting_all_reduce(self: GroupCommunicator, tensor: Tensor) -> None:
        seen.reduced.append(tensor)
        all_reduce(self, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gradients, "destination", noting_destination)
        patch.setattr(Gradients, "accumulate", noting_accumulate)
        patch.setattr(Gradients, "_pack", noting_pack)
        patch.setattr(GroupCommunicator, "reduce_scatter", noting_scatter)
        patch.setattr(GroupCommunicator, "all_reduce", noting_all_reduce)
        yield seen


def storages(tensors: Sequence[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def wrong_places() -> list[str]:
    groups, found = SharedGroups(), list[str]()
    for strategy, delay, num in product(STRATEGIES, (False, True), (1, 2)):
        model = double(Stack)
        units = shard_stack(model, strategy=strategy, groups=groups).units
        manage_wgrad(model, fuse=True)
        wrong: list[str] = []
        with seen_in(model) as seen:
            step(model, num, delay=delay)
        if storages(seen.written) != storages(seen.reduced):
            wrong.append("what is reduced is not what was written into")
        num_reductions = len(units) * (num if strategy in EACH else 1)
        if not len(seen.reduced) == len(storages(seen.reduced)) == num_reductions:
            wrong.append(f"{len(seen.reduced)} reductions, expected {num_reductions}")
        if seen.num_packs:
            wrong.append(f"{seen.num_packs} copies into a reduction's input")
        weights = {"up.weight", "down.weight", "head.weight"}
        if extra := weights & {*seen.accumulated}:
            wrong.append(f"a gradient of {extra}")
        if "embed.weight" not in seen.accumulated:
            wrong.append("nothing was noted")
        found += [f"{strategy} {delay} {num}: {what}" for what in wrong]
    return found


def test_a_reduction_reads_the_very_memory_that_gradients_were_written_into(
    ranks2: RankPool,
) -> None:
    assert ranks2.run(wrong_places) == [[], []]


class FullSize(TorchDispatchMode):
    """Counts what operations return in memory of a weight's shape and size, or within other memory
    (``num_parts``)."""

    def __init__(self, shapes: set[torch.Size]) -> None:
        super().__init__()
        self._shapes = shapes
        self.num = 0
        self.num_parts = 0

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for out in tree_leaves(result):
            if isinstance(out, Tensor) and out.shape in self._shapes:
                has_all = out.untyped_storage().nbytes() == out.nbytes
                self.num += has_all
                self.num_parts += not has_all
        return result


def num_full_size(strategy: str, fuse: bool, groups: SharedGroups) -> tuple[int, int]:
    """Of linear weights' size, in a backward; and in parts of other memory. The embedding, whose
    shape is that of the head, is frozen."""
    model = double(Stack)
    model.embed.requires_grad_(False)
    shapes = {layer.weight.shape for layer in model.modules() if isinstance(layer, nn.Linear)}
    shard_stack(model, strategy=strategy, groups=groups)
    manage_wgrad(model, fuse=fuse)
    loss = token_loss(model, own_tokens(0))
    with FullSize(shapes) as counted:
        loss.backward()
    return counted.num, counted.num_parts


def full_size_gradients() -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Fused, and unfused."""
    groups = SharedGroups()
    return [
        (num_full_size(strategy, True, groups), num_full_size(strategy, False, groups))
        for strategy in STRATEGIES
    ]


def test_no_gradient_of_a_weights_size_is_ever_made(ranks2: RankPool) -> None:
    for counts in ranks2.run(full_size_gradients):
        for (fused, fused_parts), (unfused, _) in counts:
            assert fused == 0
            assert fused_parts >= NUM_LAYERS
            assert unfused >= NUM_LAYERS


# ---- weights without a gradient ------------------------------------------------------------------


class Choosy(nn.Module):
    """One unit with layers that are not always called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.extra = nn.Linear(5, 5)
        self.never = nn.Linear(5, 5)

    def forward(self, x: Tensor, *, calls_extra: bool) -> Tensor:
        x = torch.tanh(self.inner(x))
        return self.extra(x) if calls_extra else x


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New memory holds NaN."""
    assert deterministic.fill_uninitialized_memory, "it does so by default"
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def choosy_step(model: Choosy, calls: Sequence[bool], *, delay: bool) -> None:
    with delayed_wgrad(model) if delay else nullcontext():
        for index, calls_extra in enumerate(calls):
            with microbatch(model, is_last=index == len(calls) - 1):
                model(input_of(dist.get_rank(), index), calls_extra=calls_extra).sum().backward()


def wrong_without_gradients() -> list[str]:
    groups, found, rank = SharedGroups(), list[str](), dist.get_rank()
    # By microbatch, whether ``extra`` is called: on no rank, on one, in turns.
    patterns = ([False], [rank == 0], [rank == 0, rank == 1], [False, rank == 0])
    for strategy, calls, delay in product(STRATEGIES, patterns, (False, True)):
        grads: list[Grads] = []
        for fuse in (True, False):
            model = double(Choosy)
            runtime = Runtime(new_group=groups)
            fully_shard(model, mesh=world_mesh(), strategy=strategy, runtime=runtime)
            manage_wgrad(model, fuse=fuse)
            with poisoned_memory():
                for _ in range(2):
                    model.zero_grad()
                    choosy_step(model, calls, delay=delay and fuse)
            grads.append(local_grads(model))
            if fuse:
                never = model.never.weight.grad
                if never is None or own_rows(never).any():
                    found.append(f"{strategy} {calls} {delay}: no zeros")
        fused, unfused = grads
        largest = max(_difference(fused[name], unfused[name]) for name in fused)
        if not largest <= MAX_ERROR:  # NaN is not
            found.append(f"{strategy} {calls} {delay}: {largest}")
    return found


def _difference(ours: Tensor | None, theirs: Tensor | None) -> float:
    assert ours is not None
    assert theirs is not None
    return float((ours - theirs).abs().sum())


def test_a_layer_that_is_not_called_has_zeros_whatever_memory_held(ranks2: RankPool) -> None:
    assert ranks2.run(wrong_without_gradients) == [[], []]


def wrong_without_tokens() -> list[str]:
    groups, found = Groups(), list[str]()
    for strategy, delay in product(STRATEGIES, (False, True)):
        fused = Case(strategy=strategy, ep=2, dtype=torch.float64, delay=delay, fuse=True)
        ours, theirs = (
            support.build(fused, groups),
            support.build(replace(fused, fuse=False), groups),
        )
        for parts in (ours, theirs):
            prefer(parts, 0, (0, 1))  # both are rank 0's
        inputs, loss_fn = support.batches(ours, fused, 0), support.loss_of(fused)
        with poisoned_memory():
            if delay:
                OverlapSchedule(ours, fused.config).step(inputs, loss_fn)
            else:
                support.standard_step(ours, inputs, loss_fn)
        support.standard_step(theirs, inputs, loss_fn)
        got, expected = support.gradients(ours), support.gradients(theirs)
        largest = max(_difference(got[name], expected[name]) for name in expected)
        if got.keys() != expected.keys() or not largest <= MAX_ERROR:
            found.append(f"{strategy} {delay}: {largest}")
        idle = [grad for name, grad in got.items() if name.startswith("blocks.0.experts")]
        if dist.get_rank() == 1 and (not idle or any(grad.any() for grad in idle)):
            found.append(f"{strategy} {delay}: gradients of experts without tokens")
    return found


def test_an_expert_without_tokens_has_zeros_whatever_memory_held(ranks2: RankPool) -> None:
    assert ranks2.run(wrong_without_tokens) == [[], []]


# ---- in which dtype they add up ------------------------------------------------------------------

Calls = Sequence[Sequence[Sequence[float]]]
"""Microbatches, each of calls of one layer, each of rows."""


def gradients_of_one_weight(strategy: str, mp: MixedPrecision, calls: Calls) -> list[list[float]]:
    """Fused; fused and delayed; unfused. Each the sum of this rank's rows, averaged over ranks;
    nothing on a rank without the weight's only row."""
    groups, found = SharedGroups(), list[list[float]]()
    for fuse, delay in ((True, False), (True, True), (False, False)):
        model = nn.Linear(1, 1, bias=False)
        runtime = Runtime(new_group=groups)
        fully_shard(model, mesh=world_mesh(), strategy=strategy, mp=mp, runtime=runtime)
        manage_wgrad(model, fuse=fuse)
        with delayed_wgrad(model) if delay else nullcontext():
            for index, rows_of_calls in enumerate(calls):
                with microbatch(model, is_last=index == len(calls) - 1):
                    inputs = [
                        torch.tensor([rows], dtype=mp.param_dtype).T for rows in rows_of_calls
                    ]
                    torch.cat([model(x) for x in inputs]).sum().backward()
        found.append(own_rows(model.weight.grad).flatten().tolist())
    return found


def sums(cases: Sequence[tuple[str, MixedPrecision, Calls]]) -> list[list[list[float]]]:
    return [gradients_of_one_weight(*case) for case in cases]


def all_ranks_sums(
    pool: RankPool, mp: MixedPrecision, calls: Calls
) -> Iterator[tuple[str, list[float]]]:
    """By strategy: what ``gradients_of_one_weight`` finds on the rank that has the weight's row."""
    by_rank = pool.run(sums, [(strategy, mp, calls) for strategy in STRATEGIES])
    for strategy, *found in zip(STRATEGIES, *by_rank, strict=True):
        has_row = next(rank for rank in found if rank[0])
        yield strategy, [value for (value,) in has_row]


BF16 = MixedPrecision(param_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("calls", "unfused"),
    [
        pytest.param([[[256.0, 1.0]]], 256.0, id="in one product"),
        pytest.param([[[256.0], [1.0]]], 256.0, id="over calls of a microbatch"),
        pytest.param([[[256.0]], [[1.0]]], 257.0, id="over microbatches"),
    ],
)
def test_fused_gradients_of_bfloat16_add_up_in_float32(
    ranks2: RankPool, calls: Calls, unfused: float
) -> None:
    # 257 is no bfloat16 number.
    for strategy, found in all_ranks_sums(ranks2, BF16, calls):
        assert found == [257.0, 257.0, unfused], strategy


FLOAT16_ON_THE_WIRE = MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float16)


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param([[[40000.0]]], id="a sum over ranks"),
        pytest.param([[[20000.0, 20000.0]], [[0.0]]], id="a sum over ranks of microbatches"),
        pytest.param([[[-40000.0], [80000.0]]], id="a sum of calls, one of them too large"),
    ],
)
def test_sums_beyond_float16_are_scaled_before_they_are_cast(
    ranks2: RankPool, calls: Calls
) -> None:
    for strategy, found in all_ranks_sums(ranks2, FLOAT16_ON_THE_WIRE, calls):
        assert found == [40000.0] * 3, strategy


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16])
def test_products_are_not_narrowed_to_the_dtype_of_the_wire(
    ranks2: RankPool, wire: torch.dtype
) -> None:
    # 257 and 4097 are no numbers of these; their sums with -1 are.
    mp = MixedPrecision(param_dtype=torch.float32, reduce_dtype=wire)
    number = {torch.bfloat16: 257.0, torch.float16: 4097.0}[wire]
    for calls in ([[[number, -1.0]]], [[[number], [-1.0]]]):
        for strategy, found in all_ranks_sums(ranks2, mp, calls):
            assert found == [number - 1.0] * 3, strategy


# ---- a backward that fails -----------------------------------------------------------------------


def after_a_failed_backward(strategy: str, delay: bool) -> tuple[list[str], list[str]]:
    """What is wrong, and the warnings. The second microbatch's backward fails halfway."""
    groups, found = SharedGroups(), list[str]()
    ours, theirs = double(Stack), double(Stack)
    for model in (ours, theirs):
        shard_stack(model, strategy=strategy, groups=groups)
        manage_wgrad(model, fuse=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with microbatch(ours, is_last=False), delayed_wgrad(ours) if delay else nullcontext():
            token_loss(ours, own_tokens(0)).backward()
        with suppress(OddError), delayed_wgrad(ours) if delay else nullcontext() as delayed:
            fail_in_backward(ours, delayed)
        if strategy in EACH:  # the first one's are in .grad
            token_loss(ours, own_tokens(1)).backward()
        else:
            step(ours, 2, delay=delay)
    step(theirs, 2, delay=delay)
    if not equal(local_grads(ours), local_grads(theirs)):
        found.append("other gradients")
    return found, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_backward_that_fails_drops_what_waited_for_the_steps_reduction_and_says_so(
    ranks2: RankPool, strategy: str, delay: bool
) -> None:
    for found, said in ranks2.run(after_a_failed_backward, strategy, delay):
        assert found == []
        if strategy in EACH:
            assert said == []
        else:
            assert len(said) == 1
            assert "repeat the whole step" in said[0]
