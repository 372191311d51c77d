"""Optimizers over sharded parameters."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_hooks.placeholder import Relinquished

_NEED_WHOLE_TENSORS: Final = frozenset({"LBFGS", "Adafactor", "Muon", "SparseAdam"})


def shard_optimizer[OptimizerT: torch.optim.Optimizer](optimizer: OptimizerT) -> OptimizerT:
    """Prepare an optimizer that was built over a sharded module's parameters.

    A step then updates this rank's main weights. Each parameter group is split by mesh: torch's
    multi-tensor kernels refuse a list of DTensors on several meshes (dense and expert).

    Args:
        optimizer: elementwise, from ``torch.optim``; built after ``fully_shard``, not yet stepped.

    Returns:
        The same optimizer.

    Raises:
        ValueError: it needs whole tensors, which a shard is not; it was built before
            ``fully_shard``; or it has taken a step.
    """
    name = type(optimizer).__name__
    if name in _NEED_WHOLE_TENSORS:
        raise ValueError(
            f"{name} needs whole tensors; expected an elementwise optimizer of torch.optim, such "
            "as AdamW or SGD (not built yet for sharded parameters)"
        )
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if isinstance(param, Relinquished):
            raise ValueError(f"{name} was built before fully_shard. {param.refusal()}")
    if optimizer.state:
        raise ValueError(f"{name} has taken a step already; call shard_optimizer before the first")
    split: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        split.extend(_split_by_mesh(group))
    optimizer.param_groups[:] = split
    return optimizer


def _split_by_mesh(group: Mapping[str, Any]) -> list[dict[str, Any]]:
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    params: list[Tensor] = group["params"]
    for param in params:
        mesh = param.device_mesh if isinstance(param, DTensor) else None
        by_mesh.setdefault(mesh, []).append(param)
    return [{**group, "params": members} for members in by_mesh.values()]


def global_grad_norm(
    parameters: Iterable[nn.Parameter], *, group: ProcessGroup | None = None
) -> float:
    """The 2-norm of all gradients together, dense and expert, each element counted once.

    Collective over ``group`` (all ranks of the model; default: the world). Sums in float64.

    Raises:
        ValueError: a parameter with a gradient is not sharded.
    """
    squared = torch.zeros((), dtype=torch.float64)
    for param in parameters:
        grad = param.grad
        if grad is None:
            continue
        if not isinstance(grad, DTensor):
            raise ValueError(
                "a parameter is not sharded, so ranks cannot tell who counts its gradient; call "
                "fully_shard on the whole model"
            )
        # A replicated gradient is whole on every rank of its mesh: the first one counts it.
        replicated = grad.placements[0].is_replicate()
        if replicated and grad.device_mesh.get_local_rank() != 0:
            continue
        grad = grad.to_local()
        squared += grad.double().square().sum().cpu()
    dist.all_reduce(squared, group=group)
    return float(squared.sqrt())
