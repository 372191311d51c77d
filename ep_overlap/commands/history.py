"""The run so far: one line while it goes on, one result when it is over."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from ep_overlap.commands.parity import Difference
from ep_overlap.run.trace import HiddenShare
from fsdp_hooks.lifecycle import ShardingStats


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """What one iteration brought."""

    loss: float
    """Mean over microbatches and ranks."""
    grad_norm: float
    """Of all parameters, before the optimizer's step."""
    step_time_s: float
    """Of this rank, forward and backward of all microbatches."""
    share: HiddenShare | None


@final
class History:
    """The iterations so far, on this rank.

    Args:
        step_tokens: tokens of a step, over all ranks.
    """

    def __init__(self, *, step_tokens: int) -> None:
        self._iterations: list[Iteration] = []
        self._step_tokens = step_tokens

    def add(self, iteration: Iteration) -> None:
        """Note one more iteration."""
        self._iterations.append(iteration)

    def line(self) -> str:
        """The last iteration in a few words."""
        last = self._iterations[-1]
        hidden = None if last.share is None else last.share.a2a.hidden
        text = f"loss {last.loss:.3f}  {self._step_tokens / last.step_time_s:,.0f} tokens/s"
        return text if hidden is None else f"{text}  A2A hidden {hidden:.0%}"

    def result(self, stats: ShardingStats, difference: Difference | None) -> dict[str, Any]:
        """The whole run, as JSON has it."""
        steps = self._iterations
        shares = [step.share for step in steps if step.share is not None]
        steady = steps[1:] or steps  # the first step warms up allocators and sockets
        return {
            "losses": [step.loss for step in steps],
            "grad_norms": [step.grad_norm for step in steps],
            "step_time_s": median(step.step_time_s for step in steady) if steady else None,
            "comm_s": median(share.comm_s for share in shares) if shares else None,
            "hidden_share": HiddenShare.total(shares).as_json() if shares else None,
            "num_all_gathers": stats.num_all_gathers,
            "num_reduce_scatters": stats.num_reduce_scatters,
            "peak_unsharded_bytes": stats.peak_unsharded_bytes,
            "hook_misses": stats.hook_misses,
            "parity": None if difference is None else str(difference.parity),
            "parity_difference": None if difference is None else difference.as_json(),
        }


@final
class Bar:
    """The progress bar of rank 0; silent on the others."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def advance(self, text: str) -> None:
        """One more iteration is done."""
        self._progress.update(self._task, advance=1, status=text)


@contextmanager
def progress_bar(total: int, *, done: int, quiet: bool) -> Generator[Bar]:
    """A progress bar on stderr; ``done`` before it starts; ``quiet`` on all ranks but the first."""
    progress = Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[status]}"),
        console=Console(stderr=True, quiet=quiet),
    )
    with progress:
        yield Bar(
            progress, progress.add_task("train", total=total, completed=done, status="starting")
        )


def report(result: Mapping[str, Any]) -> None:
    """Print a result in a few lines."""
    losses = result["losses"]
    if not losses:
        print("no step was left to do")
        return
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps")
    print(f"step {result['step_time_s'] * 1e3:.1f} ms (median)", end="")
    shares = result["hidden_share"] or {}
    shown = [f"{kind} {share:.0%}" for kind, share in shares.items() if share is not None]
    print(f", hidden: {', '.join(shown)}" if shown else "")
    if result["parity"] is not None:
        found = result["parity_difference"]
        where = ""
        if found is not None:
            where = ": {tensor} on rank {rank} in step {step} {how}".format_map(found)
        print(f"parity with the step without overlap: {result['parity']}{where}")
