"""--save and --load as a user gives them: a run in two parts is the run in one, bit for bit."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from test_commands_run import OVERLAP, SHARDED, SMALL, result_of, run

from ep_overlap.cli import main
from ep_overlap.commands.checkpoint_record import RECORD_FILE

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
    result = result_of(
        f"{flags} {one} --train-iters 2 --load {saved} --save {saved}", tmp_path / "second.json"
    )
    assert result["losses"] == pytest.approx(straight["losses"][1:], rel=1e-5)
    record = json.loads((saved / RECORD_FILE).read_text())
    assert (record["iteration"], record["num_sequences"]) == (2, 8)
    assert not (saved / "old").exists()
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"saved"}
    done = run(f"{flags} {one} --train-iters 2 --load {saved} --lr 0.5")
    assert done.returncode == 0, done.stderr
    assert "nothing is left to train" in done.stderr
    assert "--lr 0.5: the checkpoint" in done.stderr
    assert "no step was left to do" in done.stdout


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


def test_saving_over_anything_but_a_checkpoint_is_refused(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert "expected a directory, got a file" in refusal(f"--save {tmp_path}/file", capsys)
    assert "got a directory with other files" in refusal(f"--save {tmp_path}", capsys)
    assert "there is no directory" in refusal(f"--save {tmp_path}/none/saved", capsys)
    # An earlier checkpoint may be replaced: what is refused here is something else.
    assert "--lr" in refusal(f"--save {checkpoint} --lr -1", capsys)
