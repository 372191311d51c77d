"""Models whose weight gradients cannot be delayed or fused are refused by name, in time."""

import pytest
import torch
from schedule_support import (
    Case,
    batches,
    gradients,
    loss_of,
    reference,
    standard_step,
    unequal,
)
from torch import Tensor, nn
from wgrad_support import CountingSink, MainGradSink

from ep_overlap.config import OverlapConfig
from ep_overlap.models.reference import MoETransformer
from ep_overlap.schedule import OverlapSchedule
from fsdp_hooks.lifecycle import NoSharding
from fsdp_hooks.wgrad import ManagedLayer
from fsdp_hooks.wgrad_layers import delayed_wgrad, manage_wgrad

# ---- Transformer Engine --------------------------------------------------------------------------


def of_transformer_engine(name: str, base: type[nn.Module] = nn.Linear) -> type[nn.Module]:
    """A class that says that it is Transformer Engine's, which is not there."""
    return type(name, (base,), {"__module__": "transformer_engine.pytorch.module"})


def test_a_norm_of_transformer_engine_beside_linear_layers_is_left_alone() -> None:
    norm = of_transformer_engine("LayerNorm", nn.LayerNorm)(4)
    model = nn.Sequential(norm, nn.Linear(4, 4))
    with delayed_wgrad(model) as delayed:
        model(torch.ones(2, 4)).sum().backward()
        assert len(delayed) == 1
        assert norm.weight.grad is not None


@pytest.mark.parametrize("module", ["transformer_engines", "my.transformer_engine"])
def test_a_package_of_a_similar_name_is_not_refused(module: str) -> None:
    model = nn.Sequential(type("Linear", (nn.Linear,), {"__module__": module})(4, 4))
    manage_wgrad(model)
    assert isinstance(model[0], ManagedLayer)


# ---- nothing to manage ---------------------------------------------------------------------------


class OwnLinear(nn.Linear):
    """Computes by itself, so nobody can tell how its gradient is made."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


def unmanageable(*, keeps: str | None = None) -> MoETransformer:
    """A model whose linear layers have a forward of their own, but for one."""
    model = reference(CASE)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name != keeps:
            layer.__class__ = OwnLinear
    return model


CASE = Case(layers=2)


def losses_of(model: MoETransformer, **options: bool) -> list[Tensor]:
    schedule = OverlapSchedule(model, OverlapConfig(num_microbatches=2, **options))
    return list(schedule.step(batches(model, CASE, 0), loss_of(CASE)).losses)


@pytest.mark.parametrize("option", ["delay_wgrad", "dispatch_over_wgrad"])
def test_a_schedule_of_a_model_without_manageable_layers_is_refused_when_built(option: str) -> None:
    model = unmanageable()
    with pytest.raises(
        ValueError,
        match=r"^MoETransformer has no layer whose weight gradients can be managed; expected one "
        "of Linear, or a ManagedLayer",
    ):
        OverlapSchedule(model, OverlapConfig(num_microbatches=2, **{option: True}))
    expected = standard_step(unmanageable(), batches(model, CASE, 0), loss_of(CASE))
    assert all(map(torch.equal, losses_of(model), expected))  # and runs, where none is delayed


def test_w_nodes_without_a_manageable_layer_of_theirs_make_nothing_and_the_rest_is_right() -> None:
    """Only the first layer's QKV can be delayed: all other W nodes are empty."""
    model, twin = (unmanageable(keeps="blocks.0.attention.qkv") for _ in range(2))
    losses = losses_of(model, delay_wgrad=True)
    expected = standard_step(twin, batches(twin, CASE, 0), loss_of(CASE))
    assert sum(isinstance(part, ManagedLayer) for part in model.modules()) == 1
    assert all(map(torch.equal, losses, expected))
    assert unequal(gradients(model), gradients(twin)) == []


def test_gradients_that_the_sharding_core_would_not_find_are_refused_when_built() -> None:
    model = reference(CASE)
    core = NoSharding(model)
    core.grad_sink = MainGradSink(model)
    manage_wgrad(model, fuse=True)  # of an unsharded model: into .grad
    with pytest.raises(ValueError, match="which its sharding core does not read"):
        manage_wgrad(model, sink=core.grad_sink)
    for delay in (False, True):
        with pytest.raises(ValueError, match="which its sharding core does not read"):
            OverlapSchedule(
                model, OverlapConfig(num_microbatches=2, delay_wgrad=delay), lifecycle=core
            )
    model = reference(CASE)
    manage_wgrad(model, sink=CountingSink(core.grad_sink))  # the core's, counted
    OverlapSchedule(model, OverlapConfig(num_microbatches=2, delay_wgrad=True), lifecycle=core)
