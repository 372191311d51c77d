"""What the tests of weight gradients share: models that use one weight twice, in every way there
is; a step of several microbatches; a sink that counts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product

import torch
from sharding_support import Grads, double
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp_hooks.accumulation import microbatch
from fsdp_hooks.lifecycle import ShardedModule
from fsdp_hooks.wgrad import Destination, GradSink, ManagedLayer, managed_linear
from fsdp_hooks.wgrad_layers import DelayedWgrad, delayed_wgrad, manage_wgrad

WIDTH = 4
VOCAB = 6
MAX_ERROR = 1e-12

Shard = Callable[[nn.Module], nn.Module]


# ---- models: int64 tokens [B, T] to a scalar loss ------------------------------------------------


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Not cross entropy, which starts threads for its softmax."""
    chosen = logits.gather(-1, tokens.unsqueeze(-1))
    return (torch.tanh(logits).square().sum(-1) - chosen.squeeze(-1)).mean()


class Shares(nn.Module):
    """A model one of whose weights is used more than once.

    Args:
        uses_plainly: also outside of the layer that it belongs to.
    """

    num_uses: int
    """Of managed weights, in one forward."""
    units: Sequence[str] = ()
    """Parts that can be sharded by themselves: all uses of their weights are their own."""

    def __init__(self, *, uses_plainly: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.uses_plainly = uses_plainly

    def units_now(self) -> Sequence[nn.Module]:
        """A weight that is used past its unit would not be there."""
        return [] if self.uses_plainly else [self.get_submodule(name) for name in self.units]

    def plainly(self, x: Tensor, weight: Tensor) -> Tensor:
        return x + 0.5 * torch.sin(F.linear(x, weight)) if self.uses_plainly else x


class Tied(Shares):
    """Embedding and output layer."""

    num_uses = 2

    def __init__(self, *, uses_plainly: bool) -> None:
        super().__init__(uses_plainly=uses_plainly)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.inner(torch.tanh(self.embed(tokens)))
        if self.uses_plainly:
            x = x + F.embedding(tokens.flip(1), self.head.weight)
        return loss_of(self.head(x), tokens)


class CalledTwice(Shares):
    """One module."""

    num_uses = 3
    units = ("inner",)

    def __init__(self, *, uses_plainly: bool) -> None:
        super().__init__(uses_plainly=uses_plainly)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.plainly(self.embed(tokens), self.inner.weight)
        x = self.inner(torch.tanh(self.inner(x)))
        return loss_of(self.head(x), tokens)


class Twofold(ManagedLayer):
    """A layer of one's own, that uses its weight twice on one path."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        inner = managed_linear(self, x, self.weight)
        return managed_linear(self, torch.tanh(inner), self.weight)


class UsedTwiceByOneLayer(Shares):
    """On one path."""

    num_uses = 3
    units = ("inner",)

    def __init__(self, *, uses_plainly: bool) -> None:
        super().__init__(uses_plainly=uses_plainly)
        self.inner = Twofold()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.inner(self.plainly(self.embed(tokens), self.inner.weight))
        return loss_of(self.head(x), tokens)


class InTwoLayers(Shares):
    """On two branches, each with a bias of its own."""

    num_uses = 3

    def __init__(self, *, uses_plainly: bool) -> None:
        super().__init__(uses_plainly=uses_plainly)
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)
        self.right.weight = self.left.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.plainly(self.embed(tokens), self.right.weight)
        x = self.left(x) + torch.tanh(self.right(x * x))
        return loss_of(self.head(x), tokens)


class TwoHeads(Shares):
    """Two predictions by one output layer, as in multi-token prediction."""

    num_uses = 4
    units = ("inner", "extra")

    def __init__(self, *, uses_plainly: bool) -> None:
        super().__init__(uses_plainly=uses_plainly)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.extra = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        first = torch.tanh(self.inner(self.embed(tokens)))
        second = torch.tanh(self.extra(first))
        loss = loss_of(self.head(first), tokens)
        loss = loss + 0.5 * loss_of(self.head(second), tokens.roll(-1, 1))
        if self.uses_plainly:
            loss = loss + 0.1 * torch.tanh(self.head.weight).square().sum()
        return loss


SHARING: Sequence[type[Shares]] = (Tied, CalledTwice, UsedTwiceByOneLayer, InTwoLayers, TwoHeads)


def tokens_of(index: int) -> Tensor:
    """int64 ``[2, 3]``."""
    return torch.randint(0, VOCAB, (2, 3), generator=torch.Generator().manual_seed(index))


# ---- a step --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Cell:
    """How the weight gradients of a step are made."""

    delayed: bool
    fused: bool
    num_microbatches: int = 1
    flush: str = "each"
    """``each``: after its backward. ``end``: all at once. ``reverse``: last microbatch first."""


def cells(*, delayed: bool, fused: bool) -> Iterator[Cell]:
    """1 and 3 microbatches, with every order of flushes that there is."""
    orders = ("each", "end", "reverse") if delayed else ("each",)
    for num, flush in product((1, 3), orders):
        yield Cell(delayed=delayed, fused=fused, num_microbatches=num, flush=flush)


def step(model: nn.Module, cell: Cell, batches: Sequence[Tensor]) -> int:
    """Forwards and backwards. Returns how many gradients waited, all in all."""
    manage_wgrad(model, fuse=cell.fused)
    if not cell.delayed:
        for k, batch in enumerate(batches):
            with _accumulating(model, is_last=k == len(batches) - 1):
                model(batch).backward()
        return 0
    with delayed_wgrad(model) as delayed:
        return _delayed_step(model, cell, batches, delayed)


def _delayed_step(
    model: nn.Module, cell: Cell, batches: Sequence[Tensor], delayed: DelayedWgrad
) -> int:
    num_waited = 0
    for k, batch in enumerate(batches):
        with _accumulating(model, is_last=k == len(batches) - 1):
            delayed.microbatch(k)
            before = len(delayed)
            model(batch).backward()
            num_waited += len(delayed) - before
            if cell.flush == "each":
                delayed.flush(k)
    if cell.flush == "reverse":
        for k in reversed(range(len(batches))):
            delayed.flush(k)
    elif cell.flush == "end":
        delayed.flush()
    assert len(delayed) == 0
    return num_waited


def _accumulating(model: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
    is_sharded = isinstance(model, ShardedModule)
    return microbatch(model, is_last=is_last) if is_sharded else nullcontext()


def grads_of(model: nn.Module) -> Grads:
    """What each ``.grad`` holds now."""
    return {name: param.grad for name, param in model.named_parameters()}


def by_autograd(model: nn.Module, batches: Sequence[Tensor]) -> Grads:
    """The sum over microbatches, of a model that nobody manages."""
    for batch in batches:
        model(batch).backward()
    return grads_of(model)


def make_sharing(kind: type[Shares], *, uses_plainly: bool) -> Shares:
    """float64, always the same weights."""
    return double(lambda: kind(uses_plainly=uses_plainly))


class CountingSink:
    """A ``GradSink`` that counts what goes through another."""

    def __init__(self, sink: GradSink) -> None:
        self._sink = sink
        self.num_added = 0
        self.num_written = 0

    def add(self, weight: nn.Parameter, grad: Tensor) -> None:
        self.num_added += 1
        self._sink.add(weight, grad)

    def destination(self, weight: nn.Parameter) -> Destination:
        self.num_written += 1
        return self._sink.destination(weight)


@contextmanager
def counted(model: nn.Module, *, fuse: bool) -> Iterator[CountingSink]:
    """Count what reaches the sink of ``model``."""
    wgrad = manage_wgrad(model, fuse=fuse)
    before = wgrad.sink
    wgrad.sink = sink = CountingSink(before)
    try:
        yield sink
    finally:
        wgrad.sink = before


class MainGradSink:
    """A ``GradSink`` with a gradient of its own for each weight."""

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        self.main_grads: Mapping[nn.Parameter, Tensor] = {
            param: torch.zeros(param.shape, dtype=dtype) for param in model.parameters()
        }

    def add(self, weight: nn.Parameter, grad: Tensor) -> None:
        self.main_grads[weight].add_(grad)

    def destination(self, weight: nn.Parameter) -> Destination:
        return Destination(self.main_grads[weight], is_fresh=False)
