"""Nothing is process-wide: no writable module or class state, no caches, no ``global``."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    path for package in ("ep_overlap", "fsdp_hooks") for path in (ROOT / package).rglob("*.py")
)

ALLOWED_CALLS = {
    "MappingProxyType",
    "NewType",
    "Path",
    "TypeVar",
    "compile",  # re.compile
    "completed",  # fsdp_hooks.streams: an event that is done and stays so
    "frozenset",
    "timedelta",
    "tuple",
}
"""What a module may call while it is imported, besides its own functions and classes: makers of
values that nobody can change."""

MUTABLE_DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)

WRITERS = {
    "add",
    "append",
    "clear",
    "discard",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "setdefault",
    "update",
}


def assigned(statements: list[ast.stmt]) -> Iterator[tuple[str, ast.expr, bool]]:
    """Name, value and whether it is Final, for each assignment among the statements."""
    for statement in statements:
        if isinstance(statement, ast.AnnAssign) and statement.value is not None:
            is_final = ast.unparse(statement.annotation).split("[")[0].endswith("Final")
            yield ast.unparse(statement.target), statement.value, is_final
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                yield ast.unparse(target), statement.value, False


def called_name(call: ast.Call) -> str:
    function = call.func.value if isinstance(call.func, ast.Subscript) else call.func
    return function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)


def defined_here(tree: ast.Module) -> set[str]:
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in tree.body if isinstance(node, kinds)}


def state_of(tree: ast.Module) -> list[str]:
    """What a module keeps that could change while the process runs, as readable lines."""
    found: list[str] = []
    own = defined_here(tree)
    for name, value, is_final in assigned(tree.body):
        if name == "__all__":
            continue
        if isinstance(value, MUTABLE_DISPLAYS) and not is_final:
            found.append(f"{name} is a mutable container and not Final")
        if isinstance(value, ast.Call) and called_name(value) not in ALLOWED_CALLS | own:
            found.append(f"{name} is made by {called_name(value)} at import")
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found.append(f"line {node.lineno}: global {', '.join(node.names)}")
        if isinstance(node, ast.ClassDef):
            found.extend(
                f"{node.name}.{name} is shared by all instances and mutable"
                for name, value, is_final in assigned(node.body)
                if isinstance(value, MUTABLE_DISPLAYS) and not is_final
            )
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.extend(
                f"{node.name} has a process-wide cache"
                for decorator in node.decorator_list
                if ast.unparse(decorator).split("(")[0].split(".")[-1] in {"cache", "lru_cache"}
            )
    return found + list(written_tables(tree))


def written_tables(tree: ast.Module) -> Iterator[str]:
    """Writes to a module's Final containers."""
    tables = {name for name, value, _ in assigned(tree.body) if isinstance(value, MUTABLE_DISPLAYS)}
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                is_write = name in tables
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)):
                is_write = name in tables and method in WRITERS
            case _:
                continue
        if is_write:
            yield f"line {node.lineno}: writes to {name}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_keeps_no_state(path: Path) -> None:
    assert state_of(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "seen = []",
        "seen: dict[str, int] = {}",
        "TABLE: Final = {}\ndef f(): TABLE['a'] = 1",
        "TABLE: Final = []\ndef f(): TABLE.append(1)",
        "local = threading.local()",
        "count: Final = itertools.count()",
        "@functools.cache\ndef f(): ...",
        "@lru_cache(maxsize=None)\ndef f(): ...",
        "def f():\n    global x\n    x = 1",
        "class A:\n    live = {}",
    ],
)
def test_the_walk_finds_state(source: str) -> None:
    assert len(state_of(ast.parse(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "TABLE: Final = {'a': 1}",
        "NAMES: Final = frozenset({'a'})",
        "WORD = re.compile('a')",
        "def f():\n    seen = []\n    seen.append(1)",
        "TABLE: Final = MappingProxyType[str, int]({'a': 1})",
        "__all__ = ['a']",
    ],
)
def test_the_walk_passes_constants(source: str) -> None:
    assert state_of(ast.parse(source)) == []


def bool_contexts(tree: ast.Module) -> list[int]:
    """Lines of ``with a and b:``, which enters only ``b``."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.With | ast.AsyncWith)
        for item in node.items
        if isinstance(item.context_expr, ast.BoolOp)
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_with_statement_joins_contexts_by_and(path: Path) -> None:
    assert bool_contexts(ast.parse(path.read_text())) == []


def test_the_check_finds_contexts_joined_by_and() -> None:
    assert bool_contexts(ast.parse("with a, b:\n    pass\nwith a and b:\n    pass")) == [3]
