"""What needs a GPU. ``make test-gpu`` runs it; it fails, and skips nothing, where there is none."""

import os

import pytest
import torch

from ep_overlap.testing import RankPool

# Sums that are the same every time: this is a ring of bitwise comparisons.
os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pool(num_ranks: int) -> RankPool:
    """Ranks that share GPUs talk over gloo, which NCCL refuses."""
    has_enough = torch.cuda.device_count() >= num_ranks
    return RankPool(
        num_ranks, timeout_s=240.0, backend="cpu:gloo,cuda:nccl" if has_enough else "gloo"
    )


@pytest.fixture(scope="session")
def gpu_ranks2():
    """Two ranks, each with a GPU of its own where there are two."""
    with pool(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def gpu_ranks4():
    """Four ranks."""
    with pool(4) as ranks:
        yield ranks
