"""Optimizers over sharded parameters, against one process."""

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharding_support import (
    STRATEGIES,
    Grads,
    SharedGroups,
    Stack,
    double,
    equal,
    own_rows,
    shard_stack,
    token_loss,
    tokens_of,
    whole_grads,
    whole_weights,
    worst_error,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from ep_overlap.testing import RankPool
from fsdp_hooks import clip_grad_norm_, shard_optimizer
from fsdp_hooks.placeholder import Relinquished

TOLERANCE = 1e-12
"""float64, against one process: sums over ranks are formed in another order."""

Make = Callable[[Any], torch.optim.Optimizer]

ELEMENTWISE: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {"lr": 1e-2}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "SGD, Nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.5, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "Adamax": (torch.optim.Adamax, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {"lr": 1e-2}),
    "ASGD": (torch.optim.ASGD, {"lr": 1e-2, "t0": 1}),
    "Rprop": (torch.optim.Rprop, {}),
}
FUSED_ON_CPU = {"Adam", "AdamW", "SGD", "SGD with momentum", "SGD, Nesterov", "Adagrad"}


def weights_of(model: nn.Module) -> Grads:
    return {name: param.detach() for name, param in model.named_parameters()}


def grads_of(model: nn.Module) -> Grads:
    return {name: param.grad for name, param in model.named_parameters()}


# ---- steps ---------------------------------------------------------------------------------------


def decayed_apart(model: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups, as is the custom: no weight decay for norms and biases."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


def backward_on_both(model: nn.Module, reference: nn.Module, seed: int) -> None:
    """This rank's tokens; in the reference those of all ranks."""
    token_loss(model, tokens_of(dist.get_rank(), seed)).backward()
    size = dist.get_world_size()
    for rank in range(size):
        (token_loss(reference, tokens_of(rank, seed)) / size).backward()


def three_steps(make: Make, strategy: str, groups: SharedGroups) -> float:
    model, reference = double(Stack), double(Stack)
    shard_stack(model, strategy=strategy, groups=groups)
    optimizer = shard_optimizer(make(decayed_apart(model)))
    expected = make(decayed_apart(reference))
    for step in range(3):
        backward_on_both(model, reference, step)
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
    assert [len(group["params"]) for group in optimizer.param_groups] == [
        len(group["params"]) for group in expected.param_groups
    ]
    for param, kept in optimizer.state.items():  # states are sharded like their parameters
        assert isinstance(param, DTensor)
        for value in kept.values():
            if isinstance(value, Tensor) and value.dim():
                assert isinstance(value, DTensor)
                assert value.shape == param.shape
                assert value.to_local().shape == param.to_local().shape
    return worst_error(whole_weights(model), weights_of(reference))


def every_optimizer(strategy: str) -> dict[str, float]:
    errors: dict[str, float] = {}
    shared = SharedGroups()
    for name, (cls, options) in ELEMENTWISE.items():
        for extra in ({"foreach": False}, {"foreach": True}, {"fused": True}):
            if "fused" in extra and name not in FUSED_ON_CPU:
                continue

            def make(
                params: Any, cls: Any = cls, options: Any = (options, extra)
            ) -> torch.optim.Optimizer:
                return cls(params, **options[0], **options[1])

            errors[f"{name} {extra}"] = three_steps(make, strategy, shared)
    return errors


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_elementwise_optimizers_of_torch_do_what_they_do_in_one_process(
    ranks2: RankPool, strategy: str
) -> None:
    for errors in ranks2.run(every_optimizer, strategy):
        assert len(errors) == 2 * len(ELEMENTWISE) + len(FUSED_ON_CPU)
        for case, error in errors.items():
            assert error <= TOLERANCE, case


Scheduler = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]

SCHEDULERS: dict[str, Scheduler] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=1, gamma=0.5),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[0.2, 0.1], total_steps=6),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(
        o, [lambda n: 1 / (n + 1), lambda n: 1 / (n + 2)]
    ),
}


def scheduled() -> dict[str, float]:
    """Schedulers made before and after ``shard_optimizer``, a group added in between."""
    errors: dict[str, float] = {}
    shared = SharedGroups()
    for name, make_scheduler in SCHEDULERS.items():
        for is_first in (True, False):
            model, reference = double(Stack), double(Stack)
            shard_stack(model, groups=shared)
            pairs = []
            for module in (model, reference):
                added = [module.head.weight, module.head.bias]
                rest = [p for p in module.parameters() if not any(p is a for a in added)]
                optimizer = torch.optim.SGD(rest, lr=0.1, momentum=0.9)
                if is_first:
                    optimizer.add_param_group({"params": added, "momentum": 0.5})
                    scheduler = make_scheduler(optimizer)
                    optimizer = shard_optimizer(optimizer)
                else:
                    optimizer = shard_optimizer(optimizer)
                    optimizer.add_param_group({"params": added, "momentum": 0.5})
                    scheduler = make_scheduler(optimizer)
                pairs.append((optimizer, scheduler))
            for step in range(3):
                backward_on_both(model, reference, step)
                for optimizer, scheduler in pairs:
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
            assert pairs[0][1].get_last_lr() == pairs[1][1].get_last_lr()
            error = worst_error(whole_weights(model), weights_of(reference))
            errors[f"{name} {is_first}"] = error
    return errors


def test_schedulers_and_added_groups_work_before_and_after_shard_optimizer(
    ranks2: RankPool,
) -> None:
    for errors in ranks2.run(scheduled):
        for case, error in errors.items():
            assert error <= TOLERANCE, case


def resumed() -> None:
    """Two steps, a copy through ``state_dict``, two more of both: bitwise equal."""
    first, second = double(Stack), double(Stack)
    shared = SharedGroups()
    optimizers = []
    for model in (first, second):
        shard_stack(model, groups=shared)
        optimizers.append(shard_optimizer(torch.optim.AdamW(decayed_apart(model), lr=1e-2)))

    def step(model: Stack, optimizer: torch.optim.Optimizer, seed: int) -> None:
        optimizer.zero_grad(set_to_none=False)
        token_loss(model, tokens_of(dist.get_rank(), seed)).backward()
        optimizer.step()

    for seed in range(2):
        step(first, optimizers[0], seed)
    second.load_state_dict(first.state_dict())
    saved = tree_map_only(Tensor, Tensor.clone, optimizers[0].state_dict())  # loading copies none
    optimizers[1].load_state_dict(saved)
    for seed in range(2, 4):
        for model, optimizer in zip((first, second), optimizers, strict=True):
            step(model, optimizer, seed)
    assert equal(whole_weights(first), whole_weights(second))
    assert not equal(whole_weights(first), weights_of(double(Stack)))


def test_state_dict_round_trips(ranks2: RankPool) -> None:
    ranks2.run(resumed)


def zeroed_in_place() -> None:
    model = double(Stack)
    shard_stack(model)
    optimizer = shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    token_loss(model, tokens_of(dist.get_rank())).backward()
    before = grads_of(model)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    for name, grad in grads_of(model).items():
        assert grad is before[name]
        assert own_rows(grad).count_nonzero() == 0
    expected = double(Stack)
    expected.load_state_dict(whole_weights(model))
    for rank in range(dist.get_world_size()):
        (token_loss(expected, tokens_of(rank, 1)) / dist.get_world_size()).backward()
    token_loss(model, tokens_of(dist.get_rank(), 1)).backward()
    assert worst_error(whole_grads(model), grads_of(expected)) <= TOLERANCE


def test_gradients_can_be_zeroed_in_place(ranks2: RankPool) -> None:
    ranks2.run(zeroed_in_place)


def with_closure() -> None:
    model, reference = double(Stack), double(Stack)
    shard_stack(model)
    optimizer = shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)
    losses: list[Tensor] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        losses.append(token_loss(model, tokens_of(dist.get_rank())))
        losses[-1].backward()
        return losses[-1]

    assert optimizer.step(closure) is losses[0]
    assert optimizer.step(closure=closure) is losses[1]
    assert len(losses) == 2
    for _ in range(2):
        expected.zero_grad()
        for rank in range(dist.get_world_size()):
            (token_loss(reference, tokens_of(rank)) / dist.get_world_size()).backward()
        expected.step()
    assert worst_error(whole_weights(model), weights_of(reference)) <= TOLERANCE


def test_a_closure_runs_once_over_the_sharded_parameters(ranks2: RankPool) -> None:
    ranks2.run(with_closure)


class Breaking(torch.optim.SGD):
    """Fails halfway into a step, once."""

    breaks = False

    def _init_group(self, *args: Any) -> bool:
        if self.breaks:
            self.breaks = False
            raise MemoryError("out of memory")
        return super()._init_group(*args)


def after_a_failed_step() -> None:
    model, reference = double(Stack), double(Stack)
    shard_stack(model)
    optimizer = shard_optimizer(Breaking(model.parameters(), lr=0.1, momentum=0.9))
    expected = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    shard_optimizer(optimizer)  # twice is as good as once
    backward_on_both(model, reference, 0)
    optimizer.breaks = True
    with pytest.raises(MemoryError, match="out of memory"):
        optimizer.step()
    optimizer.zero_grad()
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["params"] == list(range(len(list(model.parameters()))))
    assert all(param.grad is None for param in model.parameters())
    assert all(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"])
    expected.zero_grad()
    for step in range(1, 3):
        backward_on_both(model, reference, step)
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
    assert worst_error(whole_weights(model), weights_of(reference)) <= TOLERANCE


def test_after_a_step_that_raised_parameters_and_zero_grad_are_as_before(
    ranks2: RankPool,
) -> None:
    ranks2.run(after_a_failed_step)


# ---- refusals ------------------------------------------------------------------------------------


def built_too_early() -> dict[str, str]:
    model = double(Stack)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    early = model.head.weight
    shard_stack(model)
    assert isinstance(early, Relinquished)
    assert repr(early) == "Relinquished(head.weight of unit Stack)"
    assert "AdamW" in repr(optimizer)
    gc.collect()
    token_loss(model, tokens_of(dist.get_rank())).backward()
    messages: dict[str, str] = {}
    calls: dict[str, Callable[[], object]] = {
        "step": optimizer.step,
        "zero_grad": optimizer.zero_grad,
        "pickle": lambda: pickle.dumps(early),
        "deepcopy": lambda: copy.deepcopy(early),
        "grad": lambda: early.grad,
        "clip": lambda: clip_grad_norm_(early, 1.0),
        "shard_optimizer": lambda: shard_optimizer(optimizer),
    }
    for name, call in calls.items():
        try:
            call()
        except (RuntimeError, ValueError) as error:
            messages[name] = str(error)
    return messages


def test_an_optimizer_built_before_fully_shard_refuses_to_do_nothing(ranks2: RankPool) -> None:
    for messages in ranks2.run(built_too_early):
        assert len(messages) == 7
        for case, message in messages.items():
            assert "was sharded with unit" in message, case
            assert "Build optimizers after fully_shard" in message, case


class Muon(torch.optim.SGD):
    """Another library's, of that name."""


class Lion(torch.optim.Optimizer):
    """Elementwise, and not of torch."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param -= 1e-2 * param.grad.sign()


def test_the_name_of_a_base_class_is_enough_to_be_refused() -> None:
    optimizer = type("Faster", (Muon,), {})([nn.Parameter(torch.ones(2, 2))], lr=0.1)
    with pytest.raises(ValueError, match="Faster needs whole tensors; expected an elementwise"):
        shard_optimizer(optimizer)


def test_a_class_from_elsewhere_is_asked_to_be_elementwise() -> None:
    lion = Lion([nn.Parameter(torch.ones(2, 2))])
    with pytest.warns(UserWarning, match="Lion is no optimizer of torch.optim; .*elementwise=True"):
        assert shard_optimizer(lion) is lion
    assert shard_optimizer(lion, elementwise=True) is lion  # warnings are errors here


def lion_elementwise() -> float:
    model, reference = double(Stack), double(Stack)
    shard_stack(model)
    optimizer = shard_optimizer(Lion(model.parameters()), elementwise=True)
    expected = Lion(reference.parameters())
    backward_on_both(model, reference, 0)
    optimizer.step()
    expected.step()
    return worst_error(whole_weights(model), weights_of(reference))


def test_a_class_from_elsewhere_steps_on_the_shards(ranks2: RankPool) -> None:
    assert max(ranks2.run(lion_elementwise)) <= TOLERANCE
