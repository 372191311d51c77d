"""Loss scaling whose decision to skip a step is one decision of all ranks.

``torch.amp.GradScaler`` looks for overflow through DTensor's dispatcher, which reduces what it
found over the mesh of the first gradient alone. An overflow in an expert's gradient is then known
to some ranks: they skip the step and lower their scale, the others do neither, and from there on
the ranks train different models without an error.
"""

from typing import final, override

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor


@final
class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for sharded modules on any meshes; its ``state_dict`` is torch's.

    ::

        schedule.step(microbatches, lambda output, batch: scaler.scale(loss_fn(output, batch)))
        scaler.unscale_(optimizer)          # collective; only needed before clipping
        clip_grad_norm_(model, 1.0)
        scaler.step(optimizer)              # collective, unless unscale_ was called
        losses = [loss / scaler.get_scale() for loss in result.losses]      # before update()
        scaler.update()

    Args:
        device: ``cuda`` or ``cpu``: that of loss and gradients.
        init_scale: as torch's, like the four that follow.
        growth_factor: by how much the scale grows.
        backoff_factor: by how much it falls after an overflow.
        growth_interval: steps without an overflow between growths.
        enabled: False: every call passes through.
        group: all ranks that hold a part of the model; default: the world.

    Raises:
        ValueError: (``unscale_``, ``step``) gradients are float16, which cannot hold small ones. A
            rank without such gradients is not left waiting: it is told of an overflow, and skips.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._group = group

    @override
    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """What ``unscale_`` and ``step`` call, here as in torch's ``ShardedGradScaler``."""
        by_dtype = _local_grads(optimizer)
        is_refused = torch.float16 in by_dtype and not allow_fp16
        if is_refused:
            found_inf.fill_(1.0)
        else:
            for grads in by_dtype.values():
                torch._amp_foreach_non_finite_check_and_unscale_(  # pyright: ignore[reportPrivateUsage]
                    grads, found_inf, inv_scale
                )
        dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=self._group)
        if is_refused:  # not before: other ranks, whose gradients may be all right, would wait
            raise ValueError(
                "gradients are float16; expected float32 or bfloat16, as scaling back would "
                "round small ones to zero. Keep the main weights in float32"
            )
        return {found_inf.device: found_inf}


def _local_grads(optimizer: torch.optim.Optimizer) -> dict[torch.dtype, list[Tensor]]:
    """This rank's part of every gradient, by dtype; each once."""
    params: dict[Tensor, None] = dict.fromkeys(
        param for group in optimizer.param_groups for param in group["params"]
    )
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for param in params:
        if (grad := param.grad) is not None:
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            by_dtype.setdefault(local.dtype, []).append(local)
    return by_dtype
