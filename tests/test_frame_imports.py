"""Who may import whom, and that importing does nothing."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

SCHEDULE = {"plan", "run", "config", "schedule"}

PARTS = {
    "plan": {"plan"},
    "run": {"plan", "run"},
    "compatibility": {"compatibility"},
    "config": {"plan", "config"},
    "schedule": SCHEDULE,
    "models": {"models", *SCHEDULE},
    "links": {"links"},
    "processes": {"processes", "links"},
    "report": {"report", "links", "models", *SCHEDULE},
    "testing": {"report", "models", "processes", *SCHEDULE},
    "commands": {"commands", "report", "models", "links", "processes", *SCHEDULE},
}
"""What each part of ep_overlap (a folder or a file of its top level) may import of ep_overlap:
downward only. A new part needs a line here."""

PARTS["cli"] = {*PARTS}

SHARDING_SEEN_BELOW_MODELS = {"caller_stream", "lifecycle", "streams", "wgrad", "wgrad_layers"}
"""Files of fsdp_hooks that run and schedule may import; plan may import none."""


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    """``plan`` for ep_overlap.plan.order, ``cli`` for ep_overlap.cli; empty for the package."""
    return module.split(".")[1] if "." in module else ""


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, at any depth; ``from a import b`` gives a and a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import in line {node.lineno}"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def test_the_walk_sees_imports_at_any_depth(tmp_path: Path) -> None:
    file = tmp_path / "sample.py"
    file.write_text("import a.b\ndef f():\n    from c import d\n")
    assert list(imports(file)) == ["a.b", "c", "c.d"]


@pytest.mark.parametrize("path", sources("ep_overlap"), ids=module_of)
def test_ep_overlap_imports_downward_only(path: Path) -> None:
    module = module_of(path)
    known = {part_of(module_of(source)) for source in sources("ep_overlap")}
    seen = {part_of(name) for name in imports(path) if is_in(name, "ep_overlap")} & known - {""}
    if module != "ep_overlap":  # the package's own file names the public names, wherever they live
        assert seen <= PARTS[part_of(module)]


@pytest.mark.parametrize("path", sources("fsdp_hooks"), ids=module_of)
def test_fsdp_hooks_never_imports_ep_overlap(path: Path) -> None:
    assert not [name for name in imports(path) if is_in(name, "ep_overlap")]


@pytest.mark.parametrize("part", ["plan", "run", "config", "schedule"])
def test_the_schedule_sees_sharding_through_its_narrow_files_alone(part: str) -> None:
    allowed = set[str]() if part == "plan" else SHARDING_SEEN_BELOW_MODELS
    for path in sources("ep_overlap"):
        if part_of(module_of(path)) != part:
            continue
        names = [name for name in imports(path) if is_in(name, "fsdp_hooks")]
        assert {name.split(".")[1] for name in names if "." in name} <= allowed, path
        assert "fsdp_hooks" not in names or part != "plan", path


@pytest.mark.parametrize(
    "path",
    [
        *sources("ep_overlap/plan"),
        ROOT / "ep_overlap/__init__.py",
        ROOT / "ep_overlap/commands/arguments.py",
        ROOT / "ep_overlap/commands/argument_parser.py",
        ROOT / "ep_overlap/commands/argument_checks.py",
        ROOT / "ep_overlap/commands/bench_checks.py",
        ROOT / "ep_overlap/commands/checkpoint_record.py",
        ROOT / "ep_overlap/commands/plan_arguments.py",
        ROOT / "ep_overlap/report/plan_text.py",
        ROOT / "fsdp_hooks/__init__.py",
        ROOT / "ep_overlap/links/speed.py",
        ROOT / "ep_overlap/links/emulated_speed.py",
    ],
    ids=module_of,
)
def test_what_the_plan_command_needs_imports_no_torch(path: Path) -> None:
    assert not [name for name in imports(path) if is_in(name, "torch")]


@pytest.mark.parametrize("package", ["ep_overlap", "fsdp_hooks"])
def test_no_two_files_import_each_other_by_any_way_round(package: str) -> None:
    modules = {module_of(path) for path in sources(package)} - {package}
    graph = {
        module_of(path): (set(imports(path)) & modules) - {module_of(path)}
        for path in sources(package)
        if module_of(path) != package
    }
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, with the cycle


def test_wgrad_knows_no_buffer() -> None:
    for path in sources("fsdp_hooks"):
        if path.stem == "wgrad":
            assert not any(is_in(name, "fsdp_hooks.buffer") for name in imports(path))


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("package", ["ep_overlap", "fsdp_hooks", "ep_overlap.cli"])
def test_importing_a_package_imports_no_torch(package: str) -> None:
    done = run_python(f"import sys, {package}; print('torch' in sys.modules)")
    assert (done.stdout, done.stderr) == ("False\n", "")


EXTRAS = ("megatron", "transformer_engine")


def test_importing_every_module_starts_no_thread_and_touches_no_device() -> None:
    """All modules but those that need megatron-core or Transformer Engine, in one process."""
    modules = [
        module_of(path)
        for package in ("ep_overlap", "fsdp_hooks")
        for path in sources(package)
        if "megatron" not in path.stem
        and not any(is_in(name, package) for name in imports(path) for package in EXTRAS)
    ]
    done = run_python(
        "import importlib, os, threading, torch\n"
        "before = dict(os.environ), torch.get_num_threads(), torch.is_grad_enabled()\n"
        "state = torch.get_rng_state()\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "assert (dict(os.environ), torch.get_num_threads(), torch.is_grad_enabled()) == before\n"
        "assert torch.equal(torch.get_rng_state(), state)\n"
        "assert not torch.distributed.is_initialized()\n"
        "print(threading.active_count(), torch.cuda.is_initialized())\n"
    )
    assert (done.stdout, done.stderr) == ("1 False\n", "")
