"""Arguments, order files, digests, the grid, and what building a plan costs and imports."""

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from plan_shapes import plans, shape, zero3

from ep_overlap.plan.build import build_plan, parse_words, plan_from_words
from ep_overlap.plan.check import PlanError
from ep_overlap.plan.grid import grid
from ep_overlap.plan.lower import Sharding, Strategy
from ep_overlap.plan.order import ModelShape, OrderName
from ep_overlap.plan.plan import Plan
from fsdp_hooks.placement import STRATEGIES, Placement

ROOT = Path(__file__).parents[1]

FILE = """\
# one microbatch, one layer
0F.pre 0F.attn.L0 0F.dispatch.L0   # out
0F.mlp.L0
0F.combine.L0 0F.post

0B.post 0B.combine.L0 0B.mlp.L0 0B.dispatch.L0 0B.attn.L0 0B.pre
"""


def test_no_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 layer, got 0"):
        ModelShape(layers=())


@pytest.mark.parametrize("order", OrderName)
@pytest.mark.parametrize("evaluate", [False, True])
def test_no_microbatches_are_refused(order: OrderName, evaluate: bool) -> None:
    with pytest.raises(ValueError, match="at least 1 microbatch, got 0"):
        build_plan(shape=shape("m"), num_microbatches=0, order=order, evaluate=evaluate)


def test_a_budget_of_no_units_is_refused() -> None:
    with pytest.raises(ValueError, match="max_unsharded_units must be at least 1, got 0"):
        Sharding(strategy=Strategy.OPTIM_GRADS_PARAMS, max_unsharded_units=0)


def test_a_plans_strategies_are_those_of_the_sharding_core() -> None:
    # Told twice: a plan imports nothing of fsdp_hooks.
    sharded = {
        name: tuple(place is Placement.SHARD for place in (each.param, each.main, each.grad))
        for name, each in STRATEGIES.items()
    }
    assert sharded == {s: (s.shards_params, s.shards_main, s.shards_grads) for s in Strategy}


def test_orders_and_strategies_go_by_their_names_too() -> None:
    sizes: dict[str, Any] = {"shape": shape("mm"), "num_microbatches": 3}
    assert build_plan(**sizes, order="paired") == build_plan(**sizes, order=OrderName.PAIRED)
    assert build_plan(**sizes, order="serial").actions != build_plan(**sizes).actions
    with pytest.raises(ValueError, match=r"unknown order 'foo'; expected one of serial, plain"):
        build_plan(**sizes, order="foo")
    named: Any = "optim_grads_params"
    assert Sharding(strategy=named) == Sharding(strategy=Strategy.OPTIM_GRADS_PARAMS)
    named = "zero3"
    with pytest.raises(ValueError, match=r"unknown strategy 'zero3'; expected one of no_shard"):
        Sharding(strategy=named)


def test_an_order_file_gives_the_plan_of_the_same_order() -> None:
    own = plan_from_words(FILE, shape=shape("m"), num_microbatches=1, sharding=zero3())
    built = build_plan(
        shape=shape("m"), num_microbatches=1, order=OrderName.SERIAL, sharding=zero3()
    )
    assert own.actions == built.actions
    assert own.order == "own"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0F.mlp.L0", "0F.mpl.L0", "line 3: not an action: '0F.mpl.L0'"),
        ("0F.mlp.L0", "UNSHARD.L0 0F.mlp.L0", "line 3: UNSHARD.L0 is no node's word"),
        ("0F.mlp.L0", "0F.mlp.L0 0F.attn.L0", "line 3: 0F.attn.L0 is issued twice"),
        ("0F.mlp.L0", "0F.mlp.L0 0F.mlp.L1", "line 3: 0F.mlp.L1 is not a node of this plan"),
        ("0F.combine.L0 0F.post", "0F.post", "line 4: 0F.combine.L0 is missing"),
        (
            "0F.mlp.L0\n0F.combine.L0",
            "\n0F.combine.L0 0F.mlp.L0",
            "line 4: 0F.combine.L0 is issued before 0F.mlp.L0, which it needs",
        ),
    ],
)
def test_an_error_in_an_order_file_names_its_line(old: str, new: str, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        plan_from_words(FILE.replace(old, new), shape=shape("m"), num_microbatches=1)


@pytest.mark.parametrize(
    ("layers", "num_microbatches", "sizes"),
    [
        ("mm", 1, "of 1 layer and 1 microbatch, expected 2 layers and 1 microbatch"),
        ("m", 2, "of 1 layer and 1 microbatch, expected 1 layer and 2 microbatches"),
    ],
)
def test_an_order_file_of_other_sizes_is_told_so(
    layers: str, num_microbatches: int, sizes: str
) -> None:
    with pytest.raises(PlanError) as caught:
        plan_from_words(FILE, shape=shape(layers), num_microbatches=num_microbatches)
    first, *_ = str(caught.value).splitlines()
    assert first.endswith(f": the order is {sizes}; take an order of the model's sizes")


def test_an_order_file_of_the_right_sizes_is_not_told_so() -> None:
    with pytest.raises(PlanError) as caught:
        plan_from_words(FILE.replace("0F.mlp.L0", ""), shape=shape("m"), num_microbatches=1)
    assert str(caught.value).splitlines()[:2] == [
        "line 4: 0F.mlp.L0 is missing",
        "Marked: its place.",
    ]


def test_an_empty_order_file_is_refused() -> None:
    with pytest.raises(ValueError, match="the order holds no words"):
        plan_from_words("# nothing\n", shape=shape("m"), num_microbatches=1)


def test_digest_tells_plans_apart_and_repeats() -> None:
    def digest(order: OrderName) -> str:
        return build_plan(shape=shape("mm"), num_microbatches=3, order=order).digest

    assert digest(OrderName.PLAIN) == digest(OrderName.PLAIN)
    assert len({digest(order) for order in OrderName}) == 3


def test_grid_shows_lanes_side_by_side() -> None:
    plan = build_plan(
        shape=shape("m"),
        num_microbatches=1,
        order=OrderName.SERIAL,
        sharding=Sharding(strategy=Strategy.NO_SHARD, reduce_each_microbatch=True),
    )
    assert grid(plan) == (
        "serial: layers 1 moe, microbatches 1, no_shard\n"
        "\n"
        "   step  host      comp        comm            rs\n"
        "      0            0F.pre\n"
        "      1            0F.attn.L0\n"
        "      2  0SYNC.L0              0F.dispatch.L0\n"
        "      4            0F.mlp.L0   0F.combine.L0\n"
        "      6            0F.post\n"
        "      7            0B.post     0B.combine.L0\n"
        "      9            0B.mlp.L0   0B.dispatch.L0\n"
        "     11            0B.attn.L0                  REDUCE.L0\n"
        "     13            0B.pre                      REDUCE.root\n"
    )


def test_grid_marks_a_step_and_shows_what_is_around_it() -> None:
    plan = build_plan(shape=shape("m"), num_microbatches=1, order=OrderName.SERIAL)
    assert grid(plan, around=5, context=2) == (
        "   step  host      comp        comm\n"
        "    ...\n"
        "      2  0SYNC.L0              0F.dispatch.L0\n"
        "      4            0F.mlp.L0\n"
        ">     5                        0F.combine.L0\n"
        "      6            0F.post\n"
        "      7            0B.post     0B.combine.L0\n"
        "    ...\n"
    )


@settings(max_examples=60, deadline=None)
@given(plans())
def test_grid_reads_in_issue_order(plan: Plan) -> None:
    lines = grid(plan.actions).splitlines()[1:]
    words = [word for line in lines for word in line.split()[1:]]
    assert parse_words(" ".join(words)) == list(plan.actions)


def test_a_large_plan_is_built_in_two_seconds() -> None:
    start = time.perf_counter()
    plan = build_plan(
        shape=shape("m" * 32), num_microbatches=16, delay_wgrad=True, sharding=zero3()
    )
    assert time.perf_counter() - start < 2.0
    assert len(plan.actions) > 7000


def test_the_plan_package_works_where_torch_is_blocked() -> None:
    modules = sorted(
        f"ep_overlap.plan.{path.stem}"
        for path in (ROOT / "ep_overlap" / "plan").glob("*.py")
        if path.stem != "__init__"
    )
    assert "ep_overlap.plan.build" in modules
    script = f"""
import importlib, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "fsdp_hooks"):
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Block())
for name in {modules!r}:
    importlib.import_module(name)
from ep_overlap.plan.build import build_plan
from ep_overlap.plan.order import ModelShape
from ep_overlap.plan.action import LayerKind
print(len(build_plan(shape=ModelShape(layers=(LayerKind.MOE,)), num_microbatches=2).actions))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "26"


def test_a_plan_error_is_a_value_error() -> None:
    assert issubclass(PlanError, ValueError)
