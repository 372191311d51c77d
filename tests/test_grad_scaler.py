"""Loss scaling: all ranks skip together, and a step that is not skipped is the unscaled one."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from schedule_support import (
    Case,
    batches,
    build,
    named,
    standard_step,
    unequal,
    weights,
)
from sharding_support import STRATEGIES, own_rows
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ep_overlap.models.reference import cross_entropy
from ep_overlap.schedule import OverlapSchedule
from ep_overlap.testing import RankPool
from fsdp_hooks import GradScaler, clip_grad_norm_, fully_shard, shard_optimizer


def adamw(parts: Any, **options: Any) -> torch.optim.Optimizer:
    return shard_optimizer(torch.optim.AdamW(parts.module.parameters(), lr=1e-2, **options))


# ---- overflow on some ranks ----------------------------------------------------------------------


def overflow_of_an_expert(strategy: str, scaler: torch.amp.GradScaler, **options: Any) -> Any:
    """One of rank 3's expert gradients is infinite. Whether the step was skipped, and the scale."""
    case = Case(strategy=strategy, ep=2, dtype=torch.float32, layers=1)
    model = build(case)
    optimizer = adamw(model, **options)
    before = weights(model)
    standard_step(
        model, batches(model, case, 0), lambda out, batch: scaler.scale(cross_entropy(out, batch))
    )
    if dist.get_rank() == 3:
        for param in model.expert_parameters():
            rows = own_rows(param.grad)
            if rows.numel():
                rows.view(-1)[0] = math.inf
                break
    scaler.step(optimizer)
    scaler.update()
    return not unequal(before, weights(model)), scaler.get_scale()


def ours(strategy: str, **options: Any) -> Any:
    return overflow_of_an_expert(strategy, GradScaler("cpu", init_scale=1024.0), **options)


def torchs(strategy: str) -> Any:
    return overflow_of_an_expert(strategy, torch.amp.GradScaler("cpu", init_scale=1024.0))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_experts_overflow_on_one_rank_skips_the_step_of_all(
    ranks4: RankPool, strategy: str
) -> None:
    assert ranks4.run(ours, strategy) == [(True, 512.0)] * 4


def fused() -> Any:
    return ours("optim_grads_params", fused=True)


def test_a_fused_optimizer_that_scales_back_itself_skips_too(ranks4: RankPool) -> None:
    assert ranks4.run(fused) == [(True, 512.0)] * 4


def test_torchs_scaler_lets_ranks_part_which_is_why_ours_exists(ranks4: RankPool) -> None:
    results = ranks4.run(torchs, "no_shard")
    assert results[3] == (True, 512.0)
    assert results[0] == (False, 1024.0)


# ---- a step that is not skipped ------------------------------------------------------------------


def scaled_beside_unscaled(driver: str, fused: bool) -> list[str]:
    """Three steps with clipping. The scale is a power of two, so bitwise equal is right."""
    case = Case(strategy="optim_grads_params", ep=2, layers=1)
    scaled, unscaled = build(case), build(case)
    optimizers = adamw(scaled, fused=fused), adamw(unscaled, fused=fused)
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    schedule = OverlapSchedule(scaled, case.config)
    found: list[str] = []

    def loss_fn(output: Tensor, batch: Any) -> Tensor:
        return scaler.scale(cross_entropy(output, batch))

    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        inputs = batches(scaled, case, step)
        if driver == "schedule":
            losses = list(schedule.step(inputs, loss_fn).losses)
        else:
            losses = standard_step(scaled, inputs, loss_fn)
        expected = standard_step(unscaled, inputs, cross_entropy)
        if not fused:  # with fused, step() scales back itself, within the kernel
            scaler.unscale_(optimizers[0])
            clip_grad_norm_(scaled.module, 0.05)
            clip_grad_norm_(unscaled.module, 0.05)
        scaler.step(optimizers[0])
        optimizers[1].step()
        plain_losses = [loss / scaler.get_scale() for loss in losses]
        scaler.update()
        found += unequal(named(plain_losses), named(expected))
        found += unequal(weights(scaled), weights(unscaled))
    assert scaler.get_scale() == 2.0**11
    return found


@pytest.mark.parametrize("driver", ["standard", "schedule"])
@pytest.mark.parametrize("fused", [False, True])
def test_scaled_steps_are_bitwise_those_without(ranks2: RankPool, driver: str, fused: bool) -> None:
    assert ranks2.run(scaled_beside_unscaled, driver, fused) == [[], []]


# ---- torch's scaler otherwise --------------------------------------------------------------------


def half() -> str:
    model = fully_shard(
        nn.Linear(2, 2, dtype=torch.float16),
        mesh=DeviceMesh("cpu", list(range(dist.get_world_size()))),
    )
    optimizer = shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 2, dtype=torch.float16)).sum()).backward()
    with pytest.raises(ValueError, match="gradients are float16; expected float32") as raised:
        scaler.unscale_(optimizer)
    return str(raised.value)


def test_float16_gradients_are_refused(ranks2: RankPool) -> None:
    for message in ranks2.run(half):
        assert "Keep the main weights in float32" in message


def half_on_one_rank() -> bool:
    """Rank 1's own parameter is in float16. Whether rank 0's step was skipped."""
    rank = dist.get_rank()
    own = [DeviceMesh("cpu", [0]), DeviceMesh("cpu", [1])][rank]
    dtype = (torch.float32, torch.float16)[rank]
    model = fully_shard(nn.Linear(2, 2, dtype=dtype), mesh=own)
    before = own_rows(model.weight).clone()
    optimizer = shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = GradScaler("cpu", init_scale=2.0)
    scaler.scale(model(torch.ones(1, 2, dtype=dtype)).sum()).backward()
    if rank == 1:
        with pytest.raises(ValueError, match="gradients are float16"):
            scaler.step(optimizer)
        assert torch.equal(own_rows(model.weight.grad), torch.full((2, 2), 2.0, dtype=dtype))
        return True
    scaler.step(optimizer)
    return torch.equal(own_rows(model.weight), before)


def test_float16_on_one_rank_leaves_no_other_waiting(ranks2: RankPool) -> None:
    assert ranks2.run(half_on_one_rank) == [True, True]


def test_its_state_is_that_of_torchs_scaler() -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5)
    mine = GradScaler("cpu")
    mine.load_state_dict(theirs.state_dict())
    assert mine.state_dict() == theirs.state_dict()
    assert mine.scale(torch.ones(())).item() == 8.0
    theirs.load_state_dict(mine.state_dict())
    assert theirs.get_scale() == 8.0


def test_switched_off_it_passes_everything_through() -> None:
    param = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = GradScaler("cpu", enabled=False)
    scaler.scale(param.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert param.item() == 0.0
