"""In place of megatron-core's ``get_forward_backward_func``: an unchanged script, overlapped.

::

    forward_step_func(data_iterator, model)   for every microbatch, before the first node runs
        -> (its output, loss_func)            (``megatron_call.py``)
    pre ... post of each microbatch           nodes of a schedule; the output is post's
        -> forward_step_calc_loss             megatron-core's own: loss_func, all scaling
    finalize_model_grads_func                 megatron-core's own

A forward without backward, and a config without the flag, go to megatron-core's own function; what
is not supported is refused by name.
"""

import copy
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final, Literal, TypedDict, Unpack, cast, final

import torch
from torch import Tensor, nn

from ep_overlap.config import OverlapConfig
from ep_overlap.models.megatron_build import MegatronModel
from ep_overlap.models.megatron_call import CalledBatch, ForwardStepFunc, note_call
from ep_overlap.models.megatron_globals import INSTALL_HINT
from ep_overlap.models.megatron_hybrid import HybridParts
from ep_overlap.models.megatron_parts import GPTParts
from ep_overlap.plan.order import OrderName
from ep_overlap.run.layer import modules_of
from ep_overlap.schedule import OverlapSchedule
from fsdp_hooks.lifecycle import RootLifecycle, ShardedModule, lifecycle_of

try:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, FullyShardedDataParallel
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.process_groups_config import (
        MultiModuleProcessGroupCollection,
        ProcessGroupCollection,
    )
    from megatron.core.transformer.module import Float16Module, float16_to_fp32
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.utils import get_model_config
except ImportError as error:
    raise ImportError(INSTALL_HINT) from error


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
    _refuse_stages(pp_size, vp_size, schedule_pg_collection)
    return ForwardBackward()


def _refuse_stages(
    pp_size: int | None, vp_size: int | None, schedule_pg_collection: object | None
) -> None:
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
                f"{name}={size}, expected 1: pipeline stages are not built yet; take megatron-"
                "core's own get_forward_backward_func"
            )


LifecycleOf = Callable[[nn.Module, Sequence[nn.Module]], RootLifecycle | None]
"""The life cycle of a model as the script has wrapped it, given its layers' modules, each a unit;
None: unsharded."""


@final
class ForwardBackward:
    """A step of a model, as megatron-core's ``forward_backward_no_pipelining``.

    Args:
        order: see ``OverlapConfig``.
        max_unsharded_units: see ``OverlapConfig``.
        recompute_granularity: see ``OverlapConfig``; megatron-core's own config takes no ``"full"``
            beside its overlap flag.
        cuda_graphs: whether attention is replayed from CUDA graphs: see ``GPTParts``.
        lifecycle_of: for a sharding core of one's own.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        *,
        order: OrderName | str | None = None,
        max_unsharded_units: int | None = None,
        recompute_granularity: Literal["full"] | None = None,
        cuda_graphs: bool = False,
        lifecycle_of: LifecycleOf | None = None,
    ) -> None:
        if type(cuda_graphs) is not bool:
            raise ValueError(f"cuda_graphs is {cuda_graphs!r}, expected True or False")
        OverlapConfig(  # refuses here what it would refuse at the first step
            num_microbatches=1,
            order=order,
            max_unsharded_units=max_unsharded_units,
            recompute_granularity=recompute_granularity,
        )
        self._order = order
        self._max_unsharded_units = max_unsharded_units
        self._recompute_granularity: Literal["full"] | None = recompute_granularity
        self._cuda_graphs = cuda_graphs
        self._lifecycle_of = lifecycle_of or _lifecycle_of
        self._built: dict[nn.Module, _Built] = {}

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

        Sequence lengths, ``micro_batch_size`` and ``p2p_communicator`` matter to pipeline stages
        alone, here as there.

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
        if pg_collection is None:
            pg_collection = schedules._build_default_pg_collection()  # pyright: ignore[reportPrivateUsage]
        step = _Step(
            model=self._of(whole),
            config=config,
            num_microbatches=num_microbatches,
            context_parallel_size=pg_collection.cp.size(),
        )
        with _timed(config):
            core = _core_of(whole)
            core.set_is_first_microbatch()
            batches = [
                note_call(forward_step_func, iterator, whole, core) for _ in range(num_microbatches)
            ]
            self._schedule(step).step(batches, step.loss)
            if config.finalize_model_grads_func is not None:
                config.finalize_model_grads_func(
                    [whole],
                    step.total_num_tokens() if config.calculate_per_token_loss else None,
                    pg_collection=pg_collection,
                    force_all_reduce=force_all_reduce,
                )
        return step.logged

    def _of(self, model: nn.Module) -> "_Built":
        if model not in self._built:
            core = _core_of(model)
            graphs = self._cuda_graphs
            parts = (
                GPTParts(core, cuda_graphs=graphs)
                if isinstance(core, GPTModel)
                else HybridParts(core, cuda_graphs=graphs)
            )
            _warn_of_hints(core.config)
            layers = [module for layer in parts.layers for module in modules_of(layer.module)]
            self._built[model] = _Built(
                model=model, parts=parts, lifecycle=self._lifecycle_of(model, layers)
            )
        return self._built[model]

    def _schedule(self, step: "_Step") -> OverlapSchedule:
        """Built once for each number of microbatches, which may grow in training."""
        model, config = step.model, step.config
        if config.no_sync_func is not None and model.lifecycle is None:
            raise ValueError(
                "no_sync_func is set, and the model is in no wrapper whose reductions the schedule "
                "knows; leave it out, or hand the wrapper's life cycle to ForwardBackward"
            )
        key = (step.num_microbatches, config.delay_wgrad_compute)
        if key not in model.schedules:
            model.schedules[key] = OverlapSchedule(
                model.parts,
                OverlapConfig(
                    num_microbatches=step.num_microbatches,
                    order=self._order,
                    delay_wgrad=config.delay_wgrad_compute,
                    max_unsharded_units=self._max_unsharded_units,
                    recompute_granularity=self._recompute_granularity,
                    divide_loss=False,
                ),
                lifecycle=model.lifecycle,
            )
        return model.schedules[key]


@dataclass(frozen=True, kw_only=True)
class _Built:
    """What is made of a model once."""

    model: nn.Module
    parts: GPTParts | HybridParts
    lifecycle: RootLifecycle | None
    schedules: dict[tuple[int, bool], OverlapSchedule] = field(
        default_factory=dict[tuple[int, bool], OverlapSchedule]
    )


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One step's settings, and what its losses leave besides gradients."""

    model: _Built
    config: TransformerConfig
    num_microbatches: int
    context_parallel_size: int
    logged: list[Any] = field(default_factory=list[Any])
    """megatron-core's ``forward_data_store``: what ``loss_func`` returned to be logged."""
    num_tokens: list[Tensor] = field(default_factory=list[Tensor])

    def loss(self, output: Tensor, batch: CalledBatch) -> Tensor:
        """megatron-core's loss of a microbatch, scaled for its backward."""
        model, config = self.model.model, self.config
        if any(isinstance(each, Float16Module) for each in _chain(model)):
            output = cast(Tensor, float16_to_fp32(output))
        if config.timers is not None:
            # It would stop the timer of a forward, and microbatches' forwards are not apart.
            config = copy.copy(config)
            config.timers = None
        loss, num_tokens = schedules.forward_step_calc_loss(
            model,
            output,
            batch.loss_func,
            config,
            None,
            False,
            self.num_microbatches,
            self.logged,
            self.context_parallel_size,
            True,
        )
        self.num_tokens.append(num_tokens)
        return loss if config.grad_scale_func is None else config.grad_scale_func(loss)

    def total_num_tokens(self) -> Tensor:
        """Of all microbatches, where the model is: int32, a scalar."""
        device = next(self.model.model.parameters()).device
        total = torch.zeros([], dtype=torch.int, device=device)
        for num_tokens in self.num_tokens:
            total += num_tokens
        return total


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
                f"{name} is set, and the overlapped step does not support it; leave it out, or "
                "turn overlap_moe_expert_parallel_comm off"
            )


def _warn_of_hints(config: TransformerConfig) -> None:
    for name, value in (
        ("high_priority_a2a_comm_stream", config.high_priority_a2a_comm_stream),
        ("ep_overlap_early_attn_memory_release", config.ep_overlap_early_attn_memory_release),
    ):
        if value:
            warnings.warn(
                f"{name} has no effect: it is a hint for megatron-core's own overlapped schedule",
                stacklevel=4,
            )


@contextmanager
def _timed(config: TransformerConfig) -> Generator[None]:
    if config.timers is None:
        yield
        return
    timer = config.timers("forward-backward", log_level=1)
    timer.start(barrier=config.barrier_with_L1_time)
    try:
        yield
    except BaseException:
        timer.reset()  # a step that failed may be run again
        raise
    timer.stop()


# ---- what a script wraps its model in ------------------------------------------------------------


def _chain(model: nn.Module) -> Iterator[nn.Module]:
    """The model's wrappers from outside in, and the GPTModel or HybridModel.

    Raises:
        ValueError: there is none.
    """
    yield model
    while not isinstance(model, MegatronModel):
        held = model._modules.get("module")  # pyright: ignore[reportPrivateUsage]
        if held is None:
            raise ValueError(
                f"{type(model).__name__} holds no GPTModel and no HybridModel; expected one, or "
                "one in wrappers that hold it as .module"
            )
        model = held
        yield model


def _core_of(model: nn.Module) -> MegatronModel:
    *_, core = _chain(model)
    return cast(MegatronModel, core)


def _lifecycle_of(model: nn.Module, layers: Sequence[nn.Module]) -> RootLifecycle | None:
    """Of the sharding core that a model is wrapped in; None: it is in none.

    Raises:
        ValueError: a wrapper that would miss the gradients of a step that does not call it.
    """
    for each in _chain(model):
        if isinstance(each, ShardedModule):
            return lifecycle_of(each)
        if isinstance(each, DistributedDataParallel):
            from fsdp_hooks.adapters.megatron_ddp import MegatronDdp

            return MegatronDdp(each, layers)
        if isinstance(each, FullyShardedDataParallel):
            from fsdp_hooks.adapters.megatron_fsdp import MegatronFsdp

            return MegatronFsdp(each, layers)
        if not isinstance(each, Float16Module | MegatronModel):
            raise ValueError(
                f"the model is wrapped in {type(each).__name__}, which the overlapped step does "
                "not call; expected megatron-core's DistributedDataParallel, "
                "FullyShardedDataParallel or Float16Module, or fsdp_hooks.fully_shard"
            )
    return None


# ---- in a running script -------------------------------------------------------------------------


_THEIRS: Final = schedules.get_forward_backward_func


class Options(TypedDict, total=False):
    """``ForwardBackward``'s."""

    order: OrderName | str | None
    max_unsharded_units: int | None
    recompute_granularity: Literal["full"] | None
    cuda_graphs: bool
    lifecycle_of: LifecycleOf | None


@final
class _Installed:
    """Ours, told from one that a script has imported itself, which stays."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def __call__(
        self,
        pp_size: int | None = None,
        vp_size: int | None = None,
        schedule_pg_collection: object | None = None,
    ) -> ForwardBackward:
        _refuse_stages(pp_size, vp_size, schedule_pg_collection)
        return ForwardBackward(**self._options)


def install(**options: Unpack[Options]) -> None:
    """Put our ``get_forward_backward_func`` wherever megatron-core's has been imported so far, and
    where it will be imported from. What a script has got from megatron-core's before stays.

    Args:
        options: ``ForwardBackward``'s.

    Raises:
        TypeError: an option is unknown.
        ValueError: an option is out of range. Nothing is replaced in either case.
    """
    ForwardBackward(**options)
    _replace(lambda value: value is _THEIRS or type(value) is _Installed, _Installed(options))


def uninstall() -> None:
    """Put megatron-core's back."""
    _replace(lambda value: type(value) is _Installed, _THEIRS)


def _replace(is_old: Callable[[object], bool], new: object) -> None:
    """In all modules but this one, under whatever name."""
    for module in list(sys.modules.values()):
        # Not all that scripts put there are modules.
        if not isinstance(module, ModuleType) or module.__name__ == __name__:  # pyright: ignore[reportUnnecessaryIsInstance]
            continue
        for name, value in list(vars(module).items()):
            if is_old(value):
                setattr(module, name, new)
