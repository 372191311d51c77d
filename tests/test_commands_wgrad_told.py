"""The flags of weight gradients where nothing is trained: plans, refusals, warnings."""

import json
from pathlib import Path

import pytest
from test_commands_run import OVERLAP, SHARDED
from test_commands_wgrad import DELAY, DISPATCH, FUSE, SHARED, args_of

from ep_overlap.cli import main
from ep_overlap.commands.argument_checks import remarks

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
        0B.pre                      REDUCE.root
        0W.attn.L0                  REDUCE.L0
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
        0B.pre                         REDUCE.root
        0W.shared.L0
        0W.attn.L0                     REDUCE.L0
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
