"""Lets megatron-core's MoE models run on CPU ranks.

megatron-core 0.19 asks ``torch.cuda`` for streams and for the current device wherever it allocates,
and moves split sizes to the host only from a GPU. The stand-ins answer for the CPU:

====================================  ==========================================================
``torch.cuda.current_device``         the CPU
``torch.cuda.Stream``                 a stream whose work is done when it is issued
``torch.cuda.current_stream``         one such stream
``torch.cuda.stream``                 enters nothing
``torch.cuda.synchronize``            does nothing
``torch.zeros`` and the like          make tensors of ``device="cuda"`` on the CPU
``MoEAlltoAllTokenDispatcher``        its stream for device-to-host copies is such a stream
``token_dispatcher``                  its ``maybe_move_tensor_to_cpu`` makes numpy arrays of CPU
                                      tensors too: split sizes must be plain integers
``random``                            activation recompute: no GPU's generator has a state to save,
                                      and a recomputed tensor's bytes are copied to where a compiled
                                      extension would show them
``CheckpointWithoutOutput``           asks Transformer Engine about fp8 only where fp8 is asked for:
                                      ``False`` is taken for a wish too
``parallel_state``, ``random``        see ``megatron_globals``
====================================  ==========================================================

``megatron_training_on_cpu`` adds one for its optimizers:

====================================  ==========================================================
``torch.Tensor.type``                 of a CPU tensor, the name of the GPU's type: parameters are
                                      sorted by that name, and no other is known
====================================  ==========================================================

``megatron_schedule_on_cpu`` adds those of its own overlapped schedule, ``combined_1f1b``:

====================================  ==========================================================
``torch.cuda.Event``                  one that has happened already
``torch.Tensor.record_stream``        does nothing
``pipeline_parallel.utils``           its exchange stream, which it would keep, is dropped on exit
``parallel_state``                    has one context-parallel rank
====================================  ==========================================================

The stand-in streams order nothing. A schedule brings its own streams; where it has none, the
calling thread does one thing after the other.
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any, Final

import torch
from torch import Tensor

from ep_overlap.models.groups import lone_expert_groups
from ep_overlap.models.megatron_globals import megatron_globals, replace


@contextmanager
def megatron_on_cpu(device: torch.device | str = "cpu") -> Generator[None]:
    """Put the stand-ins in place, and undo every one on exit. May be nested.

    Both building and running a model, backward included, must happen inside. The stand-ins are
    process-wide, so all threads see them.

    Args:
        device: where the model is to run; anything but a CPU is refused.

    Raises:
        RuntimeError: the model is to run on a GPU, or this process uses one already.
    """
    _refuse_gpu(torch.device(device))
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    stream = _DoneStream()
    with ExitStack() as undo:
        replace(undo, torch.cuda, "current_device", _current_device)
        replace(undo, torch.cuda, "Stream", _DoneStream)
        replace(undo, torch.cuda, "current_stream", lambda device=None: stream)
        replace(undo, torch.cuda, "stream", nullcontext)
        replace(undo, torch.cuda, "synchronize", lambda device=None: None)
        for name in _FACTORIES:
            replace(undo, torch, name, _on_cpu(getattr(torch, name)))
        replace(undo, token_dispatcher, "maybe_move_tensor_to_cpu", _to_host)
        dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
        replace(undo, dispatcher, "cuda_dtoh_stream", stream)
        replace(undo, random, "_get_cuda_rng_state", lambda graph_safe=False: None)
        replace(undo, random, "_set_cuda_rng_state", lambda state, graph_safe=False: None)
        replace(undo, random, "_get_share_storage", lambda: _copy_storage)
        checkpoint = random.CheckpointWithoutOutput
        replace(undo, checkpoint, "__init__", _with_fp8_if_asked_for(checkpoint.__init__))
        undo.enter_context(megatron_globals())
        yield


_FACTORIES: Final = ("arange", "empty", "full", "ones", "tensor", "zeros")


def _on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return made


@contextmanager
def megatron_training_on_cpu(device: torch.device | str = "cpu") -> Generator[None]:
    """As ``megatron_on_cpu``, and for megatron-core's own optimizers, too. Raises as it."""
    with megatron_on_cpu(device), ExitStack() as undo:
        if "type" not in vars(torch.Tensor):  # else an outer use has put it there
            undo.callback(delattr, torch.Tensor, "type")
            setattr(torch.Tensor, "type", _type)  # noqa: B010 (its overloads cannot be assigned)
        yield


@contextmanager
def megatron_schedule_on_cpu(device: torch.device | str = "cpu") -> Generator[None]:
    """As ``megatron_on_cpu``, and for megatron-core's own overlapped schedule. Raises as it."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import utils

    with megatron_on_cpu(device), ExitStack() as undo:
        replace(undo, torch.cuda, "Event", _DoneEvent)
        replace(undo, torch.Tensor, "record_stream", lambda tensor, stream: None)
        replace(undo, utils, "_COMM_STREAM", None)
        replace(undo, parallel_state, "_CONTEXT_PARALLEL_GROUP", lone_expert_groups().exchange)
        yield


def _refuse_gpu(device: torch.device) -> None:
    if device.type != "cpu":
        raise RuntimeError(
            f"megatron_on_cpu replaces parts of torch.cuda, so a model on {device} cannot run "
            "inside it; on a GPU megatron-core needs no stand-ins: leave it out"
        )
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        raise RuntimeError(
            "megatron_on_cpu replaces parts of torch.cuda, which this process is using; run the "
            "CPU model in a process of its own, with CUDA_VISIBLE_DEVICES set to nothing"
        )


class _DoneEvent:
    """Has happened already."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...


class _DoneStream:
    """Runs work when it is issued, so there is nothing to wait for."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def record_event(self, event: object = None) -> _DoneEvent:
        return _DoneEvent()


def _current_device() -> torch.device:
    return torch.device("cpu")


def _to_host(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
    """Stand in for ``megatron.core.transformer.moe.moe_utils.maybe_move_tensor_to_cpu``."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


def _with_fp8_if_asked_for(make: Callable[..., None]) -> Callable[..., None]:
    @wraps(make)
    def made(checkpoint: object, fp8: object = None) -> None:
        make(checkpoint, fp8 or None)

    return made


def _copy_storage(to: Tensor, source: Tensor) -> None:
    """Stand in for ``megatron.core.tensor_parallel.random``'s ``share_storage``: all views of
    ``to``, whose storage was emptied, see what ``source`` holds."""
    storage = source.untyped_storage()
    to.untyped_storage().resize_(storage.nbytes())
    to.untyped_storage().copy_(storage)


_tensor_type: Final = torch.Tensor.type


def _type(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """``Tensor.type``; without arguments, ``torch.cuda.FloatTensor`` for ``torch.FloatTensor``."""
    found = _tensor_type(tensor, *args, **kwargs)
    return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found
