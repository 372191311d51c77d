"""Transformer Engine's layers: delayed and fused weight gradients are those of torch.autograd."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
from gpu_support import take_gpu
from sharding_support import whole_grads
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from wgrad_support import counted

from ep_overlap.testing import RankPool
from fsdp_hooks.accumulation import microbatch
from fsdp_hooks.lifecycle import ShardedModule
from fsdp_hooks.precision import MixedPrecision
from fsdp_hooks.shard import fully_shard
from fsdp_hooks.wgrad import ManagedLayer
from fsdp_hooks.wgrad_layers import delayed_wgrad, manage_wgrad

WIDTH, NUM_ROWS = 64, 32
SPLITS = [8, 0, 19, 5]
"""Rows of each expert: one has none."""
MODES: Mapping[str, tuple[bool, bool]] = {
    "plain": (False, False),
    "delayed": (True, False),
    "fused": (False, True),
    "both": (True, True),
}


class Stack(nn.Module):
    """One layer between plain ones, called twice: its weights are shared by two uses."""

    def __init__(self, layer: nn.Module, args: Sequence[Any] = ()) -> None:
        super().__init__()
        self.layer = layer
        self.args = args
        self.last = te.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.layer(x, *self.args)
        return self.last(x).float().square().mean()


LAYERS: Mapping[str, Callable[[], Stack]] = {
    "Linear": lambda: Stack(te.Linear(WIDTH, WIDTH)),
    "Linear of three weights": lambda: Stack(
        nn.Sequential(
            te.Linear(WIDTH, 3 * WIDTH, bias=False, parameters_split=["q", "k", "v"]),
            te.Linear(3 * WIDTH, WIDTH),
        )
    ),
    "LayerNormLinear": lambda: Stack(te.LayerNormLinear(WIDTH, WIDTH)),
    "LayerNormMLP": lambda: Stack(te.LayerNormMLP(WIDTH, 96, bias=False, activation="swiglu")),
    "GroupedLinear": lambda: Stack(te.GroupedLinear(len(SPLITS), WIDTH, WIDTH), [SPLITS]),
}


def built(name: str, dtype: torch.dtype) -> Stack:
    torch.manual_seed(3)
    return LAYERS[name]().to(device="cuda", dtype=dtype)


def batches(dtype: torch.dtype, rank: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(rank)
    made = [torch.randn(NUM_ROWS, WIDTH, generator=draw) for _ in range(2)]
    return [batch.to("cuda", dtype) for batch in made]


def grads(model: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        assert param.grad is not None, f"{name} has no gradient"
        found[name] = param.grad
    whole = whole_grads(model) if isinstance(model, ShardedModule) else found
    return {name: grad.float().cpu() for name, grad in whole.items() if grad is not None}


def by_mode(model: nn.Module, mode: str, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """Two microbatches; what waits is flushed after both, the last one first."""
    delays, fuses = MODES[mode]
    with counted(model, fuse=fuses) as sink:
        with delayed_wgrad(model) if delays else nullcontext() as delayed:
            for index, batch in enumerate(inputs):
                is_last = index == len(inputs) - 1
                sharded = isinstance(model, ShardedModule)
                with microbatch(model, is_last=is_last) if sharded else nullcontext():
                    if delayed is not None:
                        delayed.microbatch(index)
                    model(batch).backward()
            if delayed is not None:
                assert len(delayed) > 0, "nothing waited"
                for index in reversed(range(len(inputs))):
                    delayed.flush(index)
        assert (sink.num_written > 0) == fuses
        if not fuses:  # a bias's gradient, or a norm's, is added beside fused ones
            assert (sink.num_added > 0) == delays
    return grads(model)


def by_autograd(name: str, dtype: torch.dtype, num_ranks: int = 1) -> dict[str, Tensor]:
    model = built(name, dtype)
    for rank in range(num_ranks):
        for batch in batches(dtype, rank):
            (model(batch) / num_ranks).backward()
    return grads(model)


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    errors = {
        name: float((ours[name] - grad).abs().max() / grad.abs().max())
        for name, grad in theirs.items()
    }
    return max(errors.values())


TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 2e-2}
"""Relative to the largest entry; Transformer Engine's float32 products are made in TF32."""


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_one_process_are_those_of_autograd(
    name: str, mode: str, dtype: torch.dtype
) -> None:
    take_gpu()
    model = built(name, dtype)
    if mode == "plain":
        manage_wgrad(model)
    ours, theirs = by_mode(model, mode, batches(dtype, 0)), by_autograd(name, dtype)
    assert worst(ours, theirs) <= TOLERANCE[dtype]
    if mode == "plain":
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def sharded_errors(dtype: torch.dtype) -> dict[str, float]:
    """By layer, mode and strategy: the largest error against one process. Collective."""
    take_gpu()
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cuda", (size,))
    found: dict[str, float] = {}
    for name in LAYERS:
        theirs = by_autograd(name, dtype, size)
        for mode in MODES:
            for strategy in ("no_shard", "optim_grads_params"):
                model = built(name, dtype)
                mp = MixedPrecision()
                fully_shard(model.layer, mesh=mesh, strategy=strategy, mp=mp)
                fully_shard(model, mesh=mesh, strategy=strategy, mp=mp)
                ours = by_mode(model, mode, batches(dtype, rank))
                found[f"{name}, {mode}, {strategy}"] = worst(ours, theirs)
    return found


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gradients_of_two_ranks_are_those_of_one_process(
    gpu_ranks2: RankPool, dtype: torch.dtype
) -> None:
    for found in gpu_ranks2.run(sharded_errors, dtype):
        wrong = {what: error for what, error in found.items() if not error <= TOLERANCE[dtype]}
        assert not wrong
        assert len(found) == len(LAYERS) * len(MODES) * 2


def test_delayed_gradients_are_bit_for_bit_those_that_are_not_delayed() -> None:
    take_gpu()
    for name in LAYERS:
        batch, *_ = batches(torch.bfloat16, 0)
        theirs, model = built(name, torch.bfloat16), built(name, torch.bfloat16)
        theirs(batch).backward()
        with delayed_wgrad(model):
            model(batch).backward()
        ours, expected = grads(model), grads(theirs)
        assert [key for key in expected if not torch.equal(ours[key], expected[key])] == [], name


def test_between_backward_and_flush_only_operands_are_alive() -> None:
    """Of a grouped layer, whose own store keeps memory for all gradients, too."""
    take_gpu()
    width, experts, rows = 1024, 8, 256
    layer = te.GroupedLinear(experts, width, width, bias=False, params_dtype=torch.bfloat16)
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    splits = [rows // experts] * experts
    with delayed_wgrad(nn.Sequential(layer)) as delayed:
        layer(x, splits).sum().backward()  # workspaces are made
        delayed.flush()
        layer.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        layer(x, splits).sum().backward()
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before
        weight_bytes = experts * width * width * 2
        assert held < weight_bytes // 4, "x is the caller's; dY is as large as x"
        assert held >= 0
        delayed.flush()


# ---- refused -------------------------------------------------------------------------------------


def test_what_is_refused_is_named() -> None:
    take_gpu()
    refused: Mapping[str, tuple[nn.Module, bool, str]] = {
        "fuses by itself": (
            te.Linear(WIDTH, WIDTH, fuse_wgrad_accumulation=True),
            False,
            "fuse_wgrad_accumulation=True",
        ),
        "op fuser": (te.ops.Linear(WIDTH, WIDTH), False, "its op fuser"),
        "grouped tensors": (
            te.GroupedLinear(2, WIDTH, WIDTH, use_grouped_tensor=True),
            False,
            "use_grouped_tensor=True",
        ),
        "biases": (te.LayerNormMLP(WIDTH, 96), True, "expected bias=False"),
        "square": (te.LayerNormMLP(WIDTH, WIDTH, bias=False), False, "told apart"),
    }
    for what, (layer, fuse, words) in refused.items():
        kind = type(layer)
        with pytest.raises(ValueError, match=words):
            manage_wgrad(nn.Sequential(layer), fuse=fuse)
        assert type(layer) is kind, what


def test_an_older_transformer_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    take_gpu()
    monkeypatch.setattr("fsdp_hooks.wgrad_transformer_engine.version", lambda _: "2.9.1")
    with pytest.raises(ValueError, match=r"Transformer Engine 2\.9\.1's Linear; expected 2\.10"):
        manage_wgrad(nn.Sequential(te.Linear(WIDTH, WIDTH)), fuse=True)


def test_a_grouped_layer_of_a_release_without_grouped_tensors_is_managed() -> None:
    """2.10's has no attribute that names that path."""
    take_gpu()
    layer = te.GroupedLinear(2, WIDTH, WIDTH)
    del layer.use_grouped_tensor
    manage_wgrad(nn.Sequential(layer), fuse=True)
    assert isinstance(layer, ManagedLayer)


def test_its_own_flush_is_refused() -> None:
    take_gpu()
    model = nn.Sequential(te.Linear(WIDTH, WIDTH, bias=False))
    with delayed_wgrad(model):
        model(batches(torch.float32, 0)[0]).sum().backward()
        with pytest.raises(RuntimeError, match=r"expected a flush of its queue"):
            model[0].backward_dw()
