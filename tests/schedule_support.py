"""What the tests of the schedule share: sharded models, the step they are compared with, probes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from models_support import random_tokens
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ep_overlap.commands.world import local_part
from ep_overlap.config import OverlapConfig
from ep_overlap.models.groups import ExpertGroups, new_expert_groups
from ep_overlap.models.reference import Batch, MoETransformer, ReferenceConfig, cross_entropy
from ep_overlap.plan.action import NODES_OF, Node, parse_action
from ep_overlap.run.layer import ModelParts, modules_of
from ep_overlap.schedule import OverlapSchedule
from fsdp_hooks import fully_shard
from fsdp_hooks.accumulation import microbatch
from fsdp_hooks.collectives import new_torch_group
from fsdp_hooks.context import Runtime
from fsdp_hooks.lifecycle import Driver, UnitState, lifecycle_of
from fsdp_hooks.optimizer import shard_optimizer
from fsdp_hooks.precision import MixedPrecision
from fsdp_hooks.streams import StreamKind
from fsdp_hooks.wgrad_layers import manage_wgrad

SEQ_LENGTH = 8
BATCH_SIZE = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its sharding, and the schedule to run it under."""

    strategy: str | None = None
    head: bool = False
    """The output layer is a unit of its own."""
    order: str | None = None
    order_text: str | None = None
    layers: int = 2
    microbatches: int = 2
    freq: int = 1
    """Layer i has experts where i is a multiple of this."""
    ep: int = 1
    budget: int | None = None
    dtype: torch.dtype = torch.float32
    megatron: bool = False
    transformer_engine: bool = False
    """Megatron only: whose layers, else its own local ones; needs a GPU."""
    device: str = "cpu"
    shared: bool = False
    """Megatron only: a shared expert in each MoE layer."""
    tied: bool = False
    """Reference only: one weight for embedding and output."""
    kind: StreamKind | None = None
    hybrid: str | None = None
    """The outer strategy: half of the ranks hold replicas of the others' shards."""
    reduce_each: bool | None = None
    mp: MixedPrecision | None = None
    delay: bool = False
    """Delayed weight gradients; never in the baseline."""
    dispatch_over: bool = False
    """The backward of dispatch over the experts' weight gradients; never in the baseline."""
    recompute: bool = False
    """Each layer whole; never in the baseline."""
    fuse: bool = False
    """Fused weight gradients, in the baseline too."""

    @property
    def config(self) -> OverlapConfig:
        return OverlapConfig(
            num_microbatches=self.microbatches,
            order=self.order,
            order_text=self.order_text,
            max_unsharded_units=self.budget,
            delay_wgrad=self.delay,
            dispatch_over_wgrad=self.dispatch_over,
            recompute_granularity="full" if self.recompute else None,
            trace=True,
        )

    def __str__(self) -> str:
        fields = {name: value for name, value in vars(self).items() if value not in (None, False)}
        fields.pop("order_text", None)
        return " ".join(f"{name}={value}" for name, value in fields.items())


# ---- building ------------------------------------------------------------------------------------


class Groups:
    """Process groups, each made once: connecting ranks is what takes time here. Models that share
    them run one after another."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def once[MadeT](self, name: str, make: Callable[[], MadeT]) -> MadeT:
        """Make it, or return what was made under this name."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def experts(self, ep: int) -> ExpertGroups:
        return self.once(f"experts {ep}", lambda: new_expert_groups(ep))

    def group(self, ranks: Sequence[int], name: str) -> ProcessGroup:
        """For a lane, or a mesh."""
        return self.once(f"{name} {ranks}", lambda: new_torch_group(ranks, name))

    def mesh(self, ranks: list[int], *, is_hybrid: bool, device: str = "cpu") -> DeviceMesh:
        """One dimension; for hybrid sharding two: two outer ranks, or one if there is one rank."""
        if not is_hybrid:
            group = self.group(ranks, "mesh")
            return self.once(f"device mesh {ranks}", lambda: DeviceMesh.from_group(group, device))
        num_inner = max(len(ranks) // 2, 1)
        grid = [ranks[i : i + num_inner] for i in range(0, len(ranks), num_inner)]
        (own,) = [row for row in grid if dist.get_rank() in row]
        column = [row[own.index(dist.get_rank())] for row in grid]
        groups = [self.group(column, "mesh"), self.group(own, "mesh")]
        return self.once(
            f"device mesh {grid}",
            lambda: DeviceMesh.from_group(
                groups, device, mesh=torch.tensor(grid), mesh_dim_names=("outer", "inner")
            ),
        )


def build(case: Case, groups: Groups | None = None) -> Any:
    """The model's parts, sharded as the case says. Collective where there are ranks.

    ``groups``: of earlier models; None: all new.
    """
    groups = groups or Groups()
    parts = _megatron(case, groups) if case.megatron else reference(case, groups)
    if case.strategy is not None:
        shard(parts, case, groups)
    if case.fuse:
        manage_wgrad(parts.module, fuse=True, layer_types=parts.wgrad_layers)
    return parts


def reference(case: Case, groups: Groups | None = None) -> MoETransformer:
    config = ReferenceConfig(
        num_layers=case.layers,
        hidden_size=16,
        num_heads=2,
        ffn_hidden_size=24,
        num_experts=4,
        topk=2,
        seq_length=SEQ_LENGTH,
        moe_layer_freq=case.freq,
        dtype=case.dtype,
    )
    experts = (groups or Groups()).experts(case.ep)
    model = MoETransformer(config, experts, seed=3, device=case.device)
    if case.tied:
        model.output.weight = model.embedding.weight
    return model


def _megatron(case: Case, groups: Groups) -> Any:
    from ep_overlap.models.megatron import GPTParts
    from ep_overlap.models.megatron_build import MegatronSizes, build_gpt

    sizes = MegatronSizes(
        num_layers=case.layers,
        hidden_size=16,
        num_heads=2,
        ffn_hidden_size=24,
        num_experts=4,
        topk=2,
        seq_length=SEQ_LENGTH,
        moe_layer_freq=case.freq,
        shared_expert_ffn_hidden_size=12 if case.shared else None,
        transformer_impl="transformer_engine" if case.transformer_engine else "local",
        dtype=case.dtype,
    )
    return GPTParts(build_gpt(sizes, groups.experts(case.ep), seed=3, device=case.device))


def shard(parts: Any, case: Case, groups: Groups) -> None:
    """Ordinary parameters over all ranks, experts over the ranks that hold the same."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    is_hybrid = case.hybrid is not None
    device = torch.device(case.device).type
    mesh = partial(groups.mesh, is_hybrid=is_hybrid, device=device)
    dense = mesh(list(range(num_ranks)))
    expert = mesh(list(range(rank % case.ep, num_ranks, case.ep)))
    experts = frozenset(parts.expert_parameters())

    def mesh_of(name: str, param: nn.Parameter) -> DeviceMesh:
        return expert if param in experts else dense

    assert case.strategy is not None
    outer = case.hybrid or "no_shard"
    inner = [module for layer in parts.layers for module in modules_of(layer.module)]
    for module in [*inner, parts.head] if case.head else inner:
        fully_shard(module, mesh=mesh_of, strategy=case.strategy, outer_strategy=outer, mp=case.mp)
    fully_shard(
        parts.module,
        mesh=mesh_of,
        strategy=case.strategy,
        outer_strategy=outer,
        mp=case.mp,
        reduce_each_microbatch=case.reduce_each,
        grad_divisor=num_ranks,
        runtime=Runtime(stream_kind=case.kind, new_group=groups.group),
    )
    lifecycle_of(parts.module)  # builds the root, and with it the groups of its lanes


def batches(parts: Any, case: Case, seed: int, *, rank: int | None = None) -> list[Any]:
    """One for each microbatch, other ones on every rank."""
    if rank is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
    pairs = [
        [tokens.to(case.device) for tokens in random_tokens(seed_, BATCH_SIZE, SEQ_LENGTH)]
        for seed_ in (1000 * seed + 100 * rank + index for index in range(case.microbatches))
    ]
    if case.megatron:
        return [parts.batch(*pair) for pair in pairs]
    return [Batch(tokens=tokens, targets=targets) for tokens, targets in pairs]


def loss_of(case: Case) -> Callable[[Tensor, Any], Tensor]:
    if case.megatron:
        from ep_overlap.models.megatron import mean_loss

        return mean_loss
    return cross_entropy


def sgd(parts: Any) -> torch.optim.Optimizer:
    return shard_optimizer(torch.optim.SGD(parts.module.parameters(), lr=0.1))


# ---- both paths, compared ------------------------------------------------------------------------


def standard_step(parts: ModelParts[Any, Any], inputs: Sequence[Any], loss_fn: Any) -> list[Tensor]:
    """The module's own forward and one backward for each microbatch."""
    is_sharded = lifecycle_of(parts.module).strategy is not None
    losses: list[Tensor] = []
    for index, batch in enumerate(inputs):
        is_last = index == len(inputs) - 1
        with microbatch(parts.module, is_last=is_last) if is_sharded else nullcontext():
            loss = loss_fn(parts.whole(batch), batch)
            losses.append(loss.detach())
            (loss / len(inputs)).backward()
    return losses


def gradients(parts: ModelParts[Any, Any]) -> dict[str, Tensor]:
    """This rank's part of every gradient."""
    return {
        name: local_part(parameter.grad).clone()
        for name, parameter in parts.module.named_parameters()
        if parameter.grad is not None
    }


def weights(parts: ModelParts[Any, Any]) -> dict[str, Tensor]:
    return {
        name: local_part(parameter).detach().clone()
        for name, parameter in parts.module.named_parameters()
    }


def unequal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Names of the tensors that differ by even one bit, or that one side lacks."""
    return [
        name
        for name in sorted({*ours, *theirs})
        if name not in ours or name not in theirs or not torch.equal(ours[name], theirs[name])
    ]


def named(losses: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"loss {index}": loss for index, loss in enumerate(losses)}


def differences(case: Case, *, num_steps: int = 2, groups: Groups | None = None) -> list[str]:
    """Train the schedule beside the standard path: whatever is not bitwise equal or not right."""
    ours, theirs = build(case, groups), build(case, groups)
    loss_fn, optimizers = loss_of(case), (sgd(ours), sgd(theirs))
    schedule = OverlapSchedule(ours, case.config, stream_kind=case.kind)
    found: list[str] = []
    for step in range(num_steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        inputs = batches(ours, case, step)
        losses = schedule.step(inputs, loss_fn).losses
        expected = standard_step(theirs, inputs, loss_fn)
        found += unequal(named(losses), named(expected))
        found += [f"gradient of {name}" for name in unequal(gradients(ours), gradients(theirs))]
        found += [f"no gradient of {name}" for name in weights(ours).keys() - gradients(ours)]
        for optimizer in optimizers:
            optimizer.step()
        found += [f"weight {name}" for name in unequal(weights(ours), weights(theirs))]
    if misses := lifecycle_of(ours.module).stats.hook_misses:
        found.append(f"{misses} hook misses")
    return found + not_at_rest(ours)


def not_at_rest(parts: ModelParts[Any, Any]) -> list[str]:
    """What a step left behind."""
    root = lifecycle_of(parts.module)
    if root.root_unit is None:
        return []
    units = [root.root_unit, *root.inner_units]
    found = [f"{u.name} is unsharded" for u in units if u.releases and u.state is not SHARDED]
    if root.stats.unsharded_bytes:
        found.append(f"{root.stats.unsharded_bytes} bytes unsharded")
    if root.context.driver is not Driver.REST:
        found.append(f"driver {root.context.driver}")
    return found


SHARDED = UnitState.SHARDED


# ---- looking on ----------------------------------------------------------------------------------


def actions_among(words: Sequence[str]) -> list[str]:
    """Less the streams' own words, such as ``end of comp``."""

    def is_action(word: str) -> bool:
        try:
            parse_action(word)
        except ValueError:
            return False
        return True

    return [word for word in words if is_action(word)]


Probe = Callable[[str, Any], None]
"""Called with a node's name, such as ``attn.L0`` or ``post``, and with what it returns."""


def tap(parts: Any, probe: Probe, in_backward: Callable[[str], None] = lambda node: None) -> None:
    """Let ``probe`` see what each node returns, within the node; on one model, for good.

    ``in_backward``: called with its name within each node's backward.
    """

    def probe_both(node: str, result: Any) -> None:
        probe(node, result)
        hook_backward(result, partial(in_backward, node))

    _wrap(parts, "pre", "pre", probe_both)
    _wrap(parts, "post", "post", probe_both)
    for index, layer in enumerate(parts.layers):
        for node in NODES_OF[layer.kind]:
            name = f"{node}.L{index}"
            if node in (Node.DISPATCH, Node.COMBINE):  # without a graph
                _wrap(layer, str(node), name, probe)
                _wrap(layer, f"{node}_backward", name, lambda name, result: in_backward(name))
            else:
                _wrap(layer, str(node), name, probe_both)


def _wrap(owner: Any, method: str, name: str, probe: Probe) -> None:
    function = getattr(owner, method)

    def probed(*args: Any) -> Any:
        result = function(*args)
        probe(name, result)
        return result

    # On the object, not on its class. Megatron's parts are plain objects; nn.Module agrees.
    setattr(owner, method, probed)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors_in(item)


def hook_backward(value: Any, call: Callable[[], None]) -> None:
    """Call once in the backward of the graph that made ``value``."""
    calls = iter((call,))

    def hook(grad: Tensor, node: Any = None) -> None:
        next(calls, _nothing)()

    for tensor in tensors_in(value):
        if tensor.requires_grad:
            tensor.register_hook(partial(hook))


def _nothing() -> None:
    return None
