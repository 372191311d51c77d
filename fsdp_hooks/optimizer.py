"""Optimizers over sharded parameters."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

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
        ValueError: it needs whole tensors, which a shard is not; or it has taken a step.
    """
    name = type(optimizer).__name__
    if name in _NEED_WHOLE_TENSORS:
        raise ValueError(
            f"{name} needs whole tensors; expected an elementwise optimizer of torch.optim, such "
            "as AdamW or SGD (not built yet for sharded parameters)"
        )
    if optimizer.state:
        raise ValueError(f"{name} has taken a step already; call shard_optimizer before the first")
    split: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        split.extend(_split_by_mesh(group))
    optimizer.param_groups[:] = split
    return optimizer


def _split_by_mesh(group: Mapping[str, Any]) -> list[dict[str, Any]]:
    by_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for param in group["params"]:
        mesh = param.device_mesh if isinstance(param, DTensor) else None
        by_mesh.setdefault(mesh, []).append(param)
    return [{**group, "params": params} for params in by_mesh.values()]
