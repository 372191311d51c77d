"""The scripts around the code: the interpreter search, and pins that fit the ranges."""

import os
import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FIND = ROOT / "scripts" / "find_python.sh"


def executable(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def find(tmp_path: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the script where only tmp_path/bin is on the PATH, and no home has a pyenv."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    env = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path / "home"), **environ}
    return subprocess.run(
        ["/bin/sh", FIND], env=env, capture_output=True, text=True, timeout=60, check=False
    )


def real(path: Path) -> Path:
    return executable(path, f'exec "{sys.executable}" "$@"')


OLD = "exit 1"
"""What a Python older than 3.12 answers to the probe; a shim without a version does the same."""


def test_a_shim_that_fails_is_passed_over(tmp_path: Path) -> None:
    executable(tmp_path / "bin" / "python3", OLD)
    executable(tmp_path / "bin" / "python3.14", "echo 'no version is set' >&2; exit 127")
    real(tmp_path / "bin" / "python3.12")
    done = find(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, sys.executable + "\n", "")


def test_versions_of_pyenv_are_found_under_its_root(tmp_path: Path) -> None:
    executable(tmp_path / "bin" / "python3", OLD)
    executable(tmp_path / "pyenv" / "versions" / "3.10" / "bin" / "python3", OLD)
    real(tmp_path / "pyenv" / "versions" / "3.12" / "bin" / "python3")
    done = find(tmp_path, PYENV_ROOT=str(tmp_path / "pyenv"))
    assert (done.returncode, done.stdout) == (0, sys.executable + "\n")


def test_versions_of_pyenv_are_found_at_home(tmp_path: Path) -> None:
    real(tmp_path / "home" / ".pyenv" / "versions" / "3.12" / "bin" / "python3")
    assert find(tmp_path).stdout == sys.executable + "\n"


def test_a_named_python_is_the_only_candidate(tmp_path: Path) -> None:
    real(tmp_path / "bin" / "python3")
    named = executable(tmp_path / "old", OLD)
    done = find(tmp_path, PYTHON=str(named))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"find_python: PYTHON={named} does not run, is older than 3.12")
    assert find(tmp_path, PYTHON=sys.executable).stdout == sys.executable + "\n"


def test_no_python_is_said_in_one_line(tmp_path: Path) -> None:
    done = find(tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("find_python: no Python >= 3.12")
    assert done.stderr.count("\n") == 1


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirement_names() -> set[str]:
    described = project()
    lines = [*described["dependencies"]]
    lines += described["optional-dependencies"]["megatron"]
    lines += described["optional-dependencies"]["dev"]
    return {re.split(r"[\[<>=]", line)[0] for line in lines}


def test_every_requirement_is_pinned_for_development() -> None:
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints-dev.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    assert requirement_names() - {"ep-overlap"} <= pins.keys()
    assert pins["torch"] == "2.11.0"
    assert pins["megatron-core"] == "0.19.2"


def test_the_console_script_is_the_command_lines_main() -> None:
    assert project()["scripts"] == {"ep-overlap": "ep_overlap.cli:main"}


@pytest.mark.parametrize("script", ["scripts/find_python.sh", ".ci/run"])
def test_scripts_are_executable(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
