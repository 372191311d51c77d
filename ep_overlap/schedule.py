"""The public class: a training step under a schedule.

::

    schedule = OverlapSchedule(model, OverlapConfig(num_microbatches=4))
    result = schedule.step(microbatches, loss_fn)
    optimizer.step()

One token batch's way: ``step`` -> the plan (built once, reused) -> ``Program`` -> a node on its
stream, or a unit's life cycle -> group -> buffer -> collective.
"""

import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from ep_overlap.config import OverlapConfig
from ep_overlap.plan.action import HEAD_UNIT, ROOT_UNIT, Compute, Lane, Node, Phase
from ep_overlap.plan.build import build_plan, plan_from_words
from ep_overlap.plan.lower import Sharding, Strategy
from ep_overlap.plan.order import ModelShape, computes_of
from ep_overlap.plan.plan import Plan
from ep_overlap.plan.units import units_given, units_read
from ep_overlap.run.check_parts import check_model, check_parts, check_recomputed, check_replayed
from ep_overlap.run.joined import GatherOrder, JoinedUnit
from ep_overlap.run.layer import JoinedModules, ModelParts, modules_of
from ep_overlap.run.node import NodeRun, forget_failed_backward
from ep_overlap.run.recompute import wire_recomputed
from ep_overlap.run.runner import Program
from ep_overlap.run.slot import LossFn, MicrobatchSlot
from ep_overlap.run.trace import HiddenShare, Meter, StepTrace
from ep_overlap.run.wgrad import WgradRun
from ep_overlap.run.wiring import NodeKey, wire, wire_wgrad
from fsdp_hooks.caller_stream import CallerStream
from fsdp_hooks.lifecycle import (
    Driver,
    RootLifecycle,
    ShardedModule,
    UnitLifecycle,
    lifecycle_of,
)
from fsdp_hooks.streams import Stream, StreamKind, StreamObserver, default_kind, new_stream
from fsdp_hooks.wgrad import ManagedLayer, Wgrad
from fsdp_hooks.wgrad_layers import check_sink, manage_wgrad


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step returns."""

    losses: tuple[Tensor, ...]
    """What ``loss_fn`` returned for each microbatch, detached."""
    trace: StepTrace | None
    """When every action waited and ran, with ``OverlapConfig(trace=True)`` or a meter."""
    hidden_share: HiddenShare | None
    """What share of each kind of communication ran under compute; with a meter."""


@final
class OverlapSchedule:
    """Runs a model's microbatches under a plan.

    Args:
        model: a model that gives its parts (``models.reference.MoETransformer``,
            ``models.megatron.GPTParts``), sharded by ``fsdp_hooks`` or not.
        config: see ``OverlapConfig``.
        lifecycle: of another sharding core (``fsdp_hooks/adapters``); None: the model's own.
        meter: measures communication (``report.meter.LinkMeter``); collective, so all ranks have
            one or none.
        stream_kind: default: CUDA streams on CUDA, worker threads on CPU; ``INLINE`` for tests of
            order.

    Raises:
        ValueError: the model's parts, its sharding and the options do not go together.
    """

    def __init__(
        self,
        model: ModelParts[Any, Any],
        config: OverlapConfig,
        *,
        lifecycle: RootLifecycle | None = None,
        meter: Meter | None = None,
        stream_kind: StreamKind | None = None,
    ) -> None:
        self.config = config
        self._parts = model
        check_model(model)
        self._shape = ModelShape(layers=check_parts(model))
        if config.recompute_granularity is not None:
            check_recomputed(model)
        self._lifecycle: RootLifecycle = lifecycle or lifecycle_of(model.module)
        self._units = _named_units(model, self._lifecycle)
        device = _device_of(model.module)
        self._kind = stream_kind or default_kind(device)
        if (self._kind is StreamKind.CUDA) != (device.type == "cuda"):
            raise ValueError(
                f"{self._kind.value} streams cannot run a model on {device.type}; leave "
                "stream_kind out"
            )
        if model.replays_graphs:
            modules = model.module.modules()
            check_replayed(
                device_type=device.type,
                strategy=self._lifecycle.strategy,
                delays=config.delay_wgrad or config.dispatch_over_wgrad,
                fuses=any(m.fuses_wgrad for m in modules if isinstance(m, ManagedLayer)),
                recomputes=config.recompute_granularity is not None,
            )
        self._streams: Mapping[Lane, Stream] = {
            lane: new_stream(self._kind, lane, device=device) for lane in (Lane.COMP, Lane.COMM)
        }
        self._caller = CallerStream(device)
        self._slots = [
            MicrobatchSlot(index, model, config.num_microbatches if config.divide_loss else 1)
            for index in range(config.num_microbatches)
        ]
        self.plan: Final = self._build_plan(evaluate=False)
        if config.max_unsharded_units is not None and self.plan.max_unsharded_units is None:
            warnings.warn(
                "max_unsharded_units has no effect: only a model sharded with optim_grads_params "
                "gathers units; leave it out",
                stacklevel=2,
            )
        self._nodes: dict[NodeKey, NodeRun] = {}
        self._again: dict[NodeKey, NodeRun] = {}
        """Nodes of R and B, where layers are recomputed."""
        for slot in self._slots:
            if self.plan.recomputes:
                first, again = wire_recomputed(slot, model)
                self._nodes.update(first)
                self._again.update(again)
            else:
                self._nodes.update(wire(slot, model))
        check_sink(model.module, self._lifecycle.grad_sink)
        self._wgrad: Wgrad | None = None
        self._wgrads: dict[NodeKey, WgradRun] = {}
        if self.plan.delayed:
            self._wgrad = manage_wgrad(
                model.module, layer_types=model.wgrad_layers, sink=self._lifecycle.grad_sink
            )
            for slot in self._slots:
                delayed = self.plan.delayed
                self._wgrads.update(wire_wgrad(slot, model, delayed, self._with_backward))
        self._hook_readers()
        self._hook_last_givers()
        self._training = self._bind(self.plan)
        self._evaluation: Program | None = None
        self._meter = meter
        self._traced = config.trace or meter is not None
        self._is_running = False

    # ---- running ------------------------------------------------------------------------------

    def step(self, batches: Sequence[Any], loss_fn: LossFn) -> StepResult:
        """Forward and backward of all microbatches; gradients are in ``.grad`` afterwards.

        Args:
            batches: one for each microbatch.
            loss_fn: ``(output, batch) -> scalar``; divided by the number of microbatches.

        Raises:
            ValueError: another number of batches than the schedule was built for.
            RuntimeError: gradients are off, or delayed by somebody else; or the model is in the
                middle of a step already.
            BaseException: what an action raised, unchanged but for a note with the action's word.
                The schedule is clean again: the next step may run.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "step() under no_grad or inference_mode has no backward; call evaluate(), or leave "
                "the mode"
            )
        is_delayed = self._wgrad is not None and self._wgrad.queue is not None
        if is_delayed or self._lifecycle.postpones_end:
            raise RuntimeError(
                "step() within delayed_wgrad, which would take the schedule's weight gradients as "
                "its own; leave it first. OverlapConfig(delay_wgrad=True) delays a schedule's"
            )
        return self._run(self._training, batches, loss_fn)

    def evaluate(self, batches: Sequence[Any], loss_fn: LossFn) -> StepResult:
        """Forward of all microbatches, without gradients. Raises as ``step``."""
        if self._evaluation is None:
            self._evaluation = self._bind(self._build_plan(evaluate=True))
        with torch.no_grad():
            return self._run(self._evaluation, batches, loss_fn)

    def abort(self) -> None:
        """Drop the step under way: drain the streams, release all units, forget its gradients.

        A step that fails does so itself. Between steps there is nothing to drop.

        Raises:
            RuntimeError: a step is under way: raise from within it instead.
        """
        if self._is_running:
            raise RuntimeError(
                "abort() within a step of this schedule (in loss_fn, or in another thread), which "
                "would wait for itself; raise an exception there: the step is then dropped"
            )

    def _drop(self) -> None:
        """What ``abort`` says, for the step that has failed."""
        if not self._is_running:
            return
        try:
            for stream in self._streams.values():
                stream.synchronize()
                stream.reset()
                stream.run(forget_failed_backward, word="abort")
                stream.synchronize()
        finally:  # a device that has failed fails again when it is drained
            for node in (*self._nodes.values(), *self._again.values()):
                node.reset()
            for wgrad in self._wgrads.values():
                wgrad.queue.clear()
            if self._wgrad is not None:
                self._wgrad.delay_into(None)
            for slot in self._slots:
                slot.clear()
            self._is_running = False
            self._lifecycle.abort()

    def observe(self, observer: StreamObserver | None) -> None:
        """Let ``observer`` see all lanes from now on; a traced step puts its trace in its place."""
        for stream in self._streams.values():
            stream.observe(observer)
        self._lifecycle.observe(observer)

    def _run(self, program: Program, batches: Sequence[Any], loss_fn: LossFn) -> StepResult:
        if self._is_running:
            raise RuntimeError(
                "step() or evaluate() within a step of this schedule (in loss_fn, or in another "
                "thread), which would wait for itself; call it when the step has returned"
            )
        if len(batches) != len(self._slots):
            raise ValueError(
                f"got {len(batches)} microbatches, expected {len(self._slots)}: as many as "
                "OverlapConfig(num_microbatches=...) says"
            )
        trace = StepTrace() if self._traced else None
        if trace is not None:
            self.observe(trace)
        if self._meter is not None:
            self._meter.begin()
        handled = sys.exception()
        # Not inside: if another driver is at work, its step is not ours to abort.
        self._lifecycle.begin(Driver.SCHEDULE)
        try:
            self._is_running = True
            for slot, batch in zip(self._slots, batches, strict=True):
                slot.begin(batch, loss_fn)
            for stream in self._streams.values():
                # Nodes read batches and weights, which the caller's stream may still write.
                self._caller.hold(stream)
            program.run()
            # The caller reads losses and gradients; on CPU this also brings up any failure.
            for stream in self._streams.values():
                self._caller.wait_stream(stream)
            self._lifecycle.end()
            for stream in self._streams.values():
                # Protects what nodes of one lane read of another's, which is dropped now.
                self._caller.hold(stream)
            program.drop_rest()
        except BaseException as error:
            try:
                self._drop()
            except Exception as second:  # noqa: BLE001 (the first error is the one to tell)
                error.add_note(f"and when the step was dropped: {type(second).__name__}: {second}")
            _clear_frames(error, until=handled)
            raise
        self._is_running = False
        share = None
        if trace is not None:
            trace.finish()
            share = None if self._meter is None else self._meter.share(trace)
        return StepResult(
            losses=tuple(slot.take_loss() for slot in self._slots),
            trace=trace,
            hidden_share=share,
        )

    # ---- building -----------------------------------------------------------------------------

    def _build_plan(self, *, evaluate: bool) -> Plan:
        config = self.config
        sharding = None
        if self._lifecycle.strategy is not None:
            sharding = Sharding(
                strategy=Strategy(self._lifecycle.strategy),
                max_unsharded_units=config.max_unsharded_units,
                reduce_each_microbatch=self._lifecycle.reduces_each_microbatch,
                has_head=self._has_head,
            )
        draws_random = self._parts.draws_random
        recompute = config.recompute_granularity is not None
        if config.order_text is not None and not evaluate:
            plan = plan_from_words(
                config.order_text,
                shape=self._shape,
                num_microbatches=config.num_microbatches,
                sharding=sharding,
                delay_wgrad=config.delay_wgrad or config.dispatch_over_wgrad,
                recompute=recompute,
            )
        else:
            plan = build_plan(
                shape=self._shape,
                num_microbatches=config.num_microbatches,
                order=config.order_for(draws_random=draws_random),
                delay_wgrad=config.delay_wgrad,
                dispatch_over_wgrad=config.dispatch_over_wgrad,
                recompute=recompute,
                sharding=sharding,
                evaluate=evaluate,
            )
        if draws_random and not evaluate:
            _refuse_turns(plan)
        return plan

    def _bind(self, plan: Plan) -> Program:
        return Program(
            plan,
            streams=self._streams,
            nodes=self._nodes,
            again=self._again,
            wgrads=self._wgrads,
            units=self._units,
            runs_after_launch=self._kind is StreamKind.CUDA,
        )

    def _hook_readers(self) -> None:
        """Before each node that reads weights: whose gradients it makes, where it leaves them, and
        the safety net."""
        for key, node in (*self._nodes.items(), *self._again.items()):
            microbatch, kind, layer = key
            if kind is Node.FINISH:
                continue  # it reads no weights
            reader = Compute(microbatch, Phase.FORWARD, kind, layer)
            names = units_read(reader, has_head=self._has_head)
            if not names:
                continue
            belongs = partial(self._lifecycle.pre_backward, microbatch)
            if self._wgrad is not None:
                queue = self._wgrads[key].queue if key in self._wgrads else None
                node.pre_backward_hooks += (partial(self._wgrad.delay_into, queue),)
            if self._units:
                units = (self._units[name] for name in names)
                ensures = tuple(unit.ensure for unit in units if unit.releases)
                node.pre_forward_hooks += ensures
                node.pre_backward_hooks += (belongs, *ensures)
        for (microbatch, _, _), wgrad in self._wgrads.items():
            wgrad.pre_hooks += (partial(self._lifecycle.pre_backward, microbatch),)

    def _hook_last_givers(self) -> None:
        """After the last node of a microbatch that gives a unit gradients: ``seal``."""
        if not self._units:
            return
        last_giver: dict[tuple[str, int], Compute] = {}
        last_microbatch: dict[str, int] = {}
        for action in computes_of(self.plan.actions):
            for name in units_given(action, has_head=self._has_head):
                last_giver[name, action.microbatch] = action
                last_microbatch[name] = action.microbatch
        for (name, microbatch), action in last_giver.items():
            is_last = microbatch == last_microbatch[name]
            seal = partial(self._units[name].seal, microbatch, is_last=is_last)
            key = (microbatch, action.node, action.layer)
            if action.phase is Phase.WGRAD:
                self._wgrads[key].post_hooks += (seal,)
            else:
                self._with_backward(key).post_backward_hooks += (seal,)

    @property
    def _has_head(self) -> bool:
        return HEAD_UNIT in self._units

    def _with_backward(self, key: NodeKey) -> NodeRun:
        """The node whose backward the plan runs: that of R where layers are recomputed."""
        return self._again.get(key, self._nodes[key])


def _device_of(module: nn.Module) -> torch.device:
    """Where a model is.

    Raises:
        ValueError: it has no parameters.
    """
    parameter = next(module.parameters(), None)
    if parameter is None:
        raise ValueError(f"{type(module).__name__} has no parameters; expected a model to train")
    return parameter.device


def _refuse_turns(plan: Plan) -> None:
    """For a model that draws random numbers.

    Raises:
        ValueError: the plan's forwards are not one after the other, as on the standard path.
    """
    forwards = [a for a in computes_of(plan.actions) if a.phase is Phase.FORWARD]
    for before, after in pairwise(forwards):
        if before.microbatch > after.microbatch:
            raise ValueError(
                f"order {plan.order!r} cannot run a model that draws random numbers, such as "
                f"dropout's: {before} comes before {after}, and each would draw what is the "
                "other's. Use order='plain', the default for such a model, or turn dropout off"
            )


def _named_units(
    model: ModelParts[Any, Any], lifecycle: RootLifecycle
) -> Mapping[str, UnitLifecycle]:
    """The model's units by the plan's names.

    Raises:
        ValueError: the units are not one for each layer, and the root, and the head or not.
    """
    if lifecycle.root_unit is None:
        sharded = next((m for m in model.module.modules() if isinstance(m, ShardedModule)), None)
        if sharded is not None:
            raise ValueError(
                f"{type(sharded).__name__} is sharded and the whole model is not; call fully_shard "
                "on the model too, last"
            )
        return {}
    units: dict[str, list[UnitLifecycle]] = {ROOT_UNIT: [lifecycle.root_unit]}
    for index, layer in enumerate(model.layers):
        units[f"L{index}"] = [
            _unit_of(module, index, lifecycle) for module in modules_of(layer.module)
        ]
    head = None if model.head is None else lifecycle.unit_of(model.head)
    if head is not None and head is not lifecycle.root_unit:
        units[HEAD_UNIT] = [head]
    used = [unit for of_one in units.values() for unit in of_one]
    others = [unit.name for unit in lifecycle.inner_units if unit not in used]
    if others:
        raise ValueError(
            f"units {', '.join(others)} are neither layers nor the root, nor an output layer "
            "with weights of its own; a schedule needs one unit a layer: shard layers whole"
        )
    if any(isinstance(layer.module, JoinedModules) for layer in model.layers):
        order = GatherOrder(len(used))
        return {name: JoinedUnit(name, of_one, order) for name, of_one in units.items()}
    return {name: unit for name, (unit,) in units.items()}


def _unit_of(module: nn.Module, index: int, lifecycle: RootLifecycle) -> UnitLifecycle:
    unit = lifecycle.unit_of(module)
    if unit is None or unit is lifecycle.root_unit:
        raise ValueError(
            f"layer {index} ({type(module).__name__}) is not a unit of its own; call fully_shard "
            "on each layer (modules_of says of what modules it consists), then on the whole model"
        )
    return unit


def _clear_frames(error: BaseException | None, *, until: BaseException | None) -> None:
    """Let go of the locals of an exception's frames, and of those it came from: they own tensors,
    which would live as long as the exception. ``until``: one that the caller was handling."""
    seen: set[int] = set()
    while error is not None and error is not until and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
