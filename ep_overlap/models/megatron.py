"""megatron-core's models under our schedule: what a user imports.

``GPTParts`` is a GPTModel cut into nodes (``megatron_parts.py``), for ``OverlapSchedule``.
"""

from ep_overlap.models.megatron_parts import GPTBatch, GPTParts, mean_loss

__all__ = ["GPTBatch", "GPTParts", "mean_loss"]
