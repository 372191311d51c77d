"""``ep-overlap bench --against megatron``: every variant is measured, on links that are told."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ep_overlap.commands.argument_parser import parse
from ep_overlap.commands.arguments import BenchArguments
from ep_overlap.commands.bench_megatron import environment
from ep_overlap.commands.bench_megatron_models import ModelMaker
from ep_overlap.commands.measured_world import measured_world

SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --num-experts 8 "
    "--moe-ffn-hidden-size 48 --seq-length 16 --micro-batch-size 1 --num-microbatches 2 --rounds 1"
)


def run(flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "ep_overlap.cli", "bench", *flags.split()]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_it_measures_megatrons_schedules_and_ours(tmp_path: Path) -> None:
    out, plot = tmp_path / "result.json", tmp_path / "steps.svg"
    links = "a2a=10MBps,dp=1GBps,latency=1ms"
    flags = f"--emulate-world 8 --emulate {links} --json {out} --plot {plot}"
    done = run(f"--against megatron {SMALL} {flags}")
    assert done.returncode == 0, done.stderr
    drawn = plot.read_text()
    assert "megatron combined" in drawn
    assert "ours paired, delayed" in drawn
    result = json.loads(out.read_text())
    assert result["world"] == "emulated: 8 ranks, a2a 0.01 GB/s, dp 1 GB/s, latency 1 ms".replace(
        "1 ms", "1000 us"
    )
    assert list(result["variants"]) == [
        "compute alone",
        "megatron standard",
        "megatron combined",
        "ours plain",
        "ours plain, delayed",
        "ours paired",
        "ours paired, delayed",
    ]
    # 2 layers x 2 microbatches x 6 exchanges, each a millisecond and its bytes.
    assert result["link_s"] > 24e-3
    standard = result["variants"]["megatron standard"]
    assert standard["step_time_s"] > result["compute_s"] + 0.5 * result["link_s"]
    assert result["best_of_megatron"].startswith("megatron")
    assert "emulated: 8 ranks" in " ".join(done.stdout.split())


def test_sharded_it_measures_megatrons_fsdp_and_ours(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    links = "a2a=1GBps,dp=1GBps,latency=1ms"
    sharded = "--data-parallel-sharding-strategy optim_grads_params"
    done = run(f"--against megatron {SMALL} {sharded} --emulate {links} --json {out}")
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["strategy"] == "optim_grads_params"
    variants = result["variants"]
    gathers = {name: variant["num_gathers"] for name, variant in variants.items()}
    # FSDP v1 gathers a layer for each forward and each backward of a microbatch, and the root once;
    # its experts', which no other rank shares, are not counted. Ours are gathered once.
    assert {gathers[name] for name in gathers if not name.startswith("ours")} == {2 * 2 * 2 + 1}
    assert {gathers[name] for name in gathers if name.startswith("ours")} == {2 + 2}, "root, head"
    assert {variant["hidden_share"] for variant in variants.values()} == {None}


@pytest.mark.parametrize("spread", [None, -0.75])
def test_skewed_routing_is_megatrons_own_and_the_same_for_both_sides(spread: float | None) -> None:
    flags = [*f"bench --against megatron {SMALL}".split()]
    if spread is not None:
        flags += ["--moe-router-force-biased", str(spread)]
    _, args = parse(flags)
    assert isinstance(args, BenchArguments)
    with measured_world(args) as world, environment(world.device):
        maker = ModelMaker(args, world)
        for is_ours in (False, True):
            whole: Any = maker.make(is_ours=is_ours, overlap=True, delay=False).whole
            config = whole.config
            assert config.moe_router_force_biased == spread
            assert config.moe_router_force_load_balancing == (spread is None)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--num-experts 6", "--num-experts 6 is not divisible by --emulate-world 4"),
        ("--emulate a2a=fast", "--emulate"),
        ("--num-query-groups 3", "--num-query-groups 3 does not divide --num-attention-heads 8"),
        ("--moe-router-force-biased nan", "--moe-router-force-biased nan: expected a number"),
        ("--kv-channels 7", "--kv-channels 7: heads of 7, expected an even number"),
        ("--vocab-size 10", "--vocab-size 10: expected 256 or more: the text is bytes"),
        ("--emulate-world 1", "--emulate-world 1 with --against megatron"),
        ("--plot steps.pdf", "--plot steps.pdf: expected a name that ends in .png or .svg"),
        ("--sharding", "--sharding --against megatron: expected --against fsdp2"),
        ("--model reference", "--against megatron with --model reference"),
        (
            "--cuda-graphs --transformer-impl transformer_engine --seq-length 100",
            "--cuda-graphs with --seq-length 100: expected a multiple of 64",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(flags: str, words: str) -> None:
    done = run(f"--against megatron {flags}")
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_flag_without_effect_warns() -> None:
    done = run(f"--against megatron {SMALL} --trace t.json --nproc 3")
    assert "--nproc has no effect with --against megatron" in done.stderr
    assert not Path("t.json").exists()
