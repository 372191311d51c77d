"""megatron-core's models under our schedule: what a user imports.

``GPTParts`` is a GPTModel cut into nodes (``megatron_parts.py``), ``HybridParts`` a HybridModel
(``megatron_hybrid.py``), for ``OverlapSchedule``.
``get_forward_backward_func`` is megatron-core's, overlapped (``megatron_dropin.py``).
"""

from ep_overlap.models.megatron_dropin import (
    ForwardBackward,
    get_forward_backward_func,
    install,
    uninstall,
)
from ep_overlap.models.megatron_hybrid import HybridParts
from ep_overlap.models.megatron_layers import GPTBatch
from ep_overlap.models.megatron_parts import GPTParts, mean_loss

__all__ = [
    "ForwardBackward",
    "GPTBatch",
    "GPTParts",
    "HybridParts",
    "get_forward_backward_func",
    "install",
    "mean_loss",
    "uninstall",
]
