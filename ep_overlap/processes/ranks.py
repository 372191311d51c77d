"""Warm ranks: child processes that import torch once and then run one function after another.

::

    parent   run(f) ---> f, store --->  rank 0   init world, f(*args), result ---\\
                         "        --->  rank 1   init world, f(*args), result ----+--> end ---> all
    all results in: every rank destroys its world; any failure: all ranks are killed

Each run has a world of its own over a new file store. A rank ends its world only when all ranks are
done: a peer may still be reading its last bytes. Ranks on which runs have left many threads behind
are replaced.
"""

import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Final, Self

GRACE_S: Final = 2.0
"""How long the other ranks may go on once one rank has failed."""
START_TIMEOUT_S: Final = 120.0
"""For starting the processes and importing torch; apart from the time of a run."""
NUM_OUTPUT_LINES: Final = 20
MAX_THREADS: Final = 128
"""Of a rank between two runs; one with more is replaced by a new one."""


class RankState(StrEnum):
    """How one rank ended a run that failed."""

    FINISHED = "finished"
    RAISED = "raised"
    HUNG = "was still running and was killed"
    DIED = "died"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """What is known of one rank after a failed run."""

    rank: int
    state: RankState
    detail: str
    """One line: the exception, the signal, how long it ran."""
    text: str
    """Traceback of the exception, stack at the time of killing, or last lines of output."""

    def __str__(self) -> str:
        head = f"rank {self.rank} {self.state}{': ' if self.detail else ''}{self.detail}"
        return "\n".join([head, *(f"    {line}" for line in self.text.splitlines())])


class RankError(RuntimeError):
    """A run failed on at least one rank. The message shows every rank."""

    def __init__(self, what: str, reports: tuple[RankReport, ...]) -> None:
        super().__init__("\n".join([what, *map(str, reports)]))
        self.reports = reports


# --- in the child process -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    function: Callable[..., object]
    args: tuple[object, ...]
    store_path: str
    timeout_s: float
    backend: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Returned:
    value: object


@dataclass(frozen=True, kw_only=True, slots=True)
class _Raised:
    summary: str
    text: str


def _serve(rank: int, num_ranks: int, pipe: Connection, output_path: str) -> None:
    """Main loop of a rank: a job in, a result out, until the parent closes the pipe."""
    output = os.open(output_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # The parent asks a hung rank for its stack with SIGUSR1; it works inside C code as well.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # Ctrl-C in the terminal reaches the whole process group; the parent decides what to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    pipe.send_bytes(b"ready")
    with contextlib.suppress(EOFError):
        while True:
            pipe.send_bytes(_run_job(pipe.recv_bytes(), rank, num_ranks))
            pipe.recv_bytes()  # All ranks are done, so nobody reads from this world any more.
            dist.destroy_process_group()


def _run_job(pickled: bytes, rank: int, num_ranks: int) -> bytes:
    import torch.distributed as dist

    try:
        job: _Job = pickle.loads(pickled)
        dist.init_process_group(
            job.backend,
            store=dist.FileStore(  # pyright: ignore[reportPrivateImportUsage]
                job.store_path, num_ranks
            ),
            rank=rank,
            world_size=num_ranks,
            # The parent's timeout comes first: it can show where every rank is.
            timeout=timedelta(seconds=2 * job.timeout_s),
        )
        return pickle.dumps(_Returned(value=job.function(*job.args)))
    except BaseException as error:  # noqa: BLE001 (reported whole, SystemExit too)
        summary = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
        return pickle.dumps(_Raised(summary=summary, text=traceback.format_exc()))
    finally:
        sys.stdout.flush()


# --- in the parent ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rank:
    rank: int
    process: SpawnProcess
    pipe: Connection
    output_path: Path

    def output_since(self, start: int) -> str:
        return self.output_path.read_bytes()[start:].decode(errors="replace")

    def num_threads(self) -> int:
        """Of its process; 0 where the system does not tell."""
        try:
            return len(os.listdir(f"/proc/{self.process.pid}/task"))
        except OSError:
            return 0

    def stack(self) -> str:
        """The Python stacks of all its threads, written by its fault handler on request."""
        pid = self.process.pid
        assert pid is not None, "a started process has an id"
        start = self.output_path.stat().st_size
        try:
            os.kill(pid, signal.SIGUSR1)
        except ProcessLookupError:
            return ""
        deadline = time.monotonic() + 1.0
        while not (text := self.output_since(start)) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.02)  # The handler writes thread by thread.
        return self.output_since(start) or text


class RankPool:
    """``num_ranks`` warm ranks on this machine, started on the first run.

    ``backend``: as of ``init_process_group``; ``cpu:gloo,cuda:nccl`` takes a GPU for each rank.
    Use it as a context manager, or call ``close``. Not for several threads at once.
    """

    def __init__(self, num_ranks: int, *, timeout_s: float = 60.0, backend: str = "gloo") -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
        self.num_ranks = num_ranks
        self.timeout_s = timeout_s
        self.backend = backend
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        self._ranks: list[_Rank] = []
        self._num_stores = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes. The pool cannot run again."""
        self._kill()
        self._directory.cleanup()

    def run[ResultT](
        self, function: Callable[..., ResultT], *args: object, timeout_s: float | None = None
    ) -> list[ResultT]:
        """Call ``function(*args)`` on every rank in a fresh world; results by rank.

        ``function`` is found by name in the child: it must be defined at a module's top level.
        Arguments and results are pickled. ``timeout_s`` replaces the pool's for this run.

        Raises:
            ValueError: ``function`` or an argument cannot be pickled.
            RankError: a rank raised, died, or was not done in time. All ranks are then killed, and
                the next run starts new ones.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        self._num_stores += 1
        job = _Job(
            function=function,
            args=args,
            store_path=f"{self._directory.name}/store{self._num_stores}",
            timeout_s=limit_s,
            backend=self.backend,
        )
        try:
            pickled = pickle.dumps(job)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"cannot send {function!r} to the ranks: {error}. Define the function at a "
                "module's top level and pass arguments that pickle."
            ) from error
        if not self._ranks:
            self._start()
        what = f"{function.__module__}.{function.__qualname__} on {self.num_ranks} ranks"
        answers = self._exchange(what, pickled, limit_s)
        for rank in self._ranks:
            rank.pipe.send_bytes(b"end")
        # A group that something still refers to keeps its threads, and gloo's poll all the time.
        if any(rank.num_threads() > MAX_THREADS for rank in self._ranks):
            self._kill()
        return [answer.value for answer in answers]  # pyright: ignore[reportReturnType]

    def _exchange(self, what: str, message: bytes | None, limit_s: float) -> list[_Returned]:
        """Send the message to all, collect one answer of each, raise if any rank failed."""
        marks = {rank.rank: rank.output_path.stat().st_size for rank in self._ranks}
        answers: dict[int, _Returned | _Raised | None] = {}
        started = time.monotonic()
        try:
            for rank in self._ranks:
                # A rank that has died since the last run is found when its answer is read.
                with contextlib.suppress(BrokenPipeError):
                    if message is not None:
                        rank.pipe.send_bytes(message)
            self._collect(answers, started + limit_s)
            if all(isinstance(answers.get(rank.rank), _Returned) for rank in self._ranks):
                return [a for _, a in sorted(answers.items()) if isinstance(a, _Returned)]
            elapsed_s = time.monotonic() - started
            reports = tuple(
                _report(rank, answers, marks[rank.rank], elapsed_s) for rank in self._ranks
            )
        except BaseException:  # Ctrl-C or a test's timeout: the ranks are in an unknown state.
            self._kill()
            raise
        self._kill()
        failed = sum(report.state is not RankState.FINISHED for report in reports)
        raise RankError(
            f"{what}: {failed} of {self.num_ranks} did not finish (limit {limit_s:g} s)", reports
        )

    def _collect(self, answers: dict[int, _Returned | _Raised | None], deadline: float) -> None:
        """Fill ``answers`` until all ranks have one (None: it died) or the time is up."""
        waiting = {rank.pipe: rank for rank in self._ranks}
        while waiting and (remaining_s := deadline - time.monotonic()) > 0:
            # A dead rank's pipe is readable too: it reads as closed.
            for pipe in connection.wait(list(waiting), remaining_s):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    data = pipe.recv_bytes()
                    answer = _Returned(value=None) if data == b"ready" else pickle.loads(data)
                except (EOFError, ConnectionResetError):
                    answer = None
                answers[rank.rank] = answer
                if not isinstance(answer, _Returned):
                    deadline = min(deadline, time.monotonic() + GRACE_S)

    def _start(self) -> None:
        spawn = get_context("spawn")
        for rank in range(self.num_ranks):
            ours, theirs = spawn.Pipe()
            output_path = Path(self._directory.name, f"output{self._num_stores}-{rank}")
            output_path.touch()
            process = spawn.Process(
                target=_serve,
                args=(rank, self.num_ranks, theirs, str(output_path)),
                daemon=True,
                name=f"rank {rank}",
            )
            process.start()
            theirs.close()
            self._ranks.append(
                _Rank(rank=rank, process=process, pipe=ours, output_path=output_path)
            )
        self._exchange("starting torch", None, START_TIMEOUT_S)

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.process.close()
            rank.pipe.close()
        self._ranks.clear()


def _report(
    rank: _Rank,
    answers: dict[int, _Returned | _Raised | None],
    output_mark: int,
    elapsed_s: float,
) -> RankReport:
    """Look at one rank after a failure; a running one still runs."""
    if rank.rank not in answers:
        state, text = RankState.HUNG, rank.stack()
        detail = f"after {elapsed_s:.1f} s; its stack:"
    else:
        match answers[rank.rank]:
            case _Returned():
                state, detail, text = RankState.FINISHED, "", ""
            case _Raised(summary=detail, text=text):
                state = RankState.RAISED
            case None:
                rank.process.join(1.0)
                state, detail = RankState.DIED, _exit_words(rank.process.exitcode)
                lines = rank.output_since(output_mark).splitlines()[-NUM_OUTPUT_LINES:]
                text = "\n".join(lines)
    return RankReport(rank=rank.rank, state=state, detail=detail, text=text)


def _exit_words(exitcode: int | None) -> str:
    """``killed by SIGABRT`` or ``exit code 3``."""
    if exitcode is None:
        return "it closed its pipe and did not end"
    if exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return f"exit code {exitcode}"
