"""Builds megatron-core's HybridModel of its local layers, as ``megatron_build`` a GPTModel.

megatron-core has a spec of Transformer Engine's layers alone (``hybrid_layer_specs``); this one
takes apart what ``get_gpt_layer_local_submodules`` holds for a GPTModel: attention, MLP, experts.
"""

from dataclasses import replace

import torch
from torch.distributed import ProcessGroup

from ep_overlap.models.groups import ExpertGroups
from ep_overlap.models.megatron_build import (
    MegatronSizes,
    check_world,
    initialise,
    process_groups,
    transformer_config,
    without_notes,
)
from ep_overlap.models.megatron_globals import INSTALL_HINT
from ep_overlap.models.megatron_local import LocalHybridStack, complete_local_layer

try:
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
    from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_layer_allocation import (
        get_hybrid_total_layer_count,
        parse_hybrid_pattern,
    )
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlock,
        MultiTokenPredictionBlockSubmodules,
        get_mtp_layer_spec_for_backend,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import (
        MoETransformerLayer,
        TransformerLayer,
        TransformerLayerSubmodules,
    )
except ImportError as error:
    raise ImportError(INSTALL_HINT) from error


def build_hybrid(
    sizes: MegatronSizes,
    pattern: str,
    groups: ExpertGroups,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    everyone: ProcessGroup | None = None,
    tensor_parallel: ProcessGroup | None = None,
) -> HybridModel:
    """Build the model. Weights, random state and place as ``build_gpt``.

    Args:
        sizes: of the model. ``num_layers``, ``mtp_num_layers`` and ``moe_layer_freq`` are not read:
            the pattern says them.
        pattern: megatron-core's ``hybrid_layer_pattern``, of ``*`` (attention), ``+`` (the same,
            multi-latent), ``E`` (experts) and ``-`` (an MLP): ``*-*E/*E``, the last part for
            multi-token prediction.
        groups: of its experts.
        seed: of its weights.
        device: where it is to be.
        everyone: see ``build_gpt``.
        tensor_parallel: see ``build_gpt``.

    Raises:
        ValueError: as ``build_gpt``; or the pattern has other symbols, or no layers for the
            decoder, or ``+`` without ``multi_latent_attention`` in the settings; or the layers are
            to be Transformer Engine's, of which megatron-core's own spec builds a model.
        RuntimeError: as ``build_gpt``.
    """
    check_world(sizes, groups)
    if sizes.transformer_impl != "local":
        raise ValueError(
            f"transformer_impl is {sizes.transformer_impl!r}, expected 'local'; build a "
            "HybridModel of Transformer Engine's layers by megatron-core's hybrid_stack_spec"
        )
    if others := sorted(set(pattern) - set("*+E-/")):
        raise ValueError(
            f"the pattern {pattern!r} has {', '.join(others)}, expected * and + (attention), E "
            "(experts) and - (an MLP) alone; the others have no local layers"
        )
    if not pattern.partition("/")[0]:
        raise ValueError(
            f"the pattern {pattern!r} has no layers of the decoder, expected some, such as *E"
        )
    if "+" in pattern and not sizes.settings.get("multi_latent_attention", False):
        raise ValueError(
            f"the pattern {pattern!r} has + (multi-latent attention), expected "
            "multi_latent_attention in the settings; set it, or take *"
        )
    mtp = parse_hybrid_pattern(pattern)
    sizes = replace(
        sizes,
        num_layers=get_hybrid_total_layer_count(pattern),
        mtp_num_layers=mtp.mtp_num_depths or None,
        moe_layer_freq=1,
    )
    with without_notes():
        config = transformer_config(sizes, groups.size)
        model = HybridModel(
            config,
            _local_spec(config),
            hybrid_layer_pattern=pattern,
            share_embeddings_and_output_weights=sizes.tied_embeddings,
            vocab_size=sizes.vocab_size,
            max_sequence_length=sizes.seq_length,
            position_embedding_type=sizes.positions,
            pg_collection=process_groups(groups, everyone, tensor_parallel),
        )
    initialise(model, seed)
    return model.to(device=device, dtype=sizes.dtype)


def _local_spec(config: TransformerConfig) -> ModuleSpec:
    """Of one kind of layer each, of what a layer of a GPTModel has."""
    dense, sparse, latent = (
        get_gpt_layer_local_submodules(
            num_experts=num_experts,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=is_latent,
            normalization=config.normalization,
        )
        for num_experts, is_latent in ((None, False), (config.num_moe_experts, False), (None, True))
    )
    for layer in (dense, sparse, latent):
        complete_local_layer(layer, config)
    attention_layer = _first_half(dense)
    mtp_layer = get_mtp_layer_spec_for_backend(attention_layer, LocalSpecProvider())
    return ModuleSpec(
        module=LocalHybridStack,
        submodules=HybridStackSubmodules(
            attention_layer=attention_layer,
            mla_layer=_first_half(latent),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=_second_half(dense)),
            moe_layer=ModuleSpec(module=MoETransformerLayer, submodules=_second_half(sparse)),
            mtp_block_spec=ModuleSpec(
                module=MultiTokenPredictionBlock,
                submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[mtp_layer]),
            ),
        ),
    )


def _first_half(layer: TransformerLayerSubmodules) -> ModuleSpec:
    submodules = TransformerLayerSubmodules(
        input_layernorm=layer.input_layernorm,
        self_attention=layer.self_attention,
        self_attn_bda=layer.self_attn_bda,
    )
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def _second_half(layer: TransformerLayerSubmodules) -> TransformerLayerSubmodules:
    return TransformerLayerSubmodules(
        pre_mlp_layernorm=layer.pre_mlp_layernorm, mlp=layer.mlp, mlp_bda=layer.mlp_bda
    )
