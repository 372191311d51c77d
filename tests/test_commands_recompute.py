"""The flags of activation recompute as a user gives them: plans, refusals, warnings, training."""

import re
from pathlib import Path
from typing import Any

import pytest
from test_commands_run import OVERLAP, SHARDED, SMALL, result_of
from test_commands_wgrad import DELAY, DISPATCH, FUSE, SHARED, TINY, args_of, trained

from ep_overlap.cli import main
from ep_overlap.commands import train as train_file
from ep_overlap.commands.argument_checks import problems, remarks
from ep_overlap.commands.arguments import BenchArguments, PlanArguments, TrainArguments
from ep_overlap.commands.bench import config_of, table, variants_of
from ep_overlap.commands.plan_arguments import plan_of
from ep_overlap.commands.running import recipe_of
from ep_overlap.commands.train import overlap_config
from ep_overlap.commands.trainee import Recipe, build_trainee
from ep_overlap.config import OverlapConfig
from ep_overlap.plan.order import OrderName, computes_of
from ep_overlap.report.trace_file import read_trace

FULL = "--recompute-granularity full"
SELECTIVE = "--recompute-granularity selective"
MODULES = "--recompute-modules core_attn layernorm mlp shared_experts"
DENSE_TOO = "--num-layers 3 --moe-layer-freq 2"


def train_args(line: str) -> TrainArguments:
    args = args_of(f"train {line}")
    assert isinstance(args, TrainArguments)
    return args


# ---- what is asked for ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "order"),
    [(FULL, OrderName.SERIAL), (f"{FULL} {OVERLAP} --order plain", OrderName.PLAIN)],
)
def test_full_is_asked_of_the_schedule_alone(flags: str, order: OrderName) -> None:
    args = train_args(flags)
    assert overlap_config(args) == OverlapConfig(
        num_microbatches=4, order=order, recompute_granularity="full"
    )
    assert recipe_of(args).recompute_modules == ()
    assert plan_of(args).recomputes


@pytest.mark.parametrize(
    ("flags", "modules"),
    [
        (SELECTIVE, ("core_attn",)),
        (f"{SELECTIVE} --recompute-modules mlp", ("mlp",)),
        (f"{SELECTIVE} {MODULES}", ("core_attn", "layernorm", "mlp", "shared_experts")),
    ],
)
def test_selective_is_asked_of_the_model_alone(flags: str, modules: tuple[str, ...]) -> None:
    args = train_args(f"{flags} {OVERLAP}")
    assert recipe_of(args).recompute_modules == modules
    assert overlap_config(args).recompute_granularity is None
    assert not plan_of(args).recomputes


def test_plan_shows_the_recomputed_layers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"plan {FULL} --num-layers 1 --num-microbatches 1".split()) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0] == "serial: layers 1 moe, microbatches 1, recomputed, no_shard"
    assert [line.split()[1:] for line in lines[9:14]] == [
        ["0R.attn.L0"],
        ["0RSYNC.L0", "0R.dispatch.L0"],
        ["0R.mlp.L0", "0R.combine.L0"],
        ["0R.finish.L0"],
        ["0B.finish.L0", "0B.combine.L0"],
    ]
    assert said.err == ""


def test_bench_recomputes_in_every_variant() -> None:
    args = args_of(f"bench {FULL} {DELAY} {DISPATCH}")
    assert isinstance(args, BenchArguments)
    configs = [config_of(args, name) for name in variants_of(args)]
    found = [config and (config.order, config.recompute_granularity) for config in configs]
    orders = ("serial", "serial", "plain", "paired", "paired")
    assert found == [(order, "full") for order in orders]
    without = args_of("bench")
    assert isinstance(without, BenchArguments)
    assert config_of(without, "off") is None


def test_the_table_of_bench_says_what_is_recomputed() -> None:
    variant = {"step_time_s": 1.0, "hidden_share": None, "first_loss": 2.0, "last_loss": 1.0}
    result: dict[str, Any] = {
        "model": "megatron",
        "num_ranks": 2,
        "link": "plain",
        "strategy": "no_shard",
        "rounds": 3,
        "gradient_accumulation_fusion": True,
        "recompute_granularity": "selective",
        "variants": {"off": variant},
        "delayed_of_paired": None,
        "compute_s": 1.0,
        "comm_s": None,
        "hidden_share": {},
    }
    title = str(table(result).title)
    assert "no_shard, fused weight gradients, selective recompute, median of 3" in title
    assert "recompute" not in str(table(result | {"recompute_granularity": None}).title)


# ---- what is refused, what changes nothing -------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        *(
            (
                f"{command} --recompute-modules mlp {flags}",
                "--recompute-modules mlp: expected --recompute-granularity selective beside it, "
                f"got {got}; add it, or leave them out",
            )
            for command in ("train", "plan", "bench")
            for flags, got in (("", "none"), (FULL, "full"))
        ),
        *(
            (
                f"{command} --model reference {SELECTIVE}",
                "--recompute-granularity selective with --model reference: it recomputes no parts "
                "of a layer; take full, or --model megatron",
            )
            for command in ("train", "bench")
        ),
        (
            f"plan {FULL} {OVERLAP} {SHARDED} --max-unsharded-units 1",
            "max-unsharded-units is too small",
        ),
    ],
)
def test_what_cannot_work_is_refused(line: str, problem: str) -> None:
    assert problem in next(problems(args_of(line), {}))


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--recompute-granularity some", "expected one of selective, full; got 'some'"),
        (
            f"{SELECTIVE} --recompute-modules core_attn moe",
            "expected one of core_attn, layernorm, mlp, shared_experts; got 'moe'",
        ),
        (f"{SELECTIVE} --recompute-modules", "expected at least one argument"),
        (f"{FULL} --recompute-method uniform", "unrecognized arguments: --recompute-method"),
    ],
)
def test_values_that_are_none_are_refused(
    flags: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(f"train {flags}".split())
    said = capsys.readouterr().err
    assert problem in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "remark"),
    [
        (f"plan {SELECTIVE}", f"{SELECTIVE} does not change a plan: what it names lies within"),
        (
            f"train {SELECTIVE} --recompute-modules mlp core_attn",
            "--recompute-modules mlp has no effect: every layer has experts (--moe-layer-freq)",
        ),
        (
            f"bench {SELECTIVE} --num-layers 1 --moe-layer-freq 2 --recompute-modules mlp",
            "--recompute-modules mlp has no effect: every layer has experts (--moe-layer-freq)",
        ),
        (
            f"train {SELECTIVE} --recompute-modules shared_experts",
            "shared_experts has no effect without --moe-shared-expert-intermediate-size",
        ),
        (f"train {FULL} {DELAY}", f"{DELAY} hides nothing without {OVERLAP}: "),
        (f"bench --sharding {FULL}", "--recompute-granularity has no effect with --sharding"),
        (f"bench --wgrad-fusion {FULL}", "--recompute-granularity has no effect with --wgrad-"),
        (f"bench --host-overhead {FULL}", "--recompute-granularity has no effect with --host-"),
        (f"bench --suite multi-gpu {FULL}", "--recompute-granularity has no effect with --suite"),
        (f"bench --against megatron {FULL}", "--recompute-granularity has no effect with --again"),
    ],
)
def test_a_setting_without_effect_is_remarked(line: str, remark: str) -> None:
    (said,) = remarks(args_of(line), {})
    assert remark in said


@pytest.mark.parametrize(
    "line",
    [
        f"train {SELECTIVE} {MODULES} {DENSE_TOO} {SHARED}",
        f"train {FULL} --expert-model-parallel-size 1",
        f"train {FULL} {SHARDED} --max-unsharded-units 1",
        f"plan {FULL} {OVERLAP} {DELAY}",
        f"bench {FULL}",
    ],
)
def test_settings_with_effect_are_not_remarked(line: str) -> None:
    assert list(remarks(args_of(line), {})) == []


@pytest.mark.parametrize("recomputes", [False, True])
def test_an_order_file_must_say_what_the_flags_say(
    recomputes: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes: dict[str, Any] = {"num_layers": 2, "overlap_moe_expert_parallel_comm": True}
    granularity = args_of(f"plan {FULL}")
    assert isinstance(granularity, PlanArguments)
    full = granularity.recompute_granularity
    text = plan_of(PlanArguments(**sizes, recompute_granularity=full if recomputes else None))
    order = tmp_path / "order.txt"
    order.write_text(text.order_text())
    line = f"plan {OVERLAP} --num-layers 2 --order {order}"
    own, other = (FULL, "") if recomputes else ("", FULL)
    assert main(f"{line} {own}".split()) == 0
    capsys.readouterr()
    assert main(f"{line} {other}".split()) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"ep-overlap plan: error: --order {order}: ")
    assert re.search(r"R nodes, such as 0R\.attn\.L0.*--recompute-granularity full", said)
    assert "recompute_granularity" not in said
    assert said.count("\n") == 1


# ---- training ------------------------------------------------------------------------------------


def test_two_ranks_recompute_layers_bitwise(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    flags = f"{DENSE_TOO} {SHARED} {FULL} {OVERLAP} {DELAY} {FUSE} {SHARDED}"
    result = result_of(
        f"train {SMALL} {flags} --train-iters 2 --check-parity --trace {trace}",
        tmp_path / "out.json",
    )
    assert (result["parity"], result["hook_misses"]) == ("bitwise", 0)
    planned = {str(node) for node in computes_of(plan_of(train_args(flags)).actions)}
    assert {"3R.attn.L0", "0R.mlp.L1", "1B.finish.L2"} <= planned
    assert planned <= {span.word for span in read_trace(trace).spans}


def test_two_ranks_recompute_parts_of_layers_bitwise(tmp_path: Path) -> None:
    flags = f"{DENSE_TOO} {SHARED} {SELECTIVE} {MODULES} {OVERLAP} {DELAY} {FUSE} {SHARDED}"
    result = result_of(
        f"train {SMALL} {flags} --train-iters 2 --check-parity", tmp_path / "out.json"
    )
    assert (result["parity"], result["hook_misses"]) == ("bitwise", 0)


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize(
    "flags",
    [
        f"--model reference {FULL}",
        f"--model reference {FULL} {DISPATCH} {FUSE}",
        f"{FULL} {DELAY} {SHARDED}",
        f"{SELECTIVE} {DELAY} {FUSE}",
    ],
)
def test_without_overlap_it_is_bitwise_the_standard_step(flags: str, tmp_path: Path) -> None:
    assert trained(f"{TINY} {flags} --check-parity", tmp_path)["parity"] == "bitwise"


@pytest.mark.usefixtures("rank")
def test_the_twin_of_a_parity_check_recomputes_the_same_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the model's: a norm that is recomputed sums its gradients in another order."""
    settings: list[object] = []

    def build(recipe: Recipe, *others: Any) -> Any:
        trainee = build_trainee(recipe, *others)
        config: Any = trainee.module.config
        settings.append((config.recompute_granularity, config.recompute_modules))
        return trainee

    monkeypatch.setattr(train_file, "build_trainee", build)
    trained(f"{TINY} --train-iters 1 {SELECTIVE} {MODULES} {SHARED} --check-parity", tmp_path)
    expected = ("selective", ["core_attn", "layernorm", "mlp", "shared_experts"])
    assert settings == [expected, expected]
