"""``ep-overlap bench --suite multi-gpu``: its parts, on CPU ranks."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from ep_overlap.commands import suite
from ep_overlap.commands.argument_parser import parse
from ep_overlap.commands.world import World
from ep_overlap.testing import RankPool
from fsdp_hooks.collectives import new_torch_group


def reference_parity() -> tuple[dict[str, dict[str, str]], int]:
    """And how many groups were made. Collective."""
    ranks = list(range(dist.get_world_size()))
    world = World(
        rank=dist.get_rank(),
        size=len(ranks),
        device=torch.device("cpu"),
        speed=None,
        control=new_torch_group(ranks, "control"),
    )
    found = suite.parity_of(suite.MODELS[:1], ["optim_grads", "optim_grads_params"], world)
    return found, len(world.links)


def test_every_column_of_every_strategy_is_compared(ranks2: RankPool) -> None:
    for found, num_groups in ranks2.run(reference_parity):
        assert found == {
            f"reference, float32, {strategy}": dict.fromkeys(suite.COLUMNS, "bitwise")
            for strategy in ("optim_grads", "optim_grads_params")
        }
        assert num_groups <= 8, "models that run one after another share them"


def test_flags_that_it_does_not_read_change_nothing_that_is_timed() -> None:
    command = "bench --suite multi-gpu --rounds 3 --device cpu"
    unread = (
        "--cuda-graphs --vocab-size 999 --data-parallel-sharding-strategy optim --num-layers 7 "
        "--moe-router-force-biased -0.5 --max-unsharded-units 2 --emulate a2a=1GBps,dp=1GBps"
    )
    (_, plain), (_, others) = parse(command.split()), parse(f"{command} {unread}".split())
    for has_gpu_each, has_te in ((False, False), (False, True), (True, True)):
        sizes = [
            suite.timed_sizes(args, num_ranks=2, has_gpu_each=has_gpu_each, has_te=has_te)
            for args in (plain, others)
        ]
        assert sizes[0] == sizes[1]
        assert (sizes[0].rounds, sizes[0].emulates_nothing) == (3, True)
        assert sizes[0].num_experts == (32 if has_gpu_each else 8)
        assert sizes[0].seq_length == (4096 if has_gpu_each else 64), "over gloo"


def test_what_it_found_is_told_part_by_part() -> None:
    steps = {
        "num_layers": 2,
        "transformer_impl": "local",
        "num_microbatches": 2,
        "micro_batch_size": 1,
        "seq_length": 16,
        "routing": "balanced",
        "strategy": "optim_grads_params",
        "device": "CPU",
        "world": "2 ranks over gloo",
        "rounds": 1,
        "link_s": None,
        "best_of_megatron": "megatron combined",
        "counts_memory": False,
        "variants": {
            "ours paired": {
                "step_time_s": 0.5,
                "of_best": 0.9,
                "hidden_share": None,
                "host_s": 0.1,
                "peak_bytes": 0,
                "state_bytes": 0,
                "num_gathers": 4,
            }
        },
    }
    told = {
        "2 ranks, 2 steps failed": {
            "parity": {"reference, optim": dict.fromkeys(suite.COLUMNS, "failed")}
        },
        "5 of 6 gathers": {"overlaps": {"1": "5 of 6 gathers, 3 of 3 reductions, 3 streams"}},
        "no_shard 2 ranks over gloo hidden 0.900x": {"steps": steps | {"strategy": "no_shard"}},
        "optim_grads_params gathers 0.900x 4": {"sharded": steps},
        "Transformer Engine's layers": {"left_out": ["Transformer Engine's layers"]},
    }
    for words, part in told.items():
        console = Console(record=True, width=140)
        for table in suite.tables(2, part):
            console.print(table)
        text = console.export_text()
        assert [word for word in words.split() if word not in text] == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--nproc 3", "--nproc 3 with --suite: expected 2, 4 or 8"),
        ("--wgrad-fusion", "--suite are measurements; choose one"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(flags: str, words: str) -> None:
    command = f"bench --suite multi-gpu {flags}".split()
    done = subprocess.run(
        [sys.executable, "-m", "ep_overlap.cli", *command],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
