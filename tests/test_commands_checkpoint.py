"""--save and --load as a user gives them: a run in two parts is the run in one, bit for bit."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_commands_run import OVERLAP, ROOT, SHARDED, SMALL, result_of, run

from ep_overlap.cli import main
from ep_overlap.commands.arguments import ModelName, TrainArguments
from ep_overlap.commands.checkpoint_record import RECORD_FILE, load_problems

TINY = f"--num-layers 2 --num-microbatches 2 {SMALL}"
SERIES = ("losses", "grad_norms")


def in_two_parts(straight: str, first: str, second: str, directory: Path) -> tuple[Any, Any]:
    """Four iterations; two that save and two that go on from there. The first run's result, and
    the losses and norms of the other two together."""
    saved = directory / "saved"
    whole = result_of(f"train {straight} --train-iters 4", directory / "whole.json")
    before = result_of(f"train {first} --train-iters 2 --save {saved}", directory / "before.json")
    after = result_of(f"train {second} --train-iters 4 --load {saved}", directory / "after.json")
    assert (before["first_iteration"], after["first_iteration"]) == (0, 2)
    assert all(len(set(whole[key])) == 4 for key in SERIES)
    return whole, {key: before[key] + after[key] for key in SERIES}


def test_two_parts_are_bitwise_the_whole(tmp_path: Path) -> None:
    """The whole without overlap; of the parts one with and one without."""
    flags = f"--model reference {TINY} {SHARDED}"
    whole, parts = in_two_parts(flags, flags, f"{flags} {OVERLAP}", tmp_path)
    assert parts == {key: whole[key] for key in SERIES}


def test_megatron_goes_on_with_another_expert_parallel_size(tmp_path: Path) -> None:
    """Local names of experts would collide: EP 2 saves, EP 1 goes on."""
    flags = f"--model megatron {TINY} {SHARDED} {OVERLAP}"
    saved = tmp_path / "saved"
    whole = result_of(f"train {flags} --train-iters 4", tmp_path / "whole.json")
    result_of(f"train {flags} --train-iters 2 --save {saved}", tmp_path / "before.json")
    other = result_of(
        f"train --model megatron {TINY} --expert-model-parallel-size 1 --train-iters 4 "
        f"--load {saved}",
        tmp_path / "other.json",
    )
    assert other["losses"] == pytest.approx(whole["losses"][2:], rel=1e-5)
    assert other["grad_norms"] == pytest.approx(whole["grad_norms"][2:], rel=1e-4)


def test_other_ranks_take_the_same_data_and_a_checkpoint_is_replaced_whole(tmp_path: Path) -> None:
    """Two ranks, one microbatch; then one rank, two: the global batch stays."""
    two = "--nproc 2 --expert-model-parallel-size 1 --num-microbatches 1"
    one = "--nproc 1 --num-microbatches 2"
    saved, crashed = tmp_path / "saved", tmp_path / "saved.incomplete"
    flags = f"train --model reference --num-layers 1 {SMALL}"
    straight = result_of(f"{flags} {two} --train-iters 2", tmp_path / "straight.json")
    crashed.mkdir()
    (crashed / "__0_0.distcp").write_text("of a run that crashed")
    first = f"{flags} {two} --train-iters 1 --save {saved} {SHARDED}"
    result_of(first, tmp_path / "first.json")
    (saved / "old").write_text("of the checkpoint that was here")
    link = tmp_path / "link"  # what it points to is replaced
    link.symlink_to(saved)
    result = result_of(
        f"{flags} {one} --train-iters 2 --load {saved} --save {link}", tmp_path / "second.json"
    )
    assert link.is_symlink()
    assert result["losses"] == pytest.approx(straight["losses"][1:], rel=1e-5)
    record = json.loads((saved / RECORD_FILE).read_text())
    assert (record["iteration"], record["num_sequences"]) == (2, 8)
    sizes_bytes = {path.name: path.stat().st_size for path in saved.iterdir()}
    assert sizes_bytes == record["files"] | {RECORD_FILE: sizes_bytes[RECORD_FILE]}
    assert {".metadata", "__0_0.distcp"} <= set(record["files"])
    assert not (saved / "old").exists()
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"saved", "link"}
    done = run(f"{flags} {one} --train-iters 2 --load {saved} --lr 0.5")
    assert done.returncode == 0, done.stderr
    assert "nothing is left to train" in done.stderr
    assert "--lr 0.5: the checkpoint" in done.stderr
    assert "no step was left to do" in done.stdout


# ---- what fails on ranks -------------------------------------------------------------------------

ONE_STEP = f"train --model reference --num-layers 1 --num-microbatches 1 {SMALL} --train-iters 1"


def test_files_of_the_right_size_with_wrong_bytes_are_refused_in_one_line(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    result_of(f"{ONE_STEP} --nproc 1 --save {saved}", tmp_path / "out.json")
    for name, said in (
        ("__0_0.distcp", r": rank 0: \w+: .*"),
        (".metadata", r": \.metadata: \w+: .*"),
    ):
        (saved / name).write_bytes(b"x" * (saved / name).stat().st_size)
        done = run(f"{ONE_STEP} --nproc 1 --load {saved}")
        assert done.returncode == 2, done.stderr
        (line,) = [line for line in done.stderr.splitlines() if "warning" not in line]
        assert re.fullmatch(
            f"ep-overlap train: error: --load {saved}{said}; the checkpoint is damaged, "
            "load another",
            line,
        )


def test_when_one_rank_cannot_save_all_say_why_and_end(tmp_path: Path) -> None:
    """Rank 0 alone makes the directory; the others would wait for it."""
    (tmp_path / "saved.incomplete").touch()
    done = run(f"{ONE_STEP} --save {tmp_path}/saved")
    assert done.returncode == 1
    failed = f"failed: RuntimeError: rank 0: FileExistsError: [Errno 17] File exists: '{tmp_path}/"
    assert done.stderr.count(f"ep-overlap train: {failed}saved.incomplete'") == 2
    assert "rank 1: [exit code 1]" in done.stderr


def test_a_save_without_space_leaves_the_earlier_checkpoint_and_nothing_else(
    tmp_path: Path, checkpoint: Path
) -> None:
    """A limit on the size of files stands for a full disk."""
    command = f"{sys.executable} -m ep_overlap.cli {ONE_STEP} --save {checkpoint}"
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 20; {command}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    failed = rf"failed: RunFailedError: {checkpoint}.incomplete: rank 0: OSError: .*File too large"
    assert re.search(failed, done.stderr)
    assert list(tmp_path.iterdir()) == [checkpoint]
    assert json.loads((checkpoint / RECORD_FILE).read_text()) == record_of()


# ---- refused before a rank starts ----------------------------------------------------------------


def record_of(**changed: object) -> dict[str, Any]:
    """What a run with the defaults and the reference model would have left."""
    sizes = {
        "num_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "moe_layer_freq": 1,
        "num_experts": 4,
        "moe_ffn_hidden_size": 256,
        "moe_router_topk": 2,
        "seq_length": 128,
    }
    record: dict[str, Any] = {
        "iteration": 2,
        "num_sequences": 32,
        "seed": 1234,
        "lr": 1e-3,
        "optimizer": "adamw",
        "model": "reference",
        "sizes": sizes,
        "files": {},
    }
    return record | changed


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "saved"
    directory.mkdir()
    (directory / RECORD_FILE).write_text(json.dumps(record_of()))
    return directory


def refusal(flags: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["train", "--model", "reference", *flags.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--hidden-size 64", "--hidden-size 64: .* was made with --hidden-size 128"),
        ("--num-layers 3", "--num-layers 3: .* was made with --num-layers 4"),
        ("--model megatron", "--model megatron: .* was made with --model reference"),
        ("--optimizer sgd", "--optimizer sgd: .* was made with --optimizer adamw"),
        ("--seed 1", "--seed 1: .* was made with --seed 1234"),
        ("--num-microbatches 3", "seen 32 sequences, which is no multiple of the 12 of a step"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_the_flag(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], flags: str, named: str
) -> None:

    assert re.search(named, refusal(f"--load {checkpoint} {flags}", capsys))


def test_what_is_no_checkpoint_is_refused(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = refusal(f"--load {tmp_path}/none", capsys)
    assert missing == f"ep-overlap train: error: --load {tmp_path}/none: there is no such directory"
    assert "no checkpoint; expected ep_overlap.json" in refusal(f"--load {tmp_path}", capsys)
    (checkpoint / RECORD_FILE).write_text("{")
    assert "damaged" in refusal(f"--load {checkpoint}", capsys)


@pytest.mark.parametrize(
    ("change", "found"),
    [(Path.unlink, "no such file"), (lambda path: path.write_bytes(b"12"), "2 bytes")],
    ids=["lost", "cut short"],
)
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_file_that_was_lost_or_cut_short_is_named(
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    change: Callable[[Path], object],
    found: str,
) -> None:
    sizes_bytes = {".metadata": 3, "__0_0.distcp": 3}
    for each in sizes_bytes:
        (checkpoint / each).write_bytes(b"123")
    (checkpoint / RECORD_FILE).write_text(json.dumps(record_of(files=sizes_bytes)))
    assert "--lr" in refusal(f"--load {checkpoint} --lr -1", capsys)  # whole, as it is
    assert list(load_problems(checkpoint, TrainArguments(model=ModelName.REFERENCE), {})) == []
    change(checkpoint / name)
    assert refusal(f"--load {checkpoint}", capsys) == (
        f"ep-overlap train: error: --load {checkpoint}: {name}: expected 3 bytes, got {found}; "
        "the checkpoint is damaged, load another"
    )


@pytest.mark.parametrize("role", ["incomplete", "previous"])
def test_what_a_save_that_broke_off_left_is_named(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], role: str
) -> None:
    """Between its renames: both are whole then, and the newer one is named."""
    left = checkpoint.with_name(f"saved.{role}")
    shutil.copytree(checkpoint, left)
    if role == "incomplete":
        shutil.copytree(checkpoint, checkpoint.with_name("saved.previous"))
    shutil.rmtree(checkpoint)
    assert refusal(f"--load {checkpoint}", capsys).endswith(
        f"there is no such directory: a --save broke off as it replaced it, and {left} is whole; "
        f"rename that to {checkpoint}"
    )
    (left / RECORD_FILE).unlink()
    said = refusal(f"--load {checkpoint}", capsys)
    assert str(left) not in said  # without a record it is not whole


def test_saving_over_anything_but_a_checkpoint_is_refused(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert "expected a directory, got a file" in refusal(f"--save {tmp_path}/file", capsys)
    assert "got a directory with other files" in refusal(f"--save {tmp_path}", capsys)
    assert "there is no directory" in refusal(f"--save {tmp_path}/none/saved", capsys)
    assert f"{tmp_path}/file is a file" in refusal(f"--save {tmp_path}/file/saved", capsys)
    # An earlier checkpoint may be replaced: what is refused here is something else.
    assert "--lr" in refusal(f"--save {checkpoint} --lr -1", capsys)
