"""Lets megatron-core's ``FullyShardedDataParallel`` (its FSDP v1) run on CPU ranks.

It names ``cuda`` where it means its device. Beside those of ``megatron_cpu``, the stand-ins are:

====================================  ==========================================================
``torch.device`` of its two modules   ``cuda:...`` is the CPU
``DeviceMesh.from_group`` of its      meshes are of CPU ranks
adapter
``torch.Tensor.cuda``                 the tensor itself
its ``_coalescing_manager``           gathers are done when they are issued: gloo would run several
                                      of one process group at once, and reductions beside them
====================================  ==========================================================
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ep_overlap.models.megatron_cpu import megatron_training_on_cpu
from ep_overlap.models.megatron_globals import replace


@contextmanager
def megatron_fsdp_on_cpu(device: torch.device | str = "cpu") -> Generator[None]:
    """As ``megatron_training_on_cpu``, and for megatron-core's FSDP v1, too. Raises as it."""
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from megatron.core.distributed.fsdp.src.megatron_fsdp import (
        megatron_fsdp,
        param_and_grad_buffer,
    )

    with megatron_training_on_cpu(device), ExitStack() as undo:
        for module in (mcore_fsdp_adapter, megatron_fsdp):
            replace(undo, module, "torch", _CpuTorch())
        replace(undo, mcore_fsdp_adapter, "DeviceMesh", _CpuMesh)
        replace(undo, torch.Tensor, "cuda", _itself)
        together = param_and_grad_buffer._coalescing_manager  # pyright: ignore[reportPrivateUsage]
        replace(undo, param_and_grad_buffer, "_coalescing_manager", _at_once(together))
        yield


class _CpuTorch:
    """``torch``, but that its ``cuda`` devices are the CPU."""

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)

    def device(self, name: object) -> torch.device:
        return torch.device("cpu" if str(name).startswith("cuda") else str(name))


class _CpuMesh:
    """Makes device meshes of CPU ranks."""

    @staticmethod
    def from_group(*args: Any, device_type: str, **kwargs: Any) -> DeviceMesh:
        return DeviceMesh.from_group(*args, device_type="cpu", **kwargs)


def _at_once(together: Callable[..., AbstractContextManager[Any]]) -> Callable[..., Any]:
    @contextmanager
    def done(*args: Any, **kwargs: Any) -> Generator[Any]:
        with together(*args, **kwargs) as work:
            yield work
        work.wait()

    return done


def _itself(tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
    return tensor
