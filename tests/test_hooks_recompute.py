"""Activation recompute on the standard path: it is no news, and it gathers nothing twice."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharding_support import (
    Grads,
    SharedGroups,
    Stack,
    Words,
    clean,
    double,
    root_of,
    shard_stack,
    token_loss,
    tokens_of,
    uses_of,
    whole_grads,
    world_mesh,
    worst_error,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ep_overlap.testing import RankPool, record
from fsdp_hooks.context import Runtime
from fsdp_hooks.shard import fully_shard
from fsdp_hooks.streams import StreamKind

TOLERANCE = 1e-12
NUM_BLOCKS = 4


class Recomputed(Stack):
    """Recomputes spans of ``span`` blocks in backward; 0: nothing. ``kept`` is the last output."""

    span = 0
    use_reentrant = False
    kept: Tensor

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        step = self.span or 1
        for first in range(0, NUM_BLOCKS, step):
            run = nn.Sequential(*self.blocks[first : first + step])
            if self.span:
                x = checkpoint(run, x, use_reentrant=self.use_reentrant)
            else:
                x = run(x)
            assert isinstance(x, Tensor)
        self.kept = x
        return self.head(x)


def inside(block: Any, *, use_reentrant: bool) -> None:
    """Recompute a part of the block that owns parameters."""
    forward = block.up.forward
    block.up.forward = lambda x: checkpoint(forward, x, use_reentrant=use_reentrant)


def output_loss(model: Recomputed, tokens: Tensor) -> Tensor:
    return token_loss(model, tokens)


def inner_loss(model: Recomputed, tokens: Tensor) -> Tensor:
    """The head takes no part: a recomputed forward is the first that hears of the backward."""
    model(tokens)
    return model.kept.square().mean()


Loss = Callable[[Recomputed, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    span: int = 0
    is_inside: bool = False
    use_reentrant: bool = False
    depth: int = 1
    loss: Loss = output_loss


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Three steps: whole gradients, all-gathers and issued words of each step, warnings."""

    grads: Grads
    gathers: list[int]
    words: list[tuple[str, ...]]
    messages: list[str]


def train(case: Case, groups: SharedGroups) -> Trained:
    model = double(lambda: Recomputed(NUM_BLOCKS))
    model.span, model.use_reentrant = case.span, case.use_reentrant
    for block in model.blocks:
        if case.is_inside:
            inside(block, use_reentrant=case.use_reentrant)
        fully_shard(block, mesh=world_mesh())
    runtime = Runtime(stream_kind=StreamKind.INLINE, new_group=groups, prefetch_depth=case.depth)
    fully_shard(model, mesh=world_mesh(), runtime=runtime)
    root = root_of(model)
    gathers: list[int] = []
    words: list[tuple[str, ...]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            before = root.stats.num_all_gathers
            with record() as recording:
                root.observe(Words(recording))
                case.loss(model, tokens_of(dist.get_rank(), step)).backward()
                root.observe(None)
            gathers.append(root.stats.num_all_gathers - before)
            words.append(recording.words)
            assert clean(root)
            assert root.stats.hook_misses == 0
            assert all(use.count == 0 and not use.is_recomputed for use in uses_of(model))
    return Trained(
        grads=whole_grads(model),
        gathers=gathers,
        words=words,
        messages=[str(w.message) for w in caught],
    )


def against_plain(cases: Sequence[Case]) -> list[tuple[float, list[int], bool, list[str]]]:
    """For each case: error, gathers less those without recompute, same words, warnings."""
    groups = SharedGroups()
    results: list[tuple[float, list[int], bool, list[str]]] = []
    for case in cases:
        ours = train(case, groups)
        plain = train(replace(case, span=0, is_inside=False), groups)
        more = [a - b for a, b in zip(ours.gathers, plain.gathers, strict=True)]
        same_words = ours.words == plain.words
        results.append((worst_error(ours.grads, plain.grads), more, same_words, ours.messages))
    return results


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("span", [1, 2, 4])
def test_recomputed_units_gather_no_more_than_others(
    ranks2: RankPool, span: int, use_reentrant: bool
) -> None:
    cases = [Case(span=span, use_reentrant=use_reentrant, depth=depth) for depth in range(3)]
    for results in ranks2.run(against_plain, cases):
        for error, more, same_words, messages in results:
            assert error <= TOLERANCE
            assert messages == []
            assert more == [0] * 3
            if span == 1:  # of a longer span the first unit is needed before its backward
                assert same_words


def test_a_recomputed_part_of_a_unit_gathers_nothing(ranks2: RankPool) -> None:
    # AM#3958
    cases = [Case(is_inside=True, use_reentrant=mode) for mode in (False, True)]
    for results in ranks2.run(against_plain, cases):
        for error, more, same_words, messages in results:
            assert error <= TOLERANCE
            assert messages == []
            assert more == [0] * 3
            assert same_words


def test_a_backward_that_begins_with_recomputing_is_one_backward(ranks2: RankPool) -> None:
    # The reentrant kind runs a backward within the backward for each span.
    cases = [Case(span=2, use_reentrant=mode, loss=inner_loss) for mode in (False, True)]
    for results in ranks2.run(against_plain, cases):
        for error, more, _, messages in results:
            assert error <= TOLERANCE
            assert messages == []
            assert more == [0] * 3


def gathers_of_plain_steps() -> list[list[int]]:
    groups = SharedGroups()
    return [train(Case(depth=depth), groups).gathers for depth in range(3)]


def test_what_stays_for_its_backward_is_not_gathered_again(ranks2: RankPool) -> None:
    # The root and four blocks; then those blocks that were released.
    for gathers in ranks2.run(gathers_of_plain_steps):
        assert gathers == [[1 + 4 + released] * 3 for released in (4, 3, 2)]


def whole_model(use_reentrant: bool) -> tuple[float, bool, list[str]]:
    """The root's own call is recomputed."""
    recomputed, plain = (double(lambda: Stack(3)) for _ in range(2))
    for model in (recomputed, plain):
        shard_stack(model)
    # The reentrant kind does nothing unless an input needs a gradient.
    anchor = torch.zeros((), requires_grad=True)

    def run(tokens: Tensor, _: Tensor) -> Tensor:
        return recomputed(tokens)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            tokens = tokens_of(dist.get_rank(), step)
            token_loss(plain, tokens).backward()
            output = checkpoint(run, tokens, anchor, use_reentrant=use_reentrant)
            assert isinstance(output, Tensor)
            nn.functional.cross_entropy(output.flatten(0, 1), tokens.flatten()).backward()
    error = worst_error(whole_grads(recomputed), whole_grads(plain))
    return error, clean(root_of(recomputed)), [str(w.message) for w in caught]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_whole_model_may_be_recomputed(ranks2: RankPool, use_reentrant: bool) -> None:
    for error, is_clean, messages in ranks2.run(whole_model, use_reentrant):
        assert error <= TOLERANCE
        assert is_clean
        assert messages == []
