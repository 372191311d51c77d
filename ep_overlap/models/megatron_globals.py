"""What megatron-core keeps process-wide and a model needs while it runs.

With explicit process groups, a GPTModel needs none of ``parallel_state``'s groups. Some globals are
left: the scratch buffer of its local attention; the tracker of CUDA random states, which that
attention forks around its dropout; and for multi-token prediction (MTP), which takes no groups, the
place among pipeline stages, and the ranks over which its logged losses are averaged.
``parallel_state.initialize_model_parallel`` and ``model_parallel_cuda_manual_seed`` set them for
good; this sets them for a while.
"""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Final

import torch.distributed as dist

INSTALL_HINT: Final = "megatron models need megatron-core 0.19: pip install 'ep-overlap[megatron]'"


@contextmanager
def megatron_globals() -> Generator[None]:
    """Set these globals, and put back on exit what was there. May be nested.

    The tracker is megatron-core's own for inference, whose forks do nothing: nothing that this
    package supports draws random numbers in a step. For MTP, there is one pipeline stage, and all
    ranks see different data; it needs ``torch.distributed`` to be initialised before.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from megatron.core.utils import GlobalMemoryBuffer

    with ExitStack() as undo:
        replace(undo, parallel_state, "_GLOBAL_MEMORY_BUFFER", GlobalMemoryBuffer())
        replace(undo, random, "_CUDA_RNG_STATE_TRACKER", None)
        replace(undo, random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", False)
        replace(undo, parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_RANK", 0)
        replace(undo, parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", 1)
        everyone = dist.group.WORLD if dist.is_initialized() else None
        replace(undo, parallel_state, "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT", everyone)
        random.initialize_rng_tracker(inference_rng_tracker=True)
        yield


@contextmanager
def megatron_schedule_globals() -> Generator[None]:
    """As ``megatron_globals``, and for megatron-core's own overlapped schedule, which asks for its
    streams and for the size of context parallelism process-wide."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import utils

    from ep_overlap.models.groups import lone_expert_groups

    with megatron_globals(), ExitStack() as undo:
        replace(undo, utils, "_COMM_STREAM", None)
        replace(undo, parallel_state, "_CONTEXT_PARALLEL_GROUP", lone_expert_groups().exchange)
        yield


def replace(undo: ExitStack, owner: object, name: str, value: object) -> None:
    """Set an attribute that exists, and put the old value back when ``undo`` closes."""
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
