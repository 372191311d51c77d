"""Strategies as placements: where parameters, gradients and main weights live.

Over the ranks of a group each tensor is either whole on every rank, or each rank holds its shard.
The moves between the two are the collectives:

==========================  ==================  ================
from                        to                  collective
==========================  ==================  ================
main weight, ``SHARD``      parameter           all-gather
gradient, one per rank      ``SHARD``           reduce-scatter
gradient, one per rank      ``REPLICATE``       all-reduce
==========================  ==================  ================

A gradient ends where its main weight lives, so ``main`` says how it is reduced, and ``grad`` when:
whole gradients can wait for the end of a step, sharded ones are reduced every microbatch.

The table is that of Megatron-FSDP's ``--data-parallel-sharding-strategy``; on the outer dimension
of a mesh it is that of its ``--outer-dp-sharding-strategy``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final


class Placement(Enum):
    """How a group's tensor lies over its ranks."""

    REPLICATE = "replicate"
    SHARD = "shard"


@dataclass(frozen=True, kw_only=True)
class Placements:
    """Where each of a group's tensors lives between its uses."""

    param: Placement
    """The weight that forward and backward read."""
    grad: Placement
    main: Placement
    """The weight that the optimizer updates."""


_R, _S = Placement.REPLICATE, Placement.SHARD

WHOLE: Final = Placements(param=_R, grad=_R, main=_R)
"""Nothing is shared out; also what every strategy comes to on one rank."""

STRATEGIES: Final[Mapping[str, Placements]] = MappingProxyType(
    {
        "no_shard": WHOLE,
        "optim": Placements(param=_R, grad=_R, main=_S),
        "optim_grads": Placements(param=_R, grad=_S, main=_S),
        "optim_grads_params": Placements(param=_S, grad=_S, main=_S),
    }
)

OUTER_STRATEGIES: Final[Mapping[str, Placement]] = MappingProxyType({"no_shard": _R, "optim": _S})
"""What the outer ranks of a two-dimensional mesh share out: nothing, or main weights."""


def placements_of(strategy: str) -> Placements:
    """Placements by Megatron's name.

    Raises:
        ValueError: no such strategy.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"unknown strategy {strategy!r}; expected one of {', '.join(STRATEGIES)}")
    return STRATEGIES[strategy]


def outer_placement_of(strategy: str) -> Placement:
    """Where main weights live over the outer ranks, by Megatron's name.

    Raises:
        ValueError: no such strategy.
    """
    if strategy not in OUTER_STRATEGIES:
        raise ValueError(
            f"unknown outer_strategy {strategy!r}; expected one of {', '.join(OUTER_STRATEGIES)}"
        )
    return OUTER_STRATEGIES[strategy]
