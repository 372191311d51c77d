"""megatron-core's own overlapped pairs, with the trivial callables of ``host_overhead.py``.

``TransformerLayerSchedulePlan.run`` with ``TransformerLayerNode`` as they are; only the callables
of a layer are replaced. They hand over what those of a GPTModel do
(``megatron.core.models.gpt.fine_grained_callables``): the dispatched tokens' weights and the
residual in the layer's state, the rest as outputs.
"""

import warnings
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from time import perf_counter_ns, process_time_ns
from typing import Any, final

import torch
from torch import Tensor

from ep_overlap.models.megatron_build import MegatronSizes, transformer_config
from ep_overlap.models.megatron_cpu import megatron_on_cpu
from ep_overlap.models.megatron_globals import INSTALL_HINT, replace

try:
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan
    from megatron.core.models.common.utils import TransformerLayerNode
    from megatron.core.pipeline_parallel.utils import NoopScheduleNode
except ImportError as error:
    raise ImportError(INSTALL_HINT) from error


@contextmanager
def on_cpu() -> Generator[None]:
    """``megatron_on_cpu``, and what its schedule nodes need besides; undone on exit."""
    with ExitStack() as undo:
        undo.enter_context(megatron_on_cpu())
        replace(undo, torch.Tensor, "record_stream", lambda tensor, stream: None)
        yield


@final
class MegatronPairs:
    """Runs steady pairs: backward of one microbatch beside forward of the next."""

    def __init__(self, *, num_layers: int, num_microbatches: int) -> None:
        self._num_layers = num_layers
        self._num_microbatches = num_microbatches
        self._layer = _Layer()
        self._stream = torch.cuda.Stream()
        self._hidden = torch.ones(4, requires_grad=True)

    def run(self) -> tuple[int, int]:
        """All pairs; wall and CPU time, ns. Building plans is not counted."""
        behind = self._plan()
        self._forward(behind)
        wall_ns = cpu_ns = 0
        for _ in range(self._num_microbatches):
            ahead = self._plan()
            start_ns, cpu_start_ns = perf_counter_ns(), process_time_ns()
            self._pairs(ahead, behind)
            cpu_ns += process_time_ns() - cpu_start_ns
            wall_ns += perf_counter_ns() - start_ns
            behind = ahead
        return wall_ns, cpu_ns

    def _plan(self) -> "list[_LayerPlan]":
        event = _DoneEvent()
        return [
            _LayerPlan(self._layer, event, None, self._stream, self._stream, {})
            for _ in range(self._num_layers)
        ]

    def _forward(self, layers: "list[_LayerPlan]") -> None:
        hidden: Tensor = self._hidden
        for layer in layers:
            hidden, _ = _LayerPlan.run(layer, None, f_input=hidden)

    def _pairs(self, ahead: "list[_LayerPlan]", behind: "list[_LayerPlan]") -> None:
        hidden: Tensor = self._hidden
        grad: Tensor = torch.ones(4)
        for forward, backward in zip(ahead, reversed(behind), strict=True):
            hidden, grad = _LayerPlan.run(forward, backward, f_input=hidden, b_grad=grad)


class _Layer:
    """What a plan asks of a TransformerLayer, when its callables are given."""

    def __init__(self) -> None:
        sizes = MegatronSizes(
            num_layers=1,
            hidden_size=4,
            num_heads=1,
            ffn_hidden_size=4,
            num_experts=2,
            topk=1,
            seq_length=1,
        )
        with warnings.catch_warnings():  # deprecated defaults of its own
            warnings.filterwarnings("ignore", module=r"megatron\.core\.transformer\.")
            self.config = transformer_config(sizes, expert_parallel_size=1)

    def get_inner_quantization_context(self) -> AbstractContextManager[None]:
        return nullcontext()


class _DoneEvent:
    """An event on the CPU, where what is issued is done."""

    def wait(self, stream: object) -> None: ...

    def record(self, stream: object) -> None: ...


class _LayerPlan(TransformerLayerSchedulePlan):
    """Its plan of a layer, with other callables."""

    def _build_callable_nodes(
        self, event: Any, comp_stream: Any, comm_stream: Any, extra_args: dict[str, Any]
    ) -> None:
        # With one expert to a rank, mlp's input is kept for its backward, as ours needs it.
        settings = {"config": self.config, "is_moe": True, "num_local_experts": 1}

        def node(stream: Any, function: Any, name: str) -> TransformerLayerNode:
            return TransformerLayerNode(
                stream,
                event,
                self.layer_state,
                self.chunk_state,
                function,
                name=name,
                extra_args=settings,
            )

        self.pre_dispatch_computation = node(comp_stream, _attn, "pre_dispatch_computation")
        self.moe_dispatch = node(comm_stream, _dispatch, "moe_dispatch")
        self.mlp = node(comp_stream, _mlp, "mlp")
        self.moe_combine = node(comm_stream, _combine, "moe_combine")
        self.mtp_post_process = NoopScheduleNode()


def _attn(node: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    node.layer_state.residual = node.detach(hidden)
    return -hidden, -hidden


def _dispatch(node: Any, tokens: Tensor, probs: Tensor) -> Tensor:
    node.layer_state.dispatched_probs = node.detach(-probs)
    return -tokens


def _mlp(node: Any, tokens: Tensor) -> Tensor:
    return tokens * node.layer_state.dispatched_probs


def _combine(node: Any, tokens: Tensor) -> Tensor:
    return -tokens + node.layer_state.residual
