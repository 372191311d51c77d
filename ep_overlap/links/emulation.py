"""What every collective of an emulated world goes through: its price, its device, the log."""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from ep_overlap.links.emulated_run import (
    Collective,
    CudaDevice,
    CudaLane,
    DeviceTimes,
    EmulatedWork,
    run_on_cpu,
)
from ep_overlap.links.emulated_speed import EmulatedLinks, LinkRole
from ep_overlap.links.times import CollectiveKind, CollectiveSpan


@final
class Emulation:
    """What the groups of one emulated world share: links, the GPU's hold kernel, a log.

    ``timed``: keep a span of every collective (on CUDA, by two timing events each).
    """

    def __init__(self, links: EmulatedLinks | None = None, *, timed: bool = False) -> None:
        self.links = links or EmulatedLinks()
        self.timed = timed
        self._devices: dict[torch.device, CudaDevice] = {}
        self._spans: list[CollectiveSpan] = []
        self._on_device: list[tuple[int, CudaDevice, DeviceTimes]] = []

    def device(self, device: torch.device) -> CudaDevice:
        """What groups share on a GPU; loads the hold kernel when first asked."""
        if device not in self._devices:
            self._devices[device] = CudaDevice(device)
        return self._devices[device]

    def log(self, span: CollectiveSpan) -> None:
        """Add a span whose times are known."""
        self._spans.append(span)

    def log_on_device(self, span: CollectiveSpan, device: CudaDevice, times: DeviceTimes) -> None:
        """Add a span whose times the GPU will know."""
        self._on_device.append((len(self._spans), device, times))
        self._spans.append(span)

    def spans(self) -> list[CollectiveSpan]:
        """The collectives since the last ``clear``, in the order of issue. The host waits for
        those on CUDA to end."""
        for index, device, times in self._on_device:
            enter_ns, exit_ns = device.host_ns(times)
            self._spans[index] = replace(self._spans[index], enter_ns=enter_ns, exit_ns=exit_ns)
        self._on_device.clear()
        return list(self._spans)

    def clear(self) -> None:
        """Forget all spans, before a stretch that is to be measured; waits for the GPU."""
        self._spans.clear()
        self._on_device.clear()
        for device in self._devices.values():
            device.restart_clock()


@final
class GroupRunner:
    """Runs one group's collectives, in the order of the calls."""

    def __init__(self, emulation: Emulation, ranks: Sequence[int], rank: int) -> None:
        self._emulation = emulation
        self._ranks = tuple(ranks)
        self._rank = rank
        self._lane: CudaLane | None = None
        self._coalesced: list[Tensor] | None = None
        """Outputs since ``start_coalescing``; None outside."""
        self._sequence = 0
        self._entered = threading.Lock()

    def run(self, item: Collective, group: str) -> EmulatedWork:
        """Copy, hold, log. Errors get the collective, and the group's name, as a note.

        Raises:
            RuntimeError: another thread is inside.
            ValueError: tensors of a second GPU.
        """
        if not self._entered.acquire(blocking=False):
            raise RuntimeError(
                f"emulated group {group!r} is used by two threads at once: "
                f"{threading.current_thread().name!r} called {item.op} while another was inside; "
                "give each stream a group of its own (torch.distributed.new_group)"
            )
        try:
            self._sequence += 1
            if self._coalesced is not None:
                self._coalesced.extend(item.outputs)
            tensors = item.outputs or item.inputs
            if tensors and tensors[0].is_cuda:
                return self._on_cuda(item, group, tensors[0].device)
            enter_ns = time.perf_counter_ns()
            work = run_on_cpu(item, self._hold_ns(item))
            if self._emulation.timed:
                self._emulation.log(self._span(item, group, enter_ns, time.perf_counter_ns()))
            return work
        except Exception as error:
            error.add_note(
                f"in {item.op}, collective {self._sequence - 1} of group {group!r}, rank "
                f"{self._ranks[self._rank]} of {self._emulation.links.describe(len(self._ranks))}"
            )
            raise
        finally:
            self._entered.release()

    def start_coalescing(self) -> None:
        """Gather the outputs of what follows."""
        self._coalesced = []

    def end_coalescing(self) -> EmulatedWork:
        """One work for all since ``start_coalescing``."""
        outputs, self._coalesced = self._coalesced or [], None
        return EmulatedWork(outputs) if self._lane is None else self._lane.together(outputs)

    def _hold_ns(self, item: Collective) -> int:
        if len(self._ranks) == 1:  # no wire to pay for
            return 0
        role = LinkRole.A2A if item.kind is CollectiveKind.A2A else LinkRole.DP
        return self._emulation.links.duration_ns(role, item.wire_bytes)

    def _on_cuda(self, item: Collective, group: str, device: torch.device) -> EmulatedWork:
        shared = self._emulation.device(device)
        if self._lane is None:
            self._lane = CudaLane(device, shared.hold)
        if self._lane.device != device:
            raise ValueError(
                f"expected tensors on {self._lane.device}, where this group's first were, got "
                f"{device}; one emulated rank runs on one GPU"
            )
        if not self._emulation.timed:
            return self._lane.run(item, self._hold_ns(item), None)
        times = DeviceTimes(
            torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        )
        work = self._lane.run(item, self._hold_ns(item), times)
        self._emulation.log_on_device(self._span(item, group, 0, 0), shared, times)
        return work

    def _span(self, item: Collective, group: str, enter_ns: int, exit_ns: int) -> CollectiveSpan:
        return CollectiveSpan(
            kind=item.kind,
            op=item.op,
            group=group,
            ranks=self._ranks,
            sequence=self._sequence - 1,
            thread_name=threading.current_thread().name,
            wire_bytes=item.wire_bytes,
            enter_ns=enter_ns,
            exit_ns=exit_ns,
        )
