"""Model shapes and drawn arguments that the plan tests share."""

from typing import Any

from hypothesis import strategies as st

from ep_overlap.plan.action import LayerKind
from ep_overlap.plan.build import build_plan
from ep_overlap.plan.lower import Sharding, Strategy
from ep_overlap.plan.order import ModelShape, OrderName
from ep_overlap.plan.plan import Plan

ZERO3 = Strategy.OPTIM_GRADS_PARAMS


def shape(letters: str) -> ModelShape:
    """``m`` a MoE layer, ``d`` a dense one."""
    kinds = {"m": LayerKind.MOE, "d": LayerKind.DENSE}
    return ModelShape(layers=tuple(kinds[letter] for letter in letters))


def zero3(max_unsharded_units: int | None = None) -> Sharding:
    return Sharding(strategy=ZERO3, max_unsharded_units=max_unsharded_units)


@st.composite
def shardings(draw: st.DrawFn, num_layers: int) -> Sharding | None:
    if draw(st.booleans()):
        return None
    return Sharding(
        strategy=draw(st.sampled_from(Strategy)),
        max_unsharded_units=draw(st.none() | st.integers(min(2, num_layers), num_layers + 1)),
        reduce_each_microbatch=draw(st.none() | st.booleans()),
        has_head=draw(st.booleans()),
    )


@st.composite
def arguments(draw: st.DrawFn) -> dict[str, Any]:
    letters = draw(st.text("md", min_size=1, max_size=5))
    return {
        "shape": shape(letters),
        "num_microbatches": draw(st.integers(1, 5)),
        "order": draw(st.sampled_from(OrderName)),
        "delay_wgrad": draw(st.booleans()),
        "recompute": draw(st.booleans()),
        "sharding": draw(shardings(len(letters))),
        "evaluate": draw(st.sampled_from([False, False, False, True])),
    }


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    return build_plan(**draw(arguments()))
