"""``docs/bug_kinds.md`` explains every tag that a test names, and names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEGEND = (ROOT / "docs" / "bug_kinds.md").read_text(encoding="utf-8")
TESTS = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("tests/test_*.py")}
TAG = re.compile(r"\b[A-Za-z][A-Za-z-]*#\d+")


def test_every_tag_in_a_test_is_explained() -> None:
    explained = set(TAG.findall(LEGEND))
    unexplained = {name: set(TAG.findall(text)) - explained for name, text in TESTS.items()}
    assert {name: tags for name, tags in unexplained.items() if tags} == {}


def test_every_test_that_the_legend_names_exists() -> None:
    defined = {name for text in TESTS.values() for name in re.findall(r"def (test_\w+)", text)}
    named = set(re.findall(r"`(test_\w+)`", LEGEND))
    assert len(named) > 20
    assert named - defined == set()
