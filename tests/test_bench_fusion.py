"""``ep-overlap bench --wgrad-fusion``: both variants do the same work, and what it says is so."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = (
    "--num-blocks 2 --hidden-size 32 --num-attention-heads 2 --moe-ffn-hidden-size 48 "
    "--seq-length 16 --micro-batch-size 1 --num-microbatches 2 --rounds 2"
)


def run(flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ep_overlap.cli", "bench", *flags.split()]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("bf16", [False, True])
def test_it_measures_both_variants_on_an_emulated_world(tmp_path: Path, bf16: bool) -> None:
    out = tmp_path / "fusion.json"
    done = run(f"--wgrad-fusion {SMALL} --json {out}" + " --bf16" * bf16)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["world"] == "emulated: 8 ranks, no link time"
    assert result["dtype"] == ("bfloat16" if bf16 else "float32")
    separate, fused = (result["variants"][name] for name in ("separate", "fused"))
    assert result["ratio"] == fused["step_time_s"] / separate["step_time_s"]
    assert len(result["ratio_of_rounds"]) == 3
    # bfloat16 gradients are rounded before they are added up, where they are not fused.
    assert (result["largest_difference"] > 0) == bf16
    assert "emulated:" in done.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--sharding",
            "--sharding, --wgrad-fusion, --host-overhead and --suite are measurements; choose",
        ),
        ("--hidden-size 30 --num-attention-heads 4", "--hidden-size 30"),
        (
            "--transformer-impl transformer_engine --device cpu",
            "--transformer-impl transformer_engine with --device cpu: its layers need a GPU",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(flags: str, words: str) -> None:
    done = run(f"--wgrad-fusion {flags}")
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_flag_without_effect_warns() -> None:
    done = run(f"--wgrad-fusion {SMALL} --num-experts 8")
    assert done.returncode == 0
    assert "--num-experts has no effect with --wgrad-fusion" in done.stderr
