"""Link groups: gloo's values, measured, paced, and owned by one thread."""

import itertools
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from ep_overlap.links.group import (
    CollectiveKind,
    CollectiveSpan,
    LinkGroup,
    LinkSpeed,
    Wire,
    new_link_group,
    parse_rate,
)
from ep_overlap.links.times import align, clock_offset_ns
from ep_overlap.testing import RankPool

# --- values -------------------------------------------------------------------------------------


def _every_collective(group: dist.ProcessGroup) -> dict[str, list[torch.Tensor]]:
    """Outputs by operation; the first rank of the group is the root."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    root = rank == 0
    rows = torch.arange(size * 6, dtype=torch.float32).view(size * 2, 3) + 100 * rank
    results: dict[str, list[torch.Tensor]] = {}

    # Rank r sends r + 1 rows to the first rank and none to the others but itself.
    splits = [0] * size
    splits[rank] += 1
    splits[0] += rank + 1
    received_splits = [p + 1 + (p == 0) for p in range(size)] if root else [0] * size
    received_splits[rank] = splits[rank]
    uneven = rows.new_empty(sum(received_splits), 3)
    dist.all_to_all_single(uneven, rows[: sum(splits)], received_splits, splits, group=group)
    even = torch.empty_like(rows)
    dist.all_to_all_single(even, rows, group=group)
    results["all_to_all_single"] = [uneven, even]

    gathered = rows.new_empty(size * len(rows), 3)
    dist.all_gather_into_tensor(gathered, rows, group=group)
    listed = [torch.empty_like(rows) for _ in range(size)]
    dist.all_gather(listed, rows, group=group)
    results["all_gather"] = [gathered, *listed]

    scattered, from_list = rows.new_empty(2, 3), rows.new_empty(2, 3)
    dist.reduce_scatter_tensor(scattered, rows, group=group)
    dist.reduce_scatter(from_list, list(rows.clone().chunk(size)), group=group)
    summed, maximum, at_root, sent = rows.clone(), rows.clone(), rows.clone(), rows.clone()
    dist.all_reduce(summed, group=group)
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
    dist.reduce(at_root, group_dst=0, group=group)
    dist.broadcast(sent, group_src=0, group=group)
    results["reduce"] = [scattered, from_list, summed, maximum, sent]
    if root:
        results["reduce"].append(at_root)

    collected = [torch.empty_like(rows) for _ in range(size)] if root else None
    dist.gather(rows, collected, group_dst=0, group=group)
    piece = rows.new_empty(2, 3)
    dist.scatter(piece, list(rows.chunk(size)) if root else None, group_src=0, group=group)
    results["rooted"] = [piece, *(collected or [])]

    ring = torch.empty_like(rows)
    sending = dist.isend(rows, group_dst=(rank + 1) % size, group=group)
    dist.recv(ring, group_src=(rank - 1) % size, group=group)
    assert sending is not None
    sending.wait()
    results["point_to_point"] = [ring]
    dist.barrier(group=group)
    return results


def _compare_with_gloo() -> list[str]:
    everyone = list(range(dist.get_world_size()))
    link = new_link_group(everyone, name="all")
    plain = dist.new_group(everyone, backend="gloo")
    assert isinstance(plain, dist.ProcessGroup)
    ours, theirs = _every_collective(link), _every_collective(plain)
    assert ours.keys() == theirs.keys()
    for op, tensors in theirs.items():
        for got, expected in zip(ours[op], tensors, strict=True):
            assert torch.equal(got, expected), op
    # gloo has no all_to_all of lists: compare with the single-tensor form.
    rank, size = link.rank(), link.size()
    outputs = [torch.empty(p + 1, 2) for p in range(size)]
    dist.all_to_all(
        outputs, [torch.full((rank + 1, 2), 10.0 * rank + p) for p in range(size)], link
    )
    for p, output in enumerate(outputs):
        assert torch.equal(output, torch.full((p + 1, 2), 10.0 * p + rank))
    return list(ours)


@pytest.mark.parametrize("pool_name", ["ranks2", "ranks4"])
def test_every_collective_has_gloos_values(pool_name: str, request: pytest.FixtureRequest) -> None:
    pool: RankPool = request.getfixturevalue(pool_name)
    for ops in pool.run(_compare_with_gloo):
        assert len(ops) == 5


def _functional_collectives() -> list[CollectiveSpan]:
    """What DTensor and FSDP2's helpers call; torch reaches the group from C++."""
    link = new_link_group([0, 1], name="functional")
    rank = link.rank()
    rows = torch.arange(4.0).view(4, 1) + 10 * rank
    gathered = funcol.all_gather_tensor(rows, 0, link)
    assert gathered.flatten().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    scattered = funcol.reduce_scatter_tensor(rows, "sum", 0, link)
    assert scattered.flatten().tolist() == [10 + 4 * rank, 12 + 4 * rank]
    assert funcol.all_reduce(rows, "sum", link).flatten().tolist() == [10, 12, 14, 16]
    swapped = funcol.all_to_all_single(rows, [2, 2], [2, 2], link)
    assert swapped.flatten().tolist() == [2 * rank, 2 * rank + 1, 2 * rank + 10, 2 * rank + 11]
    with dist._coalescing_manager(group=link):
        dist.all_gather_into_tensor(gathered, rows + 1, group=link)
    assert gathered.flatten().tolist() == [1, 2, 3, 4, 11, 12, 13, 14]
    return link.log or []


def test_functional_collectives_reach_the_link_group(ranks2: RankPool) -> None:
    for spans in ranks2.run(_functional_collectives):
        assert [(span.kind, span.wire_bytes) for span in spans] == [
            ("ag", 16),
            ("rs", 8),
            ("ar", 16),
            ("a2a", 8),
            ("ag", 16),
        ]


def _objects_and_meshes() -> tuple[list[object], list[object], list[object] | None, bool]:
    link = new_link_group([0, 1], name="objects")
    rank = link.rank()
    gathered: list[object] = [None, None]
    dist.all_gather_object(gathered, {"rank": rank}, group=link)
    sent: list[object] = [f"from {rank}"]
    dist.broadcast_object_list(sent, group_src=1, group=link)
    collected: list[object] | None = [None, None] if rank == 0 else None
    dist.gather_object(rank * 7, collected, group_dst=0, group=link)

    mesh = DeviceMesh.from_group(link, "cpu")
    whole = torch.arange(10.0).view(5, 2)
    before = len(link.log or [])
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    back = sharded.full_tensor()
    used_the_link = any(span.kind == "ag" for span in (link.log or [])[before:])
    return gathered, sent, collected, torch.equal(back, whole) and used_the_link


def test_objects_and_dtensors_travel_over_a_link_group(ranks2: RankPool) -> None:
    first, second = ranks2.run(_objects_and_meshes)
    assert first == ([{"rank": 0}, {"rank": 1}], ["from 1"], [0, 7], True)
    assert second == ([{"rank": 0}, {"rank": 1}], ["from 1"], None, True)


def _grid_of_groups() -> tuple[tuple[int, ...], float, tuple[int, ...], float, float]:
    rank = dist.get_rank()
    expert = new_link_group([0, 1] if rank < 2 else [2, 3], name="ep")
    # Only some ranks build this one: the others' later groups must not be upset by it.
    lone = new_link_group([0, 3], name="lone") if rank in (0, 3) else None
    data = new_link_group([0, 2] if rank % 2 == 0 else [1, 3], name="edp")
    sums = [torch.tensor(float(rank)) for _ in range(3)]
    dist.all_reduce(sums[0], group=expert)
    dist.all_reduce(sums[1], group=data)
    if lone is not None:
        dist.all_reduce(sums[2], group=lone)
    return expert.ranks, sums[0].item(), data.ranks, sums[1].item(), sums[2].item()


def test_different_ranks_build_different_groups(ranks4: RankPool) -> None:
    assert ranks4.run(_grid_of_groups) == [
        ((0, 1), 1.0, (0, 2), 2.0, 3.0),
        ((0, 1), 1.0, (1, 3), 4.0, 1.0),
        ((2, 3), 5.0, (0, 2), 2.0, 2.0),
        ((2, 3), 5.0, (1, 3), 4.0, 3.0),
    ]


def _rebuild() -> list[float]:
    totals: list[float] = []
    for _ in range(3):
        groups = [new_link_group([0, 1], name=name) for name in ("ag", "rs")]
        for group in groups:
            total = torch.tensor(1.0 + dist.get_rank())
            dist.all_reduce(total, group=group)
            totals.append(total.item())
        for group in groups:
            dist.destroy_process_group(group)
    return totals


def test_destroyed_groups_can_be_built_anew_under_their_names(ranks2: RankPool) -> None:
    assert ranks2.run(_rebuild) == [[3.0] * 6] * 2


# --- log ----------------------------------------------------------------------------------------


def _logged() -> list[CollectiveSpan]:
    link = new_link_group([0, 1], name="mixed")
    counts = new_link_group([0, 1], name="counts", kind=CollectiveKind.OTHER)
    rank = link.rank()
    tokens = torch.ones(4, 8)  # 32 bytes a row
    # Rank 0 sends 3 rows and receives 1: the larger counts.
    sent, received = ([1, 3], [1, 1]) if rank == 0 else ([1, 3], [3, 3])
    dist.all_to_all_single(torch.empty(sum(received), 8), tokens, received, sent, group=link)
    dist.all_gather_into_tensor(torch.empty(8, 8), tokens, group=link)
    dist.reduce_scatter_tensor(torch.empty(2, 8), tokens, group=link)
    link_log, link.log = link.log, None
    dist.barrier(group=link)
    link.log = link_log
    dist.all_reduce(tokens, group=link)
    dist.all_gather_into_tensor(torch.empty(8, 8), tokens, group=counts)
    return [*(link.log or []), *(counts.log or [])]


def test_the_log_has_kind_bytes_and_sequence_of_each_collective(ranks2: RankPool) -> None:
    for spans in ranks2.run(_logged):
        assert [(s.kind, s.op, s.group, s.sequence, s.wire_bytes) for s in spans] == [
            ("a2a", "all_to_all_single", "mixed", 0, 96),
            ("ag", "all_gather_into_tensor", "mixed", 1, 128),
            ("rs", "reduce_scatter_tensor", "mixed", 2, 64),
            # 3 was the barrier while the log was off.
            ("ar", "all_reduce", "mixed", 4, 128),
            ("other", "all_gather_into_tensor", "counts", 0, 128),
        ]
        assert {(s.ranks, s.thread_name) for s in spans} == {((0, 1), "MainThread")}
        for earlier, later in itertools.pairwise(spans):
            assert earlier.enter_ns < earlier.exit_ns <= later.enter_ns


# --- pacing -------------------------------------------------------------------------------------


def _paced_s() -> tuple[float, float, float]:
    """Seconds of a free exchange, the same one paced, and of a paced barrier."""
    free = new_link_group([0, 1], name="free")
    paced = new_link_group([0, 1], name="paced", speed=LinkSpeed(bytes_per_s=1e6, latency_s=0.02))
    tokens = torch.ones(25_000)  # 100 kB, half of it to the other rank: 0.05 s

    def seconds(group: LinkGroup, num_bytes: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        if num_bytes:
            dist.all_to_all_single(torch.empty_like(tokens), tokens, group=group)
        else:
            dist.barrier(group=group)
        return time.perf_counter() - start

    return seconds(free, 1), seconds(paced, 1), seconds(paced, 0)


def test_a_paced_collective_takes_latency_plus_bytes_over_rate(ranks2: RankPool) -> None:
    for free_s, paced_s, barrier_s in ranks2.run(_paced_s):
        assert free_s < 0.05
        assert 0.07 <= paced_s < 0.15
        assert 0.02 <= barrier_s < 0.07


def _two_streams_s(shared: bool) -> float:
    """Seconds of two exchanges of 0.1 s each, one from each of two threads."""
    speed = LinkSpeed(bytes_per_s=1e6)
    wire = Wire() if shared else None
    groups = [new_link_group([0, 1], name=n, speed=speed, wire=wire) for n in ("a", "b")]
    tokens = torch.ones(50_000)  # 100 kB to the other rank

    def exchange(group: LinkGroup) -> None:
        dist.all_to_all_single(torch.empty_like(tokens), tokens, group=group)

    dist.barrier()
    start = time.perf_counter()
    threads = [threading.Thread(target=exchange, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def test_groups_overlap_on_wires_of_their_own_and_queue_on_a_shared_one(
    ranks2: RankPool,
) -> None:
    for apart_s in ranks2.run(_two_streams_s, False):
        assert 0.1 <= apart_s < 0.18
    for shared_s in ranks2.run(_two_streams_s, True):
        assert 0.2 <= shared_s < 0.3


def _lone_rank_s() -> float:
    lone = new_link_group(
        [dist.get_rank()], name="lone", speed=LinkSpeed(bytes_per_s=1.0, latency_s=5.0)
    )
    tokens, output = torch.ones(10), torch.zeros(10)
    start = time.perf_counter()
    dist.all_to_all_single(output, tokens, group=lone)
    assert torch.equal(output, tokens)
    return time.perf_counter() - start


def test_a_group_of_one_rank_has_no_wire_to_pay_for(ranks2: RankPool) -> None:
    assert max(ranks2.run(_lone_rank_s)) < 1.0


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("800mbit", 100e6), ("1.5gbit", 187.5e6), ("20MBps", 20e6), ("2GBps", 2e9)],
)
def test_rates_are_read_in_bits_and_bytes(text: str, bytes_per_s: float) -> None:
    assert parse_rate(text) == bytes_per_s


@pytest.mark.parametrize("text", ["", "800", "800 mbit", "800Mbit", "-1mbit", "0gbit", "fast"])
def test_other_rates_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a link rate: .* such as 800mbit") as caught:
        parse_rate(text)
    assert "\n" not in str(caught.value)


def test_an_impossible_speed_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes_per_s must be positive"):
        LinkSpeed(bytes_per_s=0.0)
    with pytest.raises(ValueError, match="latency_s must not be negative"):
        LinkSpeed(bytes_per_s=1.0, latency_s=-1.0)


# --- misuse and failure -------------------------------------------------------------------------


def _second_thread() -> tuple[str, float, float]:
    """Rank 0's second thread enters while its first waits for rank 1."""
    link = new_link_group([0, 1], name="a2a")
    total, message = torch.tensor(1.0), ""
    if link.rank() == 0:
        first = threading.Thread(target=dist.all_reduce, args=(total,), kwargs={"group": link})
        first.name = "comm stream"
        first.start()
        time.sleep(0.2)  # Let it enter; rank 1 comes after 0.5 s.
        try:
            dist.barrier(group=link)
        except RuntimeError as error:
            message = str(error)
        first.join()
    else:
        time.sleep(0.5)
        dist.all_reduce(total, group=link)
    again = torch.tensor(2.0)
    dist.all_reduce(again, group=link)
    return message, total.item(), again.item()


def test_a_second_thread_inside_is_refused_by_name_and_harms_nothing(ranks2: RankPool) -> None:
    (message, *sums), (_, *sums_of_rank_1) = ranks2.run(_second_thread)
    assert "link group 'a2a' is used by two threads at once" in message
    assert "'MainThread' called barrier while 'comm stream' was inside" in message
    assert sums == sums_of_rank_1 == [2.0, 4.0]


def _missing_peer() -> tuple[str, list[str], float]:
    link = new_link_group([0, 1], name="a2a", timeout=timedelta(seconds=1))
    text, notes, start = "", [], time.perf_counter()
    if link.rank() == 0:
        try:
            dist.all_reduce(torch.ones(1), group=link)
        except RuntimeError as error:
            text, notes = str(error), list(error.__notes__)
    elapsed_s = time.perf_counter() - start
    dist.barrier()
    return text, notes, elapsed_s


def test_a_missing_peer_ends_in_an_error_within_the_timeout(ranks2: RankPool) -> None:
    (text, notes, elapsed_s), _ = ranks2.run(_missing_peer)
    assert "Timed out" in text
    assert notes == ["in all_reduce, collective 0 of link group 'a2a', rank 0 of ranks [0, 1]"]
    assert 0.9 <= elapsed_s < 5.0


def _wrong_arguments() -> list[str]:
    messages: list[str] = []
    own = dist.get_rank()
    for ranks, wire in (([1 - own], None), ([own, own], None), ([own], Wire())):
        try:
            new_link_group(ranks, name="wrong", wire=wire)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_wrong_ranks_and_a_wire_without_speed_are_refused(ranks2: RankPool) -> None:
    assert ranks2.run(_wrong_arguments)[0] == [
        "link group 'wrong': expected distinct ranks with this rank (0) among them, got [1]",
        "link group 'wrong': expected distinct ranks with this rank (0) among them, got [0, 0]",
        "link group 'wrong': a wire has no effect without a speed; give both",
    ]


# --- times --------------------------------------------------------------------------------------


def _span(sequence: int, enter_ns: int, exit_ns: int, op: str = "all_reduce") -> CollectiveSpan:
    return CollectiveSpan(
        kind=CollectiveKind.AR,
        op=op,
        group="g",
        ranks=(0, 1),
        sequence=sequence,
        thread_name="comm",
        wire_bytes=4,
        enter_ns=enter_ns,
        exit_ns=exit_ns,
    )


def test_busy_time_starts_at_the_last_entry_on_each_ranks_own_clock() -> None:
    """Rank 1's clock is 1000 ns ahead."""
    rank0 = [_span(0, 100, 500), _span(1, 600, 900)]
    rank1 = [_span(0, 1300, 1510), _span(1, 1550, 1890)]
    first, second = align([rank0, rank1], [0, 1000])
    assert [(b.last_enter_ns, b.skew_ns, b.busy_ns) for b in first] == [
        (300, 200, 200),
        (600, 0, 300),
    ]
    assert [(b.last_enter_ns, b.skew_ns, b.busy_ns) for b in second] == [
        (1300, 0, 210),
        (1600, 50, 290),
    ]
    assert first[0].span is rank0[0]


def test_spans_that_do_not_match_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"collective 0 of link group 'g' \[0, 1\].*not by \[1\]"):
        align([[_span(0, 1, 2)], []], [0, 0])
    with pytest.raises(ValueError, match="rank 0: all_reduce, rank 1: barrier"):
        align([[_span(0, 1, 2)], [_span(0, 1, 2, "barrier")]], [0, 0])
    with pytest.raises(ValueError, match="one clock offset per rank"):
        align([[]], [0, 0])


def _late_rank() -> tuple[list[CollectiveSpan], int]:
    link = new_link_group(list(range(dist.get_world_size())), name="late")
    offset_ns = clock_offset_ns(link)
    dist.barrier()
    if link.rank() == 1:
        time.sleep(0.2)
    dist.all_reduce(torch.ones(1), group=link)
    return link.log or [], offset_ns


def test_waiting_for_a_late_rank_is_skew_and_not_busy(ranks4: RankPool) -> None:
    logs, offsets_ns = zip(*ranks4.run(_late_rank), strict=True)
    assert all(abs(offset_ns) < 2_000_000 for offset_ns in offsets_ns)  # One host, one clock.
    for rank, [busy] in enumerate(align(logs, offsets_ns)):
        assert busy.busy_ns < 100_000_000
        if rank == 1:
            assert busy.skew_ns < 50_000_000
        else:
            assert busy.skew_ns > 150_000_000
