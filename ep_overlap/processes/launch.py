"""Starts the ranks of a command-line run as child processes, like torchrun on one machine.

Rank 0 owns the terminal: its output passes through, so a progress bar works. What the other ranks
print is kept, and shown when the run fails.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import IO, Final

from ep_overlap.processes.shaped_link import INTERFACE, ShapedLink

__all__ = ["LAUNCHED", "ShapedLink", "end_with_launcher", "launch"]

LAUNCHED: Final = "EP_OVERLAP_LAUNCHED"
"""Set in the environment of the children: the parent has said what is to be said once."""
_PR_SET_PDEATHSIG: Final = 1
"""Of ``prctl`` (linux/prctl.h)."""
REFUSED: Final = 2
"""Exit code for bad arguments: every rank has said the same line."""
NUM_OUTPUT_LINES: Final = 30
POLL_S: Final = 0.02
GRACE_S: Final = 1.0
"""How long the other ranks may go on after one failed, so that they can say why they fail too."""
TERMINATE_S: Final = 5.0
"""From SIGTERM to SIGKILL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rank:
    rank: int
    process: subprocess.Popen[bytes]
    output: IO[bytes] | None
    """None: it passes through."""


def launch(
    argv: Sequence[str],
    *,
    nproc: int,
    env: Mapping[str, str] | None = None,
    netns: ShapedLink | None = None,
) -> int:
    """Run ``argv`` once per rank and wait for all; 0, or the exit code of the first to fail.

    Children get RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT (a free
    one unless set) and OMP_NUM_THREADS=1 unless set. ``env`` is laid over this process's
    environment. With ``netns``, an entered shaped link, each rank runs in its own namespace.

    When one rank fails, the others are ended. A rank that a signal killed counts as 128 plus its
    number. Ctrl-C, SIGTERM and any other exception end all ranks before they go on.

    Raises:
        ValueError: ``nproc`` below 1 or other than the link's, or MASTER_PORT set and in use.
    """
    if nproc < 1:
        raise ValueError(f"nproc must be at least 1, got {nproc}")
    if netns is not None and netns.num_ranks != nproc:
        raise ValueError(f"the shaped link has {netns.num_ranks} ranks, and nproc is {nproc}")
    environment = _environment({**os.environ, **(env or {})}, nproc, netns)
    sys.stdout.flush()
    with ExitStack() as stack:
        stack.enter_context(_terminated_as_exit())
        ranks: list[_Rank] = []
        stack.callback(_end, ranks)
        for rank in range(nproc):
            output = stack.enter_context(tempfile.TemporaryFile()) if rank else None
            process = subprocess.Popen(
                argv if netns is None else netns.command(rank, argv),
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL if rank else None,
                stdout=output,
                stderr=subprocess.STDOUT if rank else None,
            )
            ranks.append(_Rank(rank=rank, process=process, output=output))
        code = _wait(ranks)
        if code != 0:
            failed = _failed(ranks)
            _end(ranks)
            # Rank 0 has printed the one line that every rank prints.
            if not (code == REFUSED and 0 in failed):
                _show_outputs(ranks, failed)
        return code


def _environment(
    environment: dict[str, str], nproc: int, netns: ShapedLink | None
) -> dict[str, str]:
    """The variables that all ranks share."""
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment[LAUNCHED] = "1"
    environment.update(WORLD_SIZE=str(nproc), LOCAL_WORLD_SIZE=str(nproc))
    if netns is None:
        environment["MASTER_ADDR"] = "127.0.0.1"
        environment["MASTER_PORT"] = str(_port(environment.get("MASTER_PORT")))
    else:
        # Nobody else listens in a fresh namespace: any port is free there.
        environment["MASTER_ADDR"] = netns.address(0)
        environment.setdefault("MASTER_PORT", "29500")
        environment["GLOO_SOCKET_IFNAME"] = INTERFACE
        # torch's store would warn that it cannot look up host names, which have no meaning there.
        environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return environment


def _port(given: str | None) -> int:
    """The given port if it can be listened on, else a free one."""
    if given is not None and not (given.isdecimal() and 0 < int(given) < 65536):
        raise ValueError(f"MASTER_PORT must be a port number from 1 to 65535, got {given!r}")
    with socket.socket() as probe:
        # As the ranks' store does: a port whose last connections are still closing is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", int(given or 0)))
        except OSError as error:
            raise ValueError(
                f"port in use: MASTER_PORT={given} on 127.0.0.1 ({error.strerror}); "
                "unset MASTER_PORT to take a free port, or set another"
            ) from error
        return probe.getsockname()[1]


@contextmanager
def _terminated_as_exit() -> Generator[None]:
    """Turn SIGTERM, and SIGHUP of a terminal that closes, into SystemExit, so that what was started
    is ended; main thread only."""

    def exit_now(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = (signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, exit_now) for number in signals}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def end_with_launcher() -> None:
    """In a rank that ``launch`` started: end when the launcher does, even if it is killed.

    Linux alone knows how (``PR_SET_PDEATHSIG``); elsewhere ranks of a killed launcher go on.
    """
    if LAUNCHED in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _failed(ranks: Sequence[_Rank]) -> dict[int, int]:
    """Exit codes, by rank, of those that have ended with another than 0."""
    codes = {rank.rank: rank.process.poll() for rank in ranks}
    return {rank: 128 - code if code < 0 else code for rank, code in codes.items() if code}


def _wait(ranks: Sequence[_Rank]) -> int:
    """Until all have ended, or the grace after the first failure is over."""
    code, deadline = 0, float("inf")
    while time.monotonic() < deadline:
        running = any(rank.process.poll() is None for rank in ranks)
        failed = _failed(ranks)
        if failed and code == 0:
            # Of several at once: a refusal is the cause, another rank's crash its consequence.
            code = REFUSED if REFUSED in failed.values() else next(iter(failed.values()))
            deadline = time.monotonic() + GRACE_S
        if not running:
            break
        time.sleep(POLL_S)
    return code


def _end(ranks: Sequence[_Rank]) -> None:
    """SIGTERM to those that run, SIGKILL to those that run still."""
    running = [rank.process for rank in ranks if rank.process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + TERMINATE_S
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    for process in running:
        if process.poll() is None:
            process.kill()
            process.wait()


def _show_outputs(ranks: Sequence[_Rank], failed: Mapping[int, int]) -> None:
    """How the ranks ended, and the last lines of those whose output was kept, on stderr."""
    for rank in ranks:
        ended = f"exit code {failed[rank.rank]}" if rank.rank in failed else "ended by the launcher"
        if rank.process.returncode == 0:
            ended = "finished"
        lines: list[str] = []
        if rank.output is not None:
            rank.output.seek(0)
            lines = rank.output.read().decode(errors="replace").splitlines()
        if len(lines) > NUM_OUTPUT_LINES:
            lines = [f"({len(lines) - NUM_OUTPUT_LINES} lines before)", *lines[-NUM_OUTPUT_LINES:]]
        for line in [*lines, f"[{ended}]"]:
            print(f"rank {rank.rank}: {line}", file=sys.stderr)
