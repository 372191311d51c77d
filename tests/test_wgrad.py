"""Weight gradients made later, or written straight where they go: the same numbers as
torch.autograd, for every kind of input, layer and region. The tags are those of
``docs/bug_kinds.md``."""

import copy
import pickle
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from sharding_support import Grads, double, equal, worst_error
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
from wgrad_support import MAX_ERROR, MainGradSink, counted, grads_of

from fsdp_hooks.wgrad import ManagedLayer, Wgrad, managed_linear
from fsdp_hooks.wgrad_layers import ExpertLinear, ManagedLinear, delayed_wgrad, manage_wgrad

MODES = ("plain", "delayed", "fused", "both")
Loss = Callable[[nn.Module, Tensor], Tensor]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1)
    )


def square_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().sum() if x.dtype is torch.float32 else model(x).square().sum()


def backwards(
    model: nn.Module, mode: str, inputs: Sequence[Tensor], loss: Loss = square_loss
) -> Grads:
    """One backward for each input; then the flush, if any. Gradients by name, and the inputs'."""
    if mode != "autograd":
        manage_wgrad(model, fuse=mode in ("fused", "both"))
    is_delayed = mode in ("delayed", "both")
    with delayed_wgrad(model) if is_delayed else nullcontext():
        for x in inputs:
            loss(model, x).backward()
    return grads_of(model) | {f"input {k}": x.grad for k, x in enumerate(inputs) if x.numel()}


def assert_as_autograd(
    make: Callable[[], nn.Module],
    inputs: Callable[[], Sequence[Tensor]],
    mode: str,
    loss: Loss = square_loss,
) -> None:
    """Bitwise, unless gradients are fused: then within rounding."""
    got = backwards(make(), mode, inputs(), loss)
    expected = backwards(make(), "autograd", inputs(), loss)
    if mode in ("fused", "both"):
        assert worst_error(got, expected) <= MAX_ERROR
    else:
        assert equal(got, expected)


def mlp() -> nn.Module:
    return double(lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)))


# ---- what a layer is given -----------------------------------------------------------------------

INPUTS: dict[str, Callable[[], Tensor]] = {
    "[T, in]": lambda: randn(4, 3),
    "[S, B, in]": lambda: randn(2, 3, 3),
    "[S, B, H, in]": lambda: randn(2, 2, 2, 3),
    "transposed": lambda: randn(4, 2, 3).transpose(0, 1),
    "of columns": lambda: randn(3, 4).t(),
    "expanded": lambda: randn(1, 3).expand(4, 3),
    "of no rows": lambda: randn(0, 3),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", INPUTS)
def test_every_shape_and_layout_of_input_has_autograds_gradients(shape: str, mode: str) -> None:
    for wants_input, has_bias in product((False, True), (False, True)):
        assert_as_autograd(
            lambda has_bias=has_bias: double(lambda: nn.Linear(3, 5, bias=has_bias)),
            lambda wants_input=wants_input: [
                INPUTS[shape]().requires_grad_(wants_input) for _ in range(2)
            ],
            mode,
        )


@pytest.mark.parametrize("mode", MODES)
def test_a_single_row_without_batch_has_autograds_gradients(mode: str) -> None:
    def inputs() -> Sequence[Tensor]:
        return [randn(3, seed=k).requires_grad_() for k in range(2)]

    got = backwards(mlp(), mode, inputs())
    assert worst_error(got, backwards(mlp(), "autograd", inputs())) <= MAX_ERROR


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "2.weight", "2.bias", "0", "2"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_gets_its_own(frozen: str, mode: str) -> None:
    def make() -> nn.Module:
        model = mlp()
        for name, param in model.named_parameters():
            param.requires_grad_(not name.startswith(frozen))
        return model

    assert_as_autograd(make, lambda: [randn(4, 3)], mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_first_layer_whose_input_takes_no_gradient_gets_its_own(mode: str) -> None:
    # P#138863, P#153833: a split backward found nothing to do on the first stage.
    got = backwards(mlp(), mode, [randn(4, 3)])
    assert got["0.weight"] is not None
    assert_as_autograd(mlp, lambda: [randn(4, 3)], mode)


def test_without_gradients_a_managed_layer_leaves_nothing_and_returns_the_same() -> None:
    model, x = mlp(), randn(4, 3)
    expected = model(x).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with delayed_wgrad(model) as delayed, mode():
            assert torch.equal(model(x), expected)
            assert len(delayed) == 0


def test_the_output_of_a_managed_layer_may_be_changed_in_place() -> None:
    for mode, has_bias in product(MODES, (False, True)):
        assert_as_autograd(
            lambda has_bias=has_bias: double(lambda: nn.Linear(3, 5, bias=has_bias)),
            lambda: [randn(2, 2, 3)],
            mode,
            lambda model, x: F.relu(model(x), inplace=True).sum(),
        )


def test_complex_and_meta_weights_stay_plain() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(3, 5, dtype=torch.complex128)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x * (1 + 2j)).abs().sum()

    for mode in MODES:
        assert_as_autograd(make, lambda: [randn(4, 3)], mode, loss)
        shapes = backwards(nn.Linear(3, 5, device="meta"), mode, [torch.ones(4, 3, device="meta")])
        assert shapes["weight"] is not None
        assert shapes["weight"].is_meta


# ---- kinds of layers -----------------------------------------------------------------------------


class Doubled(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return 2 * super().forward(input)


class Named(nn.Linear):
    """One without."""


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_with_a_forward_of_its_own_stays_plain(mode: str) -> None:
    model = nn.Sequential(Doubled(3, 3), Named(3, 3))
    manage_wgrad(model)
    assert [isinstance(layer, ManagedLayer) for layer in model] == [False, True]
    assert isinstance(model[1], Named)
    assert_as_autograd(
        lambda: double(lambda: nn.Sequential(Doubled(3, 3), Named(3, 3))),
        lambda: [randn(4, 3)],
        mode,
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_computed_weight_stays_plain(mode: str) -> None:
    def make() -> nn.Module:
        return double(lambda: nn.Sequential(weight_norm(nn.Linear(3, 3)), nn.Linear(3, 2)))

    model = make()
    with delayed_wgrad(model) as delayed:
        square_loss(model, randn(4, 3)).backward()
        assert len(delayed) == 1
    assert_as_autograd(make, lambda: [randn(4, 3)], mode)


class Attends(nn.Module):
    """Reads the weight of its output projection past that layer's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(4, 2, batch_first=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attn(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("mode", MODES)
def test_a_weight_read_past_its_layer_gets_its_gradient_from_autograd(mode: str) -> None:
    assert_as_autograd(lambda: double(Attends), lambda: [randn(2, 3, 4), randn(2, 3, 4)], mode)


class _UsersLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x


class Branches(nn.Module):
    """An output in pieces, which go different ways; and a user's own function."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 6)
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.up(x).chunk(2, dim=-1)
        return torch.tanh(self.left(first)) * _UsersLinear.apply(second, self.right.weight)


@pytest.mark.parametrize("mode", MODES)
def test_outputs_in_pieces_and_functions_of_a_users_own_are_right(mode: str) -> None:
    # P#166577, P#170277: all gradients came on output 0, custom functions were not split.
    assert_as_autograd(lambda: double(Branches), lambda: [randn(4, 3), randn(4, 3)], mode)


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_recomputed_layers_have_autograds_gradients(mode: str, is_reentrant: bool) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out: Any = checkpoint(model, x, use_reentrant=is_reentrant)
        return out.square().sum()

    def inputs() -> Sequence[Tensor]:
        return [randn(4, 3, seed=k).requires_grad_() for k in range(2)]

    assert_as_autograd(mlp, inputs, mode, loss)


# ---- experts -------------------------------------------------------------------------------------


def experts() -> ExpertLinear:
    torch.manual_seed(0)
    return ExpertLinear(3, 4, 5, dtype=torch.float64)


def by_loop(model: nn.Module, parts: Sequence[Tensor]) -> Tensor:
    weights = model.get_parameter("weight")
    return sum((F.linear(p, w).square().sum() for p, w in zip(parts, weights, strict=True)), ZERO)


ZERO = torch.zeros((), dtype=torch.float64)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_rows", [[2, 3, 1], [0, 6, 0], [0, 0, 0], [4, 0, 2]])
def test_grouped_experts_equal_a_loop(num_rows: list[int], mode: str) -> None:
    def inputs() -> Sequence[Tensor]:
        return [randn(sum(num_rows), 4, seed=k).requires_grad_() for k in range(2)]

    got = backwards(experts(), mode, inputs(), lambda model, x: model(x, num_rows).square().sum())
    expected = backwards(
        experts(), "autograd", inputs(), lambda model, x: by_loop(model, x.split(num_rows))
    )
    assert worst_error(got, expected) <= MAX_ERROR


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_tokens", [4, 0])
def test_batched_experts_equal_a_loop(num_tokens: int, mode: str) -> None:
    def inputs() -> Sequence[Tensor]:
        return [randn(3, num_tokens, 4, seed=k).requires_grad_() for k in range(2)]

    got = backwards(experts(), mode, inputs())
    expected = backwards(experts(), "autograd", inputs(), lambda model, x: by_loop(model, list(x)))
    assert worst_error(got, expected) <= MAX_ERROR


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_after_forward", [False, True])
def test_the_callers_list_of_rows_may_change_once_it_was_read(
    is_after_forward: bool, mode: str
) -> None:
    rows = [1, 2, 3]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        rows[:] = [1, 2, 3]
        made = model(x, rows).square().sum()
        if is_after_forward:
            rows[:] = [3, 2, 1]
        else:
            x.register_hook(lambda _: rows.__setitem__(slice(None), [3, 2, 1]))
        return made

    got = backwards(experts(), mode, [randn(6, 4).requires_grad_()], loss)
    expected = backwards(
        experts(),
        "autograd",
        [randn(6, 4).requires_grad_()],
        lambda model, x: by_loop(model, x.split([1, 2, 3])),
    )
    assert rows == [3, 2, 1]
    assert worst_error(got, expected) <= MAX_ERROR


def test_grouped_weights_that_are_views_of_one_tensor_train() -> None:
    # M#6228: swapped data did not reach the views, so they never trained.
    flat, flat_grad = randn(3, 5, 4), torch.zeros(3, 5, 4, dtype=torch.float64)
    parts = nn.ModuleList(nn.Linear(4, 5, bias=False) for _ in flat)
    for part, weight, grad in zip(parts, flat, flat_grad, strict=True):
        assert isinstance(part, nn.Linear)
        part.weight = nn.Parameter(weight)
        part.weight.grad = grad
    reference = nn.Parameter(flat.clone())
    manage_wgrad(parts, fuse=True)
    for seed in range(2):
        rows = randn(3, 2, 4, seed=seed)
        with delayed_wgrad(parts):
            outs = [part(row) for part, row in zip(parts, rows, strict=True)]
            torch.stack(outs).square().sum().backward()
        expected = torch.bmm(rows, reference.mT)
        torch.testing.assert_close(torch.stack(outs), expected, rtol=MAX_ERROR, atol=MAX_ERROR)
        reference.grad = None
        expected.square().sum().backward()
        torch.testing.assert_close(flat_grad, reference.grad, rtol=MAX_ERROR, atol=MAX_ERROR)
        torch.optim.SGD(parts.parameters(), lr=0.1).step()
        torch.optim.SGD([reference], lr=0.1).step()
        torch.testing.assert_close(flat, reference.detach(), rtol=MAX_ERROR, atol=MAX_ERROR)
        flat_grad.zero_()


# ---- dtypes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_bf16_contributions_are_added_up_in_the_float32_gradient(mode: str) -> None:
    # L#149, L#153, M#6624: 256 + 1 is 256 in bfloat16.
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).sum()

    got = backwards(nn.Linear(1, 1), mode, [torch.tensor([[256.0]]), torch.tensor([[1.0]])], loss)
    assert got["weight"] is not None
    assert got["weight"].dtype is torch.float32
    assert got["weight"].item() == 257


@pytest.mark.parametrize("mode", ["delayed", "fused", "both"])
def test_bf16_weights_are_added_up_in_the_dtype_of_the_sinks_tensor(mode: str) -> None:
    # L#149, L#153, M#6624, with a main gradient. Fused, the sum over 257 rows is in float32, too.
    layer = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    is_delayed, is_fused = mode != "fused", mode != "delayed"
    wgrad = manage_wgrad(layer, fuse=is_fused)
    wgrad.sink = sink = MainGradSink(layer)
    inputs = [torch.tensor([[256.0]]), torch.tensor([[1.0]]), torch.ones(257, 1)]
    for x in inputs:
        with delayed_wgrad(layer) if is_delayed else nullcontext():
            layer(x.bfloat16()).sum().backward()
    last = 257 if is_fused else 256
    assert sink.main_grads[layer.weight].item() == 257 + last
    assert layer.weight.grad is None


def test_a_narrow_destination_is_rounded_to_after_the_product() -> None:
    # In bfloat16, 1 + 2^-8 is 1; its square, 1 + 2^-7 and a bit more, is not.
    layer = nn.Linear(1, 1, bias=False)
    manage_wgrad(layer, fuse=True).sink = sink = MainGradSink(layer, torch.bfloat16)
    factor = 1 + 2**-8
    for num_times in (1, 2):
        (layer(torch.tensor([[factor]])) * factor).sum().backward()
        assert sink.main_grads[layer.weight].item() == num_times * (1 + 2**-7)


@pytest.mark.parametrize("mode", ["plain", "delayed"])
@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 3)])
def test_an_autocast_region_is_bitwise_plain_autocast(shape: Sequence[int], mode: str) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        assert out.dtype is torch.bfloat16
        return out.float().square().sum()

    def make() -> nn.Module:
        return mlp().float()

    assert_as_autograd(make, lambda: [randn(*shape).float().requires_grad_()], mode, loss)


def test_float64_is_left_alone_by_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        for mode in MODES:
            assert_as_autograd(mlp, lambda: [randn(4, 3)], mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_plain_use_in_the_same_autocast_region_keeps_its_gradient(mode: str) -> None:
    # The region caches cast weights: one that was cast where no graph is recorded has none.
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            weight, bias = model.get_parameter("weight"), model.get_parameter("bias")
            return (model(x) + F.linear(2 * x, weight, bias)).float().sum()

    got = backwards(nn.Linear(1, 1), mode, [torch.ones(1, 1)], loss)
    assert [grad and grad.item() for grad in (got["weight"], got["bias"])] == [3, 2]


# ---- who manages what ----------------------------------------------------------------------------


def managers(model: nn.Module) -> set[Wgrad | None]:
    return {layer.wgrad for layer in model.modules() if isinstance(layer, ManagedLayer)}


def test_managing_again_or_a_part_gives_the_same_manager() -> None:
    model = mlp()
    wgrad = manage_wgrad(model, fuse=True)
    assert manage_wgrad(model) is wgrad
    assert manage_wgrad(model, fuse=True) is wgrad
    assert manage_wgrad(model.get_submodule("0")) is wgrad
    assert managers(model) == {wgrad}
    with pytest.raises(ValueError, match=r"fuse=False.*managed with fuse=True"):
        manage_wgrad(model, fuse=False)


def test_a_model_of_parts_that_are_managed_by_themselves_is_refused() -> None:
    model = mlp()
    manage_wgrad(model.get_submodule("0"))
    manage_wgrad(model.get_submodule("2"))
    with pytest.raises(ValueError, match="managed already, each by itself"):
        manage_wgrad(model)


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="no layer whose weight gradients can be managed"):
        manage_wgrad(nn.Sequential(nn.Tanh(), nn.LayerNorm(3)))


def test_a_bias_with_a_weight_for_each_expert_is_refused() -> None:
    model = experts()
    with pytest.raises(ValueError, match="Add the bias outside"):
        managed_linear(model, randn(3, 2, 4), model.weight, randn(5))


@pytest.mark.parametrize("mode", MODES)
def test_a_copy_of_a_managed_model_is_managed_by_itself(mode: str) -> None:
    model = mlp()
    wgrad = manage_wgrad(model, fuse=mode in ("fused", "both"))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(other[0], ManagedLinear)
        assert len(managers(other)) == 1
        assert managers(other) != {wgrad}
        with counted(model, fuse=wgrad.is_fused) as sink:
            got = backwards(other, mode, [randn(4, 3)])
        assert (sink.num_added, sink.num_written) == (0, 0)
        assert worst_error(got, backwards(mlp(), "autograd", [randn(4, 3)])) <= MAX_ERROR
        assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("fuse", [False, True])
def test_a_copy_that_is_made_while_gradients_wait_delays_nothing(fuse: bool) -> None:
    model = mlp()
    manage_wgrad(model, fuse=fuse)
    with delayed_wgrad(model) as delayed:
        square_loss(model, randn(4, 3)).backward()
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        assert len(delayed) == 2
    plain = mlp()
    square_loss(plain, randn(4, 3)).backward()
    expected = grads_of(plain)
    assert worst_error(grads_of(model), expected) <= MAX_ERROR
    for other in copies:
        other.zero_grad()
        square_loss(other, randn(4, 3)).backward()
        assert worst_error(grads_of(other), expected) <= MAX_ERROR


# ---- what calls the model ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_transforms_of_torch_func_return_what_they_return_of_a_plain_model(mode: str) -> None:
    plain, model, x = mlp(), mlp(), randn(4, 3)
    manage_wgrad(model, fuse=mode in ("fused", "both"))

    def all_of(called: nn.Module) -> list[Tensor]:
        return [
            torch.func.vmap(called)(x),
            torch.func.grad(lambda rows: called(rows).square().sum())(x),
            torch.func.jacrev(called)(x),
        ]

    with delayed_wgrad(model) if mode in ("delayed", "both") else nullcontext():
        got = all_of(model)
    for ours, theirs in zip(got, all_of(plain), strict=True):
        assert torch.equal(ours, theirs)
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("mode", ["delayed", "fused", "both"])
@pytest.mark.parametrize("is_post", [False, True])
def test_hooks_of_a_weight_that_would_see_no_gradient_are_refused(is_post: bool, mode: str) -> None:
    model = mlp()
    weight = model.get_parameter("2.weight")
    if is_post:
        hook = weight.register_post_accumulate_grad_hook(lambda _: None)
    else:
        hook = weight.register_hook(lambda grad: grad)
    with pytest.raises(RuntimeError, match="has a hook"):
        backwards(model, mode, [randn(4, 3)])
    hook.remove()
    model.zero_grad()
    got = backwards(model, mode, [randn(4, 3)])
    assert worst_error(got, backwards(mlp(), "autograd", [randn(4, 3)])) <= MAX_ERROR


def test_hooks_of_a_weight_whose_gradient_autograd_carries_run() -> None:
    def seen_by(model: nn.Module) -> list[Tensor]:
        seen: list[Tensor] = []
        model.get_parameter("0.weight").register_hook(seen.append)
        square_loss(model, randn(4, 3)).backward()
        return seen

    managed = mlp()
    manage_wgrad(managed)
    (ours,), (theirs,) = seen_by(managed), seen_by(mlp())
    assert torch.equal(ours, theirs)
