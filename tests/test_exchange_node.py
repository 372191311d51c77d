"""An exchange: no graph is made of it, its reverse is its backward, and what it took goes."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ep_overlap.run.exchange_node import ExchangeInput, ExchangeOutput, ExchangeRun
from ep_overlap.run.layer import TokenGrads, Tokens
from ep_overlap.run.node import MIN_BYTES, Bundle, Hidden, LossEnd, NodeRun, NodeState

LARGE = (64, MIN_BYTES // 64 // 4)


def flipped(tensor: Tensor) -> Tensor:
    """What stands for an exchange: rows travel, and come back the same way."""
    return tensor.flip(0)


class Trip:
    """attn -> dispatch -> loss, of tokens and probs that one weight each makes."""

    def __init__(self, shape: tuple[int, int] = (3, 2), *, is_tokens_frozen: bool = False) -> None:
        values = torch.linspace(1, 2, shape[0] * shape[1]).view(shape)
        self.weights = [values.clone().requires_grad_(not is_tokens_frozen), values.clone()]
        self.weights[1].requires_grad_()
        self.sent_home: list[str] = []
        self.storages: list[StorageWeakRef] = []
        self.routed, self.dispatched = ExchangeInput("a", Tokens), ExchangeOutput("d", Tokens)
        self.attn = NodeRun("0F.attn.L0", self._make, inlets=[], outlets=[self.routed])
        self.dispatch = ExchangeRun(
            "0F.dispatch.L0",
            self.exchange,
            self.reverse,
            inlet=self.routed,
            outlet=self.dispatched,
        )
        self.post = NodeRun("0F.post", self._lose, inlets=[self.dispatched], outlets=[LossEnd()])
        self.nodes = [self.attn, self.dispatch, self.post]

    def _make(self) -> Sequence[Bundle]:
        made = Tokens(self.weights[0] * 3, self.weights[1] * 5)
        self.storages = [StorageWeakRef(t.untyped_storage()) for t in made if t is not None]
        return (made,)

    def exchange(self, tokens: Tokens) -> Sequence[Bundle]:
        assert tokens.probs is not None
        return (Tokens(flipped(tokens.tokens), flipped(tokens.probs)),)

    def reverse(self, grads: Bundle) -> Bundle:
        home = TokenGrads(*grads)
        self.sent_home += [name for name in home._fields if getattr(home, name) is not None]
        return TokenGrads(*(None if grad is None else flipped(grad) for grad in home))

    def _lose(self, tokens: Tokens) -> Sequence[Bundle]:
        assert tokens.probs is not None
        weighed = tokens.tokens.square() * tokens.probs
        return (Hidden((weighed * torch.arange(len(weighed)).unsqueeze(1)).sum()),)

    def forward(self) -> None:
        for node in self.nodes:
            node.forward()

    def backward(self) -> None:
        for node in reversed(self.nodes):
            node.backward()

    def expected(self) -> list[Tensor | None]:
        """The gradients of one graph."""
        weights = [w.detach().clone().requires_grad_(w.requires_grad) for w in self.weights]
        tokens, probs = flipped(weights[0] * 3), flipped(weights[1] * 5)
        self._lose(Tokens(tokens, probs))[0][0].backward()  # type: ignore[union-attr]
        return [weight.grad for weight in weights]


def same(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("shape", [(3, 2), LARGE])
@pytest.mark.parametrize("is_tokens_frozen", [False, True])
def test_gradients_are_those_of_one_graph(shape: tuple[int, int], is_tokens_frozen: bool) -> None:
    trip = Trip(shape, is_tokens_frozen=is_tokens_frozen)
    for _ in range(2):  # nodes are built once and run again
        for weight in trip.weights:
            weight.grad = None
        trip.forward()
        trip.backward()
        assert same([weight.grad for weight in trip.weights], trip.expected())
    home = ["probs"] if is_tokens_frozen else ["tokens", "probs"]
    assert trip.sent_home == home * 2


def test_what_is_given_is_cut_off_from_its_graph_in_every_step() -> None:
    """As other libraries ask: a tensor of a graph is exported to none."""
    trip = Trip()
    trip.dispatch._function = lambda tokens: (
        Tokens(*(flipped(torch.from_dlpack(tensor)) for tensor in tokens)),
    )
    for _ in range(2):
        trip.forward()
        trip.backward()
    assert same([weight.grad for weight in trip.weights], [2 * grad for grad in trip.expected()])


def test_no_graph_is_made_and_none_is_walked() -> None:
    trip = Trip()
    given: list[Tokens] = []
    lose = trip._lose

    def keeping(tokens: Tokens) -> Sequence[Bundle]:
        given.append(tokens)
        return lose(tokens)

    trip.post._function = keeping
    trip.forward()
    ((tokens, probs),) = given
    assert probs is not None
    assert (tokens.grad_fn, probs.grad_fn) == (None, None)
    assert (tokens.requires_grad, probs.requires_grad) == (True, True)
    assert [tensor is None or tensor.requires_grad for tensor in trip.dispatched.held] == [
        False
    ] * 2


@pytest.mark.parametrize("keeps_used", [False, True])
def test_what_was_exchanged_goes_once_it_is_through(keeps_used: bool) -> None:
    trip = Trip(LARGE)
    trip.dispatch.keeps_used = keeps_used
    trip.attn.forward()
    trip.dispatch.forward()
    assert [storage.expired() for storage in trip.storages] == [not keeps_used] * 2
    trip.dispatch.drop_read()
    assert [storage.expired() for storage in trip.storages] == [True] * 2
    trip.post.forward()
    trip.backward()
    assert same([weight.grad for weight in trip.weights], trip.expected())


def test_an_exchange_that_returns_what_it_took_leaves_it_to_its_taker() -> None:
    trip = Trip(LARGE)
    same_rank = ExchangeRun(
        "0F.dispatch.L0",
        lambda tokens: (tokens,),
        lambda grads: grads,
        inlet=trip.routed,
        outlet=trip.dispatched,
    )
    trip.attn.forward()
    same_rank.forward()
    assert [storage.expired() for storage in trip.storages] == [False] * 2
    trip.post.forward()
    for node in (trip.post, same_rank, trip.attn):
        node.backward()
    weights = [weight.detach().clone().requires_grad_() for weight in trip.weights]
    trip._lose(Tokens(weights[0] * 3, weights[1] * 5))[0][0].backward()  # type: ignore[union-attr]
    assert same([w.grad for w in trip.weights], [w.grad for w in weights])


def test_a_gradient_that_nobody_left_is_not_sent_home() -> None:
    trip = Trip()
    trip.post._function = lambda tokens: (Hidden(tokens.tokens.sum()),)
    trip.forward()
    trip.backward()
    assert trip.sent_home == ["tokens"]
    assert trip.weights[1].grad is None


def test_evaluation_exchanges_and_keeps_nothing() -> None:
    trip = Trip(LARGE)
    with torch.no_grad():
        trip.attn.forward()
        trip.dispatch.forward()
    assert trip.dispatch.state is NodeState.IDLE
    assert [storage.expired() for storage in trip.storages] == [True] * 2
    assert all(tensor is None or not tensor.requires_grad for tensor in trip.dispatched.held)


def graph(tokens: Tokens) -> Any:
    weight = torch.ones(1, requires_grad=True)
    return (Tokens(tokens.tokens * weight, tokens.probs),)


@pytest.mark.parametrize(
    ("exchange", "message"),
    [
        (lambda t: Tokens(*t), r"0F\.dispatch\.L0 returned 2 values, expected 1 values"),
        (lambda t: (Tokens(t.tokens, None),), r"L0 took .*float32.*, but returned .*, None\]"),
        (graph, r"0F\.dispatch\.L0 made a graph, expected an exchange and nothing else"),
    ],
)
def test_an_exchange_that_is_more_or_less_is_refused(
    exchange: Callable[..., Any], message: str
) -> None:
    trip = Trip()
    trip.dispatch._function = exchange
    trip.attn.forward()
    with pytest.raises(ValueError, match=message):
        trip.dispatch.forward()
    assert trip.dispatch.state is NodeState.IDLE


@pytest.mark.parametrize(
    "reverse",
    [
        lambda grads: TokenGrads(grads[0], None),
        lambda grads: TokenGrads(grads[0][:2], grads[1]),
        lambda grads: TokenGrads(grads[0].double(), grads[1]),
        lambda grads: (grads[0],),
        lambda grads: None,
        lambda grads: grads[0],
        lambda grads: (grads, grads),
    ],
    ids=["lost", "shape", "dtype", "one", "none", "tensor", "tuples"],
)
def test_a_reverse_that_brings_something_else_home_is_named(reverse: Any) -> None:
    trip = Trip()
    trip.dispatch._reverse = reverse
    trip.forward()
    trip.post.backward()
    with pytest.raises(ValueError, match=r"the backward of 0F\.dispatch\.L0 returned .* expected"):
        trip.dispatch.backward()


def test_a_reverse_that_makes_a_graph_is_refused() -> None:
    trip, scale = Trip(), torch.ones(1, requires_grad=True)
    trip.dispatch._reverse = lambda grads: TokenGrads(*(grad * scale for grad in grads))
    trip.forward()
    trip.post.backward()
    with pytest.raises(ValueError, match=r"the backward of 0F\.dispatch\.L0 made a graph"):
        trip.dispatch.backward()


@pytest.mark.parametrize("first", ["evaluated", "failed", "trained"])
def test_it_is_looked_at_until_one_forward_and_its_backward_were_right(first: str) -> None:
    trip = Trip()
    if first == "evaluated":
        with torch.no_grad():
            trip.attn.forward()
            trip.dispatch.forward()
    elif first == "failed":
        trip.attn.forward()
        trip.dispatch.forward()
        for node in trip.nodes:
            node.reset()
    else:
        trip.forward()
        trip.backward()
    trip.dispatch._reverse = lambda grads: TokenGrads(grads[0], None)
    trip.forward()
    trip.post.backward()
    if first == "trained":
        trip.dispatch.backward()
    else:
        with pytest.raises(ValueError, match="the backward of"):
            trip.dispatch.backward()


def test_what_it_reads_in_its_backward_lives_until_drop_used() -> None:
    """Where work runs after its launch: another lane made those gradients, and may reuse them."""
    trip = Trip(LARGE)
    trip.dispatch.keeps_used = True
    came: list[StorageWeakRef] = []

    def reverse(grads: Bundle) -> Bundle:
        came.extend(StorageWeakRef(grad.untyped_storage()) for grad in grads if grad is not None)
        return trip.reverse(grads)

    trip.dispatch._reverse = reverse
    trip.forward()
    trip.post.backward()
    trip.dispatch.backward()
    trip.attn.backward()
    taken = trip.storages
    assert [storage.expired() for storage in (*came, *taken)] == [False] * 4
    trip.dispatch.drop_read()
    trip.dispatch.drop_used()
    assert [storage.expired() for storage in (*came, *taken)] == [True] * 4


def test_a_buffer_that_the_model_keeps_serves_every_step() -> None:
    trip = Trip()
    buffer = torch.empty(3, 2)

    def exchange(tokens: Tokens) -> Sequence[Bundle]:
        assert tokens.probs is not None
        buffer.copy_(flipped(tokens.tokens))
        return (Tokens(buffer, flipped(tokens.probs)),)

    trip.dispatch._function = exchange
    for _ in range(2):
        for weight in trip.weights:
            weight.grad = None
        trip.forward()
        trip.backward()
        assert same([weight.grad for weight in trip.weights], trip.expected())
    assert not buffer.requires_grad


def test_a_leaf_that_the_consumer_keeps_does_not_keep_its_gradient() -> None:
    trip, kept = Trip(), list[Tensor]()
    lose = trip._lose

    def keeping(tokens: Tokens) -> Sequence[Bundle]:
        kept.append(tokens.tokens)
        return lose(tokens)

    trip.post._function = keeping
    trip.forward()
    trip.backward()
    assert kept[0].grad is None


def test_calls_out_of_order_are_refused() -> None:
    trip = Trip()
    with pytest.raises(RuntimeError, match=r"backward of 0F\.dispatch\.L0: its state is 'idle'"):
        trip.dispatch.backward()
    trip.forward()
    with pytest.raises(RuntimeError, match=r"forward of 0F\.dispatch\.L0: its state is 'forward"):
        trip.dispatch.forward()


def test_hooks_run_around_it() -> None:
    trip, log = Trip(), list[str]()
    trip.dispatch.pre_forward_hooks = (lambda: log.append("forward"),)
    trip.dispatch.pre_backward_hooks = (lambda: log.append(f"before {trip.sent_home}"),)
    trip.dispatch.post_backward_hooks = (lambda: log.append(f"after {trip.sent_home}"),)
    trip.forward()
    trip.backward()
    assert log == ["forward", "before []", "after ['tokens', 'probs']"]


def test_a_consumer_with_a_graph_may_follow_an_exchange_without_a_backward() -> None:
    """Post, behind the first forward of a layer that is recomputed."""
    trip = Trip()
    first = ExchangeRun(
        "0F.dispatch.L0",
        trip.exchange,
        trip.reverse,
        inlet=trip.routed,
        outlet=trip.dispatched,
        keeps_graph=False,
    )
    trip.attn.forward()
    first.forward()
    received = trip.dispatched.receive()
    assert isinstance(received, Tokens)
    assert not received.tokens.requires_grad
    assert torch.equal(received.tokens, flipped(trip.weights[0] * 3))
    assert first.state is NodeState.IDLE
