"""Gradient accumulation on the standard path."""

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn

from fsdp_hooks.lifecycle import lifecycle_of
from fsdp_hooks.root import FsdpRoot


@contextmanager
def microbatch(module: nn.Module, *, is_last: bool) -> Generator[None]:
    """Say whether the backward inside ends the accumulation.

    Strategies that reduce once a step (``no_shard``) reduce in the last microbatch's backward;
    those that reduce every microbatch do so regardless. Contexts nest; the outer one's word is
    back in force after the inner one. Megatron's ``no_sync`` is ``microbatch(is_last=False)``.

    After a backward that raised, repeat the whole step. To give a step up halfway, call
    ``module.zero_grad()``: ``optimizer.zero_grad()`` sees ``.grad`` alone, and what waits for the
    last microbatch to be reduced is not there yet.

    Raises:
        ValueError: ``module`` is not sharded.
    """
    root = lifecycle_of(module)
    if not isinstance(root, FsdpRoot):
        raise ValueError(f"{type(module).__name__} is not sharded; call fully_shard on it first")
    context = root.context
    before = context.is_last_microbatch
    context.is_last_microbatch = is_last
    try:
        yield
    finally:
        context.is_last_microbatch = before
