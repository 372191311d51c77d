"""What a schedule costs the host around a real GPTModel's nodes: megatron-core's own and ours.

``python tests/host_cost.py`` prints the table: two ranks, EP2, tiny sizes, alternating steps in one
process. CPU time of the calling thread (with worker threads: of the process, gloo's included), less
what the nodes' callables and autograd's engine within them take; per overlapped pair of layers, as
the difference of a deep and a shallow model. megatron-core builds a plan for every microbatch; that
is told apart.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from statistics import median
from time import process_time_ns, thread_time_ns
from typing import Any

from megatron_script import forward_step, microbatches, sizes
from rich.console import Console
from rich.table import Table

from ep_overlap.testing import RankPool

NUM_LAYERS = 8
NUM_MICROBATCHES = 4
NUM_ROUNDS = 21
NUM_PAIRS = NUM_LAYERS * NUM_MICROBATCHES
"""More in the deep step than in the shallow one."""


@dataclass
class Inside:
    """CPU time within what is not the schedule's, ns."""

    callables: int = 0
    plans: int = 0
    undo: ExitStack = field(default_factory=ExitStack)

    def watch(self, owner: Any, name: str, counter: str = "callables") -> None:
        original = getattr(owner, name)

        @wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = thread_time_ns()
            try:
                return original(*args, **kwargs)
            finally:
                setattr(self, counter, getattr(self, counter) + thread_time_ns() - started)

        setattr(owner, name, timed)
        self.undo.callback(setattr, owner, name, original)


@contextmanager
def watching() -> Iterator[Inside]:
    from megatron.core.models.common import model_chunk_schedule_plan as theirs
    from megatron.core.pipeline_parallel.utils import ScheduleNode

    from ep_overlap.models import megatron_layers, megatron_parts
    from ep_overlap.run import node

    inside = Inside()
    for part in ("attn", "dispatch", "mlp", "combine", "finish"):
        inside.watch(megatron_layers.MegatronMoELayer, part)
    for part in ("pre", "post"):
        inside.watch(megatron_parts.GPTParts, part)
    inside.watch(node, "_RUN_ENGINE")

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


def gpt(num_layers: int) -> Any:
    from ep_overlap.models.groups import new_expert_groups
    from ep_overlap.models.megatron_build import build_gpt

    model = build_gpt(sizes(num_layers=num_layers), new_expert_groups(2), seed=3)
    model.config.overlap_moe_expert_parallel_comm = True
    return model


def scripted(function: Callable[..., Any], num_layers: int) -> Callable[[], None]:
    """A step of an unchanged script."""
    model = gpt(num_layers)

    def step() -> None:
        function(
            forward_step_func=forward_step,
            data_iterator=microbatches(NUM_MICROBATCHES),
            model=model,
            num_microbatches=NUM_MICROBATCHES,
            seq_length=8,
            micro_batch_size=2,
            pg_collection=model.pg_collection,
        )

    return step


def inline(num_layers: int) -> Callable[[], None]:
    """A step of ours, with all lanes in the calling thread."""
    from ep_overlap.config import OverlapConfig
    from ep_overlap.models.megatron import GPTParts, mean_loss
    from ep_overlap.schedule import OverlapSchedule
    from fsdp_hooks.streams import StreamKind

    parts = GPTParts(gpt(num_layers))
    config = OverlapConfig(num_microbatches=NUM_MICROBATCHES, order="plain")
    schedule = OverlapSchedule(parts, config, stream_kind=StreamKind.INLINE)
    batches = [parts.batch(tokens, labels) for tokens, labels, _ in microbatches(NUM_MICROBATCHES)]

    def step() -> None:
        schedule.step(batches, mean_loss)

    return step


THREADS = "ours, drop-in, worker threads"


def measure() -> dict[str, tuple[float, float, float]]:
    """By variant, us for each pair: outside the callables, plan building, within the callables."""
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    from ep_overlap.models.megatron import ForwardBackward
    from ep_overlap.models.megatron_cpu import megatron_schedule_on_cpu

    warnings.simplefilter("ignore")
    makers: dict[str, Callable[[int], Callable[[], None]]] = {
        "megatron-core": lambda depth: scripted(forward_backward_no_pipelining, depth),
        "ours, inline": inline,
        THREADS: lambda depth: scripted(ForwardBackward(order="plain"), depth),
    }
    with megatron_schedule_on_cpu(), watching() as inside:
        steps = {name: (make(NUM_LAYERS), make(2 * NUM_LAYERS)) for name, make in makers.items()}

        def cost(name: str, step: Callable[[], None]) -> tuple[int, int, int]:
            inside.callables = inside.plans = 0
            clock = process_time_ns if name == THREADS else thread_time_ns
            started = clock()
            step()
            whole = clock() - started
            return whole - inside.callables - inside.plans, inside.plans, inside.callables

        times: dict[str, list[tuple[float, ...]]] = {name: [] for name in steps}
        for number in range(NUM_ROUNDS + 2):  # two to warm up
            for name, (shallow, deep) in steps.items():
                less, more = cost(name, shallow), cost(name, deep)
                if number >= 2:
                    pair = zip(less, more, strict=True)
                    times[name].append(tuple((b - a) / NUM_PAIRS / 1e3 for a, b in pair))
    return {
        name: tuple(median(column) for column in zip(*rounds, strict=True))  # type: ignore[misc]
        for name, rounds in times.items()
    }


def main() -> None:
    with RankPool(2) as pool:
        costs, _ = pool.run(measure, timeout_s=500.0)
    shown = Table(title="CPU time of one overlapped pair of layers, us: a GPTModel, hidden 16")
    for column in ("variant", "outside the callables", "plan building", "callables"):
        shown.add_column(column, justify="left" if column == "variant" else "right")
    for name, values in costs.items():
        shown.add_row(name, *(f"{value:.0f}" for value in values))
    Console().print(shown)


if __name__ == "__main__":
    main()
