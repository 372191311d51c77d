"""One thing to do, as a small frozen value that prints as one word and parses back.

The same word is the profiler range, the trace label, the golden file's line and the error's
subject::

    2F.attn.L3      microbatch 2, forward, attn of layer 3
    1W.mlp.L0       microbatch 1, delayed weight gradient, mlp of layer 0
    1W.shared.L0    the same, of layer 0's shared experts, which run in attn
    0B.post         microbatch 0, backward, post (pre and post belong to no layer)
    0R.attn.L0      microbatch 0, recompute before its backward, attn of layer 0
    2SYNC.L3        the host waits for microbatch 2's split sizes in layer 3
    2RSYNC.L3       the same, for the dispatch that is recomputed
    UNSHARD.L3      gather unit L3          (units: L0, L1, ..., root, head)
    RESHARD.L3      release unit L3
    REDUCE.L3       reduce the gradients of unit L3

The idea of words that parse back is that of ``_Action`` in ``torch.distributed.pipelining``.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Phase(StrEnum):
    """Which pass over a node."""

    FORWARD = "F"
    BACKWARD = "B"
    """The gradient of the inputs and, when not delayed, of the weights."""
    WGRAD = "W"
    """The delayed weight gradient."""
    RECOMPUTE = "R"
    """The forward again, right before its backward: the first one kept the layer's input alone."""


class Node(StrEnum):
    """A part of the model that the schedule places as a whole."""

    PRE = "pre"
    ATTN = "attn"
    DISPATCH = "dispatch"
    MLP = "mlp"
    COMBINE = "combine"
    FINISH = "finish"
    """What follows the combine exchange, where a layer is recomputed: a node of R and B alone. Its
    forward is the first thing that the next layer's ``attn``, or ``post``, does."""
    POST = "post"
    SHARED = "shared"
    """Shared experts, which run in ``attn``: a node of the phase W alone."""


class LayerKind(StrEnum):
    """Which nodes a layer has (``NODES_OF``)."""

    MOE = "moe"
    MOE_SHARED = "moe_shared"
    """With experts that every token visits besides."""
    DENSE = "dense"

    @property
    def has_experts(self) -> bool:
        """Whether tokens are exchanged."""
        return self is not LayerKind.DENSE


_MOE_NODES: Final = (Node.ATTN, Node.DISPATCH, Node.MLP, Node.COMBINE)

NODES_OF: Final[Mapping[LayerKind, Sequence[Node]]] = {
    LayerKind.MOE: _MOE_NODES,
    LayerKind.MOE_SHARED: _MOE_NODES,
    LayerKind.DENSE: (Node.ATTN, Node.MLP),
}
"""The nodes of each kind of layer, in forward order."""

RECOMPUTED_OF: Final[Mapping[LayerKind, Sequence[Node]]] = {
    LayerKind.MOE: (*_MOE_NODES, Node.FINISH),
    LayerKind.MOE_SHARED: (*_MOE_NODES, Node.FINISH),
    LayerKind.DENSE: (Node.ATTN, Node.MLP),
}
"""The nodes of R and of B where layers are recomputed, in forward order."""

WGRADS_OF: Final = {
    LayerKind.MOE: (Node.MLP, Node.ATTN),
    LayerKind.MOE_SHARED: (Node.MLP, Node.SHARED, Node.ATTN),
    LayerKind.DENSE: (Node.MLP, Node.ATTN),
}
"""The delayed weight gradients of each kind of layer, in backward order."""


class UnitOp(StrEnum):
    """What a plan does to a unit."""

    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE = "REDUCE"


class Lane(StrEnum):
    """The first-in-first-out queue that an action is issued to; a stream runs each."""

    COMP = "comp"
    COMM = "comm"
    AG = "ag"
    RS = "rs"
    HOST = "host"


ROOT_UNIT: Final = "root"
"""The unit of what belongs to no layer: embedding, final norm, and the output layer where that is
no unit of its own."""

HEAD_UNIT: Final = "head"
"""The output layer's, where it is a unit of its own."""

PINNED_UNITS: Final = frozenset({ROOT_UNIT, HEAD_UNIT})
"""Gathered once a step, and of no budget of layers."""

_LAYERLESS: Final = frozenset({Node.PRE, Node.POST})
_PHASES_OF_FINISH: Final = frozenset({Phase.RECOMPUTE, Phase.BACKWARD})


@dataclass(frozen=True, slots=True)
class Compute:
    """A node in a phase for a microbatch. ``layer`` is None for ``pre`` and ``post`` alone."""

    microbatch: int
    phase: Phase
    node: Node
    layer: int | None = None

    def __post_init__(self) -> None:
        if self.node is Node.SHARED and self.phase is not Phase.WGRAD:
            raise ValueError(f"{self.node} is a node of phase W alone (got {self.phase})")
        if self.node is Node.FINISH and self.phase not in _PHASES_OF_FINISH:
            raise ValueError(f"{self.node} is a node of phases R and B alone (got {self.phase})")
        if self.phase is Phase.RECOMPUTE and self.node in _LAYERLESS:
            raise ValueError(f"{self.node} is not recomputed; layers are")
        if (self.node in _LAYERLESS) != (self.layer is None):
            rule = "belongs to no layer" if self.node in _LAYERLESS else "needs a layer"
            raise ValueError(f"{self.node} {rule} (got layer={self.layer})")

    def __str__(self) -> str:
        word = f"{self.microbatch}{self.phase}.{self.node}"
        return word if self.layer is None else f"{word}.L{self.layer}"

    @property
    def lane(self) -> Lane:
        """Exchanges run on the comm lane, everything else on the compute lane."""
        return Lane.COMM if self.node in (Node.DISPATCH, Node.COMBINE) else Lane.COMP


@dataclass(frozen=True, slots=True)
class UnitAction:
    """Gather, release or reduce one unit."""

    op: UnitOp
    unit: str

    def __str__(self) -> str:
        return f"{self.op}.{self.unit}"

    @property
    def lane(self) -> Lane:
        """Reductions have a lane of their own; a release follows gathers in stream order."""
        return Lane.RS if self.op is UnitOp.REDUCE else Lane.AG


@dataclass(frozen=True, slots=True)
class Sync:
    """The host waits for the split sizes that ``attn`` of this microbatch and layer computed."""

    microbatch: int
    layer: int
    phase: Phase = Phase.FORWARD
    """Of the ``attn`` and of the dispatch: forward or recompute."""

    def __str__(self) -> str:
        again = "" if self.phase is Phase.FORWARD else str(self.phase)
        return f"{self.microbatch}{again}SYNC.L{self.layer}"

    @property
    def lane(self) -> Lane:
        """The host waits, and no stream."""
        return Lane.HOST


Action = Compute | UnitAction | Sync

_COMPUTE: Final = re.compile(r"(\d+)([FBWR])\.([a-z]+)(?:\.L(\d+))?")
_UNIT: Final = re.compile(r"(UNSHARD|RESHARD|REDUCE)\.(\w+)")
_SYNC: Final = re.compile(r"(\d+)(R?)SYNC\.L(\d+)")


def parse_action(word: str) -> Action:
    """Read one word back; ``parse_action(str(a)) == a`` for every action.

    Raises:
        ValueError: the word is none of the forms in this module's docstring.
    """
    if match := _COMPUTE.fullmatch(word):
        microbatch, phase, node, layer = match.groups()
        if node in frozenset(Node):
            return Compute(
                int(microbatch), Phase(phase), Node(node), None if layer is None else int(layer)
            )
    if match := _UNIT.fullmatch(word):
        return UnitAction(UnitOp(match[1]), match[2])
    if match := _SYNC.fullmatch(word):
        return Sync(int(match[1]), int(match[3]), Phase(match[2] or Phase.FORWARD))
    raise ValueError(
        f"not an action: {word!r}; expected a word such as 2F.attn.L3, 0B.post, 2SYNC.L3 "
        "or UNSHARD.L3"
    )
