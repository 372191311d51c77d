"""Pieces of nodes that are replayed from CUDA graphs: bit for bit what is else called."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from gpu_support import take_gpu
from torch import Tensor, nn

from ep_overlap.config import OverlapConfig
from ep_overlap.links.emulated import register_emulated_backend
from ep_overlap.links.emulated_speed import EmulatedLinks
from ep_overlap.links.emulation import Emulation
from ep_overlap.models.groups import new_expert_groups
from ep_overlap.models.megatron_build import MegatronSizes, build_gpt
from ep_overlap.models.megatron_globals import megatron_schedule_globals
from ep_overlap.models.megatron_parts import GPTParts, mean_loss
from ep_overlap.run.cuda_graph import GraphedFunction
from ep_overlap.schedule import OverlapSchedule

NUM_MICROBATCHES = 6
IN_FLIGHT = {"plain": 2, "paired": 4}
"""Microbatches, by order."""
NUM_LAYERS = 2
SEQ_LENGTH = 128
NUM_STEPS = 3


def block() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(take_gpu())


def gradients_of(calls: str, *, graphed: bool) -> tuple[list[Tensor], int]:
    """Of weights and inputs, for calls such as ``F0 F1 B0 B1``; and how many were captured."""
    module = block()
    function = GraphedFunction(module, [module])
    inputs = [torch.randn(8, 64, device="cuda", requires_grad=True) for _ in range(3)]
    with torch.no_grad():
        for index, tensor in enumerate(inputs):
            tensor.copy_(torch.arange(512.0).reshape(8, 64).cos() * (index + 1))
    outputs: dict[str, Tensor] = {}
    for call in calls.split():
        which = inputs[int(call[1])]
        if call[0] == "F":
            # As in a model, what the function gives is read by something that saves it.
            # And as there, it is given a view, behind which autograd keeps what it can.
            given = which.view_as(which)
            outputs[call[1]] = (function if graphed else module)(given).sin()
        else:
            outputs.pop(call[1]).sum().backward()
    grads = [tensor.grad for tensor in (*module.parameters(), *inputs) if tensor.grad is not None]
    return grads, function.num_captured


@pytest.mark.parametrize(
    ("calls", "in_flight"),
    [
        ("F0 B0 F1 B1 F2 B2", 1),
        ("F0 F1 B0 F2 B1 B2", 2),
        ("F0 F1 F2 B2 B0 B1", 3),
    ],
)
def test_gradients_of_calls_in_flight_add_up_and_each_has_graphs_of_its_own(
    calls: str, in_flight: int
) -> None:
    graphed, num_captured = gradients_of(calls, graphed=True)
    called, _ = gradients_of(calls, graphed=False)
    assert len(graphed) == len(called) == 7
    for found, expected in zip(graphed, called, strict=True):
        assert torch.equal(found, expected)
    assert num_captured == in_flight


def test_a_call_that_is_dropped_gives_its_graphs_back_and_evaluation_takes_none() -> None:
    module = block()
    function = GraphedFunction(module, [module])
    x = torch.randn(8, 64, device="cuda", requires_grad=True)
    for _ in range(3):
        function(x)  # nobody keeps it: there is no backward
    with torch.no_grad():
        assert torch.equal(function(x), module(x))
    assert function.num_captured == 1
    twice = x.view_as(x)
    for _ in range(2):
        function(twice).sum().backward(retain_graph=True)
        once, x.grad = x.grad, None
    (function(twice).sum() + function(twice).sum()).backward()
    assert torch.equal(x.grad, 2 * once)
    assert function.num_captured == 2, "two in flight"
    function(torch.randn(4, 64, device="cuda"))
    assert function.num_captured == 3, "another shape"
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    assert not function(x.detach()).requires_grad
    assert function.num_captured == 3, "nothing is wanted"


def test_graphs_of_weights_that_are_elsewhere_go_and_their_memory_with_them() -> None:
    module = block()
    function = GraphedFunction(module, [module])
    x = torch.randn(8, 64, device="cuda")
    held: list[int] = []
    for _ in range(4):
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
        assert torch.equal(function(x), module(x))
        gc.collect()
        held.append(torch.cuda.memory_allocated())
    assert function.num_captured == 4
    assert held[3] == held[2] == held[1]


# ---- a GPTModel ----------------------------------------------------------------------------------


@contextmanager
def one_of_two() -> Iterator[None]:
    """One rank of an emulated world of two."""
    take_gpu()
    links = EmulatedLinks(a2a_bytes_per_s=200e9, dp_bytes_per_s=200e9, latency_s=20e-6)
    register_emulated_backend()
    dist.init_process_group(
        "emulated", rank=0, world_size=2, store=dist.HashStore(), pg_options=Emulation(links)
    )
    try:
        with megatron_schedule_globals():
            yield
    finally:
        dist.destroy_process_group()


def gpt(impl: str = "transformer_engine", **settings: object):
    sizes = MegatronSizes(
        num_layers=NUM_LAYERS,
        hidden_size=256,
        num_heads=4,
        ffn_hidden_size=64,
        num_experts=4,
        topk=2,
        seq_length=SEQ_LENGTH,
        vocab_size=256,
        transformer_impl=impl,
        dtype=torch.bfloat16,
        settings=settings,
    )
    return build_gpt(sizes, new_expert_groups(2), seed=1, device="cuda")


def trained(order: str, *, cuda_graphs: bool) -> tuple[list[Tensor], list[int]]:
    """Losses of all steps, and the last one's gradients; and how many calls each layer captured."""
    parts = GPTParts(gpt(), cuda_graphs=cuda_graphs)
    schedule = OverlapSchedule(parts, OverlapConfig(num_microbatches=NUM_MICROBATCHES, order=order))
    optimizer = torch.optim.SGD(parts.module.parameters(), lr=0.1)
    losses: list[Tensor] = []
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(
            256, (NUM_MICROBATCHES, 2, SEQ_LENGTH + 1), generator=generator
        ).cuda()
        batches = [parts.batch(text[:, :-1], text[:, 1:]) for text in tokens]
        optimizer.zero_grad()
        losses += schedule.step(batches, mean_loss).losses
        if step == 0:
            losses += schedule.evaluate(batches, mean_loss).losses
        if step < NUM_STEPS - 1:
            optimizer.step()
    grads = [p.grad for p in parts.module.parameters() if p.grad is not None]
    captured = [
        layer._attention.num_captured
        for layer in parts.layers
        if isinstance(layer._attention, GraphedFunction)
    ]
    return [*losses, *grads], captured


@pytest.mark.parametrize("order", ["plain", "paired"])
def test_a_gpt_model_trains_bit_for_bit_alike(order: str) -> None:
    with one_of_two():
        called, none = trained(order, cuda_graphs=False)
        replayed, captured = trained(order, cuda_graphs=True)
    assert none == []
    assert len(captured) == NUM_LAYERS
    # As many as are in flight at once: in the first step, and no more in the second and third.
    assert max(captured) <= IN_FLIGHT[order] < NUM_MICROBATCHES, captured
    assert len(called) == len(replayed) > 20
    for expected, found in zip(called, replayed, strict=True):
        assert expected.isfinite().all()
        assert torch.equal(expected, found)


def test_what_cannot_be_replayed_is_refused_by_name() -> None:
    with one_of_two():
        with pytest.raises(ValueError, match="cuda_graphs with local layers, expected Transformer"):
            GPTParts(gpt("local"), cuda_graphs=True)
        with pytest.raises(ValueError, match="cuda_graphs with dropout, expected none"):
            GPTParts(gpt(hidden_dropout=0.1), cuda_graphs=True)
        parts = GPTParts(gpt(), cuda_graphs=True)
        for options, words in (
            ({"delay_wgrad": True}, "cuda_graphs with delayed weight gradients"),
            ({"recompute_granularity": "full"}, "cuda_graphs with recompute_granularity='full'"),
        ):
            with pytest.raises(ValueError, match=words):
                OverlapSchedule(parts, OverlapConfig(num_microbatches=2, **options))
        schedule = OverlapSchedule(parts, OverlapConfig(num_microbatches=1))
        short = torch.zeros(1, 100, dtype=torch.int64, device="cuda")
        with pytest.raises(ValueError, match="sequences of 100 tokens, expected a multiple of 64"):
            schedule.step([parts.batch(short, short)], mean_loss)
        whole = torch.zeros(1, SEQ_LENGTH, dtype=torch.int64, device="cuda")
        assert schedule.step([parts.batch(whole, whole)], mean_loss).losses[0].isfinite()
