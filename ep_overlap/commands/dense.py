"""The dense model of ``bench --sharding`` and ``bench --wgrad-fusion``: built, sharded, trained."""

from typing import Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from ep_overlap.commands.arguments import BenchArguments, OptimizerName
from ep_overlap.models.dense import DenseConfig, DenseTransformer
from fsdp_hooks.lifecycle import lifecycle_of
from fsdp_hooks.precision import MixedPrecision
from fsdp_hooks.shard import fully_shard

STRATEGY: Final = "optim_grads_params"
"""As torch's FSDP2: parameters are released, gradients are reduced every microbatch."""


def build_dense(
    args: BenchArguments, device: torch.device, *, linear: type[nn.Module] = nn.Linear
) -> DenseTransformer:
    """The model that the flags ask for, in float32; its seed is theirs, too."""
    config = DenseConfig(
        num_blocks=args.num_blocks,
        hidden_size=args.hidden_size,
        num_heads=args.num_attention_heads,
        ffn_hidden_size=args.moe_ffn_hidden_size,
        seq_length=args.seq_length,
    )
    return DenseTransformer(config, seed=args.seed, linear=linear).to(device)


def shard_dense(
    model: DenseTransformer, mesh: DeviceMesh, mp: MixedPrecision | None = None
) -> None:
    """Each block a unit, what is left the root's. Collective."""
    for block in model.layers:
        fully_shard(block, mesh=mesh, strategy=STRATEGY, mp=mp)
    fully_shard(model, mesh=mesh, strategy=STRATEGY, mp=mp)
    lifecycle_of(model)  # builds the root, and with it the groups of its lanes


def optimizer_of(args: BenchArguments, model: nn.Module) -> torch.optim.Optimizer:
    """The one that the flags ask for."""
    make = torch.optim.SGD if args.optimizer is OptimizerName.SGD else torch.optim.AdamW
    return make(model.parameters(), lr=args.lr)


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy, a scalar. ``tokens``, ``targets``: int64 ``[B, T]``."""
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
