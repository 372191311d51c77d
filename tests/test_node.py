"""One node: its backward is autograd's, its calls come in order, and it keeps nothing."""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ep_overlap.run.layer import Carry, Tokens
from ep_overlap.run.node import Bundle, HandOff, Hidden, LossEnd, NodeRun, NodeState


class Toy(nn.Module):
    """One MoE layer's shape: two values to the next node, one past it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(4, 4) for _ in range(4))

    def attn(self) -> tuple[Tokens, Carry]:
        hidden = torch.linspace(-1, 1, 12).view(3, 4) @ self.weights[0]
        # The same tensor enters three hand-offs: their gradients must meet in autograd's order.
        return Tokens(hidden.sin(), hidden.softmax(-1)), Carry(hidden * 3, None)

    def mlp(self, tokens: Tokens) -> Hidden:
        assert tokens.probs is not None
        return Hidden((tokens.tokens @ self.weights[1]).tanh() * tokens.probs)

    def loss(self, hidden: Hidden, carry: Carry) -> Hidden:
        assert carry.shared is None
        total = hidden.hidden @ self.weights[2] + carry.residual @ self.weights[3]
        return Hidden(total.square().mean())


class Chain:
    """attn -> mlp -> loss, with a carry from attn to loss."""

    def __init__(self, toy: Toy) -> None:
        self.tokens, self.carry = HandOff("tokens", Tokens), HandOff("carry", Carry)
        self.hidden, self.end = HandOff("hidden"), LossEnd()
        self.made: list[weakref.ref[Tensor]] = []
        self.nodes = [
            self._node("0F.attn.L0", lambda: toy.attn(), [], [self.tokens, self.carry]),
            self._node("0F.mlp.L0", lambda t: (toy.mlp(t),), [self.tokens], [self.hidden]),
            self._node(
                "0F.post", lambda h, c: (toy.loss(h, c),), [self.hidden, self.carry], [self.end]
            ),
        ]

    def _node(
        self,
        name: str,
        function: Callable[..., Sequence[Bundle]],
        inlets: list[HandOff],
        outlets: Sequence[HandOff | LossEnd],
    ) -> NodeRun:
        def watched(*received: Bundle) -> Sequence[Bundle]:
            sent = function(*received)
            for bundle in (*received, *sent):
                self.made += [weakref.ref(t) for t in bundle if t is not None]
            return sent

        return NodeRun(name, watched, inlets=inlets, outlets=outlets)

    def num_alive(self) -> int:
        return sum(made() is not None for made in self.made)

    def forward(self) -> None:
        for node in self.nodes:
            node.forward()

    def backward(self) -> None:
        for node in reversed(self.nodes):
            node.backward()


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_chain_of_nodes_gives_bitwise_the_gradients_of_one_graph() -> None:
    whole, cut = Toy(), Toy()
    tokens, carry = whole.attn()
    whole.loss(whole.mlp(tokens), carry).hidden.backward()
    chain = Chain(cut)
    for _ in range(2):  # nodes are built once and run again
        cut.zero_grad()
        chain.forward()
        chain.backward()
        for ours, theirs in zip(cut.parameters(), whole.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            assert torch.equal(ours.grad, theirs.grad)


def test_a_value_is_handed_over_without_a_copy_as_a_leaf() -> None:
    handoff, made = HandOff("h"), torch.ones(3, requires_grad=True) * 2
    handoff.send(Tokens(made, torch.ones(3, dtype=torch.int64)))
    received = handoff.receive()
    assert isinstance(received, Tokens)
    assert received.tokens.is_leaf
    assert received.tokens.requires_grad
    assert received.tokens.data_ptr() == made.data_ptr()
    assert received.probs is not None
    assert not received.probs.requires_grad


def test_an_absent_field_stays_absent_and_one_without_gradient_is_no_root() -> None:
    handoff, made = HandOff("carry"), torch.ones(3, requires_grad=True) * 2
    handoff.send(Carry(made, None))
    received = handoff.receive()
    assert isinstance(received, Carry)
    assert received.shared is None
    roots: list[Tensor] = []
    grads: list[Tensor] = []
    handoff.roots(roots, grads)
    assert (roots, grads) == ([], [])  # nobody used the residual
    handoff.send(Carry(made, made * 3))
    _, shared = handoff.receive()
    assert shared is not None
    shared.sum().backward()
    handoff.roots(roots, grads)
    assert len(roots) == 1
    assert torch.equal(grads[0], torch.ones(3))


class TestState:
    def test_a_node_is_idle_then_done_then_idle(self) -> None:
        chain = Chain(Toy())
        node = chain.nodes[0]
        assert node.state is NodeState.IDLE
        chain.forward()
        assert node.state is NodeState.FORWARD_DONE
        chain.backward()
        assert node.state is NodeState.IDLE

    def test_a_second_forward_is_refused_by_name(self) -> None:
        chain = Chain(Toy())
        chain.nodes[0].forward()
        with pytest.raises(
            RuntimeError, match=r"forward of 0F\.attn\.L0: .*'forward done'.*'idle'"
        ):
            chain.nodes[0].forward()

    def test_a_backward_without_forward_and_a_second_one_are_refused_by_name(self) -> None:
        chain = Chain(Toy())
        match = r"backward of 0F\.mlp\.L0: .*'idle', expected 'forward done'"
        with pytest.raises(RuntimeError, match=match):
            chain.nodes[1].backward()
        chain.forward()
        chain.backward()
        with pytest.raises(RuntimeError, match=match):
            chain.nodes[1].backward()

    def test_a_node_that_failed_may_run_again(self) -> None:
        failures = iter((ValueError("once"),))

        def function() -> Sequence[Bundle]:
            for failure in failures:
                raise failure
            return (Hidden(torch.ones(1)),)

        node = NodeRun("0F.pre", function, inlets=[], outlets=[HandOff("h")])
        with pytest.raises(ValueError, match="once"):
            node.forward()
        assert node.state is NodeState.IDLE
        node.forward()


@pytest.mark.usefixtures("no_gc")
class TestWhatIsKept:
    """No garbage collector runs in these tests."""

    def test_each_backward_lets_go_of_what_its_node_sent(self) -> None:
        chain = Chain(Toy())
        chain.forward()
        attn, mlp, post = chain.nodes
        assert chain.num_alive() == 9  # four hand-overs as sent and as received, and the loss
        post.backward()
        assert chain.num_alive() == 8
        mlp.backward()
        assert chain.num_alive() == 6
        attn.backward()
        assert chain.num_alive() == 0

    def test_nothing_is_kept_without_gradients(self) -> None:
        chain = Chain(Toy())
        with torch.no_grad():
            chain.forward()
            chain.forward()
        assert chain.num_alive() == 0
        assert all(node.state is NodeState.IDLE for node in chain.nodes)

    def test_reset_lets_go_of_everything(self) -> None:
        chain = Chain(Toy())
        chain.forward()
        chain.nodes[2].backward()
        for node in chain.nodes:
            node.reset()
        assert chain.num_alive() == 0
        chain.forward()
        chain.backward()


ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ((Tokens(ONE, None),), "returned 1 values, expected 2 values"),
        (None, "returned None, expected 2 values"),
        (ONE, "returned Tensor, expected 2 values"),
        ((Tokens(ONE, None), None), "returned None, expected Carry"),
        (((ONE, ONE), Carry(ONE, None)), "returned tuple, expected Tokens"),
        ((Tokens(ONE, 1.0), Carry(ONE, None)), "returned float in its Tokens, expected a tensor"),
        ((Tokens(ONE, ONE), Carry(None, ONE)), "returned None in its Carry, expected a tensor"),
    ],
)
@pytest.mark.parametrize("has_grad", [True, False])
def test_a_function_that_returns_something_else_is_named(
    returned: Any, message: str, has_grad: bool
) -> None:
    outlets = [HandOff("tokens", Tokens), HandOff("carry", Carry)]
    node = NodeRun("0F.attn.L0", lambda: returned, inlets=[], outlets=outlets)
    with (
        torch.set_grad_enabled(has_grad),
        pytest.raises(ValueError, match=rf"^0F\.attn\.L0 {message}: see ep_overlap"),
    ):
        node.forward()
    assert node.state is NodeState.IDLE


def test_hooks_run_before_the_function_before_the_roots_and_after_the_backward() -> None:
    log: list[str] = []
    toy = Toy()
    chain = Chain(toy)
    node = chain.nodes[1]
    toy.weights[1].register_post_accumulate_grad_hook(lambda p: log.append("gradient"))
    node.pre_forward_hooks = (lambda: log.append("pre 1"), lambda: log.append("pre 2"))
    node.pre_backward_hooks = (
        lambda: log.append(f"pre backward, {node.state.value}"),
        lambda: log.append(f"gradient is there: {toy.weights[1].grad is not None}"),
    )
    node.post_backward_hooks = (lambda: log.append(f"post backward, {node.state.value}"),)
    chain.forward()
    assert log == ["pre 1", "pre 2"]
    log.clear()
    chain.backward()
    assert log == [
        "pre backward, forward done",
        "gradient is there: False",
        "gradient",
        "post backward, idle",
    ]
