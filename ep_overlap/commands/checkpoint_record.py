"""What a checkpoint of ``ep-overlap train`` says of itself, and what it must agree on. No torch.

The record is the last file written, so a directory with a record was whole; the record has the
sizes of the other files, by which one that was lost or cut short since is found.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

from ep_overlap.commands.arguments import ModelFlags, TrainArguments

RECORD_FILE: Final = "ep_overlap.json"
_FILES: Final = "files"
"""Entry of the record file: the other files' sizes, by name."""


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """How far a run had come, and what it was a run of."""

    iteration: int
    """Optimizer steps done."""
    num_sequences: int
    """Sequences that all ranks together have seen: the position in the data."""
    seed: int
    lr: float
    optimizer: str
    model: str
    sizes: Mapping[str, int | None]
    """By field name of ``ModelFlags``, and ``seq_length``; None where there is no such part."""

    @classmethod
    def of(cls, args: TrainArguments, *, iteration: int, num_sequences: int) -> Self:
        """The record of a run of these arguments."""
        return cls(
            iteration=iteration,
            num_sequences=num_sequences,
            seed=args.seed,
            lr=args.lr,
            optimizer=str(args.optimizer),
            model=str(args.model),
            sizes=_sizes(args),
        )

    @classmethod
    def read(cls, directory: Path) -> Self:
        """The record in ``directory``, whose other files are there.

        Raises:
            ValueError: there is none, or it or another file is damaged.
        """
        path = directory / RECORD_FILE
        if not directory.is_dir():
            raise ValueError(f"{directory}: {_no_directory(directory)}")
        if not path.is_file():
            raise ValueError(
                f"{directory}: no checkpoint; expected {RECORD_FILE} in it, the file that --save "
                "writes last"
            )
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))
            sizes_bytes = dict[str, int](entries.pop(_FILES))
            record = cls(**entries)
        except (AttributeError, LookupError, OSError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: damaged, or of another version ({error})") from error
        for name, size_bytes in sizes_bytes.items():
            file = directory / name
            found = f"{file.stat().st_size} bytes" if file.is_file() else "no such file"
            if found != f"{size_bytes} bytes":
                raise ValueError(
                    f"{directory}: {name}: expected {size_bytes} bytes, got {found}; the "
                    "checkpoint is damaged, load another"
                )
        return record

    def write(self, directory: Path) -> None:
        """Write the record into ``directory``, beside all other files."""
        sizes_bytes = {path.name: path.stat().st_size for path in sorted(directory.iterdir())}
        text = json.dumps(asdict(self) | {_FILES: sizes_bytes}, indent=2) + "\n"
        (directory / RECORD_FILE).write_text(text, encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run begins, in steps and in data."""

    iteration: int
    """Steps done before."""
    num_sequences: int
    """Sequences seen before, over all ranks."""
    global_batch: int
    """Sequences of a step from now on."""

    @classmethod
    def of(cls, args: TrainArguments, num_ranks: int) -> Self:
        """After the checkpoint that ``--load`` names, or at the beginning."""
        record = None if args.load is None else CheckpointRecord.read(args.load)
        return cls(
            iteration=0 if record is None else record.iteration,
            num_sequences=0 if record is None else record.num_sequences,
            global_batch=_global_batch(args, num_ranks),
        )

    def batch_of(self, iteration: int) -> int:
        """Which batch of the data, counted in batches of this run, an iteration takes."""
        return self.num_sequences // self.global_batch + iteration - self.iteration

    def after(self, args: TrainArguments) -> CheckpointRecord:
        """The record once the run is done."""
        iteration = max(args.train_iters, self.iteration)
        num_sequences = self.num_sequences + (iteration - self.iteration) * self.global_batch
        return CheckpointRecord.of(args, iteration=iteration, num_sequences=num_sequences)


def beside(directory: Path, role: str) -> Path:
    """Where ``--save`` keeps what is ``incomplete`` or ``previous`` until all is in place."""
    return directory.with_name(f"{directory.name}.{role}")


def _no_directory(path: Path) -> str:
    """What ``path`` is instead, and how to go on where ``--save`` broke off between its renames."""
    if path.exists():
        return "expected a directory, got a file"
    for role in ("incomplete", "previous"):  # the newer one first
        if (beside(path, role) / RECORD_FILE).is_file():
            return (
                "there is no such directory: a --save broke off as it replaced it, and "
                f"{beside(path, role)} is whole; rename that to {path}"
            )
    return "there is no such directory"


def parent_problem(path: Path) -> str | None:
    """Why nothing can be made at ``path``, if so."""
    parent = path.parent
    if parent.is_dir():
        return None
    return f"{parent} is a file" if parent.exists() else f"there is no directory {parent}"


def unwritable(directory: Path) -> str | None:
    """Tried out: permissions do not tell of read-only mounts, quotas, or what root may do."""
    try:
        tempfile.TemporaryDirectory(dir=directory).cleanup()
    except OSError as error:
        return f"no directory can be made in {directory} ({error.strerror})"
    return None


def save_problems(path: Path) -> Iterator[str]:
    """Why ``--save`` cannot write there; it replaces an earlier checkpoint, and nothing else."""
    target = path.resolve()
    if path.name in ("", ".."):
        yield f"--save {path}: expected a directory with a name, since it is replaced as a whole"
    elif path.is_file():
        yield f"--save {path}: expected a directory, got a file"
    elif problem := parent_problem(target) or unwritable(target.parent):
        yield f"--save {path}: {problem}"
    elif path.is_dir() and not (path / RECORD_FILE).is_file() and any(path.iterdir()):
        yield (
            f"--save {path}: expected a new directory or an earlier checkpoint, got a directory "
            "with other files"
        )


def load_problems(path: Path, args: TrainArguments, environ: Mapping[str, str]) -> Iterator[str]:
    """Why this command cannot go on from the checkpoint in ``path``."""
    try:
        record = CheckpointRecord.read(path)
    except ValueError as error:
        yield f"--load {error}"
        return
    ours: dict[str, object] = {
        "model": str(args.model),
        "optimizer": str(args.optimizer),
        "seed": args.seed,
        **_sizes(args),
    }
    theirs: dict[str, object] = {
        "model": record.model,
        "optimizer": record.optimizer,
        "seed": record.seed,
        **record.sizes,
    }
    for name, value in ours.items():
        if value != (saved := theirs.get(name)):
            flag = "--" + name.replace("_", "-")
            given = f"no {flag}" if value is None else f"{flag} {value}"
            made = f"without {flag}" if saved is None else f"with {flag} {saved}"
            yield f"{given}: the checkpoint in {path} was made {made}"
    batch = _global_batch(args, args.num_ranks(environ))
    if record.num_sequences % batch:
        yield (
            f"--load {path}: it has seen {record.num_sequences} sequences, which is no multiple of "
            f"the {batch} of a step here (--micro-batch-size x --num-microbatches x ranks)"
        )


def load_remarks(path: Path, args: TrainArguments) -> Iterator[str]:
    """What a user should know of going on from ``path``, which has no problems."""
    record = CheckpointRecord.read(path)
    if record.iteration >= args.train_iters:
        yield (
            f"--train-iters {args.train_iters}: it counts from the first run on, and the "
            f"checkpoint in {path} has done {record.iteration}; nothing is left to train"
        )
    if record.lr != args.lr:
        yield f"--lr {args.lr}: the checkpoint in {path} was trained with {record.lr}; yours holds"


def _global_batch(args: TrainArguments, num_ranks: int) -> int:
    """Sequences of a step, over all ranks."""
    return args.micro_batch_size * args.num_microbatches * num_ranks


def _sizes(args: TrainArguments) -> dict[str, int | None]:
    values: dict[str, Any] = vars(args)
    return {item.name: values[item.name] for item in fields(ModelFlags)} | {
        "seq_length": args.seq_length
    }
