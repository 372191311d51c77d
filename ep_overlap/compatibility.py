"""What megatron-core refuses with ``overlap_moe_expert_parallel_comm``, and what happens here.

The table is ``docs/compatibility.md``; this prints the page::

    python -m ep_overlap.compatibility
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True, kw_only=True)
class Row:
    """One thing that a model, a config or a wrapper may have."""

    what: str
    theirs: str
    """What megatron-core 0.19 does with it under overlap."""
    supported: bool = False
    """Here."""
    shown_by: str = ""
    """The test that shows it, as ``file::test``; empty: ``config`` is refused by name."""
    remark: str = ""
    """Why it is refused, or what there is to know."""
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings of a ``TransformerConfig`` that make the case, where settings can."""


REFUSED: Final = "refuses"
ACCEPTED: Final = "accepts"

DROPIN: Final = "test_megatron_dropin.py::"
FSDP: Final = "test_adapter_megatron_fsdp.py::"
WRAPPED: Final = f"{DROPIN}test_unknown_wrappers_are_refused_wherever_they_are"
PLAIN: Final = "test_megatron_differential.py::test_two_ranks_equal_megatrons_plain_schedule"

NOT_YET: Final = "not built yet"
NO_HYBRID: Final = "accepts, and fails: the model has no `build_schedule_plan`"

TENSOR_PARALLEL: Final[Mapping[str, Any]] = {
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
}

THEIR_REFUSALS: Final = (
    Row(
        what="float32",
        theirs=f"{REFUSED}: bf16 or fp16 only",
        supported=True,
        shown_by=PLAIN,
        config={"bf16": False},
    ),
    Row(
        what="expert-parallel size 1",
        theirs=REFUSED,
        supported=True,
        shown_by=f"{DROPIN}test_losses_over_tokens_or_microbatches_equal_megatrons",
        remark="there is nothing to overlap",
        config={"expert_model_parallel_size": 1},
    ),
    Row(
        what="several MTP layers",
        theirs=f"{REFUSED}: at most one",
        supported=True,
        shown_by=PLAIN,
        remark="they run whole, within `post`; set the flag once the config is built, as its own "
        "check refuses both in the constructor",
        config={"mtp_num_layers": 2},
    ),
    Row(
        what="delayed weight gradients with local layers",
        theirs="accepts, and does nothing",
        supported=True,
        shown_by=f"{DROPIN}test_a_schedule_is_built_once_for_each_number_of_microbatches",
        config={"delay_wgrad_compute": True},
    ),
    Row(
        what="delayed weight gradients without overlap",
        theirs=REFUSED,
        supported=True,
        shown_by="test_schedule_wgrad.py::test_the_table_holds_on_two_ranks",
        remark="with `OverlapSchedule`; the drop-in leaves a step without overlap to megatron-core",
    ),
    Row(
        what="dispatch backward over the experts' weight gradients, with overlap or delayed",
        theirs=REFUSED,
        remark="ask for it here: `OverlapConfig(dispatch_over_wgrad=True)`, with any of them",
        config={"overlap_dispatch_backward_with_experts_wgrad": True},
    ),
    Row(
        what="activation recompute, full",
        theirs=REFUSED,
        remark="ask for it here: `ForwardBackward(recompute_granularity='full')`",
        config={"recompute_granularity": "full"},
    ),
    Row(
        what="activation recompute, selective, of `moe`",
        theirs=REFUSED,
        remark="it spans nodes, exchanges among them",
        config={"recompute_modules": ["moe"], "recompute_granularity": "selective"},
    ),
    Row(
        what="shared experts on a stream of their own",
        theirs=REFUSED,
        remark="shared experts run in `attn`; leave the flag out, and they are covered there",
        config={"moe_shared_expert_overlap": True},
    ),
    Row(
        what="all-gather dispatcher",
        theirs=REFUSED,
        remark="its exchange is no all-to-all",
        config={"moe_token_dispatcher_type": "allgather"},
    ),
    Row(
        what="pipeline parallel, without virtual stages",
        theirs=REFUSED,
        remark=NOT_YET,
        config={"pipeline_model_parallel_size": 2},
    ),
    Row(
        what="CUDA graphs of `moe` or `mlp`",
        theirs=REFUSED,
        remark="the schedule runs between them; graphs of nodes are not built yet",
        config={"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["moe"]},
    ),
    Row(
        what="FSDP v1: double buffer",
        theirs=REFUSED,
        remark="not tested under a schedule; leave `fsdp_double_buffer` out",
        shown_by=f"{FSDP}test_settings_are_refused_by_name",
    ),
    Row(
        what="FSDP v1: CUDA graphs of single layers",
        theirs=REFUSED,
        remark="as all CUDA graphs",
        config={"cuda_graph_impl": "local"},
    ),
    Row(
        what="FSDP v1: units other than transformer layers, with `optim_grads_params`",
        theirs=REFUSED,
        remark="with `fsdp_hooks.fully_shard` as well: the plan gathers layers",
        shown_by=f"{FSDP}test_units_that_are_not_the_layers_are_refused",
    ),
    Row(
        what="FSDP v1 with virtual pipeline stages",
        theirs=REFUSED,
        remark=NOT_YET,
        config={"pipeline_model_parallel_size": 2},
    ),
)

THEIR_LIMITS: Final = (
    Row(
        what="tensor parallel, without sequence parallel",
        theirs="refuses, with experts",
        remark="as there",
        config={"sequence_parallel": False, "tensor_model_parallel_size": 2},
    ),
    Row(
        what="tensor parallel, with delayed weight gradients",
        theirs=ACCEPTED,
        remark=NOT_YET,
        config={"delay_wgrad_compute": True, **TENSOR_PARALLEL},
    ),
    Row(
        what="tensor parallel, with dropout",
        theirs=ACCEPTED,
        remark="the decoder would draw from a generator of its own, as a whole",
        config={"hidden_dropout": 0.1, **TENSOR_PARALLEL},
    ),
    Row(
        what="tensor parallel, with dropout in attention",
        theirs=ACCEPTED,
        remark="as before",
        config={"attention_dropout": 0.1, **TENSOR_PARALLEL},
    ),
    Row(
        what="tensor parallel, with MTP",
        theirs=ACCEPTED,
        remark=NOT_YET,
        config={"mtp_num_layers": 1, **TENSOR_PARALLEL},
    ),
    Row(
        what="tensor parallel, with multi-latent attention",
        theirs=ACCEPTED,
        remark=NOT_YET,
        config={"multi_latent_attention": True, **TENSOR_PARALLEL},
    ),
    Row(
        what="expert tensor parallel",
        theirs=ACCEPTED,
        remark=NOT_YET,
        config={"expert_tensor_parallel_size": 2},
    ),
    Row(
        what="context parallel",
        theirs="accepts, with a warning before Blackwell",
        remark=NOT_YET,
        config={"context_parallel_size": 2},
    ),
    Row(
        what="context parallel by sequence (hybrid)",
        theirs="accepts, and does not do it",
        remark=NOT_YET,
        config={"hybrid_context_parallel": True},
    ),
    Row(
        what="pipeline parallel, with virtual stages",
        theirs=ACCEPTED,
        remark=NOT_YET,
        config={"pipeline_model_parallel_size": 2},
    ),
    Row(
        what="packed sequences",
        theirs=ACCEPTED,
        remark=NOT_YET,
        shown_by=f"{DROPIN}test_misuse_is_told_before_anything_runs",
    ),
    Row(what="FP8", theirs=ACCEPTED, remark=NOT_YET, config={"fp8": "hybrid"}),
    Row(what="FP4", theirs=ACCEPTED, remark=NOT_YET, config={"fp4": "e2m1"}),
    Row(
        what="flex dispatchers: DeepEP, HybridEP, NCCL EP",
        theirs="accepts; NCCL EP not with FC1 offloaded",
        remark="they hold buffers of one microbatch",
        config={"moe_token_dispatcher_type": "flex"},
    ),
    Row(
        what="activation recompute, selective, of `moe_act`",
        theirs=ACCEPTED,
        remark="it needs Transformer Engine's grouped experts, which no test here runs",
        config={"recompute_modules": ["moe_act"], "recompute_granularity": "selective"},
    ),
    Row(
        what="activation recompute, selective, of `gdn_norm_out`",
        theirs=ACCEPTED,
        remark="as the attention that it belongs to",
        config={"recompute_modules": ["gdn_norm_out"], "recompute_granularity": "selective"},
    ),
    Row(
        what="`HybridModel` of other layers: Mamba, gated delta net, sparse attention",
        theirs=NO_HYBRID,
        remark="their kernels are on GPUs alone, and no test here runs them; change the pattern",
        shown_by="test_megatron_hybrid.py::test_layers_of_other_kinds_are_refused_by_name",
    ),
    Row(
        what="CUDA graphs of attention or the router",
        theirs=ACCEPTED,
        remark="attention's: `ForwardBackward(cuda_graphs=True)`; the router's are not built yet",
        config={"cuda_graph_impl": "transformer_engine"},
    ),
    Row(
        what="FSDP v1 with sharded gradients, and experts on one data-parallel rank",
        theirs="accepts; wrong with several microbatches",
        remark="with `optim` and `no_shard` it is right, and supported",
        shown_by=f"{FSDP}test_experts_on_one_rank_and_shared_process_groups_are_refused",
    ),
    Row(
        what="torch's FSDP2",
        theirs=ACCEPTED,
        remark="in the drop-in: wrap the model by `fsdp_hooks.fully_shard`",
        shown_by=WRAPPED,
    ),
    Row(
        what="a wrapper of one's own",
        theirs=ACCEPTED,
        remark="its forward is not called; hand its life cycle to `ForwardBackward`",
        shown_by=WRAPPED,
    ),
    Row(
        what="dropped and padded tokens",
        theirs=ACCEPTED,
        remark=NOT_YET,
        config={"moe_expert_capacity_factor": 1.0},
    ),
    Row(
        what="experts in a latent space",
        theirs=ACCEPTED,
        remark="its second projection follows the exchange",
        config={"moe_latent_size": 8},
    ),
    Row(
        what="activations stashed in pages",
        theirs=ACCEPTED,
        remark=NOT_YET,
        config={"moe_paged_stash": True},
    ),
    Row(
        what="activation offload, fine-grained",
        theirs=ACCEPTED,
        remark=NOT_YET,
        config={"fine_grained_activation_offloading": True},
    ),
    Row(
        what="activation offload by layer",
        theirs=ACCEPTED,
        remark="a layer is not called as a whole",
        config={"cpu_offloading": True},
    ),
    Row(
        what="sparse attention (`dsa`) and other experimental variants",
        theirs=ACCEPTED,
        remark=NOT_YET,
        config={"experimental_attention_variant": "dsa"},
    ),
    Row(
        what="float32 residuals",
        theirs=ACCEPTED,
        remark=NOT_YET,
        config={"fp32_residual_connection": True},
    ),
    Row(
        what="norm fused with the residual",
        theirs=ACCEPTED,
        remark="the layer's output would be a pair",
        config={"fused_residual_rmsnorm": True},
    ),
    Row(
        what="MLPs in chunks",
        theirs=ACCEPTED,
        remark=NOT_YET,
        config={"mlp_chunks_for_training": 2},
    ),
    Row(
        what="fused weight gradients",
        theirs=ACCEPTED,
        remark="its kernels write `main_grad`; with `fsdp_hooks`, `manage_wgrad(fuse=True)`",
        config={"gradient_accumulation_fusion": True},
    ),
    Row(
        what="the output layer's weight gradient put off",
        theirs=ACCEPTED,
        remark="it belongs to pipeline stages",
        config={"defer_embedding_wgrad_compute": True},
    ),
    Row(
        what="`enable_autocast`",
        theirs="accepts, and leaves it out around its nodes",
        remark="use `bf16`",
        config={"enable_autocast": True},
    ),
    Row(
        what="`no_sync_func` without a wrapper",
        theirs=ACCEPTED,
        remark="microbatches interleave; a wrapper that is known needs none",
        config={"no_sync_func": print},
    ),
)

SUPPORTED: Final = (
    Row(what="dense layers, at any place", theirs=ACCEPTED, supported=True, shown_by=PLAIN),
    Row(what="shared experts", theirs=ACCEPTED, supported=True, shown_by=PLAIN),
    Row(
        what="tied embeddings, bitwise",
        theirs="accepts; rounds otherwise than its own plain schedule",
        supported=True,
        shown_by=PLAIN,
    ),
    Row(what="one MTP layer", theirs=ACCEPTED, supported=True, shown_by=PLAIN),
    Row(what="multi-latent attention", theirs=ACCEPTED, supported=True, shown_by=PLAIN),
    Row(
        what="router losses: aux, sequence, global, z",
        theirs=ACCEPTED,
        supported=True,
        shown_by=PLAIN,
    ),
    Row(what="expert bias", theirs=ACCEPTED, supported=True, shown_by=PLAIN),
    Row(
        what="dropout, router noise",
        theirs=ACCEPTED,
        supported=True,
        shown_by=PLAIN,
        remark="in the plain order; the paired one is refused for them",
        config={"hidden_dropout": 0.1, "attention_dropout": 0.1, "moe_input_jitter_eps": 0.1},
    ),
    Row(
        what=(
            "activation recompute, selective, of `core_attn`, `layernorm`, `mla_up_proj`, `mlp`, "
            "`shared_experts`"
        ),
        theirs=ACCEPTED,
        supported=True,
        shown_by=PLAIN,
        remark="each within the backward of its node; dropout draws again what it drew",
        config={
            "recompute_granularity": "selective",
            "recompute_modules": ["core_attn", "layernorm", "mla_up_proj", "mlp", "shared_experts"],
        },
    ),
    Row(
        what="`HybridModel` of attention (`*`, `+`), experts (`E`) and MLPs (`-`), in any order",
        theirs=NO_HYBRID,
        supported=True,
        shown_by=PLAIN,
        remark=(
            "attention and what is right behind it is a layer of the schedule, and so is what "
            "stands alone; with `fully_shard`, the model's own layers are units"
        ),
    ),
    Row(
        what="tensor parallel, with sequence parallel",
        theirs="accepts, with a warning before Blackwell",
        supported=True,
        shown_by=PLAIN,
        config=TENSOR_PARALLEL,
    ),
    Row(
        what="`Float16Module`",
        theirs=ACCEPTED,
        supported=True,
        shown_by=f"{DROPIN}test_a_bf16_module_is_seen_through_its_float16_module",
        config={"bf16": True},
    ),
    Row(
        what="`DistributedDataParallel` with its distributed optimizer",
        theirs=ACCEPTED,
        supported=True,
        shown_by="test_adapter_megatron_ddp.py::test_every_switch_changes_no_bit_on_two_ranks",
        remark="its own refusals by name: `fsdp_hooks/adapters/megatron_ddp_refused.py`",
    ),
    Row(
        what="FSDP v1 (`use_megatron_fsdp`), four strategies",
        theirs=ACCEPTED,
        supported=True,
        shown_by=f"{FSDP}test_strategies_change_no_bit_of_gradients_and_weights",
        remark=(
            "shown on CPU ranks; its own refusals by name: "
            "`fsdp_hooks/adapters/megatron_fsdp_refused.py`"
        ),
    ),
    Row(
        what="`fsdp_hooks.fully_shard`, four strategies",
        theirs="unknown to it",
        supported=True,
        shown_by="test_megatron_differential.py::test_a_sharded_model_equals_its_standard_path",
    ),
    Row(
        what="`calculate_per_token_loss`, `grad_scale_func`, timers",
        theirs=ACCEPTED,
        supported=True,
        shown_by=f"{DROPIN}test_gradients_are_finalized_once_after_all_of_them",
        config={"calculate_per_token_loss": True},
    ),
    Row(
        what="`high_priority_a2a_comm_stream`, `ep_overlap_early_attn_memory_release`",
        theirs=ACCEPTED,
        supported=True,
        shown_by=f"{DROPIN}test_hints_for_megatrons_own_schedule_warn_and_change_nothing",
        remark="without effect, with a warning: hints for its own schedule",
        config={
            "high_priority_a2a_comm_stream": True,
            "ep_overlap_early_attn_memory_release": True,
        },
    ),
)

TABLES: Final = (
    ("What megatron-core refuses with overlap", THEIR_REFUSALS),
    ("What else is supported", SUPPORTED),
    ("What else is refused here", THEIR_LIMITS),
)

INTRODUCTION: Final = """\
# What goes together

`overlap_moe_expert_parallel_comm` of megatron-core 0.19, and beside it what
`ep_overlap.models.megatron` does with the same model. *Supported* names the test that shows it.
*Refused* means a `ValueError` that names the setting, before anything runs. Of megatron-core,
*refuses* and *accepts* say what its own checks do. `tests/test_compatibility.py` holds the table to
the code; `python -m ep_overlap.compatibility` prints this page.
"""


def page() -> str:
    """``docs/compatibility.md``."""
    return "\n".join([INTRODUCTION, *(line for table in TABLES for line in _lines(*table))])


def _lines(title: str, rows: Sequence[Row]) -> Iterator[str]:
    yield from (f"## {title}", "", "| | megatron-core | here | |", "|---|---|---|---|")
    for row in rows:
        here = "supported" if row.supported else "refused"
        said = [row.remark] if row.remark else []
        said += [f"`{row.shown_by}`"] if row.shown_by else []
        yield f"| {row.what}{_settings(row)} | {row.theirs} | {here} | {'; '.join(said)} |"
    yield ""


def _settings(row: Row) -> str:
    """Those that are not named already."""
    named = [
        f"`{name}`" if callable(value) else f"`{name}={value!r}`"
        for name, value in row.config.items()
        if name not in row.what
    ]
    return f": {', '.join(named)}" if named else ""


if __name__ == "__main__":
    print(page(), end="")
