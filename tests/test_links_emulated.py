"""An emulated world: one rank of eight, alone in this process."""

import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from schedule_support import Case, batches, build, differences, gradients, loss_of, unequal
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from ep_overlap.links import emulated_run
from ep_overlap.links.emulated import (
    EmulatedGroup,
    EmulatedLinks,
    Emulation,
    parse_emulated_links,
    register_emulated_backend,
)
from ep_overlap.links.emulated_run import Collective, CudaLane
from ep_overlap.links.emulated_speed import LinkRole
from ep_overlap.links.times import CollectiveKind
from ep_overlap.schedule import OverlapSchedule

SIZE = 8


@contextmanager
def world(
    emulation: Emulation | None = None, *, rank: int = 0, size: int = SIZE
) -> Generator[EmulatedGroup]:
    old_hook = sys.excepthook  # torch replaces it
    register_emulated_backend()
    dist.init_process_group(
        "emulated", rank=rank, world_size=size, store=dist.HashStore(), pg_options=emulation
    )
    try:
        group = dist.group.WORLD
        assert isinstance(group, EmulatedGroup)
        yield group
    finally:
        dist.destroy_process_group()
        sys.excepthook = old_hook


@pytest.fixture
def world8() -> Generator[EmulatedGroup]:
    """The first of eight ranks, without link time, timed."""
    with world(Emulation(timed=True)) as group:
        yield group


def rows(count: int, *, width: int = 2) -> Tensor:
    return torch.arange(1.0, count * width + 1).view(count, width)


# ---- the text ------------------------------------------------------------------------------------


def test_the_text_parses_and_is_told_again() -> None:
    links = parse_emulated_links("a2a=50GBps,dp=100GBps,latency=20us")
    assert links == EmulatedLinks(a2a_bytes_per_s=50e9, dp_bytes_per_s=100e9, latency_s=20e-6)
    assert links.describe(8) == "emulated: 8 ranks, a2a 50 GB/s, dp 100 GB/s, latency 20 us"
    assert parse_emulated_links("dp=8gbit,a2a=800MBps") == EmulatedLinks(
        a2a_bytes_per_s=8e8, dp_bytes_per_s=1e9
    )
    assert EmulatedLinks().describe(4) == "emulated: 4 ranks, no link time"
    half = EmulatedLinks(dp_bytes_per_s=1.5e9).describe(2)
    assert half == "emulated: 2 ranks, a2a unlimited, dp 1.5 GB/s, latency 0 us"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "expected a2a=RATE, dp=RATE or latency=TIME, got ''"),
        ("a2a=50GBps,dp=1GBps,latncy=2us", "got 'latncy=2us'"),
        ("a2a", "got 'a2a'"),
        ("a2a=50GBps", "expected a rate for a2a and for dp, got none for dp"),
        ("latency=20us", "got none for a2a and dp"),
        ("a2a=50,dp=1GBps", "a2a: not a link rate: '50'"),
        ("a2a=1GBps,dp=0GBps", "dp: not a link rate: '0GBps'"),
        ("a2a=1GBps,dp=1GBps,latency=20", "latency: expected a number and a unit of us, ms, s"),
        ("a2a=1GBps,dp=1GBps,latency=-1us", "got '-1us'"),
        ("a2a=1GBps,a2a=2GBps,dp=1GBps", "expected a2a once, got it twice"),
    ],
)
def test_a_text_that_does_not_parse_is_told_in_one_line(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=r"^--emulate: .*; write it like a2a=50GBps,") as caught:
        parse_emulated_links(text)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_links_check_themselves() -> None:
    with pytest.raises(ValueError, match="a2a_bytes_per_s must be positive"):
        EmulatedLinks(a2a_bytes_per_s=0)
    with pytest.raises(ValueError, match="latency_s must be 0 or more"):
        EmulatedLinks(latency_s=-1)


def test_importing_registers_nothing() -> None:
    code = (
        "import torch.distributed as dist\n"
        "before = dict(dist.Backend.default_device_backend_map), list(dist.Backend.backend_list)\n"
        "import ep_overlap.links.emulated\n"
        "assert before == (dist.Backend.default_device_backend_map, dist.Backend.backend_list)\n"
        "assert 'emulated' not in dist.Backend.backend_list\n"
        "ep_overlap.links.emulated.register_emulated_backend()\n"
        "assert 'emulated' in dist.Backend.backend_list\n"
        "assert before[0] == dist.Backend.default_device_backend_map\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---- values --------------------------------------------------------------------------------------


def test_gathers_repeat_this_ranks_part(world8: EmulatedGroup) -> None:
    part = rows(3)
    everyone = part.repeat(SIZE, 1)
    whole = torch.zeros_like(everyone)
    dist.all_gather_into_tensor(whole, part)
    assert torch.equal(whole, everyone)
    whole = torch.zeros_like(everyone)
    whole[:3] = part
    dist.all_gather_into_tensor(whole, whole[:3])  # in place
    assert torch.equal(whole, everyone)
    listed = [torch.zeros_like(part) for _ in range(SIZE)]
    dist.all_gather(listed, part)
    assert all(torch.equal(tensor, part) for tensor in listed)
    collected = [torch.zeros_like(part) for _ in range(SIZE)]
    dist.gather(part, collected, dst=0)
    assert all(torch.equal(tensor, part) for tensor in collected)
    dist.gather(part, dst=3)
    empty = torch.zeros(0, 2)
    dist.all_gather_into_tensor(torch.zeros(0, 2), empty)


def test_in_place_all_gather_of_a_rank_in_the_middle() -> None:
    with world(rank=2):
        whole = torch.zeros(SIZE * 3)
        whole[6:9] = torch.tensor([1.0, 2.0, 3.0])
        dist.all_gather_into_tensor(whole, whole[6:9])
        assert whole.tolist() == [1, 2, 3] * SIZE


def test_to_reductions_the_others_add_nothing() -> None:
    with world(rank=3):
        whole = rows(SIZE * 2)
        own = whole[6:8].clone()
        part = torch.zeros(2, 2)
        dist.reduce_scatter_tensor(part, whole)
        assert torch.equal(part, own)
        dist.reduce_scatter_tensor(part, whole, op=dist.ReduceOp.AVG)
        assert torch.equal(part, own / SIZE)
        dist.reduce_scatter(part, list(whole.chunk(SIZE)), op=dist.ReduceOp.MAX)
        assert torch.equal(part, own)
        in_place = whole.clone()
        dist.reduce_scatter_tensor(in_place[6:8], in_place)
        assert torch.equal(in_place, whole)
        for op in ("SUM", "MIN", "MAX", "PRODUCT"):
            total = own.clone()
            dist.all_reduce(total, op=getattr(dist.ReduceOp, op))
            assert torch.equal(total, own), op
        counts = torch.tensor([17, -17, 3])
        dist.all_reduce(counts, op=dist.ReduceOp.AVG)
        assert counts.tolist() == [2, -2, 0]
        mean, elsewhere = own.clone(), own.clone()
        dist.reduce(mean, dst=3, op=dist.ReduceOp.AVG)
        dist.reduce(elsewhere, dst=0, op=dist.ReduceOp.AVG)
        assert torch.equal(mean, own / SIZE)
        assert torch.equal(elsewhere, own)
        with pytest.raises(ValueError, match="expected a reduction by sum, average"):
            dist.all_reduce(own, op=dist._make_nccl_premul_sum(2.0))


def test_exchanges_move_the_input_in_its_order(world8: EmulatedGroup) -> None:
    sent = rows(SIZE * 2)
    received = torch.zeros_like(sent)
    dist.all_to_all_single(received, sent)
    assert torch.equal(received, sent)
    splits = [0, 1, 2, 3, 4, 3, 2, 1]
    received = torch.zeros_like(sent)
    dist.all_to_all_single(received, sent, splits, list(reversed(splits)))
    assert torch.equal(received, sent)
    # More comes than went: the input again from its start. Less: its beginning.
    more = torch.zeros(2 * 16 + 5, 2)
    dist.all_to_all_single(more, sent, [5 + 16, *splits[1:]], splits)
    assert torch.equal(more, sent.repeat(3, 1)[:37])
    less = torch.zeros(5, 2)
    dist.all_to_all_single(less, sent, [5, *[0] * 7], splits)
    assert torch.equal(less, sent[:5])
    nothing = torch.ones(3, 2)
    dist.all_to_all_single(nothing, sent[:0], [3, *[0] * 7], [0] * 8)
    assert torch.equal(nothing, torch.zeros(3, 2))
    outputs = [torch.zeros(index + 1) for index in range(SIZE)]
    dist.all_to_all(outputs, [torch.full((2,), float(index)) for index in range(SIZE)])
    assert [output.tolist() for output in outputs] == [[i] * (i + 1) for i in range(SIZE)]


def test_what_a_real_backend_would_refuse_is_refused(world8: EmulatedGroup) -> None:
    sent, received = rows(9), torch.zeros(9, 2)
    with pytest.raises(ValueError, match="expected output rows in 8 equal parts, got 9"):
        dist.all_to_all_single(received, sent)
    with pytest.raises(ValueError, match="input_split_sizes that add up to 9 rows"):
        dist.all_to_all_single(received, sent, [2, *[1] * 7], [1] * 8)
    with pytest.raises(ValueError, match=r"expected an output of 8 x 18 elements, .*\(9, 2\)"):
        dist.all_gather_into_tensor(received, sent)
    with pytest.raises(ValueError, match="an output of the input's dtype"):
        world8.alltoall_base(received.double(), sent, [9, *[0] * 7], [9, *[0] * 7])


def test_from_another_root_come_the_floats_that_are_there(world8: EmulatedGroup) -> None:
    own, weights, ids = rows(2), rows(2), torch.arange(4)
    dist.broadcast(ids, src=0)
    dist.broadcast(weights, src=5)
    assert torch.equal(weights, own)
    with pytest.raises(ValueError, match=r"broadcast from rank 5 .* got torch\.int64"):
        dist.broadcast(ids, src=5)
    piece = torch.zeros(2, 2)
    dist.scatter(piece, [own + index for index in range(SIZE)], src=0)
    assert torch.equal(piece, own)
    dist.scatter(piece, src=5)
    assert torch.equal(piece, own)


def test_objects(world8: EmulatedGroup) -> None:
    gathered: list[object] = [None] * SIZE
    dist.all_gather_object(gathered, {"rank": 0})
    assert gathered == [{"rank": 0}] * SIZE
    sent: list[object] = ["from 0", 3]
    dist.broadcast_object_list(sent, src=0)
    assert sent == ["from 0", 3]
    with pytest.raises(ValueError, match="pickled objects"):
        dist.broadcast_object_list(sent, src=1)
    collected: list[object] = [None] * SIZE
    dist.gather_object("mine", collected, dst=0)
    assert collected == ["mine"] * SIZE
    received: list[object] = [None]
    dist.scatter_object_list(received, [f"to {index}" for index in range(SIZE)], src=0)
    assert received == ["to 0"]


def test_nobody_is_there_for_point_to_point(world8: EmulatedGroup) -> None:
    with pytest.raises(RuntimeError, match="send to rank 1, emulated: 8 ranks, no link"):
        dist.send(rows(1), 1)
    with pytest.raises(RuntimeError, match="recv from rank 1"):
        dist.recv(rows(1), 1)


def test_a_collective_that_goes_past_the_group_raises(world8: EmulatedGroup) -> None:
    with pytest.raises(RuntimeError, match="error_on_collective"):
        # As C++ would: of this one torch lets Python override nothing for C++ callers.
        dist.ProcessGroup._allgather_base(world8, torch.zeros(SIZE, 2), rows(1))


def test_coalesced_and_functional_forms(world8: EmulatedGroup) -> None:
    part, whole = rows(1), torch.zeros(SIZE, 2)
    for device in (None, torch.device("cpu")):
        wholes = [torch.zeros(SIZE, 2) for _ in range(2)]
        with dist._coalescing_manager(async_ops=True, device=device) as manager:
            for each in wholes:
                dist.all_gather_into_tensor(each, part)
        manager.wait()
        assert all(torch.equal(each, part.repeat(SIZE, 1)) for each in wholes)
    with dist._coalescing_manager():
        dist.reduce_scatter_tensor(part, rows(SIZE), op=dist.ReduceOp.AVG)
        dist.reduce_scatter_tensor(whole[:1], rows(SIZE) * 2, op=dist.ReduceOp.AVG)
    assert torch.equal(part, rows(1) / SIZE)
    assert torch.equal(whole[:1], rows(1) / 4)
    with dist._coalescing_manager():
        dist.all_reduce(part, op=dist.ReduceOp.AVG)
        dist.all_reduce(whole, op=dist.ReduceOp.AVG)
    assert torch.equal(part, rows(1) / SIZE**2)

    gathered = funcol.wait_tensor(funcol.all_gather_tensor(rows(1), 0, world8))
    assert torch.equal(gathered, rows(1).repeat(SIZE, 1))
    summed = funcol.wait_tensor(funcol.reduce_scatter_tensor(rows(SIZE), "sum", 0, world8))
    assert torch.equal(summed, rows(1))
    swapped = funcol.wait_tensor(funcol.all_to_all_single(rows(SIZE), None, None, world8))
    assert torch.equal(swapped, rows(SIZE))
    mesh = DeviceMesh.from_group(world8, "cpu")
    sharded = distribute_tensor(rows(SIZE * 2), mesh, [Shard(0)])
    assert torch.equal(sharded.to_local(), rows(2))
    assert torch.equal(sharded.full_tensor(), rows(2).repeat(SIZE, 1))


def test_copies_are_not_autograds_business(world8: EmulatedGroup) -> None:
    weight = rows(SIZE).requires_grad_()
    saved = weight * 1
    product = saved * weight  # saves both
    dist.all_to_all_single(saved, rows(SIZE))
    assert saved.grad_fn is not None
    assert "Mul" in saved.grad_fn.name()
    product.sum().backward()  # would raise, had the write counted as a change


def test_works_are_finished_and_hold_results(world8: EmulatedGroup) -> None:
    out, part = torch.zeros(SIZE, 2), rows(1)
    work = dist.all_gather_into_tensor(out, part, async_op=True)
    assert work is not None
    assert work.is_completed()
    assert work.wait() is True
    (result,) = work.get_future().wait()
    assert result is out
    assert torch.equal(work.result()[0], part.repeat(SIZE, 1))


# ---- time ----------------------------------------------------------------------------------------


def elapsed_s(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def test_a_collective_takes_latency_and_the_bytes_to_others_at_its_roles_rate() -> None:
    links = parse_emulated_links("a2a=1MBps,dp=2MBps,latency=5ms")
    with world(Emulation(links)):
        sent = torch.zeros(SIZE, 250)  # 8000 bytes, 7000 of them others'
        assert elapsed_s(lambda: dist.all_to_all_single(torch.zeros_like(sent), sent)) >= 0.012
        part = torch.zeros(250)
        whole = torch.zeros(SIZE * 250)
        assert elapsed_s(lambda: dist.all_gather_into_tensor(whole, part)) >= 0.0085
        assert elapsed_s(lambda: dist.reduce_scatter_tensor(part, whole)) >= 0.0085
        assert elapsed_s(lambda: dist.all_reduce(whole)) >= 0.012
        assert elapsed_s(dist.barrier) >= 0.005
        lone = dist.new_group([0])
        fast_s = min(elapsed_s(lambda: dist.all_reduce(whole, group=lone)) for _ in range(5))
        assert fast_s < 0.005  # a group of one rank has no wire
    assert links.duration_ns(LinkRole.A2A, 7000) == 12_000_000
    assert links.duration_ns(LinkRole.DP, 7000) == 8_500_000


def test_spans_tell_kind_bytes_and_time() -> None:
    emulation = Emulation(parse_emulated_links("a2a=1MBps,dp=1MBps,latency=1ms"), timed=True)
    with world(emulation):
        group = dist.new_group([0, 2, 4, 6], group_desc="evens")
        sent = torch.zeros(4, 10)
        dist.all_to_all_single(sent.clone(), sent, [0, 2, 1, 1], [1, 3, 0, 0], group=group)
        dist.all_gather_into_tensor(torch.zeros(40), torch.zeros(10), group=group)
        dist.broadcast(sent, src=0, group=group)
        spans = emulation.spans()
        assert [(span.op, span.kind, span.wire_bytes) for span in spans] == [
            ("all_to_all_single", "a2a", 160),  # takes 160, gives 120
            ("all_gather_into_tensor", "ag", 120),
            ("broadcast", "other", 160),
        ]
        assert {(span.group, span.ranks) for span in spans} == {("evens", (0, 2, 4, 6))}
        assert [span.sequence for span in spans] == [0, 1, 2]
        for span in spans:
            assert span.exit_ns - span.enter_ns >= 1_000_000 + span.wire_bytes * 1000
        emulation.clear()
        assert emulation.spans() == []


# ---- groups --------------------------------------------------------------------------------------


def test_groups_share_the_worlds_emulation() -> None:
    emulation = Emulation(parse_emulated_links("a2a=1GBps,dp=1GBps"))
    with world(emulation, rank=5) as everyone:
        assert (everyone.rank(), everyone.size(), dist.get_backend()) == (5, 8, "emulated")
        group = dist.new_group([1, 5, 7])
        assert isinstance(group, EmulatedGroup)
        assert group.emulation is emulation
        assert (group.rank(), group.size()) == (1, 3)
        assert dist.get_process_group_ranks(group) == [1, 5, 7]
        assert group.describe() == "emulated: 3 ranks, a2a 1 GB/s, dp 1 GB/s, latency 0 us"
        assert not isinstance(dist.new_group([0, 1]), dist.ProcessGroup)
        local = dist.new_group([4, 5], use_local_synchronization=True)
        assert isinstance(local, EmulatedGroup)
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "ep"))
        assert dist.get_process_group_ranks(mesh.get_group("ep")) == [4, 5, 6, 7]
        assert dist.get_process_group_ranks(mesh.get_group("dp")) == [1, 5]


def test_a_world_without_options_costs_no_link_time() -> None:
    with world() as group:
        assert group.describe() == "emulated: 8 ranks, no link time"
        with pytest.raises(ValueError, match=r"expected pg_options=Emulation.*got _Options"):
            dist.new_group([0, 1], pg_options=dist.ProcessGroupGloo._Options())


def test_a_group_is_one_threads_at_a_time() -> None:
    with world(Emulation(parse_emulated_links("a2a=1GBps,dp=1GBps,latency=300ms"))):
        thread = threading.Thread(target=dist.barrier)
        thread.start()
        time.sleep(0.1)
        with pytest.raises(RuntimeError, match="'default_pg' is used by two threads at once"):
            dist.all_reduce(rows(1))
        thread.join()


def test_an_error_inside_names_the_collective(world8: EmulatedGroup) -> None:
    across = torch.zeros(2, SIZE).t()  # not contiguous
    with pytest.raises(RuntimeError, match="view size") as caught:
        dist.all_gather_into_tensor(across, torch.zeros(2))
    assert "in all_gather_into_tensor, collective 0 of group 'default_pg', rank 0 of" in "".join(
        traceback.format_exception_only(caught.value)
    )


# ---- CUDA's order, on stand-ins ------------------------------------------------------------------


def test_order_of_waits_records_and_copies_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    count = iter(range(100))
    is_passed = False

    class FakeEvent:
        def __init__(self, *, enable_timing: bool = False) -> None:
            self.name = f"e{next(count)}"

        def record(self, stream: "FakeStream") -> None:
            seen.append(f"{self.name} on {stream.name}")

        def query(self) -> bool:
            return is_passed

    class FakeStream:
        def __init__(self, device: object, name: str = "own") -> None:
            self.device, self.name, self.cuda_stream = device, name, hash(name)

        def wait_event(self, event: FakeEvent) -> None:
            seen.append(f"{self.name} waits {event.name}")

    class FakeHold:
        def launch(self, duration_ns: int, cuda_stream: int) -> None:
            seen.append(f"hold {duration_ns} on {current[-1].name}")
            assert cuda_stream == current[-1].cuda_stream

    current = [FakeStream("gpu", "caller")]
    monkeypatch.setattr(emulated_run.torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(emulated_run.torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(emulated_run.torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(emulated_run.torch.cuda, "set_stream", current.append)
    fake: Any = FakeHold()
    device: Any = "gpu"
    lane = CudaLane(device, fake)  # events e0, e1

    def run(is_async: bool, output: Tensor | None = None) -> Any:
        seen.clear()
        item = Collective(
            op="x",
            kind=CollectiveKind.A2A,
            wire_bytes=0,
            copy=lambda: seen.append(f"copy on {current[-1].name}"),
            outputs=() if output is None else [output],
            inputs=(),
            is_async=is_async,
        )
        return lane.run(item, 5, None)

    run(False)
    assert seen == ["copy on caller", "hold 5 on caller", "e1 on caller"]
    work = run(True)  # behind the caller, and behind the one before, which ran elsewhere
    assert seen == [
        *["e0 on caller", "own waits e0", "own waits e1"],
        *["copy on own", "hold 5 on own", "e2 on own"],
    ]
    assert current[-1].name == "caller"
    seen.clear()
    work.wait()
    assert seen == ["caller waits e2"]
    run(True)  # on the same stream as the one before
    assert seen == ["e0 on caller", "own waits e0", "copy on own", "hold 5 on own", "e3 on own"]
    run(False)
    assert seen == ["caller waits e3", "copy on caller", "hold 5 on caller", "e1 on caller"]

    # Lifetimes: kept until waited for, even by nobody, and not for longer.
    waited, forgotten = rows(1), rows(1)
    of_waited, of_forgotten = weakref.ref(waited), weakref.ref(forgotten)
    work, lost = run(True, waited), run(True, forgotten)
    del waited, forgotten, lost
    assert of_forgotten() is not None
    work.wait()
    assert of_waited() is not None  # its result
    del work
    assert of_waited() is None
    is_passed = True
    run(True)
    assert of_forgotten() is None


# ---- the project on it ---------------------------------------------------------------------------


def _one_step(case: Case) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
    parts = build(case)
    schedule = OverlapSchedule(parts, case.config)
    losses = schedule.step(batches(parts, case, 0), loss_of(case)).losses
    return gradients(parts), losses


def test_a_sharded_step_is_finite_and_the_same_twice() -> None:
    case = Case(strategy="optim_grads_params", order="paired", ep=4, microbatches=3)
    with world(Emulation(parse_emulated_links("a2a=1GBps,dp=1GBps,latency=20us"), timed=True)) as w:
        first, losses = _one_step(case)
        again, losses_again = _one_step(case)
        kinds = {span.kind for span in w.emulation.spans() if span.ranks == tuple(range(4))}
    assert first
    assert unequal(first, again) == []
    assert [float(a) for a in losses] == [float(b) for b in losses_again]
    for name, gradient in first.items():
        assert gradient.isfinite().all(), name
    assert any(gradient.count_nonzero() for gradient in first.values())
    assert CollectiveKind.A2A in kinds


def test_overlap_is_bitwise_the_standard_path_on_it() -> None:
    with world():
        case = Case(strategy="optim_grads_params", order="paired", ep=4, delay=True)
        assert differences(case, num_steps=1) == []


def test_megatrons_groups_and_model_on_it() -> None:
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    from ep_overlap.models.megatron_cpu import megatron_on_cpu

    with world(Emulation(parse_emulated_links("a2a=1GBps,dp=1GBps"))):
        parallel_state.initialize_model_parallel(
            expert_model_parallel_size=8, create_gloo_process_groups=False
        )
        try:
            groups = ProcessGroupCollection.use_mpu_process_groups()
            for group in (groups.dp, groups.ep):
                assert isinstance(group, EmulatedGroup)
                assert group.size() == 8
                assert group.describe().startswith("emulated: 8 ranks, a2a 1 GB/s")
            assert groups.expt_dp.size() == groups.tp.size() == groups.pp.size() == 1
            assert parallel_state.get_expert_model_parallel_rank() == 0
        finally:
            parallel_state.destroy_model_parallel()
        with megatron_on_cpu():
            case = Case(megatron=True, strategy="optim_grads", order="plain", ep=4)
            assert differences(case, num_steps=1) == []


@pytest.mark.filterwarnings("ignore:MimoModelConfig is experimental:UserWarning")
def test_megatrons_fsdp_can_be_built_on_it() -> None:
    import megatron_fsdp_support as fsdp

    from ep_overlap.models.megatron_emulated import megatron_fsdp_of_one_rank

    case = fsdp.Case(layers=1)
    with world(), fsdp.one_world() as groups:
        with pytest.raises(AssertionError, match="boundary check failed"):
            fsdp.trained(case, groups)
        with megatron_fsdp_of_one_rank():
            fsdp.trained(case, groups)
        with pytest.raises(AssertionError, match="boundary check failed"):  # undone
            fsdp.trained(case, groups)
