"""The public class: what it accepts, what it refuses, and what it leaves alone."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import schedule_support as support
import torch
from schedule_support import Case
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from ep_overlap.config import OverlapConfig
from ep_overlap.models.groups import lone_expert_groups
from ep_overlap.models.reference import MoETransformer
from ep_overlap.plan.action import Compute, LayerKind, Node, Phase
from ep_overlap.plan.build import build_plan
from ep_overlap.plan.order import ModelShape
from ep_overlap.run.check_parts import MODEL_MEMBERS, check_parts, check_replayed
from ep_overlap.run.layer import Collective, ModelParts
from ep_overlap.schedule import OverlapSchedule
from ep_overlap.testing import RankPool
from fsdp_hooks import fully_shard
from fsdp_hooks.streams import StreamKind
from fsdp_hooks.thread_state import ThreadState

KINDS = [StreamKind.INLINE, StreamKind.THREAD]


def results(parts: Any, schedule: OverlapSchedule, case: Case, seed: int) -> dict[str, Tensor]:
    """One step's losses and gradients."""
    parts.zero_grad()
    step = schedule.step(support.batches(parts, case, seed), support.loss_of(case))
    return support.named(step.losses) | support.gradients(parts)


@pytest.mark.parametrize(
    ("unfit", "words"),
    [
        ({"device_type": "cpu"}, "a schedule on cpu, expected CUDA"),
        ({"strategy": "optim_grads_params"}, "optim_grads_params, expected a strategy"),
        ({"delays": True}, "delayed weight gradients"),
        ({"fuses": True}, "fused weight gradients"),
        ({"recomputes": True}, "recompute_granularity='full', expected None"),
    ],
)
def test_what_cannot_be_replayed_from_cuda_graphs_is_refused(
    unfit: dict[str, Any], words: str
) -> None:
    fit: dict[str, Any] = {
        "device_type": "cuda",
        "strategy": "optim_grads",
        "delays": False,
        "fuses": False,
        "recomputes": False,
    }
    check_replayed(**fit)
    with pytest.raises(ValueError, match=f"cuda_graphs with {words}"):
        check_replayed(**(fit | unfit))


# ---- two schedules -------------------------------------------------------------------------------


def test_two_schedules_in_turns_do_as_each_does_alone() -> None:
    cases = [Case(layers=2, microbatches=3), Case(layers=3, microbatches=2, freq=2, order="plain")]
    alone: list[dict[str, Tensor]] = []
    for case in cases:
        parts = support.build(case)
        schedule = OverlapSchedule(parts, case.config)
        alone += [results(parts, schedule, case, seed) for seed in range(2)]
    models = [support.build(case) for case in cases]
    schedules = [
        OverlapSchedule(parts, case.config) for parts, case in zip(models, cases, strict=True)
    ]
    for seed in range(2):
        for index, case in enumerate(cases):
            found = results(models[index], schedules[index], case, seed)
            assert support.unequal(found, alone[2 * index + seed]) == []


def test_two_schedules_of_one_model_may_take_turns() -> None:
    case = Case(layers=2, microbatches=3)
    parts = support.build(case)
    first, second = (
        OverlapSchedule(parts, replace(case, order=order).config) for order in ("plain", "paired")
    )
    expected = results(parts, first, case, 0)
    assert support.unequal(results(parts, second, case, 0), expected) == []
    assert support.unequal(results(parts, first, case, 0), expected) == []


@pytest.mark.parametrize("kind", KINDS)
def test_backward_runs_in_the_thread_that_issues_it(kind: StreamKind) -> None:
    case = Case(layers=2, microbatches=2, kind=kind)
    parts = support.build(case)
    schedule = OverlapSchedule(parts, case.config, stream_kind=kind)
    seen: list[bool] = []

    def loss(output: Tensor, batch: Any) -> Tensor:
        seen.append(ThreadState.capture().multithreaded_backward)
        return support.loss_of(case)(output, batch)

    schedule.step(support.batches(parts, case, 0), loss)
    assert seen == [False, False]
    assert ThreadState.capture().multithreaded_backward, "the caller's mode is its own again"


# ---- evaluation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_gives_the_models_own_losses_and_leaves_training_as_it_was(
    kind: StreamKind,
) -> None:
    case = Case(layers=3, microbatches=2, freq=2, kind=kind)
    parts = support.build(case)
    schedule = OverlapSchedule(parts, case.config, stream_kind=kind)
    loss_fn, inputs = support.loss_of(case), support.batches(parts, case, 0)
    expected = results(parts, schedule, case, 1)
    parts.zero_grad()
    losses = schedule.evaluate(inputs, loss_fn).losses
    with torch.no_grad():
        own = [loss_fn(parts.whole(batch), batch) for batch in inputs]
    assert support.unequal(support.named(losses), support.named(own)) == []
    assert not any(loss.requires_grad for loss in losses)
    assert support.gradients(parts) == {}
    assert support.unequal(results(parts, schedule, case, 1), expected) == []


def evaluation_between_sharded_steps() -> list[str]:
    case = Case(strategy="optim_grads_params", layers=3, microbatches=2, ep=2, budget=2)
    parts = support.build(case)
    schedule = OverlapSchedule(parts, case.config)
    expected = results(parts, schedule, case, 1)
    gradients = support.gradients(parts)
    inputs, loss_fn = support.batches(parts, case, 0), support.loss_of(case)
    losses = schedule.evaluate(inputs, loss_fn).losses
    found = support.unequal(support.gradients(parts), gradients)
    with torch.no_grad():
        own = [loss_fn(parts.whole(batch), batch) for batch in inputs]
    found += support.unequal(support.named(losses), support.named(own))
    found += support.unequal(results(parts, schedule, case, 1), expected)
    return found + support.not_at_rest(parts)


def test_evaluation_between_sharded_steps_leaves_training_as_it_was(ranks2: RankPool) -> None:
    assert ranks2.run(evaluation_between_sharded_steps) == [[], []]


# ---- what is refused -----------------------------------------------------------------------------


class LayerWithoutCombine(nn.Module):
    """Says that it has experts, and has no way home for the tokens."""

    kind = LayerKind.MOE
    module = None
    collectives = None

    def attn(self) -> None: ...

    def dispatch(self) -> None: ...

    def mlp(self) -> None: ...

    def finish(self) -> None: ...

    def dispatch_backward(self) -> None: ...

    def combine_backward(self) -> None: ...


def test_a_layer_that_lacks_a_node_is_refused_naming_both() -> None:
    parts = support.build(Case(layers=2))
    parts.blocks[1] = LayerWithoutCombine()
    with pytest.raises(ValueError, match=r"layer 1 \(LayerWithoutCombine\) is moe .* no combine;"):
        OverlapSchedule(parts, OverlapConfig(num_microbatches=2))


LACKING = object()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"combine_backward": None}, r"layer 0 \(Layer\) is moe but has no combine_backward; "),
        ({"kind": LACKING}, r"layer 0 \(Layer\) has no kind; expected a layer in parts"),
        ({"shared_experts": LACKING}, r"layer 0 \(Layer\) has no shared_experts; expected"),
        ({"kind": LayerKind.MOE_SHARED}, r"layer 0 \(Layer\) is moe_shared, but .* NoneType"),
    ],
)
def test_a_layer_that_says_too_little_of_its_experts_is_refused(
    changed: dict[str, Any], message: str
) -> None:
    parts = support.build(Case(layers=1))
    layer = parts.layers[0]
    members = {"__getattr__": lambda self, name: getattr(layer, name)}
    names = ("attn", "dispatch", "mlp", "combine", "finish", "collectives")
    exchanges = ("dispatch_backward", "combine_backward")
    calls = dict.fromkeys((*names, *exchanges), lambda self: None)
    stated = {"kind": LayerKind.MOE, "module": None, "shared_experts": None}
    whole = members | calls | stated
    made = type("Layer", (), {k: v for k, v in (whole | changed).items() if v is not LACKING})()
    with pytest.raises(ValueError, match=message):
        check_parts(SimpleNamespace(layers=[made]))  # type: ignore[arg-type]


def test_a_model_that_is_not_in_parts_is_refused() -> None:
    model: Any = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"Linear has no module, layers, .*; expected .* GPTParts"):
        OverlapSchedule(model, OverlapConfig(num_microbatches=1))


def test_every_member_of_the_protocol_is_looked_for() -> None:
    members = {name for name in vars(ModelParts) if not name.startswith("_")}
    assert members == set(MODEL_MEMBERS)


def test_a_model_without_parameters_is_refused() -> None:
    case = Case()
    parts = support.build(case)
    for module in parts.module.modules():
        for name, _ in list(module.named_parameters(recurse=False)):
            delattr(module, name)
    with pytest.raises(ValueError, match=r"has no parameters; expected a model to train"):
        OverlapSchedule(parts, case.config)


def test_a_kind_that_is_a_word_is_refused() -> None:
    named = type("Layer", (), {"kind": "moe", "module": None, "collectives": None})()
    with pytest.raises(ValueError, match=r"layer 0 \(Layer\): expected a LayerKind .* got 'moe'"):
        check_parts(SimpleNamespace(layers=[named]))  # type: ignore[arg-type]


def test_another_number_of_batches_is_refused_and_the_next_step_runs() -> None:
    case = Case(microbatches=3)
    parts = support.build(case)
    schedule = OverlapSchedule(parts, case.config)
    inputs, loss_fn = support.batches(parts, case, 0), support.loss_of(case)
    for call in (schedule.step, schedule.evaluate):
        with pytest.raises(ValueError, match="got 2 microbatches, expected 3"):
            call(inputs[:2], loss_fn)
    schedule.step(inputs, loss_fn)


def test_a_step_without_gradients_is_refused() -> None:
    case = Case()
    parts = support.build(case)
    schedule = OverlapSchedule(parts, case.config)
    inputs, loss_fn = support.batches(parts, case, 0), support.loss_of(case)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"call evaluate\(\)"):
        schedule.step(inputs, loss_fn)
    schedule.step(inputs, loss_fn)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_microbatches": 0}, "at least 1, got 0"),
        ({"num_microbatches": 2.0}, "a whole number of at least 1, got 2.0"),
        ({"num_microbatches": "2"}, "a whole number of at least 1, got '2'"),
        ({"num_microbatches": True}, "a whole number of at least 1, got True"),
        ({"max_unsharded_units": "2"}, "max_unsharded_units must be at least 1, got '2'"),
        ({"max_unsharded_units": 2.5}, "max_unsharded_units must be at least 1, got 2.5"),
        ({"delay_wgrad": "no"}, "delay_wgrad must be True or False, got 'no'"),
        ({"max_unsharded_units": 0}, "max_unsharded_units must be at least 1, got 0"),
        ({"order": "zigzag"}, "unknown order 'zigzag'; expected one of serial, plain, paired"),
        ({"order": "plain", "order_text": "0F.pre"}, "exclude each other"),
        ({"order": "plain", "overlap": False}, "needs overlap"),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OverlapConfig(**({"num_microbatches": 2} | options))


def test_a_budget_of_units_for_a_model_that_gathers_none_is_told_to_have_no_effect() -> None:
    case = Case(layers=2, budget=2)
    with pytest.warns(UserWarning, match="max_unsharded_units has no effect"):
        OverlapSchedule(support.build(case), case.config)


def test_an_own_order_that_does_not_fit_the_model_is_refused_with_its_line() -> None:
    parts = support.build(Case(layers=1))
    config = OverlapConfig(num_microbatches=1, order_text="0F.pre\n0F.attn.L0 0F.mlp.L7")
    with pytest.raises(ValueError, match="line 2"):
        OverlapSchedule(parts, config)


def refusals_of_sharded_models() -> list[str]:
    """The messages, in order."""
    messages: list[str] = []
    case = Case(strategy="optim_grads_params", layers=3, microbatches=3)
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    one_unit, shared_layers, in_parts, below = (support.reference(case) for _ in range(4))
    fully_shard(one_unit, mesh=mesh)
    for layer in shared_layers.layers[:2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(shared_layers, mesh=mesh)
    for layer in in_parts.layers:
        fully_shard(layer.attention, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(in_parts, mesh=mesh)
    for module in (*below.layers, below.embedding, below):
        fully_shard(module, mesh=mesh)
    tight = replace(case, order="paired", budget=1)
    for parts, config in (
        (one_unit, case.config),
        (shared_layers, case.config),
        (in_parts, case.config),
        (below, case.config),
        (support.build(case), tight.config),
    ):
        try:
            OverlapSchedule(parts, config)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_units_that_are_not_layers_and_a_budget_too_small_are_refused(ranks2: RankPool) -> None:
    for messages in ranks2.run(refusals_of_sharded_models):
        one_unit, shared_layers, in_parts, below, tight = messages
        assert one_unit.startswith("layer 0 (MoELayer) is not a unit of its own")
        assert shared_layers.startswith("layer 2 (MoELayer) is not a unit of its own")
        assert "blocks.0.attention" in in_parts
        assert "neither layers nor the root" in in_parts
        assert below.startswith("units embedding are neither layers nor the root")
        assert "expected at least 2, got 1" in tight


# ---- the caller's modes --------------------------------------------------------------------------


class Modes:
    """Notes the modes in force in each node."""

    def __init__(self, parts: Any) -> None:
        self.seen: list[tuple[str, bool, bool, bool]] = []
        """Node, autocast, grad mode, whether the caller's hook packs what autograd saves."""
        self.num_packed = 0
        support.tap(
            parts,
            lambda node, result: self._note(f"F.{node}"),
            lambda node: self._note(f"B.{node}"),
        )

    def pack(self, tensor: Tensor) -> Tensor:
        self.num_packed += 1
        return tensor

    def _note(self, node: str) -> None:
        before = self.num_packed
        with torch.enable_grad():
            torch.ones(1, requires_grad=True).exp()  # saves its result
        packs = self.num_packed > before
        self.seen.append((node, torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), packs))


def nodes_of(schedule: OverlapSchedule, phase: Phase) -> set[str]:
    """All nodes, without their microbatches."""
    computes = [action for action in schedule.plan.actions if isinstance(action, Compute)]
    return {str(action)[1:] for action in computes if action.phase is phase}


@pytest.mark.parametrize("kind", KINDS)
def test_both_of_two_modes_are_in_force_in_every_node_and_back_out_after(kind: StreamKind) -> None:
    case = Case(layers=2, freq=2, kind=kind)
    parts = support.build(case)
    modes = Modes(parts)
    schedule = OverlapSchedule(parts, case.config, stream_kind=kind)
    inputs, loss_fn = support.batches(parts, case, 0), support.loss_of(case)
    every_node = nodes_of(schedule, Phase.FORWARD) | nodes_of(schedule, Phase.BACKWARD)

    def hooks() -> saved_tensors_hooks:
        return saved_tensors_hooks(modes.pack, lambda tensor: tensor)

    with torch.autocast("cpu", dtype=torch.bfloat16), hooks():
        schedule.step(inputs, loss_fn)
    assert {node for node, *_ in modes.seen} == every_node
    assert all(autocast and packs for _, autocast, _, packs in modes.seen)
    assert all(grad for node, _, grad, _ in modes.seen if node.startswith("F."))

    modes.seen.clear()
    with hooks():
        schedule.evaluate(inputs, loss_fn)
    assert {node for node, *_ in modes.seen} == nodes_of(schedule, Phase.FORWARD)
    assert {tuple(mode) for _, *mode in modes.seen} == {(False, False, True)}

    modes.seen.clear()
    schedule.step(inputs, loss_fn)
    assert {node for node, *_ in modes.seen} == every_node
    assert not any(autocast or packs for _, autocast, _, packs in modes.seen)


# ---- what a step keeps ---------------------------------------------------------------------------


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.enable()


def live() -> tuple[int, int, int]:
    """Tensors, bytes of their storages, and objects of all kinds, made since the test began."""
    objects = gc.get_objects()
    tensors = [thing for thing in objects if issubclass(type(thing), Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return len(tensors), sum(storages.values()), len(objects)


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("kind", KINDS)
def test_fifty_steps_keep_nothing_and_rebuild_nothing(kind: StreamKind) -> None:
    case = Case(layers=2, microbatches=2, kind=kind)
    parts = support.build(case)
    schedule = OverlapSchedule(parts, replace(case.config, trace=False), stream_kind=kind)
    inputs, loss_fn = support.batches(parts, case, 0), support.loss_of(case)

    def step() -> None:
        parts.zero_grad()
        schedule.step(inputs, loss_fn)
        schedule.evaluate(inputs, loss_fn)

    def built() -> list[int]:
        own = vars(schedule)
        return [
            *(id(own[name]) for name in ("plan", "_training", "_evaluation", "_streams")),
            *map(id, own["_nodes"].values()),
            *map(id, own["_slots"]),
        ]

    for _ in range(3):
        step()
        live()  # looking at a storage makes a Python object of it, once
    *before, num_objects = live()
    parts_of_schedule = built()
    for _ in range(50):
        step()
    *after, num_objects_after = live()
    assert after == before
    assert num_objects_after - num_objects < 10  # one object kept a step would be 50 more
    assert built() == parts_of_schedule


def test_what_a_microbatch_keeps_is_dropped_before_the_next_begins() -> None:
    """Routing of three microbatches at once would be memory that grows with their number."""
    case = Case(layers=1, microbatches=3, order="serial", kind=StreamKind.INLINE)
    parts = support.build(case)
    alive = watch_states(parts)
    schedule = OverlapSchedule(parts, case.config, stream_kind=StreamKind.INLINE)
    seen: list[list[bool]] = []
    support.tap(parts, lambda node, _: seen.append(alive()) if node == "pre" else None)
    inputs, loss_fn = support.batches(parts, case, 0), support.loss_of(case)
    schedule.step(inputs, loss_fn)
    assert seen == [[True, True, True], [False, True, True], [False, False, True]]
    assert alive() == [False, False, False]
    seen.clear()
    schedule.evaluate(inputs, loss_fn)
    assert seen[-1][-3:] == [False, False, True]


def watch_states(parts: MoETransformer) -> Callable[[], list[bool]]:
    """Which of the states that ``begin`` made are still alive: a dead one's batch is gone."""
    holders: list[set[int]] = []
    begin = parts.begin

    class Witness:
        """Dies with the state that holds it."""

        def __init__(self, holder: set[int]) -> None:
            self.holder = holder

        def __del__(self) -> None:
            self.holder.clear()

    class Routings(list[Any]):
        """A state's list of routings, with a witness."""

        witness: Witness

    def watched(batch: Any) -> Any:
        state = begin(batch)
        holders.append({1})
        routings = Routings(state.routing)
        routings.witness = Witness(holders[-1])
        state.routing = routings
        return state

    parts.begin = watched  # type: ignore[method-assign]
    return lambda: [bool(holder) for holder in holders]


class _OneGroupForAll:
    """A MoE layer that declares one process group for counts and exchanges."""

    kind = LayerKind.MOE
    module = None
    shared_experts = None

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def collectives(self, node: Node) -> list[Collective]:
        return [Collective(group=self._group, op="all_to_all_single")]

    def attn(self) -> None: ...

    def dispatch(self) -> None: ...

    def mlp(self) -> None: ...

    def combine(self) -> None: ...

    def finish(self) -> None: ...

    def dispatch_backward(self) -> None: ...

    def combine_backward(self) -> None: ...


def test_one_group_on_two_lanes_is_refused_naming_both_nodes() -> None:
    group = lone_expert_groups().exchange
    parts = SimpleNamespace(layers=[_OneGroupForAll(group)])
    with pytest.raises(ValueError, match=r"0F\.attn\.L0 \(lane comp\) and 0F\.dispatch\.L0"):
        check_parts(parts)  # type: ignore[arg-type]


# ---- sharding that does not fit ------------------------------------------------------------------


def _refusals(strategies: tuple[str | None, str | None]) -> str:
    """What is said of a model whose layers and root are sharded so."""
    parts = support.build(Case(layers=2))
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    of_layers, of_root = strategies
    if of_layers is not None:
        for block in parts.blocks:
            fully_shard(block, mesh=mesh, strategy=of_layers)
    if of_root is not None:
        fully_shard(parts, mesh=mesh, strategy=of_root)
    try:
        OverlapSchedule(parts, OverlapConfig(num_microbatches=2))
    except ValueError as error:
        return str(error)
    return "accepted"


def test_units_of_two_strategies_are_refused(ranks2: RankPool) -> None:
    for said in ranks2.run(_refusals, ("no_shard", "optim_grads_params")):
        assert "'no_shard'" in said
        assert "'optim_grads_params'" in said
        assert said.endswith("use one strategy for all units")


def test_sharded_layers_in_an_unsharded_model_are_refused(ranks2: RankPool) -> None:
    for said in ranks2.run(_refusals, ("no_shard", None)):
        assert said.endswith("call fully_shard on the model too, last")


def test_an_unsharded_layer_in_a_sharded_model_is_refused(ranks2: RankPool) -> None:
    for said in ranks2.run(_refusals, (None, "no_shard")):
        assert "layer 0 (MoELayer) is not a unit of its own" in said


def test_weight_gradients_to_be_delayed_by_an_order_without_w_nodes_are_refused() -> None:
    parts = support.build(Case(layers=1))
    plan = build_plan(shape=ModelShape(layers=(LayerKind.MOE,)), num_microbatches=2)
    config = OverlapConfig(num_microbatches=2, order_text=plan.order_text(), delay_wgrad=True)
    with pytest.raises(ValueError, match="are to be delayed, but the order has no W nodes, such"):
        OverlapSchedule(parts, config)


def test_a_loss_that_is_no_tensor_is_named() -> None:
    case = Case(layers=1)
    parts = support.build(case)
    schedule = OverlapSchedule(parts, case.config)
    with pytest.raises(ValueError, match="loss_fn returned float, expected a scalar tensor"):
        schedule.step(support.batches(parts, case, 0), lambda output, batch: 1.0)


def test_an_error_handled_by_the_caller_keeps_its_frames() -> None:
    """What a failed step clears are the frames of its own error."""
    case = Case(layers=1)
    parts = support.build(case)
    schedule = OverlapSchedule(parts, case.config)

    def fail() -> None:
        kept = "local"
        raise KeyError(kept)

    handled: list[KeyError] = []
    try:
        fail()
    except KeyError as outer:
        with pytest.raises(ValueError, match="loss_fn returned"):
            schedule.step(support.batches(parts, case, 0), lambda output, batch: 1.0)
        handled.append(outer)
    frames = handled[0].__traceback__
    assert frames is not None
    assert frames.tb_next is not None
    assert frames.tb_next.tb_frame.f_locals == {"kept": "local"}
