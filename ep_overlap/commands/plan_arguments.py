"""The plan that a command's flags ask for. Imports no torch."""

from pathlib import Path
from typing import Final

from ep_overlap.commands.arguments import PlanArguments, TrainArguments
from ep_overlap.plan.action import LayerKind
from ep_overlap.plan.build import build_plan, plan_from_words
from ep_overlap.plan.check import PlanError
from ep_overlap.plan.lower import Sharding
from ep_overlap.plan.order import ModelShape, OrderName
from ep_overlap.plan.plan import Plan

_TYPED: Final = {
    "max_unsharded_units": "--max-unsharded-units",
    "use the serial order": "take --order serial",
    "set recompute_granularity='full'": "give --recompute-granularity full",
    "or do not recompute": "or leave out --recompute-granularity full",
    "take an order of the model's sizes": "set --num-layers and --num-microbatches to those",
}
"""What plans' errors say, and what a user types."""


def plan_of(args: PlanArguments | TrainArguments) -> Plan:
    """Build and check the plan of one step.

    Raises:
        ValueError: an order file that cannot be read or does not hold, or a budget of units below
            what the order needs. It speaks of flags, and of the file.
        PlanError: the same; the lines after the first show the place.
    """
    try:
        return _plan_of(args)
    except PlanError as error:
        raise PlanError(_in_flags(args, str(error)), step=error.step) from None
    except ValueError as error:
        raise ValueError(_in_flags(args, str(error))) from None


def _in_flags(args: PlanArguments | TrainArguments, error: str) -> str:
    """An error with what the user types in place of the fields' names, and with the order file's
    name."""
    first, newline, shown = error.partition("\n")
    for ours, typed in _TYPED.items():
        first = first.replace(ours, typed)
    order = order_of(args)
    if isinstance(order, Path) and not first.startswith("--order"):
        first = f"--order {order}: {first}"
    return first + newline + shown


def _plan_of(args: PlanArguments | TrainArguments) -> Plan:
    has_shared = args.moe_shared_expert_intermediate_size is not None
    moe = LayerKind.MOE_SHARED if has_shared else LayerKind.MOE
    shape = ModelShape(
        layers=tuple(
            LayerKind.DENSE if index % args.moe_layer_freq else moe
            for index in range(args.num_layers)
        )
    )
    sharding = Sharding(
        strategy=args.data_parallel_sharding_strategy,
        max_unsharded_units=args.max_unsharded_units,
    )
    order = order_of(args)
    if isinstance(order, Path):
        return plan_from_words(
            read_order(order),
            shape=shape,
            num_microbatches=args.num_microbatches,
            sharding=sharding,
            delay_wgrad=args.delay_wgrad_compute
            or args.overlap_dispatch_backward_with_experts_wgrad,
            recompute=args.recomputes_layers,
        )
    return build_plan(
        shape=shape,
        num_microbatches=args.num_microbatches,
        order=order,
        delay_wgrad=args.delay_wgrad_compute,
        dispatch_over_wgrad=args.overlap_dispatch_backward_with_experts_wgrad,
        recompute=args.recomputes_layers,
        sharding=sharding,
    )


def order_of(args: PlanArguments | TrainArguments) -> OrderName | Path:
    """What ``--order`` means: a built-in order, or an order file."""
    if not args.overlap_moe_expert_parallel_comm:
        return OrderName.SERIAL
    if args.order is None:
        return OrderName.PAIRED if args.num_microbatches > 1 else OrderName.PLAIN
    if args.order in frozenset(OrderName):
        return OrderName(args.order)
    return Path(args.order)


def read_order(path: Path) -> str:
    """The text of an order file.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8-sig")  # as some editors write it
    except OSError as error:
        names = ", ".join(OrderName)
        raise ValueError(
            f"--order {path}: expected {names}, or a readable file of action words; "
            f"got: {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--order {path}: expected a text file, got: {error}") from error
