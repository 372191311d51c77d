"""What weight gradients leave alive, where they are written, and what a failure leaves behind. The
tags are those of ``docs/bug_kinds.md``."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any, override

import pytest
import torch
from sharding_support import Grads, double, equal, worst_error
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import deterministic
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from wgrad_support import MAX_ERROR, grads_of

from fsdp_hooks.wgrad import WgradQueue
from fsdp_hooks.wgrad_layers import ExpertLinear, delayed_wgrad, manage_wgrad

NUM_ROWS, IN, HIDDEN, OUT = 32, 3, 5, 7


def mlp() -> nn.Sequential:
    """float64; ``[32, 3]`` to ``[32, 7]``, without biases."""
    return double(
        lambda: nn.Sequential(
            nn.Linear(IN, HIDDEN, bias=False), nn.Tanh(), nn.Linear(HIDDEN, OUT, bias=False)
        )
    )


def input_of(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(NUM_ROWS, IN, dtype=torch.float64, generator=generator)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def by_autograd(model: nn.Module, batches: Sequence[Tensor]) -> Grads:
    for x in batches:
        loss_of(model, x).backward()
    return grads_of(model)


class Outputs(TorchDispatchMode):
    """Notes what operations return: name, shape, memory; and which of that memory is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.Size, int]] = []
        self._memory: dict[int, tuple[StorageWeakRef, int]] = {}

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        before = {x.untyped_storage()._cdata for x in tree_leaves(args) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for out in tree_leaves(result):
            if isinstance(out, Tensor):
                storage = out.untyped_storage()
                self.seen.append((str(func), out.shape, storage._cdata))
                if storage._cdata not in before:
                    self._memory[len(self.seen)] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def live_bytes(self) -> int:
        """Of memory that operations allocated."""
        live = {ref.cdata: num for ref, num in self._memory.values() if not ref.expired()}
        return sum(live.values())


class OutOfMemory(TorchDispatchMode):
    """Fills what is allocated with NaN, and lets each product that is written there fail."""

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.mm.out:
            raise torch.OutOfMemoryError("no memory for a product")
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty_like.default:
            result.fill_(float("nan"))
        return result


# ---- between backward and flush ------------------------------------------------------------------

BYTES = 8
ACTIVATIONS_BYTES = BYTES * NUM_ROWS * HIDDEN  # the input was there before
OUTPUT_GRADS_BYTES = BYTES * NUM_ROWS * (HIDDEN + OUT)
WEIGHTS_BYTES = BYTES * (IN * HIDDEN + HIDDEN * OUT)


@pytest.mark.parametrize("is_recomputed", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
def test_until_the_flush_only_activations_and_output_gradients_live(
    fuse: bool, is_recomputed: bool
) -> None:
    # P#136766: a split backward of recomputed layers kept whole graphs until dW.
    model, x = mlp(), input_of()
    manage_wgrad(model, fuse=fuse)
    with Outputs():  # what torch imports at its first use holds frames
        by_autograd(mlp(), [x])
    gc.collect()
    gc.disable()
    try:
        with Outputs() as outputs, delayed_wgrad(model) as delayed:
            out: Any = checkpoint(model, x, use_reentrant=False) if is_recomputed else model(x)
            out.square().mean().backward()
            del out
            assert outputs.live_bytes() == ACTIVATIONS_BYTES + OUTPUT_GRADS_BYTES
            delayed.flush()
            assert outputs.live_bytes() == WEIGHTS_BYTES
    finally:
        gc.enable()


class _Keeps(torch.autograd.Function):
    """Keeps memory with its node of the graph, not as a saved tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = torch.zeros(1000)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


def test_what_waits_does_not_keep_the_graph_before_it() -> None:
    model, x = mlp(), input_of()
    with Outputs() as outputs, delayed_wgrad(model) as delayed:
        model[2](_Keeps.apply(model[0](x))).square().mean().backward()
        assert len(delayed) == 2
        assert outputs.live_bytes() == ACTIVATIONS_BYTES + OUTPUT_GRADS_BYTES


@pytest.mark.parametrize("fuse", [False, True])
def test_gradients_come_with_the_flush_and_sum_over_backwards(fuse: bool) -> None:
    # TE#2142: several backwards before a flush overwrote each other, or left zeros.
    model, batches = mlp(), [input_of(k).requires_grad_() for k in range(3)]
    manage_wgrad(model, fuse=fuse)
    with delayed_wgrad(model) as delayed:
        for k, x in enumerate(batches):
            loss_of(model, x).backward()
            assert len(delayed) == 2 * (k + 1)
            assert x.grad is not None
        assert all(param.grad is None for param in model.parameters())
        delayed.flush()
        assert len(delayed) == 0
        got = grads_of(model)
    assert worst_error(got, by_autograd(mlp(), batches)) <= (MAX_ERROR if fuse else 0.0)


def test_microbatches_may_be_flushed_in_another_order_than_they_ran() -> None:
    model, reference = mlp(), mlp()
    with delayed_wgrad(model) as delayed:
        for k in range(3):
            delayed.microbatch(k)
            loss_of(model, input_of(k)).backward()
        for k in (2, 0, 1):
            delayed.flush(k)
            loss_of(reference, input_of(k)).backward()
            assert equal(grads_of(model), grads_of(reference))


def test_a_microbatch_below_the_first_is_refused() -> None:
    with (
        delayed_wgrad(mlp()) as delayed,
        pytest.raises(ValueError, match=r"microbatch\(-1\): expected 0 or more"),
    ):
        delayed.microbatch(-1)


def test_where_nothing_waits_a_flush_does_nothing() -> None:
    # M#6145, zero-bubble-pipeline-parallelism#72: it took from an empty queue.
    model = mlp()
    model[0].requires_grad_(False)
    with delayed_wgrad(model) as delayed:
        delayed.flush()  # nothing has run
        delayed.flush(5)
        model[0](input_of()).square()  # no backward
        loss_of(model, input_of()).backward()
        assert len(delayed) == 1  # one is frozen
        delayed.flush()
        assert model[0].weight.grad is None
        before = model[2].weight.grad.clone()
        delayed.flush()
    WgradQueue().flush()
    assert torch.equal(model[2].weight.grad, before)


@pytest.mark.parametrize("fuse", [False, True])
def test_full_and_split_backwards_of_one_step_add_up(fuse: bool) -> None:
    # P#139415: with some backwards split and others full, contributions were miscounted.
    model, batches = mlp(), [input_of(k) for k in range(3)]
    manage_wgrad(model, fuse=fuse)
    for k, x in enumerate(batches):
        if k == 1:
            with delayed_wgrad(model):
                loss_of(model, x).backward()
        else:
            loss_of(model, x).backward()
    expected = by_autograd(mlp(), batches)
    assert worst_error(grads_of(model), expected) <= (MAX_ERROR if fuse else 0.0)


# ---- fused: where it is written ------------------------------------------------------------------


def weight_sized(outputs: Outputs, model: nn.Module) -> set[int]:
    """Memory of results that are as big as a weight, other than the weights'."""
    weights = {param.untyped_storage()._cdata for param in model.parameters()}
    sizes = {tuple(sorted(param.shape)) for param in model.parameters()}
    return {where for _, shape, where in outputs.seen if tuple(sorted(shape)) in sizes} - weights


@pytest.mark.parametrize("is_delayed", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
def test_a_fused_gradient_has_no_memory_but_its_destination(fuse: bool, is_delayed: bool) -> None:
    model = mlp()
    manage_wgrad(model, fuse=fuse)
    for k in range(3):
        loss = loss_of(model, input_of(k))
        with Outputs() as outputs:
            if is_delayed:
                with delayed_wgrad(model):
                    loss.backward()
            else:
                loss.backward()
        grads = {p.grad.untyped_storage()._cdata for p in model.parameters() if p.grad is not None}
        assert len(grads) == 2
        others = weight_sized(outputs, model) - grads
        assert bool(others) is (not fuse and k > 0)  # as autograd does: each after the first


def test_fused_gradients_keep_their_addresses_where_they_are_zeroed() -> None:
    # M#3074, M#4663: a graph replays fixed addresses.
    model, addresses = mlp(), set[tuple[int, ...]]()
    manage_wgrad(model, fuse=True)
    for k in range(3):
        model.zero_grad(set_to_none=k == 0)
        loss_of(model, input_of(k)).backward()
        grads = [param.grad for param in model.parameters()]
        addresses.add(tuple(grad.data_ptr() for grad in grads if grad is not None))
        assert equal(grads_of(model), by_autograd(mlp(), [input_of(k)]))
    assert len(addresses) == 1


@contextmanager
def empty_is_nan() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        deterministic.fill_uninitialized_memory = before[1]


@pytest.mark.parametrize("num_rows", [[2, 4], [0, 6], [0, 0]])
def test_fresh_memory_never_shows(num_rows: list[int]) -> None:
    # transformers#48205: memory that nobody had written reached a result.
    with empty_is_nan():
        for fuse, is_delayed in product((False, True), (False, True)):
            torch.manual_seed(0)
            model = nn.ModuleList([ExpertLinear(2, IN, OUT), nn.Linear(IN, OUT)])
            manage_wgrad(model, fuse=fuse)
            for _ in range(3):
                rows = torch.ones(sum(num_rows), IN)
                with delayed_wgrad(model) as delayed:
                    (model[0](rows, num_rows) + model[1](rows)).sum().backward()
                    if not is_delayed:
                        delayed.flush()
            experts, linear = model[0].weight.grad, model[1].weight.grad
            for expert, num in enumerate(num_rows):
                assert torch.equal(experts[expert], torch.full((OUT, IN), 3.0 * num))
            assert torch.equal(linear, torch.full((OUT, IN), 3.0 * sum(num_rows)))


# ---- what autograd was asked for -----------------------------------------------------------------

Mode = tuple[bool, bool]
MODES: dict[str, Mode] = {"fused": (True, False), "delayed": (False, True), "both": (True, True)}
"""Whether fused, and whether delayed."""


@contextmanager
def managed(model: nn.Module, mode: str) -> Iterator[None]:
    fuse, is_delayed = MODES[mode]
    manage_wgrad(model, fuse=fuse)
    if not is_delayed:
        yield
        return
    with delayed_wgrad(model):
        yield


@pytest.mark.parametrize("mode", MODES)
def test_a_backward_for_other_tensors_leaves_no_gradient_in_the_weights(mode: str) -> None:
    model, reference, x = mlp(), mlp(), input_of().requires_grad_()
    with managed(model, mode):
        (grad,) = torch.autograd.grad(loss_of(model, x), x)
        loss_of(model, x).backward(inputs=[x, model[2].weight])
    expected = torch.autograd.grad(loss_of(reference, x), [x, reference[2].weight])
    assert torch.equal(grad, expected[0])
    assert model[0].weight.grad is None
    assert model[2].weight.grad is not None
    torch.testing.assert_close(model[2].weight.grad, expected[1], rtol=MAX_ERROR, atol=MAX_ERROR)


@pytest.mark.parametrize("mode", MODES)
def test_asking_autograd_for_a_weight_that_it_does_not_carry_is_refused(mode: str) -> None:
    model = mlp()
    with pytest.raises(RuntimeError, match=r"call backward\(\), which leaves it in \.grad"):  # noqa: SIM117
        with managed(model, mode):
            torch.autograd.grad(loss_of(model, input_of()), model[0].weight)


def test_a_managed_model_that_nobody_delays_or_fuses_gives_autograd_its_weights() -> None:
    model, reference = mlp(), mlp()
    manage_wgrad(model)
    got = torch.autograd.grad(loss_of(model, input_of()), list(model.parameters()))
    expected = torch.autograd.grad(loss_of(reference, input_of()), list(reference.parameters()))
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("mode", MODES)
def test_a_second_derivative_is_refused(mode: str) -> None:
    model, x = mlp(), input_of().requires_grad_()
    with managed(model, mode):
        (grad,) = torch.autograd.grad(loss_of(model, x), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.square().sum().backward()


# ---- failures and misuse -------------------------------------------------------------------------


class PlannedError(Exception):
    """A failure that a test wants."""


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise PlannedError("in backward")


def fail_in_the_loop(model: nn.Sequential) -> None:
    loss_of(model, input_of(1)).backward()
    raise PlannedError("in the loop")


def fail_in_backward(model: nn.Sequential) -> None:
    model[2](_Fails.apply(model[0](input_of(1)))).square().mean().backward()


@pytest.mark.parametrize("mode", ["delayed", "both"])
@pytest.mark.parametrize("fail", [fail_in_the_loop, fail_in_backward])
def test_a_failure_leaves_nothing_queued_and_the_next_use_clean(
    fail: Callable[[nn.Sequential], None], mode: str
) -> None:
    model = mlp()
    manage_wgrad(model, fuse=mode == "both")
    with pytest.raises(PlannedError), delayed_wgrad(model) as failed:
        fail(model)
    assert len(failed) == 0
    assert all(param.grad is None for param in model.parameters())
    loss_of(model, input_of()).backward()  # made at once again
    assert equal(grads_of(model), by_autograd(mlp(), [input_of()]))
    model.zero_grad()
    with delayed_wgrad(model):
        loss_of(model, input_of()).backward()
    assert equal(grads_of(model), by_autograd(mlp(), [input_of()]))


def test_after_a_drop_the_same_loop_goes_on() -> None:
    model = mlp()
    with delayed_wgrad(model) as delayed:
        loss_of(model, input_of(1)).backward()
        delayed.drop()
        assert len(delayed) == 0
        loss_of(model, input_of()).backward()
        assert len(delayed) == 2
    assert equal(grads_of(model), by_autograd(mlp(), [input_of()]))


def test_delaying_what_is_delayed_already_is_refused() -> None:
    model = mlp()
    with delayed_wgrad(model) as delayed:
        loss_of(model, input_of()).backward()
        with pytest.raises(RuntimeError, match="delayed already"), delayed_wgrad(model):
            pass
        assert len(delayed) == 2
    assert equal(grads_of(model), by_autograd(mlp(), [input_of()]))


def test_a_microbatch_after_the_end_is_refused() -> None:
    model = mlp()
    with delayed_wgrad(model) as delayed:
        pass
    with pytest.raises(RuntimeError, match="after delayed_wgrad was left"):
        delayed.microbatch(1)
    loss_of(model, input_of()).backward()
    assert equal(grads_of(model), by_autograd(mlp(), [input_of()]))


def overwrite_the_input() -> None:
    model, x = mlp(), input_of()
    with delayed_wgrad(model):
        loss_of(model, x).backward()
        x.zero_()


def test_an_input_that_is_overwritten_before_the_flush_is_refused() -> None:
    with pytest.raises(RuntimeError, match="written to since the backward"):
        overwrite_the_input()


def add_up_a_views_gradient() -> None:
    layer = double(lambda: nn.Linear(IN, OUT))
    added = nn.Parameter(torch.zeros(NUM_ROWS * OUT, dtype=torch.float64))
    with delayed_wgrad(layer):
        for k in range(2):
            (layer(input_of(k)) + added.view(NUM_ROWS, OUT)).square().sum().backward()


def test_an_output_gradient_that_became_a_gradient_is_refused_once_that_changes() -> None:
    # Autograd makes the memory of a view's gradient the parameter's, without asking who reads it.
    with pytest.raises(RuntimeError, match="add a clone of it"):
        add_up_a_views_gradient()


def test_a_fused_product_that_fails_leaves_no_content_of_fresh_memory() -> None:
    model = mlp()
    manage_wgrad(model, fuse=True)
    loss = loss_of(model, input_of())
    with pytest.raises(torch.OutOfMemoryError), OutOfMemory():
        loss.backward()
    loss_of(model, input_of()).backward()
    assert worst_error(grads_of(model), by_autograd(mlp(), [input_of()])) <= MAX_ERROR
