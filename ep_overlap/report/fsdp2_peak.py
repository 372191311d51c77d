"""What torch's FSDP2 holds of gathered parameters, measured from outside.

FSDP2 gathers through two operators of its own (``_fsdp_collectives.py`` of torch 2.11)::

    shards -> fsdp::all_gather_copy_in -> buffer -> fsdp::split_with_sizes_copy -> parameters

Both ends hold whole parameters, so both count. A dispatch mode sees every operator without a change
to what FSDP2 does; but it takes time: measure in a step that is not timed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final, override

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


@final
class GatheredBytes(TorchDispatchMode):
    """While entered, follows the memory that FSDP2 gathers into; samples it after each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        """The most that was held at a time, parameters and buffers."""
        self.peak_buffer_bytes = 0
        """What the buffers had of ``peak_bytes``."""
        # FSDP2 keeps a parameter's storage object and resizes it; a buffer it drops when it can.
        self._params: dict[StorageWeakRef, torch.UntypedStorage] = {}
        self._buffers: list[tuple[StorageWeakRef, int]] = []

    @override
    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func == torch.ops.fsdp.all_gather_copy_in.default:
            self._follow_buffer(result[1])
        elif func == torch.ops.fsdp.split_with_sizes_copy.default:
            assert kwargs is not None, "FSDP2 passes its parameters by name"
            for param in kwargs["out"]:
                storage = param.untyped_storage()
                self._params.setdefault(StorageWeakRef(storage), storage)
        self._sample()
        return result

    def _follow_buffer(self, buffer: Tensor) -> None:
        storage = buffer.untyped_storage()
        self._buffers.append((StorageWeakRef(storage), storage.nbytes()))

    def _sample(self) -> None:
        self._buffers = [held for held in self._buffers if not held[0].expired()]
        buffer_bytes = sum(num_bytes for _, num_bytes in self._buffers)
        held_bytes = buffer_bytes + sum(storage.nbytes() for storage in self._params.values())
        if held_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_buffer_bytes = held_bytes, buffer_bytes
