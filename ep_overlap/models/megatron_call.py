"""How a Megatron script calls its model: ``forward_step_func``, run before the model.

It gets a stand-in that notes the call and returns an output that is not made yet; the microbatches'
nodes, which make it, run interleaved.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, final

from torch import nn

from ep_overlap.models.megatron_build import MegatronModel
from ep_overlap.models.megatron_layers import GPTBatch

LossFunc = Callable[..., Any]
ForwardStepFunc = Callable[..., tuple[Any, LossFunc | None]]


@dataclass(frozen=True, kw_only=True)
class CalledBatch(GPTBatch):
    """One microbatch as the script calls the model with it, and its loss."""

    loss_func: LossFunc


def note_call(
    forward_step_func: ForwardStepFunc,
    data_iterator: Iterator[Any] | None,
    model: nn.Module,
    core: MegatronModel,
) -> CalledBatch:
    """What ``forward_step_func`` asks of the model for its next microbatch.

    Args:
        forward_step_func: the script's.
        data_iterator: its first argument.
        model: its second one, in whatever wrappers.
        core: what is in the wrappers; its ``forward`` says what the arguments of a call are.

    Raises:
        ValueError: it does something else than to call the model once, with what the schedule
            supports, and to return the output as it is, and a loss function.
        Exception: its own.
    """
    noted = _StandIn(model, core)
    try:
        returned, loss_func = forward_step_func(data_iterator, noted)
    except (AttributeError, TypeError) as error:
        if NotMadeYet.__name__ in str(error):
            error.add_note(_ON_THE_OUTPUT)
        raise
    if noted.arguments is None:
        raise ValueError(
            "forward_step_func returned without calling the model; expected it to call the model "
            "that it is given, once"
        )
    if returned is not noted.output:
        raise ValueError(
            f"forward_step_func returned {_name(returned)}, expected the model's output. "
            + _ON_THE_OUTPUT
        )
    if loss_func is None:
        raise ValueError(
            "forward_step_func returned None as its loss function, expected a function of the "
            "output: a training step needs a loss"
        )
    return CalledBatch(**noted.arguments, loss_func=loss_func)


_ON_THE_OUTPUT: Final = (
    "The model's output is not made yet when forward_step_func runs, as microbatches run "
    "interleaved: return it as it is, and do the rest in the loss function"
)


@final
class NotMadeYet:
    """In place of an output that is yet to be made."""


@final
class _StandIn:
    """In place of the model: notes one call; else is like the model."""

    def __init__(self, model: nn.Module, core: MegatronModel) -> None:
        self._model = model
        self._signature = inspect.signature(type(core).forward)
        self.arguments: dict[str, Any] | None = None
        """Of ``GPTBatch``; None: not called so far."""
        self.output = NotMadeYet()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> NotMadeYet:
        """As the model's ``forward``."""
        if self.arguments is not None:
            raise ValueError("forward_step_func called the model twice, expected one call")
        given = self._signature.bind(None, *args, **kwargs).arguments
        unsupported = [name for name in given if name not in _FIELDS and given[name] is not None]
        if unsupported:
            raise ValueError(
                f"the model is called with {', '.join(unsupported)}, which the overlapped step "
                "does not support; leave it out, or turn overlap_moe_expert_parallel_comm off"
            )
        self.arguments = {field: given.get(name) for name, field in _FIELDS.items() if field}
        return self.output


_FIELDS: Final = {
    "self": None,
    "input_ids": "tokens",
    "position_ids": "position_ids",
    "attention_mask": "attention_mask",
    "labels": "targets",
    "loss_mask": "loss_mask",
}
"""Arguments of a model's ``forward``, and the fields of ``GPTBatch`` that they become."""


def _name(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
