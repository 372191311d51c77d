"""What the proof of overlap reads from a profile: kernels made by hand."""

from dataclasses import replace

from ep_overlap.report.overlap_proof import Kernel, overlaps_of

GEMM, AG, RS = "nvjet_tst_192x192", "ncclDevKernel_AllGather_RING_LL", "ncclDevKernel_ReduceScatter"


def kernel(name: str, stream: int, start: float, end: float) -> Kernel:
    return Kernel(name=name, stream=stream, start_us=start, end_us=end)


GEMMS = [kernel(GEMM, 7, 10 * i, 10 * i + 9) for i in range(1, 13)]
"""From 10 on: a forward of four units, two GEMMs for each backward."""
GATHERS = [
    kernel(AG, 20, 0, 9),
    *(kernel(AG, 20, start, start + 5) for start in (12, 22, 32, 52, 72, 92)),
]
REDUCTIONS = [
    *(kernel(RS, 24, start, start + 5) for start in (72, 92, 112)),
    kernel(RS, 24, 140, 150),
]


def test_all_that_can_be_hidden_is_found_to_be() -> None:
    found = overlaps_of(sorted([*GEMMS, *GATHERS, *REDUCTIONS], key=lambda k: k.start_us))
    assert found.gathers == (False, *(True,) * 6)
    assert found.reductions == (True, True, True, False)
    assert found.are_all_there
    assert str(found) == "6 of 6 gathers (-++++++), 3 of 3 reductions (+++-), 3 streams"


def test_one_that_lies_between_gemms_is_not_hidden() -> None:
    bare = replace(GATHERS[3], start_us=59.2, end_us=59.8)
    kernels = [*GEMMS, *(bare if k is GATHERS[3] else k for k in GATHERS), *REDUCTIONS]
    found = overlaps_of(sorted(kernels, key=lambda k: k.start_us))
    assert sum(found.gathers) == 5
    assert not found.are_all_there


def test_two_kinds_on_one_stream_are_found() -> None:
    kernels = [*(replace(k, stream=24) for k in GEMMS), *GATHERS, *REDUCTIONS]
    found = overlaps_of(sorted(kernels, key=lambda k: k.start_us))
    assert found.num_streams == 2
    assert not found.are_all_there


def test_copies_and_other_kernels_count_for_nothing() -> None:
    others = [kernel("vectorized_elementwise_kernel", 7, 0, 200), kernel("Memcpy DtoD", 9, 0, 200)]
    found = overlaps_of(sorted([*GATHERS, *others, *REDUCTIONS], key=lambda k: k.start_us))
    assert not any(found.gathers)
    assert not any(found.reductions)


def test_a_profile_without_collectives_proves_nothing() -> None:
    assert not overlaps_of(GEMMS).are_all_there
