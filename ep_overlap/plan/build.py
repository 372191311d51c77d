"""From arguments, or from an order file, to a checked ``Plan``."""

from collections.abc import Sequence
from typing import Final

from ep_overlap.plan.action import Action, Compute, Phase, parse_action
from ep_overlap.plan.check import PlanError, check, check_order
from ep_overlap.plan.edges import waits
from ep_overlap.plan.lower import Sharding, add_sharding, add_sync
from ep_overlap.plan.order import (
    ModelShape,
    OrderName,
    combined_1f1b,
    forward_only,
    order_named,
    serial,
)
from ep_overlap.plan.plan import Plan

_COMMENT: Final = "#"


def build_plan(
    *,
    shape: ModelShape,
    num_microbatches: int,
    order: OrderName | str = OrderName.PAIRED,
    delay_wgrad: bool = False,
    dispatch_over_wgrad: bool = False,
    recompute: bool = False,
    sharding: Sharding | None = None,
    evaluate: bool = False,
) -> Plan:
    """Order the nodes, add syncs and unit actions, check the result.

    With ``evaluate`` the plan is a forward pass of each microbatch; ``order`` and what concerns
    weight gradients and recompute then have no say. ``dispatch_over_wgrad``, ``recompute``: see
    ``order.serial``.

    Raises:
        ValueError: no such order, no layers, no microbatches, or a budget below what the order
            needs.
    """
    order = order_named(order)
    name = "forward" if evaluate else str(order)
    if evaluate:
        nodes = forward_only(shape, num_microbatches)
    elif order is OrderName.SERIAL:
        nodes = serial(
            shape,
            num_microbatches,
            delay_wgrad=delay_wgrad,
            dispatch_over_wgrad=dispatch_over_wgrad,
            recompute=recompute,
        )
    else:
        nodes = combined_1f1b(
            shape,
            num_microbatches,
            paired=order is OrderName.PAIRED,
            delay_wgrad=delay_wgrad,
            dispatch_over_wgrad=dispatch_over_wgrad,
            recompute=recompute,
        )
    bare = _bare_plan(
        nodes, name=name, shape=shape, num_microbatches=num_microbatches, sharding=sharding
    )
    return _lower(bare)


def plan_from_words(
    text: str,
    *,
    shape: ModelShape,
    num_microbatches: int,
    sharding: Sharding | None = None,
    delay_wgrad: bool = False,
    recompute: bool = False,
) -> Plan:
    """A plan whose order is written in an order file; the passes add the rest.

    The file holds words of nodes, such as ``2F.attn.L3``, parted by any white space; ``#`` starts
    a comment that ends with the line. ``Plan.order_text`` writes such a file.

    Weight gradients are delayed where it has W nodes; ``delay_wgrad`` insists on some. Layers are
    recomputed if it has R nodes; ``recompute`` says whether it must have.

    Raises:
        ValueError: a word is none, or no node's; the message names the line. Or there is no W node,
            or R nodes are there against ``recompute``, or not.
        PlanError: the order does not hold; the message names the line, says if the order is of
            other sizes, and shows the grid.
    """
    words = _words_with_lines(text)
    if not words:
        raise ValueError("the order holds no words; expected words such as 0F.pre or 2F.attn.L3")
    for action, line in words:
        if not isinstance(action, Compute):
            raise ValueError(
                f"line {line}: {action} is no node's word; an order file holds nodes alone, such "
                "as 2F.attn.L3, and gathers, reductions and syncs are added: leave it out"
            )
    nodes = [action for action, _ in words if isinstance(action, Compute)]
    if delay_wgrad and not any(node.phase is Phase.WGRAD for node in nodes):
        raise ValueError(
            "weight gradients are to be delayed, but the order has no W nodes, such as 0W.mlp.L0; "
            "add them, or do not delay"
        )
    if recompute != any(node.phase is Phase.RECOMPUTE for node in nodes):
        raise ValueError(
            "layers are to be recomputed, but the order has no R nodes, such as 0R.attn.L0; add "
            "them, or do not recompute"
            if recompute
            else "the order has R nodes, such as 0R.attn.L0, but layers are not to be recomputed; "
            "set recompute_granularity='full', or leave them out"
        )
    bare = _bare_plan(
        [action for action, _ in words],
        name="own",
        shape=shape,
        num_microbatches=num_microbatches,
        sharding=sharding,
    )
    try:
        check_order(bare)
    except PlanError as error:
        line = words[error.step or 0][1]
        reason, _, shown = str(error).partition("\n")
        reason += _other_sizes(nodes, bare)
        raise PlanError(f"line {line}: {reason}\n{shown}", step=error.step) from None
    return _lower(bare)


def _other_sizes(nodes: Sequence[Compute], plan: Plan) -> str:
    """The end of an error: what the order is of, where that is not what the plan is of."""
    num_layers = 1 + max(-1 if node.layer is None else node.layer for node in nodes)
    num_microbatches = 1 + max(node.microbatch for node in nodes)
    expected = (plan.shape.num_layers, plan.num_microbatches)
    if (num_layers, num_microbatches) == expected:
        return ""
    return (
        f": the order is of {_counted(num_layers, num_microbatches)}, expected "
        f"{_counted(*expected)}; take an order of the model's sizes"
    )


def _counted(num_layers: int, num_microbatches: int) -> str:
    layers = "1 layer" if num_layers == 1 else f"{num_layers} layers"
    return f"{layers} and {num_microbatches} microbatch{'' if num_microbatches == 1 else 'es'}"


def parse_words(text: str) -> list[Action]:
    """Read words of any kind; ``parse_words(plan.text()) == list(plan.actions)``.

    Raises:
        ValueError: a word is none; the message names the line.
    """
    return [action for action, _ in _words_with_lines(text)]


def _words_with_lines(text: str) -> list[tuple[Action, int]]:
    """Each word with the number of its line, from 1."""
    words: list[tuple[Action, int]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        for word in line.partition(_COMMENT)[0].split():
            try:
                words.append((parse_action(word), number))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
    return words


def _bare_plan(
    nodes: Sequence[Action],
    *,
    name: str,
    shape: ModelShape,
    num_microbatches: int,
    sharding: Sharding | None,
) -> Plan:
    """A plan of nodes alone, before the passes."""
    return Plan(
        shape=shape,
        order=name,
        num_microbatches=num_microbatches,
        sharding=sharding,
        actions=tuple(nodes),
        waits=waits(nodes),
    )


def _lower(bare: Plan) -> Plan:
    """Run the passes and check what comes out."""
    actions = add_sync(bare.actions)
    if bare.sharding is not None:
        actions = add_sharding(actions, bare.sharding)
    plan = Plan(
        shape=bare.shape,
        order=bare.order,
        num_microbatches=bare.num_microbatches,
        sharding=bare.sharding,
        actions=tuple(actions),
        waits=waits(actions),
    )
    check(plan)
    return plan
