"""The emulated backend on a GPU: a script with ``OK`` and ``FAILED`` lines, status 1 if any failed.

::

    .venv/bin/python tests/gpu/emulated_gpu.py               # all, on the first GPU
    .venv/bin/python tests/gpu/emulated_gpu.py --device cpu  # what needs no GPU: host cost, a step

Checks the hold kernel's time under load, the order of a group's stream and the caller's both ways,
lifetimes of what nobody waits for, values against the same calls on CPU, spans, the schedule beside
the standard path; prints what a call costs the host. Everything is emulated: one rank of eight.
"""

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

# Streams of several groups must not share a hardware queue; read when CUDA starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from schedule_support import Case, differences
from torch import Tensor

from ep_overlap.links.emulated import EmulatedLinks, Emulation, register_emulated_backend
from ep_overlap.links.hold import CudaHold

SIZE = 8
HOLD_MS = 10.0
SLOW = EmulatedLinks(latency_s=HOLD_MS * 1e-3)
"""Every collective takes ``HOLD_MS``, whatever its bytes."""


@contextmanager
def world(links: EmulatedLinks | None = None, *, timed: bool = False) -> Generator[Emulation]:
    emulation = Emulation(links, timed=timed)
    register_emulated_backend()
    dist.init_process_group(
        "emulated", rank=0, world_size=SIZE, store=dist.HashStore(), pg_options=emulation
    )
    try:
        yield emulation
    finally:
        dist.destroy_process_group()


class Report:
    """Counts what failed."""

    def __init__(self) -> None:
        self.num_failed = 0

    def check(self, name: str, is_right: bool, detail: str = "") -> None:
        self.num_failed += not is_right
        print(
            f"{'OK' if is_right else 'FAILED'} {name}{': ' if detail else ''}{detail}", flush=True
        )

    def run(self, checks: Callable[["Report"], None]) -> None:
        """One group of checks; an exception is a failure of it, and the next one goes on."""
        try:
            checks(self)
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001
            notes = "; ".join(getattr(error, "__notes__", ()))
            self.check(checks.__name__, False, f"{type(error).__name__}: {error} {notes}")


def event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def recorded() -> torch.cuda.Event:
    """An event on the current stream."""
    made = event()
    made.record()
    return made


# ---- time ----------------------------------------------------------------------------------------


def hold_under_load(report: Report) -> None:
    """The kernel alone, with matrix products on another stream all the while."""
    hold = CudaHold(torch.device("cuda", 0))
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    busy, held = torch.cuda.Stream(), torch.cuda.Stream()
    for load, asked_ms in itertools.product((False, True), (0.1, 1.0, 10.0, 50.0)):
        took_ms: list[float] = []
        for _ in range(5):
            torch.cuda.synchronize()
            with torch.cuda.stream(busy):
                for _ in range(30 + int(asked_ms * 10) if load else 0):  # 0.2 ms each on an H200
                    torch.mm(a, a, out=out)
                load_end = recorded()
            start, done = event(), event()
            start.record(held)
            hold.launch(round(asked_ms * 1e6), held.cuda_stream)
            done.record(held)
            done.synchronize()
            assert not load or not load_end.query(), "the load ended before the hold: make it more"
            took_ms.append(start.elapsed_time(done))
        median_ms = sorted(took_ms)[2]
        detail = f"asked {asked_ms} ms, took {', '.join(f'{t:.4f}' for t in took_ms)}"
        if load and asked_ms < 10:
            # Any kernel waits for a free place on a multiprocessor, here up to a whole product:
            # that is not the hold's time, and only small beside long ones.
            report.check("hold beside products, at least", median_ms >= asked_ms * 0.999, detail)
            continue
        slack_ms = 0.03  # launch and events
        is_right = asked_ms * 0.999 <= median_ms <= asked_ms * 1.03 + slack_ms
        report.check(f"hold {'beside products' if load else 'alone'}, within 3%", is_right, detail)


def spans(report: Report) -> None:
    """Bytes over rate, as timed events tell it."""
    with world(EmulatedLinks(a2a_bytes_per_s=10e9, latency_s=20e-6), timed=True) as emulation:
        sent = torch.zeros(SIZE, 1 << 22, device="cuda", dtype=torch.uint8)  # 29.4 MB to others
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        emulation.clear()
        before_ns = time.perf_counter_ns()
        for is_async in (False, True, False, True):
            work = dist.all_to_all_single(received, sent, async_op=is_async)
            if is_async:
                work.wait()
        torch.cuda.synchronize()
        after_ns = time.perf_counter_ns()
        found = emulation.spans()
        asked_ms = (20e-6 + 7 * (1 << 22) / 10e9) * 1e3
        took_ms = [(span.exit_ns - span.enter_ns) / 1e6 for span in found]
        # The copies come on top: 34 MB, tens of microseconds.
        is_right = all(asked_ms <= took <= asked_ms * 1.03 + 0.1 for took in took_ms)
        report.check("spans: link time and copies", is_right, f"asked {asked_ms:.3f}: {took_ms}")
        bounds = [before_ns, *(t for s in found for t in (s.enter_ns, s.exit_ns)), after_ns]
        slack_ns = 50_000
        in_order = all(a <= b + slack_ns for a, b in itertools.pairwise(bounds))
        report.check("spans: in order, on the host's clock", in_order)


# ---- order ---------------------------------------------------------------------------------------


def order_with_the_callers_stream(report: Report) -> None:
    caller = torch.cuda.Stream()
    hold = CudaHold(torch.device("cuda", 0))
    with world(SLOW), torch.cuda.stream(caller):
        sent = torch.zeros(SIZE, 1 << 16, device="cuda")
        received = torch.zeros_like(sent)
        dist.all_to_all_single(received, sent)  # what is made at the first call is made
        torch.cuda.synchronize()

        hold.launch(round(HOLD_MS * 1e6), caller.cuda_stream)
        sent.fill_(7)  # late: the collective must wait for it
        start, host_s = recorded(), time.perf_counter()
        work = dist.all_to_all_single(received, sent, async_op=True)
        issued = recorded()
        is_free = not work.is_completed()
        work.wait()
        waited_host_ms = (time.perf_counter() - host_s) * 1e3
        sent.fill_(9)  # after wait: the collective must have read it
        copy, done = received.clone(), recorded()
        torch.cuda.synchronize()
        report.check("async: waits for the caller's stream", bool((copy == 7).all()))
        report.check(
            "async: is not complete when issued, is after", is_free and work.is_completed()
        )
        gap_ms, whole_ms = start.elapsed_time(issued), start.elapsed_time(done)
        report.check("async: the caller's stream goes on", gap_ms < 0.2 * HOLD_MS, f"{gap_ms} ms")
        report.check(
            "async: wait() holds the caller's stream", whole_ms >= HOLD_MS, f"{whole_ms} ms"
        )
        report.check(
            "async: the host does not block", waited_host_ms < HOLD_MS, f"{waited_host_ms:.3f} ms"
        )

        start = recorded()
        dist.all_to_all_single(received, sent)
        done = recorded()
        torch.cuda.synchronize()
        took_ms = start.elapsed_time(done)
        report.check("sync: the caller's stream is held", took_ms >= HOLD_MS, f"{took_ms} ms")
        report.check("sync: values", torch.equal(received, sent))

        future = dist.all_to_all_single(received, sent * 2, async_op=True).get_future()
        (result,) = future.wait()  # the current stream waits
        report.check("future: values", torch.equal(result.clone(), sent * 2))


def order_within_and_between_groups(report: Report) -> None:
    with world(SLOW):
        first, second = dist.new_group([0, 1]), dist.new_group([0, 2])
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        data = [torch.zeros(2, 1024, device="cuda") for _ in range(2)]
        cases = ((first, first, False), (first, first, True), (first, second, False))
        for round_ in range(2):  # the first one warms up
            for a, b, is_async in cases:
                torch.cuda.synchronize()
                start, ends, works = recorded(), [event(), event()], []
                for group, stream, tensor, end in zip((a, b), streams, data, ends, strict=True):
                    stream.wait_event(start)
                    with torch.cuda.stream(stream):
                        work = dist.all_reduce(tensor, group=group, async_op=is_async)
                        if work is not None:
                            works.append(work)
                            work.wait()
                        end.record()
                torch.cuda.synchronize()
                took_ms = max(start.elapsed_time(end) for end in ends)
                if not round_:
                    continue
                if a is b:
                    name = f"one group on two streams, {'async' if is_async else 'sync'}: in turn"
                    report.check(name, took_ms >= 2 * HOLD_MS, f"{took_ms} ms")
                else:
                    report.check(
                        "two groups at a time", took_ms < 1.5 * HOLD_MS, f"{took_ms:.3f} ms"
                    )


def lifetimes(report: Report) -> None:
    """Inputs of works that are dropped, waited for or not, are not reused while in use."""
    with world(SLOW):
        received = torch.zeros(16, SIZE, 1 << 18, device="cuda")
        for index in range(16):
            sent = torch.full((SIZE, 1 << 18), float(index + 1), device="cuda")
            dist.all_to_all_single(received[index], sent, async_op=True)  # work and input dropped
            del sent
            torch.full((SIZE, 1 << 18), -1.0, device="cuda")  # would take the freed memory
        torch.cuda.synchronize()
        values = received[:, 0, 0].tolist()
        is_right = all(bool((received[i] == i + 1).all()) for i in range(16))
        report.check("inputs that nobody keeps live until read", is_right, str(values))

        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        for _ in range(16):
            sent = torch.full((SIZE, 1 << 18), 1.0, device="cuda")
            output = torch.empty_like(sent)
            work = dist.all_to_all_single(output, sent, async_op=True)
            assert work is not None
            work.wait()
            del sent, output, work
        peak = torch.cuda.max_memory_allocated() - base
        torch.cuda.synchronize()
        two = 2 * SIZE * (1 << 18) * 4
        report.check("a waited work lets its tensors go at once", peak <= two, f"{peak} bytes")


# ---- values --------------------------------------------------------------------------------------


def every_collective(device: str) -> dict[str, list[Tensor]]:
    rows = torch.arange(SIZE * 6.0, device=device).view(SIZE * 2, 3)
    even, more = torch.empty_like(rows), rows.new_empty(SIZE * 5, 3)
    dist.all_to_all_single(even, rows)
    splits = [0, 1, 2, 3, 4, 3, 2, 1]
    dist.all_to_all_single(more, rows, [5] * SIZE, splits)
    outputs = [rows.new_empty(index + 1, 3) for index in range(SIZE)]
    dist.all_to_all(outputs, list(rows.chunk(SIZE)))
    whole, in_place = rows.new_empty(SIZE * 16, 3), rows.clone()
    dist.all_gather_into_tensor(whole, rows)
    dist.all_gather_into_tensor(in_place, in_place[:2])
    listed = [torch.empty_like(rows) for _ in range(SIZE)]
    dist.all_gather(listed, rows)
    part, mean, from_list = (rows.new_empty(2, 3) for _ in range(3))
    dist.reduce_scatter_tensor(part, rows)
    dist.reduce_scatter_tensor(mean, rows, op=dist.ReduceOp.AVG)
    dist.reduce_scatter(from_list, list(rows.chunk(SIZE)))
    total, average, sent = rows.clone(), rows.clone(), rows.clone()
    dist.all_reduce(total)
    dist.all_reduce(average, op=dist.ReduceOp.AVG)
    dist.broadcast(sent, src=0)
    wholes = [rows.new_empty(SIZE * 2, 3) for _ in range(2)]
    with dist._coalescing_manager(async_ops=True, device=torch.device(device)) as manager:
        for each in wholes:
            dist.all_gather_into_tensor(each, rows[:2])
    manager.wait()
    dist.barrier()
    return {
        "all_to_all": [even, more, *outputs],
        "all_gather": [whole, in_place, *listed, *wholes],
        "reduce_scatter": [part, mean, from_list],
        "all_reduce, broadcast": [total, average, sent],
    }


def values(report: Report) -> None:
    with world(EmulatedLinks(latency_s=20e-6)):
        on_gpu, on_cpu = every_collective("cuda"), every_collective("cpu")
        for op, tensors in on_cpu.items():
            pairs = zip(on_gpu[op], tensors, strict=True)
            report.check(f"{op}: as on CPU", all(torch.equal(a.cpu(), b) for a, b in pairs))
        objects: list[object] = [None] * SIZE
        dist.all_gather_object(objects, "mine")
        report.check("all_gather_object", objects == ["mine"] * SIZE)


# ---- the project on it, and the host's cost ------------------------------------------------------


def steps(device: str) -> Callable[[Report], None]:
    def schedule_beside_the_standard_path(report: Report) -> None:
        with world(EmulatedLinks(a2a_bytes_per_s=10e9, dp_bytes_per_s=10e9, latency_s=20e-6)):
            for strategy in ("no_shard", "optim_grads_params"):
                case = Case(strategy=strategy, order="paired", ep=4, delay=True, device=device)
                found = differences(case)
                report.check(f"schedule, {strategy}: bitwise", not found, ", ".join(found[:3]))

    return schedule_beside_the_standard_path


def host_cost(device: str) -> Callable[[Report], None]:
    """us a call, best of 5 loops; without link time, with tensors of 16 numbers."""

    def cost(report: Report) -> None:
        with world():
            a, b, c = (torch.zeros(n, device=device) for n in (16, 16, 128))
            calls: dict[str, Callable[[], object]] = {
                "all_to_all_single": lambda: dist.all_to_all_single(b, a),
                "all_to_all_single, async, wait": lambda: dist.all_to_all_single(
                    b, a, async_op=True
                ).wait(),
                "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(c, a),
                "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(b, c),
                "all_reduce": lambda: dist.all_reduce(a),
                "the copy alone": lambda: b.copy_(a),
            }
            for name, call in calls.items():
                best_us = min(microseconds(call) for _ in range(5))
                print(f"emulated, host cost on {device}: {name} {best_us:.1f} us")

    return cost


def microseconds(call: Callable[[], object], num_calls: int = 1000) -> float:
    call()
    start_s = time.perf_counter()
    for _ in range(num_calls):
        call()
    took_us = (time.perf_counter() - start_s) / num_calls * 1e6
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return took_us


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    device = parser.parse_args().device
    report = Report()
    if device == "cuda":
        if not torch.cuda.is_available():
            print("FAILED no GPU: expected one, torch sees none; use --device cpu")
            return 1
        print(f"emulated, on one {torch.cuda.get_device_name()}, torch {torch.__version__}")
        for checks in (
            hold_under_load,
            spans,
            order_with_the_callers_stream,
            order_within_and_between_groups,
            lifetimes,
            values,
        ):
            report.run(checks)
    report.run(steps(device))
    report.run(host_cost(device))
    print(f"{report.num_failed} failed")
    return min(report.num_failed, 1)


if __name__ == "__main__":
    sys.exit(main())
