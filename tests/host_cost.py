"""What a schedule costs the host around a real GPTModel's nodes: megatron-core's own and ours.

``python tests/host_cost.py`` prints the table: two ranks, EP2, tiny sizes, without sharding and
with ``optim_grads_params``, alternating steps in one process. The calling thread's time, less what
the nodes' callables, autograd's engine, and gathers and reductions take; per overlapped pair of
layers, as the difference of a deep and a shallow model. megatron-core builds a plan for every
microbatch; that is told apart. Hooks of its FSDP v1 that a callable or the engine runs are within
the callables.

The clock is the wall's: that of a thread's CPU time is a system call, of which both would pay
eighteen for each pair. So nothing else should run on the machine.

Graphs are kept until the step is over, and what it takes to let go of them then is told apart, too:
it is autograd's, and falls within a callable or outside by who holds the last reference.
megatron-core's dispatcher, one for all microbatches, holds an attention's until its next forward.
"""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from statistics import median
from time import perf_counter_ns
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron_script import SEQ_LENGTH, microbatches
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ep_overlap.commands.arguments import BenchArguments
from ep_overlap.commands.bench_megatron import ForwardStep, environment
from ep_overlap.commands.bench_megatron_models import ModelMaker, fsdp_environment
from ep_overlap.commands.measured_world import RealWorld
from ep_overlap.commands.world import World
from ep_overlap.config import OverlapConfig
from ep_overlap.models.megatron_parts import GPTParts, mean_loss
from ep_overlap.plan.lower import Strategy
from ep_overlap.schedule import OverlapSchedule
from ep_overlap.testing import RankPool
from fsdp_hooks.collectives import new_torch_group
from fsdp_hooks.context import Runtime
from fsdp_hooks.precision import MixedPrecision
from fsdp_hooks.shard import fully_shard
from fsdp_hooks.streams import StreamKind

NUM_LAYERS = 8
NUM_MICROBATCHES = 4
NUM_ROUNDS = 21
NUM_PAIRS = NUM_LAYERS * NUM_MICROBATCHES
"""More in the deep step than in the shallow one."""


@dataclass
class Inside:
    """Time within what is not the schedule's."""

    times: dict[str, int] = field(default_factory=lambda: {"callables": 0, "plans": 0})
    """ns"""
    graphs: list[GradientEdge] = field(default_factory=list[GradientEdge])
    """Of what the callables made."""
    depth: int = 0
    """Of what is watched: what runs within something watched is counted with it."""
    undo: ExitStack = field(default_factory=ExitStack)

    def watch(self, owner: Any, name: str, counter: str = "callables") -> None:
        original, times = getattr(owner, name), self.times

        @wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = perf_counter_ns()  # ahead of the watching's own work; at the end, behind it
            if self.depth:
                return original(*args, **kwargs)
            self.depth = 1
            try:
                result = original(*args, **kwargs)
                self._keep(result)
                return result
            finally:
                self.depth = 0
                times[counter] += perf_counter_ns() - started

        setattr(owner, name, timed)
        self.undo.callback(setattr, owner, name, original)

    def _keep(self, result: object) -> None:
        if isinstance(result, tuple):
            for each in cast(tuple[object, ...], result):
                self._keep(each)
        elif isinstance(result, Tensor) and result.grad_fn is not None:
            self.graphs.append(get_gradient_edge(result))


@contextmanager
def watching() -> Iterator[Inside]:
    from megatron.core.models.common import model_chunk_schedule_plan as theirs
    from megatron.core.pipeline_parallel.utils import ScheduleNode

    from ep_overlap.models import megatron_layers, megatron_parts
    from ep_overlap.run import node

    inside = Inside()
    exchanges = ("dispatch", "dispatch_backward", "combine", "combine_backward")
    for part in ("attn", "mlp", "finish", *exchanges):
        inside.watch(megatron_layers.MegatronMoELayer, part)
    for part in ("pre", "post"):
        inside.watch(megatron_parts.GPTParts, part)
    inside.watch(node, "_RUN_ENGINE")
    for collective in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        inside.watch(dist, collective)

    construct = ScheduleNode.__init__

    def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        inside.watch(self, "forward_func")
        inside.watch(self, "backward_func")

    ScheduleNode.__init__ = constructed
    inside.undo.callback(setattr, ScheduleNode, "__init__", construct)
    inside.watch(theirs.TransformerModelChunkSchedulePlan, "__init__", "plans")
    with inside.undo:
        yield inside


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run a step."""

    name: str
    is_ours: bool
    is_sharded: bool = False


VARIANTS = (
    Variant(name="megatron-core", is_ours=False),
    Variant(name="ours", is_ours=True),
    Variant(name="megatron-core over its FSDP v1", is_ours=False, is_sharded=True),
    Variant(name="ours over fully_shard", is_ours=True, is_sharded=True),
)


def arguments(num_layers: int, *, is_sharded: bool) -> BenchArguments:
    """Tiny sizes: what is left is the schedule."""
    strategy = Strategy.OPTIM_GRADS_PARAMS if is_sharded else Strategy.NO_SHARD
    return BenchArguments(
        num_layers=num_layers,
        hidden_size=16,
        num_attention_heads=2,
        num_experts=4,
        moe_ffn_hidden_size=16,
        seq_length=SEQ_LENGTH,
        micro_batch_size=2,
        num_microbatches=NUM_MICROBATCHES,
        emulate="none",
        data_parallel_sharding_strategy=strategy,
    )


Step = tuple[Callable[[], None], Callable[[], None]]
"""What is timed, and what makes ready for the next."""


def their_step(variant: Variant, num_layers: int, world: RealWorld) -> Step:
    """megatron-core's, of an unchanged script."""
    args = arguments(num_layers, is_sharded=variant.is_sharded)
    made = ModelMaker(args, world).make(is_ours=False, overlap=True, delay=False)
    forward_step = ForwardStep(SEQ_LENGTH, world.device)
    pairs = [(tokens, labels) for tokens, labels, _ in microbatches(NUM_MICROBATCHES)]

    def step() -> None:
        forward_backward_no_pipelining(
            forward_step_func=forward_step,
            data_iterator=iter(pairs),
            model=made.whole,
            num_microbatches=NUM_MICROBATCHES,
            seq_length=SEQ_LENGTH,
            micro_batch_size=2,
            pg_collection=made.pg_collection,
        )

    return step, made.clear_gradients


def our_step(variant: Variant, num_layers: int, world: RealWorld) -> Step:
    """A schedule's, in megatron-core's order."""
    args = arguments(num_layers, is_sharded=False)
    made = ModelMaker(args, world).make(is_ours=True, overlap=True, delay=False)
    parts = GPTParts(made.whole)
    if variant.is_sharded:
        shard(parts, world.size, Runtime(stream_kind=StreamKind.INLINE))
    config = OverlapConfig(num_microbatches=NUM_MICROBATCHES, order="plain")
    # All lanes run in the calling thread, so that its time is all there is.
    schedule = OverlapSchedule(parts, config, stream_kind=StreamKind.INLINE)
    batches = [parts.batch(tokens, labels) for tokens, labels, _ in microbatches(NUM_MICROBATCHES)]

    def clear() -> None:
        parts.module.zero_grad(set_to_none=variant.is_sharded)

    return lambda: schedule.step(batches, mean_loss), clear


def shard(parts: GPTParts, num_ranks: int, runtime: Runtime) -> None:
    """As ``bench --against megatron`` does, on lanes of one's own."""
    experts = frozenset(parts.expert_parameters())
    everyone = init_device_mesh("cpu", (num_ranks,))
    alone = DeviceMesh.from_group(new_torch_group([dist.get_rank()], "alone"), "cpu")
    mp = MixedPrecision(reduce_dtype=torch.bfloat16)

    def mesh_of(name: str, param: nn.Parameter) -> DeviceMesh:
        return alone if param in experts else everyone

    for layer in parts.layers:
        fully_shard(layer.module, mesh=mesh_of, mp=mp)
    fully_shard(parts.module, mesh=mesh_of, mp=mp, grad_divisor=num_ranks, runtime=runtime)


COLUMNS = ("outside the callables", "plan building", "letting go of graphs", "callables")


def measure() -> dict[str, tuple[float, ...]]:
    """By variant, ``COLUMNS``: us for each pair."""
    warnings.simplefilter("ignore")
    cpu = torch.device("cpu")
    ranks = range(dist.get_world_size())
    control = new_torch_group(ranks, "control")
    world = RealWorld(
        World(rank=dist.get_rank(), size=len(ranks), device=cpu, speed=None, control=control)
    )
    with (
        fsdp_environment(arguments(1, is_sharded=True), cpu),
        environment(cpu),
        watching() as inside,
    ):
        steps = {
            variant: tuple(
                (our_step if variant.is_ours else their_step)(variant, depth, world)
                for depth in (NUM_LAYERS, 2 * NUM_LAYERS)
            )
            for variant in VARIANTS
        }

        def cost(step: Step) -> tuple[int, ...]:
            run, clear = step
            inside.times.update(callables=0, plans=0)
            started = perf_counter_ns()
            run()
            done = perf_counter_ns()
            inside.graphs.clear()
            cleared = perf_counter_ns()
            clear()
            callables, plans = inside.times["callables"], inside.times["plans"]
            return done - started - callables - plans, plans, cleared - done, callables

        # Its passes would fall to whoever allocates next.
        gc.collect()
        gc.freeze()
        gc.disable()
        times: dict[str, list[tuple[float, ...]]] = {variant.name: [] for variant in steps}
        try:
            for number in range(NUM_ROUNDS + 2):  # two to warm up
                for variant, (shallow, deep) in steps.items():
                    less, more = cost(shallow), cost(deep)
                    if number >= 2:
                        pair = zip(less, more, strict=True)
                        times[variant.name].append(
                            tuple((b - a) / NUM_PAIRS / 1e3 for a, b in pair)
                        )
                gc.collect()
        finally:
            gc.enable()
            gc.unfreeze()
    return {
        name: tuple(median(column) for column in zip(*rounds, strict=True))
        for name, rounds in times.items()
    }


def main() -> None:
    with RankPool(2) as pool:
        costs, _ = pool.run(measure, timeout_s=500.0)
    shown = Table(title="Host time of one overlapped pair of layers, us: a GPTModel, hidden 16")
    for column in ("variant", *COLUMNS):
        shown.add_column(column, justify="left" if column == "variant" else "right")
    for name, values in costs.items():
        shown.add_row(name, *(f"{value:.0f}" for value in values))
    Console().print(shown)


if __name__ == "__main__":
    main()
