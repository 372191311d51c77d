"""The norm over dense, expert and hybrid meshes, and clipping by it, against one process."""

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from schedule_support import Case, batches, build, standard_step
from sharding_support import (
    STRATEGIES,
    Grads,
    Stack,
    double,
    own_rows,
    shard_stack,
    token_loss,
    tokens_of,
    whole_grads,
    whole_weights,
    world_mesh,
    worst_error,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ep_overlap.models.groups import lone_expert_groups
from ep_overlap.models.reference import MoETransformer, cross_entropy
from ep_overlap.testing import RankPool
from fsdp_hooks import clip_grad_norm_, fully_shard, shard_optimizer
from fsdp_hooks.grad_norm import global_grad_norm

TOLERANCE = 1e-12
"""float64, against one process: sums over ranks are formed in another order."""

NORM_TYPES = (2.0, 1.0, 3.0, math.inf)


# ---- dense and expert mesh -----------------------------------------------------------------------


def some_of(reference: nn.Module, model: nn.Module) -> Grads:
    """The reference's gradients of the parameters that this rank's model has."""
    grads = {name: param.grad for name, param in reference.named_parameters()}
    return {name: grads[name] for name, _ in model.named_parameters()}


def moe_beside_one_process(strategy: str) -> dict[str, float]:
    """EP 2 on 4 ranks: dense mesh of 4, expert meshes of 2. Clip and step, by each norm type."""
    case = Case(strategy=strategy, ep=2, dtype=torch.float64, layers=1)
    model = build(case)
    reference = MoETransformer(model.config, lone_expert_groups(), seed=3)
    optimizer = shard_optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    )
    expected = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    assert len({param.device_mesh for param in model.parameters()}) == 2
    errors: dict[str, float] = {}
    for step, norm_type in enumerate(NORM_TYPES):
        for each in (optimizer, expected):
            each.zero_grad()
        standard_step(model, batches(model, case, step), cross_entropy)
        for rank in range(4):
            inputs = batches(model, case, step, rank=rank)
            for batch in inputs:
                (cross_entropy(reference(batch), batch) / len(inputs) / 4).backward()
        before = torch.nn.utils.get_total_norm(
            [param.grad for param in reference.parameters()], norm_type
        )
        max_norm = float(before) / 3
        ours = clip_grad_norm_(
            model.parameters(), max_norm, norm_type, error_if_nonfinite=True, foreach=step != 1
        )
        torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm, norm_type)
        assert ours.shape == ()
        assert ours.dtype is torch.float64
        errors[f"norm {norm_type}"] = float((ours / before - 1).abs())
        clipped = torch.nn.utils.get_total_norm(
            [param.grad for param in reference.parameters()], norm_type
        )
        errors[f"clipped norm {norm_type}"] = abs(
            global_grad_norm(model, norm_type) / float(clipped) - 1
        )
        errors[f"gradients {norm_type}"] = worst_error(
            whole_grads(model), some_of(reference, model)
        )
        for each in (optimizer, expected):
            each.step()
    weights = {name: param.detach() for name, param in reference.named_parameters()}
    ours_now = whole_weights(model)
    errors["weights"] = worst_error(ours_now, {name: weights[name] for name in ours_now})
    return errors


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_over_dense_and_expert_meshes_norm_and_clipped_gradients_are_those_of_one_process(
    ranks4: RankPool, strategy: str
) -> None:
    for errors in ranks4.run(moe_beside_one_process, strategy):
        assert len(errors) == 3 * len(NORM_TYPES) + 1
        for case, error in errors.items():
            assert error <= TOLERANCE, case


# ---- any mesh ------------------------------------------------------------------------------------


def on_mesh(mesh: DeviceMesh, placements: Iterable[Any], whole: Tensor, rows: Tensor) -> Tensor:
    """A parameter of ``whole``'s shape whose gradient's local rows are ``rows``."""

    def sharded(local: Tensor) -> DTensor:
        return DTensor.from_local(
            local, mesh, list(placements), run_check=False, shape=whole.shape, stride=whole.stride()
        )

    param = nn.Parameter(sharded(torch.zeros_like(rows)))
    param.grad = sharded(rows.clone())
    return param


def hybrid() -> None:
    """Replicated outside, sharded inside; uneven rows, and a rank without any."""
    rank = dist.get_rank()
    torch.manual_seed(5)
    wholes = [torch.randn(n, 3, dtype=torch.float64) for n in (5, 1, 4, 3)]
    two = DeviceMesh("cpu", [[0, 1], [2, 3]])
    one = world_mesh()
    inner = rank % 2
    params = [
        on_mesh(two, [Replicate(), Shard(0)], wholes[0], wholes[0][3 * inner : 3 + 2 * inner]),
        on_mesh(two, [Replicate(), Shard(0)], wholes[1], wholes[1][: 1 - inner]),
        on_mesh(two, [Replicate(), Replicate()], wholes[2], wholes[2]),
        on_mesh(one, [Replicate()], wholes[3], wholes[3]),
    ]
    everything = torch.cat([whole.flatten() for whole in wholes])
    for norm_type in NORM_TYPES:
        norm = global_grad_norm([*params, *params], norm_type)  # twice in the list counts once
        expected = float(torch.linalg.vector_norm(everything, norm_type))
        assert abs(norm / expected - 1) <= TOLERANCE, norm_type
    norm = clip_grad_norm_([*params, params[0]], 0.5)
    rows = own_rows(params[0].grad)
    expected_rows = wholes[0][3 * inner : 3 + 2 * inner] * (0.5 / (norm + 1e-6))
    torch.testing.assert_close(rows, expected_rows, rtol=TOLERANCE, atol=0)
    # Below the limit a gradient is multiplied by exactly 1.
    before = rows.clone()
    clip_grad_norm_(params, 1e6)
    assert torch.equal(own_rows(params[0].grad), before)


def test_over_hybrid_and_replicated_meshes_each_element_counts_once(ranks4: RankPool) -> None:
    ranks4.run(hybrid)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


def tied() -> tuple[float, float]:
    model, reference = double(Tied), double(Tied)
    fully_shard(model, mesh=world_mesh())
    token_loss(model, tokens_of(dist.get_rank())).backward()
    size = dist.get_world_size()
    for rank in range(size):
        (token_loss(reference, tokens_of(rank)) / size).backward()
    expected = float(torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
    held_twice = [model.embed.weight, model.head.weight]
    ours = float(clip_grad_norm_(held_twice, 0.1))
    return abs(ours / expected - 1), worst_error(
        whole_grads(model), {name: param.grad for name, param in reference.named_parameters()}
    )


def test_a_tied_weight_counts_once_and_is_clipped_once(ranks2: RankPool) -> None:
    for errors in ranks2.run(tied):
        assert max(errors) <= TOLERANCE


# ---- ranks that differ ---------------------------------------------------------------------------


def gradients_on_one_rank() -> None:
    """Rank 1 has none, or no parameters at all: it still takes part, and gets the same norm."""
    rank = dist.get_rank()
    own = [DeviceMesh("cpu", [0]), DeviceMesh("cpu", [1])][rank]
    param = on_mesh(own, [Replicate()], torch.zeros(2), torch.tensor([3.0, 4.0]))
    if rank == 1:
        param.grad = None
    for params in ([param], [param] if rank == 0 else []):
        norm = clip_grad_norm_(params, 10.0)
        assert norm.dtype is torch.float32
        assert norm.item() == 5.0
    assert (param.grad is None) == (rank == 1)
    assert clip_grad_norm_([], 1.0).item() == 0.0


def test_a_rank_without_gradients_takes_part_and_gets_the_norm(ranks2: RankPool) -> None:
    ranks2.run(gradients_on_one_rank)


def nonfinite_on_one_rank() -> None:
    rank = dist.get_rank()
    own = [DeviceMesh("cpu", [0]), DeviceMesh("cpu", [1])][rank]
    for bad_rank in range(2):
        for bad in (math.inf, math.nan):
            for norm_type in NORM_TYPES:
                value = bad if rank == bad_rank else 1.0
                param = on_mesh(own, [Replicate()], torch.zeros(1), torch.tensor([value]))
                with pytest.raises(RuntimeError, match=f"norm of order {norm_type} is {bad}"):
                    clip_grad_norm_([param], 1.0, norm_type, error_if_nonfinite=True)
                grad = own_rows(param.grad)
                assert torch.equal(grad.nan_to_num(), torch.tensor([value]).nan_to_num())
                norm = clip_grad_norm_([param], 1.0, norm_type)
                assert norm.isnan() if math.isnan(bad) else norm.isinf(), (bad_rank, norm_type)


def test_inf_and_nan_on_one_rank_reach_all_whatever_the_norm_type(ranks2: RankPool) -> None:
    ranks2.run(nonfinite_on_one_rank)


def low_precision() -> float:
    """2,000,000 ones on each rank. In bfloat16 a rank's norm, 1414.2, would be 1416."""
    ones = torch.ones(2_000_000, dtype=torch.bfloat16)
    own = [DeviceMesh("cpu", [rank]) for rank in range(2)][dist.get_rank()]
    params = [
        on_mesh(own, [Replicate()], ones, ones),
        on_mesh(own, [Replicate()], torch.ones(0), torch.ones(0)),
        on_mesh(own, [Replicate()], torch.ones(1), torch.full((1,), 3e20)),
    ]
    norm = clip_grad_norm_(params[:2], math.inf)
    assert norm.dtype is torch.float32
    # The square of 3e20 is beyond float32.
    assert math.isclose(float(clip_grad_norm_(params[2:], 1.0)), 3e20 * 2**0.5, rel_tol=1e-6)
    return float(norm)


def test_sums_are_formed_in_float32_or_better(ranks2: RankPool) -> None:
    assert ranks2.run(low_precision) == [pytest.approx(2000.0, rel=1e-6)] * 2


def refused_on_one_rank() -> None:
    """Rank 1 has a gradient that is not sharded; rank 0 does not wait for it."""
    rank = dist.get_rank()
    own = [DeviceMesh("cpu", [0]), DeviceMesh("cpu", [1])][rank]
    sharded = on_mesh(own, [Replicate()], torch.zeros(1), torch.ones(1))
    plain = nn.Parameter(torch.ones(1))
    plain.grad = torch.ones(1)
    for norm_type in NORM_TYPES:
        params = [sharded, plain] if rank == 1 else [sharded]
        for error_if_nonfinite in (True, False):

            def clip(
                params: Any = params, p: float = norm_type, strictly: bool = error_if_nonfinite
            ) -> Tensor:
                return clip_grad_norm_(params, 1.0, p, error_if_nonfinite=strictly)

            if rank == 1:
                assert "a parameter is not sharded" in message_of(ValueError, clip)
            elif error_if_nonfinite:
                assert f"norm of order {norm_type} is nan" in message_of(RuntimeError, clip)
                assert torch.equal(own_rows(sharded.grad), torch.ones(1))
            else:
                assert clip().isnan()
                own_rows(sharded.grad).fill_(1.0)
    assert clip_grad_norm_([sharded], 10.0).item() == pytest.approx(2**0.5)


def test_a_refusal_on_one_rank_leaves_no_other_waiting(ranks2: RankPool) -> None:
    ranks2.run(refused_on_one_rank)


# ---- refusals, and what torch does ---------------------------------------------------------------


def message_of(error: type[Exception], call: Any) -> str:
    with pytest.raises(error) as raised:
        call()
    return str(raised.value)


def refusals() -> None:
    model = double(Stack)
    shard_stack(model)
    loss = token_loss(model, tokens_of(dist.get_rank()))
    under_way = message_of(RuntimeError, lambda: clip_grad_norm_(model, 1.0))
    assert "while a step is under way (" in under_way
    assert "Clip after the last backward" in under_way
    loss.backward()
    plain = nn.Parameter(torch.ones(2))
    plain.grad = torch.ones(2)
    unsharded = message_of(ValueError, lambda: clip_grad_norm_(plain, 1.0))
    assert "a parameter is not sharded" in unsharded
    negative = message_of(ValueError, lambda: clip_grad_norm_(model, 1.0, 0.0))
    assert negative == "norm_type is 0.0; expected a number above 0, or inf"
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    partly = message_of(ValueError, lambda: clip_grad_norm_(model, 1.0, group=alone))
    assert f"the group has ranks [{dist.get_rank()}]" in partly
    assert f"over [{1 - dist.get_rank()}] too" in partly


def test_refusals_say_what_to_do(ranks2: RankPool) -> None:
    ranks2.run(refusals)


def torchs_own() -> tuple[float, str]:
    """Right on one mesh; on two, an error of torch's that names the meshes."""
    model = double(Stack)
    shard_stack(model)
    token_loss(model, tokens_of(dist.get_rank())).backward()
    theirs = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
    assert isinstance(theirs, DTensor)
    error = abs(float(theirs.full_tensor()) / global_grad_norm(model) - 1)
    own = [DeviceMesh("cpu", [rank]) for rank in range(2)][dist.get_rank()]
    rows = torch.ones(2, dtype=torch.float64)
    other = on_mesh(own, [Replicate()], rows, rows)
    return error, message_of(
        RuntimeError,
        lambda: torch.nn.utils.clip_grad_norm_([*model.parameters(), other], 1.0),
    )


def test_torchs_own_clipping_is_right_on_one_mesh_and_refuses_two(ranks2: RankPool) -> None:
    for error, message in ranks2.run(torchs_own):
        assert error <= TOLERANCE
        assert "must have the same mesh" in message
