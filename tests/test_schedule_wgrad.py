"""Weight gradients that are nodes of a schedule, and fused ones under it: the table of spec A, own
orders, releases before W, what arrives in which node, failures."""

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import schedule_support as support
import torch
from schedule_support import Case, Groups
from test_schedule_failure import Fault, OddError, Saboteur
from test_schedule_parity import own_order
from torch import Tensor, nn
from wgrad_table import FLAT, cells_of, on_standard_path, under_schedule, unequal, worst_of_ranks

from ep_overlap.models.reference import MoETransformer
from ep_overlap.plan.action import Compute, Node, Phase
from ep_overlap.plan.build import parse_words
from ep_overlap.run.wiring import NodeKey
from ep_overlap.schedule import OverlapSchedule
from ep_overlap.testing import RankPool, assert_order
from fsdp_hooks.lifecycle import UnitState, lifecycle_of
from fsdp_hooks.placement import STRATEGIES
from fsdp_hooks.streams import StreamKind
from fsdp_hooks.wgrad import Destination, GradSink

INLINE, THREAD = StreamKind.INLINE, StreamKind.THREAD
RELEASED = "optim_grads_params"
ON_TWO, ON_FOUR = FLAT

# ---- the table -----------------------------------------------------------------------------------


def wrong_cells(
    pool: RankPool, num_ranks: int, strategies: Sequence[str], *, megatron: bool = False
) -> list[str]:
    (layout,) = [layout for layout in FLAT if layout.num_ranks == num_ranks]
    by_rank = pool.run(cells_of, layout, megatron, strategies, timeout_s=120.0)
    cells = worst_of_ranks(by_rank)
    assert len(cells) == 5 * len(strategies)
    return [str(cell) for cell in cells if not cell.is_right]


def test_the_table_holds_on_two_ranks(ranks2: RankPool) -> None:
    assert wrong_cells(ranks2, 2, list(STRATEGIES)) == []


def test_the_table_holds_for_megatrons_model(ranks2: RankPool) -> None:
    assert wrong_cells(ranks2, 2, [RELEASED], megatron=True) == []


def test_the_table_holds_on_four_ranks(ranks4: RankPool) -> None:
    assert wrong_cells(ranks4, 4, [RELEASED]) == []


# ---- more ways to run it -------------------------------------------------------------------------


def late_wgrads(layers: int, microbatches: int, order: str) -> str:
    """An order whose W nodes come all at once, behind their microbatch's backward, backwards."""
    words = own_order(layers, microbatches, order, delay=True).split("\n")
    nodes = [word for line in words if not line.startswith("#") for word in line.split()]
    late: list[str] = []
    for word in nodes:
        if "W." not in word:
            late.append(word)
        if word.endswith("B.pre"):
            own = [w for w in nodes if w.startswith(f"{word[0]}W.")]
            late += reversed(own)
    assert sorted(late) == sorted(nodes)
    assert late != nodes
    return " ".join(late)
