"""The compatibility table against the code, megatron-core's config, the tests and the page."""

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_script import script, sizes

from ep_overlap.compatibility import (
    SUPPORTED,
    TABLES,
    TENSOR_PARALLEL,
    THEIR_LIMITS,
    THEIR_REFUSALS,
    Row,
    page,
)
from ep_overlap.models import megatron_refused
from ep_overlap.models.groups import lone_expert_groups
from ep_overlap.models.megatron import GPTParts, get_forward_backward_func
from ep_overlap.models.megatron_build import build_gpt, transformer_config
from ep_overlap.models.megatron_cpu import megatron_on_cpu

ROOT = Path(__file__).parent.parent
ROWS = [row for _, rows in TABLES for row in rows]


def by_what(row: Row) -> str:
    return row.what


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """megatron-core on the CPU, with this process as the whole world."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with megatron_on_cpu():
        yield
    dist.destroy_process_group()


def gpt(config: dict[str, Any]) -> Any:
    """Settings are changed once it is built, as megatron-core refuses some together."""
    model = build_gpt(sizes(), lone_expert_groups())
    model.config.overlap_moe_expert_parallel_comm = True
    for name, value in config.items():
        assert name in vars(model.config)
        setattr(model.config, name, value)
    return model


def test_the_page_is_what_the_table_says() -> None:
    written = (ROOT / "docs" / "compatibility.md").read_text()
    assert written == page(), "run: python -m ep_overlap.compatibility > docs/compatibility.md"


def test_nothing_is_listed_twice() -> None:
    assert len({row.what for row in ROWS}) == len(ROWS)
    assert all(row.supported for row in SUPPORTED)
    assert not any(row.supported for row in THEIR_LIMITS)


@pytest.mark.parametrize("row", [row for row in ROWS if row.shown_by], ids=by_what)
def test_the_test_that_shows_it_exists(row: Row) -> None:
    file, test = row.shown_by.split("::")
    tree = ast.parse((ROOT / "tests" / file).read_text())
    assert test in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("row", [r for r in ROWS if not r.supported and r.config], ids=by_what)
def test_what_is_refused_is_refused_by_the_name_of_its_setting(row: Row) -> None:
    model = gpt(dict(row.config))
    with pytest.raises(ValueError, match=rf"\b{next(iter(row.config))}\b"):
        script(get_forward_backward_func(), model, pg_collection=model.pg_collection)


@pytest.mark.parametrize("row", [row for row in ROWS if not row.supported], ids=by_what)
def test_what_is_refused_says_why_and_names_a_setting_or_a_test(row: Row) -> None:
    assert row.remark
    assert row.config or row.shown_by


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("row", [row for row in ROWS if row.supported], ids=by_what)
def test_the_settings_of_what_is_supported_are_taken(row: Row) -> None:
    assert row.shown_by
    GPTParts(gpt(dict(row.config)))


@pytest.mark.usefixtures("on_cpu")
def test_every_setting_that_the_parts_refuse_is_in_the_table() -> None:
    model = gpt({})
    refused = {
        setting.name
        for settings in (
            megatron_refused._of_config(model.config),
            megatron_refused._of_tensor_parallel(gpt(dict(TENSOR_PARALLEL)).config),
            megatron_refused._of_experts(model.config),
        )
        for setting in settings
    }
    told = {name for row in ROWS if not row.supported for name in row.config}
    assert len(refused) > 15
    assert refused - told == set()


@pytest.mark.filterwarnings("ignore:full scope is deprecated")
@pytest.mark.parametrize(
    "row",
    [
        row
        for row in THEIR_REFUSALS
        if row.theirs.startswith("refuses") and row.config and "FSDP" not in row.what
    ],
    ids=by_what,
)
def test_what_megatron_is_said_to_refuse_its_config_refuses(row: Row) -> None:
    base = {"overlap_moe_expert_parallel_comm": True}
    chosen = replace(sizes(dtype=torch.bfloat16), settings={**base, "moe_layer_freq": 1})
    transformer_config(chosen, 2)
    with pytest.raises((AssertionError, ValueError)):
        transformer_config(replace(chosen, settings={**base, **row.config}), 2)
