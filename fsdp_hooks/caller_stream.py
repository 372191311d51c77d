"""The thread that calls the standard path, as a stream: where no schedule drives."""

from time import perf_counter_ns
from typing import final

import torch

from fsdp_hooks.streams import (
    UNRECORDED,
    Completion,
    CudaEvent,
    Event,
    Span,
    Stream,
    StreamObserver,
    nothing,
)


@final
class CallerStream:
    """The calling thread as a compute stream: the standard path, where no schedule drives.

    On CPU what the caller has issued is done, so its events are complete and its waits block. On
    CUDA it is whatever stream is current.
    """

    def __init__(self, device: torch.device) -> None:
        self.lane = "comp"
        self._on_cuda = device.type == "cuda"
        self._device = device
        self._observer: StreamObserver | None = None

    def record(self, word: str) -> Event:
        """An event behind all that the caller has issued so far."""
        if not self._on_cuda:
            return UNRECORDED
        return CudaEvent(word, self.lane, torch.cuda.current_stream(self._device).record_event())

    def wait(self, event: Event, *, word: str) -> None:
        """Let what the caller issues next wait for ``event``.

        Raises:
            BaseException: on CPU, what the awaited work raised.
        """
        if isinstance(event, CudaEvent):
            torch.cuda.current_stream(self._device).wait_event(event.cuda)
            return
        wait_ns = perf_counter_ns()
        blocks = isinstance(event, Completion) and not event.is_open()
        event.wait()
        if self._observer is not None:
            now_ns = perf_counter_ns()
            span = Span(self.lane, word, wait_ns, now_ns, now_ns)
            if blocks:
                span = span._replace(blocked_on=event.word, blocked_by_lane=event.lane)
            self._observer.on_span(span)

    def hold(self, stream: Stream) -> None:
        """Let what ``stream`` is given next wait for all that the caller has issued."""
        if self._on_cuda:
            stream.follow(self.record("caller"))

    def wait_stream(self, stream: Stream) -> None:
        """Let what the caller issues next wait for all that ``stream`` has been given.

        Raises:
            BaseException: on CPU, the failure that stopped the stream.
        """
        end = stream.run(nothing, word=f"end of {stream.lane}")
        self.wait(end, word=f"wait for {stream.lane}")

    def observe(self, observer: StreamObserver | None) -> None:
        """Tell ``observer`` of all that follows; None: nobody."""
        self._observer = observer
