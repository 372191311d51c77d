"""The command line: one clear line for what cannot work, exit codes, and what `plan` prints."""

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from ep_overlap.cli import main
from ep_overlap.commands.argument_checks import remarks
from ep_overlap.commands.argument_parser import parse
from ep_overlap.commands.arguments import (
    BenchArguments,
    DeviceChoice,
    ModelName,
    OptimizerName,
    Peer,
    PlanArguments,
    TrainArguments,
)
from ep_overlap.plan.lower import Strategy

ROOT = Path(__file__).parent.parent
OVERLAP = "--overlap-moe-expert-parallel-comm"
SHARDED = ("--data-parallel-sharding-strategy", "optim_grads_params")

REFUSED = [
    ("train --num-layers 0", "--num-layers: expected 1 or more, got 0"),
    ("plan --num-layers 99999999999", "--num-layers: expected at most 10000, got 99999999999"),
    ("train --num-microbatches -1", "--num-microbatches: expected 1 or more, got -1"),
    ("train --micro-batch-size 0", "--micro-batch-size: expected 1 or more, got 0"),
    ("train --expert-model-parallel-size 0", "--expert-model-parallel-size: expected 1 or more"),
    ("train --num-layers three", "--num-layers: expected a whole number, got 'three'"),
    ("train --num-experts 3", "--num-experts 3 is not divisible by --expert-model-parallel-size 2"),
    (
        "train --nproc 3 --expert-model-parallel-size 2",
        "--expert-model-parallel-size 2 does not divide the number of ranks, 3 (--nproc)",
    ),
    ("train --moe-router-topk 5", "--moe-router-topk 5: expected at most --num-experts 4"),
    (
        "train --hidden-size 130",
        "--hidden-size 130 is not divisible by --num-attention-heads 4; take a multiple",
    ),
    (
        "train --hidden-size 30 --num-attention-heads 2",
        "--hidden-size 30 with --num-attention-heads 2: heads of 15, expected an even number, as "
        "rotary embedding turns pairs; choose others",
    ),
    ("train --lr -1", "--lr: expected a finite number, 0 or more, got -1.0"),
    ("train --lr nan", "--lr: expected a finite number, 0 or more, got nan"),
    ("train --lr fast", "--lr: expected a number, got 'fast'"),
    (
        "train --data-parallel-sharding-strategy zero3",
        "expected one of no_shard, optim, optim_grads, optim_grads_params; got 'zero3'",
    ),
    ("train --model gpt", "--model: expected one of megatron, reference; got 'gpt'"),
    ("train --optimizer lion", "--optimizer: expected one of adamw, sgd; got 'lion'"),
    ("train --data no_such_file.txt", "--data no_such_file.txt: no such file"),
    ("train --data .", "--data .: expected a text file, got a directory"),
    ("train --load no_such_dir", "--load no_such_dir: there is no such directory"),
    ("train --save no_such_dir/out", "--save no_such_dir/out: there is no directory"),
    ("train --json no_such_dir/a.json", "there is no directory no_such_dir"),
    ("train --load README.md", "--load README.md: expected a directory, got a file"),
    ("train --save README.md/out", "README.md is a file"),
    ("train --save .", "--save .: expected a directory with a name"),
    ("train --save /proc/out", "--save /proc/out: no directory can be made in /proc ("),
    ("train --json README.md/out", "--json README.md/out: README.md is a file"),
    ("train --trace tests", "--trace tests: expected a file, got a directory"),
    (f"train {OVERLAP} --order no_such_order", "expected serial, plain, paired, or a readable"),
    (
        f"train {OVERLAP} {' '.join(SHARDED)} --max-unsharded-units 1",
        "--max-unsharded-units is too small: this order reads 2 units side by side (L0, L3), so "
        "expected at least 2, got 1; raise --max-unsharded-units, or take --order serial, which "
        "needs 1",
    ),
    ("plan --max-unsharded-units 0", "--max-unsharded-units: expected 1 or more, got 0"),
    (
        f"plan {OVERLAP} {' '.join(SHARDED)} --max-unsharded-units 1",
        "; raise --max-unsharded-units, or take --order serial, which needs 1",
    ),
    (
        f"bench {' '.join(SHARDED)} --max-unsharded-units 1",
        "(L0, L1), so expected at least 2, got 1; raise --max-unsharded-units\n",
    ),
    ("bench --link fast", "--link 'fast': expected paced:RATE or shaped:RATE"),
    ("bench --link paced:800", "--link 'paced:800': not a link rate: '800'"),
    ("bench --rounds 0", "--rounds: expected 1 or more, got 0"),
    ("timeline no_such_trace.json", "trace no_such_trace.json: No such file or directory"),
    ("timeline x --start-ms 3 --end-ms 2", "--end-ms 2: expected more than --start-ms 3"),
    ("timeline", "the following arguments are required: TRACE"),
    ("fly", "invalid choice: 'fly'"),
    ("", "the following arguments are required: COMMAND"),
    ("train --num-lay 3", "unrecognized arguments: --num-lay 3"),
]


def status_of(argv: list[str]) -> int:
    try:
        return main(argv)
    except SystemExit as ended:
        return int(ended.code or 0)


@pytest.mark.parametrize(("line", "problem"), REFUSED, ids=[line for line, _ in REFUSED])
def test_what_cannot_work_is_refused_in_one_line(
    line: str,
    problem: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    assert status_of(line.split()) == 2
    said = capsys.readouterr()
    command = line.split()[0] if line and not line.startswith("fly") else ""
    where = "ep-overlap" if not command or "unrecognized" in problem else f"ep-overlap {command}"
    assert said.err.startswith(f"{where}: error: ")
    assert problem in said.err
    assert (said.err.count("\n"), said.out) == (1, "")


@pytest.mark.parametrize("command", ["train", "plan"])
def test_an_empty_order_is_no_file(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of([command, "--order", "", "--overlap-moe-expert-parallel-comm"]) == 2
    expected = "--order: expected serial, plain, paired, or a file of action words, got nothing"
    assert capsys.readouterr().err == f"ep-overlap {command}: error: {expected}\n"


@pytest.mark.parametrize("flag", ["--save", "--load", "--json", "--data"])
def test_an_empty_path_is_not_the_current_directory(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(["train", flag, ""]) == 2
    said = capsys.readouterr().err
    assert said == f"ep-overlap train: error: argument {flag}: expected a path, got ''\n"


def test_a_refusal_shows_no_traceback_from_a_shell() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ep_overlap.cli", "train", "--num-layers", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "ep-overlap train: error: --num-layers: expected 1 or more, got 0\n"


def test_a_text_shorter_than_a_sequence_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "short.txt"
    text.write_bytes(b"x" * 128)
    assert main(["train", "--data", str(text), "--seq-length", "128"]) == 2
    assert "expected at least 129 bytes (--seq-length and one more), got 128" in (
        capsys.readouterr().err
    )


def test_defaults_are_those_of_the_documentation() -> None:
    _, args = parse(["train"])
    assert args == TrainArguments(
        num_layers=4,
        hidden_size=128,
        num_attention_heads=4,
        moe_layer_freq=1,
        moe_ffn_hidden_size=256,
        num_experts=4,
        moe_router_topk=2,
        seq_length=128,
        micro_batch_size=2,
        num_microbatches=4,
        train_iters=20,
        lr=1e-3,
        seed=1234,
        expert_model_parallel_size=None,
        nproc=2,
        optimizer=OptimizerName.ADAMW,
        model=ModelName.MEGATRON,
        device=DeviceChoice.AUTO,
        data_parallel_sharding_strategy=Strategy.NO_SHARD,
    )
    assert args.expert_parallel_size({}) == 2


def test_every_flag_reaches_its_field() -> None:
    _, args = parse(
        f"train --num-layers 2 --lr 0.5 --optimizer sgd --device cpu --data a.txt {OVERLAP} "
        "--data-parallel-sharding-strategy optim --order plain --check-parity --save out".split()
    )
    assert args == TrainArguments(
        num_layers=2,
        lr=0.5,
        optimizer=OptimizerName.SGD,
        device=DeviceChoice.CPU,
        data=Path("a.txt"),
        overlap_moe_expert_parallel_comm=True,
        data_parallel_sharding_strategy=Strategy.OPTIM,
        order="plain",
        check_parity=True,
        save=Path("out"),
    )


@pytest.mark.parametrize("command", ["train", "plan", "timeline", "bench", "doctor"])
def test_help_explains_every_flag(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of([command, "--help"]) == 0
    text = capsys.readouterr().out
    _, args = parse([command, "a.json"] if command == "timeline" else [command])
    for name in vars(args):
        flag = "TRACE" if name == "trace_file" else "--" + name.replace("_", "-")
        lines = [line.strip().split(" ") for line in text.splitlines()]
        (line,) = [words for words in lines if words[0].rstrip(",") == flag] or [""]
        if name == "output":
            line = next(words for words in lines if "--output" in words)
        assert line, f"{flag} is missing"
        value = vars(args)[name]
        if value is not None and not isinstance(value, bool | Path):
            assert f"(default: {value})" in text


def test_torchruns_world_size_holds_instead_of_nproc() -> None:
    args = TrainArguments(nproc=2)
    assert (
        args.num_ranks({"WORLD_SIZE": "8"}) == args.expert_parallel_size({"WORLD_SIZE": "8"}) == 8
    )


@pytest.mark.parametrize(
    ("args", "remark"),
    [
        (
            TrainArguments(overlap_moe_expert_parallel_comm=True, expert_model_parallel_size=1),
            "there is nothing to hide with --expert-model-parallel-size 1",
        ),
        (BenchArguments(nproc=1), "there is nothing to hide"),
        (
            TrainArguments(max_unsharded_units=2, data_parallel_sharding_strategy=Strategy.OPTIM),
            "--max-unsharded-units has no effect with --data-parallel-sharding-strategy optim:",
        ),
        (
            TrainArguments(
                max_unsharded_units=2,
                data_parallel_sharding_strategy=Strategy.OPTIM_GRADS_PARAMS,
            ),
            f"--max-unsharded-units has no effect without {OVERLAP}: module hooks gather one",
        ),
        (TrainArguments(order="plain"), f"--order has no effect without {OVERLAP}"),
        (PlanArguments(gradient_accumulation_fusion=True), "does not change a plan"),
        (BenchArguments(against=Peer.FSDP2), "--against has no effect without --sharding"),
        (BenchArguments(num_blocks=3), "--num-blocks has no effect without --sharding"),
    ],
)
def test_a_setting_without_effect_is_remarked(args: TrainArguments, remark: str) -> None:
    (said,) = remarks(args, {})
    assert remark in said


def test_settings_with_effect_are_not_remarked() -> None:
    args = TrainArguments(
        overlap_moe_expert_parallel_comm=True,
        order="plain",
        data_parallel_sharding_strategy=Strategy.OPTIM_GRADS_PARAMS,
        max_unsharded_units=3,
    )
    assert list(remarks(args, {})) == []


def test_a_warning_goes_to_stderr_and_the_command_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--order", "plain", "--num-layers", "1", "--num-microbatches", "1"]) == 0
    said = capsys.readouterr()
    assert said.err == f"ep-overlap plan: warning: --order has no effect without {OVERLAP}\n"
    assert said.out.startswith("serial: layers 1 moe, microbatches 1, no_shard\n")


def test_plan_prints_its_grid_where_torch_is_blocked() -> None:
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'numpy', 'rich', 'matplotlib'):\n"
        "            raise ImportError('blocked: ' + name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from ep_overlap.cli import main\n"
        f"sys.exit(main(['plan', {OVERLAP!r}, '--num-layers', '2', '--num-microbatches', '2']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "paired: layers 2 moe, microbatches 2, no_shard"
    assert lines[2].split() == ["step", "host", "comp", "comm", "rs"]
    words = set(done.stdout.split())
    assert {"0F.pre", "1F.dispatch.L1", "0B.mlp.L0", "1B.pre", "REDUCE.root"} <= words


def test_plan_check_says_what_was_proved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "plan.json"
    argv = ["plan", "--check", OVERLAP, *SHARDED, "--max-unsharded-units", "2"]
    assert main([*argv, "--num-layers", "8", "--num-microbatches", "8", "--json", str(result)]) == 0
    written = json.loads(result.read_text())
    said = capsys.readouterr().out
    # 8 microbatches, forward and backward: 4 nodes in each of 8 layers, and pre and post.
    assert "proved: 544 nodes, each issued once" in said
    assert f"proved: {written['num_all_gathers']} gathers: weights are there when read" in said
    assert "at most 2 layers and the root at a time" in said
    assert "proved: 72 reductions" in said  # 8 layers and the root, every microbatch
    assert written["digest"].startswith(said.split()[-1])
    assert len(written["actions"]) == len(written["waits"])
    assert written["order"] == "paired"
    assert "0SYNC.L0" in written["actions"]


def test_an_order_file_that_does_not_hold_shows_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    order = tmp_path / "order.txt"
    order.write_text("0F.pre\n0F.mlp.L0\n")
    argv = ["plan", OVERLAP, "--num-layers", "1", "--num-microbatches", "1"]
    assert main([*argv, "--order", str(order)]) == 2
    said = capsys.readouterr()
    assert said.err == f"ep-overlap plan: error: --order {order}: line 2: 0F.attn.L0 is missing\n"
    assert said.out.startswith(
        f"--order {order}: line 2: 0F.attn.L0 is missing\nMarked: its place."
    )
    assert ">     1  0F.mlp.L0" in said.out
    argv[0] = "train"  # which prints no grid
    assert main([*argv, "--order", str(order)]) == 2
    said = capsys.readouterr()
    assert said.err == (
        f"ep-overlap train: error: --order {order}: line 2: 0F.attn.L0 is missing; "
        "`ep-overlap plan` shows the place\n"
    )
    assert said.out == ""


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "0F.pre\n0F.attn.L0 0F.dispatch.L0 0F.mlp.L0 0F.combine.L0\n0F.attn.L1",
            "line 3: 0F.attn.L1 is not a node of this plan (own: layers 1 moe, microbatches 1, "
            "no_shard): the order is of 2 layers and 1 microbatch, expected 1 layer and 1 "
            "microbatch; set --num-layers and --num-microbatches to those",
        ),
        ("0F.pre\n1F.pre", "line 2: 1F.pre is not a node of this plan"),
        ("0F.pre 0F.atn.L0", "line 1: not an action: '0F.atn.L0'; expected a word such as 2F.attn"),
        ("# none", "the order holds no words; expected words such as 0F.pre or 2F.attn.L3"),
    ],
)
def test_an_order_file_that_cannot_be_is_told_by_name(
    command: str, text: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    order = tmp_path / "order.txt"
    order.write_text(text)
    argv = [command, OVERLAP, "--num-layers", "1", "--num-microbatches", "1"]
    assert main([*argv, "--order", str(order)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"ep-overlap {command}: error: --order {order}: {problem}")
    assert said.count("\n") == 1


def test_an_order_file_written_from_a_plan_gives_that_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ep_overlap.commands.plan_arguments import plan_of

    args = PlanArguments(overlap_moe_expert_parallel_comm=True, num_layers=2, order="plain")
    order = tmp_path / "order.txt"
    order.write_text(plan_of(args).order_text())
    assert main(["plan", OVERLAP, "--num-layers", "2", "--order", str(order)]) == 0
    from_file = capsys.readouterr().out.splitlines()
    assert main(["plan", OVERLAP, "--num-layers", "2", "--order", "plain"]) == 0
    built = capsys.readouterr().out.splitlines()
    assert from_file[0] == "own: layers 2 moe, microbatches 4, no_shard"
    assert from_file[1:] == built[1:]


def test_a_failed_run_exits_1_with_its_cause_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that is full is found out after the work."""

    write_bytes = Path.write_bytes

    def write(path: Path, data: bytes) -> NoReturn:
        write_bytes(path, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write)
    target = tmp_path / "result.json"
    target.write_text("what was there")
    assert main(["plan", "--json", str(target)]) == 1
    said = capsys.readouterr().err
    assert said == f"ep-overlap plan: {target}: No space left on device\n"
    assert [(file, file.read_text()) for file in tmp_path.iterdir()] == [(target, "what was there")]


def test_a_command_that_breaks_exits_1_with_its_cause_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(args: object) -> NoReturn:
        raise RuntimeError("odd")

    monkeypatch.setattr("ep_overlap.cli._plan", broken)
    assert main(["plan"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("Traceback")
    assert said.splitlines()[-1] == "ep-overlap plan: failed: RuntimeError: odd"


def test_a_directory_where_nothing_can_be_written_is_refused_before_the_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "gone"
    target.mkdir()
    monkeypatch.chdir(target)
    target.rmdir()
    assert main(["plan", "--json", "result.json"]) == 2
    said = capsys.readouterr().err
    assert "--json result.json: " in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("timeline {0} -o x.svg --json {0}", "the file of the trace, too"),
        ("timeline {0} -o {1} --json {1}", "the file of --output, too"),
        ("train --save {1} --json {1}", "the file of --save, too"),
        ("train --save {1} --trace {1}", "the file of --save, too"),
    ],
)
def test_files_of_two_flags_are_refused(
    command: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "t.json"
    trace.write_text("{}")
    assert main(command.format(trace, tmp_path / "x.svg").split()) == 2
    assert words in capsys.readouterr().err
    assert trace.read_text() == "{}"


def test_a_reader_that_stops_reading_is_no_failure() -> None:
    done = subprocess.run(
        f"{sys.executable} -m ep_overlap.cli plan --num-layers 300 | head -n 1",
        shell=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "serial: layers 300 moe, microbatches 4, no_shard\n"
    assert done.stderr == ""


def test_links_are_those_of_cpu_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cuda"]) == 2
    said = capsys.readouterr().err
    assert "--device cuda: this measurement paces the links of CPU ranks" in said
    assert said.count("\n") == 1
