"""Moving tokens, with their gradients: between ranks, and into another order.

Each function's backward is the same move the other way round, so a gradient is never added up:
the result does not depend on the order of additions.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def all_to_all(tokens: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    """Send each rank its run of rows, and receive one from each.

    Args:
        tokens: ``[sum(sent), ...]``: the rows for rank 0, for rank 1, and so on.
        sent: how many rows go to each rank of ``group``.
        received: how many come from each.
        group: with one rank, nothing is sent.

    Returns:
        ``[sum(received), ...]``.
    """
    if group.size() == 1:
        # Not ``tokens`` itself: what is returned has a place in the graph of its own, as with more
        # ranks. A view costs nothing.
        return tokens.view_as(tokens)
    return _AllToAll.apply(tokens, sent, received, group)  # type: ignore[no-any-return]


def gather_counts(sent: Tensor, group: ProcessGroup) -> Tensor:
    """Learn how many tokens come from each rank for each expert here.

    Args:
        sent: ``[E]`` int64: how many tokens this rank sends to each expert of the whole model.
        group: with one rank, nothing is gathered.

    Returns:
        ``[EP, E_local]`` int64.
    """
    num_ranks = group.size()
    if num_ranks == 1:
        return sent.unsqueeze(0)
    everyone = sent.new_empty(num_ranks * sent.numel())
    dist.all_gather_into_tensor(everyone, sent, group=group)
    return everyone.view(num_ranks, num_ranks, -1)[:, group.rank()]


def reorder(rows: Tensor, order: Tensor, *, inverse: bool = False) -> Tensor:
    """``rows[order]``, or the rows put back from that order.

    Plain indexing would add up gradients at each index, in an order that threads decide.

    Args:
        rows: ``[T, ...]``.
        order: ``[T]`` int64, a permutation.
        inverse: undo the permutation.
    """
    return _Reorder.apply(rows, order, inverse)  # type: ignore[no-any-return]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, sent: list[int], received: list[int], group: ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _send(tokens, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _send(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: bool) -> Tensor:
        ctx.save_for_backward(order)
        ctx.inverse = inverse
        return _place(rows, order, inverse=inverse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return _place(grads[0], order, inverse=not ctx.inverse), None, None


def _send(tokens: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    output = tokens.new_empty((sum(received), *tokens.shape[1:]))
    dist.all_to_all_single(output, tokens.contiguous(), received, sent, group=group)
    return output


def _place(rows: Tensor, order: Tensor, *, inverse: bool) -> Tensor:
    if not inverse:
        return rows.index_select(0, order)
    output = torch.empty_like(rows, memory_format=torch.contiguous_format)
    output[order] = rows
    return output
