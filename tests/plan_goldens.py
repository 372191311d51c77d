"""The plans that ``tests/golden/*.txt`` hold. ``python tests/plan_goldens.py`` writes them anew.

Read the difference before you commit it: these files are the schedule.
"""

from pathlib import Path

from plan_shapes import ZERO3, shape, zero3

from ep_overlap.plan.build import build_plan
from ep_overlap.plan.lower import Sharding, Strategy
from ep_overlap.plan.order import OrderName
from ep_overlap.plan.plan import Plan

GOLDEN = Path(__file__).parent / "golden"


def golden_plans() -> dict[str, Plan]:
    """Every golden plan by the name of its file."""
    plans: dict[str, Plan] = {}
    for order in OrderName:
        for num in (1, 2, 3):
            plans[f"{order}_3_layers_{num}_microbatches"] = build_plan(
                shape=shape("mmm"), num_microbatches=num, order=order
            )
        plans[f"{order}_delayed_wgrad"] = build_plan(
            shape=shape("mmm"), num_microbatches=3, order=order, delay_wgrad=True
        )
        plans[f"{order}_mixed_layers"] = build_plan(
            shape=shape("dmdm"), num_microbatches=3, order=order, delay_wgrad=True
        )
    for order in (OrderName.PLAIN, OrderName.PAIRED):
        for name, budget in (("2_units", 2), ("default_units", None)):
            plans[f"{order}_sharded_{name}"] = build_plan(
                shape=shape("mmmmm"), num_microbatches=3, order=order, sharding=zero3(budget)
            )
    for order in OrderName:
        plans[f"{order}_recomputed"] = build_plan(
            shape=shape("mdm"),
            num_microbatches=3,
            order=order,
            delay_wgrad=True,
            recompute=True,
            sharding=zero3(),
        )
    plans["serial_sharded_delayed_wgrad"] = build_plan(
        shape=shape("mdm"),
        num_microbatches=2,
        order=OrderName.SERIAL,
        delay_wgrad=True,
        sharding=zero3(),
    )
    for strategy in (Strategy.OPTIM, Strategy.OPTIM_GRADS):
        plans[f"paired_{strategy}"] = build_plan(
            shape=shape("mm"), num_microbatches=2, sharding=Sharding(strategy=strategy)
        )
    plans["paired_sharded_head"] = build_plan(
        shape=shape("mm"),
        num_microbatches=4,
        delay_wgrad=True,
        sharding=Sharding(strategy=ZERO3, has_head=True),
    )
    plans["forward_sharded"] = build_plan(
        shape=shape("mdm"), num_microbatches=2, sharding=zero3(), evaluate=True
    )
    return plans


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, plan in golden_plans().items():
        (GOLDEN / f"{name}.txt").write_text(plan.text(), encoding="utf-8")
