"""What one rank of an emulated world sees of a collective: local copies, without other ranks.

Gathers: every rank holds what this one holds. Reductions: the others add nothing (zeros to a sum,
the neutral element to every other operation), so a result is this rank's part alone, and an average
is that over the number of ranks. Exchanges: the input's elements in their order, from the start
again where the output is longer; so far, what comes back after a second exchange is what was sent.
From another root: what the tensor holds already, where it holds floating-point numbers.

Copies go through ``Tensor.data``: like those of gloo and NCCL they are not recorded by autograd,
and do not count as a change of what it has saved (a gathered weight is written again in place).
"""

from collections.abc import Sequence
from typing import Final

import torch.distributed as dist
from torch import Tensor

ReduceOp = dist.ReduceOp

REDUCTIONS: Final = (
    ReduceOp.SUM,
    ReduceOp.AVG,
    ReduceOp.MAX,
    ReduceOp.MIN,
    ReduceOp.PRODUCT,
    ReduceOp.BAND,
    ReduceOp.BOR,
    ReduceOp.BXOR,
)


def fill(output: Tensor, source: Tensor) -> None:
    """``output[m]`` from ``source[n]``, again and again; zeros where there is no source.

    For ``m = n * num_ranks`` that is an all-gather; the source may then be one of the output's own
    parts. Both contiguous, of any shape.
    """
    if output.shape == source.shape:  # most exchanges
        output.data.copy_(source.data)
        return
    source, output = source.data.view(-1), output.data.view(-1)
    n, m = source.numel(), output.numel()
    if n == 0:
        output.zero_()
    elif n >= m:
        output.copy_(source[:m])
    else:
        start = (source.data_ptr() - output.data_ptr()) // source.element_size()
        if 0 <= start < m and start % n == 0:  # in place: torch refuses to copy over the source
            _repeat(output[:start], source)
            _repeat(output[start + n :], source)
        else:
            _repeat(output, source)


def _repeat(output: Tensor, source: Tensor) -> None:
    n, m = source.numel(), output.numel()
    whole = m - m % n
    if whole:
        output[:whole].view(-1, n).copy_(source)
    if whole < m:
        output[whole:].copy_(source[: m - whole])


def fill_each(outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Each output from the source at its place."""
    for output, source in zip(outputs, sources, strict=True):
        fill(output, source)


def take_chunk(output: Tensor, whole: Tensor, rank: int) -> None:
    """``output[n]``: chunk ``rank`` of ``whole[num_ranks * n]``: a sum to which others add 0."""
    n = output.numel()
    output.data.view(-1).copy_(whole.data.view(-1)[rank * n : rank * n + n])


def reduce_alone(tensors: Sequence[Tensor], op: object, size: int) -> None:
    """What a reduction of ``op`` leaves in tensors that hold this rank's part, in place."""
    if op == ReduceOp.AVG:
        for tensor in tensors:
            rounding = None if tensor.is_floating_point() or tensor.is_complex() else "trunc"
            tensor.data.div_(size, rounding_mode=rounding)


def check_reduction(op: object) -> None:
    """Raises ValueError for an operation that is not emulated."""
    if not any(op == known for known in REDUCTIONS):
        raise ValueError(
            f"expected a reduction by sum, average, max, min, product, and, or, xor; got {op}, "
            "which an emulated world does not know; reduce by SUM and scale the result"
        )


def check_same(outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, factor: int) -> None:
    """Raises ValueError unless each output has its input's dtype and ``factor`` times its size.

    A factor of 0 checks the dtype alone.
    """
    for output, source in zip(outputs, inputs, strict=True):
        if output.dtype != source.dtype or output.device != source.device:
            raise ValueError(
                f"expected an output of the input's dtype and device, {source.dtype} on "
                f"{source.device}; got {output.dtype} on {output.device}"
            )
        if factor and output.numel() != source.numel() * factor:
            raise ValueError(
                f"expected an output of {factor} x {source.numel()} elements, got one of shape "
                f"{tuple(output.shape)}; allocate it to match the input {tuple(source.shape)}"
            )


def check_splits(tensor: Tensor, splits: Sequence[int], size: int, *, name: str) -> None:
    """Raises ValueError unless splits cover dim 0; empty splits divide it evenly."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if len(splits) == 0:
        if rows % size:
            raise ValueError(
                f"expected {name} rows in {size} equal parts, got {rows}; give {name}_split_sizes"
            )
    elif len(splits) != size or sum(splits) != rows:
        raise ValueError(
            f"expected {size} {name}_split_sizes that add up to {rows} rows, got {list(splits)}"
        )


def check_source(tensors: Sequence[Tensor], root: int, rank: int, *, op: str) -> None:
    """Raises ValueError where ``root`` would have to send what this rank cannot guess."""
    if root != rank and any(not tensor.is_floating_point() for tensor in tensors):
        dtypes = ", ".join(sorted({str(tensor.dtype) for tensor in tensors}))
        raise ValueError(
            f"{op} from rank {root} of the group to this rank {rank}: expected floating-point "
            f"numbers, which stay as they are, got {dtypes} (sizes, indices or pickled objects), "
            "which an emulated rank has nobody to get from; emulate the rank that is the root"
        )
