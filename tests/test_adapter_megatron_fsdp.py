"""megatron-core's FSDP v1 and the optimizer over it behind a schedule, against its own paths."""

import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron_fsdp_support import (
    Case,
    Trained,
    core_of,
    counted,
    differences,
    dropin_differences,
    dropin_step,
    one_world,
    schedule_of,
    scheduled_step,
    standard_step,
    train,
    trained,
    unequal,
)
from torch import Tensor, nn

from ep_overlap.models.megatron_parts import mean_loss
from ep_overlap.models.megatron_wgrad import WGRAD_LAYERS
from ep_overlap.plan.action import Node
from ep_overlap.testing import RankPool, record
from fsdp_hooks.adapters.megatron_fsdp import MegatronFsdp
from fsdp_hooks.adapters.megatron_fsdp_unit import MegatronFsdpUnit
from fsdp_hooks.lifecycle import NOTHING_DONE, Driver
from fsdp_hooks.streams import Event, StreamKind
from fsdp_hooks.wgrad_layers import manage_wgrad

pytestmark = [  # what megatron-core raises when it is built and when it steps
    pytest.mark.filterwarnings("ignore:MimoModelConfig is experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

F32, BF16 = torch.float32, torch.bfloat16
SHARDS_ALL, SHARDS_GRADS = "optim_grads_params", "optim_grads"
SMALL_BUCKETS = {"bucket_size": 8000}
"""Elements: several buckets a layer, some over layers."""

# ---- the table: bit for bit ----------------------------------------------------------------------

TABLE = [
    *(Case(strategy=each, delay=d) for each in (SHARDS_ALL, SHARDS_GRADS) for d in (False, True)),
    *(Case(strategy=each, delay=True) for each in ("optim", "no_shard")),
]
MORE = [
    Case(own_gathers=True, delay=True, order="plain", frozen=True),
    Case(own_gathers=True, strategy=SHARDS_GRADS, ddp=SMALL_BUCKETS),
    Case(dtype=BF16, tied=True, delay=True, ddp={"megatron_fsdp_main_grads_dtype": F32}),
    Case(
        dtype=BF16,
        strategy=SHARDS_GRADS,
        ddp={"megatron_fsdp_grad_comm_dtype": F32, "overlap_param_gather": False},
    ),
    Case(layers=3, freq=2, shared=True, max_unsharded_units=2, delay=True),
    Case(ddp={"fsdp_all_gather_in_start_param_sync": False}, order="serial", microbatches=1),
]


def test_strategies_change_no_bit_of_gradients_and_weights(ranks4: RankPool) -> None:
    """Expert parallelism of two: two ranks hold the same experts."""
    assert ranks4.run(differences, TABLE, timeout_s=200.0) == [{}] * 4


def test_other_settings_models_and_orders_change_no_bit(ranks4: RankPool) -> None:
    assert ranks4.run(differences, MORE, timeout_s=200.0) == [{}] * 4


def test_experts_on_one_rank_are_right_where_gradients_are_reduced_once(ranks2: RankPool) -> None:
    assert ranks2.run(differences, [Case(strategy="optim", delay=True)]) == [{}, {}]


# ---- turns with megatron-core's own path, and the drop-in ----------------------------------------


def differences_in_turns() -> list[str]:
    """A schedule, megatron-core's own path, evaluation between, the drop-in; one FSDP. With the
    flag for overlap FSDP v1 has hooks on every sub-module."""
    case = Case(steps=4, delay=True, overlap=True, own_gathers=True)
    with one_world(1) as groups:
        model = trained(case.on_standard_path, groups)
        expected = train(case, model, [standard_step(model)])
        model = trained(case, groups)
        schedule = schedule_of(case, model, core_of(case, model))
        step = scheduled_step(model, schedule)

        def step_after_evaluation(batches: list[Any]) -> list[Tensor]:
            evaluated = schedule.evaluate(batches, mean_loss).losses
            losses = step(batches)
            assert all(map(torch.equal, evaluated, losses))
            return losses

        def plain_step(batches: list[Any]) -> list[Tensor]:
            model.parts.module.config.overlap_moe_expert_parallel_comm = False
            try:
                return standard_step(model)(batches)
            finally:
                model.parts.module.config.overlap_moe_expert_parallel_comm = True

        steps = [step_after_evaluation, plain_step, dropin_step(model), step_after_evaluation]
        got = train(case, model, steps)
    return unequal(got, expected)


def test_steps_evaluation_standard_steps_and_the_drop_in_in_turns_change_no_bit(
    ranks2: RankPool,
) -> None:
    assert ranks2.run(differences_in_turns) == [[], []]


def test_the_drop_in_takes_a_wrapped_model(ranks4: RankPool) -> None:
    chosen = [
        Case(overlap=True, delay=True),
        Case(overlap=True, per_token=True, strategy=SHARDS_GRADS),
    ]
    assert ranks4.run(dropin_differences, chosen, timeout_s=120.0) == [{}] * 4


# ---- what is gathered, and what is alive ---------------------------------------------------------

STANDARD, COMBINED = "standard", "combined"


def counts_of_a_step(
    strategy: str, budgets: list[int], num_layers: int
) -> dict[str | int, tuple[int, int]]:
    """Gathers and reductions in the second iteration, the optimizer's part included: of both of
    megatron-core's schedules, and of ours by the budget of unsharded units."""
    found: dict[str | int, tuple[int, int]] = {}
    with one_world() as groups:
        for name in (STANDARD, COMBINED, *budgets):
            case = Case(
                strategy=strategy,
                layers=num_layers,
                microbatches=num_layers,
                steps=1,
                overlap=name is not STANDARD,
                max_unsharded_units=name if isinstance(name, int) else None,
                ddp={"fsdp_all_gather_in_start_param_sync": False},
            )
            model = trained(case, groups)
            core = core_of(case, model)
            ours = scheduled_step(model, schedule_of(case, model, core))
            step = ours if isinstance(name, int) else standard_step(model)
            train(case, model, [step])
            with counted() as counts:
                train(case, model, [step])
            found[name] = (counts["all_gather_into_tensor"], counts["reduce_scatter_tensor"])
            if isinstance(name, int):
                stats = core.stats
                assert (stats.num_all_gathers, stats.num_reduce_scatters, stats.hook_misses) == (
                    2 * found[name][0],
                    2 * found[name][1],
                    0,
                )
    return found


def test_less_is_gathered_than_by_either_of_megatrons_schedules(ranks4: RankPool) -> None:
    """A layer has two buckets, its experts' and the others'; the root has one."""
    found, *others = ranks4.run(counts_of_a_step, SHARDS_ALL, [2, 4], 4, timeout_s=120.0)
    assert others == [found] * 3
    reductions = 4 * (2 * 4 + 1)
    assert found == {
        STANDARD: (65, reductions),
        COMBINED: (65, reductions),
        2: (33, reductions),
        4: (2 * 4 + 1, reductions),
    }


def test_as_much_is_gathered_where_weights_are_whole(ranks4: RankPool) -> None:
    """One bucket of experts, one of all else: each is gathered once a step."""
    found, *others = ranks4.run(counts_of_a_step, SHARDS_GRADS, [2], 2, timeout_s=120.0)
    assert others == [found] * 3
    assert found == dict.fromkeys((STANDARD, COMBINED, 2), (2, 2 * 2))


class Live:
    """An observer: after each piece of work, which layers hold whole parameters."""

    def __init__(self, model: Trained) -> None:
        inner = model.fsdp.module
        names = {module: name for name, module in inner.module.named_modules()}
        self._raw = {
            index: [
                p for n, p in inner.raw_param.items() if n.startswith(names[layer.module] + ".")
            ]
            for index, layer in enumerate(model.parts.layers)
        }
        self.most = 0

    def now(self) -> list[int]:
        return [
            index
            for index, raw in self._raw.items()
            if any(param.untyped_storage().size() for param in raw)
        ]

    def on_issue(self, lane: str, word: str) -> None:
        """Nothing has run."""

    def on_span(self, span: Any) -> None:
        self.most = max(self.most, len(self.now()))


def live_layers(max_unsharded_units: int) -> tuple[int, list[int], int, bool]:
    case = Case(layers=4, max_unsharded_units=max_unsharded_units, kind=StreamKind.INLINE)
    with one_world(1) as groups:
        model = trained(case, groups)
        core = core_of(case, model)
        schedule = schedule_of(case, model, core)
        live = Live(model)
        schedule.observe(live)
        schedule.step(model.batches(0, case.microbatches), mean_loss)
        sizes = [unit._unsharded_bytes for unit in core.inner_units]
        peak = core.stats.peak_unsharded_bytes
    return live.most, live.now(), core.stats.unsharded_bytes, peak == max_unsharded_units * sizes[0]


@pytest.mark.parametrize("budget", [2, 3])
def test_no_more_layers_are_whole_than_the_budget_and_none_after_a_step(
    ranks2: RankPool, budget: int
) -> None:
    assert ranks2.run(live_layers, budget) == [(budget, [], 0, True)] * 2


def lanes_of(own_gathers: bool) -> tuple[list[str], list[str]]:
    """Where gathers and reductions ran."""
    case = Case(own_gathers=own_gathers, strategy=SHARDS_ALL)
    with one_world(1) as groups, record() as recording:
        model = trained(case, groups)
        schedule = schedule_of(case, model, core_of(case, model))
        schedule.observe(recording)
        schedule.step(model.batches(0, case.microbatches), mean_loss)
        events = list(recording.events)
    of = [{e.lane for e in events if e.what.startswith(op)} for op in ("UNSHARD", "REDUCE")]
    return sorted(of[0]), sorted(of[1])


def test_a_process_group_is_one_lanes(ranks2: RankPool) -> None:
    assert ranks2.run(lanes_of, False) == [(["ag"], ["ag"])] * 2
    assert ranks2.run(lanes_of, True) == [(["ag"], ["rs"])] * 2


def events_of_reductions(strategy: str, ddp: dict[str, Any]) -> list[tuple[str, bool, bool]]:
    """Of each REDUCE: its word; whether it issued something; whether its event is that of the
    reduction that the RS lane does last."""
    case = Case(strategy=strategy, own_gathers=True, microbatches=2, order="serial", ddp=ddp)
    found: list[tuple[str, bool, bool]] = []
    last: Event = NOTHING_DONE
    with one_world(1) as groups, pytest.MonkeyPatch.context() as patch:
        model = trained(case, groups)
        core = core_of(case, model)
        run, reduce = core._lanes.rs.run, MegatronFsdpUnit.reduce

        def noting_run(*args: Any, **kwargs: Any) -> Event:
            nonlocal last
            last = run(*args, **kwargs)
            return last

        def noting_reduce(unit: MegatronFsdpUnit, **kwargs: Any) -> Event:
            before = last
            event = reduce(unit, **kwargs)
            found.append((kwargs["word"], last is not before, event is last))
            return event

        patch.setattr(core._lanes.rs, "run", noting_run)
        patch.setattr(MegatronFsdpUnit, "reduce", noting_reduce)
        schedule_of(case, model, core).step(model.batches(0, case.microbatches), mean_loss)
    return found


def test_a_reduction_that_waits_for_later_units_vouches_for_earlier_ones(
    ranks2: RankPool,
) -> None:
    """What earlier ones read is dropped once a lane has waited for it, as the plan says."""
    found, other = ranks2.run(events_of_reductions, SHARDS_GRADS, {})
    assert found == other
    # Buckets span units: experts' are complete with L0, all else's with the root.
    assert (
        found
        == [
            ("REDUCE.L1", False, True),
            ("REDUCE.L0", True, True),
            ("REDUCE.root", True, True),
        ]
        * 2
    )


# ---- failure -------------------------------------------------------------------------------------


class OddError(Exception):
    pass


def fail_once(owner: Any, method: str) -> None:
    """At the next call."""
    real = getattr(owner, method)

    def failing(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, method, real)
        raise OddError(method)

    setattr(owner, method, failing)


def not_at_rest(model: Trained, core: MegatronFsdp) -> list[str]:
    inner, found = model.fsdp.module, []
    gathers, reductions = inner.all_gather_pipeline, inner.grad_reduce_pipeline
    if not {status.name for status in gathers.bucket_status.values()} <= {"EMPTY", "PRESERVED"}:
        found.append("a unit is gathered")
    if gathers.param_gather_event_map or reductions.grad_reduce_queue:
        found.append("a collective is under way")
    if any(reductions.bucket_grad_ready_params):
        found.append("a gradient waits for its reduction")
    for group in inner.param_and_grad_buffer.parameter_groups:
        if group.main_grad_buffer.data.count_nonzero():
            found.append("gradients are left")
    if any(param.grad is not None for param in inner.raw_param.values()):
        found.append(".grad is left")
    if core._switch.driver is not None or core.stats.unsharded_bytes:
        found.append("FSDP's hooks stand aside, or bytes are counted")
    return found


def problems_after_failures(kind: StreamKind) -> list[str]:
    case = Case(delay=True, kind=kind, steps=2, own_gathers=True)
    found: list[str] = []
    with one_world(1) as groups:
        model = trained(case.on_standard_path, groups)
        expected = train(case, model, [standard_step(model)])
        model = trained(case, groups)
        core = core_of(case, model)
        schedule = schedule_of(case, model, core)
        step = scheduled_step(model, schedule)
        inner = model.fsdp.module
        last_node = schedule._nodes[case.microbatches - 1, Node.PRE, None]

        def in_last_backward() -> None:
            if armed:
                armed.clear()
                raise OddError("last backward")

        armed: list[bool] = []
        last_node.pre_backward_hooks += (in_last_backward,)
        faults = {
            "first gather": lambda: fail_once(inner, "all_gather_and_wait_parameters_ready"),
            "a collective": lambda: fail_once(dist, "all_gather_into_tensor"),
            "a forward": lambda: fail_once(model.parts.layers[1], "mlp"),
            "a release": lambda: fail_once(inner, "post_backward_release_module"),
            "a reduction": lambda: fail_once(inner.grad_reduce_pipeline, "reduce_gradients"),
            "last backward": lambda: armed.append(True),
        }

        def step_after_failures(batches: list[Any]) -> list[Tensor]:
            for place, arm in faults.items():
                arm()
                with pytest.raises(OddError) as caught:
                    schedule.step(batches, mean_loss)
                assert any(note.startswith("raised in") for note in caught.value.__notes__)
                found.extend(f"{place}: {what}" for what in not_at_rest(model, core))
            return step(batches)

        got = train(case, model, [step_after_failures, step])
    return found + unequal(got, expected)


@pytest.mark.parametrize("kind", [StreamKind.THREAD, StreamKind.INLINE])
def test_a_step_that_fails_leaves_fsdp_at_rest_and_the_next_is_right(
    ranks2: RankPool, kind: StreamKind
) -> None:
    assert ranks2.run(problems_after_failures, kind, timeout_s=90.0) == [[], []]


# ---- one rank: the sink, and what is refused -----------------------------------------------------


@contextmanager
def one_rank(case: Case) -> Generator[Trained]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with one_world() as groups:
            yield trained(case, groups)
    finally:
        dist.destroy_process_group()


@pytest.fixture
def model() -> Iterator[Trained]:
    with one_rank(Case()) as model:
        yield model


@pytest.fixture
def core(model: Trained) -> MegatronFsdp:
    return core_of(Case(), model)


def raw(model: Trained) -> nn.Parameter:
    """A layer's."""
    return model.fsdp.module.raw_param["decoder.layers.0.mlp.router.weight"]


def test_an_evaluation_that_fails_leaves_the_gradients(model: Trained, core: MegatronFsdp) -> None:
    schedule = schedule_of(Case(), model, core)
    batches = model.batches(0, Case().microbatches)
    schedule.step(batches, mean_loss)
    model.finalize()
    grads = {name: p.grad for name, p in model.fsdp.named_parameters()}
    fail_once(model.parts.layers[1], "mlp")
    with pytest.raises(OddError):
        schedule.evaluate(batches, mean_loss)
    kept = {name: p.grad for name, p in model.fsdp.named_parameters()}
    assert grads.keys() == kept.keys()
    assert all(kept[name] is grad and grad.to_local().any() for name, grad in grads.items())


def test_fused_weight_gradients_are_taken(model: Trained, core: MegatronFsdp) -> None:
    case = Case(steps=1)
    unfused = train(case, model, [scheduled_step(model, schedule_of(case, model, core))])
    again = trained(case, model.groups)
    its_core = core_of(case, again)
    sink = its_core.grad_sink
    manage_wgrad(again.parts.module, fuse=True, layer_types=WGRAD_LAYERS, sink=sink)
    fused = train(case, again, [scheduled_step(again, schedule_of(case, again, its_core))])
    for name, value in unfused.items():
        torch.testing.assert_close(fused[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_a_weight_gradient_between_steps_is_refused(model: Trained, core: MegatronFsdp) -> None:
    for bring in (
        lambda: core.grad_sink.add(raw(model), raw(model)),
        lambda: core.destination(raw(model)),
    ):
        with pytest.raises(RuntimeError, match="no step that it belongs to is under way"):
            bring()


def test_a_second_driver_is_refused(model: Trained, core: MegatronFsdp) -> None:
    other = core_of(Case(), model)
    core.begin(Driver.SCHEDULE)
    for each in (core, other):
        with pytest.raises(RuntimeError, match="while a schedule is at work on this model"):
            each.begin(Driver.SCHEDULE)
    core.end()
    other.begin(Driver.SCHEDULE)
    other.end()


def test_a_step_on_reduced_gradients_of_the_last_one_is_refused() -> None:
    case = Case(strategy="optim")
    with one_rank(case) as model:
        schedule = schedule_of(case, model, core_of(case, model))
        batches = model.batches(0, case.microbatches)
        schedule.step(batches, mean_loss)
        with pytest.raises(RuntimeError, match="gradients are not finalized; after each step call"):
            schedule.step(batches, mean_loss)
        model.finalize()
        with pytest.raises(RuntimeError, match="gradients are still there, reduced; after each"):
            schedule.step(batches, mean_loss)
        schedule.evaluate(batches, mean_loss)
        model.fsdp.zero_grad_buffer()
        schedule.step(batches, mean_loss)


def test_a_reader_ahead_of_its_gather_is_refused(core: MegatronFsdp) -> None:
    core.begin(Driver.SCHEDULE)
    layer = core.inner_units[0]
    with pytest.raises(RuntimeError, match=r"unit decoder\.layers\.0 is read while it is sharded"):
        layer.ensure()
    with pytest.raises(RuntimeError, match=r"reshard\(\) of unit decoder\.layers\.0: its state is"):
        layer.reshard()
    core.end()
    assert core.stats.hook_misses == 1


@pytest.mark.parametrize(
    ("setting", "value", "supported"),
    [
        ("num_distributed_optimizer_instances", 2, 1),
        ("outer_dp_sharding_strategy", "optim", "no_shard"),
        ("overlap_grad_reduce", False, True),
        ("average_in_collective", True, False),
        ("fsdp_double_buffer", True, False),
        ("nccl_ub", True, False),
        ("fp8_param_gather", True, False),
        ("fp4_param_gather", True, False),
        ("megatron_fsdp_cuda_graph_mode", True, False),
        ("megatron_fsdp_use_decoupled_grad", True, False),
        ("report_nan_in_param_grad", True, False),
        ("model_auto_sync", True, False),
        ("cuda_graph_impl", "local", "none"),
        ("gradient_accumulation_fusion", True, False),
        ("init_model_with_meta_device", True, False),
        ("tensor_model_parallel_size", 2, 1),
        ("mtp_num_layers", 1, None),
        ("recompute_granularity", "selective", None),
    ],
)
def test_settings_are_refused_by_name(
    model: Trained, setting: str, value: object, supported: object
) -> None:
    [owner] = [
        owner
        for owner in (model.fsdp.ddp_config, model.fsdp.config, model.fsdp.module)
        if setting in vars(owner) and setting != "init_model_with_meta_device"
    ] or [model.fsdp.config]
    setattr(owner, setting, value)
    with pytest.raises(ValueError, match=rf"{setting}={value!r} \(supported: {supported!r}\)"):
        core_of(Case(), model)


def test_layers_that_delay_by_themselves_are_refused(model: Trained) -> None:
    raw(model).skip_backward_post_hook = True
    with pytest.raises(ValueError, match=r"the layer of decoder\.layers\.0\.\S+ delays its weight"):
        core_of(Case(), model)


def test_another_wrapper_is_refused(model: Trained) -> None:
    with pytest.raises(ValueError, match="got MegatronFSDP, expected megatron-core's FullySharded"):
        MegatronFsdp(model.fsdp.module, [])


def test_units_that_are_not_the_layers_are_refused(model: Trained) -> None:
    first, _ = (layer.module for layer in model.parts.layers)
    with pytest.raises(
        ValueError, match=r"units of TransformerLayer \(2\), expected the schedule's"
    ):
        MegatronFsdp(model.fsdp, [first])
    model.fsdp.module.fsdp_unit_modules = [MoELayer, MLP]
    with pytest.raises(ValueError, match=r"units of MLP, MoELayer .*, expected the schedule's lay"):
        core_of(Case(), model)
    model.fsdp.module.data_parallel_sharding_strategy = SHARDS_GRADS
    with pytest.raises(ValueError, match=r"units of MLP, MoELayer .*, expected none"):
        core_of(Case(), model)


def test_layers_that_share_or_are_no_parts_are_refused() -> None:
    with one_rank(Case(strategy=SHARDS_GRADS)) as model:
        first, second = (layer.module for layer in model.parts.layers)
        with pytest.raises(ValueError, match=r"layer 1 \(Linear\) is not a part of the module"):
            MegatronFsdp(model.fsdp, [first, nn.Linear(1, 1)])
        with pytest.raises(ValueError, match=r"layer 1 \(MoELayer\) .* is in another layer"):
            MegatronFsdp(model.fsdp, [first, first.mlp])
        second.mlp.router.weight = first.mlp.router.weight
        with pytest.raises(ValueError, match=r"layers\.0\.mlp\.router\.weight: shared by a layer"):
            MegatronFsdp(model.fsdp, [first, second])


def refusals_over_two_ranks() -> list[str]:
    found: list[str] = []
    with one_world() as groups:
        for strategy in (SHARDS_ALL, SHARDS_GRADS):
            model = trained(Case(strategy=strategy), groups)
            with pytest.raises(ValueError, match="experts are on one data-parallel rank"):
                core_of(Case(), model)
            found.append("lone experts")
        model = trained(Case(strategy="optim"), groups)
        for part in model.parts.module.modules():
            if isinstance(part, MoELayer):
                part.ep_group = groups.shared.dp_cp
        with pytest.raises(ValueError, match="over the very process group that the model's layers"):
            core_of(Case(), model)
        found.append("one group for all")
    return found


def test_experts_on_one_rank_and_shared_process_groups_are_refused(ranks2: RankPool) -> None:
    expected = ["lone experts", "lone experts", "one group for all"]
    assert ranks2.run(refusals_over_two_ranks) == [expected] * 2


def test_without_megatron_core_the_import_says_how_to_install_it() -> None:
    script = """
import sys
sys.modules["megatron"] = None
names = ("", "_refused", "_unit", "_hooks")
for name in names:
    try:
        __import__(f"fsdp_hooks.adapters.megatron_fsdp{name}")
    except ImportError as error:
        print(error)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    hint = "this adapter needs megatron-core 0.19: pip install 'megatron-core<0.20'"
    assert (run.stdout.splitlines(), run.returncode) == ([hint] * 4, 0), run.stderr
