"""The two process groups of expert parallelism, over the same ranks.

Why two: a model's exchanges run on the exchange lane while its gather of token counts runs on the
compute lane, and a process group belongs to one lane. (One gloo group used from two threads at once
mixes their data without an error.)
"""

from dataclasses import dataclass
from typing import Final, Protocol

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ep_overlap.run.layer import Collective

EXCHANGE: Final = "all_to_all_single"
"""What ``dispatch`` and ``combine`` issue, once per tensor."""
GATHER_COUNTS: Final = "all_gather_into_tensor"
"""What ``attn`` issues, once."""
GATHER: Final = "all_gather_into_tensor"
"""What tensor-parallel layers issue before a product, where they share sequences."""
SCATTER: Final = "reduce_scatter_tensor"
"""What they issue after one."""
ALL_REDUCE: Final = "all_reduce"
"""What a router issues in training to count for a loss, and a loss over a shared vocabulary."""


@dataclass(frozen=True, kw_only=True)
class ExpertGroups:
    """The ranks that a model's experts are divided among."""

    exchange: ProcessGroup
    """Used by ``dispatch`` and ``combine`` alone."""
    counts: ProcessGroup
    """Used by ``attn`` alone, to gather how many tokens go where."""

    def __post_init__(self) -> None:
        exchange = (self.exchange.size(), self.exchange.rank())
        counts = (self.counts.size(), self.counts.rank())
        if exchange != counts:
            raise ValueError(
                "exchange and counts must hold the same ranks in the same order; got (size, rank) "
                f"{exchange} and {counts}"
            )
        if self.exchange is self.counts and self.size > 1:
            raise ValueError(
                "exchange and counts are one group, which two threads would use at once; make a "
                "second group over the same ranks (new_expert_groups does)"
            )

    @property
    def size(self) -> int:
        """The expert-parallel size."""
        return self.exchange.size()

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return self.exchange.rank()


COUNTS_GROUP: Final = "ep_counts"
"""The name of ``ExpertGroups.counts``, by which a measurement knows it."""


class NewGroup(Protocol):
    """Makes a process group: ``torch.distributed.new_group`` or a stand-in for it.

    Like it, collective: every rank of the world calls it for every group, in one order.
    """

    def __call__(self, ranks: list[int], *, group_desc: str) -> object:
        """``group_desc`` is ``ep_exchange`` or ``ep_counts``.

        Returns a ``ProcessGroup`` to the ranks that belong to it; to others, anything.
        """
        ...


def lone_expert_groups() -> ExpertGroups:
    """Expert parallelism of size 1: every rank holds all experts, and nothing is sent.

    The group has no backend, so a collective on it raises. Needs no ``init_process_group``.
    """
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    lone = ProcessGroup(store, 0, 1)
    return ExpertGroups(exchange=lone, counts=lone)


def new_expert_groups(
    expert_parallel_size: int, *, new_group: NewGroup = dist.new_group
) -> ExpertGroups:
    """Divide the world into runs of ``expert_parallel_size`` neighbouring ranks.

    Collective over the world. Neighbours, because they sit on one host; it is Megatron's order too
    (``parallel_state.initialize_model_parallel`` without tensor or context parallelism).

    Args:
        expert_parallel_size: a divisor of the world size.
        new_group: makes each group; called for every group of the world, ``ep_exchange`` then
            ``ep_counts``.

    Returns:
        The groups that hold this rank.
    """
    if expert_parallel_size == 1:
        return lone_expert_groups()
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if expert_parallel_size < 1 or world_size % expert_parallel_size:
        raise ValueError(
            f"the world size {world_size} is not a multiple of the expert-parallel size "
            f"{expert_parallel_size}"
        )
    mine: ExpertGroups | None = None
    for first in range(0, world_size, expert_parallel_size):
        ranks = list(range(first, first + expert_parallel_size))
        exchange = new_group(ranks, group_desc="ep_exchange")
        counts = new_group(ranks, group_desc=COUNTS_GROUP)
        if isinstance(exchange, ProcessGroup) and isinstance(counts, ProcessGroup):
            mine = ExpertGroups(exchange=exchange, counts=counts)
    assert mine is not None, f"new_group gave rank {rank} of {world_size} no group of its own"
    return mine


def issued(group: ProcessGroup, op: str, count: int = 1) -> tuple[Collective, ...]:
    """``count`` collectives on ``group``; none where the group has one rank."""
    return (Collective(group=group, op=op),) * (count if group.size() > 1 else 0)
