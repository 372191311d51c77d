"""The place of one microbatch in flight: what it brings, what the model keeps of it, its loss."""

from collections.abc import Callable
from typing import Any, cast, final

import torch
from torch import Tensor

from ep_overlap.run.layer import ModelParts

LossFn = Callable[[Tensor, Any], Tensor]
"""``(output, batch) -> scalar``; divided by the number of microbatches."""


@final
class MicrobatchSlot:
    """Its batch and state while the microbatch is in flight, its loss afterwards.

    Batch and state go with the microbatch's last node, not at the end of the step: a model may
    keep routing and even pieces of graph in its state.
    """

    def __init__(self, index: int, parts: ModelParts[Any, Any], loss_divisor: int) -> None:
        self.index = index
        self._parts = parts
        self._loss_divisor = loss_divisor
        self._batch: Any = None
        self.state: Any = None
        """What ``ModelParts.begin`` returned."""
        self._loss_fn: LossFn | None = None
        self._loss: Tensor | None = None

    def begin(self, batch: Any, loss_fn: LossFn) -> None:
        """Take a microbatch in."""
        self._batch = batch
        self._loss_fn = loss_fn
        self._loss = None
        try:
            self.state = self._parts.begin(batch)
        except BaseException as error:
            error.add_note(f"raised in begin of microbatch {self.index}")
            raise

    def compute_loss(self, output: Tensor) -> Tensor:
        """The loss, divided; undivided it is kept for the caller.

        Raises:
            ValueError: it is no scalar tensor.
        """
        assert self._loss_fn is not None, "begin() comes first"
        loss = cast(object, self._loss_fn(output, self._batch))
        if not isinstance(loss, Tensor):
            raise ValueError(
                f"loss_fn returned {type(loss).__name__}, expected a scalar tensor; return the loss"
            )
        if loss.numel() != 1:
            raise ValueError(
                f"loss_fn returned a tensor of shape {tuple(loss.shape)}, expected a scalar; take "
                "its mean"
            )
        self._loss = loss.detach()
        if not torch.is_grad_enabled():  # evaluation: nothing of this microbatch follows
            self.let_go()
        return loss / self._loss_divisor

    def take_loss(self) -> Tensor:
        """The microbatch's loss, undivided."""
        loss = self._loss
        assert loss is not None, f"post of microbatch {self.index} has not run"
        self._loss = None
        return loss

    def let_go(self) -> None:
        """The microbatch's last node is done: hold nothing but the loss."""
        self._batch = None
        self.state = None
        self._loss_fn = None

    def clear(self) -> None:
        """Hold nothing."""
        self.let_go()
        self._loss = None
