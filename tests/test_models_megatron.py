"""megatron-core's GPTModel: its parts against its own forward, and its life on CPU."""

import dataclasses
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import token_dispatcher
from models_support import (
    Tape,
    differences,
    in_one_graph,
    parts_of,
    random_tokens,
    recording,
    run_ranks,
    undeclared,
)

from ep_overlap.models.groups import ExpertGroups, lone_expert_groups, new_expert_groups
from ep_overlap.models.megatron import GPTBatch, GPTParts, mean_loss
from ep_overlap.models.megatron_build import MegatronSizes, build_gpt, initialise
from ep_overlap.models.megatron_cpu import megatron_on_cpu
from ep_overlap.models.megatron_layers import with_own_dispatcher
from ep_overlap.plan.action import LayerKind

SHAPES = {"one layer": (1, 1), "three layers": (3, 1), "dense between": (3, 2)}
"""(num_layers, moe_layer_freq)"""


def sizes(shape: str = "dense between", **changed: Any) -> MegatronSizes:
    num_layers, moe_layer_freq = SHAPES[shape]
    chosen = MegatronSizes(
        num_layers=num_layers,
        moe_layer_freq=moe_layer_freq,
        hidden_size=32,
        num_heads=4,
        ffn_hidden_size=48,
        num_experts=4,
        topk=2,
        seq_length=16,
        shared_expert_ffn_hidden_size=24,
    )
    return dataclasses.replace(chosen, **changed)


def gpt(chosen: MegatronSizes, groups: ExpertGroups | None = None) -> GPTParts:
    return GPTParts(build_gpt(chosen, groups or lone_expert_groups(), seed=5))


def batch(parts: GPTParts, seed: int) -> GPTBatch:
    return parts.batch(*random_tokens(seed, batch_size=2, seq_length=16))


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """megatron-core on the CPU, with this process as the whole world."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with megatron_on_cpu():
        yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("on_cpu")
class TestOneRank:
    @pytest.mark.parametrize("shape", SHAPES)
    def test_parts_in_segments_equal_forward_bit_for_bit(self, shape: str):
        parts = gpt(sizes(shape))
        assert differences(parts, [batch(parts, 1)], mean_loss) == []

    @pytest.mark.parametrize(
        "changed",
        [
            {},
            {"dtype": torch.bfloat16},
            {"shared_expert_ffn_hidden_size": None},
            {"swiglu": False},
            {"topk": 1, "num_experts": 2},
        ],
        ids=str,
    )
    def test_two_microbatches_in_turns_equal_one_after_the_other(self, changed: dict[str, Any]):
        parts = gpt(sizes(**changed))
        assert differences(parts, [batch(parts, 1), batch(parts, 2)], mean_loss) == []

    def test_a_lost_residual_gradient_is_seen(self):
        parts = gpt(sizes())
        found = differences(parts, [batch(parts, 1)], mean_loss, loses_residual=True)
        assert "embedding.word_embeddings.weight" in found
        assert not any(name.startswith(("loss", "output_layer")) for name in found)

    def test_evaluation_in_parts_equals_forward(self):
        parts = gpt(sizes())
        parts.module.eval()
        one, tape = batch(parts, 1), Tape()
        with torch.no_grad():
            for _ in parts_of(parts, one, mean_loss, tape):
                pass
            assert torch.equal(tape.loss, mean_loss(parts.whole(one), one))

    def test_layers_that_frequency_does_not_divide_are_dense(self):
        kinds = [layer.kind for layer in gpt(sizes("dense between")).layers]
        assert kinds == [LayerKind.MOE_SHARED, LayerKind.DENSE, LayerKind.MOE_SHARED]

    def test_shared_experts_are_no_expert_parameters(self):
        parts = gpt(sizes())
        experts = set(parts.expert_parameters())
        names = {name for name, value in parts.module.named_parameters() if value in experts}
        assert names == {
            f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_{matrix}.weight"
            for layer in (0, 2)
            for expert in range(4)
            for matrix in ("fc1", "fc2")
        }

    def test_microbatches_share_parameters_and_nothing_else(self):
        parts = gpt(sizes("one layer"))
        own = parts.module.decoder.layers[0].mlp
        first, second = with_own_dispatcher(own), with_own_dispatcher(own)
        assert first._modules is second._modules is own._modules
        assert first._parameters is own._parameters
        dispatchers = {id(moe.token_dispatcher) for moe in (own, first, second)}
        assert len(dispatchers) == 3

    def test_routing_lives_from_attn_to_finish(self):
        parts = gpt(sizes("one layer"))
        (layer,) = parts.layers
        state = parts.begin(batch(parts, 1))
        tokens, carry = layer.attn(state, parts.pre(state))
        routing = weakref.ref(state.moe[0].token_dispatcher.routing_map)
        combined = layer.combine(state, layer.mlp(state, layer.dispatch(state, tokens)))
        assert routing() is not None
        layer.finish(state, combined, carry)
        assert routing() is None
        assert state.moe == {}
        assert set(state.splits) == {0}, "what the exchanges' reverses need"

    def test_building_leaves_the_global_generator_alone(self):
        before = torch.get_rng_state()
        gpt(sizes("one layer"))
        assert torch.equal(before, torch.get_rng_state())

    def test_a_batch_longer_than_the_model_is_refused(self):
        parts = gpt(sizes("one layer"))
        with pytest.raises(ValueError, match=r"sequences of 17 tokens; .* built for 16"):
            parts.batch(*random_tokens(1, batch_size=1, seq_length=17))

    @pytest.mark.parametrize(
        ("setting", "value"),
        [
            ("pipeline_model_parallel_size", 2),
            ("context_parallel_size", 2),
            ("expert_tensor_parallel_size", 2),
            ("experimental_attention_variant", "dsa"),
            ("moe_latent_size", 8),
            ("fp8", "e4m3"),
            ("fp4", "e2m1"),
            ("recompute_granularity", "full"),
            ("moe_token_dispatcher_type", "allgather"),
            ("moe_shared_expert_overlap", True),
            ("moe_expert_capacity_factor", 1.0),
        ],
    )
    def test_what_the_parts_leave_out_is_refused_by_name(self, setting: str, value: object):
        model = build_gpt(sizes("one layer"), lone_expert_groups())
        setattr(model.config, setting, value)
        with pytest.raises(ValueError, match=rf"cannot be cut into parts; .*: {setting}={value!r}"):
            GPTParts(model)

    @pytest.mark.parametrize("module", ["moe", "moe_act", "gdn_norm_out"])
    def test_recompute_of_what_lies_in_no_node_is_refused_by_name(self, module: str):
        model = build_gpt(sizes("one layer"), lone_expert_groups())
        model.config.recompute_granularity = "selective"
        model.config.recompute_modules = ["core_attn", module]
        with pytest.raises(ValueError, match=rf"recompute_modules=\['core_attn', '{module}'\] \("):
            GPTParts(model)


@pytest.mark.usefixtures("on_cpu")
def test_biases_are_zero_whatever_was_in_memory():
    """megatron-core leaves them uninitialised where it is not to draw weights."""
    settings = {"add_bias_linear": True, "add_qkv_bias": True, "normalization": "LayerNorm"}
    chosen = sizes(swiglu=False, shared_expert_ffn_hidden_size=None, settings=settings)
    model = build_gpt(chosen, lone_expert_groups())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    initialise(model, seed=1)
    biases = {name: p for name, p in model.named_parameters() if name.endswith(".bias")}
    kinds = {".".join(name.split(".")[-2:]) for name in biases}
    assert {"linear_qkv.bias", "linear_fc2.bias", "input_layernorm.bias"} <= kinds
    assert [name for name, bias in biases.items() if bias.count_nonzero()] == []
    norms = [p for n, p in model.named_parameters() if n.endswith("norm.weight")]
    assert all(bool((weight == 7.0).all()) for weight in norms)


def test_a_model_without_torch_distributed_is_refused():
    with megatron_on_cpu(), pytest.raises(RuntimeError, match="call init_process_group"):
        build_gpt(sizes(), lone_expert_groups())


# megatron_on_cpu


def stand_ins() -> list[object]:
    """The value of everything that megatron_on_cpu touches."""
    return [
        torch.cuda.current_device,
        torch.cuda.Stream,
        torch.cuda.current_stream,
        torch.cuda.stream,
        token_dispatcher.maybe_move_tensor_to_cpu,
        token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream,
        parallel_state._GLOBAL_MEMORY_BUFFER,
        parallel_state._MPU_PIPELINE_MODEL_PARALLEL_RANK,
        parallel_state._MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE,
        random._CUDA_RNG_STATE_TRACKER,
        random._CUDA_RNG_STATE_TRACKER_INITIALIZED,
    ]


def torch_cuda() -> dict[str, int]:
    return {name: id(value) for name, value in vars(torch.cuda).items()}


def test_leaving_undoes_every_stand_in():
    before, cuda_before = stand_ins(), torch_cuda()
    with megatron_on_cpu():
        inside = stand_ins()
    assert all(now is not was for now, was in zip(inside, before, strict=True))
    assert all(now is was for now, was in zip(stand_ins(), before, strict=True))
    assert torch_cuda() == cuda_before


def test_an_exception_undoes_every_stand_in():
    before = stand_ins()
    with pytest.raises(KeyError), megatron_on_cpu():
        raise KeyError
    assert all(now is was for now, was in zip(stand_ins(), before, strict=True))


def test_an_inner_use_gives_the_outer_one_back():
    with megatron_on_cpu():
        outer = stand_ins()
        with megatron_on_cpu():
            pass
        assert all(now is was for now, was in zip(stand_ins(), outer, strict=True))


def test_a_gpu_is_refused_before_anything_changes():
    before = stand_ins()
    with pytest.raises(RuntimeError, match=r"a model on cuda:0 cannot run inside it"):
        megatron_on_cpu("cuda:0").__enter__()
    assert all(now is was for now, was in zip(stand_ins(), before, strict=True))


def test_without_megatron_core_the_import_says_how_to_install_it():
    script = """
import sys
sys.modules["megatron"] = None
import ep_overlap.models.megatron_cpu  # needs none until it is entered
for name in ("megatron", "megatron_build"):
    try:
        __import__(f"ep_overlap.models.{name}")
    except ImportError as error:
        print(error)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    hint = "megatron models need megatron-core 0.19: pip install 'ep-overlap[megatron]'"
    assert (run.stdout.splitlines(), run.returncode) == ([hint, hint], 0), run.stderr


# Two ranks: everything in one launch, as starting processes is what costs.


def on_two_ranks(rank: int) -> dict[str, Any]:
    groups = new_expert_groups(2)
    found: dict[str, Any] = {}
    with megatron_on_cpu():
        for shape in SHAPES:
            parts = gpt(sizes(shape), groups)
            found[shape] = differences(parts, batches(parts, rank), mean_loss)
        parts = gpt(sizes(dtype=torch.bfloat16), groups)
        found["bfloat16"] = differences(parts, batches(parts, rank), mean_loss)
        found["whole model"] = whole_model_over_ranks(gpt(sizes(), groups), rank)
        found["starved"] = starved(gpt(sizes(topk=1), groups), rank)
        log: list[Any] = []
        recorded = gpt(sizes(), new_expert_groups(2, new_group=recording(log)))
        found["undeclared"] = undeclared(recorded, batch(recorded, rank), mean_loss, log)
        found["undeclared, all"] = undeclared_of_everything(rank)
        found["undeclared, tensor parallel"] = undeclared_of_tensor_parallel()
    return found


def undeclared_of_everything(rank: int) -> tuple[list[str], int]:
    """Of a model whose routers reduce over all ranks, with MTP layers."""
    log: list[Any] = []
    new_group = recording(log)
    settings = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1}
    model = build_gpt(
        sizes(mtp_num_layers=2, settings=settings),
        new_expert_groups(2, new_group=new_group),
        everyone=new_group([0, 1], group_desc="everyone"),
    )
    parts = GPTParts(model)
    return undeclared(parts, batch(parts, rank), mean_loss, log)


def undeclared_of_tensor_parallel() -> tuple[list[str], int]:
    """Of a model whose two ranks share each sequence, so that both have the same one."""
    log: list[Any] = []
    new_group = recording(log)
    settings = {
        "tensor_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": True,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.1,
    }
    shared = new_group([0, 1], group_desc="tensor_parallel")
    with pytest.MonkeyPatch.context() as patch:
        # megatron-core's shared experts take no group.
        patch.setattr(parallel_state, "_TENSOR_MODEL_PARALLEL_GROUP", shared)
        model = build_gpt(
            sizes(settings=settings),
            new_expert_groups(2, new_group=new_group),
            tensor_parallel=shared,
        )
        parts = GPTParts(model)
        return undeclared(parts, batch(parts, 1), mean_loss, log)


def batches(parts: GPTParts, rank: int) -> list[GPTBatch]:
    return [batch(parts, 10 + rank), batch(parts, 20 + rank)]


def whole_model_over_ranks(parts: GPTParts, rank: int) -> dict[str, torch.Tensor]:
    """The gradients of the mean loss of both ranks; experts under their global index."""
    _, grads = in_one_graph(parts, [batch(parts, 10 + rank)], mean_loss)
    experts = set(parts.expert_parameters())
    whole: dict[str, torch.Tensor] = {}
    for name, parameter in parts.module.named_parameters():
        if parameter in experts:
            before, after = name.split(".local_experts.")
            local, rest = after.split(".", 1)
            whole[f"{before}.local_experts.{2 * rank + int(local)}.{rest}"] = grads[name] / 2
        else:
            dist.all_reduce(grads[name])
            whole[name] = grads[name] / 2
    return whole


def starved(parts: GPTParts, rank: int) -> tuple[int, list[str]]:
    """Send all tokens to experts 0 and 1; how many came to this rank, and what differs."""
    weight = parts.module.decoder.layers[0].mlp.router.weight
    with torch.no_grad():
        weight[1] = -weight[0]  # one of w.x and -w.x beats the 0 of experts 2 and 3
        weight[2:] = 0
    state = parts.begin(batch(parts, rank))
    parts.layers[0].attn(state, parts.pre(state))
    num_received = int(sum(state.moe[0].token_dispatcher.output_splits))
    return num_received, differences(parts, batches(parts, rank), mean_loss)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("which", [*SHAPES, "bfloat16"])
def test_on_two_ranks_parts_in_turns_equal_forward(two_ranks, which: str):
    assert [found[which] for found in two_ranks] == [[], []]


@pytest.mark.usefixtures("on_cpu")
def test_two_ranks_are_one_process(two_ranks):
    parts = gpt(sizes())
    _, grads = in_one_graph(parts, [batch(parts, 10), batch(parts, 11)], mean_loss)
    seen = set()
    for found in two_ranks:
        for name, grad in found["whole model"].items():
            # float32, the finest that megatron-core's router and loss compute in.
            tolerance = 2e-6 * grads[name].abs().max().item() / 2
            torch.testing.assert_close(grad, grads[name] / 2, rtol=0, atol=tolerance)
        seen |= found["whole model"].keys()
    assert seen == grads.keys()


def test_a_rank_that_gets_no_token_works(two_ranks):
    (num_received, different), (num_received_1, different_1) = (
        found["starved"] for found in two_ranks
    )
    assert (num_received, num_received_1) == (2 * 2 * 16, 0)
    assert different == different_1 == []


def test_nodes_issue_what_they_declare(two_ranks):
    # Two MoE layers: a gather of counts, two exchanges out, one back.
    assert [found["undeclared"] for found in two_ranks] == [([], 8), ([], 8)]


def test_routers_and_mtp_layers_issue_what_is_declared(two_ranks):
    # Two MoE layers of the decoder and two of MTP, each with one reduction more.
    assert [found["undeclared, all"] for found in two_ranks] == [([], 20), ([], 20)]


def test_tensor_parallel_layers_issue_what_is_declared(two_ranks):
    # A pair for each attention, MLP and shared experts; a router's reduction; the ends.
    assert [found["undeclared, tensor parallel"] for found in two_ranks] == [([], 27), ([], 27)]
