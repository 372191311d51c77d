"""The plan that a command's flags ask for. Imports no torch."""

from pathlib import Path

from ep_overlap.commands.arguments import PlanArguments, TrainArguments
from ep_overlap.plan.action import LayerKind
from ep_overlap.plan.build import build_plan, plan_from_words
from ep_overlap.plan.lower import Sharding
from ep_overlap.plan.order import ModelShape, OrderName
from ep_overlap.plan.plan import Plan


def plan_of(args: PlanArguments | TrainArguments) -> Plan:
    """Build and check the plan of one step.

    Raises:
        ValueError: an order file that cannot be read or does not hold, or a budget of units below
            what the order needs.
    """
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
        )
    return build_plan(
        shape=shape,
        num_microbatches=args.num_microbatches,
        order=order,
        delay_wgrad=args.delay_wgrad_compute,
        dispatch_over_wgrad=args.overlap_dispatch_backward_with_experts_wgrad,
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
        return path.read_text(encoding="utf-8")
    except OSError as error:
        names = ", ".join(OrderName)
        raise ValueError(
            f"--order {path}: expected {names}, or a readable file of action words; "
            f"got: {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--order {path}: expected a text file, got: {error}") from error
