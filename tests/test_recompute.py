"""Layers recomputed whole: their nodes in a plan, what is kept, and that no bit changes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import megatron_features as features
import pytest
import schedule_support as support
import torch
from plan_shapes import shape, zero3
from schedule_support import Case, Groups
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ep_overlap.config import OverlapConfig
from ep_overlap.plan.action import Action, Compute, Phase, Sync, parse_action
from ep_overlap.plan.build import build_plan, parse_words, plan_from_words
from ep_overlap.plan.check import PlanError, check
from ep_overlap.plan.edges import waits
from ep_overlap.plan.order import OrderName, computes_of
from ep_overlap.plan.plan import Plan
from ep_overlap.run.node import HandOff
from ep_overlap.schedule import OverlapSchedule
from ep_overlap.testing import RankPool
from fsdp_hooks.streams import Span, StreamKind

BF16 = torch.bfloat16
ZERO3 = "optim_grads_params"


# ---- the plan ------------------------------------------------------------------------------------


def plan_of(order: OrderName = OrderName.SERIAL, **changed: Any) -> Plan:
    chosen = {"shape": shape("md"), "num_microbatches": 1, "recompute": True} | changed
    return build_plan(order=order, **chosen)


def test_each_layer_is_run_again_right_before_its_backward() -> None:
    assert [str(action) for action in plan_of().actions] == [
        *("0F.pre", "0F.attn.L0", "0SYNC.L0", "0F.dispatch.L0", "0F.mlp.L0", "0F.combine.L0"),
        *("0F.attn.L1", "0F.mlp.L1", "0F.post", "0B.post"),
        *("0R.attn.L1", "0R.mlp.L1", "0B.mlp.L1", "0B.attn.L1"),
        *("0R.attn.L0", "0RSYNC.L0", "0R.dispatch.L0", "0R.mlp.L0", "0R.combine.L0"),
        *("0R.finish.L0", "0B.finish.L0", "0B.combine.L0", "0B.mlp.L0", "0B.dispatch.L0"),
        *("0B.attn.L0", "0B.pre"),
    ]


def test_beside_another_microbatch_its_exchanges_have_compute_beside_them() -> None:
    plan = plan_of(OrderName.PLAIN, shape=shape("m"), num_microbatches=2)
    words = [str(node) for node in computes_of(plan.actions)]
    start = words.index("0R.attn.L0")
    assert words[start : words.index("1B.post") + 1] == [
        *("0R.attn.L0", "1F.attn.L0", "0R.dispatch.L0", "0R.mlp.L0", "1F.dispatch.L0"),
        *("0R.combine.L0", "1F.mlp.L0", "0R.finish.L0", "0B.finish.L0", "0B.combine.L0"),
        *("1F.combine.L0", "0B.mlp.L0", "0B.dispatch.L0", "0B.attn.L0", "0B.pre", "1F.post"),
        "1B.post",
    ]


@pytest.mark.parametrize("order", OrderName)
def test_a_plan_is_read_back_from_its_text_and_from_its_order(order: OrderName) -> None:
    sizes: dict[str, Any] = {"shape": shape("mdm"), "num_microbatches": 3, "sharding": zero3()}
    plan = plan_of(order, delay_wgrad=True, **sizes)
    assert plan.recomputes
    assert "recomputed" in plan.title
    assert parse_words(plan.text()) == list(plan.actions)
    again = plan_from_words(plan.order_text(), delay_wgrad=True, recompute=True, **sizes)
    assert again.actions == plan.actions


@pytest.mark.parametrize("order", OrderName)
def test_a_unit_stays_gathered_from_its_recompute_to_its_backward(order: OrderName) -> None:
    sizes: dict[str, Any] = {"shape": shape("mmmm"), "num_microbatches": 3, "sharding": zero3()}
    gathers = plan_of(order, **sizes).num_gathers
    assert gathers == build_plan(order=order, **sizes).num_gathers


def test_an_evaluation_recomputes_nothing() -> None:
    assert not plan_of(evaluate=True).recomputes


def at(actions: list[Action], word: str) -> int:
    return actions.index(parse_action(word))


def move(word: str, before: str) -> Callable[[list[Action]], None]:
    def damage(actions: list[Action]) -> None:
        action = actions.pop(at(actions, word))
        actions.insert(at(actions, before), action)

    return damage


def ungathered(actions: list[Action]) -> None:
    """L0 was gathered for its forward, then released."""
    gathers = [i for i, action in enumerate(actions) if str(action) == "UNSHARD.L0"]
    assert len(gathers) == 2
    actions.pop(gathers[1])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda a: a.pop(at(a, "0R.mlp.L0")), "0R.mlp.L0 is missing"),
        (lambda a: a.append(parse_action("0R.mlp.L1")), "0R.mlp.L1 is issued twice"),
        (lambda a: a.pop(at(a, "0RSYNC.L0")), "0R.dispatch.L0 has no 0RSYNC.L0 before it"),
        (move("0R.attn.L1", "0F.post"), "0R.attn.L1 is issued before 0F.post, which it needs"),
        (move("0B.mlp.L1", "0R.mlp.L1"), "0B.mlp.L1 is issued before 0R.mlp.L1, which it needs"),
        (move("0B.finish.L0", "0R.finish.L0"), "0B.finish.L0 is issued before 0R.finish.L0"),
        (ungathered, "0R.attn.L0 reads unit L0, which is not gathered; released"),
    ],
)
def test_the_checker_finds_what_is_wrong(
    damage: Callable[[list[Action]], object], message: str
) -> None:
    plan = plan_of(sharding=zero3(1))
    actions = list(plan.actions)
    damage(actions)
    with pytest.raises(PlanError, match=message):
        check(replace(plan, actions=tuple(actions), waits=waits(actions)))


@pytest.mark.parametrize("word", ["0F.finish.L0", "0W.finish.L0", "0R.pre", "0R.post"])
def test_words_of_no_node_are_refused(word: str) -> None:
    with pytest.raises(ValueError, match=r"phases R and B alone|is not recomputed"):
        parse_action(word)


def test_words_parse_back() -> None:
    assert parse_action("2RSYNC.L3") == Sync(2, 3, Phase.RECOMPUTE)
    assert str(Sync(2, 3, Phase.RECOMPUTE)) == "2RSYNC.L3"
    assert str(parse_action("0B.finish.L1")) == "0B.finish.L1"


@pytest.mark.parametrize("recompute", [False, True])
def test_an_order_of_ones_own_must_say_what_the_options_say(recompute: bool) -> None:
    text = plan_of(recompute=not recompute).order_text()
    with pytest.raises(ValueError, match=r"R nodes, such as 0R\.attn\.L0"):
        plan_from_words(text, shape=shape("md"), num_microbatches=1, recompute=recompute)


def test_selective_recompute_is_no_schedules() -> None:
    with pytest.raises(ValueError, match="recompute_granularity 'selective' is no schedule's"):
        OverlapConfig(num_microbatches=1, recompute_granularity="selective")  # pyright: ignore[reportArgumentType]


# ---- no bit changes ------------------------------------------------------------------------------


ON_TWO_RANKS = [
    Case(recompute=True, order="serial", microbatches=1, layers=3, ep=2),
    Case(recompute=True, order="plain", microbatches=3, layers=3, freq=2, ep=2, delay=True),
    Case(recompute=True, order="paired", microbatches=4, layers=3, ep=2, strategy=ZERO3),
    Case(recompute=True, order="plain", microbatches=2, layers=3, ep=2, strategy=ZERO3, budget=2),
    Case(recompute=True, order="paired", layers=3, freq=2, ep=2, strategy="no_shard", fuse=True),
    Case(recompute=True, order="serial", layers=3, strategy="optim_grads", delay=True, tied=True),
]


def different() -> dict[str, list[str]]:
    groups = Groups()
    found = {str(case): support.differences(case, groups=groups) for case in ON_TWO_RANKS}
    return {case: names for case, names in found.items() if names}


def test_the_reference_model_steps_as_on_its_standard_path(ranks2: RankPool) -> None:
    assert ranks2.run(different) == [{}, {}]


MEGATRON = [
    features.Case(feature=feature, recompute=True, microbatches=n, order=o, dtype=dtype, delay=d)
    for feature, n, o, dtype, d in (
        ("plain", 2, "paired", torch.float32, False),
        ("dropout", 4, "plain", torch.float32, True),
        ("router noise", 2, "serial", BF16, False),
        ("all router losses", 4, "paired", BF16, True),
        ("expert bias", 2, "paired", torch.float32, False),
        ("dense first", 4, "paired", BF16, True),
        ("no experts", 2, "paired", BF16, True),
        ("tensor parallel", 2, "plain", BF16, False),
        ("recompute, dropout", 2, "plain", torch.float32, False),
        ("all at once", 2, "plain", torch.float32, False),
        ("hybrid, MTP 2, tied", 4, "paired", torch.float32, True),
        ("hybrid, recompute, dropout", 2, "plain", BF16, False),
        ("hybrid, all alone, MTP 1", 2, "paired", torch.float32, True),
    )
]


def test_megatrons_model_steps_as_megatron_without_recompute(ranks2: RankPool) -> None:
    """With dropout, too: it draws again what it drew."""
    assert ranks2.run(features.every_difference, MEGATRON) == [{}, {}]


def test_a_sharded_megatron_model_steps_as_on_its_standard_path(ranks2: RankPool) -> None:
    case = features.Case(
        feature="all at once",
        recompute=True,
        microbatches=3,
        order="plain",
        strategy=ZERO3,
        delay=True,
        fuse=True,
    )
    assert ranks2.run(features.every_difference_sharded, [case]) == [{}, {}]


def without_the_states() -> list[str]:
    from ep_overlap.models.megatron_parts import MegatronRandomStates

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MegatronRandomStates, "set", lambda self, states: None)
        case = features.Case(feature="dropout", recompute=True, order="plain")
        (found,) = features.every_difference([case]).values()
    return found


def test_dropout_needs_the_states_of_its_generators(ranks2: RankPool) -> None:
    for names in ranks2.run(without_the_states):
        assert "gradient of decoder.layers.0.self_attention.linear_qkv.weight" in names


def forced_routing() -> dict[str, list[str]]:
    """Routes by random scores, which a recompute has to draw again."""
    case = features.Case(feature="forced", recompute=True, order="plain", microbatches=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(features.FEATURES, case.feature, {"force_load_balancing": True})  # pyright: ignore[reportArgumentType]
        return features.every_difference([case])


def test_random_routing_is_drawn_again(ranks2: RankPool) -> None:
    """It is for measuring, and no reason to refuse an order."""
    assert ranks2.run(forced_routing) == [{}, {}]


# ---- what is kept --------------------------------------------------------------------------------


class Watch:
    """A ``StreamObserver``: what a step saves for backward, by node; and what hand-offs hold when
    the node ``at`` is issued."""

    def __init__(self, schedule: OverlapSchedule, at: str) -> None:
        self._schedule = schedule
        self._at = at
        self._word = ""
        self.saved: dict[str, int] = {}
        self.held: int | None = None

    def on_issue(self, lane: str, word: str) -> None:
        self._word = word
        if word == self._at:
            self.held = held(self._schedule)

    def on_span(self, span: Span) -> None: ...

    def pack(self, tensor: Tensor) -> Tensor:
        self.saved[self._word] = self.saved.get(self._word, 0) + 1
        return tensor


def held(schedule: OverlapSchedule) -> int:
    """The bytes that hand-offs keep alive."""
    storages: dict[int, int] = {}
    for run in (*schedule._nodes.values(), *schedule._again.values()):
        for handoff in (*run._inlets, *run._outlets):
            if isinstance(handoff, HandOff):
                for tensor in support.tensors_in((*handoff._sent, *handoff._received)):
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def what_is_kept() -> tuple[int | None, list[str], list[str]]:
    """Bytes in hand-offs at the first R; the words of nodes of layers that save for backward."""
    case = Case(
        recompute=True, order="serial", microbatches=1, layers=3, ep=2, kind=StreamKind.INLINE
    )
    parts = support.build(case)
    config = replace(case.config, trace=False)
    schedule = OverlapSchedule(parts, config, stream_kind=case.kind)
    watch = Watch(schedule, at="0R.attn.L2")
    schedule.observe(watch)
    with saved_tensors_hooks(watch.pack, lambda tensor: tensor):
        schedule.step(support.batches(parts, case, 0), support.loss_of(case))
    assert held(schedule) == 0
    saving = [a for a in map(parse_action, watch.saved) if isinstance(a, Compute)]
    first = [str(a) for a in saving if a.layer is not None and a.phase is Phase.FORWARD]
    again = [str(a) for a in saving if a.layer == 0 and a.phase is Phase.RECOMPUTE]
    return watch.held, first, again


def test_between_its_two_forwards_a_layer_keeps_its_input_alone(ranks2: RankPool) -> None:
    for kept, first, again in ranks2.run(what_is_kept):
        hidden = support.SEQ_LENGTH * support.BATCH_SIZE * 16 * 4  # bytes
        assert kept == 4 * hidden  # of three layers and of post
        assert first == []
        assert again[0] == "0R.attn.L0"


def failing_in_r() -> tuple[str, int, list[str]]:
    """The error of a recompute that fails; what is held then; what the next step does wrong."""
    case = Case(recompute=True, order="plain", microbatches=2, layers=2, strategy=ZERO3)
    ours, theirs = support.build(case), support.build(case)
    schedule = OverlapSchedule(ours, case.config)
    inputs, loss_fn = support.batches(ours, case, 0), support.loss_of(case)

    def fail(*args: Any) -> None:
        if torch.is_grad_enabled():
            raise OSError("no luck")

    hook = ours.layers[1].attention.register_forward_pre_hook(fail)
    try:
        schedule.step(inputs, loss_fn)
    except OSError as error:
        notes = " ".join(getattr(error, "__notes__", []))
    hook.remove()
    left = held(schedule)
    support.sgd(ours).zero_grad()
    schedule.step(inputs, loss_fn)
    support.standard_step(theirs, inputs, loss_fn)
    wrong = support.unequal(support.gradients(ours), support.gradients(theirs))
    return notes, left, wrong + support.not_at_rest(ours)


def test_a_recompute_that_fails_leaves_nothing_behind(ranks2: RankPool) -> None:
    for notes, left, wrong in ranks2.run(failing_in_r):
        assert "0R.attn.L1" in notes
        assert (left, wrong) == (0, [])


# ---- what is refused -----------------------------------------------------------------------------


def refusals_of_weights_in_finish() -> list[str]:
    inline = StreamKind.INLINE
    case = Case(recompute=True, order="paired", layers=2, microbatches=2, ep=2, kind=inline)
    messages: list[str] = []
    for each in (case, replace(case, strategy=ZERO3)):
        parts = support.build(each)
        layer = parts.layers[0]
        layer.finish = lambda *given, layer=layer, finish=layer.finish: layer.mlp_norm(
            finish(*given)
        )
        schedule = OverlapSchedule(parts, each.config, stream_kind=inline)
        try:
            schedule.step(support.batches(parts, each, 0), support.loss_of(each))
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_weights_in_finish_are_refused_where_it_is_a_node_of_its_own(ranks2: RankPool) -> None:
    for messages in ranks2.run(refusals_of_weights_in_finish):
        assert len(messages) == 2
        for message in messages:
            assert message.startswith("finish of layer 0 uses a parameter of shape [")


def test_random_numbers_without_states_to_draw_them_from_are_refused() -> None:
    class Drawing(type(support.build(Case()))):  # type: ignore[misc]
        draws_random = True

    parts = support.build(Case(layers=1))
    parts.__class__ = Drawing
    OverlapSchedule(parts, OverlapConfig(num_microbatches=1))
    with pytest.raises(ValueError, match=r"Drawing, which draws random .* has no random_states"):
        OverlapSchedule(parts, OverlapConfig(num_microbatches=1, recompute_granularity="full"))
