"""The public names: what they are, that they are what their home defines, that they load late."""

import ast
import importlib
from pathlib import Path

import pytest

import ep_overlap
import fsdp_hooks

ROOT = Path(__file__).parent.parent
PACKAGES = (ep_overlap, fsdp_hooks)

PUBLIC = [
    ("ep_overlap", "OverlapConfig", "ep_overlap.config"),
    ("ep_overlap", "OverlapSchedule", "ep_overlap.schedule"),
    ("ep_overlap", "build_plan", "ep_overlap.plan.build"),
    ("fsdp_hooks", "ExpertLinear", "fsdp_hooks.wgrad_layers"),
    ("fsdp_hooks", "ManagedLayer", "fsdp_hooks.wgrad"),
    ("fsdp_hooks", "delayed_wgrad", "fsdp_hooks.wgrad_layers"),
    ("fsdp_hooks", "manage_wgrad", "fsdp_hooks.wgrad_layers"),
    ("fsdp_hooks", "managed_linear", "fsdp_hooks.wgrad"),
    ("fsdp_hooks", "GradScaler", "fsdp_hooks.grad_scaler"),
    ("fsdp_hooks", "MixedPrecision", "fsdp_hooks.precision"),
    ("fsdp_hooks", "clip_grad_norm_", "fsdp_hooks.grad_norm"),
    ("fsdp_hooks", "fully_shard", "fsdp_hooks.shard"),
    ("fsdp_hooks", "load_state_dict", "fsdp_hooks.checkpoint"),
    ("fsdp_hooks", "microbatch", "fsdp_hooks.accumulation"),
    ("fsdp_hooks", "shard_optimizer", "fsdp_hooks.optimizer"),
    ("fsdp_hooks", "state_dict", "fsdp_hooks.checkpoint"),
    ("fsdp_hooks", "state_dict_to_fill", "fsdp_hooks.checkpoint"),
]


@pytest.mark.parametrize(("package", "name", "home"), PUBLIC)
def test_a_public_name_is_what_its_home_defines(package: str, name: str, home: str) -> None:
    value = getattr(importlib.import_module(package), name)
    assert value is getattr(importlib.import_module(home), name)
    assert value.__module__ == home


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_the_list_of_names_is_complete(package: object) -> None:
    name = package.__name__
    assert sorted(package.__all__) == sorted(n for p, n, _ in PUBLIC if p == name)
    assert set(package.__all__) <= set(dir(package))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_the_checker_and_the_loader_see_the_same_names(package: object) -> None:
    """The imports under TYPE_CHECKING, the table of homes and ``__all__`` agree."""
    tree = ast.parse(Path(package.__file__).read_text())
    typed = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    homes = {name: home for p, name, home in PUBLIC if p == package.__name__}
    assert typed == homes
    assert homes == package._HOME


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_an_unknown_name_is_an_attribute_error(package: object) -> None:
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'xyz'"):
        _ = package.xyz
