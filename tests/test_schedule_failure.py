"""A step that fails: its error comes out as raised, nothing is left, the next step is right."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import schedule_support as support
import torch
from schedule_support import Case
from torch import Tensor

from ep_overlap.run.node import NodeState
from ep_overlap.schedule import OverlapSchedule
from ep_overlap.testing import RankPool
from fsdp_hooks.lifecycle import lifecycle_of
from fsdp_hooks.streams import StreamKind

KINDS = [StreamKind.INLINE, StreamKind.THREAD]
NODES = ["pre", "attn.L1", "dispatch.L0", "mlp.L0", "combine.L1", "post"]


class OddError(Exception):
    """Of a type and with arguments of its own, which must both survive."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Where a step fails, and what the error's note must say."""

    place: str
    """``F.attn.L1``, ``B.attn.L1``, ``UNSHARD``, ``loss_fn``, ``begin``."""
    note: str
    call: int = 1
    """At the first call of that place, or a later one."""
    interrupts: bool = False
    """Ctrl-C instead of an error."""


IN_NODES = [
    *(
        Fault(place=f"{phase}.{node}", note=f"raised in 1{phase}.{node}", call=2)
        for phase in "FB"
        for node in NODES
    ),
    Fault(place="F.mlp.L0", note="raised in 0F.mlp.L0", interrupts=True),
    Fault(place="B.attn.L1", note="raised in 0B.attn.L1", interrupts=True),
    Fault(place="loss_fn", note="raised in 2F.post", call=3),
    Fault(place="begin", note="raised in begin of microbatch 1", call=2),
]
IN_UNITS = [
    Fault(place="UNSHARD", note="raised in UNSHARD.L1", call=3),
    Fault(place="RESHARD", note="raised in RESHARD.L"),
    Fault(place="REDUCE", note="raised in REDUCE.L1"),
    Fault(place="REDUCE", note="raised in REDUCE.", call=5),
]


class Saboteur:
    """Raises once, where it is told to."""

    def __init__(self, parts: Any, loss_fn: Callable[..., Tensor]) -> None:
        self._fault: Fault | None = None
        self._error: BaseException | None = None
        self._num_calls = 0
        self._loss_fn = loss_fn
        support.tap(
            parts,
            lambda node, result: self._reached(f"F.{node}"),
            lambda node: self._reached(f"B.{node}"),
        )
        self._watch(parts, "begin", "begin")
        root = lifecycle_of(parts.module)
        for unit in [] if root.root_unit is None else [root.root_unit, *root.inner_units]:
            for group in unit.groups:
                if group.releases:  # one of each unit's two
                    self._watch(group.weights, "gather", "UNSHARD")
                    self._watch(group.weights, "release", "RESHARD")
                    self._watch(group.gradients, "reduce", "REDUCE")

    def arm(self, fault: Fault) -> BaseException:
        self._fault, self._num_calls = fault, 0
        self._error = KeyboardInterrupt() if fault.interrupts else OddError(7, fault.place)
        return self._error

    def loss_fn(self, output: Tensor, batch: Any) -> Tensor:
        self._reached("loss_fn")
        return self._loss_fn(output, batch)

    @property
    def has_struck(self) -> bool:
        return self._fault is None

    def _watch(self, owner: Any, method: str, place: str) -> None:
        function = getattr(owner, method)

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._reached(place)
            return function(*args, **kwargs)

        setattr(owner, method, watched)

    def _reached(self, place: str) -> None:
        if self._fault is None or place != self._fault.place:
            return
        self._num_calls += 1
        if self._num_calls == self._fault.call:
            error, self._fault, self._error = self._error, None, None
            assert error is not None
            raise error


def num_tensors() -> int:
    """Live tensors made since ``gc.freeze()``, without a run of the garbage collector."""
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def num_tensors_held(num_before: int) -> int:
    """A gloo thread drops the tensors of the last collective a moment after it is done."""
    deadline_s = time.monotonic() + 1.0
    while (num_held := num_tensors() - num_before) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return num_held


def problems(case: Case, places: Sequence[Fault]) -> list[str]:
    """Fail at each place in turn, on one schedule; say what was not as it should be."""
    parts = support.build(case)
    saboteur = Saboteur(parts, support.loss_of(case))
    schedule = OverlapSchedule(parts, replace(case.config, trace=False), stream_kind=case.kind)
    inputs = support.batches(parts, case, 0)

    def undisturbed() -> dict[str, Tensor]:
        parts.module.zero_grad()
        losses = schedule.step(inputs, saboteur.loss_fn).losses
        found = support.named(losses) | support.gradients(parts)
        parts.module.zero_grad()
        return found

    expected = undisturbed()
    found: list[str] = []
    gc.disable()
    gc.freeze()  # what is old is not looked through again and again
    try:
        for fault in places:
            wrong = failed_step(schedule, inputs, saboteur, fault)
            wrong += support.not_at_rest(parts)
            wrong += [
                f"{node.name} is {node.state}"
                for node in schedule._nodes.values()  # pyright: ignore[reportPrivateUsage]
                if node.state is not NodeState.IDLE
            ]
            wrong += [f"{name} afterwards" for name in support.unequal(undisturbed(), expected)]
            found += [f"{fault.place} {fault.call}: {what}" for what in wrong]
    finally:
        gc.unfreeze()
        gc.enable()
    return found


def failed_step(
    schedule: OverlapSchedule, inputs: Sequence[Any], saboteur: Saboteur, fault: Fault
) -> list[str]:
    num_before = num_tensors()
    error = saboteur.arm(fault)
    text = str(error)
    try:
        schedule.step(inputs, saboteur.loss_fn)
    except BaseException as caught:  # noqa: BLE001 (KeyboardInterrupt is one of them)
        kept = caught  # with its traceback, until the end of this function
    else:
        return ["the step did not fail"]
    wrong: list[str] = []
    if kept is not error or str(kept) != text:
        wrong.append(f"{kept!r} came out")
    if not any(note.startswith(fault.note) for note in kept.__notes__):
        wrong.append(f"the notes are {kept.__notes__}")
    if num_held := num_tensors_held(num_before):
        wrong.append(f"{num_held} tensors are still held")
    if not saboteur.has_struck:
        wrong.append("the fault is still to come")
    return wrong


SHARDED = Case(strategy="optim_grads_params", layers=2, microbatches=3, ep=2, order="paired")


def problems_of_sharded_ranks() -> list[str]:
    in_threads, inline = (replace(SHARDED, kind=kind) for kind in (KINDS[1], KINDS[0]))
    return problems(in_threads, [*IN_NODES, *IN_UNITS]) + problems(inline, IN_UNITS)


def test_sharded_ranks_that_fail_together_leave_nothing_and_go_on(ranks2: RankPool) -> None:
    assert ranks2.run(problems_of_sharded_ranks) == [[], []]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_sharding_that_fails_leaves_nothing(kind: StreamKind) -> None:
    assert problems(Case(layers=2, microbatches=3, order="plain", kind=kind), IN_NODES) == []


def test_the_error_says_the_action_and_nothing_else_is_added() -> None:
    case = Case(kind=StreamKind.THREAD)
    parts = support.build(case)
    saboteur = Saboteur(parts, support.loss_of(case))
    schedule = OverlapSchedule(parts, case.config)
    error = saboteur.arm(Fault(place="B.mlp.L1", note=""))
    with pytest.raises(OddError) as caught:
        schedule.step(support.batches(parts, case, 0), saboteur.loss_fn)
    assert caught.value is error
    assert caught.value.code == 7
    assert caught.value.args == (7, "B.mlp.L1")
    assert caught.value.__notes__ == ["raised in 0B.mlp.L1"]
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("kind", KINDS)
def test_abort_between_steps_changes_nothing(kind: StreamKind) -> None:
    case = Case(kind=kind)
    parts = support.build(case)
    schedule = OverlapSchedule(parts, case.config, stream_kind=kind)
    inputs, loss_fn = support.batches(parts, case, 0), support.loss_of(case)
    schedule.abort()
    schedule.step(inputs, loss_fn)
    before = support.gradients(parts)
    schedule.abort()
    schedule.abort()
    assert support.unequal(support.gradients(parts), before) == []
    parts.zero_grad()
    schedule.step(inputs, loss_fn)
    assert support.unequal(support.gradients(parts), before) == []


def test_a_loss_that_is_no_scalar_is_refused_with_its_shape() -> None:
    case = Case()
    parts = support.build(case)
    schedule = OverlapSchedule(parts, case.config)
    with pytest.raises(ValueError, match=r"shape \(8, 2, 256\), expected a scalar"):
        schedule.step(support.batches(parts, case, 0), lambda output, batch: output)


def wrong_while_the_standard_path_is_in_a_step() -> list[str]:
    """A schedule's step between a standard forward and its backward is refused; both go on."""
    case = Case(strategy="optim_grads_params")
    parts = support.build(case)
    loss_fn, inputs = support.loss_of(case), support.batches(parts, case, 0)
    schedule = OverlapSchedule(parts, case.config)
    schedule.step(inputs, loss_fn)
    expected = support.gradients(parts)
    parts.zero_grad()
    losses = [loss_fn(parts.whole(batch), batch) for batch in inputs]
    found: list[str] = []
    try:
        schedule.step(inputs, loss_fn)
        found.append("a step within a step")
    except RuntimeError as error:
        if "drives the step" not in str(error):
            found.append(str(error))
    torch.stack(losses).mean().backward()
    close = support.gradients(parts)
    found += [name for name in expected if not torch.allclose(close[name], expected[name])]
    parts.zero_grad()
    schedule.step(inputs, loss_fn)
    return found + support.unequal(support.gradients(parts), expected)


def test_a_step_within_another_drivers_step_is_refused_and_harms_neither(ranks2: RankPool) -> None:
    assert ranks2.run(wrong_while_the_standard_path_is_in_a_step) == [[], []]


@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_that_fails_in_inference_mode_leaves_training_as_it_was(
    kind: StreamKind,
) -> None:
    case = Case(kind=kind)
    parts = support.build(case)
    saboteur = Saboteur(parts, support.loss_of(case))
    schedule = OverlapSchedule(parts, case.config, stream_kind=kind)
    inputs = support.batches(parts, case, 0)
    schedule.step(inputs, saboteur.loss_fn)
    expected = support.gradients(parts)
    saboteur.arm(Fault(place="F.combine.L1", note="", call=2))
    with torch.inference_mode(), pytest.raises(OddError) as caught:
        schedule.evaluate(inputs, saboteur.loss_fn)
    assert caught.value.__notes__ == ["raised in 1F.combine.L1"]
    parts.zero_grad()
    schedule.step(inputs, saboteur.loss_fn)
    assert support.unequal(support.gradients(parts), expected) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", ["step", "evaluate", "abort"])
def test_a_schedule_called_from_its_own_loss_says_so_and_does_not_hang(
    call: str, kind: StreamKind
) -> None:
    case = Case(kind=kind)
    parts = support.build(case)
    schedule = OverlapSchedule(parts, case.config, stream_kind=kind)
    inputs, loss_fn = support.batches(parts, case, 0), support.loss_of(case)

    def calls_it(output: Tensor, batch: Any) -> Tensor:
        schedule.abort() if call == "abort" else getattr(schedule, call)(inputs, loss_fn)
        return loss_fn(output, batch)

    with pytest.raises(RuntimeError, match=r"within a step of this schedule"):
        schedule.step(inputs, calls_it)
    assert len(schedule.step(inputs, loss_fn).losses) == len(inputs)
