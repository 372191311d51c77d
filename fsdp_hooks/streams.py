"""Streams and events: CUDA streams, a worker thread per stream on CPU, inline streams for tests.

A stream is a first-in-first-out queue of work. The host thread only issues; ``after`` names the
events that the work waits for, in the stream's own time::

    host    run(a) run(b) run(c, after=[b done]) ...      returns at once
    comp    [aaaaaaaaaaaa][dddddd]
    comm    [bbbbbb]......[cccc]                          c waited for its stream, b was done

On CPU, compute too has a worker thread: with compute on the host thread an exchange would be
issued only after the GEMM that should hide it. A collective that blocks in a worker waits on a
socket without the interpreter lock, so compute goes on beside it.

A failure travels along the same edges as the data, and along no others: work is skipped if it
waits for failed work or stands behind it in its stream. So which work is skipped depends on the
plan, never on timing, and ranks that fail at the same action skip the same collectives.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from enum import Enum
from queue import SimpleQueue
from time import perf_counter_ns
from typing import Final, NamedTuple, Protocol, final

import torch

from fsdp_hooks.thread_state import ThreadState

Work = Callable[[], None]


class Event(Protocol):
    """The completion of one piece of work."""

    @property
    def word(self) -> str:
        """What completed."""
        ...

    @property
    def lane(self) -> str:
        """Where it ran."""
        ...

    def wait(self) -> None:
        """Block the host until the work is done.

        Raises:
            BaseException: what the work raised, or what it was skipped for.
        """
        ...


class Span(NamedTuple):
    """When one piece of work waited and ran (``time.perf_counter_ns``)."""

    lane: str
    word: str
    wait_ns: int
    """When the stream came to the work and began to wait for its events."""
    start_ns: int
    end_ns: int
    blocked_on: str | None = None
    """The word of the event that ended the wait; None if no wait took time."""
    blocked_by_lane: str | None = None
    """The lane of that event."""


class StreamObserver(Protocol):
    """Is told of every piece of work; called in the stream's own thread."""

    def on_issue(self, lane: str, word: str) -> None:
        """The host has issued ``word`` on ``lane``."""
        ...

    def on_span(self, span: Span) -> None:
        """A piece of work is done, or was skipped."""
        ...


class Stream(Protocol):
    """A queue of work. ``record=False`` saves the event where nothing will wait for it."""

    @property
    def lane(self) -> str:
        """The stream's name."""
        ...

    def run(self, work: Work, word: str, record: bool = True, after: Sequence[Event] = ()) -> Event:
        """Issue work behind what was issued before and behind ``after``.

        Raises:
            BaseException: what the work raised, where issuing runs it (``INLINE``) or launches it
                (``CUDA``). A worker thread's failure comes by the event, and ``synchronize``.
        """
        ...

    def follow(self, event: Event) -> None:
        """Let what is issued from now on run behind ``event``."""
        ...

    def synchronize(self) -> BaseException | None:
        """Block the host until the queue is empty. Returns the failure that stopped it, if any."""
        ...

    def reset(self) -> None:
        """Forget a failure, so that new work runs again. The queue must be empty."""
        ...

    def observe(self, observer: StreamObserver | None) -> None:
        """Tell ``observer`` of all that follows; None: nobody."""
        ...


class StreamKind(Enum):
    """Which streams run the work."""

    THREAD = "thread"
    """CPU: a worker thread per stream."""
    INLINE = "inline"
    """Work runs when it is issued, in the issuing thread: for tests of order."""
    CUDA = "cuda"
    """A CUDA stream: work is launched when it is issued, and runs when the device comes to it."""


def new_stream(kind: StreamKind, lane: str, *, device: torch.device, priority: int = 0) -> Stream:
    """Make a stream. ``priority``: as of ``torch.cuda.Stream`` (-1 is high); CUDA only."""
    match kind:
        case StreamKind.THREAD:
            return ThreadStream(lane)
        case StreamKind.INLINE:
            return InlineStream(lane)
        case StreamKind.CUDA:
            return CudaStream(lane, device=device, priority=priority)


def default_kind(device: torch.device) -> StreamKind:
    """CUDA streams on CUDA, worker threads elsewhere."""
    return StreamKind.CUDA if device.type == "cuda" else StreamKind.THREAD


def _blame(error: BaseException, word: str) -> None:
    error.add_note(f"raised in {word}")


@final
class Completion:
    """An event on CPU: a lock that opens once, with the failure behind it if there was one."""

    __slots__ = ("_gate", "error", "lane", "word")

    def __init__(self, word: str, lane: str = "") -> None:
        self.word = word
        self.lane = lane
        self.error: BaseException | None = None
        self._gate = threading.Lock()
        self._gate.acquire()

    def open(self, error: BaseException | None) -> None:
        """The work is done, or was skipped for ``error``."""
        self.error = error
        self._gate.release()

    def is_open(self) -> bool:
        """Whether a wait would return at once."""
        return not self._gate.locked()

    def block(self) -> None:
        """Wait in stream time, whatever the outcome."""
        if self._gate.locked():
            with self._gate:
                pass

    def wait(self) -> None:
        """Block the host until the work is done; raise what it raised."""
        self.block()
        if self.error is not None:
            raise self.error


def completed(word: str = "nothing") -> Completion:
    """An event of work that needs no doing."""
    done = Completion(word)
    done.open(None)
    return done


class _Item(NamedTuple):
    work: Work
    word: str
    after: Sequence[Event]
    completion: Completion | None
    state: ThreadState


class _Shared:
    """What a stream and its worker share; the worker holds no reference to the stream itself."""

    __slots__ = ("__weakref__", "failure", "observer", "queue")

    def __init__(self) -> None:
        self.queue: SimpleQueue[_Item | None] = SimpleQueue()
        self.failure: BaseException | None = None
        self.observer: StreamObserver | None = None


@final
class ThreadStream:
    """A stream on CPU: one worker thread. It ends with the stream, or with the interpreter."""

    def __init__(self, lane: str) -> None:
        self.lane = lane
        self._shared = _Shared()
        self._state = ThreadState.capture()
        thread = threading.Thread(
            target=_serve, args=(lane, self._shared), name=f"stream-{lane}", daemon=True
        )
        thread.start()
        weakref.finalize(self, self._shared.queue.put, None)
        weakref.finalize(self._shared, _end_at_exit, weakref.ref(self._shared), thread)

    def run(
        self, work: Work, word: str, record: bool = True, after: Sequence[Event] = ()
    ) -> Completion:
        """Issue work behind what was issued before and behind ``after``."""
        completion = Completion(word, self.lane) if record else UNRECORDED
        if (observer := self._shared.observer) is not None:
            observer.on_issue(self.lane, word)
        state = ThreadState.capture()
        if state != self._state:
            self._state = state
        # An equal state is passed as the same object: the worker compares by identity.
        self._shared.queue.put(
            _Item(work, word, after, completion if record else None, self._state)
        )
        return completion

    def follow(self, event: Event) -> None:
        """Let what is issued from now on run behind ``event``."""
        self.run(nothing, word=f"wait for {event.word}", after=(event,), record=False)

    def synchronize(self) -> BaseException | None:
        """Block the host until the queue is empty. Returns the failure, if any."""
        drained = Completion("synchronize")
        # ``block``, not ``wait``: behind a failure this item is skipped, and opens all the same.
        self._shared.queue.put(_Item(nothing, "synchronize", (), drained, self._state))
        drained.block()
        return self._shared.failure

    def reset(self) -> None:
        """Forget a failure."""
        self._shared.failure = None

    def observe(self, observer: StreamObserver | None) -> None:
        """Tell ``observer`` of all that follows; None: nobody."""
        self._shared.observer = observer


def nothing() -> None:
    """Work that does nothing: what is asked for are its waits."""


UNRECORDED: Final = completed("unrecorded work")
"""The event of work that nobody waits for, or that was done when it was issued."""


_LAST_WORK_S: Final = 5.0
"""How long the interpreter's exit waits for the work in hand: a collective may wait for a peer."""


def _end_at_exit(alive: weakref.ref[_Shared], thread: threading.Thread) -> None:
    """Let the worker finish the work in hand and skip the rest.

    The interpreter ends a thread that it finds inside C++ by unwinding its stack, which torch's
    frames answer by ``std::terminate``: a process that did all its work would die of SIGABRT.
    """
    shared = alive()
    if shared is None:  # the worker has ended: not the interpreter's exit
        return
    shared.failure = shared.failure or RuntimeError("the interpreter ends")
    shared.queue.put(None)
    thread.join(_LAST_WORK_S)


def _serve(lane: str, shared: _Shared) -> None:
    """A worker's life. Issuer's modes stay in force until work with other modes comes."""
    stack = ExitStack()
    state: ThreadState | None = None
    while (item := shared.queue.get()) is not None:
        try:
            if item.state is not state:
                stack.close()
                state = item.state
                state.enter(stack)
            _do(lane, shared, item)
        except BaseException as error:  # noqa: BLE001 (a dead worker would block the host for ever)
            # Not the work's own failure: of an observer, or of entering the issuer's modes.
            _blame(error, item.word)
            shared.failure = shared.failure or error
            if item.completion is not None and not item.completion.is_open():
                item.completion.open(shared.failure)
        del item  # or the last item's tensors would live until the next one comes
    stack.close()


def _do(lane: str, shared: _Shared, item: _Item) -> None:
    wait_ns = perf_counter_ns()
    blocker: Completion | None = None
    for event in item.after:
        assert isinstance(event, Completion), "a worker thread waits for events of worker threads"
        if not event.is_open():
            event.block()
            blocker = event
        if event.error is not None and shared.failure is None:
            shared.failure = event.error
    start_ns = perf_counter_ns()
    if shared.failure is None:
        try:
            item.work()
        except BaseException as error:  # noqa: BLE001 (the host re-raises every kind)
            _blame(error, item.word)
            shared.failure = error
    word, completion = item.word, item.completion
    # A failure's traceback holds this frame, and must not hold the work's tensors with it.
    del item
    if completion is not None:
        completion.open(shared.failure)
        del completion  # it holds the failure: a cycle otherwise
    if (observer := shared.observer) is not None:
        end_ns = perf_counter_ns()
        span = Span(lane, word, wait_ns, start_ns, end_ns)
        if blocker is not None:
            span = span._replace(blocked_on=blocker.word, blocked_by_lane=blocker.lane)
        observer.on_span(span)


@final
class InlineStream:
    """Work runs at once in the issuing thread: the order of issue is the order of execution."""

    def __init__(self, lane: str) -> None:
        self.lane = lane
        self._observer: StreamObserver | None = None

    def run(self, work: Work, word: str, record: bool = True, after: Sequence[Event] = ()) -> Event:
        """Issue work behind what was issued before and behind ``after``."""
        for event in after:
            if event is not UNRECORDED:  # work of an inline stream is done
                event.wait()
        observer = self._observer
        start_ns = 0
        if observer is not None:
            observer.on_issue(self.lane, word)
            start_ns = perf_counter_ns()
        try:
            work()
        except BaseException as error:
            _blame(error, word)
            raise
        if observer is not None:
            observer.on_span(Span(self.lane, word, start_ns, start_ns, perf_counter_ns()))
        return UNRECORDED

    def follow(self, event: Event) -> None:
        """Let what is issued from now on run behind ``event``."""
        self.run(nothing, word=f"wait for {event.word}", after=(event,), record=False)

    def synchronize(self) -> BaseException | None:
        """Block the host until the queue is empty. Returns the failure, if any."""
        return None

    def reset(self) -> None:
        """Forget a failure."""

    def observe(self, observer: StreamObserver | None) -> None:
        """Tell ``observer`` of all that follows; None: nobody."""
        self._observer = observer


@final
class CudaEvent:
    """An event on CUDA."""

    __slots__ = ("cuda", "lane", "word")

    def __init__(self, word: str, lane: str, cuda: torch.cuda.Event | torch.Event) -> None:
        self.word = word
        self.lane = lane
        self.cuda = cuda

    def wait(self) -> None:
        """Block the host until the work is done; raise what it raised."""
        self.cuda.synchronize()


@final
class CudaStream:
    """A CUDA stream of our own. Work is launched when issued; waits are the device's."""

    def __init__(self, lane: str, *, device: torch.device, priority: int = 0) -> None:
        self.lane = lane
        self.cuda = torch.cuda.Stream(device, priority=priority)
        self._observer: StreamObserver | None = None

    def run(self, work: Work, word: str, record: bool = True, after: Sequence[Event] = ()) -> Event:
        """Issue work behind what was issued before and behind ``after``."""
        if self._observer is not None:
            self._observer.on_issue(self.lane, word)
        for event in after:
            self.follow(event)
        with torch.cuda.stream(self.cuda):
            try:
                work()
            except BaseException as error:
                _blame(error, word)
                raise
        if not record:
            return UNRECORDED
        return CudaEvent(word, self.lane, self.cuda.record_event())

    def follow(self, event: Event) -> None:
        """Let what is issued from now on run behind ``event``."""
        # Protects what the awaited work wrote (and what it still reads) from what follows.
        if isinstance(event, CudaEvent):
            self.cuda.wait_event(event.cuda)
        else:
            event.wait()

    def synchronize(self) -> BaseException | None:
        """Block the host until the queue is empty. Returns the failure, if any."""
        self.cuda.synchronize()
        return None

    def reset(self) -> None:
        """Forget a failure."""

    def observe(self, observer: StreamObserver | None) -> None:
        """Tell ``observer`` of all that follows; None: nobody."""
        self._observer = observer
