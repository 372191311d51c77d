"""Every feature that the parts of a model support, bit for bit megatron-core's own step.

The whole table: ``python tests/megatron_features.py``.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import megatron_features as features
import pytest
import torch
from megatron_features import DRAWING, FEATURES, SHARED_SEQUENCES, Case, Groups
from torch import Tensor

from ep_overlap.config import OverlapConfig
from ep_overlap.plan.action import LayerKind, Node
from ep_overlap.plan.build import build_plan
from ep_overlap.plan.order import ModelShape, OrderName
from ep_overlap.testing import RankPool

BF16 = torch.bfloat16
SHARDED = (
    "tied",
    "MTP 2, tied",
    "learned positions, MTP 1",
    "recompute",
    "recompute, latent attention, MTP 1",
    "hybrid, MTP 2, tied",
    "hybrid, recompute, dropout",
    "hybrid, all alone, MTP 1",
    "all at once",
)
ON_FOUR_RANKS = ("plain", "MTP 1", "all router losses", "hybrid, dense first", "all at once")


def some_cases(feature: str) -> list[Case]:
    interleaved = "plain" if feature in DRAWING else "paired"
    delay = feature not in SHARED_SEQUENCES
    return [
        Case(feature=feature, microbatches=1, order="plain"),
        Case(feature=feature, microbatches=4, order=interleaved, delay=delay),
        Case(feature=feature, microbatches=2, order=interleaved, dtype=BF16),
        Case(feature=feature, microbatches=2, order="plain", dtype=BF16, delay=delay),
    ]


@pytest.mark.parametrize("feature", FEATURES)
def test_on_two_ranks_it_is_bitwise_megatrons_own_step(ranks2: RankPool, feature: str) -> None:
    assert ranks2.run(features.every_difference, some_cases(feature)) == [{}, {}]


def test_on_four_ranks_it_is_bitwise_megatrons_own_step(ranks4: RankPool) -> None:
    cases = [some_cases(feature)[1] for feature in ON_FOUR_RANKS]
    assert ranks4.run(features.every_difference, cases) == [{}] * 4


def sharded_cases(feature: str) -> list[Case]:
    order = "plain" if feature in DRAWING else "paired"
    return [
        Case(feature=feature, order=order, strategy="no_shard", microbatches=3),
        Case(feature=feature, order=order, strategy="no_shard", microbatches=3, fuse=True),
        Case(feature=feature, order=order, strategy="optim_grads_params", dtype=BF16, delay=True),
        Case(feature=feature, order=order, strategy="optim_grads_params", delay=True, fuse=True),
    ]


@pytest.mark.parametrize("feature", SHARDED)
def test_sharded_it_is_bitwise_the_standard_path(ranks2: RankPool, feature: str) -> None:
    assert ranks2.run(features.every_difference_sharded, sharded_cases(feature)) == [{}, {}]


# ---- each does something -------------------------------------------------------------------------


def without_hand_over() -> dict[str, list[str]]:
    from ep_overlap.models.megatron import GPTParts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GPTParts, "shared_weights", ())
        return features.every_difference(
            [
                Case(feature=feature, microbatches=num, order="plain")
                for feature in ("tied", "MTP 1")
                for num in (1, 4)
            ]
        )


def test_a_shared_weight_used_by_two_backward_calls_rounds_otherwise(ranks2: RankPool) -> None:
    for found in ranks2.run(without_hand_over):
        assert [case.partition(":")[0] for case in found] == ["tied", "MTP 1"]
        assert all("4 x plain" in case for case in found)  # one microbatch adds to no other
        for names in found.values():
            assert names == ["gradient of embedding.word_embeddings.weight"]


def without_scale(feature: str) -> set[str]:
    """What a step leaves that another scale of the losses beside the main one changes."""
    from ep_overlap.models.megatron_cpu import megatron_on_cpu

    case, groups = Case(feature=feature), Groups.new()
    with megatron_on_cpu(), pytest.MonkeyPatch.context() as patch:
        model = features.model_of(feature, case.dtype, groups)
        before = features.our_step(model, case)
        scale = features.scale_auxiliary_losses
        patch.setattr(features, "scale_auxiliary_losses", lambda _: scale(0.0))
        return set(features.unequal(features.our_step(model, case), before))


@pytest.mark.parametrize(
    ("feature", "parameter"),
    [
        ("MTP 1", "mtp.layers.0.eh_proj.weight"),
        ("MTP 2, tied", "embedding.word_embeddings.weight"),
        ("aux loss", "decoder.layers.0.mlp.router.weight"),
        ("all router losses", "decoder.layers.1.mlp.router.weight"),
    ],
)
def test_losses_beside_the_main_one_have_their_own_scale(
    ranks2: RankPool, feature: str, parameter: str
) -> None:
    for changed in ranks2.run(without_scale, feature):
        assert f"gradient of {parameter}" in changed
        assert not any(name.startswith(("loss", "logged")) for name in changed)


def losses_and_logs(feature: str) -> dict[str, list[float]]:
    from ep_overlap.models.megatron_cpu import megatron_on_cpu

    case, groups = Case(feature=feature), Groups.new()
    with megatron_on_cpu():
        left = features.our_step(features.model_of(feature, case.dtype, groups), case)
    return {name: value.flatten().tolist() for name, value in left.items() if "log" in name}


def test_what_megatron_logs_is_logged(ranks2: RankPool) -> None:
    for logged in ranks2.run(losses_and_logs, "all at once"):
        assert sorted(logged) == [
            "logged global_load_balancing_loss",
            "logged load_balancing_loss",
            "logged of MTP, correct_values",
            "logged of MTP, loss_values",
            "logged of MTP, total_values",
            "logged seq_load_balancing_loss",
            "logged z_loss",
        ]
        # A dense layer, two with experts, two of MTP.
        assert [value > 0 for value in logged["logged z_loss"]] == [False, True, True, True, True]
        assert all(value > 0 for value in logged["logged of MTP, loss_values"])


def calls_and_bytes(feature: str) -> tuple[dict[str, int], list[int]]:
    """How often a step of one microbatch calls what the decoder consists of; and how many bytes of
    the second norm's output are alive when the experts begin."""
    from ep_overlap.models.megatron_cpu import megatron_on_cpu

    case, groups = Case(feature=feature, microbatches=1, order="serial"), Groups.new()
    calls: Counter[str] = Counter()
    normed: dict[str, Tensor] = {}
    alive: list[int] = []
    with megatron_on_cpu():
        model = features.model_of(feature, case.dtype, groups)
        for name, module in model.named_modules():
            layer, _, part = name.rpartition(".")

            def called(module: Any, inputs: Any, name: str = name) -> None:
                calls[name] += 1

            def made(module: Any, inputs: Any, output: Tensor, layer: str = layer) -> None:
                normed.setdefault(layer, output)

            def begins(module: Any, inputs: Any, layer: str = layer) -> None:
                alive.append(normed[layer.removesuffix(".mlp")].untyped_storage().nbytes())

            module.register_forward_pre_hook(called)
            if part == "pre_mlp_layernorm":
                module.register_forward_hook(made)
            elif part == "experts":
                module.register_forward_pre_hook(begins)
        features.our_step(model, case)
    return calls, alive


def test_what_is_recomputed_is_called_twice_and_not_kept(ranks2: RankPool) -> None:
    # A dense layer, and two with experts.
    for calls, alive in ranks2.run(calls_and_bytes, "recompute"):
        twice = {name for name, count in calls.items() if count == 2}
        assert {name for name in twice if name.count(".") < 5} == {
            "decoder.layers.0.mlp",
            "decoder.layers.0.mlp.linear_fc1",
            "decoder.layers.0.mlp.linear_fc2",
            *(f"decoder.layers.{index}.mlp.shared_experts" for index in (1, 2)),
            *(
                f"decoder.layers.{index}.{part}"
                for index in range(3)
                for part in (
                    "input_layernorm",
                    "pre_mlp_layernorm",
                    "self_attention.core_attention",
                )
            ),
        }
        assert set(calls.values()) == {1, 2}
        assert alive == [0, 0]


def losses_with_and_without_backward(feature: str) -> tuple[list[float], list[float]]:
    from ep_overlap.models.megatron import GPTParts, mean_loss
    from ep_overlap.models.megatron_cpu import megatron_on_cpu
    from ep_overlap.schedule import OverlapSchedule

    with megatron_on_cpu():
        parts = GPTParts(features.model_of(feature, torch.float32, Groups.new()))
        schedule = OverlapSchedule(parts, OverlapConfig(num_microbatches=2))
        batches = features.batches_of(parts, 2)
        stepped, evaluated = (
            [float(loss) for loss in run(batches, mean_loss).losses]
            for run in (schedule.step, schedule.evaluate)
        )
    return stepped, evaluated


def test_evaluation_recomputes_nothing_and_has_the_same_losses(ranks2: RankPool) -> None:
    for stepped, evaluated in ranks2.run(losses_with_and_without_backward, "recompute"):
        assert evaluated == stepped


# ---- random numbers ------------------------------------------------------------------------------


def refusals(orders: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each way to order two microbatches with dropout, the error; else the order's name."""
    from ep_overlap.models.megatron import GPTParts
    from ep_overlap.models.megatron_cpu import megatron_on_cpu
    from ep_overlap.schedule import OverlapSchedule

    found: list[str] = []
    with megatron_on_cpu():
        parts = GPTParts(features.model_of("dropout", torch.float32, Groups.new()))
        for order in orders:
            try:
                schedule = OverlapSchedule(parts, OverlapConfig(num_microbatches=2, **order))
            except ValueError as error:
                found.append(str(error))
            else:
                found.append(schedule.plan.order)
    return found


def test_forwards_that_take_turns_are_refused_for_a_model_with_dropout(ranks2: RankPool) -> None:
    shape = ModelShape(layers=(LayerKind.MOE,) * 2)
    texts = [
        build_plan(shape=shape, num_microbatches=2, order=order).order_text()
        for order in (OrderName.PAIRED, OrderName.PLAIN)
    ]
    orders = [{}, {"overlap": False}, {"order": "paired"}, *({"order_text": t} for t in texts)]
    for default, serial, paired, own_paired, own_plain in ranks2.run(refusals, orders):
        assert (default, serial, own_plain) == ("plain", "serial", "own")
        assert paired.startswith(
            "order 'paired' cannot run a model that draws random numbers, such as dropout's: "
            "1F.pre comes before 0F."
        )
        assert paired.endswith(
            "Use order='plain', the default for such a model, or turn dropout off"
        )
        assert own_paired.startswith("order 'own' cannot run a model that draws random numbers")


def losses_of_seeds() -> tuple[list[float], list[float], list[float]]:
    from ep_overlap.models.megatron import GPTParts, mean_loss
    from ep_overlap.models.megatron_cpu import megatron_on_cpu
    from ep_overlap.schedule import OverlapSchedule

    with megatron_on_cpu():
        parts = GPTParts(features.model_of("dropout", torch.float32, Groups.new()))
        schedule = OverlapSchedule(parts, OverlapConfig(num_microbatches=2))
        batches = features.batches_of(parts, 2)
        found: list[list[float]] = []
        for seed in (1, 2, 1):
            torch.manual_seed(seed)
            found.append([float(loss) for loss in schedule.step(batches, mean_loss).losses])
    first, second, again = found
    return first, second, again


def test_dropout_draws_anew_and_a_seed_repeats_it(ranks2: RankPool) -> None:
    for first, second, again in ranks2.run(losses_of_seeds):
        assert first == again
        assert first != second


# ---- process groups ------------------------------------------------------------------------------


def mtp_on_the_exchange_lane() -> tuple[str, bool]:
    """The refusal of an MTP layer that uses the exchange lane's group; whether none does so."""
    from ep_overlap.models.megatron import GPTParts
    from ep_overlap.models.megatron_cpu import megatron_on_cpu
    from ep_overlap.run.check_parts import check_parts

    groups = Groups.new()
    with megatron_on_cpu():
        parts = GPTParts(features.model_of("MTP 1", torch.float32, groups))
        used = {collective.group for collective in parts.collectives(Node.POST)}
        is_right = used == {groups.experts.counts}
        with pytest.MonkeyPatch.context() as patch:
            layer = parts.module.mtp.layers[0].mtp_model_layer
            patch.setattr(layer.mlp.token_dispatcher, "tp_ep_group", groups.experts.exchange)
            try:
                check_parts(parts)
            except ValueError as error:
                return str(error), is_right
    return "", is_right


def test_mtp_layers_exchange_by_a_group_of_the_compute_lane(ranks2: RankPool) -> None:
    for message, is_right in ranks2.run(mtp_on_the_exchange_lane):
        assert is_right
        assert message == (
            "0F.dispatch.L0 (lane comm) and 0F.post (lane comp) use one process group; give each "
            "lane a group of its own over the same ranks"
        )
