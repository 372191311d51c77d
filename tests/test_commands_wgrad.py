"""The flags of weight gradients as a user gives them to runs: what trains, what is measured.

Combinations run in this process as the only rank of their world, a few on two ranks.
"""

import json
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_commands_checkpoint import SERIES, in_two_parts, record_of
from test_commands_run import OVERLAP, SHARDED, SMALL, result_of
from torch import nn

from ep_overlap.cli import main
from ep_overlap.commands import trainee as trainee_file
from ep_overlap.commands.argument_checks import problems
from ep_overlap.commands.argument_parser import parse
from ep_overlap.commands.arguments import (
    Arguments,
    BenchArguments,
    PlanArguments,
    TrainArguments,
)
from ep_overlap.commands.bench import config_of, variants_of
from ep_overlap.commands.checkpoint_record import RECORD_FILE
from ep_overlap.commands.plan_arguments import plan_of
from ep_overlap.commands.running import recipe_of
from ep_overlap.commands.train import overlap_config
from ep_overlap.commands.trainee import build_trainee
from ep_overlap.commands.world import Meshes, open_world
from ep_overlap.plan.order import computes_of
from ep_overlap.report.trace_file import read_trace
from fsdp_hooks.wgrad import ManagedLayer
from fsdp_hooks.wgrad_layers import DelayedWgrad, LayerTypes, delayed_wgrad

DELAY = "--delay-wgrad-compute"
FUSE = "--gradient-accumulation-fusion"
DISPATCH = "--overlap-dispatch-backward-with-experts-wgrad"
SHARED = "--moe-shared-expert-intermediate-size 24"
NUM_USES = 23
"""Of managed weights by a forward of the reference model: in each of two layers QKV, projection,
router, and four experts of two matrices; and the output layer."""
TINY = f"--num-layers 2 --num-microbatches 2 --train-iters 2 {SMALL}"


def trained(flags: str, directory: Path) -> dict[str, Any]:
    """The result of ``train`` in this process."""
    path = directory / "out.json"
    assert main(["train", *f"{flags} --json {path}".split()]) == 0
    return json.loads(path.read_text())


def args_of(line: str) -> Arguments:
    return parse(line.split())[1]


def wgrads(words: set[str]) -> set[str]:
    """The kinds of W nodes among words: ``W.attn`` of ``1W.attn.L0``."""
    return {found[1] for word in words if (found := re.fullmatch(r"\d+(W\.\w+)\.L\d+", word))}


# ---- train ---------------------------------------------------------------------------------------

COMBINATIONS = [
    f"{DELAY}",
    f"{DELAY} {FUSE}",
    f"{DISPATCH}",
    f"{DISPATCH} {DELAY}",
    f"{DISPATCH} {FUSE}",
    f"{OVERLAP} {FUSE}",
    f"{OVERLAP} {DELAY}",
    f"{OVERLAP} {DELAY} {FUSE}",
    f"{OVERLAP} {DISPATCH}",
    f"{OVERLAP} {DISPATCH} {DELAY} {FUSE}",
]
MODELS = ["--model reference", f"--model megatron {SHARED}"]


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize("model", MODELS, ids=["reference", "megatron"])
@pytest.mark.parametrize("flags", COMBINATIONS)
def test_every_combination_is_bitwise_the_step_without_overlap_and_delay(
    flags: str, model: str, tmp_path: Path
) -> None:
    result = trained(f"{model} {TINY} {flags} --check-parity", tmp_path)
    assert result["parity"] == "bitwise"
    assert len(result["losses"]) == 2


@pytest.mark.parametrize(
    ("flags", "made_later"),
    [
        ("", set[str]()),
        (OVERLAP, set[str]()),
        (f"{OVERLAP} {DELAY}", {"W.attn", "W.shared", "W.mlp"}),
        (f"{OVERLAP} {DISPATCH}", {"W.mlp"}),
        (DISPATCH, {"W.mlp"}),
        (f"{DISPATCH} {DELAY}", {"W.attn", "W.shared", "W.mlp"}),
    ],
)
def test_flags_say_which_weight_gradients_the_schedule_makes_later(
    flags: str, made_later: set[str]
) -> None:
    args = args_of(f"train {SHARED} {flags}")
    assert isinstance(args, TrainArguments)
    config = overlap_config(args)
    assert config.delay_wgrad is (DELAY in flags)
    assert config.dispatch_over_wgrad is (DISPATCH in flags)
    assert wgrads({str(action) for action in plan_of(args).actions}) == made_later


def test_two_ranks_run_the_weight_gradients_of_their_plan_bitwise(tmp_path: Path) -> None:
    """All flags at once, on a sharded megatron model with shared experts."""
    trace = tmp_path / "trace.json"
    flags = f"--num-layers 2 --num-microbatches 3 {SHARED} {OVERLAP} {DELAY} {FUSE} {SHARDED}"
    result = result_of(
        f"train --model megatron {SMALL} {flags} --train-iters 2 --check-parity --trace {trace}",
        tmp_path / "out.json",
    )
    assert result["parity"] == "bitwise"
    assert result["hook_misses"] == 0
    args = args_of(f"train {flags}")
    assert isinstance(args, TrainArguments)
    planned = {str(node) for node in computes_of(plan_of(args).actions)}
    words = {span.word for span in read_trace(trace).spans}
    assert planned <= words
    assert wgrads(words) == {"W.attn", "W.shared", "W.mlp"}


def test_dispatch_runs_over_wgrad_without_overlap_on_two_ranks(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    result = result_of(
        f"train --model reference {TINY} {DISPATCH} --check-parity --trace {trace}",
        tmp_path / "out.json",
    )
    assert result["parity"] == "bitwise"
    words = {span.word for span in read_trace(trace).spans}
    assert wgrads(words) == {"W.mlp"}


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize("flags", ["", DELAY])
def test_without_a_schedule_weight_gradients_wait_for_the_end_of_each_backward(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_waiting: list[int] = []

    @contextmanager
    def watched(module: nn.Module, *, layer_types: LayerTypes) -> Generator[DelayedWgrad]:
        with delayed_wgrad(module, layer_types=layer_types) as delayed:
            yield delayed
            num_waiting.append(len(delayed))

    monkeypatch.setattr(trainee_file, "delayed_wgrad", watched)
    trained(f"--model reference {TINY} --train-iters 1 {flags}", tmp_path)
    assert num_waiting == ([NUM_USES, NUM_USES] if flags else [])


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize("fuses", [False, True])
def test_fusion_reaches_the_model(fuses: bool) -> None:
    args = args_of(f"train --model reference {TINY} {FUSE if fuses else ''}")
    assert isinstance(args, TrainArguments)
    recipe = recipe_of(args)
    with open_world(args.device, speed=None) as world:
        trainee = build_trainee(recipe, world, Meshes.of(world, recipe.expert_parallel_size))
        managers = {
            id(layer.wgrad): layer.wgrad.is_fused
            for layer in trainee.module.modules()
            if isinstance(layer, ManagedLayer) and layer.wgrad is not None
        }
    assert list(managers.values()) == ([True] if fuses else [])


# ---- order files ---------------------------------------------------------------------------------


@pytest.fixture
def order_file(tmp_path: Path) -> Callable[[str], Path]:
    """Writes the order of a plan into a file."""

    def write(flags: str) -> Path:
        args = args_of(f"plan --num-layers 2 --num-microbatches 2 {OVERLAP} {flags}")
        assert isinstance(args, PlanArguments)
        path = tmp_path / "order.txt"
        path.write_text(plan_of(args).order_text())
        return path

    return write


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize("flags", ["", DELAY, DISPATCH])
def test_an_order_file_with_w_nodes_delays_whatever_the_flags(
    flags: str, tmp_path: Path, order_file: Callable[[str], Path]
) -> None:
    path, trace = order_file(DELAY), tmp_path / "trace.json"
    result = trained(
        f"--model reference {TINY} {OVERLAP} --order {path} {flags} --check-parity --trace {trace}",
        tmp_path,
    )
    assert result["parity"] == "bitwise"
    words = {span.word for span in read_trace(trace).spans}
    assert wgrads(words) == {"W.attn", "W.mlp"}


@pytest.mark.parametrize("command", ["train --train-iters 1", "plan"])
@pytest.mark.parametrize("flag", [DELAY, DISPATCH])
def test_an_order_file_without_w_nodes_is_refused_where_they_are_asked_for(
    command: str,
    flag: str,
    order_file: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = f"{command} --num-layers 2 --num-microbatches 2 {OVERLAP} --order {order_file('')}"
    assert main(f"{line} {flag}".split()) == 2
    (said,) = capsys.readouterr().err.splitlines()
    name = command.split()[0]
    assert said.startswith(f"ep-overlap {name}: error: ")
    assert "the order has no W nodes, such as 0W.mlp.L0; add them, or " in said


def test_an_order_file_that_lacks_one_w_node_names_it(
    order_file: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = order_file(DELAY)
    path.write_text(path.read_text().replace("1W.attn.L1", ""))
    line = f"plan --num-layers 2 --num-microbatches 2 {OVERLAP} --order {path} {DELAY}"
    assert main(line.split()) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "1W.attn.L1" in said


# ---- bench ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("", ["off", "plain", "paired"]),
        (FUSE, ["off", "plain", "paired"]),
        (DELAY, ["off", "plain", "paired", "delayed"]),
        (DISPATCH, ["off", "serial", "plain", "paired"]),
        (f"{DISPATCH} {DELAY}", ["off", "serial", "plain", "paired", "delayed"]),
    ],
)
def test_flags_of_weight_gradients_add_variants_to_a_bench(flags: str, names: list[str]) -> None:
    args = args_of(f"bench {flags}")
    assert isinstance(args, BenchArguments)
    assert variants_of(args) == names


def test_each_variant_of_a_bench_has_the_schedule_of_its_name() -> None:
    args = args_of(f"bench {DELAY} {DISPATCH} --max-unsharded-units 3")
    assert isinstance(args, BenchArguments)
    configs = {name: config_of(args, name) for name in variants_of(args)}
    assert configs.pop("off") is None
    made_later = {
        name: (config.order_name, config.delay_wgrad, config.dispatch_over_wgrad)
        for name, config in configs.items()
        if config is not None and config.max_unsharded_units == 3
    }
    assert made_later == {
        "serial": ("serial", False, True),
        "plain": ("plain", False, False),
        "paired": ("paired", False, False),
        "delayed": ("paired", True, False),
    }


def test_bench_times_delayed_and_serial_beside_the_rest(tmp_path: Path) -> None:
    """Timing ring: generous inequalities only."""
    result = result_of(
        f"bench --model reference --num-layers 2 --num-microbatches 2 {SMALL} --rounds 2 "
        f"--link paced:100mbit {DELAY} {DISPATCH}",
        tmp_path / "out.json",
    )
    variants = result["variants"]
    assert list(variants) == ["off", "serial", "plain", "paired", "delayed"]
    assert len({variant["last_loss"] for variant in variants.values()}) == 1  # bitwise
    assert all(variant["step_time_s"] > 0 for variant in variants.values())
    assert result["hidden_share"] == variants["paired"]["hidden_share"]
    hidden = {name: variant["hidden_share"]["a2a"] for name, variant in variants.items()}
    assert hidden["delayed"] > hidden["off"]
    assert 0.2 < result["delayed_of_paired"] < 5
    assert result["gradient_accumulation_fusion"] is False


@pytest.mark.usefixtures("rank")
def test_a_bench_says_what_is_fused_and_how_delayed_compares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = f"--model reference --num-layers 1 --num-microbatches 2 {SMALL} --rounds 1"
    texts: list[str] = []
    for flags in ("", f"{FUSE} {DELAY}"):
        path = tmp_path / "out.json"
        assert main(["bench", *f"{size} --json {path} {flags}".split()]) == 0
        result = json.loads(path.read_text())
        assert (result["delayed_of_paired"] is not None) is result["gradient_accumulation_fusion"]
        texts.append(" ".join(capsys.readouterr().out.split()))
    for said in ("fused weight gradients", "a round's delayed step is"):
        assert [said in text for text in texts] == [False, True]


# ---- checkpoints ---------------------------------------------------------------------------------


def test_a_checkpoint_goes_on_bitwise_with_other_flags_of_weight_gradients(tmp_path: Path) -> None:
    """The whole as autograd makes it; of the parts one delayed, one with dispatch over wgrad."""
    flags = f"--model reference --num-layers 2 --num-microbatches 2 {SMALL} {SHARDED}"
    whole, parts = in_two_parts(
        flags, f"{flags} {OVERLAP} {DELAY}", f"{flags} {DISPATCH}", tmp_path
    )
    assert parts == {key: whole[key] for key in SERIES}


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize("model", MODELS, ids=["reference", "megatron"])
def test_fused_and_unfused_runs_load_each_others_checkpoints(model: str, tmp_path: Path) -> None:
    small = f"{model} --num-layers 2 --num-microbatches 2 {SMALL}"
    saved = tmp_path / "saved"
    whole = trained(f"{small} --train-iters 3", tmp_path)
    first = trained(f"{small} --train-iters 1 {FUSE} {DELAY} --save {saved}", tmp_path)
    second = trained(f"{small} --train-iters 2 --load {saved} --save {saved}", tmp_path)
    third = trained(f"{small} --train-iters 3 {OVERLAP} {FUSE} --load {saved}", tmp_path)
    for key in SERIES:
        assert first[key] + second[key] + third[key] == pytest.approx(whole[key], rel=1e-5)
    assert [run["first_iteration"] for run in (first, second, third)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("saved_width", "flag", "said"),
    [
        (None, SHARED, f"{SHARED}: the checkpoint in {{}} was made without {SHARED[:-3]}"),
        (24, "", f"no {SHARED[:-3]}: the checkpoint in {{}} was made with {SHARED}"),
        (None, "", ""),
        (24, SHARED, ""),
    ],
)
def test_a_checkpoint_with_other_shared_experts_is_refused(
    saved_width: int | None, flag: str, said: str, tmp_path: Path
) -> None:
    record = record_of(model="megatron")
    record["sizes"] |= {"moe_shared_expert_intermediate_size": saved_width}
    (tmp_path / RECORD_FILE).write_text(json.dumps(record))
    args = args_of(f"train --load {tmp_path} {flag}")
    assert list(problems(args, {})) == ([said.format(tmp_path)] if said else [])
