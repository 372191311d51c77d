"""How an emulated collective runs: local copies, then the link's time.

::

    CPU         calling thread  |copies|---- sleeps: latency + bytes/rate ----| returns
    CUDA, async caller's stream |ready|  goes on             |wait(): waits for done|
                group's stream        |copies|-- hold kernel --|done|
    CUDA, sync  caller's stream |copies|-- hold kernel --| goes on

As in torch's NCCL groups, a collective with ``async_op=False`` runs on the caller's own stream, and
all collectives of a group run in the order of issue, whatever their streams.
"""

# torch's stubs give Work and Future no constructor of Python's.
# pyright: reportIncompatibleMethodOverride=false

import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple, final, override

import torch
import torch.distributed as dist
from torch import Tensor

from ep_overlap.links.hold import CudaHold
from ep_overlap.links.times import CollectiveKind


class Collective(NamedTuple):
    """One to run. (A tuple, since one is made for every call.)"""

    op: str
    kind: CollectiveKind
    wire_bytes: int
    copy: Callable[[], object]
    """Moves the bytes, on the current stream."""
    outputs: Sequence[Tensor]
    inputs: Sequence[Tensor]
    is_async: bool


class DeviceTimes(NamedTuple):
    """Timing events around a collective on CUDA."""

    start: torch.cuda.Event
    end: torch.cuda.Event


@final
class InUse:
    """What an async collective on CUDA reads and writes, until its work is waited for."""

    __slots__ = ("done", "stream", "tensors")

    def __init__(
        self, tensors: tuple[Tensor, ...], done: torch.cuda.Event, stream: torch.cuda.Stream
    ) -> None:
        self.tensors = tensors
        self.done = done
        self.stream = stream

    @property
    def is_over(self) -> bool:
        """Whether the tensors need not be kept for the collective."""
        return not self.tensors or self.done.query()


@final
class EmulatedWork(dist.Work):
    """An issued collective. Keeps its tensors alive until it is waited for, as NCCL's does.

    ``wait`` on CUDA makes the caller's current stream wait; the host goes on.
    """

    def __init__(self, outputs: Sequence[Tensor], in_use: InUse | None = None) -> None:
        super().__init__()
        self._outputs = outputs
        self._in_use = in_use
        """None: done, or on the caller's own stream."""

    @override
    def wait(self, timeout: timedelta | None = None) -> bool:
        """``timeout`` has no use: nobody else can be late."""
        if (in_use := self._in_use) is not None:
            # What the caller issues next may read outputs and overwrite inputs.
            torch.cuda.current_stream(in_use.stream.device).wait_event(in_use.done)
            in_use.tensors = ()
        return True

    @override
    def synchronize(self) -> None:
        self.wait()

    @override
    def block_current_stream(self) -> None:
        self.wait()

    @override
    def is_completed(self) -> bool:
        return self._in_use is None or self._in_use.done.query()

    @override
    def is_success(self) -> bool:
        return True

    @override
    def exception(self) -> None:
        return None

    @override
    def result(self) -> list[Tensor]:
        return list(self._outputs)

    @override
    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Of the outputs. On CUDA it is done when the group's stream is done with what it has by
        now, which may be more than this collective."""
        if self._in_use is None:
            future = torch.futures.Future[list[Tensor]]()
            future.set_result(list(self._outputs))
            return future
        future = torch.futures.Future[list[Tensor]](devices=[self._in_use.stream.device])
        with torch.cuda.stream(
            self._in_use.stream
        ):  # a future records its events on current streams
            future.set_result(list(self._outputs))
        return future


@final
class CudaLane:
    """One group's stream on a GPU, and the order of its collectives.

    Lifetimes: what a sync collective uses belongs to the caller's stream, on which it runs. What an
    async one uses is kept by its work until ``wait``, after which the caller's stream, where the
    memory is likely reused, is behind it; what nobody waits for is kept here until its event has
    passed. So ``record_stream`` is not needed, which would hold memory back for longer.
    """

    def __init__(self, device: torch.device, hold: CudaHold) -> None:
        self.device = device
        self._hold = hold
        self._stream = torch.cuda.Stream(device)
        # Recorded anew by each call: a wait takes what is recorded when the wait is issued.
        self._ready = torch.cuda.Event()
        self._sync_done = torch.cuda.Event()
        self._last_done: torch.cuda.Event | None = None
        self._last_stream = 0
        self._unwaited = deque[InUse]()

    def run(self, item: Collective, hold_ns: int, times: DeviceTimes | None) -> EmulatedWork:
        """Issue it; see the module's picture."""
        while self._unwaited and self._unwaited[0].is_over:
            self._unwaited.popleft()
        caller = torch.cuda.current_stream(self.device)
        stream = self._stream if item.is_async else caller
        handle = stream.cuda_stream
        if item.is_async:
            # What the caller has issued so far writes the inputs, and may still read the outputs.
            self._ready.record(caller)
            stream.wait_event(self._ready)
        if self._last_done is not None and self._last_stream != handle:
            # A communicator's collectives run in the order of issue.
            stream.wait_event(self._last_done)
        if times is not None:
            times.start.record(stream)
        try:
            if item.is_async:
                torch.cuda.set_stream(stream)
            item.copy()
            if hold_ns:
                self._hold.launch(hold_ns, handle)
        finally:
            if item.is_async:
                torch.cuda.set_stream(caller)
        done = times.end if times is not None else self._sync_done
        if item.is_async and times is None:
            done = torch.cuda.Event()  # its work waits for it later, when others have been issued
        done.record(stream)
        self._last_done, self._last_stream = done, handle
        if not item.is_async:
            return EmulatedWork(item.outputs)
        in_use = InUse((*item.outputs, *item.inputs), done, stream)
        self._unwaited.append(in_use)
        return EmulatedWork(item.outputs, in_use)

    def together(self, outputs: Sequence[Tensor]) -> EmulatedWork:
        """A work behind all that was issued so far."""
        if self._last_done is None:
            return EmulatedWork(outputs)
        self._stream.wait_event(self._last_done)  # the last one may have run elsewhere
        done = torch.cuda.Event()
        done.record(self._stream)
        return EmulatedWork(outputs, InUse((), done, self._stream))


def run_on_cpu(item: Collective, hold_ns: int) -> EmulatedWork:
    """Copy, then sleep in the calling thread, without the GIL; the work is finished."""
    item.copy()
    if hold_ns:
        end_ns = time.perf_counter_ns() + hold_ns
        while (remaining_ns := end_ns - time.perf_counter_ns()) > 0:
            time.sleep(remaining_ns * 1e-9)
    return EmulatedWork(item.outputs)


@final
class CudaDevice:
    """What all groups share on one GPU: the hold kernel, and a moment known on both clocks."""

    def __init__(self, device: torch.device) -> None:
        self.hold = CudaHold(device)
        self._device = device
        self.restart_clock()

    def restart_clock(self) -> None:
        """Take a new common moment. Events tell time in float32: the nearer the better."""
        self._anchor = torch.cuda.Event(enable_timing=True)
        self._anchor.record(torch.cuda.current_stream(self._device))
        self._anchor.synchronize()
        self._anchor_ns = time.perf_counter_ns()

    def host_ns(self, times: DeviceTimes) -> tuple[int, int]:
        """Start and end, as ``time.perf_counter_ns()`` tells time: to about 10 us, their difference
        to 1 us. Blocks the host until the end."""
        times.end.synchronize()
        start_ns = self._anchor_ns + round(self._anchor.elapsed_time(times.start) * 1e6)
        return start_ns, start_ns + round(times.start.elapsed_time(times.end) * 1e6)
