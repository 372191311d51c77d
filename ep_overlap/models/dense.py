"""A small dense transformer in plain torch: to measure sharding by itself, without experts.

Shape letters: B batch, S sequence, H hidden, F feed-forward, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """Sizes of a dense transformer."""

    num_blocks: int
    hidden_size: int
    num_heads: int
    ffn_hidden_size: int
    seq_length: int
    """The longest sequence; positions are learned."""
    vocab_size: int = 256

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}"
            )


class DenseBlock(nn.Module):
    """Causal self-attention and an MLP, each with its norm and its residual."""

    def __init__(self, config: DenseConfig, linear: Callable[..., nn.Module] = nn.Linear) -> None:
        super().__init__()
        hidden_size, ffn_hidden_size = config.hidden_size, config.ffn_hidden_size
        self.num_heads = config.num_heads
        self.attention_norm = nn.RMSNorm(hidden_size)
        self.qkv = linear(hidden_size, 3 * hidden_size, bias=False)
        self.out = linear(hidden_size, hidden_size, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden_size)
        self.up = linear(hidden_size, ffn_hidden_size, bias=False)
        self.down = linear(ffn_hidden_size, hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[B, S, H]`` to ``[B, S, H]``."""
        hidden = hidden + self._attention(self.attention_norm(hidden))
        return hidden + self.down(F.silu(self.up(self.mlp_norm(hidden))))

    def _attention(self, hidden: Tensor) -> Tensor:
        batch_size, seq_length, hidden_size = hidden.shape
        heads = self.qkv(hidden).view(batch_size, seq_length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, heads, S, H / heads]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch_size, seq_length, hidden_size))


class DenseTransformer(nn.Module):
    """Embeddings, blocks and an output layer; the weights depend on the seed alone.

    ``linear``: makes the layers of the blocks, called as ``nn.Linear``.
    """

    def __init__(
        self, config: DenseConfig, *, seed: int, linear: Callable[..., nn.Module] = nn.Linear
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
            self.positions = nn.Embedding(config.seq_length, config.hidden_size)
            self.blocks = nn.ModuleList(
                DenseBlock(config, linear) for _ in range(config.num_blocks)
            )
            self.final_norm = nn.RMSNorm(config.hidden_size)
            self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def layers(self) -> Sequence[DenseBlock]:
        """The blocks, in order."""
        return [cast(DenseBlock, block) for block in self.blocks]

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 ``[B, S]`` to ``[B, S, V]``: for each token, the scores of the one that follows."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.embedding(tokens) + self.positions(places)
        for block in self.blocks:
            hidden = block(hidden)
        return self.output(self.final_norm(hidden))
