"""What of a model the parts leave out, refused by name before anything runs."""

from collections.abc import Iterator
from typing import Final, NamedTuple, cast

from ep_overlap.models.megatron_build import MegatronModel
from ep_overlap.models.megatron_globals import INSTALL_HINT

try:
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.models.hybrid.hybrid_block import HybridStack
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer
except ImportError as error:
    raise ImportError(INSTALL_HINT) from error


class _Setting(NamedTuple):
    """One that has to be something else."""

    name: str
    got: object
    supported: object


def refuse_unsupported(model: MegatronModel) -> None:
    """Name every setting that the parts leave out.

    Raises:
        ValueError: there are some.
    """
    settings = [
        *_of_config(model.config),
        *_of_tensor_parallel(model.config),
        *_of_experts(model.config),
        *_of_model(model),
    ]
    refused = [
        f"{name}={got!r} (supported: {supported!r})"
        for name, got, supported in settings
        if got != supported
    ]
    cannot = f"this {_kind(model).__name__} cannot be cut into parts"
    if refused:
        raise ValueError(f"{cannot}; change in its settings: {', '.join(refused)}")
    decoder = cast("TransformerBlock | HybridStack", model.decoder)
    for index, layer in enumerate(decoder.layers):
        if not isinstance(layer, TransformerLayer):
            raise ValueError(
                f"{cannot}: layer {index} is a {type(layer).__name__}, expected a TransformerLayer"
            )


def _kind(model: MegatronModel) -> type[MegatronModel]:
    """Not its own type, which sharding changes."""
    return GPTModel if isinstance(model, GPTModel) else HybridModel


_RECOMPUTED: Final = frozenset({"core_attn", "layernorm", "mla_up_proj", "mlp", "shared_experts"})
"""What lies within one node: it is recomputed in that node's backward, by megatron-core itself."""


def _of_config(c: TransformerConfig) -> Iterator[_Setting]:
    yield _Setting("pipeline_model_parallel_size", c.pipeline_model_parallel_size, 1)
    yield _Setting("context_parallel_size", c.context_parallel_size, 1)
    yield _Setting("experimental_attention_variant", c.experimental_attention_variant, None)
    yield _Setting("fp8", c.fp8, None)
    yield _Setting("fp4", c.fp4, None)
    yield _Setting("fp32_residual_connection", c.fp32_residual_connection, False)
    yield _Setting("fused_residual_rmsnorm", c.fused_residual_rmsnorm, False)
    granularity = c.recompute_granularity
    yield _Setting("recompute_granularity", granularity, granularity and "selective")
    if granularity == "selective" and not _RECOMPUTED.issuperset(c.recompute_modules or ()):
        supported = f"any of {', '.join(sorted(_RECOMPUTED))}"
        yield _Setting("recompute_modules", c.recompute_modules, supported)
    yield _Setting("cpu_offloading", c.cpu_offloading, False)
    yield _Setting(
        "fine_grained_activation_offloading", c.fine_grained_activation_offloading, False
    )
    yield _Setting("cuda_graph_impl", c.cuda_graph_impl, "none")
    yield _Setting("mlp_chunks_for_training", c.mlp_chunks_for_training, 1)


def _of_tensor_parallel(c: TransformerConfig) -> Iterator[_Setting]:
    if c.tensor_model_parallel_size == 1:
        return
    yield _Setting("sequence_parallel", c.sequence_parallel, True)
    # The decoder would draw from a generator of its own, as a whole.
    yield _Setting("hidden_dropout", c.hidden_dropout, 0.0)
    yield _Setting("attention_dropout", c.attention_dropout, 0.0)
    yield _Setting("multi_latent_attention", c.multi_latent_attention, False)
    yield _Setting("mtp_num_layers", c.mtp_num_layers or None, None)
    yield _Setting("delay_wgrad_compute", c.delay_wgrad_compute, False)


def _of_experts(c: TransformerConfig) -> Iterator[_Setting]:
    if c.num_moe_experts is None:
        return
    yield _Setting("expert_tensor_parallel_size", c.expert_tensor_parallel_size, 1)
    yield _Setting("moe_token_dispatcher_type", c.moe_token_dispatcher_type, "alltoall")
    # With it dispatchers set ``use_nccl_stream``, which the exchanges' reverses would have to pass.
    yield _Setting("moe_shared_expert_overlap", c.moe_shared_expert_overlap, False)
    yield _Setting("moe_expert_capacity_factor", c.moe_expert_capacity_factor, None)
    # Its second projection follows the combine exchange: it would run within the next layer.
    yield _Setting("moe_latent_size", c.moe_latent_size, None)
    yield _Setting("moe_paged_stash", c.moe_paged_stash, False)
    yield _Setting(
        "overlap_dispatch_backward_with_experts_wgrad",
        c.overlap_dispatch_backward_with_experts_wgrad,
        False,
    )


_POSITIONS: Final = ("rope", "yarn", "learned_absolute", "none")


def _of_model(model: MegatronModel) -> Iterator[_Setting]:
    """Arguments of the model, and the config's in the light of them."""
    yield _Setting("pre_process", model.pre_process, True)
    yield _Setting("post_process", model.post_process, True)
    if isinstance(model, GPTModel):
        yield _Setting("has a final norm", model.decoder.final_layernorm is not None, True)
    else:
        yield _Setting("post_layer_norm", cast(HybridStack, model.decoder).post_layer_norm, True)
    kind = cast(str, model.position_embedding_type)
    if kind not in _POSITIONS:
        yield _Setting("position_embedding_type", kind, " or ".join(_POSITIONS))
    if model.share_embeddings_and_output_weights or model.mtp_process:
        # It adds a use's gradient to ``main_grad`` of the weight, which a value does not have.
        fusion = model.config.gradient_accumulation_fusion
        yield _Setting("gradient_accumulation_fusion", fusion, False)
