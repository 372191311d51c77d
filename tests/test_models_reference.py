"""The reference model: its parts against its own forward, and EP 2 against one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models_support import (
    differences,
    in_one_graph,
    random_tokens,
    recording,
    run_ranks,
    undeclared,
)
from torch import Tensor

from ep_overlap.models.groups import lone_expert_groups, new_expert_groups
from ep_overlap.models.reference import (
    Batch,
    DenseLayer,
    MoELayer,
    MoETransformer,
    ReferenceConfig,
    cross_entropy,
)

SHAPES = {"one layer": (1, 1), "three layers": (3, 1), "dense between": (3, 2)}
"""(num_layers, moe_layer_freq)"""


def config(shape: str = "dense between", dtype: torch.dtype = torch.float64, topk: int = 2):
    num_layers, moe_layer_freq = SHAPES[shape]
    return ReferenceConfig(
        num_layers=num_layers,
        moe_layer_freq=moe_layer_freq,
        hidden_size=32,
        num_heads=4,
        ffn_hidden_size=48,
        num_experts=4,
        topk=topk,
        seq_length=16,
        dtype=dtype,
    )


def batch(seed: int) -> Batch:
    tokens, targets = random_tokens(seed, batch_size=2, seq_length=16)
    return Batch(tokens=tokens, targets=targets)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_parts_in_segments_equal_forward_bit_for_bit(shape: str, dtype: torch.dtype):
    model = MoETransformer(config(shape, dtype), lone_expert_groups())
    assert differences(model, [batch(1)], cross_entropy) == []


@pytest.mark.parametrize("shape", SHAPES)
def test_two_microbatches_in_turns_equal_one_after_the_other(shape: str):
    model = MoETransformer(config(shape, torch.float32), lone_expert_groups())
    assert differences(model, [batch(1), batch(2)], cross_entropy) == []


def test_a_lost_residual_gradient_is_seen():
    model = MoETransformer(config(), lone_expert_groups())
    found = differences(model, [batch(1)], cross_entropy, loses_residual=True)
    assert "embedding.weight" in found
    assert not any(name.startswith(("loss", "output")) for name in found)


def test_layers_that_frequency_does_not_divide_are_dense():
    model = MoETransformer(config("dense between"), lone_expert_groups())
    assert [type(layer) for layer in model.layers] == [MoELayer, DenseLayer, MoELayer]


def test_experts_parameters_are_those_of_experts():
    model = MoETransformer(config("dense between"), lone_expert_groups())
    experts = set(model.expert_parameters())
    names = {name for name, parameter in model.named_parameters() if parameter in experts}
    assert names == {
        f"blocks.{layer}.experts.{expert}.{matrix}.weight"
        for layer in (0, 2)
        for expert in range(4)
        for matrix in ("up", "down")
    }


def test_building_leaves_the_global_generator_alone_and_depends_on_the_seed():
    before = torch.get_rng_state()
    first, same, other = (
        MoETransformer(config(), lone_expert_groups(), seed=seed).state_dict() for seed in (1, 1, 2)
    )
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["output.weight"], other["output.weight"])
    assert not torch.equal(
        first["blocks.0.experts.0.up.weight"], first["blocks.0.experts.1.up.weight"]
    )


def test_a_part_before_its_attn_says_so():
    model = MoETransformer(config(), lone_expert_groups())
    with pytest.raises(RuntimeError, match=r"layer 0 .* run its attn first"):
        model.layers[0].combine(model.begin(batch(1)), torch.zeros(4, 32))


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"hidden_size 30 is not a multiple of num_heads 4"):
        ReferenceConfig(
            num_layers=1,
            hidden_size=30,
            num_heads=4,
            ffn_hidden_size=8,
            num_experts=4,
            topk=2,
            seq_length=8,
        )


# Two ranks: everything in one launch, as starting processes is what costs.


def on_two_ranks(rank: int) -> dict[str, Any]:
    groups = new_expert_groups(2)
    mine = [batch(10 + rank), batch(20 + rank)]
    found: dict[str, Any] = {}
    for shape in SHAPES:
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            model = MoETransformer(config(shape, dtype), groups)
            found[f"{shape} {dtype}"] = differences(model, mine, cross_entropy)
    found["whole model"] = whole_model_over_ranks(MoETransformer(config(), groups), mine[0])
    found["starved"] = starved(MoETransformer(config(topk=1), groups), mine)
    log: list[Any] = []
    recorded = MoETransformer(config(), new_expert_groups(2, new_group=recording(log)))
    found["undeclared"] = undeclared(recorded, mine[0], cross_entropy, log)
    found["backward"] = [op for _, op in backward_log(recorded, mine[0], log)]
    return found


def whole_model_over_ranks(model: MoETransformer, one: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean loss of both ranks' batches, and its gradients."""
    (loss,), grads = in_one_graph(model, [one], cross_entropy)
    dist.all_reduce(loss)
    experts = set(model.expert_parameters())
    for name, parameter in model.named_parameters():
        if parameter not in experts:  # an expert has gathered the gradients of all ranks' tokens
            dist.all_reduce(grads[name])
    return loss / 2, {name: grad / 2 for name, grad in grads.items()}


def starve_rank_1(router_weight: Tensor) -> None:
    """Send every token to expert 0 or 1, which rank 0 holds: one of w.x and -w.x beats 0."""
    with torch.no_grad():
        router_weight[1] = -router_weight[0]
        router_weight[2:] = 0


def starved(model: MoETransformer, batches: list[Batch]) -> tuple[int, list[str]]:
    """How many tokens came to this rank, and what differs."""
    state = model.begin(batches[0])
    layer = model.layers[0]
    starve_rank_1(layer.router.weight)
    layer.attn(state, model.pre(state))
    return sum(state.routing[0].received), differences(model, batches, cross_entropy)


def backward_log(model: MoETransformer, one: Batch, log: list[Any]) -> list[Any]:
    loss = cross_entropy(model(one), one)
    log.clear()
    loss.backward()
    return log


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    return run_ranks(on_two_ranks, folder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_on_two_ranks_parts_in_turns_equal_forward(two_ranks, shape: str, dtype: torch.dtype):
    assert [found[f"{shape} {dtype}"] for found in two_ranks] == [[], []]


def test_two_ranks_are_one_process_in_float64(two_ranks):
    model = MoETransformer(config(), lone_expert_groups())
    losses, grads = in_one_graph(model, [batch(10), batch(11)], cross_entropy)
    seen = set()
    for found in two_ranks:
        loss, rank_grads = found["whole model"]
        torch.testing.assert_close(loss, torch.stack(losses).mean(), rtol=1e-12, atol=0)
        for name, grad in rank_grads.items():
            tolerance = 1e-12 * grads[name].abs().max().item() / 2
            torch.testing.assert_close(grad, grads[name] / 2, rtol=0, atol=tolerance)
        seen |= rank_grads.keys()
    assert seen == grads.keys()


def test_a_rank_that_gets_no_token_works(two_ranks):
    (num_received, different), (num_received_1, different_1) = (
        found["starved"] for found in two_ranks
    )
    assert (num_received, num_received_1) == (2 * 2 * 16, 0)
    assert different == different_1 == []


def test_nodes_issue_what_they_declare(two_ranks):
    # Two MoE layers: a gather of counts, an exchange out, one back.
    assert [found["undeclared"] for found in two_ranks] == [([], 6), ([], 6)]


def test_a_backward_issues_the_exchanges_only(two_ranks):
    assert [found["backward"] for found in two_ranks] == [["all_to_all_single"] * 4] * 2


@pytest.mark.parametrize("forced", [False, True])
def test_forced_balance_gives_every_expert_as_many_tokens(forced):
    sizes = replace(config(), force_load_balancing=forced)
    model = MoETransformer(sizes, lone_expert_groups())
    state = model.begin(batch(10))
    model.blocks[0].attn(state, model.pre(state))
    per_expert = state.routing[0].per_expert
    assert (len(set(per_expert)) == 1) is forced
