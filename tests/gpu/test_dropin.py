"""The drop-in on GPUs: bit for bit megatron-core's own step, of local and Transformer Engine's
layers.

Two ranks, expert parallelism of two. Within its DDP and its FSDP v1, whose gathers are coalesced,
which gloo cannot with CUDA tensors: one rank of an emulated world of four.
"""

from collections.abc import Sequence
from itertools import product

import dropin_steps
import pytest
import torch
import torch.distributed as dist
from dropin_steps import Case
from gpu_support import take_gpu

from ep_overlap.testing import RankPool

FEATURES = (
    "plain",
    "tied",
    "MTP 2, tied",
    "latent attention",
    "all router losses",
    "expert bias",
    "shared experts",
    "dense first",
    "dropout",
    "recompute",
    "recompute, dropout",
    "recompute, latent attention, MTP 1",
    "all at once",
)
KINDS = {
    "local, float32": {"dtype": torch.float32},
    "local, bf16": {},
    "transformer engine": {"transformer_engine": True},
}
"""Of layers."""
RECOMPUTED = ("shared experts", "dense first", "dropout")
COMBINED = ("plain", "all router losses", "dense first")
"""megatron-core's overlapped schedule adds up the uses of a shared embedding in another order."""


def differences(cases: Sequence[Case]) -> dict[str, list[str]]:
    """Collective."""
    return dropin_steps.differences(cases, take_gpu())


@pytest.mark.parametrize("kind", KINDS)
def test_every_feature_is_bit_for_bit_megatrons_step(gpu_ranks2: RankPool, kind: str) -> None:
    cases = [
        Case(feature=feature, delay=delay, **KINDS[kind])
        for feature, delay in zip(FEATURES, [False, True] * len(FEATURES), strict=False)
    ]
    assert gpu_ranks2.run(differences, cases) == [{}, {}]


def test_recomputed_layers_are_those_that_megatron_recomputes(gpu_ranks2: RankPool) -> None:
    cases = [
        Case(feature=feature, recompute=True, delay=kind == "transformer engine", **KINDS[kind])
        for feature, kind in product(RECOMPUTED, KINDS)
    ]
    assert gpu_ranks2.run(differences, cases) == [{}, {}]


def test_steps_are_those_of_megatrons_overlapped_schedule(gpu_ranks2: RankPool) -> None:
    cases = [
        Case(feature=feature, combined=True, **KINDS[kind])
        for feature, kind in product(COMBINED, ("local, bf16", "transformer engine"))
    ]
    assert gpu_ranks2.run(differences, cases) == [{}, {}]


def test_an_evaluation_between_steps_changes_none(gpu_ranks2: RankPool) -> None:
    cases = [
        Case(feature=feature, evaluates=True, **KINDS[kind])
        for feature, kind in product(("MTP 2, tied", "dropout"), KINDS)
    ]
    assert gpu_ranks2.run(differences, cases) == [{}, {}]


# ---- in megatron-core's own wrappers -------------------------------------------------------------


def differences_in_ddp() -> list[str]:
    return dropin_steps.differences_in_ddp(take_gpu()) if dist.get_rank() == 0 else []


def differences_in_fsdp() -> dict[str, list[str]]:
    return dropin_steps.differences_in_fsdp(take_gpu()) if dist.get_rank() == 0 else {}


def test_ddp_with_its_distributed_optimizer_changes_no_bit(gpu_ranks2: RankPool) -> None:
    assert gpu_ranks2.run(differences_in_ddp) == [[], []]


def test_fsdp_v1_changes_no_bit(gpu_ranks2: RankPool) -> None:
    assert gpu_ranks2.run(differences_in_fsdp) == [{}, {}]
