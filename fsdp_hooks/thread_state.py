"""The PyTorch modes of a thread, carried to a worker with the work.

PyTorch keeps these modes per thread. Work must run under those of whoever issued it, or a schedule
would silently leave ``no_grad`` and ``autocast`` at the door of its workers.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor


class ThreadState(NamedTuple):
    """The issuing thread's PyTorch modes, carried to the worker with the work."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool
    saved_tensor_hooks: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None
    multithreaded_backward: bool
    num_threads: int
    """Intra-op threads."""

    @classmethod
    def capture(cls) -> "ThreadState":
        """The modes in force in this thread."""
        enabled = [d for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
        engine = torch._C  # pyright: ignore[reportPrivateUsage]
        # The engine has no public reader of the hook stack or of the multithreading flag.
        hooks = engine._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple((d, torch.get_autocast_dtype(d)) for d in enabled),
            autocast_cache=torch.is_autocast_cache_enabled(),
            saved_tensor_hooks=None if hooks is None else (hooks[0], hooks[1]),
            multithreaded_backward=engine._is_multithreading_enabled(),  # pyright: ignore
            num_threads=torch.get_num_threads(),
        )

    def enter(self, stack: ExitStack) -> None:
        """Put the modes in force in this thread until ``stack`` closes; ``num_threads`` stays."""
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)
        stack.enter_context(torch.inference_mode(self.inference))
        stack.enter_context(torch.set_grad_enabled(self.grad))
        for device, dtype in self.autocast:
            stack.enter_context(
                torch.autocast(device, dtype=dtype, cache_enabled=self.autocast_cache)
            )
        if self.saved_tensor_hooks is not None:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.saved_tensor_hooks))
        stack.enter_context(torch.autograd.set_multithreading_enabled(self.multithreaded_backward))
