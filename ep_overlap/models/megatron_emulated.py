"""What megatron-core needs to build its FSDP v1 on one rank of an emulated world."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager

from ep_overlap.models.megatron_globals import replace


@contextmanager
def megatron_fsdp_of_one_rank() -> Generator[None]:
    """Until the block ends, megatron-core's FSDP does not check that shards cover a parameter.

    ``validate_uneven_dtensor`` asks the other ranks for their shards' shapes. In an emulated world
    all have this rank's, which do not add up where parameters are shared out unevenly.
    (megatron-core itself skips the check on torch's ``fake`` backend.) The offsets that its
    checkpoints would record are wrong for the same reason: save none.
    """
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer

    with ExitStack() as undo:
        replace(undo, param_and_grad_buffer, "validate_uneven_dtensor", _unchecked)
        yield


def _unchecked(dtensor: object) -> None: ...
