"""What a model's parts must be for a schedule to run them; refused before anything runs."""

from collections.abc import Sequence
from typing import Any, Final, cast

from torch.distributed import ProcessGroup

from ep_overlap.plan.action import NODES_OF, Compute, LayerKind, Node, Phase
from ep_overlap.run.layer import ModelParts, MoELayerParts

MODEL_MEMBERS: Final = (
    "module",
    "layers",
    "wgrad_layers",
    "draws_random",
    "random_states",
    "replays_graphs",
    "shared_weights",
    "head",
    "collectives",
    "begin",
    "pre",
    "post",
    "whole",
)
"""Of ``ModelParts``."""

LAYER_MEMBERS: Final = ("kind", "module", "collectives")
"""Of ``LayerParts``."""


def check_model(parts: ModelParts[Any, Any]) -> None:
    """Whether a model has what a schedule asks of it.

    Raises:
        ValueError: it lacks some.
    """
    present = dir(parts)  # modules of a module, too
    if missing := [name for name in MODEL_MEMBERS if name not in present]:
        raise ValueError(
            f"{type(parts).__name__} has no {', '.join(missing)}; expected a model in parts, as "
            "ep_overlap.run.layer.ModelParts, such as GPTParts(model)"
        )


def check_parts(parts: ModelParts[Any, Any]) -> tuple[LayerKind, ...]:
    """The kind of each layer.

    Raises:
        ValueError: a layer lacks something, or one of its kind's nodes; or nodes of
            two lanes use one process group: two lanes have no order between them, so ranks could
            issue in different orders (and one gloo group used from two threads mixes their data).
    """
    kinds: list[LayerKind] = []
    users: list[tuple[ProcessGroup, Compute]] = []
    for index, layer in enumerate(parts.layers):
        _require(index, layer, LAYER_MEMBERS)
        if not isinstance(cast(object, layer.kind), LayerKind):
            raise ValueError(
                f"layer {index} ({type(layer).__name__}): expected a LayerKind as its kind, got "
                f"{layer.kind!r}"
            )
        needed = [str(node) for node in NODES_OF[layer.kind]]
        if layer.kind.has_experts:
            needed += ["finish", "dispatch_backward", "combine_backward"]
        missing = [name for name in needed if not callable(_member(layer, name))]
        if missing:
            raise ValueError(
                f"layer {index} ({type(layer).__name__}) is {layer.kind} but has no "
                f"{', '.join(missing)}; expected the methods {', '.join(needed)}. Add what is "
                "missing, or let its kind be another"
            )
        if layer.kind.has_experts:
            _require(index, layer, ("shared_experts",))
            _check_experts(index, cast(MoELayerParts[Any], layer))
        kinds.append(layer.kind)
        for node in NODES_OF[layer.kind]:
            user = Compute(0, Phase.FORWARD, node, index)
            for collective in layer.collectives(node):
                _check_lane(collective.group, user, users)
    for node in (Node.PRE, Node.POST):
        for collective in parts.collectives(node):
            _check_lane(collective.group, Compute(0, Phase.FORWARD, node), users)
    return tuple(kinds)


def check_replayed(
    *, device_type: str, strategy: str | None, delays: bool, fuses: bool, recomputes: bool
) -> None:
    """Whether a schedule can run parts that are replayed from CUDA graphs.

    Args:
        device_type: where its streams are.
        strategy: of its sharding.
        delays: whether weight gradients are nodes of their own.
        fuses: whether weight gradients are written straight where they go.
        recomputes: whether whole layers are recomputed.

    Raises:
        ValueError: it cannot.
    """
    unfit = {
        f"a schedule on {device_type}, expected CUDA": device_type != "cuda",
        "optim_grads_params, expected a strategy that leaves weights where they are": (
            strategy == "optim_grads_params"
        ),
        "delayed weight gradients, expected those that a node's backward makes": delays,
        "fused weight gradients, expected those that autograd adds up": fuses,
        "recompute_granularity='full', expected None": recomputes,
    }
    for found, is_so in unfit.items():
        if is_so:
            raise ValueError(f"cuda_graphs with {found}; leave cuda_graphs out, or change that")


def check_recomputed(parts: ModelParts[Any, Any]) -> None:
    """Whether layers can be run again, with the same result.

    Raises:
        ValueError: they draw random numbers, and nobody knows from where.
    """
    if parts.draws_random and parts.random_states is None:
        raise ValueError(
            f"recompute_granularity='full' with {type(parts).__name__}, which draws random numbers "
            "(draws_random) but has no random_states to draw them again from; expected a "
            "RandomStates, or recompute_granularity=None"
        )


def _require(index: int, layer: object, members: Sequence[str]) -> None:
    present = dir(layer)
    if missing := [name for name in members if name not in present]:
        raise ValueError(
            f"layer {index} ({type(layer).__name__}) has no {', '.join(missing)}; expected a "
            "layer in parts: ep_overlap.run.layer.MoELayerParts or DenseLayerParts"
        )


def _check_experts(index: int, layer: MoELayerParts[Any]) -> None:
    name = f"layer {index} ({type(layer).__name__})"
    has_shared = layer.shared_experts is not None
    if has_shared != (layer.kind is LayerKind.MOE_SHARED):
        raise ValueError(
            f"{name} is {layer.kind}, but its shared_experts is "
            f"{type(layer.shared_experts).__name__}; expected a module for "
            f"{LayerKind.MOE_SHARED}, and None for {LayerKind.MOE}"
        )


def _check_lane(
    group: ProcessGroup, user: Compute, users: list[tuple[ProcessGroup, Compute]]
) -> None:
    """Note who uses a group; refuse a second lane."""
    first = next((before for known, before in users if known is group), None)
    if first is None:
        users.append((group, user))
    elif first.lane is not user.lane:
        raise ValueError(
            f"{first} (lane {first.lane}) and {user} (lane {user.lane}) use one process group; "
            "give each lane a group of its own over the same ranks"
        )


def _member(layer: object, name: str) -> object:
    """Attribute by name, without running properties of other names."""
    return next((vars(cls)[name] for cls in type(layer).__mro__ if name in vars(cls)), None)
