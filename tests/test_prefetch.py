"""What is gathered ahead on the standard path: order, depth, budget, and what is live when."""

import random
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharding_support import (
    WIDTH,
    SharedGroups,
    Stack,
    Words,
    clean,
    double,
    input_of,
    issued,
    root_of,
    token_loss,
    tokens_of,
    whole_grads,
    world_mesh,
    worst_error,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ep_overlap.testing import RankPool, record
from fsdp_hooks.checkpoint_ranks import everyone
from fsdp_hooks.collectives import new_torch_group
from fsdp_hooks.context import Runtime
from fsdp_hooks.order import PrefetchOrder
from fsdp_hooks.root import FsdpRoot
from fsdp_hooks.shard import fully_shard
from fsdp_hooks.streams import StreamKind

TOLERANCE = 1e-12
"""float64, against one process: sums over ranks are formed in another order."""

# ---- the order alone -----------------------------------------------------------------------------


def run_forward(order: PrefetchOrder, names: str, *, with_grad: bool = True) -> tuple[str, bool]:
    """What each use expects next ("-": nothing), and whether the order is news."""
    order.begin_forward(with_grad=with_grad)
    expected = ""
    for name in names:
        order.on_forward(name)
        expected += "".join(order.ahead(1)) or "-"
    return expected, order.end_forward()


def run_backward(order: PrefetchOrder, names: str) -> str:
    """What is expected first, and what each use expects next."""
    order.begin_backward()
    expected = "".join(order.ahead(1)) or "-"
    for name in names:
        order.on_backward(name)
        expected += "".join(order.ahead(1)) or "-"
    order.end_backward()
    return expected


def test_registration_is_the_guess_and_the_last_unit_expects_its_backward() -> None:
    order = PrefetchOrder("abc")
    assert run_forward(order, "abc") == ("bcc", False)
    assert run_backward(order, "cba") == "cba-"


def test_a_mismatch_expects_nothing_from_there_on_and_is_recorded_anew() -> None:
    order = PrefetchOrder("abc")
    assert run_forward(order, "bca") == ("---", False)  # a guess was wrong: no news
    assert run_backward(order, "acb") == "acb-"
    assert run_forward(order, "bca") == ("caa", False)
    assert run_forward(order, "bac") == ("c--", True)
    assert run_forward(order, "ba") == ("ac", True)  # the end came early
    assert run_backward(order, "ab") == "ab-"


def test_forwards_without_gradients_have_an_order_of_their_own() -> None:
    order = PrefetchOrder("abc")
    run_forward(order, "abc")
    assert run_forward(order, "ca", with_grad=False) == ("--", False)  # training was the guess
    assert run_forward(order, "ca", with_grad=False) == ("a-", False)  # no backward is expected
    assert run_forward(order, "abc") == ("bcc", False)
    assert run_forward(order, "ac", with_grad=False) == ("--", True)


def test_backward_passes_over_units_without_gradient_and_is_recorded() -> None:
    order = PrefetchOrder("abcd")
    run_forward(order, "abcd")
    assert run_backward(order, "db") == "dca"  # the reverse of forward is the guess
    assert run_backward(order, "db") == "db-"
    assert run_backward(order, "dcb") == "db--"
    assert run_forward(order, "abdc") == ("bc--", True)
    assert run_backward(order, "cdba") == "cdba-"  # a new forward: its reverse is the guess


def test_ahead_are_different_units_though_one_is_used_twice() -> None:
    order = PrefetchOrder("ab")
    run_forward(order, "abab")
    order.begin_forward(with_grad=True)
    assert order.ahead(0) == []
    assert order.ahead(3) == ["a", "b"]
    assert order.farthest(["a", "b"]) == "b"
    order.on_forward("a")
    assert order.ahead(1) == ["b"]
    assert order.farthest(["a", "b", "c"]) == "c"


# ---- depth ---------------------------------------------------------------------------------------


def shard(
    model: Stack,
    *,
    depth: int = 1,
    budget: int | None = None,
    groups: SharedGroups | None = None,
    strategy: str = "optim_grads_params",
) -> FsdpRoot:
    for block in model.blocks:
        fully_shard(block, mesh=world_mesh(), strategy=strategy)
    runtime = Runtime(
        stream_kind=StreamKind.INLINE,
        new_group=groups or SharedGroups(),
        prefetch_depth=depth,
        max_unsharded_bytes=budget,
    )
    fully_shard(model, mesh=world_mesh(), strategy=strategy, runtime=runtime)
    return root_of(model)


def short_words(words: Sequence[str]) -> list[str]:
    """``U1`` gathers block 1, ``R1`` releases it; reductions and the root are left out."""
    kept = [word for word in words if "blocks." in word or word[0] in "FB"]
    kept = [word for word in kept if not word.startswith("REDUCE")]
    return [w.replace("UNSHARD.blocks.", "U").replace("RESHARD.blocks.", "R") for w in kept]


def words_of_step(model: Stack, root: FsdpRoot, seed: int = 0) -> list[str]:
    with issued(root) as recording:
        token_loss(model, tokens_of(dist.get_rank(), seed)).backward()
    assert clean(root)
    return short_words(recording.words)


def words_at(depth: int, budget: int | None, groups: SharedGroups) -> tuple[list[list[str]], int]:
    """Words of two steps, and the most blocks that lived at one time."""
    model = double(lambda: Stack(4))
    root = shard(model, depth=depth, budget=budget, groups=groups)
    steps = [words_of_step(model, root) for _ in range(2)]
    peak = root.stats.peak_unsharded_bytes - root.root_unit.unsharded_bytes
    num_blocks, rest = divmod(peak, root.inner_units[0].unsharded_bytes)
    assert rest == 0
    return steps, num_blocks


DEPTH_0 = "U0 F0 R0 U1 F1 R1 U2 F2 R2 U3 F3 R3  U3 B3 R3 U2 B2 R2 U1 B1 R1 U0 B0 R0"
DEPTH_1 = "U0 U1 F0 R0 U2 F1 R1 U3 F2 R2 F3  U2 B3 R3 U1 B2 R2 U0 B1 R1 B0 R0"
DEPTH_2 = "U0 U1 U2 F0 R0 U3 F1 R1 F2 F3  U1 B3 R3 U0 B2 R2 B1 R1 B0 R0"
DEPTH_9 = "U0 U1 U2 U3 F0 F1 F2 F3  B3 R3 B2 R2 B1 R1 B0 R0"
# What does not fit is gathered as soon as something was released.
BUDGET_1 = "U0 F0 R0 U1 F1 R1 U2 F2 R2 U3 F3  B3 R3 U2 B2 R2 U1 B1 R1 U0 B0 R0"
# What fits stays for its backward: block 2 while block 3 is in use.
BUDGET_2 = "U0 U1 F0 R0 U2 F1 R1 U3 F2 F3  B3 R3 U1 B2 R2 U0 B1 R1 B0 R0"

AT_DEPTH = {
    (0, None): (DEPTH_0, 1),
    (1, None): (DEPTH_1, 2),
    (2, None): (DEPTH_2, 3),
    (9, None): (DEPTH_9, 4),
    (1, 1): (BUDGET_1, 1),
    (9, 1): (BUDGET_1, 1),
    (2, 2): (BUDGET_2, 2),
    (2, 3): (DEPTH_2, 3),
}
"""By depth, and by the blocks that fit in the budget beside the root."""


def words_at_all() -> dict[tuple[int, int | None], tuple[list[list[str]], int]]:
    groups = SharedGroups()
    sizes = shard(double(lambda: Stack(4)), groups=groups)
    own, block = sizes.root_unit.unsharded_bytes, sizes.inner_units[0].unsharded_bytes
    return {
        (depth, fitting): words_at(
            depth, None if fitting is None else own + fitting * block, groups
        )
        for depth, fitting in AT_DEPTH
    }


def test_depth_and_budget_decide_what_is_gathered_when(ranks2: RankPool) -> None:
    for results in ranks2.run(words_at_all):
        for key, (expected, num_blocks) in AT_DEPTH.items():
            assert results[key] == ([expected.split()] * 2, num_blocks), key


KEPT = "U0 U1 F0 U2 F1 F2  B2 B1 B0"


def words_of_kept_parameters() -> list[list[str]]:
    model = double(lambda: Stack(3))
    root = shard(model, strategy="optim")
    return [words_of_step(model, root) for _ in range(2)]


def test_where_parameters_stay_each_unit_is_gathered_once_a_step_and_ahead(
    ranks2: RankPool,
) -> None:
    for steps in ranks2.run(words_of_kept_parameters):
        assert steps == [KEPT.split()] * 2


# ---- budget, with units of unlike sizes ----------------------------------------------------------


class Unlike(nn.Module):
    """Units of unlike sizes, one within another, run in any order."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.units = nn.ModuleList(Bulge(size) for size in sizes)
        self.units.append(Outer(Bulge(9)))
        self.order = list(range(len(self.units)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index in self.order:
            x = self.units[index](x)
        return x


class Bulge(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, size)
        self.down = nn.Linear(size, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.inner = inner
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inner(torch.tanh(self.before(x))))


def shard_unlike(model: Unlike, runtime: Runtime) -> FsdpRoot:
    fully_shard(model.units[-1].inner, mesh=world_mesh())
    for unit in model.units:
        fully_shard(unit, mesh=world_mesh())
    fully_shard(model, mesh=world_mesh(), runtime=runtime)
    return root_of(model)


class LiveBytes:
    """A ``StreamObserver``: unsharded bytes after each gather and release, in stream time."""

    def __init__(self, root: FsdpRoot) -> None:
        self._bytes = {unit.name: unit.unsharded_bytes for unit in root.units}
        self.now = 0
        self.seen: list[int] = []

    def on_issue(self, lane: str, word: str) -> None:
        return None

    def on_span(self, span: Any) -> None:
        what, _, name = span.word.partition(".")
        if what in ("UNSHARD", "RESHARD"):
            self.now += self._bytes[name] if what == "UNSHARD" else -self._bytes[name]
            self.seen.append(self.now)


def live_within_budgets(seeds: Sequence[int]) -> list[tuple[list[int], int, int, float]]:
    groups = SharedGroups()
    return [live_within_budget(seed, groups) for seed in seeds]


def live_within_budget(seed: int, groups: SharedGroups) -> tuple[list[int], int, int, float]:
    """Random sizes, orders, depths and budgets: what was live, the counted peak, the budget."""
    draw = random.Random(seed)
    rank, size = dist.get_rank(), dist.get_world_size()
    sizes = [draw.randint(1, 30) for _ in range(draw.randint(2, 5))]
    unbound = shard_unlike(Unlike(sizes).double(), Runtime(new_group=groups))
    own = unbound.root_unit.unsharded_bytes
    nested = sum(u.unsharded_bytes for u in unbound.inner_units if isinstance(u.module, Outer))
    nested += next(u.unsharded_bytes for u in unbound.inner_units if u.name.endswith(".inner"))
    largest = max(unit.unsharded_bytes for unit in unbound.inner_units)
    budget = own + max(largest, nested) + draw.choice([0, 100, 1000])

    model, reference = double(lambda: Unlike(sizes)), double(lambda: Unlike(sizes))
    runtime = Runtime(
        new_group=groups, prefetch_depth=draw.randint(0, 4), max_unsharded_bytes=budget
    )
    root = shard_unlike(model, runtime)
    live = LiveBytes(root)
    root.observe(live)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(4):
            order = draw.choices(range(len(model.units)), k=draw.randint(1, 6))
            model.order = reference.order = order if step % 2 else sorted(order)
            model(input_of(rank, step)).square().mean().backward()
            for r in range(size):
                (reference(input_of(r, step)).square().mean() / size).backward()
    root.observe(None)
    assert clean(root)
    got = {n: g for n, g in whole_grads(model).items() if g is not None}
    expected: Mapping[str, Tensor | None] = {
        n: p.grad for n, p in reference.named_parameters() if n in got
    }
    peak = root.stats.peak_unsharded_bytes
    return live.seen, peak, budget, worst_error(got, dict(expected))


def test_unsharded_bytes_never_exceed_the_budget(ranks2: RankPool) -> None:
    for results in ranks2.run(live_within_budgets, range(20)):
        for seen, peak, budget, error in results:
            assert max(seen) == peak <= budget
            assert seen[-1] == 0
            assert error <= TOLERANCE


class WithExpert(Bulge):
    """``up`` and ``down`` are an expert's, of a size of its own."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


def words_with_unlike_experts() -> tuple[list[str], bool]:
    """Two expert-parallel ranks of two: what is issued, and whether the budget held.

    Two units of the small experts would fit, and one of the large ones."""
    rank = dist.get_rank()
    expert_group = new_torch_group([rank % 2, rank % 2 + 2], "expert")
    expert_mesh = DeviceMesh.from_group(expert_group, "cpu")
    dense_mesh = world_mesh()

    def mesh_of(name: str, _: nn.Parameter) -> DeviceMesh:
        return expert_mesh if name.startswith(("up", "down")) else dense_mesh

    def build(budget: int | None) -> tuple[nn.Module, FsdpRoot]:
        layers = (WithExpert((2, 20)[rank % 2]) for _ in range(4))
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers).double()
        for layer in model[1:]:
            fully_shard(layer, mesh=mesh_of)
        runtime = Runtime(new_group=groups, prefetch_depth=2, max_unsharded_bytes=budget)
        fully_shard(model, mesh=dense_mesh, runtime=runtime)
        return model, root_of(model)

    groups = SharedGroups()
    _, unbound = build(None)
    sizes = [unbound.root_unit.unsharded_bytes, unbound.inner_units[0].unsharded_bytes]
    budget = max(map(sum, everyone(sizes, None))) + 100
    assert (sum(sizes) + sizes[1] <= budget) is (rank % 2 == 0)
    model, root = build(budget)
    with record() as recording:
        root.observe(Words(recording))
        for step in range(2):
            model(input_of(rank, step)).square().mean().backward()
        root.observe(None)
    words = [word for word in recording.words if word.startswith(("UNSHARD", "RESHARD"))]
    return words, root.stats.peak_unsharded_bytes <= budget


def test_what_fits_in_a_budget_is_the_same_on_ranks_with_unlike_experts(ranks4: RankPool) -> None:
    results = ranks4.run(words_with_unlike_experts)
    assert all(within for _, within in results)
    assert all(words == results[0][0] for words, _ in results)
    assert len(results[0][0]) == 2 * 2 * 8  # two steps; the root and 3 + 4 gathers, all released


def refusals() -> list[str]:
    root = shard(Stack(2))
    needed = root.root_unit.unsharded_bytes + root.inner_units[0].unsharded_bytes
    messages: list[str] = []
    for depth, budget in ((1, needed - 1), (-1, None)):
        try:
            shard(Stack(2), depth=depth, budget=budget)
        except ValueError as error:
            messages.append(str(error).replace(str(needed), "N").replace(str(needed - 1), "N-1"))
    shard(Stack(2), budget=needed)
    return messages


def test_a_budget_below_what_one_unit_needs_is_refused_at_the_roots_build(ranks2: RankPool) -> None:
    for messages in ranks2.run(refusals):
        assert messages == [
            "max_unsharded_bytes is N-1; expected at least N: unit blocks.0 and those around it, "
            "the root among them, are gathered at one time. Raise the budget, or make smaller "
            "units",
            "prefetch_depth is -1; expected at least 0, which gathers nothing ahead",
        ]


# ---- evaluation between steps --------------------------------------------------------------------


def with_evaluation(order: Sequence[int]) -> tuple[list[list[str]], list[list[str]], list[str]]:
    """Words of training steps and of the evaluations between them, which run other units."""
    model = double(lambda: Stack(3))
    root = shard(model)
    training: list[list[str]] = []
    evaluation: list[list[str]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            training.append(words_of_step(model, root, step))
            model.order = list(order)
            with torch.no_grad(), record() as recording:
                root.observe(Words(recording))
                model(tokens_of(dist.get_rank(), step))
                root.observe(None)
            evaluation.append(short_words(recording.words))
            model.order = [0, 1, 2]
    return training, evaluation, [str(w.message) for w in caught]


TRAINING = "U0 U1 F0 R0 U2 F1 R1 F2  U1 B2 R2 U0 B1 R1 B0 R0"


@pytest.mark.parametrize(
    ("order", "expected"),
    [((0, 2), "U0 U2 R0 R2"), ((2, 1, 0), "U2 U1 R2 U0 R1 R0")],
)
def test_an_evaluation_of_other_units_neither_warns_nor_disturbs_the_order_of_training(
    ranks2: RankPool, order: tuple[int, ...], expected: str
) -> None:
    for training, evaluation, messages in ranks2.run(with_evaluation, order):
        assert messages == []
        assert training[0] == training[1] == training[2]
        assert training[0] == TRAINING.split()
        assert evaluation[0] != evaluation[1]  # the first had training for a guess
        assert evaluation[1:] == [expected.split()] * 2
