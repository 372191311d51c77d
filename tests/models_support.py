"""What the tests of models share: a model run in autograd segments, and a launcher of ranks."""

import pickle
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ep_overlap.plan.action import LayerKind, Node
from ep_overlap.run.layer import Carry, ModelParts, Tokens

LossFn = Callable[[Tensor, Any], Tensor]
NUM_RANKS = 2
TIMEOUT_S = 150.0


@dataclass
class Tape:
    """The cuts between one microbatch's segments."""

    loses_residual: bool = False
    """Drop the gradient of the residual that attn hands to finish: a fault, to see it found."""
    cuts: list[tuple[list[Tensor], list[Tensor]]] = field(default_factory=list)
    loss: Tensor | None = None

    def cut(self, *outputs: Tensor) -> tuple[Tensor, ...]:
        """End a segment with these outputs; what comes back begins others."""
        leaves = [output.detach().requires_grad_() for output in outputs]
        self.cuts.append((list(outputs), leaves))
        return tuple(leaves)

    def backward(self) -> None:
        """Each segment's backward, last first; all gradients of its outputs enter as roots."""
        assert self.loss is not None
        self.loss.backward()
        for outputs, leaves in reversed(self.cuts):
            torch.autograd.backward(outputs, [leaf.grad for leaf in leaves])


def parts_of(
    parts: ModelParts[Any, Any], batch: Any, loss_fn: LossFn, tape: Tape
) -> Generator[None]:
    """Run one microbatch forward in segments, stopping after each part."""
    state = parts.begin(batch)
    (hidden,) = tape.cut(parts.pre(state))
    finish = lambda hidden=hidden: hidden  # noqa: E731
    for layer in parts.layers:
        yield
        if layer.kind is LayerKind.DENSE:
            (hidden,) = tape.cut(layer.attn(state, finish()))
            yield
            (hidden,) = tape.cut(layer.mlp(state, hidden))
            finish = lambda hidden=hidden: hidden  # noqa: E731
            continue
        tokens, carry = layer.attn(state, finish())
        shared = [] if carry.shared is None else [carry.shared]
        probs = [] if tokens.probs is None else [tokens.probs]
        residual, sent, *others = tape.cut(carry.residual, tokens.tokens, *probs, *shared)
        probs, shared = others[: len(probs)], others[len(probs) :]
        if tape.loses_residual:
            residual = residual.detach()
            tape.cuts[-1][0].pop(0), tape.cuts[-1][1].pop(0)
        yield
        received = layer.dispatch(state, Tokens(sent, probs[0] if probs else None))
        tokens, *probs = tape.cut(*(tensor for tensor in received if tensor is not None))
        yield
        (output,) = tape.cut(layer.mlp(state, Tokens(tokens, probs[0] if probs else None)))
        yield
        (combined,) = tape.cut(layer.combine(state, output))
        carry = Carry(residual, shared[0] if shared else None)
        finish = partial(layer.finish, state, combined, carry)
    yield
    tape.loss = loss_fn(parts.post(state, finish()), batch)


def in_segments(
    parts: ModelParts[Any, Any], batches: Sequence[Any], loss_fn: LossFn, **fault: bool
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """All microbatches part by part in turns, then their backwards: losses and gradients."""
    parts.module.zero_grad(set_to_none=True)
    tapes = [Tape(**fault) for _ in batches]
    running = [
        parts_of(parts, batch, loss_fn, tape) for batch, tape in zip(batches, tapes, strict=True)
    ]
    done = object()
    while running:
        running = [parts for parts in running if next(parts, done) is not done]
    for tape in tapes:
        tape.backward()
    return [tape.loss.detach() for tape in tapes], gradients(parts.module)


def in_one_graph(
    parts: ModelParts[Any, Any], batches: Sequence[Any], loss_fn: LossFn
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The model's own forward and one backward for each microbatch: losses and gradients."""
    parts.module.zero_grad(set_to_none=True)
    losses = []
    for batch in batches:
        loss = loss_fn(parts.whole(batch), batch)
        loss.backward()
        losses.append(loss.detach())
    return losses, gradients(parts.module)


def differences(
    parts: ModelParts[Any, Any], batches: Sequence[Any], loss_fn: LossFn, **fault: bool
) -> list[str]:
    """What differs by even one bit between both ways."""
    losses, grads = in_one_graph(parts, batches, loss_fn)
    cut_losses, cut_grads = in_segments(parts, batches, loss_fn, **fault)
    found = [
        f"loss {index}"
        for index, pair in enumerate(zip(losses, cut_losses, strict=True))
        if not torch.equal(*pair)
    ]
    assert grads.keys() == {name for name, _ in parts.module.named_parameters()}
    assert grads.keys() == cut_grads.keys()
    return found + [name for name in grads if not torch.equal(grads[name], cut_grads[name])]


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def random_tokens(seed: int, batch_size: int, seq_length: int) -> tuple[Tensor, Tensor]:
    """``[B, S]`` tokens and the ones that follow them."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, 256, (batch_size, seq_length + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


class RecordingGroup(dist.ProcessGroup):
    """A process group that writes down what is issued on it."""

    def __init__(self, inner: ProcessGroup, log: list[tuple[ProcessGroup, str]]) -> None:
        super().__init__(inner.rank(), inner.size())
        self._inner = inner
        self._log = log

    def alltoall_base(self, *args: Any) -> Any:
        self._log.append((self, "all_to_all_single"))
        return self._inner.alltoall_base(*args)

    def allreduce(self, *args: Any) -> Any:
        self._log.append((self, "all_reduce"))
        return self._inner.allreduce(*args)

    def _reduce_scatter_base(self, *args: Any) -> Any:
        self._log.append((self, "reduce_scatter_tensor"))
        return self._inner._reduce_scatter_base(*args)

    def _allgather_base(self, *args: Any) -> Any:
        self._log.append((self, "all_gather_into_tensor"))
        return self._inner._allgather_base(*args)


def recording(log: list[tuple[ProcessGroup, str]]) -> Callable[..., ProcessGroup]:
    """A ``new_group`` whose groups write to ``log``."""

    def new_group(ranks: list[int], *, group_desc: str) -> ProcessGroup:
        return RecordingGroup(dist.new_group(ranks, group_desc=group_desc), log)

    return new_group


def undeclared(
    parts: ModelParts[Any, Any], batch: Any, loss_fn: LossFn, log: list[tuple[ProcessGroup, str]]
) -> tuple[list[str], int]:
    """Parts that issued other collectives than their layer declares, and how many were issued."""
    tape, wrong = Tape(), []
    nodes = ["pre"]
    for index, layer in enumerate(parts.layers):
        names = ["attn", "mlp"]
        if layer.kind is not LayerKind.DENSE:
            names = ["attn", "dispatch", "mlp", "combine"]
        nodes += [f"{index}.{name}" for name in names]
    nodes.append("post")
    log.clear()
    num_issued = 0
    running = parts_of(parts, batch, loss_fn, tape)
    for node in nodes:
        next(running, None)
        index, _, name = node.rpartition(".")
        owner = parts.layers[int(index)] if index else parts
        declared = owner.collectives(Node(name))
        expected = [(collective.group, collective.op) for collective in declared]
        if [(id(group), op) for group, op in log] != [(id(group), op) for group, op in expected]:
            wrong.append(node)
        num_issued += len(log)
        log.clear()
    return wrong, num_issued


def run_ranks(work: Callable[[int], Any], folder: Path) -> list[Any]:
    """Run ``work(rank)`` on two gloo ranks in processes of their own; each one's result.

    Raises:
        TimeoutError: they did not end in time; they are killed.
        Exception: what a rank raised, as ``torch.multiprocessing`` reports it.
    """
    context = mp.start_processes(
        _rank_main, (work, str(folder)), nprocs=NUM_RANKS, join=False, start_method="spawn"
    )
    assert context is not None
    deadline_s = time.monotonic() + TIMEOUT_S
    while not context.join(timeout=1.0):  # False until the last has ended
        if time.monotonic() > deadline_s:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"{work.__name__} did not end within {TIMEOUT_S:.0f} s")
    return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(NUM_RANKS)]


def _rank_main(rank: int, work: Callable[[int], Any], folder: str) -> None:
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=NUM_RANKS)
    result = work(rank)
    (Path(folder) / f"result{rank}").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
