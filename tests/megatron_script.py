"""A Megatron script in small, as the tests of the drop-in run it: its forward step, its losses, and
what one step of it leaves."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.utils import get_model_config
from models_support import random_tokens
from torch import Tensor, nn

from ep_overlap.commands.world import local_part
from ep_overlap.models.megatron_build import MegatronSizes

SEQ_LENGTH = 8
BATCH_SIZE = 2

Microbatch = tuple[Tensor, Tensor, Tensor]
"""Tokens, labels, and which labels count: ``[B, S]``."""

LossFunc = Callable[..., Any]


def sizes(**changed: Any) -> MegatronSizes:
    chosen = MegatronSizes(
        num_layers=2,
        hidden_size=16,
        num_heads=2,
        ffn_hidden_size=24,
        num_experts=4,
        topk=2,
        seq_length=SEQ_LENGTH,
    )
    return replace(chosen, **changed)


def microbatches(
    num: int,
    seed: int = 0,
    ranks_per_sequence: int = 1,
    device: torch.device | str = "cpu",
) -> Iterator[Microbatch]:
    """Other ones on every rank, but for those that share a sequence; a few tokens do not count."""
    seed = 1000 * seed + 100 * (dist.get_rank() // ranks_per_sequence)
    for index in range(num):
        tokens, labels = (x.to(device) for x in random_tokens(seed + index, 2, SEQ_LENGTH))
        yield tokens, labels, (labels % 5 != index % 5).float()


def mean_loss(mask: Tensor, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Two values: the loss is taken to be the mean of its microbatch."""
    loss = (output.float() * mask).sum() / mask.sum()
    return loss, {"lm loss": loss.detach().clone()}


def token_loss(mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Three values: the loss is a sum, and the second is over how many tokens."""
    loss = (output.float() * mask).sum()
    return loss, mask.sum().to(torch.int), {"lm loss": loss.detach().clone()}


def forward_step(
    data: Iterator[Microbatch],
    model: GPTModel,
    return_schedule_plan: bool = False,
    loss_func: LossFunc = mean_loss,
) -> tuple[Any, LossFunc]:
    """As ``pretrain_gpt.py`` has it."""
    tokens, labels, mask = next(data)
    positions = torch.arange(SEQ_LENGTH, device=tokens.device).expand(len(tokens), -1)
    every_pair = torch.ones(SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool, device=tokens.device)
    hidden = every_pair.triu(1)[None, None]
    call = model.build_schedule_plan if return_schedule_plan else model
    output = call(tokens, positions, hidden, labels=labels, loss_mask=mask)
    return output, partial(loss_func, mask)


@dataclass(frozen=True, kw_only=True)
class Left:
    """What steps leave behind."""

    logged: list[list[Any]]
    """What each step returned."""
    grads: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    """Such as the routers' counts of tokens."""


def script(
    forward_backward: Callable[..., Any],
    model: nn.Module,
    /,
    *,
    num_microbatches: int = 2,
    num_steps: int = 1,
    seed: int = 0,
    **arguments: Any,
) -> Left:
    """Steps without an optimizer, so that gradients add up. Random numbers and what megatron-core
    logs of its losses begin anew."""
    torch.manual_seed(dist.get_rank())
    ranks_per_sequence = get_model_config(model).tensor_model_parallel_size
    device = next(model.parameters()).device
    get_moe_metrics_tracker().metrics.clear()
    MTPLossLoggingHelper.tracker.clear()
    logged = [
        forward_backward(
            **{
                "forward_step_func": forward_step,
                "data_iterator": microbatches(
                    num_microbatches, seed + step, ranks_per_sequence, device
                ),
                "model": model,
                "num_microbatches": num_microbatches,
                "seq_length": SEQ_LENGTH,
                "micro_batch_size": BATCH_SIZE,
                **arguments,
            }
        )
        for step in range(num_steps)
    ]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return Left(logged=logged, grads=grads_of(model), buffers=buffers)


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if weight.grad is None else local_part(weight.grad).clone()
        for name, weight in model.named_parameters()
    }


def unequal(ours: Left, theirs: Left) -> list[str]:
    """What differs by a bit. A gradient that both lack is equal."""
    mine = {"logged": ours.logged, **ours.grads, **ours.buffers}
    yours = {"logged": theirs.logged, **theirs.grads, **theirs.buffers}
    assert mine.keys() == yours.keys()
    return [name for name in mine if not same(mine[name], yours[name])]


def same(ours: Any, theirs: Any) -> bool:
    """Equal in type and bits, with tensors in lists and dictionaries."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, Tensor):
        return ours.dtype is theirs.dtype and torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours == theirs
