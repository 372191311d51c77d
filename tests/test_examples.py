"""The examples of the documentation, run as it says: overlap changes no digit that they print."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "docs" / "examples"

LINES = {
    "train_gpt.py": re.compile(r"^step \d+: (loss [\d.]+, gradient norm [\d.]+)$", re.MULTILINE),
    "pretrain_gpt.py": re.compile(
        r"(lm loss: \S+|lm loss value: \S+|grad norm: \S+|load_balancing_loss: \S+)"
    ),
}
OVERLAP = {"train_gpt.py": "--overlap", "pretrain_gpt.py": "--overlap-moe-expert-parallel-comm"}
SHORT = {
    "train_gpt.py": (),
    "pretrain_gpt.py": ("--train-iters", "3", "--eval-interval", "2"),
}
NUM_LINES = {"train_gpt.py": 10, "pretrain_gpt.py": 3 * 3 + 3}


def printed(name: str, arguments: Sequence[str]) -> list[str]:
    """What it prints of its training, on two CPU ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run = subprocess.run(
        [*command, "--nproc-per-node=2", str(EXAMPLES / name), *SHORT[name], *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return LINES[name].findall(run.stdout)


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", LINES)
def test_overlapped_it_prints_the_same_digits(name: str) -> None:
    plain = printed(name, [])
    assert len(plain) == NUM_LINES[name]
    assert len({*plain}) > len(plain) // 2  # it does train
    assert printed(name, [OVERLAP[name]]) == plain


def test_the_examples_are_those_of_the_page() -> None:
    page = (ROOT / "docs" / "megatron.md").read_text()
    for name, flag in OVERLAP.items():
        assert f"docs/examples/{name}\n" in page
        assert re.search(rf"docs/examples/{name} {flag}\n", page)
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(LINES)


@pytest.mark.parametrize("name", LINES)
def test_what_overlap_takes_is_a_few_lines(name: str) -> None:
    marked = re.findall(r"# \((\d)\)$", (EXAMPLES / name).read_text(), re.MULTILINE)
    assert 2 <= len(marked) <= 3
    assert set(marked) == {str(number + 1) for number in range(len(marked))}
