"""Lets megatron-core's own training entry, ``megatron.training.pretrain``, run on CPU ranks.

Beside those of ``megatron_cpu``, the stand-ins are:

====================================  ==========================================================
``initialize_megatron``               is told that there may be no GPU
``set_jit_fusion_options``            does nothing: it warms up kernels on a GPU
``_compile_dependencies``             does nothing: it compiles helpers of datasets in its format
``torch.cuda.get_rng_state``, ``set`` the state of the CPU's generator; setting it does nothing:
                                      that one is saved and put back beside it
``torch.cuda.empty_cache``            does nothing
``torch.cuda.memory_stats``           has no entries
``Module.cuda``                       the module itself
====================================  ==========================================================

``parallel_state.initialize_model_parallel`` is called before, outside. ``TORCHDYNAMO_DISABLE=1`` is
needed in the environment: its fused losses are compiled, and the compiler asks for a GPU.
"""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import nn

from ep_overlap.models.megatron_cpu import megatron_training_on_cpu
from ep_overlap.models.megatron_globals import replace


@contextmanager
def megatron_pretrain_on_cpu() -> Generator[None]:
    """As ``megatron_training_on_cpu``, and for ``pretrain``, too. Raises as it."""
    from megatron.training import initialize, training

    without_gpu = partial(training.initialize_megatron, allow_no_cuda=True)
    with megatron_training_on_cpu(), ExitStack() as undo:
        replace(undo, training, "initialize_megatron", without_gpu)
        replace(undo, training, "set_jit_fusion_options", lambda **sizes: None)
        replace(undo, initialize, "_compile_dependencies", lambda: None)
        replace(undo, torch.cuda, "get_rng_state", lambda device=None: torch.get_rng_state())
        replace(undo, torch.cuda, "set_rng_state", lambda state, device=None: None)
        replace(undo, torch.cuda, "empty_cache", lambda: None)
        replace(undo, torch.cuda, "memory_stats", lambda device=None: {})
        replace(undo, nn.Module, "cuda", lambda module, device=None: module)
        yield
