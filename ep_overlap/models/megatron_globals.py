"""What megatron-core keeps process-wide and a model needs while it runs.

With explicit process groups, a GPTModel needs none of ``parallel_state``'s groups. Two globals are
left: the scratch buffer of its local attention, and the tracker of CUDA random states, which that
attention forks around its dropout. ``parallel_state.initialize_model_parallel`` and
``model_parallel_cuda_manual_seed`` set them for good; this sets them for a while.
"""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Final

INSTALL_HINT: Final = "megatron models need megatron-core 0.19: pip install 'ep-overlap[megatron]'"


@contextmanager
def megatron_globals() -> Generator[None]:
    """Set both globals, and put back on exit what was there. May be nested.

    The tracker is megatron-core's own for inference, whose forks do nothing: nothing that this
    package supports draws random numbers in a step.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from megatron.core.utils import GlobalMemoryBuffer

    with ExitStack() as undo:
        replace(undo, parallel_state, "_GLOBAL_MEMORY_BUFFER", GlobalMemoryBuffer())
        replace(undo, random, "_CUDA_RNG_STATE_TRACKER", None)
        replace(undo, random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", False)
        random.initialize_rng_tracker(inference_rng_tracker=True)
        yield


def replace(undo: ExitStack, owner: object, name: str, value: object) -> None:
    """Set an attribute that exists, and put the old value back when ``undo`` closes."""
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
