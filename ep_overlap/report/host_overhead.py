"""What a schedule costs the host for each overlapped pair of layers, when nodes do nothing much.

A pair is eight node runs: attn, dispatch, mlp and combine of one layer forward, and of another
backward. The callables are one or two cheap operations on four numbers, with the hand-overs of a
real layer (tokens, their weights, residual), so nearly all of the time is autograd's and the
schedule's own::

    one graph    the same operations without a schedule: one forward, one backward
    inline       OverlapSchedule, inline streams, no sharding
    threads      OverlapSchedule, a worker thread per stream
    megatron     megatron-core's schedule plan with its nodes (host_overhead_peer.py)

Ours are the difference of two steps, one of twice as many layers, divided by the pairs that it has
more: what a step costs once (checks, loss, first and last node) drops out. megatron-core's are its
pairs alone, without the building of its plan, which it does anew for each microbatch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from time import perf_counter_ns, process_time_ns
from typing import Final, final

import torch
from rich.table import Table
from torch import Tensor, nn

from ep_overlap.config import OverlapConfig
from ep_overlap.plan.action import LayerKind, Node
from ep_overlap.plan.order import OrderName
from ep_overlap.run.layer import Carry, Collective, TokenGrads, Tokens
from ep_overlap.schedule import OverlapSchedule
from fsdp_hooks.streams import StreamKind
from fsdp_hooks.wgrad_layers import LayerTypes

NUM_LAYERS: Final = 16
NUM_MICROBATCHES: Final = 4
NUM_PAIRS: Final = NUM_LAYERS * NUM_MICROBATCHES
"""More in the deep step than in the shallow one. The first forward and the last backward run
alone; together they count as pairs."""
NUM_ROUNDS: Final = 31
_NS_PER_US: Final = 1e3


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One overlapped pair of layers, medians over rounds."""

    wall_us: float
    cpu_us: float
    """Of all threads of the process; hardly touched by what else the machine does."""


@dataclass(frozen=True, kw_only=True)
class HostOverhead:
    """See the module's docstring."""

    one_graph: Cost
    inline: Cost
    threads: Cost
    megatron: Cost | None
    """None: megatron-core is not installed."""

    @property
    def costs(self) -> Mapping[str, Cost]:
        """By the names of the module's docstring."""
        named = {"one graph": self.one_graph, "inline": self.inline, "threads": self.threads}
        return named if self.megatron is None else {**named, "megatron": self.megatron}


Timed = Callable[[], tuple[int, int]]
"""Runs ``NUM_PAIRS`` pairs; returns wall and CPU time, ns."""


def measure(*, num_rounds: int = NUM_ROUNDS) -> HostOverhead:
    """Measure all variants in turns, on the CPU; about 5 s.

    The calling thread's CPU threads for operators are set to one meanwhile.
    """
    num_threads = torch.get_num_threads()
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, num_threads)
        torch.set_num_threads(1)
        variants = {
            "one graph": _timed(_one_graph),
            "inline": _timed(partial(_scheduled, StreamKind.INLINE)),
            "threads": _timed(partial(_scheduled, StreamKind.THREAD)),
        }
        if (megatron := _megatron(stack)) is not None:
            variants["megatron"] = megatron
        costs = _in_turns(variants, num_rounds)
    return HostOverhead(
        one_graph=costs["one graph"],
        inline=costs["inline"],
        threads=costs["threads"],
        megatron=costs.get("megatron"),
    )


def as_json(result: HostOverhead) -> dict[str, dict[str, float]]:
    """us of each variant, by name."""
    return {name: asdict(cost) for name, cost in result.costs.items()}


def table(result: HostOverhead) -> Table:
    """One line for each variant."""
    shown = Table(title="host time of one overlapped pair of layers (eight node runs)")
    shown.add_column("variant")
    shown.add_column("wall, us", justify="right")
    shown.add_column("CPU, us", justify="right")
    shown.add_column("CPU less one graph, us", justify="right")
    for name, cost in result.costs.items():
        own_us = cost.cpu_us - result.one_graph.cpu_us
        shown.add_row(name, f"{cost.wall_us:.0f}", f"{cost.cpu_us:.0f}", f"{own_us:.0f}")
    return shown


def _in_turns(variants: Mapping[str, Timed], num_rounds: int) -> dict[str, Cost]:
    times: dict[str, list[tuple[int, int]]] = {name: [] for name in variants}
    for run in variants.values():
        run()  # warm up
    for _ in range(num_rounds):
        for name, run in variants.items():
            times[name].append(run())
    return {
        name: Cost(
            wall_us=median(wall_ns for wall_ns, _ in rounds) / NUM_PAIRS / _NS_PER_US,
            cpu_us=median(cpu_ns for _, cpu_ns in rounds) / NUM_PAIRS / _NS_PER_US,
        )
        for name, rounds in times.items()
    }


def _timed(step_of: Callable[[int], Callable[[], None]]) -> Timed:
    """``step_of``: number of layers -> a step."""
    shallow, deep = step_of(NUM_LAYERS), step_of(2 * NUM_LAYERS)

    def run() -> tuple[int, int]:
        wall_ns, cpu_ns = _cost_of(deep)
        shallow_wall_ns, shallow_cpu_ns = _cost_of(shallow)
        return wall_ns - shallow_wall_ns, cpu_ns - shallow_cpu_ns

    return run


def _cost_of(step: Callable[[], None]) -> tuple[int, int]:
    wall_ns, cpu_ns = perf_counter_ns(), process_time_ns()
    step()
    return perf_counter_ns() - wall_ns, process_time_ns() - cpu_ns


def _megatron(stack: ExitStack) -> Timed | None:
    """Its pairs, its stand-ins for the CPU in force until ``stack`` closes."""
    try:
        from ep_overlap.report.host_overhead_peer import MegatronPairs, on_cpu
    except ImportError:
        return None
    stack.enter_context(on_cpu())
    pairs = MegatronPairs(num_layers=NUM_LAYERS, num_microbatches=NUM_MICROBATCHES)
    return pairs.run


# ---- a model that does next to nothing -----------------------------------------------------------


@final
class _Layer(nn.Module):
    """An MoE layer's parts, each of one or two operations (``-x`` is the cheapest with a graph)."""

    @property
    def kind(self) -> LayerKind:
        return LayerKind.MOE

    @property
    def shared_experts(self) -> None:
        return None

    @property
    def module(self) -> nn.Module:
        return self

    def collectives(self, node: Node) -> Sequence[Collective]:
        return ()

    def attn(self, state: None, hidden: Tensor) -> tuple[Tokens, Carry]:
        return Tokens(-hidden, -hidden), Carry(hidden, None)

    def dispatch(self, state: None, tokens: Tokens) -> Tokens:
        assert tokens.probs is not None, "attn made them"
        return Tokens(-tokens.tokens, -tokens.probs)

    def dispatch_backward(self, state: None, grads: TokenGrads) -> TokenGrads:
        return TokenGrads(*(None if grad is None else -grad for grad in grads))

    def mlp(self, state: None, tokens: Tokens) -> Tensor:
        assert tokens.probs is not None, "dispatch brought them"
        return tokens.tokens * tokens.probs

    def combine(self, state: None, tokens: Tensor) -> Tensor:
        return -tokens

    def combine_backward(self, state: None, grad: Tensor) -> Tensor:
        return -grad

    def finish(self, state: None, combined: Tensor, carry: Carry) -> Tensor:
        return combined + carry.residual


@final
class _Model(nn.Module):
    """A ``ModelParts`` of such layers."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.blocks = nn.ModuleList(_Layer() for _ in range(num_layers))
        self._layers = [block for block in self.blocks if isinstance(block, _Layer)]

    @property
    def module(self) -> nn.Module:
        return self

    @property
    def layers(self) -> Sequence[_Layer]:
        return self._layers

    @property
    def wgrad_layers(self) -> LayerTypes:
        return {}

    @property
    def draws_random(self) -> bool:
        return False

    @property
    def replays_graphs(self) -> bool:
        return False

    @property
    def random_states(self) -> None:
        return None

    @property
    def shared_weights(self) -> Sequence[nn.Parameter]:
        return ()

    @property
    def head(self) -> None:
        return None

    def collectives(self, node: Node) -> Sequence[Collective]:
        return ()

    def begin(self, batch: None) -> None:
        return None

    def pre(self, state: None) -> Tensor:
        return -self.weight

    def post(self, state: None, hidden: Tensor, *shared: Tensor) -> Tensor:
        return hidden.sum()

    def forward(self, batch: None) -> Tensor:
        hidden = self.pre(None)
        for layer in self._layers:
            tokens, carry = layer.attn(None, hidden)
            combined = layer.combine(None, layer.mlp(None, layer.dispatch(None, tokens)))
            hidden = layer.finish(None, combined, carry)
        return self.post(None, hidden)

    def whole(self, batch: None) -> Tensor:
        return self(batch)


def _same(output: Tensor, batch: None) -> Tensor:
    return output


def _batches() -> Iterator[None]:
    return iter([None] * NUM_MICROBATCHES)


def _one_graph(num_layers: int) -> Callable[[], None]:
    model = _Model(num_layers)

    def step() -> None:
        for batch in _batches():
            (model.whole(batch) / NUM_MICROBATCHES).backward()

    return step


def _scheduled(kind: StreamKind, num_layers: int) -> Callable[[], None]:
    config = OverlapConfig(num_microbatches=NUM_MICROBATCHES, order=OrderName.PLAIN)
    schedule = OverlapSchedule(_Model(num_layers), config, stream_kind=kind)
    batches = list(_batches())

    def step() -> None:
        schedule.step(batches, _same)

    return step
