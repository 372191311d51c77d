"""Builds megatron-core's GPTModel from sizes and our own process groups.

No ``parallel_state`` is set up: every group is handed in. Groups that are not expert-parallel hold
one rank, because sharding over data-parallel ranks is not the model's business here.
"""

import logging
import re
import warnings
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from ep_overlap.models.groups import ExpertGroups
from ep_overlap.models.megatron_globals import INSTALL_HINT
from ep_overlap.models.megatron_local import complete_local_spec

try:
    from megatron.core.models.gpt import gpt_model
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )
    from megatron.core.transformer.transformer_layer import TransformerLayer
except ImportError as error:
    raise ImportError(INSTALL_HINT) from error

MegatronModel = GPTModel | HybridModel
"""What can be cut into parts."""


@dataclass(frozen=True, kw_only=True)
class MegatronSizes:
    """Sizes of a model."""

    num_layers: int
    hidden_size: int
    num_heads: int
    ffn_hidden_size: int
    """The inner size of each expert, and of the MLP of a dense layer."""
    num_experts: int
    """Of the whole model, over all expert-parallel ranks."""
    topk: int
    seq_length: int
    vocab_size: int = 256
    moe_layer_freq: int | tuple[int, ...] = 1
    """Layer i is an MoE layer where i is a multiple of this, else a dense one; or 1 and 0 for each
    layer."""
    shared_expert_ffn_hidden_size: int | None = None
    """The inner size of the expert that every token visits; None: there is none."""
    mtp_num_layers: int | None = None
    """Layers of multi-token prediction, each like the decoder's last; None: there are none."""
    tied_embeddings: bool = False
    """The output layer's weight is the embedding's."""
    positions: Literal["rope", "learned_absolute", "none"] = "rope"
    """How the model knows them; multi-latent attention brings its own."""
    force_load_balancing: bool = False
    """Route by random scores, for measuring: megatron-core's ``moe_router_force_load_balancing``.
    It draws from a generator of its process, so that two runs of one step differ."""
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    """Whose layers it is made of. Transformer Engine's need a GPU, and multiply a rank's experts
    as a group."""
    swiglu: bool = True
    dtype: torch.dtype = torch.float32
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    """Other settings of megatron-core's ``TransformerConfig``, by its names; with
    ``multi_latent_attention`` of its ``MLATransformerConfig``."""


def transformer_config(sizes: MegatronSizes, expert_parallel_size: int) -> TransformerConfig:
    """megatron-core's settings for these sizes: no biases, no fused kernels, and no dropout, unless
    ``sizes.settings`` says so."""
    is_latent = sizes.settings.get("multi_latent_attention", False)
    freq = sizes.moe_layer_freq
    chosen: dict[str, Any] = {
        "num_layers": sizes.num_layers,
        "hidden_size": sizes.hidden_size,
        "num_attention_heads": sizes.num_heads,
        "ffn_hidden_size": sizes.ffn_hidden_size,
        "num_moe_experts": sizes.num_experts,
        "moe_ffn_hidden_size": sizes.ffn_hidden_size,
        "moe_router_topk": sizes.topk,
        # The softmax of one score is 1, whatever the score: its router would learn nothing.
        "moe_router_pre_softmax": sizes.topk == 1,
        "moe_layer_freq": freq if isinstance(freq, int) else list(freq),
        "moe_shared_expert_intermediate_size": sizes.shared_expert_ffn_hidden_size,
        "mtp_num_layers": sizes.mtp_num_layers,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_router_force_load_balancing": sizes.force_load_balancing,
        "expert_model_parallel_size": expert_parallel_size,
        "normalization": "RMSNorm",
        "gated_linear_unit": sizes.swiglu,
        "activation_func": F.silu if sizes.swiglu else F.gelu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": sizes.dtype is torch.bfloat16,
        "params_dtype": sizes.dtype,
        # build_gpt draws the weights, on CPU, so that a seed means the same on every device.
        "use_cpu_initialization": sizes.transformer_impl == "local",
        "perform_initialization": False,
        "transformer_impl": sizes.transformer_impl,
        "moe_grouped_gemm": sizes.transformer_impl == "transformer_engine",
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        **sizes.settings,
    }
    return (MLATransformerConfig if is_latent else TransformerConfig)(**chosen)


def build_gpt(
    sizes: MegatronSizes,
    groups: ExpertGroups,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    everyone: ProcessGroup | None = None,
    tensor_parallel: ProcessGroup | None = None,
    alone: ProcessGroup | None = None,
    like: GPTModel | None = None,
) -> GPTModel:
    """Build the model: megatron-core's local layers with SequentialMLP, or Transformer Engine's
    with TEGroupedMLP.

    The weights depend on the seed alone, so the model is the same function whatever the
    expert-parallel size. The caller's random state stays as it is.

    On CPU, call it inside ``megatron_on_cpu``; on a GPU, inside ``megatron_globals``.

    Args:
        sizes: of the model.
        groups: of its experts.
        seed: of its weights.
        device: where it is to be.
        everyone: the ranks over which ``global_aux_loss`` counts tokens; None: this one alone.
        tensor_parallel: the ranks that share each matrix, as many as
            ``tensor_model_parallel_size`` in ``sizes.settings``; None: this one alone. Their
            shards are drawn alike.
        alone: this rank's own group, for all that is not parallel; None: a new one. Models may
            share it. (Over gloo every group has a thread that polls.)
        like: a model of the same sizes and seed, to copy the weights from: drawing them takes
            seconds for each billion; None: they are drawn.

    Raises:
        ValueError: the experts cannot be divided evenly among the ranks.
        RuntimeError: ``torch.distributed`` is not initialised; megatron-core ignores the groups it
            is given until it is.
    """
    check_world(sizes, groups)
    with without_notes():
        config = transformer_config(sizes, groups.size)
        uses_te = sizes.transformer_impl == "transformer_engine"
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=uses_te, pp_rank=0)
        if not uses_te:
            complete_local_spec(spec, config)
        mtp_spec = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=uses_te)
        model = GPTModel(
            config,
            cast(ModuleSpec, spec),  # takes a block's spec as well as a layer's
            mtp_block_spec=cast(ModuleSpec | None, mtp_spec),
            share_embeddings_and_output_weights=sizes.tied_embeddings,
            vocab_size=sizes.vocab_size,
            max_sequence_length=sizes.seq_length,
            position_embedding_type=sizes.positions,
            pg_collection=process_groups(groups, everyone, tensor_parallel, alone),
        )
    if like is None:
        initialise(model, seed)
        return model.to(device=device, dtype=sizes.dtype)
    model = model.to(device=device, dtype=sizes.dtype)
    with torch.no_grad():
        for parameter, drawn in zip(model.parameters(), like.parameters(), strict=True):
            parameter.copy_(drawn)
    return model


def check_world(sizes: MegatronSizes, groups: ExpertGroups) -> None:
    """Raises as ``build_gpt``."""
    if sizes.num_experts % groups.size:
        raise ValueError(
            f"num_experts {sizes.num_experts} is not a multiple of the expert-parallel size "
            f"{groups.size}"
        )
    if not dist.is_initialized():
        raise RuntimeError(
            "megatron-core needs torch.distributed, with one rank too: call init_process_group "
            "before you build a model"
        )


def process_groups(
    groups: ExpertGroups,
    everyone: ProcessGroup | None = None,
    tensor_parallel: ProcessGroup | None = None,
    alone: ProcessGroup | None = None,
) -> ProcessGroupCollection:
    """megatron-core's collection: the expert groups, and for all else a group of this rank.

    ``everyone``, ``tensor_parallel``, ``alone``: see ``build_gpt``.
    """
    # A real group: the loss reduces over tensor-parallel ranks even where there is one.
    lone = alone or dist.new_group(
        [dist.get_rank()], use_local_synchronization=True, group_desc="one_rank"
    )
    chosen: dict[str, object] = {field.name: lone for field in fields(ProcessGroupCollection)}
    chosen |= {"ep": groups.exchange, "tp_ep": groups.counts, "hcp": [lone]}
    chosen |= {"tp_dp_cp": everyone or lone}
    chosen |= dict.fromkeys(("tp", "tp_cp", "mp"), tensor_parallel or lone)
    # None is megatron-core's word for: this rank shares no embedding with another stage.
    chosen |= {"embd": None, "pos_embd": None}
    return ProcessGroupCollection(**chosen)


@torch.no_grad()
def initialise(model: MegatronModel, seed: int) -> None:
    """Draw every weight matrix anew, each from a seed of its own global name; biases are 0.

    Built as they are, ranks with one seed would hold equal experts, and the weights that follow
    them would depend on how many experts a rank has.
    """
    config = model.config
    assert config.init_method is not None, "TransformerConfig fills it in"
    assert config.output_layer_init_method is not None, "TransformerConfig fills it in"
    with torch.random.fork_rng(devices=()):
        for name, parameter in model.named_parameters():
            if name.rpartition(".")[2].startswith("bias"):
                parameter.zero_()  # megatron-core leaves it as its memory was
            if parameter.dim() == 1:  # a norm's weight stays 1
                continue
            whole_name = global_name(model, name)
            torch.manual_seed(zlib.crc32(f"{seed}.{whole_name}".encode()))
            is_output = whole_name.endswith(("linear_proj.weight", "linear_fc2.weight"))
            drawn = torch.empty_like(parameter, device="cpu")
            (config.output_layer_init_method if is_output else config.init_method)(drawn)
            parameter.copy_(drawn)


_SINGLE: Final = re.compile(
    r"(?P<layer>.*)\.mlp\.experts\.local_experts\.(?P<index>\d+)\.(?P<rest>.*)"
)
_GROUPED: Final = re.compile(
    r"(?P<layer>.*)\.mlp\.experts\.(?P<rest>linear_fc[12]\.(?:weight|bias))(?P<index>\d+)"
)


def global_name(model: MegatronModel, name: str) -> str:
    """The parameter's name with its expert's index in the whole model instead of on this rank.

    It is the parameter's name in the same model built without expert parallelism, of local layers:
    a grouped layer's ``linear_fc1.weight3`` is ``linear_fc1.weight`` of its fourth expert.
    """
    if (grouped := _GROUPED.match(name)) is not None:
        layer, rest, local_index = grouped["layer"], grouped["rest"], grouped["index"]
    elif (single := _SINGLE.match(name)) is not None:
        layer, rest, local_index = single["layer"], single["rest"], single["index"]
    else:
        return name
    moe = cast(TransformerLayer, model.get_submodule(layer)).mlp
    assert isinstance(moe, MoELayer), f"{layer} has experts"
    index = moe.local_expert_indices[int(local_index)]
    return f"{layer}.mlp.experts.local_experts.{index}.{rest}"


@contextmanager
def without_notes() -> Generator[None]:
    """Keep back what megatron-core says at each build and no user can act on.

    That GPTModel is to give way to HybridModel (logged), and that defaults of its own settings are
    deprecated (warned).
    """
    logger = logging.getLogger(gpt_model.__name__)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"megatron\.core\.transformer\.")
            yield
    finally:
        logger.setLevel(level)
