"""How fast the links of an emulated world are, and its text on a command line. Imports no torch."""

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from ep_overlap.links.speed import parse_rate

PER_SECOND: Final = {"us": 1e6, "ms": 1e3, "s": 1.0}
"""How many of each unit are a second."""
EXAMPLE: Final = "a2a=50GBps,dp=100GBps,latency=20us"

_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")


class LinkRole(StrEnum):
    """What a link carries; each role has a rate of its own."""

    A2A = "a2a"
    """Exchanges: every all-to-all."""
    DP = "dp"
    """Every other collective."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulatedLinks:
    """What a collective costs beside its local copies: ``latency_s + bytes / rate`` of its role.

    The defaults cost nothing. Every group has links of its own: two collectives at a time on two
    groups share no bandwidth.
    """

    a2a_bytes_per_s: float = math.inf
    dp_bytes_per_s: float = math.inf
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        for name, rate in (("a2a", self.a2a_bytes_per_s), ("dp", self.dp_bytes_per_s)):
            if not rate > 0:
                raise ValueError(f"{name}_bytes_per_s must be positive, got {rate}")
        if not 0 <= self.latency_s < math.inf:
            raise ValueError(f"latency_s must be 0 or more, and finite; got {self.latency_s}")

    def duration_ns(self, role: LinkRole, wire_bytes: int) -> int:
        """How long a collective is held after its local copies."""
        rate = self.a2a_bytes_per_s if role is LinkRole.A2A else self.dp_bytes_per_s
        return round((self.latency_s + wire_bytes / rate) * 1e9)

    def describe(self, num_ranks: int) -> str:
        """For reports: ``emulated: 8 ranks, a2a 50 GB/s, dp 100 GB/s, latency 20 us``."""
        if self == EmulatedLinks():
            return f"emulated: {num_ranks} ranks, no link time"
        a2a, dp = _rate_text(self.a2a_bytes_per_s), _rate_text(self.dp_bytes_per_s)
        latency_us = f"{self.latency_s * 1e6:.10g}"  # 20e-6 * 1e6 is not quite 20
        return f"emulated: {num_ranks} ranks, a2a {a2a}, dp {dp}, latency {latency_us} us"


def _rate_text(bytes_per_s: float) -> str:
    return "unlimited" if math.isinf(bytes_per_s) else f"{bytes_per_s / 1e9:.10g} GB/s"


def parse_emulated_links(text: str) -> EmulatedLinks:
    """The links of ``a2a=RATE,dp=RATE[,latency=TIME]``, in any order; ``--emulate``.

    Rates as ``parse_rate`` takes them; a time is a number and ``us``, ``ms`` or ``s``.

    Raises:
        ValueError: an item that is no ``name=value``, an unknown or repeated name, a missing rate,
            or a value that is no rate or no time; one line.
    """
    values: dict[str, float] = {}
    for item in text.split(","):
        name, equals, value = item.partition("=")
        if name not in (*LinkRole, "latency") or not equals:
            raise _error(f"expected a2a=RATE, dp=RATE or latency=TIME, got {item!r}")
        if name in values:
            raise _error(f"expected {name} once, got it twice in {text!r}")
        try:
            values[name] = _seconds(value) if name == "latency" else parse_rate(value)
        except ValueError as error:
            raise _error(f"{name}: {error}") from None
    if missing := [role for role in LinkRole if role not in values]:
        raise _error(f"expected a rate for a2a and for dp, got none for {' and '.join(missing)}")
    return EmulatedLinks(
        a2a_bytes_per_s=values[LinkRole.A2A],
        dp_bytes_per_s=values[LinkRole.DP],
        latency_s=values.get("latency", 0.0),
    )


def _seconds(text: str) -> float:
    match = _DURATION.fullmatch(text)
    if match is None:
        units = ", ".join(PER_SECOND)
        raise ValueError(f"expected a number and a unit of {units}, such as 20us; got {text!r}")
    return float(match[1]) / PER_SECOND[match[2]]


def _error(problem: str) -> ValueError:
    return ValueError(f"--emulate: {problem}; write it like {EXAMPLE}")
