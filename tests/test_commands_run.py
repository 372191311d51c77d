"""train and bench as a user runs them: real ranks, real text, results as JSON."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_overlap.cli import main
from ep_overlap.commands import argument_checks, parity
from ep_overlap.commands.arguments import TrainArguments
from ep_overlap.commands.parity import Difference
from ep_overlap.commands.plan_arguments import plan_of
from ep_overlap.commands.results import write_json
from ep_overlap.plan.lower import Strategy
from ep_overlap.report.trace_file import read_trace
from ep_overlap.report.whole_file import CannotWriteError

ROOT = Path(__file__).parent.parent
SMALL = "--hidden-size 32 --moe-ffn-hidden-size 48 --seq-length 16 --num-attention-heads 2"
OVERLAP = "--overlap-moe-expert-parallel-comm"
SHARDED = "--data-parallel-sharding-strategy optim_grads_params"


def run(command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ep_overlap.cli", *command.split()],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def result_of(command: str, path: Path) -> dict[str, Any]:
    done = run(f"{command} --json {path}")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(path.read_text())


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize(("amount", "status"), [(1e-6, 0), (1e-3, 1)])
def test_a_run_whose_parity_fails_is_a_failed_run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    amount: float,
    status: int,
) -> None:
    found = Difference(
        amount=amount, how="differs a bit", tensor="gradient of head.weight", rank=3, step=7
    )
    monkeypatch.setattr(parity, "compare", lambda *compared, **named: found)
    command = f"train --model reference {SMALL} --num-layers 1 --train-iters 1 --check-parity"
    assert main(command.split()) == status
    assert (
        f"parity with the step without overlap: {found.parity}: gradient of head.weight on rank 3 "
        "in step 7 differs a bit"
    ) in capsys.readouterr().out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is full, as Linux has it")
def test_a_result_that_finds_no_room_names_its_file() -> None:
    with pytest.raises(CannotWriteError, match=r"^/dev/full: No space left on device$"):
        write_json(Path("/dev/full"), {"loss": 1.0})


def test_overlapped_megatron_training_is_bitwise_the_standard_path(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    result = result_of(
        f"train --model megatron --num-layers 3 --num-microbatches 3 {SMALL} {OVERLAP} {SHARDED} "
        f"--max-unsharded-units 2 --train-iters 3 --check-parity --trace {trace}",
        tmp_path / "out.json",
    )
    assert result["parity"] == "bitwise"
    assert result["hook_misses"] == 0
    plan = plan_of(
        TrainArguments(
            num_layers=3,
            num_microbatches=3,
            overlap_moe_expert_parallel_comm=True,
            data_parallel_sharding_strategy=Strategy.OPTIM_GRADS_PARAMS,
            max_unsharded_units=2,
        )
    )
    # Two ranks, EP 2: experts' groups have one rank and gather nothing.
    assert result["num_all_gathers"] == 3 * sum(plan.num_gathers.values())
    assert result["num_reduce_scatters"] == 3 * 3 * 4
    assert result["peak_unsharded_bytes"] > 0
    assert result["losses"][-1] < result["losses"][0]
    assert len(result["losses"]) == len(result["grad_norms"]) == 3
    assert all(0 <= result["hidden_share"][kind] <= 1 for kind in ("a2a", "ag", "rs"))
    assert result["comm_s"] > 0
    words = {span.word for span in read_trace(trace).spans}
    assert {str(action) for action in plan.actions if "SYNC" not in str(action)} <= words


def test_without_overlap_no_exchange_is_hidden(tmp_path: Path) -> None:
    result = result_of(
        f"train --model reference --num-layers 2 {SMALL} --train-iters 2", tmp_path / "out.json"
    )
    assert result["hidden_share"]["a2a"] <= 0.05
    assert result["parity"] is None


def test_dense_layers_between_moe_layers_train_bitwise(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    result = result_of(
        f"train --model reference --num-layers 4 --moe-layer-freq 2 {SMALL} {OVERLAP} "
        f"--train-iters 2 --check-parity --trace {trace}",
        tmp_path / "out.json",
    )
    assert result["parity"] == "bitwise"
    words = {span.word for span in read_trace(trace).spans}
    assert {"0F.dispatch.L0", "3B.combine.L2", "1F.mlp.L1"} <= words
    assert "0F.dispatch.L1" not in words  # a dense layer


def test_bench_finds_overlap_faster_on_a_slow_link(tmp_path: Path) -> None:
    """Timing ring: generous inequalities only."""
    result = result_of(
        "bench --model reference --num-layers 2 --rounds 3 --link paced:200mbit "
        "--hidden-size 128 --moe-ffn-hidden-size 256 --seq-length 128",
        tmp_path / "out.json",
    )
    variants = result["variants"]
    assert list(variants) == ["off", "plain", "paired"]
    assert len({variant["last_loss"] for variant in variants.values()}) == 1
    assert variants["off"]["hidden_share"]["a2a"] <= 0.05
    assert variants["plain"]["hidden_share"]["a2a"] > 0.2
    assert variants["paired"]["step_time_s"] < variants["off"]["step_time_s"]
    assert result["hidden_share"] == variants["paired"]["hidden_share"]
    assert result["compute_s"] > 0
    assert result["comm_s"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_in_one_line() -> None:
    done = run("train --device cuda --model reference")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "ep-overlap train: error: --device cuda: expected a GPU, got a torch that sees none; "
        "use --device cpu"
    ]


def test_a_port_in_use_is_refused_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run("train --model reference", MASTER_PORT=str(taken.getsockname()[1]))
        port = taken.getsockname()[1]
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "in use" in line
    assert str(port) in line


def test_a_missing_megatron_core_is_told_before_ranks_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(argument_checks, "find_spec", lambda name: None)
    assert main(["train", "--model", "megatron"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'ep-overlap[megatron]'" in line


@pytest.mark.parametrize("flags", ["--data {f} --json {f}", "--trace {f} --json {f}"])
def test_a_file_of_two_flags_is_refused_and_left_as_it_is(
    flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "text"
    file.write_text("a" * 4096)
    assert main(["train", "--model", "reference", *flags.format(f=file).split()]) == 2
    assert "too; expected one of its own" in capsys.readouterr().err
    assert file.read_text() == "a" * 4096
