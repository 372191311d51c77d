"""The test kit itself: recordings, order assertions, warm ranks and how their failures read."""

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

from ep_overlap.processes.ranks import MAX_THREADS
from ep_overlap.testing import (
    Event,
    RankError,
    RankPool,
    RankState,
    assert_between,
    assert_count,
    assert_never,
    assert_order,
    record,
)

STEP = [
    "UNSHARD.L0",
    "0F.attn.L0",
    "0F.dispatch.L0",
    "1B.mlp.L0",
    "0F.mlp.L0",
    "RESHARD.L0",
    "REDUCE.L0",
]


# --- recording ----------------------------------------------------------------------------------


def test_a_recording_keeps_words_and_lanes_in_order_of_arrival() -> None:
    with record() as recording:
        recording.add("0F.attn.L0", "comp")
        recording.on_issue("comm", "0F.dispatch.L0")
        recording.add("note")
    assert recording.events == (
        Event("0F.attn.L0", "comp"),
        Event("0F.dispatch.L0", "comm"),
        Event("note", None),
    )
    assert recording.on_lane("comm") == ("0F.dispatch.L0",)


def test_a_recording_takes_nothing_once_its_block_has_ended() -> None:
    with record() as recording:
        recording.add("inside")
    recording.add("late")
    assert recording.words == ("inside",)


def test_events_of_many_threads_all_arrive_and_keep_their_own_order() -> None:
    def report(lane: str) -> None:
        for i in range(500):
            recording.add(str(i), lane)

    with record() as recording:
        threads = [threading.Thread(target=report, args=(f"t{t}",)) for t in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(recording.events) == 2000
    for t in range(4):
        assert recording.on_lane(f"t{t}") == tuple(map(str, range(500)))


# --- order --------------------------------------------------------------------------------------


def test_order_holds_with_others_in_between_and_with_wildcards() -> None:
    assert_order(STEP, "UNSHARD.*", "*F.attn.L0", "*F.mlp.L0", "REDUCE.L0")
    assert_order(STEP, "*B.mlp.L0", "*F.mlp.L0", contiguous=True)


def test_each_expected_word_needs_an_event_of_its_own() -> None:
    with pytest.raises(AssertionError):
        assert_order(STEP, "*F.mlp.L0", "*F.mlp.L0")


def test_a_broken_order_shows_expectation_and_log_with_markers() -> None:
    with record() as recording:
        for word in STEP:
            recording.add(word, "comp" if "." in word else "ag")
    with pytest.raises(AssertionError) as caught:
        assert_order(recording, "UNSHARD.L0", "RESHARD.L0", "1B.mlp.L0")
    assert str(caught.value) == (
        "expected '1B.mlp.L0' after 'RESHARD.L0', and it does not occur there; "
        "it occurs only before, at 3\n"
        "expected:\n"
        "  ok UNSHARD.L0\n"
        "  ok RESHARD.L0\n"
        "  -> 1B.mlp.L0\n"
        "log (7 events):\n"
        " >    0  comp  UNSHARD.L0      <- matched UNSHARD.L0\n"
        "      1  comp  0F.attn.L0\n"
        "      2  comp  0F.dispatch.L0\n"
        " >    3  comp  1B.mlp.L0       <- too early: 1B.mlp.L0\n"
        "      4  comp  0F.mlp.L0\n"
        " >    5  comp  RESHARD.L0      <- matched RESHARD.L0\n"
        "      6  comp  REDUCE.L0"
    )


def test_a_long_log_is_shown_around_the_spot_only() -> None:
    words = [f"w{i}" for i in range(100)]
    with pytest.raises(AssertionError) as caught:
        assert_order(words, "w50", "w50")
    text = str(caught.value)
    assert "w45" in text
    assert "w55" in text
    assert "w44" not in text
    assert "w56" not in text
    assert text.count("...") == 2


def test_a_gap_breaks_contiguous_order_and_is_pointed_at() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_order(STEP, "0F.attn.L0", "0F.dispatch.L0", "0F.mlp.L0", contiguous=True)
    text = str(caught.value)
    assert "found at most 2" in text
    assert "  -> 0F.mlp.L0" in text
    assert " >    3  1B.mlp.L0       <- expected 0F.mlp.L0" in text


def test_counts_and_absence() -> None:
    assert_count(STEP, "*.mlp.*", 2)
    assert_never(STEP, "UNSHARD.root")
    with pytest.raises(AssertionError, match=r"expected 'RE\*' never, found 2, at 5, 6") as caught:
        assert_never(STEP, "RE*")
    assert " >    5  RESHARD.L0      <- matches RE*" in str(caught.value)
    with pytest.raises(AssertionError, match=r"expected '0F\.attn\.L0' 2 times, found 1, at 1"):
        assert_count(STEP, "0F.attn.L0", 2)


def test_between_wants_every_occurrence_inside_the_window() -> None:
    assert_between(STEP, "0F.dispatch.L0", after="0F.attn.L0", before="0F.mlp.L0")
    assert_between(STEP, "RE*", after="0F.mlp.L0")
    assert_between(STEP, "UNSHARD.L0", before="0F.attn.L0")
    with pytest.raises(AssertionError, match="it occurs outside, at 2, 4"):
        assert_between(STEP, "0F.*", after="UNSHARD.L0", before="0F.attn.L0")
    with pytest.raises(AssertionError, match="it occurs outside, at 5"):
        assert_between(STEP, "RESHARD.L0", after="UNSHARD.L0", before="0F.mlp.L0")
    with pytest.raises(AssertionError, match="it does not occur"):
        assert_between(STEP, "2F.*", after="UNSHARD.L0")
    with pytest.raises(AssertionError, match=r"the bound before='UNSHARD\.L0' does not occur"):
        assert_between(STEP, "0F.mlp.L0", after="0F.attn.L0", before="UNSHARD.L0")


def test_an_empty_log_fails_readably_and_no_expectation_is_refused() -> None:
    with pytest.raises(AssertionError, match="log: empty"):
        assert_order([], "0F.attn.L0")
    with pytest.raises(ValueError, match="at least one pattern"):
        assert_order(STEP)
    with pytest.raises(ValueError, match="needs after="):
        assert_between(STEP, "0F.attn.L0")


# --- warm ranks ---------------------------------------------------------------------------------


def _sum_of_ranks(scale: int) -> tuple[int, int, float]:
    total = torch.tensor(float(dist.get_rank() * scale))
    dist.all_reduce(total)
    return os.getpid(), torch.get_num_threads(), total.item()


def _num_groups_after_making_one() -> int:
    dist.new_group([0, 1])
    return len(dist.distributed_c10d._world.pg_names)  # pyright: ignore[reportPrivateUsage]


def _raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the cause, on rank 1")
    dist.barrier()


def _sleep_on_rank_0() -> None:
    if dist.get_rank() == 0:
        time.sleep(600)


def _abort_on_rank_1() -> None:
    if dist.get_rank() == 1:
        print("last words", flush=True)
        os.abort()
    dist.barrier()


def _leave_threads(num: int) -> int:
    for _ in range(num):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return os.getpid()


def _return_a_lambda() -> object:
    return lambda: None


def test_results_come_by_rank_and_processes_stay_warm(ranks2: RankPool) -> None:
    first = ranks2.run(_sum_of_ranks, 10)
    started = time.perf_counter()
    second = ranks2.run(_sum_of_ranks, 3)
    elapsed_s = time.perf_counter() - started
    assert [total for _, _, total in first + second] == [10.0, 10.0, 3.0, 3.0]
    assert [pid for pid, _, _ in first] == [pid for pid, _, _ in second]
    assert len({pid for pid, _, _ in first}) == 2
    assert all(num_threads == 1 for _, num_threads, _ in first)
    assert elapsed_s < 2.0


def test_groups_of_one_run_are_gone_in_the_next(ranks2: RankPool) -> None:
    assert ranks2.run(_num_groups_after_making_one) == [2, 2]
    assert ranks2.run(_num_groups_after_making_one) == [2, 2]


def test_ranks_that_runs_have_left_many_threads_on_are_replaced() -> None:
    with RankPool(1) as pool:
        pids = [pool.run(_leave_threads, num)[0] for num in (1, MAX_THREADS, 0)]
    assert pids[0] == pids[1] != pids[2]


def test_only_named_functions_can_be_sent(ranks2: RankPool) -> None:
    with pytest.raises(ValueError, match="top level"):
        ranks2.run(lambda: None)


def test_failures_show_every_rank_and_the_next_run_is_clean() -> None:
    """One pool for all failures: each also shows that the one before left nothing behind."""
    with RankPool(2, timeout_s=30) as pool:
        with pytest.raises(RankError) as raised:
            pool.run(_raise_on_rank_1)
        by_rank = raised.value.reports
        assert by_rank[1].state is RankState.RAISED
        assert by_rank[1].detail == "ValueError: the cause, on rank 1"
        assert "in _raise_on_rank_1" in by_rank[1].text
        # Rank 0 waits for rank 1 in the barrier: its stack says so.
        assert by_rank[0].state is RankState.HUNG
        assert "in _raise_on_rank_1" in by_rank[0].text
        assert "in barrier" in by_rank[0].text
        assert "rank 1 raised: ValueError: the cause" in str(raised.value)

        with pytest.raises(RankError) as aborted:
            pool.run(_abort_on_rank_1)
        assert aborted.value.reports[1].state is RankState.DIED
        assert aborted.value.reports[1].detail == "killed by SIGABRT"
        assert "last words" in aborted.value.reports[1].text
        assert "in _abort_on_rank_1" in aborted.value.reports[1].text

        with pytest.raises(RankError) as hung:
            pool.run(_sleep_on_rank_0, timeout_s=1.0)
        assert hung.value.reports[0].state is RankState.HUNG
        assert "in _sleep_on_rank_0" in hung.value.reports[0].text
        assert hung.value.reports[1].state is RankState.FINISHED
        assert "1 of 2 did not finish (limit 1 s)" in str(hung.value)

        assert [total for _, _, total in pool.run(_sum_of_ranks, 1)] == [1.0, 1.0]
        with pytest.raises(RankError, match="lambda"):
            pool.run(_return_a_lambda)
