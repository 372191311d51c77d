"""What megatron-core's local layers lack, and its Transformer Engine layers have.

Multi-latent attention (MLA, arXiv 2405.04434): ``MLASelfAttention`` tells its core attention how
wide keys and values are, and the local ``DotProductAttention`` takes no such arguments. Sequence
parallelism: the local norm refuses it, where it computes as ever and has but to mark its weight,
whose gradient is then added up over the ranks that share a sequence. ``HybridModel``: its stack has
Transformer Engine's final norm, whatever its spec.
"""

from typing import Any, cast

from torch import nn

from ep_overlap.models.megatron_globals import INSTALL_HINT

try:
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
except ImportError as error:
    raise ImportError(INSTALL_HINT) from error


class LatentDotProductAttention(DotProductAttention):
    """Local attention whose values are of another width than its keys.

    Args:
        k_channels: of each head; it follows from the keys, and is taken for the signature alone.
        v_channels: of each head; None: as ``DotProductAttention``. ``MLASelfAttention`` builds one
            such first, in its base class, and drops it.
        options: those of ``DotProductAttention``.
    """

    def __init__(
        self, *, k_channels: int | None = None, v_channels: int | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        if v_channels is not None:
            # The width of the output; all else reads the shapes of what it is given.
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


class SequenceParallelNorm(nn.RMSNorm):
    """``WrappedTorchNorm``'s RMSNorm, of a part of each sequence."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(normalized_shape=hidden_size, eps=eps)
        # As megatron-core marks its own norms' weights.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 (untyped)


class LocalHybridStack(HybridStack):
    """``HybridStack`` with a local final norm. Arguments as there."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: HybridStackSubmodules,
        *,
        post_process: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(
            config, submodules, post_process=post_process, post_layer_norm=False, **options
        )
        self.post_layer_norm = True
        if post_process:
            norm = SequenceParallelNorm if config.sequence_parallel else WrappedTorchNorm
            self.final_norm = norm(config, config.hidden_size, eps=config.layernorm_epsilon)


def complete_local_spec(block: TransformerBlockSubmodules, config: TransformerConfig) -> None:
    """Put these where the local spec names what ``config`` makes unfit."""
    for layer in cast("list[ModuleSpec]", block.layer_specs):
        complete_local_layer(cast(TransformerLayerSubmodules, layer.submodules), config)
    if config.sequence_parallel:
        block.layer_norm = SequenceParallelNorm


def complete_local_layer(layer: TransformerLayerSubmodules, config: TransformerConfig) -> None:
    """As ``complete_local_spec``, of one layer."""
    if config.multi_latent_attention:
        attention = cast(ModuleSpec, layer.self_attention).submodules
        latent = cast(MLASelfAttentionSubmodules, attention)
        latent.core_attention = LatentDotProductAttention
    if config.sequence_parallel:
        layer.input_layernorm = SequenceParallelNorm
        layer.pre_mlp_layernorm = SequenceParallelNorm
