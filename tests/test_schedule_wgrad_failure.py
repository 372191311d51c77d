"""A W node, or a backward beside W nodes, that fails: its error comes out as raised, no weight
gradient waits, the next step is right."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import schedule_support as support
from schedule_support import Case, unequal
from test_schedule_failure import Fault, OddError, problems
from test_schedule_wgrad import INLINE, RELEASED, THREAD, results
from torch import Tensor, nn

from ep_overlap.plan.action import Compute, Phase
from ep_overlap.plan.order import computes_of
from ep_overlap.schedule import OverlapSchedule
from ep_overlap.testing import RankPool
from fsdp_hooks.streams import StreamKind
from fsdp_hooks.wgrad import Destination


class Trap:
    """A ``GradSink`` that fails once: at a W node's first gradient, or amid its gradients."""

    def __init__(self, schedule: OverlapSchedule) -> None:
        self._armed: tuple[str, int] | None = None
        self._word, self._num = "", 0
        for (microbatch, node, layer), run in schedule._wgrads.items():
            word = str(Compute(microbatch, Phase.WGRAD, node, layer))
            run.pre_hooks += (partial(self._enter, word),)
            run.post_hooks += (partial(self._enter, ""),)
        wgrad = schedule._wgrad
        assert wgrad is not None
        self._sink, wgrad.sink = wgrad.sink, self

    def arm(self, word: str, num: int) -> None:
        self._armed = (word, num)
        self._enter("")

    def _enter(self, word: str) -> None:
        self._word, self._num = word, 0

    def _count(self) -> None:
        self._num += 1
        if (self._word, self._num) == self._armed:
            self._armed = None
            raise OddError(3, self._word)

    def add(self, weight: nn.Parameter, grad: Tensor) -> None:
        self._count()
        self._sink.add(weight, grad)

    def destination(self, weight: nn.Parameter) -> Destination:
        self._count()
        return self._sink.destination(weight)


def wrong_after_failed_wgrads(case: Case) -> list[str]:
    parts, loss_fn, found = support.build(case), support.loss_of(case), list[str]()
    schedule = OverlapSchedule(parts, replace(case.config, trace=False), stream_kind=case.kind)
    trap = Trap(schedule)
    wgrad = schedule._wgrad
    assert wgrad is not None

    def undisturbed() -> dict[str, Tensor]:
        return results(parts, lambda inputs: schedule.step(inputs, loss_fn).losses, case)

    expected = undisturbed()
    words = [str(node) for node in computes_of(schedule.plan.actions) if node.phase is Phase.WGRAD]
    for word, num in [*product(words, (1, 2))]:
        parts.module.zero_grad()
        trap.arm(word, num)
        try:
            schedule.step(support.batches(parts, case, 0), loss_fn)
        except OddError as error:
            if error.args != (3, word) or error.__notes__ != [f"raised in {word}"]:
                found.append(f"{word} {num}: {error.args}, {error.__notes__}")
        else:
            found.append(f"{word} {num}: it did not fail")
        if wgrad.queue is not None or any(len(w.queue) for w in schedule._wgrads.values()):
            found.append(f"{word} {num}: something waits")
        found += [f"{word} {num}: {what}" for what in support.not_at_rest(parts)]
        found += [f"{word} {num}: then {what}" for what in unequal(undisturbed(), expected)]
    return found


def wrong_of_sharded_ranks(fuse: bool) -> list[str]:
    case = Case(strategy=RELEASED, layers=2, microbatches=2, ep=2, delay=True, fuse=fuse)
    return wrong_after_failed_wgrads(case) + problems(case, IN_BACKWARD)


IN_BACKWARD = [
    Fault(place=f"B.{node}", note=f"raised in 1B.{node}", call=2)
    for node in ("post", "mlp.L1", "attn.L1", "dispatch.L0", "mlp.L0", "attn.L0", "pre")
]


@pytest.mark.parametrize("fuse", [False, True])
def test_sharded_ranks_whose_wgrads_or_backwards_fail_leave_nothing(
    ranks2: RankPool, fuse: bool
) -> None:
    assert ranks2.run(wrong_of_sharded_ranks, fuse) == [[], []]


@pytest.mark.parametrize("kind", [INLINE, THREAD])
def test_a_wgrad_that_fails_without_sharding_leaves_nothing(kind: StreamKind) -> None:
    case = Case(layers=2, microbatches=2, order="plain", delay=True, kind=kind)
    assert wrong_after_failed_wgrads(case) == []
    assert problems(case, IN_BACKWARD) == []
