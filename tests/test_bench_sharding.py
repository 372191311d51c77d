"""``bench --sharding``: our standard path and FSDP2 do the same work; what is measured is right."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sharding_support import Stack, token_loss, tokens_of, world_mesh
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard

from ep_overlap.cli import main
from ep_overlap.commands.argument_checks import remarks
from ep_overlap.commands.arguments import BenchArguments, OptimizerName, Peer
from ep_overlap.commands.bench_sharding import check_same_work
from ep_overlap.commands.running import RunFailedError
from ep_overlap.models.dense import DenseConfig, DenseTransformer
from ep_overlap.plan.lower import Strategy
from ep_overlap.report.fsdp2_peak import GatheredBytes
from ep_overlap.testing import RankPool

ROOT = Path(__file__).parent.parent
CONFIG = DenseConfig(
    num_blocks=3, hidden_size=32, num_heads=2, ffn_hidden_size=48, seq_length=16, vocab_size=256
)
FLAGS = (
    "--num-blocks 3 --hidden-size 32 --num-attention-heads 2 --moe-ffn-hidden-size 48 "
    "--seq-length 16"
)


def nbytes(module: nn.Module) -> int:
    return sum(param.numel() * param.element_size() for param in module.parameters())


def test_ours_and_fsdp2_train_alike_and_ours_gathers_no_more_memory(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    command = f"bench --sharding --against fsdp2 --rounds 8 {FLAGS}"
    done = subprocess.run(
        [sys.executable, "-m", "ep_overlap.cli", *command.split(), "--json", str(path)],
        cwd=ROOT,
        env={**os.environ},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(path.read_text())
    ours, fsdp2 = result["variants"]["ours"], result["variants"]["fsdp2"]
    assert list(result["variants"]) == ["ours", "fsdp2"]
    assert result["largest_difference"] <= 1e-5
    for name in ("first_loss", "last_loss", "grad_norm"):
        assert ours[name] == pytest.approx(fsdp2[name], rel=1e-5)
    assert ours["last_loss"] < ours["first_loss"]  # eight steps of a text
    assert ours["grad_norm"] > 0

    model = DenseTransformer(CONFIG, seed=1)
    assert result["num_parameters"] == sum(param.numel() for param in model.parameters())
    block = nbytes(model.layers[0])
    root = nbytes(model) - CONFIG.num_blocks * block
    assert root + block <= ours["peak_unsharded_bytes"] <= fsdp2["peak_unsharded_bytes"]
    # FSDP2 gathers into a buffer, and copies from there: both hold the block for a while.
    assert fsdp2["peak_unsharded_bytes"] >= root + 2 * block
    assert fsdp2["peak_buffer_bytes"] >= block

    assert result["ratio"] == ours["step_time_s"] / fsdp2["step_time_s"]
    lowest, middle, highest = result["ratio_of_rounds"]
    assert 0 < lowest <= middle <= highest
    assert "fsdp2" in done.stdout


def fsdp2_peaks() -> dict[bool, tuple[int, int]]:
    """By ``reshard_after_forward``: bytes of parameters at the peak, and of the buffers."""
    found: dict[bool, tuple[int, int]] = {}
    for reshards in (True, False):
        torch.manual_seed(0)
        model = Stack()
        for block in model.blocks:
            fsdp2_fully_shard(block, mesh=world_mesh(), reshard_after_forward=reshards)
        fsdp2_fully_shard(model, mesh=world_mesh())
        with GatheredBytes() as watched:
            token_loss(model, tokens_of(rank=0)).backward()
        found[reshards] = (
            watched.peak_bytes - watched.peak_buffer_bytes,
            watched.peak_buffer_bytes,
        )
    return found


def test_the_peak_of_fsdp2_is_what_it_holds_gathered(ranks2: RankPool) -> None:
    model = Stack()
    # FSDP2 pads each parameter to a multiple of the ranks' number of rows: 5 of these are odd.
    block = sum(
        (param.shape[0] + param.shape[0] % 2) * param[0].numel() * param.element_size()
        for param in model.blocks[0].parameters()
    )
    own = [model.embed.weight, model.head.weight, model.head.bias]
    root = sum((p.shape[0] + p.shape[0] % 2) * p[0].numel() * p.element_size() for p in own)
    for peaks in ranks2.run(fsdp2_peaks):
        resharded, buffers = peaks[True]
        assert resharded == root + block  # the one in use
        assert buffers >= block
        kept, _ = peaks[False]
        assert kept == root + len(model.blocks) * block


@pytest.mark.parametrize("theirs", [2.0001, float("nan")])
def test_times_of_different_work_are_refused(theirs: float) -> None:
    assert check_same_work([1.0, 2.0], [1.0, 2.00001]) == pytest.approx(5e-6, rel=1e-3)
    with pytest.raises(RunFailedError, match="times are of different work"):
        check_same_work([1.0, 2.0], [1.0, theirs])


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--link paced:800mbit", "it would pace our communicators and not FSDP2's"),
        ("--link fast", "expected paced:RATE or shaped:RATE"),
        ("--nproc 1", "expected 2 or more, since one rank has nothing to share"),
        (
            "--host-overhead",
            "--sharding, --wgrad-fusion, --host-overhead and --suite are measurements; choose",
        ),
        ("--against ddp", "--against: expected one of fsdp2, megatron; got 'ddp'"),
        ("--num-blocks 0", "--num-blocks: expected 1 or more, got 0"),
        ("--hidden-size 100", "--hidden-size 100 is not divisible by --num-attention-heads 8"),
        ("--trace a.json", "--trace with --sharding: it has none; leave it out"),
    ],
)
def test_what_the_measurement_cannot_do_is_refused_in_one_line(
    flags: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["bench", "--sharding", *flags.split()])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    said = capsys.readouterr().err
    assert problem in said
    assert said.count("\n") == 1


def test_only_the_measurement_of_sharding_leaves_the_link_as_it_is() -> None:
    assert BenchArguments().link_in_use == "paced:800mbit"
    assert BenchArguments(sharding=True).link_in_use == "plain"
    assert BenchArguments(sharding=True, link="shaped:1gbit").link_in_use == "shaped:1gbit"
    # The remark on expert parallelism is not for a model without experts.
    said = list(remarks(BenchArguments(sharding=True, expert_model_parallel_size=1), {}))
    assert len(said) == 1
    assert "has no effect with --sharding: its model is dense" in said[0]


def test_the_dense_model_is_its_seeds_function_and_looks_at_no_later_token() -> None:
    drawn_before = torch.random.get_rng_state()
    model, twin, other = (DenseTransformer(CONFIG, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), drawn_before)
    tokens = torch.arange(2 * CONFIG.seq_length).view(2, -1)
    changed = tokens.clone()
    changed[:, 10:] += 100
    scores = model(tokens)
    assert scores.shape == (2, CONFIG.seq_length, CONFIG.vocab_size)
    assert torch.equal(scores, twin(tokens))
    assert not torch.equal(scores, other(tokens))
    torch.testing.assert_close(model(changed)[:, :10], scores[:, :10])
    assert not torch.allclose(model(changed)[:, 10:], scores[:, 10:])


def test_settings_of_experts_are_said_to_have_no_effect() -> None:
    args = BenchArguments(sharding=True, num_experts=8, num_layers=3)
    said = [text.partition(" ")[0] for text in remarks(args, {})]
    assert said == ["--num-layers", "--num-experts"]
    used = BenchArguments(
        sharding=True,
        against=Peer.FSDP2,
        num_blocks=3,
        optimizer=OptimizerName.SGD,
        data_parallel_sharding_strategy=Strategy.OPTIM_GRADS_PARAMS,
    )
    assert list(remarks(used, {})) == []


def test_another_strategy_is_said_to_have_no_effect() -> None:
    args = BenchArguments(sharding=True, data_parallel_sharding_strategy=Strategy.OPTIM)
    assert list(remarks(args, {})) == [
        "--data-parallel-sharding-strategy has no effect with --sharding: it measures "
        "optim_grads_params"
    ]
