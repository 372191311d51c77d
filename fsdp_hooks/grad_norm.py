"""The norm of all gradients together, and clipping by it.

``torch.nn.utils.clip_grad_norm_`` is right for a model on one mesh. Where experts live on another
mesh than the rest it stacks DTensors of two meshes, which torch refuses ("All operands in
aten.stack.default must have the same mesh"); only a change of torch could make it work. Clipping
each mesh's parameters on their own would not be clipping by the global norm.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_hooks.mesh import is_primary
from fsdp_hooks.placeholder import Placeholder, Relinquished

Parameters = nn.Module | Tensor | Iterable[Tensor]
"""A module stands for all of its parameters. A parameter that comes twice counts once."""

_SMALL: Final = 1e-6
"""Added to the norm that is divided by; torch's number."""


@torch.no_grad()
def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` over dense, expert and hybrid meshes.

    Collective over ``group``, also for a rank that has no gradient. Waits for the device only if
    ``error_if_nonfinite``. Clip after the last microbatch, and after ``GradScaler.unscale_``.

    Args:
        parameters: of the sharded model, the same on every rank of their meshes.
        max_norm: gradients are multiplied by ``min(1, max_norm / (norm + 1e-6))``.
        norm_type: p of the p-norm, above 0; ``inf`` for the largest magnitude.
        error_if_nonfinite: whether a norm that is infinite or NaN raises, on all ranks.
        foreach: False for one kernel a gradient instead of one for many.
        group: all ranks that hold a part of the model; default: the world.

    Returns:
        The norm before clipping: 0-dim, on the parameters' device, equal on all ranks; float64
        where a parameter is, else float32.

    Raises:
        ValueError: ``norm_type`` is not above 0, a parameter is not sharded, or the group lacks
            ranks of its mesh.
        RuntimeError: a step is under way, or the norm is not finite and ``error_if_nonfinite``.

    A rank that is refused takes part before it raises, so that no other waits for it: the others'
    norm is NaN, and so are their gradients. To raise there too would take a wait for the device.
    (``max_norm`` and ``norm_type`` are taken to be the same on all ranks.)
    """
    params = _distinct(parameters)
    norm = _global_norm(params, float(norm_type), foreach=foreach, group=group)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the gradients' norm of order {norm_type} is {float(norm)}; expected a finite one. "
            "Nothing was clipped. Look for the loss that overflowed, or pass "
            "error_if_nonfinite=False to go on with gradients that are not finite"
        )
    # No branch on the value: it would have to wait for the device.
    factor = (max_norm / (norm + _SMALL)).clamp(max=1.0)
    for grads in _alike([grad.to_local() for grad in _grads_of(params)]):
        if foreach is False:
            for grad in grads:
                grad.mul_(factor.to(grad.device))
        else:
            torch._foreach_mul_(  # pyright: ignore[reportPrivateUsage]
                grads, factor.to(grads[0].device)
            )
    return norm


@torch.no_grad()
def global_grad_norm(
    parameters: Parameters, norm_type: float = 2.0, *, group: ProcessGroup | None = None
) -> float:
    """The norm that ``clip_grad_norm_`` clips by, without clipping. Waits for the device.

    Raises:
        ValueError: as ``clip_grad_norm_``.
        RuntimeError: a step is under way.
    """
    return float(_global_norm(_distinct(parameters), float(norm_type), foreach=None, group=group))


def _distinct(parameters: Parameters) -> list[Tensor]:
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, Tensor):
        parameters = (parameters,)
    return list(dict.fromkeys(parameters))


def _global_norm(
    params: Sequence[Tensor],
    norm_type: float,
    *,
    foreach: bool | None,
    group: ProcessGroup | None,
) -> Tensor:
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}; expected a number above 0, or inf")
    # Scalars in float64: the square of a large float32 norm would overflow.
    device = params[0].device if params else _device_of(group)
    zero = torch.zeros((), dtype=torch.float64, device=device)
    try:
        grads = _grads_of(params)
        _check_group(dict.fromkeys(grad.device_mesh for grad in grads), group)
    except (ValueError, RuntimeError):
        _combined(zero.fill_(math.nan), norm_type, group)  # others may be waiting for this rank
        raise
    counted = [grad.to_local() for grad in grads if is_primary(grad)]
    norms = _local_norms(counted, norm_type, foreach=foreach)
    total = _combined(torch.stack([zero, *(norm.to(zero) for norm in norms)]), norm_type, group)
    is_double = any(param.dtype is torch.float64 for param in params)
    return total if is_double else total.float()


def _combined(norms: Tensor, norm_type: float, group: ProcessGroup | None) -> Tensor:
    """The norm of all ranks' ``norms``. Collective."""
    return _largest(norms, group) if norm_type == math.inf else _summed(norms, norm_type, group)


def _summed(norms: Tensor, norm_type: float, group: ProcessGroup | None) -> Tensor:
    """The p-norm of all ranks' ``norms``."""
    powers = norms.pow(norm_type).sum()
    dist.all_reduce(powers, group=group)
    return powers.pow(1.0 / norm_type)


def _largest(norms: Tensor, group: ProcessGroup | None) -> Tensor:
    """The largest of all ranks' ``norms``; NaN if one is.

    NaN travels beside the numbers: ``MAX`` keeps or loses it, as the order of ranks will have it.
    """
    largest = norms.max()
    is_nan = largest.isnan()
    both = torch.stack([largest.nan_to_num(nan=0.0, posinf=math.inf), is_nan.to(norms.dtype)])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    return both[0].masked_fill(both[1] > 0, math.nan)


def _local_norms(
    grads: Sequence[Tensor], norm_type: float, *, foreach: bool | None
) -> list[Tensor]:
    """One norm for each tensor that has elements, accumulated in float32 or better."""
    norms: list[Tensor] = []
    for some in _alike(grads):
        dtype = torch.promote_types(some[0].dtype, torch.float32)
        if foreach is False:
            norms += [torch.linalg.vector_norm(grad, norm_type, dtype=dtype) for grad in some]
        else:
            norms += torch._foreach_norm(  # pyright: ignore[reportPrivateUsage]
                some, norm_type, dtype
            )
    return norms


def _alike(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Tensors of one device and dtype together, as the multi-tensor kernels want them; without
    those that have no elements, which have no largest one."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return by_kind.values()


def _grads_of(params: Iterable[Tensor]) -> list[DTensor]:
    grads: list[DTensor] = []
    for param in params:
        if isinstance(param, Relinquished):
            raise ValueError(param.refusal())
        if isinstance(param, Placeholder):
            raise RuntimeError(
                f"the norm of gradients is asked for while a step is under way ("
                f"{param.parameter_name} of unit {param.unit_name} is released); expected it at "
                "rest. Clip after the last backward"
            )
        grad = param.grad
        if isinstance(grad, DTensor):
            grads.append(grad)
        elif grad is not None:
            raise ValueError(
                "a parameter is not sharded, so ranks cannot tell who counts its gradient; call "
                "fully_shard on the whole model"
            )
    return grads


def _check_group(meshes: Iterable[DeviceMesh], group: ProcessGroup | None) -> None:
    members = set(dist.get_process_group_ranks(group or dist.group.WORLD))
    for mesh in meshes:
        if missing := sorted({*mesh.mesh.flatten().tolist()} - members):
            raise ValueError(
                f"the group has ranks {sorted(members)}, but parameters are sharded over "
                f"{missing} too; expected all ranks of the model. Leave group out for the world"
            )


def _device_of(group: ProcessGroup | None) -> torch.device:
    """Where a rank without parameters joins the collective."""
    if dist.get_backend(group) == dist.Backend.NCCL:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
