"""``ep-overlap``: one function a command.

Exits 0; 2 for arguments or combinations that cannot work (one line on stderr); 1 for a run that
failed (its traceback, then one line), whose result could not be written (one line), or whose parity
did not hold (its report says so).
"""

import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from ep_overlap.commands.argument_checks import problems, remarks
from ep_overlap.commands.argument_parser import parse
from ep_overlap.commands.arguments import (
    Arguments,
    BenchArguments,
    DoctorArguments,
    PlanArguments,
    TimelineArguments,
    TrainArguments,
)
from ep_overlap.processes.launch import LAUNCHED, end_with_launcher
from ep_overlap.report.whole_file import CannotWriteError, write_whole

EXIT_FAILED: Final = 1
EXIT_REFUSED: Final = 2
EXIT_INTERRUPTED: Final = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; arguments that do not parse exit at once."""
    end_with_launcher()
    command, args = parse(argv)
    for problem in problems(args, os.environ):
        return _refuse(command, problem)
    if LAUNCHED not in os.environ:  # the command that started these ranks has said so
        for remark in remarks(args, os.environ):
            _say(command, f"warning: {remark}")
    try:
        status = _run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader (`| head`) has seen enough; Python must not flush to it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ValueError as error:
        return _refuse(command, str(error))
    except CannotWriteError as error:
        _say(command, str(error))
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 (the process ends here, with all that is known)
        traceback.print_exception(error)
        _say(command, f"failed: {type(error).__name__}: {error}")
        return EXIT_FAILED


def _say(command: str, message: str) -> None:
    print(f"ep-overlap {command}: {message}", file=sys.stderr)


def _refuse(command: str, problem: str) -> int:
    _say(command, f"error: {problem.partition('\n')[0]}")
    return EXIT_REFUSED


def _run(args: Arguments) -> int:
    # Each command imports what it needs: `plan` runs where torch is missing.
    match args:
        case TrainArguments():
            return _train(args)
        case PlanArguments():
            return _plan(args)
        case TimelineArguments():
            return _timeline(args)
        case BenchArguments():
            return _bench(args)
        case DoctorArguments():
            return _doctor(args)


def _train(args: TrainArguments) -> int:
    from ep_overlap.commands.train import run

    return run(args)


def _bench(args: BenchArguments) -> int:
    from ep_overlap.commands.bench import run

    return run(args)


def _plan(args: PlanArguments) -> int:
    from ep_overlap.commands.plan_arguments import plan_of
    from ep_overlap.plan.check import PlanError
    from ep_overlap.plan.grid import grid
    from ep_overlap.report.plan_text import as_json, proof

    try:
        plan = plan_of(args)
    except PlanError as error:
        print(error)  # its grid shows the place; stderr gets the first line
        raise
    print(proof(plan) if args.check else grid(plan), end="")
    _write_json(args.json, as_json(plan))
    return 0


def _timeline(args: TimelineArguments) -> int:
    from ep_overlap.report.timeline import save
    from ep_overlap.report.trace_file import exposed_us, read_trace

    trace = read_trace(args.trace_file)
    spans = trace.window(args.step, args.start_ms, args.end_ms)
    save(trace, spans, args.output)
    waited_ms = {str(rank): waited_us / 1e3 for rank, waited_us in exposed_us(spans).items()}
    print(f"{args.output}: step {spans[0].step}, {len(spans)} spans")
    _write_json(
        args.json,
        {
            "step": spans[0].step,
            "num_spans": len(spans),
            "start_ms": min(span.start_us for span in spans) / 1e3,
            "end_ms": max(span.end_us for span in spans) / 1e3,
            "exposed_ms": waited_ms,
        },
    )
    return 0


def _doctor(args: DoctorArguments) -> int:
    from rich.console import Console

    from ep_overlap.report.doctor import as_json, examine, report

    machine = examine(os.environ)
    Console().print(report(machine))
    _write_json(args.json, as_json(machine))
    return 0


def _write_json(path: Path | None, result: Mapping[str, object]) -> None:
    if path is not None:
        write_whole(path, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
