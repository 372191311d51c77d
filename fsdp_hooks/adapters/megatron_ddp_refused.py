"""What of megatron-core's DDP a schedule cannot drive, or was never seen to: refused by name."""

from collections.abc import Sequence
from typing import cast

from torch import nn
from torch.distributed import ProcessGroup

from fsdp_hooks.adapters.megatron_ddp_buckets import INSTALL_HINT

try:
    from megatron.core.distributed import DistributedDataParallel
except ImportError as error:
    raise ImportError(INSTALL_HINT) from error


def refuse_unsupported(ddp: DistributedDataParallel) -> None:
    """Name every setting that a schedule cannot follow, or that is not tested under one.

    Raises:
        ValueError: there are some; or it is not ``DistributedDataParallel`` at all.
    """
    if not isinstance(ddp, DistributedDataParallel):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"got {type(ddp).__name__}, expected megatron-core's DistributedDataParallel"
        )
    refused = [
        f"{name}={got!r} (supported: {supported!r})"
        for name, got, supported in _settings(ddp)
        if got != supported
    ]
    if refused:
        raise ValueError(
            "a schedule cannot drive this DistributedDataParallel; change in its settings: "
            + ", ".join(refused)
        )
    if ddp.ddp_config.delay_wgrad_compute:
        _refuse_own_delays(ddp.module)
    _refuse_shared_groups(ddp)


def _settings(ddp: DistributedDataParallel) -> list[tuple[str, object, object]]:
    """(setting, got, supported)"""
    config, model = ddp.ddp_config, ddp.config
    settings: list[tuple[str, object, object]] = [
        ("use_megatron_fsdp", config.use_megatron_fsdp, False),
        ("num_distributed_optimizer_instances", config.num_distributed_optimizer_instances, 1),
        ("fp8_param_gather", config.fp8_param_gather, False),
        ("fp4_param_gather", config.fp4_param_gather, False),
        ("nccl_ub", config.nccl_ub, False),
        ("gtp_weight_remat_size", model.gtp_weight_remat_size, 1),
        ("expert_gtp_weight_remat_size", model.expert_gtp_weight_remat_size, 1),
        ("cuda_graph_impl", model.cuda_graph_impl, "none"),
    ]
    if config.overlap_param_gather:
        # Without it, the layer-wise optimizer's: it gathers into the gradients' buffers.
        settings.append(("use_distributed_optimizer", config.use_distributed_optimizer, True))
    return settings


def _refuse_own_delays(module: nn.Module) -> None:
    for name, param in module.named_parameters():
        # A mark that only layers set whose ``backward_dw`` makes the gradient: Transformer Engine's
        # own delayed ones, which are no action of a schedule.
        if vars(param).get("skip_backward_post_hook", False):
            raise ValueError(
                f"delay_wgrad_compute is set, and the layer of {name} delays its weight gradient "
                "by itself, where no schedule makes it; build the model with local layers, or "
                "leave delay_wgrad_compute out"
            )


def _refuse_shared_groups(ddp: DistributedDataParallel) -> None:
    # megatron-core types them as whatever its collection may hold.
    lanes = cast(Sequence[ProcessGroup], (ddp.intra_dp_cp_group, ddp.intra_expt_dp_group))
    for group in lanes:
        if group.size() > 1 and (group is ddp.ep_group or group is ddp.tp_group):
            raise ValueError(
                "DDP reduces over the very process group that the model's layers talk over, and a "
                "group belongs to one lane; make a second one over the same ranks"
            )
