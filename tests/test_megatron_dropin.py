"""``get_forward_backward_func`` in place of megatron-core's: what it is given, and what it refuses.

``test_megatron_differential.py`` compares it with megatron-core's, model by model.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import megatron.core.pipeline_parallel
import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import MultiModuleProcessGroupCollection
from megatron.core.timers import Timers
from megatron.core.transformer.module import Float16Module
from megatron_script import (
    forward_step,
    grads_of,
    mean_loss,
    microbatches,
    same,
    script,
    sizes,
    token_loss,
    unequal,
)
from torch import Tensor, nn

from ep_overlap.models import megatron_dropin
from ep_overlap.models.groups import lone_expert_groups
from ep_overlap.models.megatron import (
    ForwardBackward,
    get_forward_backward_func,
    install,
    uninstall,
)
from ep_overlap.models.megatron_build import build_gpt
from ep_overlap.models.megatron_cpu import megatron_on_cpu

theirs = schedules.forward_backward_no_pipelining


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    """megatron-core on the CPU, with this process as the whole world."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with megatron_on_cpu():
        yield
    dist.destroy_process_group()


def gpt(overlap: bool = True, dtype: torch.dtype = torch.float32, **settings: Any) -> nn.Module:
    """Weights depend on nothing here, so all models are equal."""
    model = build_gpt(sizes(dtype=dtype), lone_expert_groups(), seed=3)
    model.config.overlap_moe_expert_parallel_comm = overlap
    for name, value in settings.items():
        assert name in vars(model.config)
        setattr(model.config, name, value)
    return model


def run(function: Callable[..., Any], model: nn.Module, /, **arguments: Any) -> Any:
    if "pg_collection" not in arguments:
        inner = model.module if isinstance(model, Float16Module) else model
        arguments["pg_collection"] = inner.pg_collection
    return script(function, model, **arguments)


def assert_equal_to_theirs(arguments: dict[str, Any], **settings: Any) -> None:
    expected = run(theirs, gpt(overlap=False, **settings), **arguments)
    got = run(get_forward_backward_func(), gpt(**settings), **arguments)
    assert unequal(got, expected) == []
    assert all(grad is not None for grad in got.grads.values())


# ---- arguments -----------------------------------------------------------------------------------


def arguments_of(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    parameters = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default) for each in parameters]


def test_both_functions_take_what_megatrons_take() -> None:
    assert arguments_of(get_forward_backward_func) == arguments_of(
        schedules.get_forward_backward_func
    )
    assert arguments_of(ForwardBackward()) == arguments_of(theirs)


def test_a_model_and_an_iterator_may_come_in_lists_of_one() -> None:
    model = gpt()
    expected = run(theirs, gpt(overlap=False))
    logged = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[microbatches(2)],
        model=[model],
        num_microbatches=2,
        seq_length=8,
        micro_batch_size=2,
        decoder_seq_length=8,
        p2p_communicator=None,
        pg_collection=model.pg_collection,
    )
    assert same(logged, expected.logged[0])
    assert same(grads_of(model), expected.grads)


@pytest.mark.parametrize("name", ["model", "data_iterator"])
def test_several_chunks_are_refused(name: str) -> None:
    model = gpt()
    chunks = {"model": model, "data_iterator": microbatches(2)}
    chunks[name] = [chunks[name], chunks[name]]
    with pytest.raises(ValueError, match=f"^{name} has 2 chunks, expected 1: virtual pipeline"):
        run(get_forward_backward_func(), model, **chunks)


@pytest.mark.parametrize(
    "sizes",
    [{"pp_size": 2}, {"pp_size": 2, "vp_size": 2}, {"vp_size": 2}],
    ids=str,
)
def test_pipeline_stages_are_refused(sizes: dict[str, int]) -> None:
    name, size = next(iter(sizes.items()))
    with pytest.raises(ValueError, match=f"^{name}={size}, expected 1: pipeline stages are not"):
        get_forward_backward_func(**sizes)


def test_a_collection_of_several_modules_is_refused() -> None:
    several = MultiModuleProcessGroupCollection(module_pgs={"a": gpt().pg_collection})
    with pytest.raises(ValueError, match=r"^schedule_pg_collection is of several modules"):
        get_forward_backward_func(schedule_pg_collection=several)


@pytest.mark.parametrize(
    "arguments",
    [{"adjust_tensor_shapes_fn": print}, {"collect_non_loss_data": True}],
    ids=lambda arguments: next(iter(arguments)),
)
def test_arguments_without_a_meaning_in_an_overlapped_step_are_refused(
    arguments: dict[str, Any],
) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(arguments))} is set, and the overlapped"):
        run(get_forward_backward_func(), gpt(), **arguments)


def test_groups_that_are_left_out_are_those_of_parallel_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``docs/examples/train_gpt.py`` has them set up; here they are the model's."""
    seen: list[Any] = []

    def finalize(model: list[nn.Module], total: Tensor | None, **others: Any) -> None:
        seen.append(others["pg_collection"])

    model = gpt(finalize_model_grads_func=finalize)
    monkeypatch.setattr(schedules, "_build_default_pg_collection", lambda: model.pg_collection)
    got = run(get_forward_backward_func(), model, pg_collection=None)
    assert seen == [model.pg_collection]
    assert unequal(got, run(theirs, gpt(overlap=False))) == []


# ---- the config ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("overlap", "num_calls"), [(True, 0), (False, 3)])
def test_the_flag_alone_says_whether_the_model_is_called_or_scheduled(
    overlap: bool, num_calls: int
) -> None:
    model, calls = gpt(overlap=overlap), []
    model.register_forward_pre_hook(lambda *_: calls.append(None))
    run(get_forward_backward_func(), model, num_microbatches=3)
    assert len(calls) == num_calls


@pytest.mark.parametrize("loss_func", [mean_loss, token_loss])
@pytest.mark.parametrize("per_token", [False, True])
def test_losses_over_tokens_or_microbatches_equal_megatrons(
    loss_func: Callable[..., Any], per_token: bool
) -> None:
    step = partial(forward_step, loss_func=loss_func)
    assert_equal_to_theirs({"forward_step_func": step}, calculate_per_token_loss=per_token)


def test_a_loss_scale_scales_gradients_and_nothing_else() -> None:
    scale = {"grad_scale_func": lambda loss: loss * 64}
    assert_equal_to_theirs({}, **scale)
    scaled = run(get_forward_backward_func(), gpt(**scale))
    plain = run(get_forward_backward_func(), gpt())
    assert same(scaled.logged, plain.logged)
    # A power of two: exact.
    assert all(torch.equal(scaled.grads[name], grad * 64) for name, grad in plain.grads.items())


@pytest.mark.parametrize("force_all_reduce", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
def test_gradients_are_finalized_once_after_all_of_them(
    per_token: bool, force_all_reduce: bool
) -> None:
    def finalizing(calls: list[Any]) -> Callable[..., None]:
        def finalize(models: list[nn.Module], total: Tensor | None, **others: Any) -> None:
            calls.append((models, total, others, grads_of(models[0])))

        return finalize

    step = partial(forward_step, loss_func=token_loss)
    both: list[list[Any]] = []
    for function, overlap in ((theirs, False), (get_forward_backward_func(), True)):
        both.append([])
        model = gpt(
            overlap,
            calculate_per_token_loss=per_token,
            finalize_model_grads_func=finalizing(both[-1]),
        )
        left = run(function, model, forward_step_func=step, force_all_reduce=force_all_reduce)
        [(models, _, others, grads)] = both[-1]
        assert models == [model]
        assert same(grads, left.grads)
        assert others == {
            "pg_collection": model.pg_collection,
            "force_all_reduce": force_all_reduce,
        }
    (_, total, _, _), (_, expected, _, _) = both[1][0], both[0][0]
    assert same(total, expected)
    assert (total is None) == (not per_token)
    assert total is None or total == sum(mask.sum() for *_, mask in microbatches(2))


def test_the_step_is_timed_as_forward_and_backward_together() -> None:
    timers = Timers(log_level=2, log_option="minmax")
    model = gpt(timers=timers, barrier_with_L1_time=True)
    for _ in range(2):
        run(get_forward_backward_func(), model)
    assert list(timers._timers) == ["forward-backward"]
    assert timers("forward-backward").elapsed() > 0
    assert unequal(run(ForwardBackward(), gpt(timers=timers)), run(ForwardBackward(), gpt())) == []


def test_a_step_that_fails_leaves_its_timer_and_the_model_ready_for_the_next() -> None:
    def failing(mask: Tensor, output: Tensor) -> Any:
        raise ZeroDivisionError("the loss of a test")

    timers = Timers(log_level=2, log_option="minmax")
    model, function = gpt(timers=timers), get_forward_backward_func()
    with pytest.raises(ZeroDivisionError, match=r"^the loss of a test\n"):
        run(function, model, forward_step_func=partial(forward_step, loss_func=failing))
    assert unequal(run(function, model), run(theirs, gpt(overlap=False))) == []


@pytest.mark.parametrize(
    "name",
    [
        "defer_embedding_wgrad_compute",
        "enable_autocast",
        "gradient_accumulation_fusion",
        "hybrid_context_parallel",
    ],
)
def test_settings_of_the_step_that_are_not_supported_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} is set, and the overlapped step does not"):
        run(get_forward_backward_func(), gpt(**{name: True}))


def test_a_no_sync_func_without_a_wrapper_that_the_schedule_knows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^no_sync_func is set, and the model is in no wrapper"):
        run(get_forward_backward_func(), gpt(no_sync_func=lambda: None))


def test_settings_of_the_model_that_are_not_supported_are_refused() -> None:
    with pytest.raises(ValueError, match=r"context_parallel_size=2 \(supported: 1\)"):
        run(get_forward_backward_func(), gpt(context_parallel_size=2))


def test_layers_are_told_of_the_first_microbatch_as_by_megatron() -> None:
    """Transformer Engine's read it, where a recipe of quantisation is set."""
    for function, overlap in ((theirs, False), (get_forward_backward_func(), True)):
        model = gpt(overlap, quant_recipe=object())
        model.output_layer.is_first_microbatch = False
        run(function, model)
        assert model.output_layer.is_first_microbatch


# ---- evaluation ----------------------------------------------------------------------------------


def summed(mask: Tensor, output: Tensor, non_loss_data: bool = False) -> Any:
    assert non_loss_data
    return (output * mask).sum()


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {
            "collect_non_loss_data": True,
            "forward_step_func": partial(forward_step, loss_func=summed),
        },
    ],
    ids=["losses", "other data"],
)
def test_evaluation_between_steps_is_megatrons_and_leaves_training_as_it_was(
    arguments: dict[str, Any],
) -> None:
    def evaluate(function: Callable[..., Any], model: nn.Module) -> list[Any]:
        with torch.no_grad():
            logged = run(
                function, model, num_microbatches=3, seed=7, forward_only=True, **arguments
            ).logged
        assert all(grad is None or grad.any() for grad in grads_of(model).values())
        return logged

    function, model, twin = get_forward_backward_func(), gpt(), gpt()
    evaluated = [evaluate(function, model)]
    for _ in range(2):
        run(function, model)
        evaluated.append(evaluate(function, model))
    assert all(same(each, evaluate(theirs, gpt())) for each in evaluated)
    assert len(evaluated[0][0]) == 3
    run(function, twin)
    assert same(grads_of(model), run(function, twin).grads)


def test_the_first_step_of_validation_is_told_to_the_layers() -> None:
    for first in (False, True):
        model = gpt(quant_recipe=object())
        model.output_layer.is_first_microbatch = False
        with torch.no_grad():
            run(get_forward_backward_func(), model, forward_only=True, first_val_step=first)
        assert model.output_layer.is_first_microbatch is first


# ---- how the script calls its model --------------------------------------------------------------

Step = Callable[[Iterator[Any], Any], Any]


def twice(data: Iterator[Any], model: Any) -> Any:
    forward_step(data, model)
    return forward_step(data, model)


def never(data: Iterator[Any], model: Any) -> Any:
    return torch.zeros(()), mean_loss


def past_the_stand_in(data: Iterator[Any], model: Any) -> Any:
    return forward_step(data, model.forward)


def nothing(data: Iterator[Any], model: Any) -> Any:
    return None, forward_step(data, model)[1]


def other(data: Iterator[Any], model: Any) -> Any:
    return torch.ones(3), forward_step(data, model)[1]


def without_loss(data: Iterator[Any], model: Any) -> Any:
    return forward_step(data, model)[0], None


def with_argument(data: Iterator[Any], model: Any) -> Any:
    tokens, labels, _ = next(data)
    return model(tokens, tokens, None, labels=labels, runtime_gather_output=False), mean_loss


def misspelt(data: Iterator[Any], model: Any) -> Any:
    tokens, *_ = next(data)
    return model(tokens, tokens, None, label=tokens), mean_loss


MISUSE: list[tuple[Step, type[Exception], str]] = [
    (twice, ValueError, "forward_step_func called the model twice, expected one call"),
    (never, ValueError, "forward_step_func returned without calling the model; expected it to"),
    (past_the_stand_in, ValueError, "forward_step_func returned without calling the model; exp"),
    (nothing, ValueError, "forward_step_func returned None, expected the model's output. The"),
    (other, ValueError, "forward_step_func returned a Tensor, expected the model's output. The"),
    (without_loss, ValueError, "forward_step_func returned None as its loss function, expected"),
    (with_argument, ValueError, "the model is called with runtime_gather_output, which the over"),
    (misspelt, TypeError, "got an unexpected keyword argument 'label'"),
]


@pytest.mark.parametrize(("step", "kind", "text"), MISUSE, ids=lambda value: str(value)[:30])
def test_misuse_is_told_before_anything_runs(step: Step, kind: type[Exception], text: str) -> None:
    model, ran = gpt(), []
    for layer in model.modules():
        layer.register_forward_pre_hook(lambda *_: ran.append(None))
    with pytest.raises(kind) as raised:
        run(get_forward_backward_func(), model, forward_step_func=step)
    assert str(raised.value).startswith(text)
    assert (ran == []) == (step is not past_the_stand_in)


@pytest.mark.parametrize(
    "change",
    [lambda output: output * 2, lambda output: output.float(), torch.sum, lambda output: output[0]],
    ids=["operator", "method", "function", "index"],
)
def test_an_output_that_is_used_too_early_is_explained(change: Callable[[Any], Any]) -> None:
    def step(data: Iterator[Any], model: Any) -> Any:
        output, loss_func = forward_step(data, model)
        return change(output), loss_func

    with pytest.raises((AttributeError, TypeError)) as raised:
        run(get_forward_backward_func(), gpt(), forward_step_func=step)
    [note] = raised.value.__notes__
    assert note.startswith("The model's output is not made yet when forward_step_func runs")


def test_an_error_of_the_scripts_own_comes_out_as_it_is() -> None:
    def step(data: Iterator[Any], model: Any) -> Any:
        return None + 1

    with pytest.raises(TypeError) as raised:
        run(get_forward_backward_func(), gpt(), forward_step_func=step)
    assert not hasattr(raised.value, "__notes__")


def test_the_end_of_the_data_comes_out_as_it_is() -> None:
    with pytest.raises(StopIteration):
        run(get_forward_backward_func(), gpt(), data_iterator=microbatches(1))


def test_the_script_sees_its_model_in_all_but_the_call() -> None:
    model, seen = gpt(), []

    def step(data: Iterator[Any], given: Any) -> Any:
        seen.append((given.config, given.vp_stage, given.training))
        return forward_step(data, given)

    run(get_forward_backward_func(), model, forward_step_func=step)
    assert seen == [(model.config, None, True)] * 2


def test_a_model_without_labels_hands_its_scores_to_the_loss() -> None:
    def scores_loss(output: Tensor) -> tuple[Tensor, Tensor]:
        assert output.shape == (2, 8, 256)
        return output.square().mean(), output.detach().clone()

    def step(data: Iterator[Any], model: Any) -> Any:
        tokens, *_ = next(data)
        positions = torch.arange(8).expand(2, -1)
        return model(tokens, positions, torch.ones(8, 8).triu(1).bool()[None, None]), scores_loss

    assert_equal_to_theirs({"forward_step_func": step})


# ---- wrappers ------------------------------------------------------------------------------------


def test_a_bf16_module_is_seen_through_its_float16_module() -> None:
    """Which makes float32 of scores."""
    dtypes: list[torch.dtype] = []

    def scores_loss(output: Tensor) -> tuple[Tensor, Tensor]:
        dtypes.append(output.dtype)
        return output.square().mean(), output.detach().clone()

    def step(data: Iterator[Any], model: Any) -> Any:
        tokens, *_ = next(data)
        positions = torch.arange(8).expand(2, -1)
        return model(tokens, positions, torch.ones(8, 8).triu(1).bool()[None, None]), scores_loss

    for forward in (forward_step, step):
        models = []
        for overlap in (False, True):
            inner = gpt(overlap, dtype=torch.bfloat16)
            models.append(Float16Module(inner.config, inner))
        expected = run(theirs, models[0], forward_step_func=forward)
        got = run(get_forward_backward_func(), models[1], forward_step_func=forward)
        assert unequal(got, expected) == []
        assert got.grads["module.output_layer.weight"].dtype is torch.bfloat16
    assert set(dtypes) == {torch.float32}


class Wrapper(nn.Module):
    """Of nobody's that the schedule knows."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.config = module.config


def test_unknown_wrappers_are_refused_wherever_they_are() -> None:
    model = gpt(dtype=torch.bfloat16)
    inside = Float16Module(model.config, Wrapper(model))
    for wrapped in (Wrapper(model), inside):
        with pytest.raises(ValueError, match=r"^the model is wrapped in Wrapper, which the over"):
            run(get_forward_backward_func(), wrapped, pg_collection=model.pg_collection)


def test_an_unknown_wrapper_is_taken_with_a_life_cycle_of_its_own() -> None:
    model = gpt()
    function = ForwardBackward(lifecycle_of=lambda model, layers: None)
    run(function, Wrapper(model), pg_collection=model.pg_collection)
    assert same(grads_of(model), run(theirs, gpt(overlap=False)).grads)


def test_a_module_that_holds_no_gpt_model_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.config = gpt().config
    with pytest.raises(ValueError, match=r"^Linear holds no GPTModel and no HybridModel; exp"):
        run(get_forward_backward_func(), model, pg_collection=gpt().pg_collection)


# ---- schedules -----------------------------------------------------------------------------------


@pytest.fixture
def num_built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of microbatches of each schedule built."""
    built: list[int] = []
    real = megatron_dropin.OverlapSchedule

    def build(parts: Any, config: Any, **others: Any) -> Any:
        built.append(config.num_microbatches)
        return real(parts, config, **others)

    monkeypatch.setattr(megatron_dropin, "OverlapSchedule", build)
    return built


@pytest.mark.parametrize("delay", [False, True])
def test_a_schedule_is_built_once_for_each_number_of_microbatches(
    num_built: list[int], delay: bool
) -> None:
    numbers = (1, 2, 2, 3, 2, 1)
    ours, expected = gpt(delay_wgrad_compute=delay), gpt(overlap=False)
    function = get_forward_backward_func()
    for seed, number in enumerate(numbers):
        arguments = {"num_microbatches": number, "seed": seed}
        got = run(function, ours, **arguments)
        assert unequal(got, run(theirs, expected, **arguments)) == []
    assert num_built == [1, 2, 3]


def test_a_function_asked_for_anew_at_every_step_gives_the_same_results() -> None:
    ours, expected = gpt(), gpt(overlap=False)
    for seed in range(3):
        got = run(get_forward_backward_func(), ours, seed=seed)
        assert unequal(got, run(theirs, expected, seed=seed)) == []


def test_one_function_serves_several_models() -> None:
    function, models = get_forward_backward_func(), (gpt(), gpt())
    expected = run(theirs, gpt(overlap=False))
    assert [unequal(run(function, model), expected) for model in models] == [[], []]


def test_delayed_weight_gradients_may_be_turned_on_and_off() -> None:
    ours, expected = gpt(), gpt(overlap=False)
    function = get_forward_backward_func()
    for seed, (overlap, delay) in enumerate(
        [(True, True), (True, False), (True, True), (False, False), (True, True)]
    ):
        ours.config.overlap_moe_expert_parallel_comm = overlap
        ours.config.delay_wgrad_compute = delay
        got = run(function, ours, seed=seed)
        assert unequal(got, run(theirs, expected, seed=seed)) == [], (seed, overlap, delay)


def test_hints_for_megatrons_own_schedule_warn_and_change_nothing() -> None:
    hints = ("high_priority_a2a_comm_stream", "ep_overlap_early_attn_memory_release")
    expected = run(theirs, gpt(overlap=False))
    with pytest.warns(UserWarning, match="has no effect: it is a hint") as caught:
        got = run(get_forward_backward_func(), gpt(**dict.fromkeys(hints, True)))
    told = [str(each.message).partition(" ")[0] for each in caught]
    assert [name for name in told if name in hints] == list(hints)
    assert unequal(got, expected) == []


def test_local_layers_are_not_replayed_from_cuda_graphs() -> None:
    with pytest.raises(ValueError, match="cuda_graphs with local layers, expected Transformer"):
        run(ForwardBackward(cuda_graphs=True), gpt())


# ---- install -------------------------------------------------------------------------------------


def test_install_replaces_megatrons_wherever_it_was_imported_and_uninstall_puts_it_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = schedules.get_forward_backward_func
    script_module = ModuleType("a_script")
    exec(
        "from megatron.core.pipeline_parallel import get_forward_backward_func as get\n"
        "from ep_overlap.models.megatron import get_forward_backward_func as chosen\n",
        vars(script_module),
    )
    monkeypatch.setitem(sys.modules, "a_script", script_module)
    monkeypatch.setitem(sys.modules, "not_a_module", None)
    training = pytest.importorskip("megatron.training.training")
    holders = (training, schedules, megatron.core.pipeline_parallel)
    install()
    try:
        for get in (script_module.get, *(each.get_forward_backward_func for each in holders)):
            assert isinstance(get(), ForwardBackward)
        exec(
            "from megatron.core.pipeline_parallel import get_forward_backward_func as late",
            vars(script_module),
        )
    finally:
        uninstall()
    assert [each.get_forward_backward_func for each in holders] == [original] * 3
    assert (script_module.get, script_module.late) == (original, original)
    assert script_module.chosen is get_forward_backward_func
    assert get_forward_backward_func.__module__ == megatron_dropin.__name__


def test_installed_or_not_what_is_not_overlapped_is_megatrons_own() -> None:
    expected = run(theirs, gpt(overlap=False))
    install()
    try:
        got = run(schedules.get_forward_backward_func(), gpt(overlap=False))
    finally:
        uninstall()
    assert unequal(got, expected) == []


def test_what_is_installed_takes_options_and_the_last_ones_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[dict[str, Any]] = []
    init = ForwardBackward.__init__

    def noted(self: ForwardBackward, **options: Any) -> None:
        taken.append(options)
        init(self, **options)

    monkeypatch.setattr(ForwardBackward, "__init__", noted)
    original = schedules.get_forward_backward_func
    install(order="paired")
    install(order="plain", max_unsharded_units=2)
    try:
        taken.clear()
        schedules.get_forward_backward_func(pp_size=1)
        with pytest.raises(ValueError, match="pp_size=2"):
            schedules.get_forward_backward_func(pp_size=2)
    finally:
        uninstall()
    assert taken == [{"order": "plain", "max_unsharded_units": 2}]
    assert schedules.get_forward_backward_func is original


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recompute_granularity": "selective"}, "recompute_granularity 'selective'"),
        ({"order": "pair"}, "unknown order 'pair'"),
        ({"max_unsharded_units": 0}, "max_unsharded_units"),
        ({"cuda_graphs": "yes"}, "cuda_graphs is 'yes', expected True or False"),
    ],
)
def test_a_wrong_option_is_refused_before_there_is_a_model(
    options: dict[str, Any], words: str
) -> None:
    for take in (ForwardBackward, install):
        with pytest.raises(ValueError, match=words):
            take(**options)
    assert schedules.get_forward_backward_func().__name__ == "forward_backward_no_pipelining"
