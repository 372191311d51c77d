"""megatron-core's DDP and distributed optimizer behind a schedule, against its own path."""

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_ddp_support import (
    Case,
    Trained,
    core_of,
    differences,
    one_world,
    schedule_of,
    scheduled_step,
    standard_step,
    train,
    train_by_script,
    trained,
    unequal,
)
from torch import Tensor, nn

from ep_overlap.models.megatron import install, uninstall
from ep_overlap.models.megatron_parts import mean_loss
from ep_overlap.models.megatron_wgrad import WGRAD_LAYERS
from ep_overlap.plan.action import Node, parse_action
from ep_overlap.plan.units import units_given, units_read
from ep_overlap.testing import RankPool, record
from fsdp_hooks.adapters.megatron_ddp import MegatronDdp
from fsdp_hooks.lifecycle import Driver
from fsdp_hooks.streams import StreamKind
from fsdp_hooks.wgrad import Destination
from fsdp_hooks.wgrad_layers import manage_wgrad

pytestmark = [  # what megatron-core's optimizers raise when they are built and when they step
    pytest.mark.filterwarnings("ignore:MimoModelConfig is experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

F32, BF16 = torch.float32, torch.bfloat16
OVERLAPPED: dict[str, Any] = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}

# ---- the table: every switch, bit for bit --------------------------------------------------------


def switches() -> Iterator[dict[str, Any]]:
    for sharded, reduces, gathers in product((False, True), repeat=3):
        if sharded or not gathers:
            yield {
                "use_distributed_optimizer": sharded,
                "overlap_grad_reduce": reduces,
                "overlap_param_gather": gathers,
            }


def with_every_switch(dtype: torch.dtype, delay: bool) -> list[Case]:
    in_fp32 = {"grad_reduce_in_fp32": dtype is BF16}
    return [
        Case(dtype=dtype, delay=delay, microbatches=2, ddp={**ddp, **in_fp32}) for ddp in switches()
    ]


def test_every_switch_changes_no_bit_on_two_ranks(ranks2: RankPool) -> None:
    table = with_every_switch(F32, delay=False) + with_every_switch(BF16, delay=True)
    table += [Case(ddp=OVERLAPPED, delay=True), Case(ddp=OVERLAPPED, dtype=BF16)]
    assert len(table) == 14
    assert ranks2.run(differences, table, timeout_s=150.0) == [{}, {}]


def test_every_switch_changes_no_bit_on_four_ranks(ranks4: RankPool) -> None:
    """Here experts' gradients are reduced, too: two ranks hold the same."""
    table = with_every_switch(BF16, delay=True)
    assert ranks4.run(differences, table, timeout_s=150.0) == [{}] * 4


MORE = [  # several at once where one has no bearing on the other
    Case(ddp=OVERLAPPED, tied=True, delay=True),
    Case(ddp=OVERLAPPED, tied=True, dtype=BF16, microbatches=4),
    Case(ddp=OVERLAPPED, layers=3, shared=True, freq=2, order="plain", dispatch_over=True),
    Case(ddp={**OVERLAPPED, "delay_wgrad_compute": True}, order="serial", delay=True),
    Case(ddp={**OVERLAPPED, "bucket_size": None}, microbatches=1),
    Case(ddp={**OVERLAPPED, "average_in_collective": True}, microbatches=2, layers=1, delay=True),
    Case(
        ddp={
            **OVERLAPPED,
            "align_param_gather": True,
            "check_for_nan_in_grad": True,
            "pad_buckets_for_high_nccl_busbw": True,
        }
    ),
    Case(
        dtype=BF16, ddp={**OVERLAPPED, "param_name_patterns_for_fp32_local_accumulation": ("all",)}
    ),
]
PROCESS_WIDE = [Case(dtype=BF16, ddp={**OVERLAPPED, "reduce_scatter_with_fp32_accumulation": True})]
"""What megatron-core switches over for all DDPs of a process: on its own."""


def test_other_settings_models_and_orders_change_no_bit(ranks2: RankPool) -> None:
    assert ranks2.run(differences, MORE, timeout_s=150.0) == [{}, {}]
    assert ranks2.run(differences, PROCESS_WIDE) == [{}, {}]


# ---- turns with megatron-core's own path ---------------------------------------------------------


def differences_in_turns() -> list[str]:
    """A schedule, megatron-core's own path; evaluation before a step, and between its gradients and
    the optimizer, which changes weights that are gathered then; one DDP and optimizer."""
    case = Case(ddp=OVERLAPPED, steps=5, delay=True)
    with one_world() as groups:
        model = trained(case, groups)
        expected = train(case, model, [standard_step(model)])
        model = trained(case, groups)
        schedule = schedule_of(case, model, core_of(case, model))
        step = scheduled_step(model, schedule)

        def evaluated_step(batches: list[Any]) -> list[Tensor]:
            before = schedule.evaluate(batches, mean_loss).losses
            losses = step(batches)
            after = schedule.evaluate(batches, mean_loss).losses
            assert all(map(torch.equal, [*before, *after], [*losses, *losses]))
            return losses

        got = train(case, model, [evaluated_step, standard_step(model), step])
    return unequal(got, expected)


def test_steps_evaluation_and_standard_steps_in_turns_change_no_bit(ranks2: RankPool) -> None:
    assert ranks2.run(differences_in_turns) == [[], []]


# ---- an unchanged script -------------------------------------------------------------------------

SCRIPTS = [
    Case(
        dtype=BF16, float16_module=True, delay=True, ddp={**OVERLAPPED, "grad_reduce_in_fp32": True}
    ),
    Case(ddp={"use_distributed_optimizer": True}),
]


def differences_of_scripts() -> dict[str, list[str]]:
    """megatron-core's function, and what is installed in its place."""
    found: dict[str, list[str]] = {}
    with one_world() as groups:
        for case in SCRIPTS:
            expected = train_by_script(case, trained(case, groups))
            model, called = trained(case, groups), []
            model.ddp.register_forward_pre_hook(lambda *_, called=called: called.append(None))
            model.ddp.config.overlap_moe_expert_parallel_comm = True
            model.ddp.config.delay_wgrad_compute = case.delay
            install()
            try:
                got = train_by_script(case, model)
            finally:
                uninstall()
            assert len(called) == case.microbatches, "evaluation alone calls the model"
            if names := unequal(got, expected):
                found[str(case)] = names
    return found


def test_a_script_with_the_drop_in_installed_trains_to_the_same_bits(ranks2: RankPool) -> None:
    assert ranks2.run(differences_of_scripts) == [{}, {}]


# ---- what is issued when -------------------------------------------------------------------------


def note_before(owner: Any, method: str, note: Callable[[], None]) -> None:
    real = getattr(owner, method)

    def noted(*args: Any, **kwargs: Any) -> Any:
        note()
        return real(*args, **kwargs)

    setattr(owner, method, noted)


def note_waits(bucket: Any, note: Callable[[], None]) -> None:
    """For its reduction, whose handle there is once it is started. (To ask whether it is done is no
    use: gloo's reduce-scatters never say so.)"""
    start = bucket.start_grad_sync

    def started(*args: Any, **kwargs: Any) -> None:
        start(*args, **kwargs)
        note_before(bucket.grad_reduce_handle, "wait", note)

    bucket.start_grad_sync = started


def history_of_a_step(delay: bool) -> tuple[list[str], list[set[str]]]:
    """Words in order of execution, among them ``gather 3``, ``reduce 3`` and ``reduced 3`` where
    bucket group 3 is started and awaited; and by bucket group the units with parameters in it."""
    case = Case(ddp=OVERLAPPED, layers=3, delay=delay, kind=StreamKind.INLINE)
    with one_world() as groups, record() as recording:
        model = trained(case, groups)
        schedule = schedule_of(case, model, core_of(case, model))
        buckets = [*model.ddp.bucket_groups, *model.ddp.expert_parallel_bucket_groups]
        owner = dict.fromkeys((param for _, param in model.named()), "root")
        for index, layer in enumerate(model.parts.layers):
            owner |= dict.fromkeys(layer.module.parameters(), f"L{index}")
        for index, bucket in enumerate(buckets):
            note_before(bucket, "start_param_sync", partial(recording.add, f"gather {index}"))
            note_before(bucket, "start_grad_sync", partial(recording.add, f"reduce {index}"))
            note_waits(bucket, partial(recording.add, f"reduced {index}"))
        schedule.observe(recording)
        schedule.step(model.batches(0, case.microbatches), mean_loss)
        words = list(recording.words)
        model.finalize()
    return words, [{owner[param] for param in bucket.params} for bucket in buckets]


def places(words: list[str], read_or_given: Any, units: set[str]) -> list[int]:
    """Where nodes that read these units, or give them gradients, are."""
    nodes = [(i, parse_action(word)) for i, word in enumerate(words) if word[0].isdigit()]
    return [i for i, node in nodes if units & {*read_or_given(node, has_head=False)}]


@pytest.mark.parametrize("delay", [False, True])
def test_buckets_go_out_one_by_one_within_the_step(ranks2: RankPool, delay: bool) -> None:
    histories = ranks2.run(history_of_a_step, delay)
    words, units = histories[0]
    started = ("gather ", "reduce ")
    collectives = [[w for w in words if w.startswith(started)] for words, _ in histories]
    assert collectives[0] == collectives[1]
    assert sorted(collectives[0]) == sorted(
        f"{op} {index}" for op in ("gather", "reduce") for index in range(len(units))
    )
    assert any(len(each) > 1 for each in units), "no bucket holds two units"
    for index, each in enumerate(units):
        first_reader = places(words, units_read, each)[0]
        assert words.index(f"gather {index}") < first_reader
        last_giver = places(words, units_given, each)[-1]
        reduced = words.index(f"reduce {index}")
        assert last_giver < reduced
        between = words[last_giver + 1 : reduced]
        assert not any(word[0].isdigit() for word in between), f"bucket {index} waited: {between}"
        assert reduced < words.index(f"reduced {index}"), "the lane's event would say nothing"
    nodes = [i for i, word in enumerate(words) if word[0].isdigit()]
    assert nodes[0] < words.index(collectives[0][len(units) - 1]), "all gathers came first"
    assert words.index(collectives[0][len(units)]) < nodes[-1], "all reductions came last"


def counts(ddp: dict[str, Any]) -> tuple[tuple[int, int, int], int]:
    with one_world() as groups:
        case = Case(ddp=ddp, steps=3)
        model = trained(case, groups)
        core = core_of(case, model)
        train(case, model, [scheduled_step(model, schedule_of(case, model, core))])
        stats = core.stats
        num_groups = len(model.ddp.bucket_groups + model.ddp.expert_parallel_bucket_groups)
    return (stats.num_all_gathers, stats.num_reduce_scatters, stats.num_all_reduces), num_groups


def test_switches_that_are_off_leave_collectives_to_megatron(ranks2: RankPool) -> None:
    def of_three_steps(**ddp: Any) -> tuple[int, ...]:
        (found, num_groups), other = ranks2.run(counts, ddp)
        assert other == (found, num_groups)
        return tuple(count // num_groups for count in found)

    assert of_three_steps(**OVERLAPPED) == (3, 3, 0)
    assert of_three_steps(overlap_grad_reduce=True) == (0, 0, 3)
    assert of_three_steps(**{**OVERLAPPED, "overlap_grad_reduce": False}) == (3, 0, 0)
    assert of_three_steps(use_distributed_optimizer=True) == (0, 0, 0)


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


def not_at_rest(model: Trained, core: MegatronDdp, hooks_read: Any) -> list[str]:
    found = []
    for bucket in [*model.ddp.bucket_groups, *model.ddp.expert_parallel_bucket_groups]:
        if (bucket.grad_reduce_handle, bucket.param_gather_handle) != (None, None):
            found.append("a handle is left")
        if bucket.grad_reduce_finished or not bucket.is_last_microbatch:
            found.append("flags of a bucket")
    for name, param in model.named():
        if param.grad is not None or param.main_grad.count_nonzero():
            found.append(f"gradient of {name}")
    if model.ddp.param_to_bucket_group is not hooks_read or core.is_driven:
        found.append("DDP's hooks stand aside")
    return found


def problems_after_failures(kind: StreamKind) -> list[str]:
    case = Case(ddp=OVERLAPPED, delay=True, steps=4, kind=kind)
    found: list[str] = []
    with one_world() as groups:
        model = trained(case, groups)
        expected = train(case, model, [standard_step(model)])
        model = trained(case, groups)
        core = core_of(case, model)
        schedule = schedule_of(case, model, core)
        step = scheduled_step(model, schedule)
        hooks_read = model.ddp.param_to_bucket_group
        last_node = schedule._nodes[case.microbatches - 1, Node.PRE, None]
        bucket = model.ddp.bucket_groups[0]

        def in_last_backward() -> None:
            if armed:
                armed.clear()
                raise OddError("last backward")

        armed: list[bool] = []
        last_node.pre_backward_hooks += (in_last_backward,)
        faults = {
            "first gather": lambda: fail_once(bucket, "start_param_sync"),
            "a forward": lambda: fail_once(model.parts.layers[1], "mlp"),
            "a reduction": lambda: fail_once(bucket, "start_grad_sync"),
            "last backward": lambda: armed.append(True),
        }
        done = iter(faults.items())

        def failing_evaluation(batches: list[Any]) -> list[Tensor]:
            losses = step(batches)
            fail_once(model.parts.layers[1], "mlp")
            with pytest.raises(OddError):
                schedule.evaluate(batches, mean_loss)
            return losses

        def step_after_failure(batches: list[Any]) -> list[Tensor]:
            for place, arm in (next(done), next(done)):
                arm()
                with pytest.raises(OddError) as caught:
                    schedule.step(batches, mean_loss)
                assert any(note.startswith("raised in") for note in caught.value.__notes__)
                found.extend(f"{place}: {what}" for what in not_at_rest(model, core, hooks_read))
            return step(batches)

        steps = [step_after_failure, step_after_failure, failing_evaluation, step]
        got = train(case, model, steps)
        assert next(done, None) is None
    return found + unequal(got, expected)


@pytest.mark.parametrize("kind", [StreamKind.THREAD, StreamKind.INLINE])
def test_a_step_that_fails_leaves_ddp_at_rest_and_the_next_is_right(
    ranks2: RankPool, kind: StreamKind
) -> None:
    assert ranks2.run(problems_after_failures, kind) == [[], []]


# ---- one rank: the door, the sink, and what is refused -------------------------------------------


@pytest.fixture
def model() -> Iterator[Trained]:
    """On one rank, with every switch on."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with one_world() as groups:
            yield trained(Case(ddp=OVERLAPPED), groups)
    finally:
        dist.destroy_process_group()


@pytest.fixture
def core(model: Trained) -> MegatronDdp:
    return core_of(Case(), model)


def a_layers(model: Trained) -> nn.Parameter:
    return next(model.parts.layers[0].module.parameters())


def a_roots(model: Trained) -> nn.Parameter:
    return model.ddp.module.embedding.word_embeddings.weight


def test_a_layers_gradients_are_in_main_grad_at_once(model: Trained, core: MegatronDdp) -> None:
    param = a_layers(model)
    core.begin(Driver.SCHEDULE)
    (param * 2.0).sum().backward()
    core.grad_sink.add(param, torch.full_like(param, 3.0))
    assert param.grad is None
    assert torch.equal(param.main_grad, torch.full_like(param, 5.0))


@pytest.mark.parametrize("ends_with", ["the next node", "the seal"])
def test_a_nodes_delayed_gradients_of_a_root_parameter_are_summed_first(
    model: Trained, core: MegatronDdp, ends_with: str
) -> None:
    param = a_roots(model)
    core.begin(Driver.SCHEDULE)
    (param * 2.0**24).sum().backward()
    core.pre_backward(0)
    for _ in range(2):
        core.grad_sink.add(param, torch.ones_like(param))
    assert torch.equal(param.main_grad, torch.full_like(param, 2.0**24))
    if ends_with == "the seal":
        core.root_unit.seal(0, is_last=True)
    else:
        core.pre_backward(1)
    # One by one, each 1 would be lost: 2**24 + 1 is 2**24 in float32.
    assert torch.equal(param.main_grad, torch.full_like(param, 2.0**24 + 2.0))
    core.end()


@pytest.mark.parametrize(("zero_out_wgrad", "added"), [(False, 0.0), (True, 2.0)])
def test_what_a_fused_kernel_has_added_is_not_added_again(
    model: Trained, core: MegatronDdp, zero_out_wgrad: bool, added: float
) -> None:
    param = a_layers(model)
    core.begin(Driver.SCHEDULE)
    param.grad_added_to_main_grad, param.zero_out_wgrad = True, zero_out_wgrad
    (param * 2.0).sum().backward()
    assert param.grad is None
    assert torch.equal(param.main_grad, torch.full_like(param, added))


class Asked:
    """A sink that notes for which weights a fused gradient was brought."""

    def __init__(self, core: MegatronDdp) -> None:
        self._core = core
        self.weights: list[nn.Parameter] = []

    def add(self, weight: nn.Parameter, grad: Tensor) -> None:
        raise AssertionError("a fused weight gradient has no tensor of its own")

    def destination(self, weight: nn.Parameter) -> Destination:
        self.weights.append(weight)
        return self._core.destination(weight)


def test_fused_weight_gradients_go_straight_to_main_grad(model: Trained, core: MegatronDdp) -> None:
    case = Case(ddp=OVERLAPPED, steps=1)
    unfused = train(case, model, [scheduled_step(model, schedule_of(case, model, core))])
    again = trained(case, model.groups)
    its_core = core_of(case, again)
    sink = Asked(its_core)
    manage_wgrad(again.parts.module, fuse=True, layer_types=WGRAD_LAYERS, sink=sink)
    fused = train(case, again, [scheduled_step(again, schedule_of(case, again, its_core))])
    matrices = {param for name, param in again.named() if ".linear_" in name or "output" in name}
    assert set(sink.weights) == matrices
    assert len(sink.weights) == case.microbatches * len(matrices)
    for name, value in unfused.items():
        torch.testing.assert_close(fused[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_a_weight_gradient_between_steps_is_refused(model: Trained, core: MegatronDdp) -> None:
    weight = a_layers(model)
    for bring in (lambda: core.grad_sink.add(weight, weight), lambda: core.destination(weight)):
        with pytest.raises(RuntimeError, match="no step that it belongs to is under way"):
            bring()


def test_a_second_driver_is_refused(model: Trained, core: MegatronDdp) -> None:
    other = core_of(Case(), model)
    core.begin(Driver.SCHEDULE)
    for each in (core, other):
        with pytest.raises(RuntimeError, match="while a schedule is at work on this model"):
            each.begin(Driver.SCHEDULE)
    core.end()
    other.begin(Driver.SCHEDULE)
    other.end()


def test_a_step_on_gradients_of_the_last_one_is_refused(model: Trained, core: MegatronDdp) -> None:
    case = Case(ddp=OVERLAPPED)
    schedule = schedule_of(case, model, core)
    batches = model.batches(0, case.microbatches)
    schedule.step(batches, mean_loss)
    before = [param.main_grad.clone() for _, param in model.named()]
    with pytest.raises(RuntimeError, match="are still being reduced; after each step call"):
        schedule.step(batches, mean_loss)
    model.finalize()
    with pytest.raises(RuntimeError, match="are still there, reduced; after each step call"):
        schedule.step(batches, mean_loss)
    schedule.evaluate(batches, mean_loss)
    assert all(
        torch.equal(param.main_grad, grad)
        for grad, (_, param) in zip(before, model.named(), strict=True)
    )
    model.ddp.zero_grad_buffer()
    schedule.step(batches, mean_loss)


@pytest.mark.parametrize("reduces", [True, False])
def test_no_sync_around_a_step_that_would_reduce_is_refused(reduces: bool, model: Trained) -> None:
    again = trained(Case(ddp={**OVERLAPPED, "overlap_grad_reduce": reduces}), model.groups)
    core = core_of(Case(), again)
    refused = pytest.raises(RuntimeError, match="a step begins within no_sync, and a schedule's")
    with again.ddp.no_sync(), refused if reduces else nullcontext():
        core.begin(Driver.SCHEDULE)
    if not reduces:
        core.end()
    with again.ddp.no_sync(), torch.no_grad():
        core.begin(Driver.SCHEDULE)


def test_a_core_that_is_gone_leaves_no_hooks(model: Trained) -> None:
    param = a_layers(model)
    core = core_of(Case(), model)
    assert len(param._post_accumulate_grad_hooks) == 1
    del core
    gc.collect()
    assert len(param._post_accumulate_grad_hooks) == 0
    with model.ddp.no_sync():
        (param * 2.0).sum().backward()
    assert torch.equal(param.main_grad, torch.full_like(param, 2.0))


@pytest.mark.parametrize(
    ("setting", "value", "supported"),
    [
        ("use_megatron_fsdp", True, False),
        ("num_distributed_optimizer_instances", 2, 1),
        ("fp8_param_gather", True, False),
        ("fp4_param_gather", True, False),
        ("nccl_ub", True, False),
        ("use_distributed_optimizer", False, True),
    ],
)
def test_settings_of_ddp_are_refused_by_name(
    model: Trained, setting: str, value: object, supported: object
) -> None:
    setattr(model.ddp.ddp_config, setting, value)
    with pytest.raises(ValueError, match=rf"{setting}={value} \(supported: {supported}\)"):
        core_of(Case(), model)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("gtp_weight_remat_size", 2),
        ("expert_gtp_weight_remat_size", 2),
        ("cuda_graph_impl", "local"),
    ],
)
def test_settings_of_the_model_are_refused_by_name(
    model: Trained, setting: str, value: object
) -> None:
    setattr(model.ddp.config, setting, value)
    with pytest.raises(ValueError, match=rf"{setting}={value!r} \(supported"):
        core_of(Case(), model)


def test_layers_that_delay_by_themselves_are_refused(model: Trained) -> None:
    model.ddp.ddp_config.delay_wgrad_compute = True
    core_of(Case(), model)
    a_layers(model).skip_backward_post_hook = True
    with pytest.raises(ValueError, match=r"the layer of decoder\.layers\.0\.\S+ delays its weight"):
        core_of(Case(), model)


def test_another_wrapper_is_refused(model: Trained) -> None:
    with pytest.raises(ValueError, match="got GPTModel, expected megatron-core's DistributedData"):
        MegatronDdp(model.ddp.module, [])


def problem_with_one_group_for_all() -> str:
    with one_world() as groups:
        model = trained(Case(ddp=OVERLAPPED), groups)
        model.ddp.ep_group = model.ddp.intra_dp_cp_group
        with pytest.raises(ValueError, match="over the very process group that the model's layers"):
            core_of(Case(), model)
    return "refused"


def test_a_process_group_of_two_lanes_is_refused(ranks2: RankPool) -> None:
    assert ranks2.run(problem_with_one_group_for_all) == ["refused"] * 2


def test_layers_that_are_not_units_are_refused(model: Trained) -> None:
    first, second = (layer.module for layer in model.parts.layers)
    with pytest.raises(ValueError, match=r"layer 1 \(Linear\) is not a part of the module"):
        MegatronDdp(model.ddp, [first, nn.Linear(1, 1)])
    with pytest.raises(ValueError, match=r"layer 1 \(MoELayer\) .* is in another layer"):
        MegatronDdp(model.ddp, [first, first.mlp])
    second.mlp.router.weight = first.mlp.router.weight
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.router\.weight: shared by a layer"):
        MegatronDdp(model.ddp, [first, second])
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.router\.weight: shared by a layer"):
        MegatronDdp(model.ddp, [first])


def test_a_schedule_needs_the_cores_layers_to_be_its_own(model: Trained) -> None:
    core = MegatronDdp(model.ddp, [model.parts.layers[0].module])
    with pytest.raises(ValueError, match=r"layer 1 .* is not a unit of its own"):
        schedule_of(Case(), model, core)


def test_without_megatron_core_the_import_says_how_to_install_it() -> None:
    script = """
import sys
sys.modules["megatron"] = None
import fsdp_hooks.adapters
print("torch" in sys.modules)
for name in ("megatron_ddp", "megatron_ddp_refused", "megatron_ddp_buckets"):
    try:
        __import__(f"fsdp_hooks.adapters.{name}")
    except ImportError as error:
        print(error)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    hint = "this adapter needs megatron-core 0.19: pip install 'megatron-core<0.20'"
    assert (run.stdout.splitlines(), run.returncode) == (["False", *[hint] * 3], 0), run.stderr
