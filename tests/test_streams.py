"""Streams on CPU: order, failure, the issuer's modes, lifetimes, what an observer sees."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor

from fsdp_hooks.caller_stream import CallerStream
from fsdp_hooks.streams import (
    Event,
    InlineStream,
    Span,
    Stream,
    StreamKind,
    ThreadState,
    ThreadStream,
    completed,
    default_kind,
    new_stream,
)

CPU = torch.device("cpu")


class Spans:
    """A ``StreamObserver``."""

    def __init__(self) -> None:
        self.issued: list[tuple[str, str]] = []
        self.spans: list[Span] = []

    def on_issue(self, lane: str, word: str) -> None:
        self.issued.append((lane, word))

    def on_span(self, span: Span) -> None:
        self.spans.append(span)


@pytest.fixture
def a() -> ThreadStream:
    return ThreadStream("a")


@pytest.fixture
def b() -> ThreadStream:
    return ThreadStream("b")


def drained(*streams: Stream) -> list[BaseException | None]:
    return [stream.synchronize() for stream in streams]


# ---- order ---------------------------------------------------------------------------------------


def test_a_stream_runs_its_work_in_order_and_the_host_goes_on(a: ThreadStream) -> None:
    gate, log = threading.Event(), list[int]()
    a.run(lambda: gate.wait(10), word="gate")
    for index in range(20):
        a.run(lambda i=index: log.append(i), word=f"w{index}")
    assert log == []
    gate.set()
    assert drained(a) == [None]
    assert log == list(range(20))


def test_work_waits_for_events_of_another_stream_and_only_for_those(
    a: ThreadStream, b: ThreadStream
) -> None:
    gate, log = threading.Event(), list[str]()
    a.run(lambda: log.append("a0"), word="a0")

    def slow() -> None:
        gate.wait(10)
        log.append("a1")

    a1 = a.run(slow, word="a1")
    a2 = a.run(lambda: log.append("a2"), word="a2")
    b0 = b.run(lambda: log.append("b0"), word="b0")
    b.run(lambda: log.append("b1"), word="b1", after=[a1])
    b0.wait()  # although a1 has not run
    assert "b1" not in log
    gate.set()
    a2.wait()
    assert drained(a, b) == [None, None]
    assert log.index("a1") < log.index("b1")
    assert sorted(log) == ["a0", "a1", "a2", "b0", "b1"]


def test_the_caller_waits_for_a_stream(a: ThreadStream) -> None:
    log: list[str] = []
    caller = CallerStream(CPU)
    assert caller.record("now").wait() is None  # what the caller has issued is done
    a.run(lambda: log.append("a"), word="a")
    caller.wait_stream(a)
    assert log == ["a"]
    caller.hold(a)
    assert drained(a) == [None]


def test_work_on_inline_streams_runs_when_it_is_issued() -> None:
    log: list[str] = []
    stream = InlineStream("x")
    stream.run(lambda: log.append("1"), word="1", after=[completed()]).wait()
    assert log == ["1"]
    with pytest.raises(ValueError, match="boom") as caught:
        stream.run(raises(ValueError("boom")), word="2F.mlp.L0")
    assert str(caught.value) == "boom"
    assert caught.value.__notes__ == ["raised in 2F.mlp.L0"]
    assert stream.synchronize() is None
    stream.run(lambda: log.append("3"), word="3")
    assert log == ["1", "3"]


def test_kinds_and_devices() -> None:
    assert default_kind(CPU) is StreamKind.THREAD
    assert default_kind(torch.device("cuda")) is StreamKind.CUDA
    assert isinstance(new_stream(StreamKind.THREAD, "a", device=CPU), ThreadStream)
    assert isinstance(new_stream(StreamKind.INLINE, "a", device=CPU), InlineStream)


# ---- failure -------------------------------------------------------------------------------------


def raises(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def test_a_failure_skips_what_depends_on_it_and_nothing_else() -> None:
    """::

    a  a0  FAIL  a2(skipped)
    b  b0  b1(after a0)  b2(after FAIL: skipped)  b3(skipped)
    c  c0(after b1)  c1
    d  d0(after b3: skipped)
    """
    log: list[str] = []
    a, b, c, d = (ThreadStream(lane) for lane in "abcd")

    def run(stream: Stream, word: str, *after: Event) -> Event:
        return stream.run(lambda: log.append(word), word=word, after=after)

    error = ValueError("x")
    a0 = run(a, "a0")
    failed = a.run(raises(error), word="1B.mlp.L2")
    a2 = run(a, "a2")
    run(b, "b0")
    b1 = run(b, "b1", a0)
    run(b, "b2", failed)
    b3 = run(b, "b3")
    run(c, "c0", b1)
    run(c, "c1")
    run(d, "d0", b3)
    assert drained(a, b, c, d) == [error, error, None, error]
    assert sorted(log) == ["a0", "b0", "b1", "c0", "c1"]
    for event in (failed, a2, b3):
        with pytest.raises(ValueError, match="x") as caught:
            event.wait()
        assert caught.value is error  # the very object: type, text and traceback are its own
    assert error.__notes__ == ["raised in 1B.mlp.L2"]  # once, by whoever raised it
    b1.wait()


def test_after_reset_a_stream_runs_again(a: ThreadStream) -> None:
    log: list[str] = []
    a.run(raises(KeyboardInterrupt()), word="w")
    (failure,) = drained(a)
    assert isinstance(failure, KeyboardInterrupt)  # of every kind
    a.run(lambda: log.append("skipped"), word="w")
    drained(a)
    a.reset()
    a.run(lambda: log.append("runs"), word="w")
    assert drained(a) == [None]
    assert log == ["runs"]


def test_the_caller_gets_the_failure_of_the_stream_it_waits_for(a: ThreadStream) -> None:
    a.run(raises(OSError("link")), word="REDUCE.L1", record=False)
    with pytest.raises(OSError, match="link") as caught:
        CallerStream(CPU).wait_stream(a)
    assert str(caught.value) == "link"


# ---- the issuer's modes --------------------------------------------------------------------------


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def double_it(tensor: Tensor) -> Tensor:
    return tensor * 2


def same(tensor: Tensor) -> Tensor:
    return tensor


MODES: dict[str, tuple[Callable[[], AbstractContextManager[object]], Callable[[], object]]] = {
    "grad mode": (torch.no_grad, torch.is_grad_enabled),
    "inference mode": (torch.inference_mode, torch.is_inference_mode_enabled),
    "autocast": (
        lambda: torch.autocast("cpu", dtype=torch.float16),
        lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
    ),
    "autocast cache": (
        lambda: torch.autocast("cpu", cache_enabled=False),
        torch.is_autocast_cache_enabled,
    ),
    "saved-tensor hooks": (
        lambda: torch.autograd.graph.saved_tensors_hooks(double_it, same),
        lambda: saved_by_a_product(),
    ),
    "autograd multithreading": (
        lambda: torch.autograd.set_multithreading_enabled(False),
        torch._C._is_multithreading_enabled,
    ),
    "intra-op threads": (lambda: threads(torch.get_num_threads() + 1), torch.get_num_threads),
}


def saved_by_a_product() -> float:
    """1 without hooks; 2 where ``double_it`` packed."""
    x = torch.ones((), requires_grad=True)
    node = (x * x).grad_fn
    assert node is not None
    return float(node._saved_self.detach())


@pytest.mark.parametrize("mode", MODES)
def test_work_runs_under_the_modes_of_whoever_issued_it(a: ThreadStream, mode: str) -> None:
    enter, read = MODES[mode]
    seen: list[object] = []

    def look() -> None:
        seen.append(read())

    outside = read()
    a.run(look, word="before")
    with enter():
        inside = read()
        a.run(look, word="inside")
    a.run(look, word="after")  # the worker's own state is back
    drained(a)
    assert inside != outside
    assert seen == [outside, inside, outside]
    assert read() == outside  # and the issuer's was never touched


def test_equal_modes_are_one_object_so_that_the_worker_need_not_switch() -> None:
    assert ThreadState.capture() == ThreadState.capture()
    with torch.no_grad():
        assert ThreadState.capture() != ThreadState(
            grad=True,
            inference=False,
            autocast=(),
            autocast_cache=True,
            saved_tensor_hooks=None,
            multithreaded_backward=True,
            num_threads=torch.get_num_threads(),
        )


# ---- lifetimes -----------------------------------------------------------------------------------


def test_the_thread_ends_when_the_stream_is_dropped_and_its_work_is_done_first() -> None:
    before = set(threading.enumerate())
    log: list[int] = []
    stream = ThreadStream("short")
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon
    for index in range(5):
        stream.run(lambda i=index: log.append(i), word="w")
    gc.disable()
    try:
        del stream
        thread.join(10)
        assert not thread.is_alive()
    finally:
        gc.enable()
    assert log == list(range(5))


class Payload:
    pass


def perhaps_fail(payload: Payload, fails: bool) -> None:
    if fails:
        raise ValueError("x")


def test_a_process_ends_in_order_while_a_stream_is_at_work() -> None:
    program = """
import threading
import torch
from fsdp_hooks.streams import ThreadStream

stream, begun = ThreadStream("comp"), threading.Event()
weight = torch.randn(1000, 1000, requires_grad=True)

def work():
    begun.set()
    (weight @ weight).sum().backward()  # in C++, whose frames may not be unwound

for _ in range(1000):
    stream.run(work, word="work")
begun.wait()
"""
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert time.perf_counter() - started < 20, "the work in hand ends, the rest is skipped"


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_finished_work_stays_alive(a: ThreadStream, fails: bool) -> None:
    # M#4909: without a run of the garbage collector.
    gc.disable()
    try:
        payload = Payload()
        alive = weakref.ref(payload)

        event = a.run(partial(perhaps_fail, payload, fails), word="w")
        del payload
        failure = a.synchronize()
        assert (failure is not None) is fails
        del failure
        a.reset()
        if fails:
            assert alive() is not None  # the event carries the failure, and its frames
        del event
        # The item is dropped behind the event of the next one.
        a.run(lambda: None, word="next").wait()
        assert alive() is None
    finally:
        gc.enable()


# ---- observation ---------------------------------------------------------------------------------


def test_an_observer_sees_issue_at_once_and_spans_in_order(a: ThreadStream) -> None:
    observer, gate = Spans(), threading.Event()
    a.observe(observer)
    a.run(lambda: gate.wait(10), word="w0", record=False)
    a.run(lambda: None, word="w1")
    assert observer.issued == [("a", "w0"), ("a", "w1")]
    assert observer.spans == []
    gate.set()
    drained(a)
    assert [span.word for span in observer.spans[:2]] == ["w0", "w1"]
    assert [span.lane for span in observer.spans[:2]] == ["a", "a"]
    for span in observer.spans:
        assert span.wait_ns <= span.start_ns <= span.end_ns
        assert span.blocked_on is None
    assert observer.spans[0].end_ns <= observer.spans[1].wait_ns
    a.observe(None)
    a.run(lambda: None, word="unseen")
    drained(a)
    assert all(word != "unseen" for _, word in observer.issued)


def test_a_waits_span_names_the_event_that_ended_it(a: ThreadStream, b: ThreadStream) -> None:
    observer, first, second = Spans(), threading.Event(), threading.Event()
    c = ThreadStream("c")
    c.observe(observer)
    a1 = a.run(lambda: first.wait(10), word="2F.dispatch.L0")
    b1 = b.run(lambda: second.wait(10), word="UNSHARD.L1")
    done = a.run(lambda: None, word="done")
    c.run(lambda: None, word="2F.mlp.L0", after=[a1, b1])
    first.set()
    done.wait()
    time.sleep(0.05)  # lets c come to its wait
    second.set()
    c.run(lambda: None, word="next", after=[done])
    drained(c)
    waited, following = observer.spans[0], observer.spans[1]
    assert (waited.blocked_on, waited.blocked_by_lane) == ("UNSHARD.L1", "b")
    assert waited.start_ns > waited.wait_ns
    assert (following.blocked_on, following.blocked_by_lane) == (None, None)


def test_the_callers_wait_is_a_span_that_names_what_it_waited_for(a: ThreadStream) -> None:
    observer, gate = Spans(), threading.Event()
    caller = CallerStream(CPU)
    caller.observe(observer)
    event = a.run(lambda: gate.wait(10), word="UNSHARD.L0")
    threading.Timer(0.05, gate.set).start()
    caller.wait(event, word="wait for L0")
    caller.wait(event, word="again")  # it is done: no time, nobody to blame
    assert [(s.lane, s.word, s.blocked_on, s.blocked_by_lane) for s in observer.spans] == [
        ("comp", "wait for L0", "UNSHARD.L0", "a"),
        ("comp", "again", None, None),
    ]
