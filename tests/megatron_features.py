"""What Megatron users train, each feature under a schedule beside megatron-core's own step.

``python tests/megatron_features.py`` prints the whole table; ``test_megatron_features.py`` runs
part of it. Losses, every gradient, the routers' buffers, and what is logged of MTP and router
losses are compared bit for bit with ``forward_backward_no_pipelining`` on the same model.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import schedule_support as support
import torch
import torch.distributed as dist
from models_support import random_tokens
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed import ProcessGroup

from ep_overlap.commands.world import local_part
from ep_overlap.config import OverlapConfig
from ep_overlap.models.groups import ExpertGroups, new_expert_groups
from ep_overlap.testing import RankPool
from fsdp_hooks.lifecycle import lifecycle_of
from fsdp_hooks.wgrad_layers import manage_wgrad

SEQ_LENGTH = 8
BATCH_SIZE = 2
MICROBATCHES = (1, 2, 4)

LATENT: Mapping[str, Any] = {
    "multi_latent_attention": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
}
ROUTER_LOSSES: Mapping[str, Any] = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.3, 0.2, 0.1],
    "moe_z_loss_coeff": 0.05,
}
DROPOUT: Mapping[str, Any] = {"hidden_dropout": 0.2, "attention_dropout": 0.1}
TENSOR_PARALLEL: Mapping[str, Any] = {
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "expert_tensor_parallel_size": 1,
}


def recompute(*modules: str) -> Mapping[str, Any]:
    """Selective activation recompute."""
    return {"recompute_granularity": "selective", "recompute_modules": [*modules]}


FEATURES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "tied": {"tied_embeddings": True},
    "MTP 1": {"mtp_num_layers": 1},
    "MTP 2, tied": {"mtp_num_layers": 2, "tied_embeddings": True},
    "MTP 2, one layer for both": {
        "mtp_num_layers": 2,
        "settings": {"mtp_use_repeated_layer": True, **ROUTER_LOSSES},
    },
    "MTP 1, heads detached": {
        "mtp_num_layers": 1,
        "tied_embeddings": True,
        "settings": {"mtp_detach_heads": True},
    },
    "learned positions, MTP 1": {"mtp_num_layers": 1, "positions": "learned_absolute"},
    "latent attention": {"settings": LATENT},
    "latent attention, whole queries": {"settings": LATENT | {"q_lora_rank": None}},
    "aux loss": {
        "settings": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.3}
    },
    "all router losses": {"settings": ROUTER_LOSSES},
    "expert bias": {
        "settings": {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
        }
    },
    "shared experts": {"shared_expert_ffn_hidden_size": 12},
    "dense first": {"num_layers": 3, "moe_layer_freq": (0, 1, 1)},
    "no experts": {"moe_layer_freq": (0, 0)},
    "one expert a rank": {"num_experts": 2},
    "four experts a rank": {"num_experts": 8},
    "dropout": {"settings": DROPOUT},
    "router noise": {"settings": {"moe_input_jitter_eps": 0.1}},
    "tensor parallel": {
        "num_layers": 3,
        "moe_layer_freq": (0, 1, 1),
        "tied_embeddings": True,
        "shared_expert_ffn_hidden_size": 12,
        "settings": {**TENSOR_PARALLEL, **ROUTER_LOSSES},
    },
    "recompute": {
        "num_layers": 3,
        "moe_layer_freq": (0, 1, 1),
        "shared_expert_ffn_hidden_size": 12,
        "settings": recompute("core_attn", "layernorm", "mlp", "shared_experts"),
    },
    "recompute, dropout": {
        "shared_expert_ffn_hidden_size": 12,
        "settings": {**recompute("core_attn", "layernorm"), **DROPOUT, **ROUTER_LOSSES},
    },
    "recompute, latent attention, MTP 1": {
        "mtp_num_layers": 1,
        "settings": {**recompute("mla_up_proj", "core_attn", "layernorm"), **LATENT},
    },
    "recompute, tensor parallel": {
        "num_layers": 3,
        "moe_layer_freq": (0, 1, 1),
        "shared_expert_ffn_hidden_size": 12,
        "settings": {
            **recompute("core_attn", "layernorm", "mlp", "shared_experts"),
            **TENSOR_PARALLEL,
        },
    },
    "hybrid": {"pattern": "*E*E"},
    "hybrid, dense first": {
        "pattern": "*-*E",
        "shared_expert_ffn_hidden_size": 12,
        "settings": ROUTER_LOSSES,
    },
    "hybrid, MTP 2, tied": {"pattern": "*E*E/*E/*E", "tied_embeddings": True},
    "hybrid, recompute, dropout": {
        "pattern": "*E*-*E",
        "shared_expert_ffn_hidden_size": 12,
        "positions": "learned_absolute",
        "settings": {**recompute("core_attn", "layernorm", "mlp"), **DROPOUT},
    },
    "hybrid, experts alone": {
        "pattern": "E*EE",
        "shared_expert_ffn_hidden_size": 12,
        "settings": ROUTER_LOSSES,
    },
    "hybrid, all alone, MTP 1": {
        "pattern": "-E**-E/-E",
        "tied_embeddings": True,
        "settings": recompute("core_attn", "layernorm", "mlp"),
    },
    "hybrid, latent attention": {"pattern": "+EE+-", "settings": LATENT},
    "hybrid, biases": {
        "pattern": "*-E",
        "swiglu": False,
        "settings": {"add_bias_linear": True, "add_qkv_bias": True, "qk_layernorm": True},
    },
    "hybrid, tensor parallel": {
        "pattern": "*-E*E",
        "tied_embeddings": True,
        "shared_expert_ffn_hidden_size": 12,
        "settings": {**TENSOR_PARALLEL, **ROUTER_LOSSES},
    },
    "all at once": {
        "num_layers": 3,
        "moe_layer_freq": (0, 1, 1),
        "mtp_num_layers": 2,
        "tied_embeddings": True,
        "shared_expert_ffn_hidden_size": 12,
        "settings": {**LATENT, **ROUTER_LOSSES, **DROPOUT},
    },
}
HYBRID = frozenset(feature for feature, chosen in FEATURES.items() if "pattern" in chosen)
"""Those of HybridModel, by its pattern."""
SHARED_SEQUENCES = frozenset(
    {"tensor parallel", "recompute, tensor parallel", "hybrid, tensor parallel"}
)
"""Their weight gradients are not delayed."""
DRAWING = frozenset(
    {
        "dropout",
        "router noise",
        "recompute, dropout",
        "hybrid, recompute, dropout",
        "all at once",
    }
)
"""Those that draw random numbers: the paired order refuses them."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One feature, trained one step."""

    feature: str
    dtype: torch.dtype = torch.float32
    microbatches: int = 2
    order: str = "plain"
    delay: bool = False
    recompute: bool = False
    """Ours: each layer whole; never in the baseline."""
    strategy: str | None = None
    """Of our own sharding core; the baseline is its standard path then."""
    fuse: bool = False
    """Fused weight gradients, in the baseline too; with a strategy."""

    def __str__(self) -> str:
        flags = [name for name in ("delay", "recompute", "fuse") if vars(self)[name]]
        core = [] if self.strategy is None else [self.strategy]
        kind = [str(self.dtype), f"{self.microbatches} x {self.order}", *flags, *core]
        return f"{self.feature}: {', '.join(kind)}"


def cases_of(
    feature: str, *, dtypes: Sequence[torch.dtype], microbatches: Sequence[int] = MICROBATCHES
) -> Iterator[Case]:
    """Every order, delayed and not."""
    orders = ("serial", "plain") if feature in DRAWING else ("plain", "paired")
    delays = (False,) if feature in SHARED_SEQUENCES else (False, True)
    for dtype, num, order, delay in product(dtypes, microbatches, orders, delays):
        yield Case(feature=feature, dtype=dtype, microbatches=num, order=order, delay=delay)


# ---- on a rank -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Of one world; EP2."""

    experts: ExpertGroups
    tensor_parallel: ProcessGroup
    """Over the same ranks."""
    everyone: ProcessGroup

    @staticmethod
    def new() -> "Groups":
        num_ranks = dist.get_world_size()
        pairs = [dist.new_group([first, first + 1]) for first in range(0, num_ranks, 2)]
        return Groups(
            experts=new_expert_groups(2),
            tensor_parallel=pairs[dist.get_rank() // 2],
            everyone=dist.new_group(list(range(num_ranks))),
        )


def sizes_of(feature: str, dtype: torch.dtype) -> Any:
    from ep_overlap.models.megatron_build import MegatronSizes

    sizes = MegatronSizes(
        num_layers=2,
        hidden_size=16,
        num_heads=2,
        ffn_hidden_size=24,
        num_experts=4,
        topk=2,
        seq_length=SEQ_LENGTH,
        dtype=dtype,
    )
    chosen = {name: value for name, value in FEATURES[feature].items() if name != "pattern"}
    return replace(sizes, **chosen)


def model_of(feature: str, dtype: torch.dtype, groups: Groups) -> Any:
    from ep_overlap.models.megatron_build import build_gpt
    from ep_overlap.models.megatron_hybrid_build import build_hybrid

    sizes = sizes_of(feature, dtype)
    is_shared = "tensor_model_parallel_size" in sizes.settings
    which = (FEATURES[feature]["pattern"],) if feature in HYBRID else ()
    model = (build_hybrid if which else build_gpt)(
        sizes,
        *which,
        groups.experts,
        seed=3,
        everyone=groups.everyone,
        tensor_parallel=groups.tensor_parallel if is_shared else None,
    )
    if is_shared:
        _tell_shards_apart(model)
    if sizes.settings.get("q_lora_rank", 0) is None:
        for layer in model.decoder.layers:
            # megatron-core hands this one no group, and asks ``parallel_state``.
            layer.self_attention.linear_q_proj.tp_group = model.pg_collection.tp
    return model


def parts_of(model: Any) -> Any:
    from megatron.core.models.gpt.gpt_model import GPTModel

    from ep_overlap.models.megatron import GPTParts, HybridParts

    return (GPTParts if isinstance(model, GPTModel) else HybridParts)(model)


@contextmanager
def globals_of(feature: str, groups: Groups) -> Iterator[None]:
    """What megatron-core asks of ``parallel_state`` alone: its shared experts take no group."""
    from megatron.core import parallel_state

    from ep_overlap.models.megatron_globals import replace as replace_global

    with ExitStack() as undo:
        if feature in SHARED_SEQUENCES:
            name = "_TENSOR_MODEL_PARALLEL_GROUP"
            replace_global(undo, parallel_state, name, groups.tensor_parallel)
        yield


def _tell_shards_apart(model: Any) -> None:
    for weight in model.parameters():
        if getattr(weight, "tensor_model_parallel", False):
            weight.data.mul_(1 + dist.get_rank() % 2)


def batches_of(parts: Any, num: int) -> list[Any]:
    """Other ones on every rank, but for those that share a sequence."""
    seed = 100 * (dist.get_rank() // parts.module.config.tensor_model_parallel_size)
    return [parts.batch(*random_tokens(seed + i, BATCH_SIZE, SEQ_LENGTH)) for i in range(num)]


def every_difference(cases: Sequence[Case]) -> dict[str, list[str]]:
    """Run in every rank of a pool. Collective."""
    from ep_overlap.models.megatron_cpu import megatron_on_cpu

    groups = Groups.new()
    found: dict[str, list[str]] = {}
    with megatron_on_cpu():
        for (feature, dtype), some in _by_model(cases).items():
            with globals_of(feature, groups):
                model = model_of(feature, dtype, groups)
                # First: a schedule swaps the classes of layers whose weight gradients it delays.
                theirs = {n: their_step(model, n) for n in sorted({c.microbatches for c in some})}
                for case in some:
                    found[str(case)] = unequal(our_step(model, case), theirs[case.microbatches])
    return {case: names for case, names in found.items() if names}


def every_difference_sharded(cases: Sequence[Case]) -> dict[str, list[str]]:
    """As ``every_difference``, with our own sharding core on both sides, and with what hooks had to
    gather in place of the plan. Collective."""
    from ep_overlap.models.megatron_cpu import megatron_on_cpu

    groups, meshes = Groups.new(), support.Groups()
    found: dict[str, list[str]] = {}
    with megatron_on_cpu():
        for case in cases:
            theirs = sharded(case, groups, meshes)
            expected = standard_step(theirs, case)
            model = sharded(case, groups, meshes).module
            found[str(case)] = unequal(our_step(model, case), expected)
            if misses := lifecycle_of(model).stats.hook_misses:
                found[str(case)].append(f"{misses} hook misses")
    return {case: names for case, names in found.items() if names}


def sharded(case: Case, groups: Groups, meshes: support.Groups) -> Any:
    parts = parts_of(model_of(case.feature, case.dtype, groups))
    support.shard(parts, support.Case(strategy=case.strategy, ep=2), meshes)
    if case.fuse:
        manage_wgrad(parts.module, fuse=True, layer_types=parts.wgrad_layers)
    return parts


def standard_step(parts: Any, case: Case) -> dict[str, Tensor]:
    """The model's own forward and one backward for each microbatch."""
    from ep_overlap.models.megatron import mean_loss

    _forget(parts.module)
    scale_auxiliary_losses(1 / case.microbatches)
    torch.manual_seed(dist.get_rank())
    losses = support.standard_step(parts, batches_of(parts, case.microbatches), mean_loss)
    return _left(parts.module, losses)


def _by_model(cases: Sequence[Case]) -> dict[tuple[str, torch.dtype], list[Case]]:
    found: dict[tuple[str, torch.dtype], list[Case]] = {}
    for case in cases:
        found.setdefault((case.feature, case.dtype), []).append(case)
    return found


def unequal(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> list[str]:
    return [
        name
        for name in sorted({*ours, *theirs})
        if name not in ours or name not in theirs or not torch.equal(ours[name], theirs[name])
    ]


def their_step(model: Any, num_microbatches: int) -> dict[str, Tensor]:
    """megatron-core's own, without overlap."""
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    def forward_step(iterator: Iterator[Any], called: Any) -> Any:
        batch = next(iterator)
        output = called(
            batch.tokens, batch.position_ids, batch.attention_mask, labels=batch.targets
        )

        def loss_func(output: Tensor) -> tuple[Tensor, Tensor]:
            loss = output.mean()
            return loss, loss.detach().clone()

        return output, loss_func

    _forget(model)
    torch.manual_seed(dist.get_rank())
    losses = forward_backward_no_pipelining(
        forward_step_func=forward_step,
        data_iterator=iter(batches_of(parts_of(model), num_microbatches)),
        model=model,
        num_microbatches=num_microbatches,
        seq_length=SEQ_LENGTH,
        micro_batch_size=BATCH_SIZE,
        pg_collection=model.pg_collection,
    )
    return _left(model, losses)


def our_step(model: Any, case: Case) -> dict[str, Tensor]:
    from ep_overlap.models.megatron import mean_loss
    from ep_overlap.schedule import OverlapSchedule

    parts = parts_of(model)
    config = OverlapConfig(
        num_microbatches=case.microbatches,
        order=case.order,
        delay_wgrad=case.delay,
        recompute_granularity="full" if case.recompute else None,
    )
    schedule = OverlapSchedule(parts, config)
    _forget(model)
    scale_auxiliary_losses(1 / case.microbatches)
    torch.manual_seed(dist.get_rank())
    result = schedule.step(batches_of(parts, case.microbatches), mean_loss)
    return _left(model, result.losses)


def scale_auxiliary_losses(scale: float) -> None:
    """As megatron-core's ``forward_step_calc_loss`` does in each forward step."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor([scale]))
    MTPLossAutoScaler.set_loss_scale(torch.tensor([scale]))


def _forget(model: Any) -> None:
    """What earlier steps left."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    model.zero_grad(set_to_none=True)
    for name, buffer in model.named_buffers():
        if ".router." in name:
            buffer.zero_()
    get_moe_metrics_tracker().metrics.clear()
    MTPLossLoggingHelper.tracker.clear()


def _left(model: Any, losses: Sequence[Tensor]) -> dict[str, Tensor]:
    """What a step left."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    left = {f"loss {index}": loss for index, loss in enumerate(losses)}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        left[f"gradient of {name}"] = local_part(parameter.grad).clone()
    for name, buffer in model.named_buffers():
        if ".router." in name:
            left[f"buffer {name}"] = buffer.clone()
    for name, entry in get_moe_metrics_tracker().metrics.items():
        left[f"logged {name}"] = entry.values.clone()
    for name, value in MTPLossLoggingHelper.tracker.items():
        if isinstance(value, Tensor):
            left[f"logged of MTP, {name}"] = value.clone()
    return left


# ---- the table -----------------------------------------------------------------------------------


def table(found: Mapping[str, Sequence[str]], cases: Sequence[Case]) -> Table:
    """One line for each feature."""
    shown = Table("feature", "steps", "differ", title="against forward_backward_no_pipelining")
    for feature in FEATURES:
        names = [str(case) for case in cases if case.feature == feature]
        wrong = [name for name in names if found.get(name)]
        shown.add_row(feature, str(len(names)), "none" if not wrong else ", ".join(wrong))
    return shown


if __name__ == "__main__":
    every = [
        case
        for feature in FEATURES
        for case in cases_of(feature, dtypes=(torch.float32, torch.bfloat16))
    ]
    for num_ranks in (2, 4):
        with RankPool(num_ranks) as pool:
            first, *_ = pool.run(every_difference, every, timeout_s=500.0)
        Console().print(f"{num_ranks} ranks", table(first, every))
