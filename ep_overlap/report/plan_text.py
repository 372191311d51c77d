"""What there is to say of a plan besides its grid: what was proved of it, and its JSON form."""

from ep_overlap.plan.action import UnitAction, UnitOp
from ep_overlap.plan.order import computes_of
from ep_overlap.plan.plan import Plan


def proof(plan: Plan) -> str:
    """What a plan's checks have proved; a ``Plan`` that was built has passed them."""
    num_waits = sum(len(waited) for waited in plan.waits)
    facts = [
        f"{len(computes_of(plan.actions))} nodes, each issued once and after all that it needs",
        f"{num_waits} waits between lanes, enough for every dependency",
    ]
    gathers = plan.num_gathers
    if plan.max_unsharded_units is not None:
        facts.append(
            f"{sum(gathers.values())} gathers: weights are there when read, at most "
            f"{plan.max_unsharded_units} layers and the root at a time, all released at the end"
        )
    num_reductions = sum(
        isinstance(action, UnitAction) and action.op is UnitOp.REDUCE for action in plan.actions
    )
    if num_reductions:
        facts.append(f"{num_reductions} reductions, each after the last gradient that it reduces")
    facts.append(
        "each lane issues in one order, the same on every rank whose plan has the digest "
        f"{plan.digest[:16]}"
    )
    return "\n".join([plan.title, *(f"  proved: {fact}" for fact in facts)]) + "\n"


def as_json(plan: Plan) -> dict[str, object]:
    """The plan as ``json.dump`` takes it."""
    return {
        "title": plan.title,
        "order": plan.order,
        "num_layers": plan.shape.num_layers,
        "num_microbatches": plan.num_microbatches,
        "strategy": None if plan.sharding is None else str(plan.sharding.strategy),
        "max_unsharded_units": plan.max_unsharded_units,
        "num_all_gathers": sum(plan.num_gathers.values()),
        "num_gathers": dict(plan.num_gathers),
        "digest": plan.digest,
        "actions": [str(action) for action in plan.actions],
        "waits": [list(waited) for waited in plan.waits],
    }
