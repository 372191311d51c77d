"""A small MoE transformer in plain torch, cut into the parts that a schedule runs.

One layer, and the value at each cut (``ep_overlap.run.layer``)::

    hidden -> [attn] -> Tokens -> [dispatch] -> Tokens -> [mlp] -> [combine] -> [finish] -> hidden
                  \\____________________ Carry (residual) _________________________/

Read ``MoELayer.forward`` first. Routing is dropless: an expert takes what it is sent, which may be
nothing. Each layer sends every token ``topk`` times, so exchanges are uneven.

Shape letters: S sequence, B batch, H hidden, F feed-forward, E experts, K top-k, N tokens of this
rank (S * B), T tokens on the way (N * K before dispatch; what this rank's experts received, after).
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ep_overlap.models.exchange import all_to_all, gather_counts, reorder
from ep_overlap.models.groups import EXCHANGE, GATHER_COUNTS, ExpertGroups, issued
from ep_overlap.plan.action import LayerKind, Node
from ep_overlap.run.layer import Carry, Collective, TokenGrads, Tokens
from fsdp_hooks.wgrad import ManagedLayer
from fsdp_hooks.wgrad_layers import LayerTypes

INIT_STD = 0.02
"""The standard deviation of every weight matrix at the start."""


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """Sizes of a reference model."""

    num_layers: int
    hidden_size: int
    num_heads: int
    ffn_hidden_size: int
    """The inner size of each expert, and of the MLP of a dense layer."""
    num_experts: int
    """Of the whole model, over all expert-parallel ranks."""
    topk: int
    seq_length: int
    """The longest sequence; positions are learned."""
    vocab_size: int = 256
    moe_layer_freq: int = 1
    """Layer i is an MoE layer where i is a multiple of this, else a dense one (Megatron's rule)."""
    force_load_balancing: bool = False
    """Send tokens to the experts in turn, whatever the router says, for measuring: what Megatron's
    ``moe_router_force_load_balancing`` does by random scores."""
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}"
            )
        if not 1 <= self.topk <= self.num_experts:
            raise ValueError(
                f"topk must be between 1 and num_experts {self.num_experts}; got {self.topk}"
            )
        if self.num_layers < 1 or self.moe_layer_freq < 1:
            raise ValueError(
                "num_layers and moe_layer_freq must be at least 1; got "
                f"{self.num_layers} and {self.moe_layer_freq}"
            )


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One microbatch's inputs."""

    tokens: Tensor
    """``[B, S]`` int64"""
    targets: Tensor
    """``[B, S]`` int64"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """Where one microbatch's tokens go in one layer. No tensor here takes part in autograd."""

    sent: list[int]
    """``[EP]``: how many tokens go to each rank."""
    received: list[int]
    """``[EP]``: how many come from each rank."""
    per_expert: list[int]
    """``[E_local]``: how many each of this rank's experts gets."""
    to_experts: Tensor
    """``[N * K]`` int64: the order that puts (token, choice) pairs in the order of experts."""
    by_expert: Tensor
    """``[T]`` int64: the order that puts received tokens, which come rank by rank, together for
    each expert."""


@dataclass(kw_only=True, slots=True)
class MicrobatchState:
    """One microbatch in flight."""

    batch: Batch
    routing: list[Routing | None]
    """One slot a layer, filled by its ``attn``; a dense layer's stays None."""


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = _linear(config.hidden_size, 3 * config.hidden_size, config)
        self.out = _linear(config.hidden_size, config.hidden_size, config)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[S, B, H]`` to ``[S, B, H]``."""
        seq_length, batch_size, hidden_size = hidden.shape
        heads = self.qkv(hidden).view(seq_length, batch_size, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 1, 3, 0, 4).unbind(0)  # each [B, heads, S, H / heads]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.permute(2, 0, 1, 3).reshape(seq_length, batch_size, hidden_size))


class FeedForward(nn.Module):
    """An expert, or the MLP of a dense layer."""

    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        self.up = _linear(config.hidden_size, config.ffn_hidden_size, config)
        self.down = _linear(config.ffn_hidden_size, config.hidden_size, config)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[..., H]`` to ``[..., H]``."""
        return self.down(F.silu(self.up(hidden)))


class DenseLayer(nn.Module):
    """A transformer layer without experts."""

    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config)
        self.mlp_norm = _norm(config)
        self.feed_forward = FeedForward(config)

    def forward(self, state: MicrobatchState, hidden: Tensor) -> Tensor:
        """``[S, B, H]`` to ``[S, B, H]``."""
        return self.mlp(state, self.attn(state, hidden))

    def attn(self, state: MicrobatchState, hidden: Tensor) -> Tensor:
        """Attention and its residual."""
        return hidden + self.attention(self.attention_norm(hidden))

    def mlp(self, state: MicrobatchState, hidden: Tensor) -> Tensor:
        """The MLP and its residual."""
        return hidden + self.feed_forward(self.mlp_norm(hidden))

    @property
    def kind(self) -> LayerKind:
        """Which nodes it has."""
        return LayerKind.DENSE

    @property
    def module(self) -> nn.Module:
        """Itself."""
        return self

    def collectives(self, node: Node) -> Sequence[Collective]:
        """None."""
        return ()


class MoELayer(nn.Module):
    """A transformer layer whose MLP is a choice of ``topk`` experts for each token."""

    def __init__(self, config: ReferenceConfig, groups: ExpertGroups, index: int) -> None:
        super().__init__()
        self.index = index
        self.groups = groups
        self.topk = config.topk
        self.num_experts = config.num_experts
        self.force_load_balancing = config.force_load_balancing
        num_local_experts = config.num_experts // groups.size
        first = groups.rank * num_local_experts
        self.attention_norm = _norm(config)
        self.attention = Attention(config)
        self.mlp_norm = _norm(config)
        self.router = _linear(config.hidden_size, config.num_experts, config)
        # Keyed by global index: an expert has one name, whichever rank holds it.
        self.experts = nn.ModuleDict(
            {str(expert): FeedForward(config) for expert in range(first, first + num_local_experts)}
        )

    def forward(self, state: MicrobatchState, hidden: Tensor) -> Tensor:
        """``[S, B, H]`` to ``[S, B, H]``."""
        tokens, carry = self.attn(state, hidden)
        tokens = self.dispatch(state, tokens)
        outputs = self.mlp(state, tokens)
        outputs = self.combine(state, outputs)
        return self.finish(state, outputs, carry)

    def attn(self, state: MicrobatchState, hidden: Tensor) -> tuple[Tokens, Carry]:
        """Attention, choice of experts, and each token copied once for each of its experts."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        normed = self.mlp_norm(hidden).flatten(0, 1)  # [N, H]
        logits, choices = self._choose(self.router(normed))
        routing = self._route(choices)
        state.routing[self.index] = routing
        copies = normed.unsqueeze(1).expand(-1, self.topk, -1).flatten(0, 1)  # [N * K, H]
        # Weighted before the experts, as torchtitan's ``score_before_experts``: one exchange does.
        weighted = copies * logits.softmax(-1).flatten().unsqueeze(-1)
        return Tokens(reorder(weighted, routing.to_experts), None), Carry(hidden, None)

    def _choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's experts, and their scores: ``[N, K]`` each. ``scores``: ``[N, E]``."""
        if not self.force_load_balancing:
            logits, choices = scores.topk(self.topk)
            return logits, choices
        pairs = torch.arange(scores.shape[0] * self.topk, device=scores.device)
        choices = (pairs % self.num_experts).view(-1, self.topk)
        return scores.gather(1, choices), choices

    def _route(self, choices: Tensor) -> Routing:
        """Tell the other ranks how many tokens each expert gets. ``choices``: ``[N, K]``."""
        # Stable sorts: the same routing must give the same order of sums in every run.
        to_experts = choices.flatten().argsort(stable=True)
        sent = choices.flatten().bincount(minlength=self.num_experts)  # [E]
        received = gather_counts(sent, self.groups.counts)  # [EP, E_local]
        num_ranks, num_local_experts = received.shape
        expert_of_run = torch.arange(num_local_experts, device=choices.device).repeat(num_ranks)
        expert_of_token = expert_of_run.repeat_interleave(received.flatten())  # [T]
        return Routing(
            sent=sent.view(num_ranks, num_local_experts).sum(1).tolist(),
            received=received.sum(1).tolist(),
            per_expert=received.sum(0).tolist(),
            to_experts=to_experts,
            by_expert=expert_of_token.argsort(stable=True),
        )

    def dispatch(self, state: MicrobatchState, tokens: Tokens) -> Tokens:
        """Send tokens to the ranks of their experts."""
        routing, group = self._routing_of(state), self.groups.exchange
        return Tokens(all_to_all(tokens.tokens, routing.sent, routing.received, group), None)

    def dispatch_backward(self, state: MicrobatchState, grads: TokenGrads) -> TokenGrads:
        """Bring their gradients home."""
        assert grads.tokens is not None, "tokens alone are exchanged"
        routing, group = self._routing_of(state), self.groups.exchange
        return TokenGrads(all_to_all(grads.tokens, routing.received, routing.sent, group), None)

    def mlp(self, state: MicrobatchState, tokens: Tokens) -> Tensor:
        """Run each expert on its tokens."""
        routing = self._routing_of(state)
        sorted_tokens = reorder(tokens.tokens, routing.by_expert).split(routing.per_expert)
        outputs = torch.cat(
            [
                expert(some_tokens)
                for expert, some_tokens in zip(self.experts.values(), sorted_tokens, strict=True)
            ]
        )
        return reorder(outputs, routing.by_expert, inverse=True)

    def combine(self, state: MicrobatchState, tokens: Tensor) -> Tensor:
        """Send the results back where their tokens came from."""
        routing = self._routing_of(state)
        return all_to_all(tokens, routing.received, routing.sent, self.groups.exchange)

    def combine_backward(self, state: MicrobatchState, grad: Tensor) -> Tensor:
        """Send their gradients to the experts."""
        routing = self._routing_of(state)
        return all_to_all(grad, routing.sent, routing.received, self.groups.exchange)

    def finish(self, state: MicrobatchState, combined: Tensor, carry: Carry) -> Tensor:
        """Sum the results of each token's experts, and add the residual."""
        routing = self._routing_of(state)
        copies = reorder(combined, routing.to_experts, inverse=True)  # [N * K, H]
        summed = copies.view(-1, self.topk, copies.shape[-1]).sum(1)  # [N, H]
        return carry.residual + summed.view_as(carry.residual)

    def _routing_of(self, state: MicrobatchState) -> Routing:
        routing = state.routing[self.index]
        if routing is None:
            raise RuntimeError(
                f"layer {self.index} has no routing for this microbatch: run its attn first"
            )
        return routing

    @property
    def kind(self) -> LayerKind:
        """Which nodes it has."""
        return LayerKind.MOE

    @property
    def shared_experts(self) -> None:
        """None."""

    @property
    def module(self) -> nn.Module:
        """Itself."""
        return self

    def collectives(self, node: Node) -> Sequence[Collective]:
        """One gather of counts; tokens out; results back."""
        match node:
            case Node.ATTN:
                return issued(self.groups.counts, GATHER_COUNTS)
            case Node.DISPATCH | Node.COMBINE:
                return issued(self.groups.exchange, EXCHANGE)
            case _:
                return ()


class MoETransformer(nn.Module):
    """The whole model; its own ``ModelParts``.

    The weights depend on the seed alone: each is drawn with a generator of its own, seeded by its
    name, and an expert's name holds its global index. So the model is the same function whatever
    the expert-parallel size.

    Raises:
        ValueError: the experts cannot be divided evenly among the ranks.
    """

    def __init__(
        self,
        config: ReferenceConfig,
        groups: ExpertGroups,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        if config.num_experts % groups.size:
            raise ValueError(
                f"num_experts {config.num_experts} is not a multiple of the expert-parallel size "
                f"{groups.size}"
            )
        self.config = config
        # Built without memory: torch's own initialisation would draw from the global generator.
        with torch.device("meta"):
            self.embedding = nn.Embedding(config.vocab_size, config.hidden_size, dtype=config.dtype)
            self.positions = nn.Embedding(config.seq_length, config.hidden_size, dtype=config.dtype)
            self.blocks = nn.ModuleList(
                MoELayer(config, groups, index)
                if index % config.moe_layer_freq == 0
                else DenseLayer(config)
                for index in range(config.num_layers)
            )
            self.final_norm = _norm(config)
            self.output = _linear(config.hidden_size, config.vocab_size, config)
        self.to_empty(device=device)
        _initialise(self, seed)

    def forward(self, batch: Batch) -> Tensor:
        """``[S, B, V]``: for each token, the scores of the one that follows."""
        state = self.begin(batch)
        hidden = self.pre(state)
        for layer in self.layers:
            hidden = layer(state, hidden)
        return self.post(state, hidden)

    def whole(self, batch: Batch) -> Tensor:
        """Call the model, with the hooks of whoever sharded it."""
        return self(batch)

    @property
    def wgrad_layers(self) -> LayerTypes:
        """All of its matrices are ``nn.Linear``'s, but for the embeddings'."""
        return {}

    @property
    def draws_random(self) -> bool:
        """No: there is no dropout."""
        return False

    @property
    def replays_graphs(self) -> bool:
        """No."""
        return False

    @property
    def random_states(self) -> None:
        """None."""

    @property
    def shared_weights(self) -> Sequence[nn.Parameter]:
        """The embedding's, where a user has tied the output layer to it and does not fuse its
        gradients: those are written where they go use by use, on the standard path, too."""
        weight = cast(nn.Parameter, self.embedding.weight)
        is_fused = isinstance(self.output, ManagedLayer) and self.output.fuses_wgrad
        return (weight,) if self.output.weight is weight and not is_fused else ()

    @property
    def head(self) -> nn.Module | None:
        """The output layer, unless a user has tied it to the embedding."""
        return None if self.output.weight is self.embedding.weight else self.output

    def collectives(self, node: Node) -> Sequence[Collective]:
        """None."""
        return ()

    def begin(self, batch: Batch) -> MicrobatchState:
        """An empty slot for each layer's routing."""
        return MicrobatchState(batch=batch, routing=[None] * len(self.blocks))

    def pre(self, state: MicrobatchState) -> Tensor:
        """Embed tokens and positions. Returns ``[S, B, H]``."""
        tokens = state.batch.tokens.T  # [S, B]
        if tokens.shape[0] > self.config.seq_length:
            raise ValueError(
                f"the batch has sequences of {tokens.shape[0]} tokens; the model was built for "
                f"seq_length {self.config.seq_length}"
            )
        places = torch.arange(tokens.shape[0], device=tokens.device).unsqueeze(1)  # [S, 1]
        return self.embedding(tokens) + self.positions(places)

    def post(self, state: MicrobatchState, hidden: Tensor, *shared: Tensor) -> Tensor:
        """Final norm and output layer. Returns ``[S, B, V]``."""
        normed = self.final_norm(hidden)
        return F.linear(normed, *shared) if shared else self.output(normed)

    @property
    def layers(self) -> Sequence[MoELayer | DenseLayer]:
        """The layers, in order."""
        return [cast(MoELayer | DenseLayer, block) for block in self.blocks]

    @property
    def module(self) -> nn.Module:
        """Itself."""
        return self

    def expert_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that belong to one expert: they go on the expert mesh."""
        for layer in self.layers:
            if isinstance(layer, MoELayer):
                yield from layer.experts.parameters()

    def global_name(self, name: str) -> str:
        """A parameter's name in the model of all expert-parallel ranks: experts are named by their
        index there already."""
        return name


def cross_entropy(output: Tensor, batch: Batch) -> Tensor:
    """The mean loss of a batch, in float32 or better: a scalar. ``output``: ``[S, B, V]``."""
    scores = output.to(torch.promote_types(output.dtype, torch.float32))
    return F.cross_entropy(scores.flatten(0, 1), batch.targets.T.flatten())


def _linear(num_inputs: int, num_outputs: int, config: ReferenceConfig) -> nn.Linear:
    return nn.Linear(num_inputs, num_outputs, bias=False, dtype=config.dtype)


def _norm(config: ReferenceConfig) -> nn.RMSNorm:
    return nn.RMSNorm(config.hidden_size, eps=1e-6, dtype=config.dtype)


@torch.no_grad()
def _initialise(model: nn.Module, seed: int) -> None:
    """Norms' weights are ones; every other is drawn from its own generator."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}.{name}".encode()))
        # Drawn on CPU: a GPU's generator gives other numbers for the same seed.
        drawn = torch.empty(parameter.shape, dtype=parameter.dtype)
        parameter.copy_(drawn.normal_(std=INIT_STD, generator=generator))
