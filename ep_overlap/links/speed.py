"""How fast a link is, as a number and as the text of a command line. Imports no torch."""

import re
import threading
import time
from dataclasses import dataclass
from typing import Final

BYTES_PER_S: Final = {"mbit": 1e6 / 8, "gbit": 1e9 / 8, "MBps": 1e6, "GBps": 1e9}
"""Bytes per second of one of each unit. Decimal, as networks count."""

_RATE: Final = re.compile(r"(\d+(?:\.\d+)?)(mbit|gbit|MBps|GBps)")


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSpeed:
    """What a paced link costs: ``latency_s + bytes / bytes_per_s`` for each collective."""

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s must be positive, got {self.bytes_per_s}")
        if not self.latency_s >= 0:
            raise ValueError(f"latency_s must not be negative, got {self.latency_s}")


def parse_rate(text: str) -> float:
    """Bytes per second of a rate such as ``800mbit``, ``1.5gbit``, ``100MBps`` or ``2GBps``.

    Raises:
        ValueError: another unit, no unit, or a rate of zero.
    """
    match = _RATE.fullmatch(text)
    rate = float(match[1]) * BYTES_PER_S[match[2]] if match else 0.0
    if rate <= 0:
        raise ValueError(
            f"not a link rate: {text!r}; expected a positive number and a unit of "
            f"{', '.join(BYTES_PER_S)}, such as 800mbit"
        )
    return rate


class Wire:
    """A link of one rank. Transfers queue: each starts when the one before has left.

    Groups that share a wire share its bandwidth; a group that is given none has one of its own.
    The time is booked ahead, so no lock is held while a thread sleeps.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_at_ns = 0

    def carry(self, wire_bytes: int, speed: LinkSpeed) -> None:
        """Sleep until a transfer that is ready now has arrived."""
        with self._lock:
            start_ns = max(self._free_at_ns, time.perf_counter_ns())
            self._free_at_ns = start_ns + round(wire_bytes / speed.bytes_per_s * 1e9)
            arrival_ns = self._free_at_ns + round(speed.latency_s * 1e9)
        while (remaining_ns := arrival_ns - time.perf_counter_ns()) > 0:
            time.sleep(remaining_ns * 1e-9)
