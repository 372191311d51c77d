"""megatron-core's own ``DistributedDataParallel`` behind the life cycle of a schedule.

DDP and its distributed optimizer stay what they are: buffers, buckets, collectives, scaling. What
changes within a step is who calls them. DDP's hooks count a parameter's arrivals in the last
microbatch's one backward; under a schedule each node is a backward of its own, those of two
microbatches take turns, and a delayed weight gradient never comes to a hook. So:

======================================  ======================================================
DDP's own driver                        under a schedule
======================================  ======================================================
forward pre-hooks gather a bucket's     ``UNSHARD.unit``: ahead of the unit's first reader, on
parameters, and the next bucket's       the AG lane; each bucket once a step
backward hooks add to ``main_grad``     the door of this file, and the sink, do
the last arrival starts the bucket's    ``REDUCE.unit`` of the last unit that has a part in the
reduction                               bucket, on the RS lane: in the plan's order, which is the
                                        same on every rank
``finalize_model_grads``                the same, by the same caller, after the step
======================================  ======================================================

The switches mean what they mean there. Without ``overlap_grad_reduce`` nothing is reduced before
``finalize_model_grads``; without ``overlap_param_gather`` the optimizer has gathered. ``no_sync``
has no say: all microbatches of a step are one accumulation, reduced at its end.

Sums are bit for bit those of ``forward_backward_no_pipelining``: a microbatch's gradient of a
parameter is added to ``main_grad`` as a whole. Only the root's parameters may be used by two nodes
(the embedding, tied to the output layer): their contributions are summed first, until ``seal``.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final, final
from weakref import ref

import torch
from torch import Tensor, nn

from fsdp_hooks.counters import Counters
from fsdp_hooks.lifecycle import NOTHING_DONE, Driver, ShardingStats, UnitState
from fsdp_hooks.streams import (
    CallerStream,
    Event,
    StreamKind,
    StreamObserver,
    default_kind,
    new_stream,
)
from fsdp_hooks.wgrad import Destination

INSTALL_HINT: Final = (
    "this adapter needs megatron-core 0.19: pip install 'ep-overlap[megatron]', or megatron-core"
)

try:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.distributed.param_and_grad_buffer import (
        _ParamAndGradBucketGroup as BucketGroup,  # pyright: ignore[reportPrivateUsage]
    )
except ImportError as error:
    raise ImportError(INSTALL_HINT) from error


@final
class MegatronDdp:
    """Implements ``RootLifecycle`` for a module that ``DistributedDataParallel`` wraps.

    ::

        parts = GPTParts(ddp.module)
        layers = [layer.module for layer in parts.layers]
        schedule = OverlapSchedule(parts, config, lifecycle=MegatronDdp(ddp, layers))

        ddp.zero_grad_buffer()
        schedule.step(microbatches, loss_fn)
        finalize_model_grads([ddp])
        optimizer.step()

    One of them serves all schedules of a model. At rest DDP's own hooks work as ever.

    Args:
        ddp: around the whole model.
        layers: those of the schedule, in order; each is a unit, and what is left is the root's.
        stream_kind: of the AG and RS lanes; None: CUDA streams on CUDA, worker threads on CPU.

    Raises:
        ValueError: DDP's settings are among those that a schedule cannot follow, or that are not
            tested; a layer is not a part of the model, or shares a parameter with another.
    """

    postpones_end = False
    reduces_each_microbatch = False

    def __init__(
        self,
        ddp: DistributedDataParallel,
        layers: Sequence[nn.Module],
        *,
        stream_kind: StreamKind | None = None,
    ) -> None:
        refuse_unsupported(ddp)
        self._ddp = ddp
        self._reduces = bool(ddp.ddp_config.overlap_grad_reduce)
        self._gathers = bool(ddp.ddp_config.overlap_param_gather)
        device = next(ddp.module.parameters()).device
        kind = stream_kind or default_kind(device)
        # High priority: the parameter that compute waits for next should not queue behind it.
        self._ag = new_stream(kind, "ag", device=device, priority=-1)
        self._rs = new_stream(kind, "rs", device=device)
        self._caller = CallerStream(device)
        self._counters = Counters()
        self._driver = Driver.REST
        self._aside: dict[nn.Parameter, BucketGroup] = {}
        """While a schedule drives: what DDP's hooks look parameters up in at rest."""
        self._gathered: list[Event] = []
        """Of this step, in the order of issue."""
        self._microbatch = 0
        """In stream time: whose contributions the compute lane is making."""
        self._pending: dict[int, dict[nn.Parameter, Tensor]] = {}
        """In stream time, by microbatch: gradients of root parameters until ``seal``."""
        self._buckets = [_Bucket(group) for group in _bucket_groups(ddp)]
        self._root_params, params_of_layers = _owned_params(ddp.module, layers)
        self.root_unit = self._unit("root", self._root_params)
        names = {module: name for name, module in ddp.module.named_modules()}
        self._units: Mapping[nn.Module, DdpUnit] = {
            layer: self._unit(names[layer], params)
            for layer, params in zip(layers, params_of_layers, strict=True)
        }
        self.inner_units: Sequence[DdpUnit] = tuple(self._units.values())
        self.grad_sink = self
        for param in ddp.params_with_grad:
            param.register_post_accumulate_grad_hook(_Door(self))

    def _unit(self, name: str, params: frozenset[nn.Parameter]) -> "DdpUnit":
        buckets = [b for b in self._buckets if not params.isdisjoint(b.group.params)]
        for bucket in buckets:
            bucket.num_units += 1
        return DdpUnit(self, name, buckets)

    # ---- RootLifecycle ------------------------------------------------------------------------

    @property
    def strategy(self) -> str:
        """``optim`` where parameters are gathered once a step under forward, else ``no_shard``:
        then the optimizer, or nobody, gathers."""
        return "optim" if self._gathers else "no_shard"

    @property
    def gathers(self) -> bool:
        """Whether parameters are gathered under forward."""
        return self._gathers

    @property
    def stats(self) -> ShardingStats:
        """Counters; a collective of a bucket group counts once."""
        return self._counters.read()

    def collect_postponed(self) -> None:
        """DDP's standard path has no delayed weight gradients that come here."""

    def end_postponed(self) -> None:
        """As ``collect_postponed``."""

    def observe(self, observer: StreamObserver | None) -> None:
        """Let ``observer`` see the AG and RS lanes."""
        for stream in (self._ag, self._rs, self._caller):
            stream.observe(observer)

    def unit_of(self, module: nn.Module) -> "DdpUnit | None":
        """The unit of a layer; of the wrapped module, the root."""
        return self.root_unit if module is self._ddp.module else self._units.get(module)

    def begin(self, driver: Driver) -> None:
        """Set DDP's hooks aside.

        Raises:
            RuntimeError: another step is at work, or the last one's gradients were not finalized,
                or not zeroed since.
        """
        if not self._ddp.param_to_bucket_group:
            raise RuntimeError(
                "a step begins while a schedule is at work on this model; let its step end first"
            )
        if torch.is_grad_enabled():
            self._check_at_rest()
        self._driver = driver
        self._gathered.clear()
        for bucket in self._buckets:
            bucket.begin()
        # DDP's forward and backward hooks pass over parameters that are not in this mapping.
        self._aside, self._ddp.param_to_bucket_group = self._ddp.param_to_bucket_group, {}
        self._caller.hold(self._ag)  # protects the shards that the optimizer may still write

    def _check_at_rest(self) -> None:
        for bucket in self._buckets:
            if bucket.group.grad_reduce_handle is not None:
                raise RuntimeError(
                    "a step begins, and gradients of the last one are still being reduced; call "
                    "finalize_model_grads, optimizer.step and ddp.zero_grad_buffer between steps"
                )
            if bucket.group.grad_reduce_finished:
                raise RuntimeError(
                    "a step begins on gradients that are reduced already; call "
                    "ddp.zero_grad_buffer before each step"
                )

    def pre_backward(self, microbatch: int) -> None:
        """In stream time: the contributions that follow belong to this microbatch."""
        self._microbatch = microbatch

    def end(self) -> None:
        """Wait for what was issued, and let DDP's hooks work again. Gradients are in ``main_grad``,
        to be finalized as after megatron-core's own ``forward_backward_func``."""
        self._caller.wait_stream(self._ag)
        self._caller.wait_stream(self._rs)
        assert not self._pending, "every microbatch is sealed"
        self._hand_back()

    def refresh_compute_weights(self) -> None:
        """The optimizer writes them, between steps."""

    def abort(self) -> None:
        """Drain the lanes, zero the gradients: DDP is as an iteration finds it at its start.

        What other calls had accumulated in ``main_grad`` before this step goes, too.
        """
        with ExitStack() as undo:  # all of it, whatever fails on the way
            undo.callback(self._hand_back)
            undo.callback(self._ddp.zero_grad_buffer)
            for bucket in self._buckets:
                undo.callback(bucket.drain)
            for stream in (self._ag, self._rs):
                stream.synchronize()
                stream.reset()
        self._pending.clear()
        for param in self._ddp.params_with_grad:
            param.grad = None

    def _hand_back(self) -> None:
        if self._driver is not Driver.REST:
            self._ddp.param_to_bucket_group, self._aside = self._aside, {}
            self._driver = Driver.REST

    # ---- contributions, in stream time --------------------------------------------------------

    @property
    def is_driven(self) -> bool:
        """Whether a schedule's step is under way."""
        return self._driver is not Driver.REST

    def accumulate(self, param: nn.Parameter, grad: Tensor) -> None:
        """The door for a contribution, whoever made it."""
        if param not in self._root_params:
            param.main_grad.add_(grad)
            return
        pending = self._pending.setdefault(self._microbatch, {})
        held = pending.get(param)
        pending[param] = grad if held is None else held.add_(grad)

    def add(self, weight: nn.Parameter, grad: Tensor) -> None:
        """A delayed weight gradient (``GradSink``).

        Raises:
            RuntimeError: no step of a schedule is under way.
        """
        self._check_driven()
        self.accumulate(weight, grad)

    def destination(self, weight: nn.Parameter) -> Destination:
        """A fused one is added to ``main_grad`` itself, as megatron-core's
        ``gradient_accumulation_fusion`` adds it. Raises as ``add``."""
        self._check_driven()
        return Destination(weight.main_grad, is_fresh=False)

    def _check_driven(self) -> None:
        if not self.is_driven:
            raise RuntimeError(
                "a weight gradient is brought to DDP and no step that it belongs to is under way; "
                "delay and fuse weight gradients in a schedule's step only, and give all schedules "
                "of a model the same MegatronDdp"
            )

    def add_pending(self, microbatch: int) -> None:
        """The root's contributions of a microbatch are complete."""
        for param, grad in self._pending.pop(microbatch, {}).items():
            param.main_grad.add_(grad)

    # ---- collectives --------------------------------------------------------------------------

    def gather(self, buckets: Sequence["_Bucket"], after: Sequence[Event], word: str) -> Event:
        """Issue the gathers of those whose turn has not come in this step yet. Returns the event
        behind which all of them are there."""
        ready = [bucket for bucket in buckets if bucket.gather_index is None]
        if ready:
            groups = [bucket.group for bucket in ready]
            done = self._ag.run(partial(self._gather, groups), word=word, after=after)
            for bucket in ready:
                bucket.gather_index = len(self._gathered)
            self._gathered.append(done)
        # One lane, first in first out: the last event covers those before it.
        last = max((b.gather_index for b in buckets if b.gather_index is not None), default=None)
        return NOTHING_DONE if last is None else self._gathered[last]

    def reduce(self, buckets: Sequence["_Bucket"], after: Sequence[Event], word: str) -> Event:
        """Issue the reductions of those that have all their gradients with this unit's."""
        if not self._reduces:
            return NOTHING_DONE  # finalize_model_grads reduces
        ready = [bucket for bucket in buckets if bucket.is_complete_with(after)]
        if not ready:
            return NOTHING_DONE
        # Gathers and reductions share DDP's groups. The first reduction comes behind the last
        # reader of all gathers in every plan; this says so, that two lanes never use one group.
        behind = [event for bucket in ready for event in bucket.after] + self._gathered[-1:]
        groups = [bucket.group for bucket in ready]
        return self._rs.run(partial(self._reduce, groups), word=word, after=behind)

    def _gather(self, groups: Sequence[BucketGroup]) -> None:
        """AG lane. One that is there already (its weights are those of an earlier step that only
        evaluated) is not gathered again."""
        for group in groups:
            if not group.param_gather_dispatched:
                self._counters.add(all_gathers=1)
                group.start_param_sync()
        for group in groups:
            group.finish_param_sync(skip_next_bucket_dispatch=True)

    def _reduce(self, groups: Sequence[BucketGroup]) -> None:
        """RS lane. The wait makes the event mean what it says; ``finish_grad_sync``, which waits
        again, is left to ``finalize_model_grads``."""
        scatters = self._ddp.ddp_config.use_distributed_optimizer and not self._ddp.force_all_reduce
        for group in groups:
            group.start_grad_sync(force_all_reduce=self._ddp.force_all_reduce)
            self._counters.add(reduce_scatters=int(scatters), all_reduces=int(not scatters))
        for group in groups:
            assert group.grad_reduce_handle is not None, "overlap_grad_reduce starts asynchronously"
            group.grad_reduce_handle.wait()


@final
class DdpUnit:
    """Implements ``UnitLifecycle``: a layer's parameters, or the root's, wherever their buckets are.

    Parameters stay where they are; a bucket may hold several units' and a unit be in several.
    """

    releases = False

    def __init__(self, core: MegatronDdp, name: str, buckets: Sequence["_Bucket"]) -> None:
        self.name = name
        self._core = core
        self._buckets = tuple(buckets)

    @property
    def state(self) -> UnitState:
        """Always unsharded: a gather fills what stays."""
        return UnitState.UNSHARDED

    @property
    def gathers(self) -> bool:
        """Whether an ``unshard`` asks other ranks, once a step."""
        return self._core.gathers

    def unshard(self, *, after: Sequence[Event] = (), word: str | None = None) -> Event:
        """Issue the gathers of the unit's buckets that this step has not gathered yet."""
        if not self.gathers:
            return NOTHING_DONE
        return self._core.gather(self._buckets, after, word or f"UNSHARD.{self.name}")

    def reshard(self, *, after: Sequence[Event] = (), word: str | None = None) -> Event:
        """Nothing is released."""
        return NOTHING_DONE

    def reduce(self, *, after: Sequence[Event] = (), word: str | None = None) -> Event:
        """Issue the reductions of the buckets that are complete with this unit."""
        return self._core.reduce(self._buckets, after, word or f"REDUCE.{self.name}")

    def drop_reduced(self) -> None:
        """Reductions read ``main_grad``, which stays."""

    def ensure(self) -> None:
        """Parameters stay."""

    def seal(self, microbatch: int, *, is_last: bool) -> None:
        """In stream time: this microbatch's contributions are complete."""
        if self is self._core.root_unit:
            self._core.add_pending(microbatch)


@final
class _Bucket:
    """A bucket group of DDP, and what of this step has been issued for it."""

    __slots__ = ("_missing", "after", "gather_index", "group", "num_units")

    def __init__(self, group: BucketGroup) -> None:
        self.group = group
        self.num_units = 0
        """How many units have parameters in it."""
        self.begin()

    def begin(self) -> None:
        """Nothing is issued yet."""
        self._missing = self.num_units
        self.after: list[Event] = []
        """The last contributions of the units so far."""
        self.gather_index: int | None = None
        """Which of the step's gathers filled it."""

    def is_complete_with(self, after: Sequence[Event]) -> bool:
        """One more unit has given its gradients, behind these events; whether it was the last."""
        self.after += after
        self._missing -= 1
        return self._missing == 0

    def drain(self) -> None:
        """After a failure: wait for what other ranks have started, too, and forget it."""
        group = self.group
        gather, group.param_gather_handle = group.param_gather_handle, None
        reduction, group.grad_reduce_handle = group.grad_reduce_handle, None
        for handle in (gather, reduction):
            if handle is not None:
                handle.wait()


@final
class _Door:
    """What autograd calls once it has added a gradient to a parameter: before DDP's own hook, which
    then finds nothing. Holds the core weakly, as garbage collection does not see hooks."""

    __slots__ = ("_core",)

    def __init__(self, core: MegatronDdp) -> None:
        self._core = ref(core)

    def __call__(self, param: Tensor) -> None:
        core = self._core()
        if core is None or not core.is_driven:
            return
        assert isinstance(param, nn.Parameter), "hooks are on parameters"
        grad, param.grad = param.grad, None
        # None: the weight gradient is delayed, or fused; the sink takes it.
        if grad is not None and not _is_added(param):
            core.accumulate(param, grad)


def _is_added(param: nn.Parameter) -> bool:
    """Whether a fused kernel has added the gradient to ``main_grad``, and what autograd carries is
    a placeholder: DDP's own test (``_make_backward_post_hook``). The second mark is optional."""
    return param.grad_added_to_main_grad and not vars(param).get("zero_out_wgrad", False)


def _bucket_groups(ddp: DistributedDataParallel) -> list[BucketGroup]:
    return [*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups]


def _owned_params(
    module: nn.Module, layers: Sequence[nn.Module]
) -> tuple[frozenset[nn.Parameter], list[frozenset[nn.Parameter]]]:
    """The root's parameters, and each layer's.

    Raises:
        ValueError: a layer is no part of the module, or shares a parameter with what is not.
    """
    parts = set(module.modules())
    names = {param: name for name, param in module.named_parameters()}
    owner: dict[nn.Parameter, int] = {}
    others = set(parts)
    for index, layer in enumerate(layers):
        if layer not in parts:
            raise ValueError(
                f"layer {index} ({type(layer).__name__}) is not a part of the module that DDP "
                "wraps; give the layers of ddp.module"
            )
        others.difference_update(layer.modules())
        for param in layer.parameters():
            if owner.setdefault(param, index) != index:
                raise ValueError(
                    f"{names[param]} belongs to layers {owner[param]} and {index}; a schedule "
                    "reduces each layer on its own: do not share parameters between layers"
                )
    roots = frozenset(param for part in others for param in part.parameters(recurse=False))
    if shared := roots & owner.keys():
        raise ValueError(
            f"{', '.join(sorted(names[param] for param in shared))} belong to a layer and to what is "
            "outside of all layers; a schedule reduces each layer on its own: do not share them"
        )
    return roots, [frozenset(layer.parameters()) for layer in layers]


def refuse_unsupported(ddp: DistributedDataParallel) -> None:
    """Name every setting of DDP that a schedule cannot follow, or that is not tested under one.

    Raises:
        ValueError: there are some; or it is not ``DistributedDataParallel`` at all.
    """
    if not isinstance(ddp, DistributedDataParallel):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"got {type(ddp).__name__}, expected megatron-core's DistributedDataParallel; its FSDP "
            "has an adapter of its own"
        )
    refused = [f"{name}={value!r}, expected {want!r}" for name, value, want in _misfits(ddp)]
    if refused:
        raise ValueError(
            "this DistributedDataParallel cannot be driven by a schedule: " + "; ".join(refused)
        )
    lanes = [g for g in (ddp.intra_dp_cp_group, ddp.intra_expt_dp_group) if g.size() > 1]
    for group in (ddp.ep_group, ddp.tp_group):
        if any(group is lane for lane in lanes):
            raise ValueError(
                "DDP reduces over the very group that the model's layers talk over, and a group "
                "belongs to one lane; make a second one over the same ranks"
            )


def _misfits(ddp: DistributedDataParallel) -> Iterator[tuple[str, object, object]]:
    """(setting, value, what is supported)"""
    config, model = ddp.ddp_config, ddp.config
    table: list[tuple[str, object, object]] = [
        ("use_megatron_fsdp", config.use_megatron_fsdp, False),
        ("num_distributed_optimizer_instances", config.num_distributed_optimizer_instances, 1),
        ("fp8_param_gather", config.fp8_param_gather, False),
        ("fp4_param_gather", config.fp4_param_gather, False),
        (
            "reduce_scatter_with_fp32_accumulation",
            config.reduce_scatter_with_fp32_accumulation,
            False,
        ),
        ("nccl_ub", config.nccl_ub, False),
        ("gtp_weight_remat_size", model.gtp_weight_remat_size, 1),
        ("expert_gtp_weight_remat_size", model.expert_gtp_weight_remat_size, 1),
        ("cuda_graph_impl", model.cuda_graph_impl, "none"),
    ]
    if not config.use_distributed_optimizer:
        # That of the layer-wise optimizer, which gathers into the gradients' buffer.
        table.append(
            ("overlap_param_gather without the optimizer", config.overlap_param_gather, False)
        )
    if config.delay_wgrad_compute:
        own = [name for name, param in ddp.module.named_parameters() if _delays_by_itself(param)]
        table.append(("delay_wgrad_compute of layers that delay by themselves", own[:3], []))
    return (row for row in table if row[1] != row[2])


def _delays_by_itself(param: nn.Parameter) -> bool:
    """Transformer Engine's layers: their ``backward_dw`` is no action of a schedule."""
    return bool(vars(param).get("skip_backward_post_hook", False))
