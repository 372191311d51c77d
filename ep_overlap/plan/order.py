"""The order in which a step issues its nodes: pure functions, arguments in, ``list[Compute]`` out.

Three orders, and a forward pass alone:

- ``serial``: one microbatch after the other; what the overlapped orders are compared with.
- ``combined_1f1b(paired=False)``, *plain*: backward of one microbatch beside forward of the next,
  so that each exchange runs under the other's compute. The first forward and the last backward
  run alone.
- ``combined_1f1b(paired=True)``, *paired*: the first two forwards and the last two backwards are
  interleaved as well, for one more microbatch of activations.

Source of the plain order: Megatron-LM's ``combined_1f1b`` schedule, with
``TransformerLayerSchedulePlan.run`` (``megatron/core/models/common/model_chunk_schedule_plan.py``);
the backward of ``pre`` comes ahead of the first layer's last W nodes here, not behind them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

from ep_overlap.plan.action import (
    NODES_OF,
    RECOMPUTED_OF,
    WGRADS_OF,
    Compute,
    LayerKind,
    Node,
    Phase,
    parse_action,
)


class OrderName(StrEnum):
    """The built-in orders of a training step."""

    SERIAL = "serial"
    PLAIN = "plain"
    PAIRED = "paired"


def order_named(name: OrderName | str) -> OrderName:
    """The built-in order of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in list(OrderName):
        raise ValueError(f"unknown order {name!r}; expected one of {', '.join(OrderName)}")
    return OrderName(name)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What an order needs to know of a model.

    Raises:
        ValueError: there is no layer.
    """

    layers: tuple[LayerKind, ...]
    """The kind of each layer, first layer first."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a model needs at least 1 layer, got 0; pass one LayerKind per layer")

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self.layers)


type _Template = tuple[Compute, ...]


def _template(words: str) -> _Template:
    """A step of the schedule, in the words of an order.

    The numbers are places to fill in: microbatch 1 is "the second of the microbatches given",
    L1 "the second of the layers given".
    """
    actions = [parse_action(word) for word in words.split()]
    return tuple(action for action in actions if isinstance(action, Compute))


_ONE_FORWARD: Final = _template("0F.attn.L0 0F.dispatch.L0 0F.mlp.L0 0F.combine.L0")

_SERIAL_BACKWARD: Final = _template(
    "0B.finish.L0 0B.combine.L0 0B.mlp.L0 0W.mlp.L0 0B.dispatch.L0"
    " 0B.attn.L0 0W.shared.L0 0W.attn.L0"
)
_SERIAL_BACKWARD_OVER_WGRAD: Final = _template(
    "0B.finish.L0 0B.combine.L0 0B.mlp.L0 0B.dispatch.L0 0W.mlp.L0"
    " 0B.attn.L0 0W.shared.L0 0W.attn.L0"
)

# L1 is the layer below L0. mlp.W hides dispatch.B, attn.W hides the combine.B of the layer below.
_ONE_BACKWARD: Final = _template(
    "0B.mlp.L0 0B.dispatch.L0 0W.mlp.L0  0B.attn.L0 0B.combine.L1 0W.shared.L0 0W.attn.L0"
)

# Backward of microbatch 0 in layer L0 beside forward of microbatch 1 in layer L1. dispatch.F comes
# after mlp.B because the host waits for the split sizes right before it: the compute lane must
# have work by then.
_STEADY: Final = _template(
    "0B.combine.L0 1F.attn.L1"
    " 0B.mlp.L0 1F.dispatch.L1 0W.mlp.L0 0B.dispatch.L0"
    " 1F.mlp.L1 1F.combine.L1"
    " 0B.attn.L0 0W.shared.L0 0W.attn.L0"
)

# Half a layer apart. Each dispatch is issued one compute node after the attn that feeds it, for
# the reason given above; lane by lane the order is the same as right after it.
_TWO_FORWARDS: Final = _template(
    "0F.attn.L0 1F.attn.L0 0F.dispatch.L0 0F.mlp.L0 1F.dispatch.L0 0F.combine.L0"
    " 1F.mlp.L0 1F.combine.L0"
)

# Backward waits for no sizes, so each exchange is issued right after what feeds it.
_TWO_BACKWARDS: Final = _template(
    "0B.mlp.L0 0B.dispatch.L0 0W.mlp.L0  1B.mlp.L0 1B.dispatch.L0 1W.mlp.L0"
    " 0B.attn.L0 0B.combine.L1 0W.shared.L0 0W.attn.L0"
    " 1B.attn.L0 1B.combine.L1 1W.shared.L0 1W.attn.L0"
)


# Where layers are recomputed. Nothing of the layer below runs beside a layer's last node: its own
# recompute comes first. So combine.B, and dispatch.B without W nodes, have no compute beside them.
_AGAIN: Final = _template("0R.attn.L0 0R.dispatch.L0 0R.mlp.L0 0R.combine.L0 0R.finish.L0")

_STEADY_AGAIN: Final = _template(
    "0R.attn.L0 1F.attn.L1 0R.dispatch.L0 0R.mlp.L0 1F.dispatch.L1 0R.combine.L0"
    " 1F.mlp.L1 0R.finish.L0 0B.finish.L0 0B.combine.L0 1F.combine.L1"
    " 0B.mlp.L0 0B.dispatch.L0 0W.mlp.L0 0B.attn.L0 0W.shared.L0 0W.attn.L0"
)

_TWO_BACKWARDS_AGAIN: Final = _template(
    "0R.attn.L0 1R.attn.L0 0R.dispatch.L0 0R.mlp.L0 1R.dispatch.L0 0R.combine.L0"
    " 1R.mlp.L0 1R.combine.L0"
    " 0R.finish.L0 0B.finish.L0 0B.combine.L0 1R.finish.L0 1B.finish.L0 1B.combine.L0"
    " 0B.mlp.L0 0B.dispatch.L0 0W.mlp.L0 1B.mlp.L0 1B.dispatch.L0 1W.mlp.L0"
    " 0B.attn.L0 0W.shared.L0 0W.attn.L0 1B.attn.L0 1W.shared.L0 1W.attn.L0"
)


def serial(
    shape: ModelShape,
    num_microbatches: int,
    *,
    delay_wgrad: bool = False,
    dispatch_over_wgrad: bool = False,
    recompute: bool = False,
) -> list[Compute]:
    """Each microbatch's whole forward, then its whole backward; W right after its B.

    With ``dispatch_over_wgrad`` the backward of each dispatch runs over the experts' W, which is a
    node of its own then (Megatron's ``overlap_dispatch_backward_with_experts_wgrad``). With
    ``recompute`` each layer's forward is run again right before its backward.
    """
    _require_microbatches(num_microbatches)
    writer = _Writer.of(shape, delay_wgrad, dispatch_over_wgrad, recompute)
    backward = _SERIAL_BACKWARD_OVER_WGRAD if dispatch_over_wgrad else _SERIAL_BACKWARD
    order: list[Compute] = []
    for microbatch in range(num_microbatches):
        order += writer.forward(microbatch)
        order.append(_post(microbatch, Phase.BACKWARD))
        for layer in reversed(range(shape.num_layers)):
            order += writer.fill((*_AGAIN, *backward), (microbatch,), (layer,))
    return order


def combined_1f1b(
    shape: ModelShape,
    num_microbatches: int,
    *,
    paired: bool,
    delay_wgrad: bool = False,
    dispatch_over_wgrad: bool = False,
    recompute: bool = False,
) -> list[Compute]:
    """Backward of one microbatch beside forward of a later one (this module's docstring).

    Paired needs two microbatches; with one it is the plain order, which then is the serial one
    but for the place of delayed W nodes. Dispatch's backward runs over the experts' W wherever that
    is a node. With ``recompute`` each layer's forward is run again before its backward, its
    exchanges beside the other microbatch's compute.
    """
    _require_microbatches(num_microbatches)
    writer = _Writer.of(shape, delay_wgrad, dispatch_over_wgrad, recompute)
    if paired and num_microbatches > 1:
        return _paired(writer, num_microbatches)
    return _plain(writer, num_microbatches)


def forward_only(shape: ModelShape, num_microbatches: int) -> list[Compute]:
    """Each microbatch's forward, one after the other: evaluation."""
    _require_microbatches(num_microbatches)
    writer = _Writer(shape=shape, delayed=frozenset(), recompute=False)
    return [node for microbatch in range(num_microbatches) for node in writer.forward(microbatch)]


@dataclass(frozen=True, kw_only=True)
class _Writer:
    """Writes the pieces that the orders are made of."""

    shape: ModelShape
    delayed: frozenset[tuple[Node, int]]
    """What has W nodes, with its layer."""
    recompute: bool
    """Whether layers have R nodes."""

    @classmethod
    def of(
        cls, shape: ModelShape, delay_wgrad: bool, dispatch_over_wgrad: bool, recompute: bool
    ) -> Self:
        """A writer of W nodes where they are asked for; dispatch needs those of its experts."""
        return cls(
            shape=shape,
            recompute=recompute,
            delayed=frozenset(
                (node, layer)
                for layer, kind in enumerate(shape.layers)
                for node in WGRADS_OF[kind]
                if delay_wgrad or (dispatch_over_wgrad and node is Node.MLP and kind.has_experts)
            ),
        )

    def fill(
        self, template: _Template, microbatches: tuple[int, ...], layers: tuple[int, ...]
    ) -> list[Compute]:
        """Fill a template in, less what a layer's kind lacks and layers below the first; and put
        the backward of pre behind that of the first layer's attn.

        So the gradient of a whole vocabulary is reduced beside the W nodes, and the other
        microbatch's nodes, that are left.
        """
        filled: list[Compute] = []
        for place in template:
            assert place.layer is not None, "templates hold nodes of layers"
            layer = layers[place.layer]
            if layer < 0:
                continue
            kind = self.shape.layers[layer]
            if place.phase is Phase.WGRAD:
                is_wanted = (place.node, layer) in self.delayed
            elif self.recompute:
                is_wanted = place.node in RECOMPUTED_OF[kind]
            else:
                is_wanted = place.phase is not Phase.RECOMPUTE and place.node in NODES_OF[kind]
            if is_wanted:
                microbatch = microbatches[place.microbatch]
                filled.append(Compute(microbatch, place.phase, place.node, layer))
                if layer == 0 and (place.phase, place.node) == (Phase.BACKWARD, Node.ATTN):
                    filled.append(_pre(microbatch, Phase.BACKWARD))
        return filled

    def forward(self, microbatch: int) -> list[Compute]:
        order = [_pre(microbatch, Phase.FORWARD)]
        for layer in range(self.shape.num_layers):
            order += self.fill(_ONE_FORWARD, (microbatch,), (layer,))
        return [*order, _post(microbatch, Phase.FORWARD)]

    def backward(self, microbatch: int) -> list[Compute]:
        order = self.begin_backward(microbatch)
        template = (*_AGAIN, *_SERIAL_BACKWARD_OVER_WGRAD) if self.recompute else _ONE_BACKWARD
        for layer in reversed(range(self.shape.num_layers)):
            order += self.fill(template, (microbatch,), (layer, layer - 1))
        return order

    def begin_backward(self, microbatch: int) -> list[Compute]:
        """The backward of post, and its first exchange: combine of the last layer, if that is MoE
        and not recomputed first."""
        order = [_post(microbatch, Phase.BACKWARD)]
        if not self.recompute:
            last = self.shape.num_layers - 1
            order += self.fill(_template("0B.combine.L0"), (microbatch,), (last,))
        return order

    def steady(self, *, backward: int, forward: int) -> list[Compute]:
        """All layers of a microbatch's backward, once begun, beside those of another's forward."""
        last = self.shape.num_layers - 1
        begun = self.begin_backward(backward)
        order: list[Compute] = []
        for layer in range(self.shape.num_layers):
            template = _STEADY_AGAIN if self.recompute else _STEADY
            order += self.fill(template, (backward, forward), (last - layer, layer))
        return [node for node in order if node not in begun]


def _plain(writer: _Writer, num_microbatches: int) -> list[Compute]:
    order = writer.forward(0)
    for backward in range(num_microbatches - 1):
        forward = backward + 1
        order += [_pre(forward, Phase.FORWARD), *writer.begin_backward(backward)]
        order += writer.steady(backward=backward, forward=forward)
        # It waits for the last combine.F, which attn.B, pre.B and attn.W hide.
        order.append(_post(forward, Phase.FORWARD))
    return order + writer.backward(num_microbatches - 1)


def _paired(writer: _Writer, num_microbatches: int) -> list[Compute]:
    order = [*_two_forwards(writer), *writer.begin_backward(0)]
    for backward in range(num_microbatches - 2):
        forward = backward + 2
        layers = writer.steady(backward=backward, forward=forward)
        # Nothing of a post is exchanged, so where a pair ends, the exchange lane would be idle
        # under both of them. The previous forward's is needed only where this pair ends: it waits
        # until the exchanges of the first layers are under way. (Ahead of an attn, not behind it:
        # the exchange lane follows each attn, and what post read of it is let go of there.) The
        # next backward's comes at the end, under the last combine.F.
        second = min(1, writer.shape.num_layers - 1)
        second_attn = layers.index(Compute(forward, Phase.FORWARD, Node.ATTN, second))
        last_attn = layers.index(Compute(backward, Phase.BACKWARD, Node.ATTN, 0))
        order += [
            _pre(forward, Phase.FORWARD),
            *layers[:second_attn],
            _post(forward - 1, Phase.FORWARD),
            *layers[second_attn:last_attn],
            *writer.begin_backward(backward + 1),
            *layers[last_attn:],
        ]
    return order + _two_backwards(writer, num_microbatches - 2)


def _two_forwards(writer: _Writer) -> list[Compute]:
    """Forward of microbatches 0 and 1, without 1's post (see ``_paired``)."""
    order = [_pre(0, Phase.FORWARD), _pre(1, Phase.FORWARD)]
    for layer in range(writer.shape.num_layers):
        order += writer.fill(_TWO_FORWARDS, (0, 1), (layer,))
    return [*order, _post(0, Phase.FORWARD)]


def _two_backwards(writer: _Writer, first: int) -> list[Compute]:
    """Backward of microbatches ``first``, once begun, and ``first + 1``, with the latter's late
    post.F."""
    second = first + 1
    order = [_post(second, Phase.FORWARD), *writer.begin_backward(second)]
    for layer in reversed(range(writer.shape.num_layers)):
        template = _TWO_BACKWARDS_AGAIN if writer.recompute else _TWO_BACKWARDS
        order += writer.fill(template, (first, second), (layer, layer - 1))
    return order


def computes_of(actions: Iterable[object]) -> list[Compute]:
    """The nodes among the actions, in issue order."""
    return [action for action in actions if isinstance(action, Compute)]


def _pre(microbatch: int, phase: Phase) -> Compute:
    return Compute(microbatch, phase, Node.PRE)


def _post(microbatch: int, phase: Phase) -> Compute:
    return Compute(microbatch, phase, Node.POST)


def _require_microbatches(num_microbatches: int) -> None:
    if num_microbatches < 1:
        raise ValueError(
            f"a step needs at least 1 microbatch, got {num_microbatches}; "
            "set num_microbatches to 1 or more"
        )
