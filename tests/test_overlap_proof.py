"""Overlap on the standard path, proved by time: every gather and reduction runs under compute.

Four units on two ranks, links paced by sleep, compute that fills its time with GEMMs::

    comp  F0 F1 F2 F3 B3 B2 B1 B0        ag  1 2 3 . 2 1 0 .        rs  . . . . . 3 2 1
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharding_support import world_mesh
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ep_overlap.links.group import LinkGroup, LinkSpeed, new_link_group
from ep_overlap.testing import RankPool
from fsdp_hooks.context import Runtime
from fsdp_hooks.lifecycle import lifecycle_of
from fsdp_hooks.root import FsdpRoot
from fsdp_hooks.shard import fully_shard
from fsdp_hooks.streams import Span, StreamKind

NUM_UNITS = 4
COMPUTE_S = 0.05
SPEED = LinkSpeed(bytes_per_s=1e9, latency_s=0.015)
NUM_MODELS = 3
MIN_SHARE = 0.5
"""Of a collective's span: what must lie under the stated compute."""

AG_UNDER = {"U1": "F0", "U2": "F1", "U3": "F2", "U2'": "B3", "U1'": "B2", "U0'": "B1"}
"""Gathers, those of backward with a dash, and the compute that hides each. Block 3 stays."""
RS_UNDER = {"R3": "B2", "R2": "B1", "R1": "B0"}


def spin() -> None:
    """Fill the time with GEMMs of about a millisecond, and pauses that leave the cores to the other
    threads. The time is fixed, so that ranks stay together on a busy machine."""
    matrix = torch.ones(256, 256)
    end = time.perf_counter() + COMPUTE_S
    while time.perf_counter() < end:
        matrix @ matrix
        time.sleep(0.001)


class Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        spin()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        spin()
        return grads[0].clone()


class Compute(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        result = Work.apply(x)
        assert isinstance(result, Tensor)
        return result


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 32)
        self.work = Compute()
        self.down = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.work(self.up(x)))


class Model(nn.Module):
    def __init__(self, order: Sequence[int]) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.units = nn.ModuleList(Unit() for _ in range(NUM_UNITS))
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index in self.order:
            x = self.units[index](x)
        return x


@dataclass(kw_only=True)
class Spans:
    """A ``StreamObserver``: when each gather and reduction ran, and on which lane; and compute."""

    position: Mapping[str, int]
    """Unit name -> its place in the order of execution."""
    times: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    lanes: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, letter: str, name: str, lane: str, start_ns: int, end_ns: int) -> None:
        word = f"{letter}{self.position[name]}"
        with self._lock:
            word += "'" if word in self.times else ""
            self.times[word] = (start_ns, end_ns)
            self.lanes.setdefault(letter, set()).add(f"{lane}, {threading.current_thread().name}")

    def on_issue(self, lane: str, word: str) -> None:
        return None

    def on_span(self, span: Span) -> None:
        what, _, name = span.word.partition(".")
        letter = {"UNSHARD": "U", "REDUCE": "R"}.get(what)
        if letter is not None and name in self.position:
            self.add(letter, name, span.lane, span.start_ns, span.end_ns)

    def share(self, collective: str, compute: str) -> float:
        """The share of the collective that lies under the compute; 0 if it did not run."""
        if collective not in self.times:
            return 0.0
        (start, end), (first, last) = self.times[collective], self.times[compute]
        return max(0, min(end, last) - max(start, first)) / (end - start)


@contextmanager
def observed(root: FsdpRoot, model: Model) -> Iterator[Spans]:
    names = [f"units.{index}" for index in model.order]
    spans = Spans(position={name: position for position, name in enumerate(names)})
    handles: list[Any] = []
    for name in names:
        work = model.get_submodule(name).get_submodule("work")
        for letter, before, after in (
            ("F", work.register_forward_pre_hook, work.register_forward_hook),
            ("B", work.register_full_backward_pre_hook, work.register_full_backward_hook),
        ):
            began: list[int] = []

            def begin(*_: object, began: list[int] = began) -> None:
                began.append(time.perf_counter_ns())

            def end(
                *_: object, began: list[int] = began, letter: str = letter, name: str = name
            ) -> None:
                spans.add(letter, name, "comp", began.pop(), time.perf_counter_ns())

            handles += [before(begin), after(end)]
    root.observe(spans)
    yield spans
    root.observe(None)
    for handle in handles:
        handle.remove()


@dataclass(frozen=True, kw_only=True)
class Step:
    """The share of each collective that was hidden, and where each kind of work ran."""

    ag: dict[str, float]
    rs: dict[str, float]
    lanes: dict[str, set[str]]


Result = tuple[list[list[Step]], dict[str, set[str]]]
"""The three steps of each model; and the threads that used each communicator."""


def three_steps(order: Sequence[int], depth: int, kind: StreamKind) -> Result:
    torch.set_num_threads(1)
    links: dict[str, LinkGroup] = {}

    def new_group(ranks: Sequence[int], name: str) -> ProcessGroup:
        if name not in links:  # models that run one after another share them
            links[name] = new_link_group(ranks, name=name, speed=SPEED)
        return links[name]

    runtime = Runtime(stream_kind=kind, new_group=new_group, prefetch_depth=depth)
    models = [steps_of_model(order, runtime) for _ in range(NUM_MODELS)]
    used = {name: {span.thread_name for span in link.log or ()} for name, link in links.items()}
    return models, used


def steps_of_model(order: Sequence[int], runtime: Runtime) -> list[Step]:
    model = Model(order)
    for unit in model.units:
        fully_shard(unit, mesh=world_mesh())
    fully_shard(model, mesh=world_mesh(), runtime=runtime)
    root = lifecycle_of(model)
    assert isinstance(root, FsdpRoot)
    steps: list[Step] = []
    for _ in range(3):
        dist.barrier()
        with observed(root, model) as spans:
            model(torch.ones(8, 32)).sum().backward()
        steps.append(
            Step(
                ag={word: spans.share(word, compute) for word, compute in AG_UNDER.items()},
                rs={word: spans.share(word, compute) for word, compute in RS_UNDER.items()},
                lanes=spans.lanes,
            )
        )
    return steps


def samples(results: Sequence[Result], number: int) -> list[Step]:
    """The step of this number, of each model on each rank."""
    return [steps[number] for models, _ in results for steps in models]


def hidden(shares: Sequence[Mapping[str, float]]) -> list[str]:
    """The collectives of which half or more is hidden. The median of all models and ranks: where a
    machine is busy, a rank that waits for the other sees a long collective."""
    return [word for word in shares[0] if median(s[word] for s in shares) >= MIN_SHARE]


def gathers(steps: Sequence[Step]) -> list[str]:
    return hidden([step.ag for step in steps])


def reductions(steps: Sequence[Step]) -> list[str]:
    return hidden([step.rs for step in steps])


def check_full_overlap(steps: Sequence[Step]) -> None:
    assert gathers(steps) == list(AG_UNDER), [step.ag for step in steps]
    assert reductions(steps) == list(RS_UNDER), [step.rs for step in steps]


IN_ORDER, OUT_OF_ORDER = (0, 1, 2, 3), (2, 0, 3, 1)


def test_all_gathers_and_reductions_run_under_compute_in_the_first_step_and_the_third(
    ranks2: RankPool,
) -> None:
    results = ranks2.run(three_steps, IN_ORDER, 1, StreamKind.THREAD)
    for number in range(3):
        check_full_overlap(samples(results, number))
        for step in samples(results, number):
            assert step.lanes["U"] == {"ag, stream-ag"}
            assert step.lanes["R"] == {"rs, stream-rs"}
            assert len(step.lanes["F"] | step.lanes["B"]) == 1  # the caller's own thread
            assert not step.lanes["F"] & (step.lanes["U"] | step.lanes["R"])
    for _, used in results:  # each lane has a communicator of its own
        by_lane = {name.split("-")[0]: threads for name, threads in used.items()}
        assert by_lane == {"gather": {"stream-ag"}, "reduce": {"stream-rs"}, "rescue": set()}


def test_units_registered_out_of_order_overlap_fully_from_the_second_step_on(
    ranks2: RankPool,
) -> None:
    results = ranks2.run(three_steps, OUT_OF_ORDER, 1, StreamKind.THREAD)
    first, second, third = (samples(results, number) for number in range(3))
    assert not {"U1", "U2", "U3"} & set(gathers(first))  # the guess was wrong
    check_full_overlap(second)
    check_full_overlap(third)


def test_without_prefetch_no_gather_is_hidden_and_the_proof_fails(ranks2: RankPool) -> None:
    results = ranks2.run(three_steps, IN_ORDER, 0, StreamKind.THREAD)
    for number in range(3):
        assert gathers(samples(results, number)) == []
        with pytest.raises(AssertionError):
            check_full_overlap(samples(results, number))


def test_on_one_lane_nothing_is_hidden_and_the_proof_fails(ranks2: RankPool) -> None:
    results = ranks2.run(three_steps, IN_ORDER, 1, StreamKind.INLINE)
    for number in range(3):
        steps = samples(results, number)
        assert gathers(steps) == reductions(steps) == []
        with pytest.raises(AssertionError):
            check_full_overlap(steps)
