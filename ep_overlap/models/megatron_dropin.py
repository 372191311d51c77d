"""In place of megatron-core's ``get_forward_backward_func``: an unchanged script, overlapped.

::

    forward_step_func(data_iterator, model)   for every microbatch, before the first node runs;
        -> model(tokens, ...)                 ``model`` is a stand-in that notes how it is called
        -> (its output, loss_func)
    pre ... post of each microbatch           nodes of a schedule; the output is post's
        -> forward_step_calc_loss             megatron-core's own: loss_func, all scaling
    finalize_model_grads_func                 megatron-core's own

What the schedule does not do, a forward without backward, or a config without the flag, goes to
megatron-core's own function.
"""

import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, cast, final

import torch
from torch import Tensor, nn

from ep_overlap.config import OverlapConfig
from ep_overlap.models.megatron_globals import INSTALL_HINT
from ep_overlap.models.megatron_parts import GPTBatch, GPTParts
from ep_overlap.plan.order import OrderName
from ep_overlap.schedule import OverlapSchedule
from fsdp_hooks.lifecycle import RootLifecycle

try:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.process_groups_config import (
        MultiModuleProcessGroupCollection,
        ProcessGroupCollection,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.utils import get_model_config
except ImportError as error:
    raise ImportError(INSTALL_HINT) from error

ForwardStepFunc = Callable[..., tuple[Any, Callable[..., Any] | None]]


def get_forward_backward_func(
    pp_size: int | None = None,
    vp_size: int | None = None,
    schedule_pg_collection: object | None = None,
) -> "ForwardBackward":
    """megatron-core's function of the same name and arguments.

    Args:
        pp_size: pipeline stages; None: what ``parallel_state`` says, where it is set up.
        vp_size: virtual stages; they need pipeline stages.
        schedule_pg_collection: of several modules on grids of their own.

    Returns:
        What runs a step. Keep it: it builds its schedule once.

    Raises:
        ValueError: pipeline stages, or several grids.
    """
    if pp_size is None and vp_size is None and parallel_state.model_parallel_is_initialized():
        pp_size = parallel_state.get_pipeline_model_parallel_world_size()
        vp_size = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    if isinstance(schedule_pg_collection, MultiModuleProcessGroupCollection):
        raise ValueError(
            "schedule_pg_collection is of several modules, expected one; take megatron-core's own "
            "get_forward_backward_func"
        )
    for name, size in (("pp_size", pp_size), ("vp_size", vp_size)):
        if size is not None and size != 1:
            raise ValueError(
                f"{name}={size}, expected 1: pipeline stages are not built yet; take megatron-core's "
                "own get_forward_backward_func"
            )
    return ForwardBackward()


@dataclass(frozen=True, kw_only=True)
class _Call:
    """How ``forward_step_func`` called the model for one microbatch."""

    batch: GPTBatch
    loss_func: Callable[..., Any] | None


@dataclass(frozen=True, kw_only=True)
class _Losses:
    """What a step's losses leave besides their gradients."""

    data: list[Any] = field(default_factory=list)
    """megatron-core's ``forward_data_store``: what ``loss_func`` returned to be logged."""
    num_tokens: list[Tensor] = field(default_factory=list)


@final
class ForwardBackward:
    """A step of a model, as megatron-core's ``forward_backward_no_pipelining``.

    Args:
        order: ``plain`` or ``paired``; None: paired from two microbatches on (plain for a model that
            draws random numbers).
        max_unsharded_units: see ``OverlapConfig``.
        lifecycle_of: the life cycle of a wrapped model, for a sharding core of one's own.
    """

    def __init__(
        self,
        *,
        order: OrderName | str | None = None,
        max_unsharded_units: int | None = None,
        lifecycle_of: Callable[[nn.Module], RootLifecycle | None] | None = None,
    ) -> None:
        self._order = order
        self._max_unsharded_units = max_unsharded_units
        self._lifecycle_of = lifecycle_of or _lifecycle_of
        self._schedules: dict[tuple[int, int], OverlapSchedule] = {}
        """By the model's identity and the number of microbatches, which may grow in training."""

    def __call__(
        self,
        *,
        forward_step_func: ForwardStepFunc,
        data_iterator: Any,
        model: nn.Module | list[nn.Module],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: Any = None,
        pg_collection: ProcessGroupCollection | None = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """Forward and backward of all microbatches; gradients are finalized.

        Sequence lengths, ``micro_batch_size``, ``decoder_seq_length`` and ``p2p_communicator`` matter
        to pipeline stages alone, here as there.

        Returns:
            What ``loss_func`` returned to be logged, one for each microbatch.

        Raises:
            ValueError: what the schedule does not support, by name.
        """
        whole, iterator = _only(model, "model"), _only(data_iterator, "data_iterator")
        config = cast(TransformerConfig, get_model_config(whole))
        if forward_only or not config.overlap_moe_expert_parallel_comm:
            return schedules.forward_backward_no_pipelining(
                forward_step_func=forward_step_func,
                data_iterator=iterator,
                model=whole,
                num_microbatches=num_microbatches,
                seq_length=seq_length,
                micro_batch_size=micro_batch_size,
                decoder_seq_length=decoder_seq_length,
                forward_only=forward_only,
                collect_non_loss_data=collect_non_loss_data,
                first_val_step=first_val_step,
                adjust_tensor_shapes_fn=adjust_tensor_shapes_fn,
                p2p_communicator=p2p_communicator,
                pg_collection=pg_collection,
                force_all_reduce=force_all_reduce,
            )
        _refuse(config, adjust_tensor_shapes_fn, collect_non_loss_data)
        groups = pg_collection or schedules._build_default_pg_collection()  # pyright: ignore[reportPrivateUsage]
        schedule = self._schedule(whole, num_microbatches, config)
        with _timed(config, "forward-backward"):
            losses = self._step(
                schedule, forward_step_func, iterator, whole, config, num_microbatches, groups
            )
            if config.finalize_model_grads_func is not None:
                total = torch.stack(losses.num_tokens).sum().to(torch.int)
                config.finalize_model_grads_func(
                    [whole],
                    total if config.calculate_per_token_loss else None,
                    pg_collection=groups,
                    force_all_reduce=force_all_reduce,
                )
        return losses.data

    def _schedule(
        self, model: nn.Module, num_microbatches: int, config: TransformerConfig
    ) -> OverlapSchedule:
        key = (id(model), num_microbatches)
        if key not in self._schedules:
            self._schedules[key] = OverlapSchedule(
                GPTParts(_core_of(model)),
                OverlapConfig(
                    num_microbatches=num_microbatches,
                    order=self._order,
                    delay_wgrad=config.delay_wgrad_compute,
                    max_unsharded_units=self._max_unsharded_units,
                    divide_loss=False,
                ),
                lifecycle=self._lifecycle_of(model),
            )
        return self._schedules[key]

    def _step(
        self,
        schedule: OverlapSchedule,
        forward_step_func: ForwardStepFunc,
        iterator: Iterator[Any] | None,
        model: nn.Module,
        config: TransformerConfig,
        num_microbatches: int,
        groups: ProcessGroupCollection,
    ) -> _Losses:
        calls = [
            _note_call(forward_step_func, iterator, model, num_microbatches)
            for _ in range(num_microbatches)
        ]
        by_batch = {id(call.batch): call for call in calls}
        losses = _Losses()

        def loss_of(output: Tensor, batch: GPTBatch) -> Tensor:
            if config.timers is not None:
                config.timers("forward-compute", log_level=2).start()  # the next call stops it
            loss, num_tokens = schedules.forward_step_calc_loss(
                model,
                output,
                by_batch[id(batch)].loss_func,
                config,
                None,
                False,
                num_microbatches,
                losses.data,
                groups.cp.size(),
                True,
            )
            losses.num_tokens.append(num_tokens)
            return loss if config.grad_scale_func is None else config.grad_scale_func(loss)

        schedule.step([call.batch for call in calls], loss_of)
        return losses


def _only[T](given: T | list[T], name: str) -> T:
    if not isinstance(given, list):
        return given
    several = cast("list[T]", given)
    if len(several) != 1:
        raise ValueError(
            f"{name} has {len(several)} chunks, expected 1: virtual pipeline stages are not built "
            "yet. Take megatron-core's own get_forward_backward_func"
        )
    return several[0]


def _refuse(
    config: TransformerConfig, adjust_tensor_shapes_fn: object | None, collect_non_loss_data: bool
) -> None:
    """What concerns the step, and not the model (``refuse_unsupported``)."""
    for name, value in (
        ("adjust_tensor_shapes_fn", adjust_tensor_shapes_fn is not None),
        ("collect_non_loss_data", collect_non_loss_data),
        ("enable_autocast", config.enable_autocast),
        ("gradient_accumulation_fusion", config.gradient_accumulation_fusion),
        ("defer_embedding_wgrad_compute", config.defer_embedding_wgrad_compute),
        ("hybrid_context_parallel", config.hybrid_context_parallel),
    ):
        if value:
            raise ValueError(
                f"{name} is set, and the overlapped step does not support it; leave it out, or turn "
                "overlap_moe_expert_parallel_comm off"
            )


@contextmanager
def _timed(config: TransformerConfig, name: str) -> Generator[None]:
    if config.timers is None:
        yield
        return
    config.timers(name, log_level=1).start(barrier=config.barrier_with_L1_time)
    yield
    config.timers(name).stop()


# ---- how a script calls its model ---------------------------------------------------------------


def _note_call(
    forward_step_func: ForwardStepFunc,
    iterator: Iterator[Any] | None,
    model: nn.Module,
    num_microbatches: int,
) -> _Call:
    noted = _StandIn(model)
    returned, loss_func = forward_step_func(iterator, noted)
    if noted.batch is None:
        raise ValueError(
            "forward_step_func returned without calling the model; expected it to call the model "
            "that it is given, once"
        )
    if returned is not noted.output:
        raise ValueError(
            f"forward_step_func returned {type(returned).__name__} in place of the model's output, "
            "which is not made yet when it is called: the microbatches' nodes run interleaved. "
            "Return the output as it is, and do the rest in the loss function"
        )
    return _Call(batch=noted.batch, loss_func=loss_func)


@final
class _Output:
    """In place of an output that is yet to be made."""


@final
class _StandIn:
    """In place of the model in ``forward_step_func``: notes one call; else is like the model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.batch: GPTBatch | None = None
        self.output = _Output()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        loss_mask: Tensor | None = None,
        **others: object,
    ) -> _Output:
        """As ``GPTModel.forward``."""
        given = {"decoder_input": decoder_input, **others}
        unsupported = sorted(name for name, value in given.items() if value is not None)
        if unsupported:
            raise ValueError(
                f"the model is called with {', '.join(unsupported)}, which the overlapped step does "
                "not support; leave it out, or turn overlap_moe_expert_parallel_comm off"
            )
        if self.batch is not None:
            raise ValueError("forward_step_func called the model twice; expected one call")
        self.batch = GPTBatch(
            tokens=input_ids,
            targets=labels,
            position_ids=position_ids,
            attention_mask=attention_mask,
            loss_mask=loss_mask,
        )
        return self.output


# ---- what a script wraps its model in ------------------------------------------------------------


def _core_of(model: nn.Module) -> GPTModel:
    """The GPTModel within its wrappers.

    Raises:
        ValueError: there is none.
    """
    inner = model
    while not isinstance(inner, GPTModel):
        held = cast(Mapping[str, nn.Module], inner._modules)  # pyright: ignore[reportPrivateUsage]
        if "module" not in held:
            raise ValueError(
                f"{type(model).__name__} holds no GPTModel; expected one, or one in wrappers that "
                "hold it as .module"
            )
        inner = held["module"]
    return inner


def _lifecycle_of(model: nn.Module) -> RootLifecycle | None:
    """Of a wrapper that is a sharding core of its own; None: the model itself knows.

    Raises:
        ValueError: a wrapper that would miss the gradients of a step that does not call it.
    """
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.module import Float16Module

    if isinstance(model, DistributedDataParallel):
        from fsdp_hooks.adapters.megatron_ddp import MegatronDdp

        return MegatronDdp(model)
    if not isinstance(model, Float16Module | GPTModel):
        raise ValueError(
            f"the model is wrapped in {type(model).__name__}, which the overlapped step does not "
            "call; expected megatron-core's DistributedDataParallel, or fsdp_hooks.fully_shard"
        )
    return None


# ---- in a running script -------------------------------------------------------------------------


_THEIRS: Final = schedules.get_forward_backward_func
_NAME: Final = "get_forward_backward_func"


def install() -> None:
    """Put our ``get_forward_backward_func`` wherever megatron-core's has been imported so far."""
    _replace(_THEIRS, get_forward_backward_func)


def uninstall() -> None:
    """Put megatron-core's back."""
    _replace(get_forward_backward_func, _THEIRS)


def _replace(old: object, new: object) -> None:
    for name, module in list(sys.modules.items()):
        if name != __name__ and module.__dict__.get(_NAME) is old:
            setattr(module, _NAME, new)
