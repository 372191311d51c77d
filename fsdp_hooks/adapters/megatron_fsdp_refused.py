"""What of megatron-core's FSDP v1 a schedule cannot drive, or was never seen to: refused."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import nn
from torch.distributed import ProcessGroup

from fsdp_hooks.adapters.megatron_ddp_buckets import INSTALL_HINT

try:
    from megatron.core.distributed import FullyShardedDataParallel
    from megatron.core.distributed.fsdp.src.megatron_fsdp import MegatronFSDP
    from megatron.core.transformer.moe.moe_layer import MoELayer
except ImportError as error:
    raise ImportError(INSTALL_HINT) from error

_SHARDS_PARAMS = "optim_grads_params"


def refuse_unsupported(fsdp: FullyShardedDataParallel, layers: Sequence[nn.Module]) -> None:
    """Name every setting that a schedule cannot follow, or that is not tested under one.

    Raises:
        ValueError: there are some; or it is not ``FullyShardedDataParallel`` at all.
    """
    if not isinstance(fsdp, FullyShardedDataParallel):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"got {type(fsdp).__name__}, expected megatron-core's FullyShardedDataParallel"
        )
    refused = [
        f"{name}={got!r} (supported: {supported!r})"
        for name, got, supported in _settings(fsdp)
        if got != supported
    ]
    if refused:
        raise ValueError(
            "a schedule cannot drive this FullyShardedDataParallel; change in its settings: "
            + ", ".join(refused)
        )
    inner: MegatronFSDP = cast(Any, fsdp).module
    _refuse_units(inner, layers)
    _refuse_own_delays(inner)
    _refuse_lone_experts(inner)
    _refuse_shared_groups(inner)


def _settings(fsdp: FullyShardedDataParallel) -> list[tuple[str, object, object]]:
    """(setting, got, supported)"""
    config, model = fsdp.ddp_config, fsdp.config
    inner: MegatronFSDP = cast(Any, fsdp).module
    return [
        ("num_distributed_optimizer_instances", config.num_distributed_optimizer_instances, 1),
        ("outer_dp_sharding_strategy", config.outer_dp_sharding_strategy, "no_shard"),
        # Without it FSDP v1 reduces with the last microbatch, and once more when it finalizes.
        ("overlap_grad_reduce", config.overlap_grad_reduce, True),
        # Experts' gradients would be multiplied by the expert-parallel size.
        ("average_in_collective", config.average_in_collective, False),
        ("fsdp_double_buffer", config.fsdp_double_buffer, False),
        ("nccl_ub", config.nccl_ub, False),
        ("fp8_param_gather", config.fp8_param_gather, False),
        ("fp4_param_gather", config.fp4_param_gather, False),
        ("megatron_fsdp_cuda_graph_mode", config.megatron_fsdp_cuda_graph_mode, False),
        ("megatron_fsdp_use_decoupled_grad", config.megatron_fsdp_use_decoupled_grad, False),
        ("report_nan_in_param_grad", inner.report_nan_in_param_grad, False),
        ("model_auto_sync", inner.model_auto_sync, False),
        ("cuda_graph_impl", model.cuda_graph_impl, "none"),
        ("gradient_accumulation_fusion", model.gradient_accumulation_fusion, False),
        ("init_model_with_meta_device", model.init_model_with_meta_device, False),
        ("tensor_model_parallel_size", model.tensor_model_parallel_size, 1),
        # Each MTP layer holds a layer that FSDP v1 makes a unit, and a schedule does not.
        ("mtp_num_layers", model.mtp_num_layers, None),
        ("recompute_granularity", model.recompute_granularity, None),
    ]


class OwnedParams(NamedTuple):
    """Compute parameters ("raw") by who owns them."""

    roots: Sequence[nn.Parameter]
    of_layers: Sequence[Sequence[nn.Parameter]]


def owned_params(fsdp: MegatronFSDP, layers: Sequence[nn.Module]) -> OwnedParams:
    """The root's, and each layer's, in the order of registration.

    Raises:
        ValueError: a layer is no part of the module, or shares a parameter with what is not its.
    """
    root = fsdp.module
    names = {module: name for name, module in root.named_modules()}
    for index, layer in enumerate(layers):
        inside_others = any(layer in other.modules() for other in layers if other is not layer)
        if layer not in names or inside_others:
            raise ValueError(
                f"layer {index} ({type(layer).__name__}) is not a part of the module that FSDP "
                "wraps, or is in another layer; give the layers of its innermost module"
            )
    raw: Mapping[str, nn.Parameter] = cast(Any, fsdp).raw_param
    prefixes = [f"{names[layer]}." for layer in layers]
    places: dict[nn.Parameter, set[int]] = {}
    first = {param: name for name, param in root.named_parameters()}
    for name, param in root.named_parameters(remove_duplicate=False):
        place = next((i for i, prefix in enumerate(prefixes) if name.startswith(prefix)), -1)
        places.setdefault(raw[first[param]], set()).add(place)
    for name, param in raw.items():
        if len(places[param]) > 1:
            raise ValueError(
                f"{name}: shared by a layer and another, or by a layer and what is outside of "
                "all; a schedule reduces each layer on its own. Share none"
            )
    of = [[p for p in raw.values() if i in places[p]] for i in range(-1, len(layers))]
    return OwnedParams(of[0], of[1:])


def _refuse_units(fsdp: MegatronFSDP, layers: Sequence[nn.Module]) -> None:
    """What FSDP v1 releases together must be a layer, or nothing."""
    classes = cast(tuple[type[nn.Module], ...], tuple(fsdp.fsdp_unit_modules))
    shards_params = fsdp.data_parallel_sharding_strategy == _SHARDS_PARAMS
    units = [module for module in fsdp.module.modules() if isinstance(module, classes)]
    expected = list(layers) if shards_params else []
    if set(units) == set(expected):
        return
    found = ", ".join(sorted({type(unit).__name__ for unit in units})) or "none"
    wanted = "the schedule's layers, each whole" if shards_params else "none"
    raise ValueError(
        f"fsdp_unit_modules makes units of {found} ({len(units)}), expected {wanted} "
        f"({len(expected)}); leave fsdp_unit_modules out"
    )


def _refuse_own_delays(fsdp: MegatronFSDP) -> None:
    for name, param in cast(Mapping[str, nn.Parameter], cast(Any, fsdp).raw_param).items():
        # A mark that only layers set whose ``backward_dw`` makes the gradient: Transformer Engine's
        # own delayed ones, which are no action of a schedule.
        if vars(param).get("skip_backward_post_hook", False):
            raise ValueError(
                f"the layer of {name} delays its weight gradient by itself, where no schedule "
                "makes it; build the model with local layers, or leave delay_wgrad_compute out"
            )


def _refuse_lone_experts(fsdp: MegatronFSDP) -> None:
    """FSDP v1 keeps the gradients of a group of one rank whole, and scales the sum of microbatches
    again with each of them: right only if it scales by one."""
    if fsdp.data_parallel_sharding_strategy not in ("optim_grads", _SHARDS_PARAMS):
        return
    for group in fsdp.param_and_grad_buffer.parameter_groups:
        buffer = group.main_grad_buffer
        if buffer is None or buffer.is_data_distributed:
            continue
        if buffer.gradient_scaling_factor not in (None, 1.0):
            what = "experts" if group.is_expert_param else "parameters"
            raise ValueError(
                f"{what} are on one data-parallel rank (expert_model_parallel_size is the number "
                "of ranks), where FSDP v1's gradients of several microbatches are wrong; use more "
                "ranks, a smaller expert_model_parallel_size, or the strategy 'optim'"
            )


def _refuse_shared_groups(fsdp: MegatronFSDP) -> None:
    lanes: set[ProcessGroup] = set()
    for group in fsdp.param_and_grad_buffer.parameter_groups:
        for buffer in (group.model_weight_buffer, group.main_grad_buffer):
            if buffer is not None:
                lanes.add(cast(ProcessGroup, buffer.data_parallel_group))
    for module in fsdp.module.modules():
        if not isinstance(module, MoELayer):
            continue
        exchange = module.ep_group
        if exchange in lanes and exchange.size() > 1:
            raise ValueError(
                "FSDP gathers or reduces over the very process group that the model's layers talk "
                "over, and a group belongs to one lane; make a second one over the same ranks"
            )
