"""A network of this machine's own for the ranks, with each rank's outgoing link shaped by ``tc``.

::

    namespace of rank 0              switch namespace              namespace of rank 1
    10.77.0.1 link0 --tbf-->  port0 [ bridge ] port1  <--tbf-- link0 10.77.0.2
    lo                                                             lo

Everything, the bridge too, lives in network namespaces: the host's addresses, routes and firewall
are not touched, and deleting the namespaces deletes it all. Needs root and iproute2. The names
carry the process id, so several networks can exist at once, and one whose process is gone is stale.
"""

import contextlib
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from ep_overlap.links.speed import parse_rate

INTERFACE: Final = "link0"
"""The name of the shaped interface inside each rank's namespace."""

_MTU: Final = 9000
"""Jumbo frames: headers then cost under 1% of the rate."""
_BURST_S: Final = 1e-3
_MIN_BURST_BYTES: Final = 128 * 1024
"""Twice the largest segment that TCP hands down in one piece."""
_QUEUE_MS: Final = 100
_INSTEAD: Final = "use a paced link instead, such as --link paced:800mbit"
_NAMESPACE: Final = re.compile(r"epo(\d+)-[0-9a-f]+(?:r\d+|sw)")
_NAMESPACES: Final = Path("/run/netns")


class ShapedLink:
    """One network namespace per rank on a bridge, each rank's egress limited to ``rate``.

    A context manager: built on entering, torn down on leaving, whatever happened in between.
    Entering also removes what a killed process left behind. ``latency_us`` delays each packet on
    its way out, and needs the kernel's netem queue.

    Raises (on entering):
        ValueError: no root, no ``ip`` or ``tc``, or a kernel that refuses; says which and what to
            use instead. (On construction: a wrong rate or number of ranks.)
    """

    def __init__(self, *, num_ranks: int, rate: str = "800mbit", latency_us: int = 0) -> None:
        if not 1 <= num_ranks <= 250:
            raise ValueError(f"num_ranks must be 1 to 250, got {num_ranks}")
        if latency_us < 0:
            raise ValueError(f"latency_us must not be negative, got {latency_us}")
        self.num_ranks = num_ranks
        self.bytes_per_s = parse_rate(rate)
        self.latency_us = latency_us
        self._prefix = f"epo{os.getpid()}-{secrets.token_hex(2)}"
        self._open = False

    def address(self, rank: int) -> str:
        """IPv4 address of a rank, inside the network only."""
        return f"10.77.0.{rank + 1}"

    def namespace(self, rank: int) -> str:
        """Name of a rank's network namespace."""
        return f"{self._prefix}r{rank}"

    def command(self, rank: int, argv: Sequence[str]) -> list[str]:
        """``argv`` as a command line that runs in the rank's namespace."""
        if not self._open:
            raise RuntimeError("the shaped link is not built: enter it with `with` first")
        return ["ip", "netns", "exec", self.namespace(rank), *argv]

    def __enter__(self) -> Self:
        if self._open:
            raise RuntimeError("this shaped link is entered already")
        _check_permitted()
        _remove_stale()
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        self._open = True
        return self

    def __exit__(self, *exception: object) -> None:
        self._open = False
        self._remove()

    def _build(self) -> None:
        switch = f"{self._prefix}sw"
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge0", "mtu", str(_MTU), "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge0", "up")
        for rank in range(self.num_ranks):
            own, port = self.namespace(rank), f"port{rank}"
            _ip("netns", "add", own)
            _ip(
                *("-n", switch, "link", "add", port, "mtu", str(_MTU), "type", "veth"),
                *("peer", "name", INTERFACE, "mtu", str(_MTU), "netns", own),
            )
            _ip("-n", switch, "link", "set", port, "master", "bridge0", "up")
            _ip("-n", own, "link", "set", "lo", "up")
            _ip("-n", own, "addr", "add", f"{self.address(rank)}/24", "dev", INTERFACE)
            _ip("-n", own, "link", "set", INTERFACE, "up")
            self._shape(own)

    def _shape(self, namespace: str) -> None:
        burst_bytes = max(_MIN_BURST_BYTES, round(self.bytes_per_s * _BURST_S))
        on_link = ("-n", namespace, "qdisc", "add", "dev", INTERFACE)
        _tc(
            *(*on_link, "root", "handle", "1:", "tbf"),
            *("rate", f"{round(self.bytes_per_s * 8)}bit"),
            *("burst", f"{burst_bytes}b", "latency", f"{_QUEUE_MS}ms"),
        )
        if self.latency_us:
            _tc(*on_link, "parent", "1:1", "netem", "delay", f"{self.latency_us}us")

    def _remove(self) -> None:
        for namespace in _namespaces():
            if namespace.startswith((f"{self._prefix}r", f"{self._prefix}sw")):
                _ip("netns", "delete", namespace)


def _namespaces() -> list[str]:
    return sorted(entry.name for entry in _NAMESPACES.iterdir()) if _NAMESPACES.is_dir() else []


def _remove_stale() -> None:
    """Delete the namespaces of processes that are gone."""
    for namespace in _namespaces():
        match = _NAMESPACE.fullmatch(namespace)
        if match and not Path("/proc", match[1]).exists():
            # Another process that starts now may remove it first.
            with contextlib.suppress(ValueError):
                _ip("netns", "delete", namespace)


def _check_permitted() -> None:
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise ValueError(
            f"a shaped link needs iproute2; not installed: {', '.join(missing)}; {_INSTEAD}"
        )
    if os.geteuid() != 0:
        raise ValueError(f"a shaped link needs root (network namespaces and tc); {_INSTEAD}")


def _ip(*args: str) -> None:
    _call("ip", *args)


def _tc(*args: str) -> None:
    _call("tc", *args)


def _call(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        reason = " ".join(result.stderr.split()) or f"exit code {result.returncode}"
        raise ValueError(
            f"this machine refuses a shaped link: `{' '.join(command)}`: {reason}; {_INSTEAD}"
        )
