"""HybridModel on GPUs: bit for bit megatron-core's own step, by its ``hybrid_stack_spec`` of
Transformer Engine's layers, and of local ones. Two ranks, expert parallelism of two."""

from collections.abc import Sequence

import dropin_steps
import pytest
import torch
from dropin_steps import Case
from gpu_support import take_gpu

from ep_overlap.testing import RankPool

FEATURES = (
    "hybrid",
    "hybrid, dense first",
    "hybrid, MTP 2, tied",
    "hybrid, recompute, dropout",
    "hybrid, experts alone",
    "hybrid, all alone, MTP 1",
    "hybrid, latent attention",
)
LOCAL_ONLY = "hybrid, biases"
"""It norms queries and keys, which megatron-core's spec does not."""


def differences(cases: Sequence[Case]) -> dict[str, list[str]]:
    """Collective."""
    return dropin_steps.differences(cases, take_gpu())


@pytest.mark.parametrize("delay", [False, True], ids=["plain", "delayed"])
def test_transformer_engines_layers(gpu_ranks2: RankPool, delay: bool) -> None:
    cases = [Case(feature=feature, transformer_engine=True, delay=delay) for feature in FEATURES]
    assert gpu_ranks2.run(differences, cases) == [{}, {}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_local_layers(gpu_ranks2: RankPool, dtype: torch.dtype) -> None:
    delays = [False, True] * len(FEATURES)
    cases = [
        Case(feature=feature, dtype=dtype, delay=delay)
        for feature, delay in zip((*FEATURES, LOCAL_ONLY), delays, strict=False)
    ]
    assert gpu_ranks2.run(differences, cases) == [{}, {}]


def test_an_evaluation_between_steps_and_recomputed_layers(gpu_ranks2: RankPool) -> None:
    cases = [
        Case(feature="hybrid, dense first", transformer_engine=uses_te, **{what: True})
        for uses_te in (False, True)
        for what in ("evaluates", "recompute")
    ]
    assert gpu_ranks2.run(differences, cases) == [{}, {}]
