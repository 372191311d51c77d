"""The flags of weight gradients as a user gives them: what runs, what is refused, what is told.

Combinations run in this process as the only rank of their world, a few on two ranks.
"""

import gc
import json
import re
import socket
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_commands_checkpoint import SERIES, in_two_parts, record_of
from test_commands_run import OVERLAP, SHARDED, SMALL, result_of
from torch import nn

from ep_overlap.cli import main
from ep_overlap.commands import trainee as trainee_file
from ep_overlap.commands.argument_checks import problems, remarks
from ep_overlap.commands.arguments import (
    Arguments,
    BenchArguments,
    PlanArguments,
    TrainArguments,
    parse,
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
from fsdp_hooks.wgrad_layers import DelayedWgrad, delayed_wgrad

DELAY = "--delay-wgrad-compute"
FUSE = "--gradient-accumulation-fusion"
DISPATCH = "--overlap-dispatch-backward-with-experts-wgrad"
SHARED = "--moe-shared-expert-intermediate-size 24"
NUM_USES = 23
"""Of managed weights by a forward of the reference model: in each of two layers QKV, projection,
router, and four experts of two matrices; and the output layer."""
TINY = f"--num-layers 2 --num-microbatches 2 --train-iters 2 {SMALL}"


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is the only rank of a world, as under torchrun; what a run changes is undone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)
    gc.unfreeze()


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
    def watched(module: nn.Module) -> Generator[DelayedWgrad]:
        with delayed_wgrad(module) as delayed:
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


# ---- shared experts ------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["train", "bench"])
def test_shared_experts_of_the_reference_model_are_refused(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--model", "reference", *SHARED.split()]) == 2
    assert capsys.readouterr().err == (
        f"ep-overlap {command}: error: --moe-shared-expert-intermediate-size with --model "
        "reference: it has no shared experts; take --model megatron, or leave it out\n"
    )


@pytest.mark.parametrize("command", ["train", "plan", "bench"])
def test_a_shared_expert_without_width_is_refused(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--moe-shared-expert-intermediate-size", "0"]) == 2
    assert "--moe-shared-expert-intermediate-size: expected 1 or more" in capsys.readouterr().err


# ---- plan ----------------------------------------------------------------------------------------


BACKWARDS = {
    f"{OVERLAP} {DELAY}": """
        0B.post     0B.combine.L1
        0B.mlp.L1   0B.dispatch.L1
        0W.mlp.L1
        0B.attn.L1  0B.combine.L0
        0W.attn.L1                  REDUCE.L1
        0B.mlp.L0   0B.dispatch.L0
        0W.mlp.L0
        0B.attn.L0
        0W.attn.L0                  REDUCE.L0
        0B.pre                      REDUCE.root
    """,
    DISPATCH: """
        0B.post     0B.combine.L1
        0B.mlp.L1   0B.dispatch.L1
        0W.mlp.L1
        0B.attn.L1                  REDUCE.L1
                    0B.combine.L0
        0B.mlp.L0   0B.dispatch.L0
        0W.mlp.L0
        0B.attn.L0                  REDUCE.L0
        0B.pre                      REDUCE.root
    """,
    f"{DISPATCH} {DELAY} {SHARED}": """
        0B.post        0B.combine.L1
        0B.mlp.L1      0B.dispatch.L1
        0W.mlp.L1
        0B.attn.L1
        0W.shared.L1
        0W.attn.L1                     REDUCE.L1
                       0B.combine.L0
        0B.mlp.L0      0B.dispatch.L0
        0W.mlp.L0
        0B.attn.L0
        0W.shared.L0
        0W.attn.L0                     REDUCE.L0
        0B.pre                         REDUCE.root
    """,
}
"""What the grid shows from the first backward on: comp, comm, rs."""


@pytest.mark.parametrize("flags", BACKWARDS)
def test_the_grid_shows_wgrad_behind_the_exchange_that_it_hides(
    flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(f"plan --num-layers 2 --num-microbatches 1 {flags}".split()) == 0
    said = capsys.readouterr()
    lines = [line.split()[1:] for line in said.out.splitlines()]
    start = next(number for number, words in enumerate(lines) if "0B.post" in words)
    assert lines[start:] == [line.split() for line in BACKWARDS[flags].strip().splitlines()]
    assert said.err == ""


def test_a_plan_says_in_its_title_what_is_delayed(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan --num-layers 1 --num-microbatches 1"
    for flags, title in (
        ("", "serial: layers 1 moe, microbatches 1, no_shard"),
        (DELAY, "serial: layers 1 moe, microbatches 1, delayed wgrad, no_shard"),
        (DISPATCH, "serial: layers 1 moe, microbatches 1, experts' wgrad delayed, no_shard"),
    ):
        assert main(f"{line} {flags}".split()) == 0
        assert capsys.readouterr().out.splitlines()[0] == title


def test_plan_check_proves_wgrad_nodes_and_their_reductions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    flags = f"{OVERLAP} {DELAY} {SHARED} {SHARDED}"
    line = f"plan --check --num-layers 3 --num-microbatches 4 {flags} --json {path}"
    assert main(line.split()) == 0
    said = capsys.readouterr().out
    # 4 microbatches: pre, post, and in 3 layers 4 nodes, forward and backward; and 3 W nodes each.
    assert f"proved: {4 * (2 * (2 + 3 * 4) + 3 * 3)} nodes, each issued once" in said
    assert "proved: 16 reductions, each after the last gradient that it reduces" in said
    actions = json.loads(path.read_text())["actions"]
    assert len([word for word in actions if "W." in word]) == 4 * 3 * 3
    for layer in range(3):  # a unit's last reduction comes after its last W
        assert actions[::-1].index(f"REDUCE.L{layer}") < actions[::-1].index(f"3W.attn.L{layer}")


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


# ---- settings without effect ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "remark"),
    [
        (f"train {DELAY}", f"{DELAY} hides nothing without {OVERLAP}: "),
        (
            f"train {OVERLAP} {DELAY} {DISPATCH}",
            f"{DISPATCH} has no effect beside {OVERLAP} {DELAY}: they do that already",
        ),
        (f"plan {OVERLAP} {DELAY} {DISPATCH}", f"{DISPATCH} has no effect beside"),
        (
            f"train {DISPATCH} --expert-model-parallel-size 1",
            "there is nothing to hide with --expert-model-parallel-size 1",
        ),
        (f"train {DISPATCH} --order plain", f"--order has no effect without {OVERLAP}"),
        (f"plan {FUSE}", f"{FUSE} does not change a plan"),
        (f"plan {SHARED}", f"does not change a plan without {DELAY}: shared experts run within"),
        (f"bench --sharding {DELAY}", f"{DELAY} has no effect with --sharding: its model is dense"),
        (f"bench --sharding {FUSE}", f"{FUSE} has no effect with --sharding"),
        (f"bench --sharding {DISPATCH}", f"{DISPATCH} has no effect with --sharding"),
        (f"bench --sharding {SHARED}", "-intermediate-size has no effect with --sharding"),
        (f"bench --host-overhead {DELAY}", f"{DELAY} has no effect with --host-overhead"),
        (f"bench --host-overhead {FUSE}", f"{FUSE} has no effect with --host-overhead"),
        (f"bench --host-overhead {DISPATCH}", f"{DISPATCH} has no effect with --host-overhead"),
        ("bench --host-overhead --nproc 1", "--nproc has no effect with --host-overhead"),
    ],
)
def test_a_setting_without_effect_is_remarked(line: str, remark: str) -> None:
    (said,) = remarks(args_of(line), {})
    assert remark in said


@pytest.mark.parametrize(
    "line",
    [
        f"train {OVERLAP} {DELAY} {FUSE} {SHARED}",
        f"train {DISPATCH} {DELAY} {FUSE}",
        f"train {OVERLAP} {DISPATCH} {FUSE}",
        f"train {DISPATCH} {SHARDED} --max-unsharded-units 1",
        f"plan {DELAY} {SHARED}",
        f"plan {DISPATCH} {DELAY}",
        f"bench {DELAY} {FUSE} {DISPATCH} {SHARED}",
        "bench --host-overhead --json out.json",
    ],
)
def test_settings_with_effect_are_not_remarked(line: str) -> None:
    assert list(remarks(args_of(line), {})) == []


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
