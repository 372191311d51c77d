"""megatron-core's local linear layers, with weight gradients that can be delayed and fused.

In megatron-core ``delay_wgrad_compute`` is accepted with these layers and does nothing: their
``backward_dw`` is empty. Both layers multiply in ``_forward_impl``; that alone is replaced.
"""

# ``_forward_impl`` has no types in megatron-core.
# pyright: reportPrivateUsage=false, reportIncompatibleMethodOverride=false

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from torch import Tensor

from ep_overlap.models.megatron_globals import INSTALL_HINT
from fsdp_hooks.wgrad import ManagedLayer, managed_linear
from fsdp_hooks.wgrad_layers import LayerTypes

try:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
except ImportError as error:
    raise ImportError(INSTALL_HINT) from error


class ManagedColumnParallelLinear(ManagedLayer, ColumnParallelLinear):
    """``ColumnParallelLinear``. The output layer is one; its weight may be the embedding's."""

    def _forward_impl(
        self,
        input: Tensor,  # noqa: A002 (megatron-core calls it by this name)
        weight: Tensor,
        bias: Tensor | None,
        **options: object,
    ) -> Tensor:
        return _multiply(self, input, weight, bias, options)


class ManagedRowParallelLinear(ManagedLayer, RowParallelLinear):
    """``RowParallelLinear``."""

    def _forward_impl(
        self,
        input: Tensor,  # noqa: A002 (megatron-core calls it by this name)
        weight: Tensor,
        bias: Tensor | None,
        **options: object,
    ) -> Tensor:
        return _multiply(self, input, weight, bias, options)


WGRAD_LAYERS: Final[LayerTypes] = MappingProxyType(
    {
        ColumnParallelLinear: ManagedColumnParallelLinear,
        RowParallelLinear: ManagedRowParallelLinear,
    }
)


def _multiply(
    layer: ManagedLayer,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: Mapping[str, object],
) -> Tensor:
    """``rows``: ``[S, B, in]``, or ``[T, in]`` for an expert. The bias is added as megatron-core
    adds it: within the product it would round otherwise."""
    if options["allreduce_dgrad"] or options["sequence_parallel"]:
        raise ValueError(
            f"{type(layer).__name__} is tensor parallel; expected one tensor-parallel rank where "
            "weight gradients are delayed or fused. Leave both out, or set "
            "tensor_model_parallel_size=1"
        )
    product = managed_linear(layer, rows, weight)
    return product if bias is None else product + bias
