"""Steps by megatron-core's own functions and by ours, in one run: bitwise equal, model by model.

Its plain ``forward_backward_no_pipelining``, without overlap, runs every model of
``megatron_features.py``; its own overlapped schedule those that its config accepts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Final

import pytest
import schedule_support as support
import torch
from megatron_features import FEATURES, HYBRID, Groups, globals_of, model_of, parts_of
from megatron_script import Left, script, unequal

from ep_overlap.testing import RankPool
from fsdp_hooks import microbatch

DTYPES: Final = (torch.float32, torch.bfloat16)
MICROBATCHES: Final = (1, 2, 4)
STRATEGIES: Final = ("no_shard", "optim", "optim_grads", "optim_grads_params")

REFUSED_BY_COMBINED: Final = frozenset(
    {"MTP 2, tied", "MTP 2, one layer for both", "MTP 1, heads detached", "all at once"}
)
"""Features that megatron-core's config refuses with overlap."""

WORDS: Final = "embedding.word_embeddings.weight"
POSITIONS: Final = "embedding.position_embeddings.weight"
OWN_OF_COMBINED: Final = {
    "tied": {WORDS},
    "tensor parallel": {WORDS},
    "MTP 1": {WORDS},
    "learned positions, MTP 1": {WORDS, POSITIONS},
    "recompute, latent attention, MTP 1": {WORDS},
}
"""Gradients in which megatron-core's two schedules differ from each other: its overlapped one adds
up the uses of a shared embedding in another order. Ours are those of its plain one."""

LAST_IS_DENSE: Final = "no experts"
"""megatron-core's overlapped schedule leaves out the last norm after a dense layer."""

COMPARED_WITH_COMBINED: Final = [
    name for name in FEATURES if name not in {*REFUSED_BY_COMBINED, LAST_IS_DENSE, *HYBRID}
]
"""megatron-core's overlapped schedule fails with a HybridModel: see below."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One feature, trained without an optimizer: gradients of two steps add up."""

    feature: str
    dtype: torch.dtype
    microbatches: int
    strategy: str | None = None
    """Of our own sharding core, on both sides. One step: it adds up the microbatches of a step
    before it adds them to what is there; the standard path sees no steps."""
    delay: bool = False
    """Ours."""
    recompute: bool = False
    """Each layer whole, on both sides: by megatron-core itself, and as a phase of ours."""

    @property
    def num_steps(self) -> int:
        return 2 if self.strategy is None else 1


def cases(
    features: Sequence[str],
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
    microbatches: Sequence[int] = MICROBATCHES,
) -> list[Case]:
    return [
        Case(feature=feature, dtype=dtype, microbatches=number)
        for feature, dtype, number in product(features, dtypes, microbatches)
    ]


def differences(cases: Sequence[Case], *, combined: bool = False) -> dict[Case, set[str]]:
    """What differs, on this rank. EP2: on four ranks there are two groups of it.

    ``combined``: from megatron-core's overlapped schedule, in place of its plain one.
    """
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    from ep_overlap.models.megatron import ForwardBackward
    from ep_overlap.models.megatron_cpu import megatron_on_cpu, megatron_schedule_on_cpu

    groups, meshes = Groups.new(), support.Groups()
    found: dict[Case, set[str]] = {}
    with megatron_schedule_on_cpu() if combined else megatron_on_cpu():
        for case in cases:
            theirs = forward_backward_no_pipelining
            expected = left_by(theirs, case, groups, meshes, overlap=combined)
            ours = ForwardBackward(recompute_granularity="full" if case.recompute else None)
            got = left_by(ours, case, groups, meshes, overlap=True, delay=case.delay)
            assert [len(step) for step in expected.logged] == [case.microbatches] * case.num_steps
            found[case] = set(unequal(got, expected))
    return {case: names for case, names in found.items() if names}


def combined_differences(cases: Sequence[Case]) -> dict[Case, set[str]]:
    return differences(cases, combined=True)


def left_by(
    function: Any,
    case: Case,
    groups: Groups,
    meshes: support.Groups,
    *,
    overlap: bool,
    delay: bool = False,
) -> Left:
    with globals_of(case.feature, groups):
        model = model_of(case.feature, case.dtype, groups)
        if case.strategy is not None:
            parts = parts_of(model)
            support.shard(parts, support.Case(strategy=case.strategy, ep=2), meshes)
            model = parts.module
            # A script's own way to say that a microbatch is not the last.
            model.config.no_sync_func = partial(microbatch, model, is_last=False)
        model.config.overlap_moe_expert_parallel_comm = overlap
        model.config.delay_wgrad_compute = delay
        if case.recompute and not overlap:
            model.config.recompute_granularity = "full"
            model.config.recompute_method = "uniform"
            model.config.recompute_num_layers = 1
        return script(
            function,
            model,
            num_microbatches=case.microbatches,
            num_steps=case.num_steps,
            pg_collection=model.pg_collection,
        )


@pytest.mark.parametrize("feature", FEATURES)
def test_two_ranks_equal_megatrons_plain_schedule(ranks2: RankPool, feature: str) -> None:
    assert ranks2.run(differences, cases([feature])) == [{}, {}]


def test_four_ranks_equal_megatrons_plain_schedule(ranks4: RankPool) -> None:
    chosen = [
        *cases([*FEATURES], dtypes=DTYPES[:1], microbatches=[2]),
        *cases(["plain", "tensor parallel", "all at once"], dtypes=DTYPES[1:], microbatches=[4]),
    ]
    assert ranks4.run(differences, chosen, timeout_s=240.0) == [{}] * 4


@pytest.mark.parametrize("feature", COMPARED_WITH_COMBINED)
def test_two_ranks_equal_megatrons_overlapped_schedule(ranks2: RankPool, feature: str) -> None:
    """In float32 too, which its config refuses, and its schedule runs."""
    own = OWN_OF_COMBINED.get(feature, set[str]())
    for found in ranks2.run(combined_differences, cases([feature])):
        assert set[str]().union(*found.values()) <= own


@pytest.mark.parametrize("feature", OWN_OF_COMBINED)
def test_megatrons_two_schedules_differ_where_ours_differs_from_one(
    ranks2: RankPool, feature: str
) -> None:
    """One that newly agrees is to leave the table."""
    found = ranks2.run(combined_differences, cases([feature], microbatches=[4]))
    assert (
        set[str]().union(*(names for each in found for names in each.values()))
        == (OWN_OF_COMBINED[feature])
    )


def test_recomputed_layers_equal_those_that_megatron_recomputes(ranks2: RankPool) -> None:
    chosen = [
        Case(feature=feature, dtype=dtype, microbatches=number, delay=delay, recompute=True)
        for feature in ("plain", "shared experts", "dropout", "dense first", "hybrid")
        for dtype, number, delay in (
            (DTYPES[0], 1, False),
            (DTYPES[0], 4, True),
            (DTYPES[1], 2, False),
        )
    ]
    assert ranks2.run(differences, chosen) == [{}, {}]


def last_norm_of_combined() -> list[bool]:
    """Whether it has a gradient: by megatron-core's overlapped schedule, and by ours."""
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    from ep_overlap.models.megatron import get_forward_backward_func
    from ep_overlap.models.megatron_cpu import megatron_schedule_on_cpu

    groups, meshes = Groups.new(), support.Groups()
    case = Case(feature=LAST_IS_DENSE, dtype=torch.float32, microbatches=2)
    with megatron_schedule_on_cpu():
        left = [
            left_by(function, case, groups, meshes, overlap=True)
            for function in (forward_backward_no_pipelining, get_forward_backward_func())
        ]
    return [each.grads["decoder.final_layernorm.weight"] is not None for each in left]


def test_a_dense_last_layer_has_its_norm_after_it(ranks2: RankPool) -> None:
    assert ranks2.run(last_norm_of_combined) == [[False, True]] * 2


def combined_with_hybrid() -> str:
    case = Case(feature="hybrid", dtype=torch.float32, microbatches=2)
    try:
        combined_differences([case])
    except RuntimeError as error:
        return str(error)
    return "it runs"


def test_megatrons_overlapped_schedule_fails_with_a_hybrid_model(ranks2: RankPool) -> None:
    """Once it runs, those features are to be compared with it."""
    for message in ranks2.run(combined_with_hybrid):
        assert message.endswith("couldn't find attribute build_schedule_plan")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_sharded_model_equals_its_standard_path(ranks2: RankPool, strategy: str) -> None:
    chosen = [
        Case(feature=feature, dtype=dtype, microbatches=3, strategy=strategy, delay=delay)
        for feature in ("plain", "MTP 1", "dropout", "hybrid, dense first")
        for dtype, delay in zip(DTYPES, (False, True), strict=True)
    ]
    assert ranks2.run(differences, chosen) == [{}, {}]
