"""Strategies as placements: where parameters, gradients and main weights live.

A group's tensor is either whole on every rank, or each rank holds its shard of it. The moves
between the two are the collectives:

==========================  ==================  ================
from                        to                  collective
==========================  ==================  ================
parameter, ``SHARD``        ``REPLICATE``       all-gather
gradient, one per rank      ``SHARD``           reduce-scatter
gradient, one per rank      ``REPLICATE``       all-reduce
==========================  ==================  ================

The table is that of Megatron-FSDP's ``--data-parallel-sharding-strategy``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final


class Placement(Enum):
    """How a group's tensor lies over its ranks."""

    REPLICATE = "replicate"
    SHARD = "shard"


@dataclass(frozen=True, kw_only=True)
class Placements:
    """Where each of a group's tensors lives between its uses."""

    param: Placement
    grad: Placement
    main: Placement
    """The weight that the optimizer updates."""

    def on_group_of(self, num_ranks: int) -> "Placements":
        """On a group of one rank a shard is the whole: nothing to gather, release or reduce."""
        return _WHOLE if num_ranks == 1 else self


_WHOLE: Final = Placements(
    param=Placement.REPLICATE, grad=Placement.REPLICATE, main=Placement.REPLICATE
)

STRATEGIES: Final[Mapping[str, Placements]] = {
    "no_shard": _WHOLE,
    "optim_grads_params": Placements(
        param=Placement.SHARD, grad=Placement.SHARD, main=Placement.SHARD
    ),
}

_NOT_BUILT: Final = ("optim", "optim_grads")


def placements_of(strategy: str) -> Placements:
    """Placements by Megatron's name.

    Raises:
        ValueError: no such strategy, or one that is not built yet.
    """
    if strategy in _NOT_BUILT:
        raise ValueError(
            f"strategy {strategy!r} is not built yet; use one of {', '.join(STRATEGIES)}"
        )
    if strategy not in STRATEGIES:
        raise ValueError(f"unknown strategy {strategy!r}; expected one of {', '.join(STRATEGIES)}")
    return STRATEGIES[strategy]
