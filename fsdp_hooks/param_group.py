"""A unit's parameters of one dtype, one mesh, one requires_grad: their weights and gradients.

The words for the tensors of one parameter:

* *compute parameter*: what forward and backward read; a view of the group's flat storage.
* *sharded parameter*: what the module holds at rest: a DTensor of the parameter's own name and
  global shape, whose local part is a view of the main weights.
* *main weights*: what the optimizer updates: this rank's shard, or everything if replicated.
* *placeholder*: what the module holds while the compute parameter is released.

Gradients go one way, each step by one lane, and never wait for a later one::

    accumulate (comp)  autograd's gradient of one parameter     -> pending[microbatch]
    seal       (comp)  a microbatch's contributions are done    -> sealed
    reduce     (rs)    allocate, pack, launch, scale, add       -> step gradient
    publish    (host)  at the end of a step                     -> .grad of the sharded parameter

Until ``publish`` nothing outside the step has changed: a step that fails can be dropped whole.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_hooks.buffer import FlatBuffer, rows_of
from fsdp_hooks.collectives import Communicator
from fsdp_hooks.layout import ParamExtent, flat_layout
from fsdp_hooks.placeholder import Placeholder, placeholder_for, relinquish
from fsdp_hooks.placement import Placement, Placements

Grads = list[Tensor | None]
"""One for each parameter of a group; None where there is no contribution."""


@dataclass(frozen=True, kw_only=True)
class ParamSlot:
    """One parameter and every place that holds it (more than one if it is tied).

    Once the group is made, ``param`` is relinquished: its memory is free, its attributes remain.
    """

    name: str
    param: nn.Parameter
    owners: tuple[tuple[nn.Module, str], ...]


@final
class ParamGroup:
    """See the module's docstring.

    Args:
        slots: the parameters, in registration order; same dtype, device and requires_grad.
        mesh: one-dimensional, of the ranks that share them.
        placements: of the strategy, already reduced for a mesh of one rank.
        reduces_each_microbatch: whether each microbatch's gradients are reduced on their own.
    """

    def __init__(
        self,
        slots: Sequence[ParamSlot],
        *,
        unit_name: str,
        mesh: DeviceMesh,
        placements: Placements,
        reduces_each_microbatch: bool,
    ) -> None:
        first = slots[0].param
        self.slots = tuple(slots)
        self.mesh = mesh
        self.placements = placements
        self.requires_grad = first.requires_grad
        self.dtype = first.dtype
        self.reduces_each_microbatch = reduces_each_microbatch
        self.layout = flat_layout([tuple(slot.param.shape) for slot in slots], mesh.size())
        self._rank = mesh.get_local_rank()
        self.storage = FlatBuffer(self.layout, dtype=first.dtype, device=first.device)
        self._extents = self.layout.extents

        self.storage.flat.zero_()
        for slot, extent in zip(self.slots, self._extents, strict=True):
            self.storage.param_view(extent).copy_(slot.param.detach())
        self._main, self._main_offset = self._make_main_weights()
        self.compute_params = [self._make_compute_param(i) for i in range(len(slots))]
        self.sharded_params = [self._make_sharded_param(i) for i in range(len(slots))]
        self.placeholders = [
            placeholder_for(slot.param, name=slot.name, unit=unit_name) for slot in self.slots
        ]
        if self.releases:
            self.storage.free()

        self._pending: dict[int, Grads] = {}
        self._accumulated: Grads | None = None
        self._sealed: deque[Grads] = deque()
        self._step_grad: Tensor | None = None

    def name_unit(self, unit_name: str) -> None:
        """The unit's name from the root, known once there is a root."""
        for held in self.placeholders:
            assert isinstance(held, Placeholder)
            held.unit_name = unit_name

    @property
    def releases(self) -> bool:
        """Whether the compute parameters' storage is given back between uses."""
        return self.placements.param is Placement.SHARD

    def owners(self) -> Iterator[nn.Module]:
        """The modules that hold the parameters; one may come twice."""
        return (module for slot in self.slots for module, _ in slot.owners)

    # ---- where the module's parameters are ----------------------------------------------------

    def relinquish(self, unit_name: str) -> None:
        """Take the parameters that the modules had before; nothing else may read them now."""
        for slot in self.slots:
            relinquish(slot.param, name=slot.name, unit=unit_name)

    def check_sharded_params(self) -> None:
        """At rest the modules hold ``sharded_params``, as they were made.

        Raises:
            RuntimeError: one was replaced (``load_state_dict(assign=True)``), converted
                (``half()``), or frozen: the flat storage knows nothing of it.
        """
        for slot, param in zip(self.slots, self.sharded_params, strict=True):
            is_same = all(module.get_parameter(name) is param for module, name in slot.owners)
            if is_same and param.dtype is self.dtype and param.requires_grad is self.requires_grad:
                continue
            raise RuntimeError(
                f"parameter {slot.name} was replaced, converted or frozen after fully_shard; "
                "expected the sharded parameter as it was made. Do so before fully_shard, and "
                "copy new values into it"
            )

    def install(self, params: Sequence[nn.Parameter]) -> None:
        """Put one of ``compute_params``, ``sharded_params``, ``placeholders`` on the modules."""
        for slot, param in zip(self.slots, params, strict=True):
            for module, attribute in slot.owners:
                # Not setattr: nn.Module's checks cost microseconds a parameter, each gather.
                module._parameters[attribute] = param  # pyright: ignore[reportPrivateUsage]

    def gather(self, communicator: Communicator) -> None:
        """AG lane: allocate the storage and fill it from every rank's main weights."""
        self.storage.allocate()
        communicator.all_gather(self.storage.flat, self._main)

    def release(self) -> None:
        """AG lane: give the storage back; views stay."""
        self.storage.free()

    # ---- gradients ----------------------------------------------------------------------------

    def accumulate(self, index: int, microbatch: int, grad: Tensor) -> None:
        """Comp lane: the one door for every contribution to parameter ``index``.

        A parameter used more than once sums its contributions of a microbatch first, in the
        order of autograd (last forward use first), as one graph of the whole model would.
        """
        pending = self._pending.get(microbatch)
        if pending is None:
            pending = self._pending[microbatch] = [None] * len(self.slots)
        held = pending[index]
        pending[index] = grad if held is None else held.add_(grad)

    def seal(self, microbatch: int, *, is_last: bool) -> None:
        """Comp lane: hand the microbatch's contributions to ``reduce``, in a record of its own."""
        grads: Grads = self._pending.pop(microbatch, None) or [None] * len(self.slots)
        if self.reduces_each_microbatch:
            self._sealed.append(grads)
            return
        held = self._accumulated
        if held is not None:
            for i, grad in enumerate(grads):
                if grad is not None:
                    before = held[i]
                    held[i] = grad if before is None else before.add_(grad)
            grads = held
        self._accumulated = None if is_last else grads
        if is_last:
            self._sealed.append(grads)

    def reduce(self, communicator: Communicator, divisor: int) -> Sequence[Tensor | None]:
        """RS lane: reduce the oldest sealed gradients and add them to the step's.

        A parameter without a gradient contributes zeros: another rank may have one.

        Returns:
            What was read; the comp lane allocated it.
        """
        if not self._sealed:
            raise RuntimeError(
                f"reduce() of {self.slots[0].name} and others: nothing is sealed; call seal() once "
                "a microbatch's contributions are complete, then reduce()"
            )
        grads = self._sealed.popleft()
        whole = self._pack(grads)
        if self.placements.grad is Placement.SHARD:
            reduced = whole.new_empty(self.layout.shard_numel)
            communicator.reduce_scatter(reduced, whole)
        else:
            reduced = whole
            if communicator.num_ranks > 1:
                communicator.all_reduce(reduced)
        # AVG as SUM plus scaling: gloo has no AVG, and an expert's group is smaller than the
        # number of ranks whose tokens it saw.
        if divisor != 1:
            reduced.mul_(1.0 / divisor)
        held = self._step_grad
        self._step_grad = reduced if held is None else held.add_(reduced)
        return grads

    def rows(self, index: int) -> tuple[int, int]:
        """Rows ``[first, last)`` of parameter ``index`` that this rank's main weights hold."""
        extent = self._extents[index]
        if self.placements.main is Placement.REPLICATE:
            return 0, extent.shape[0]
        return extent.rows_within(*self.layout.shard_range(self._rank))

    @property
    def is_primary(self) -> bool:
        """Whether this rank's main weights are those that count where several ranks hold the same:
        it writes them to a checkpoint, and adds them to a norm."""
        return self.placements.main is Placement.SHARD or self._rank == 0

    def holds_contributions(self, *, is_last: bool) -> bool:
        """Whether gradients wait for ``seal``, or an end of the step for what was accumulated."""
        return bool(self._pending) or (is_last and self._accumulated is not None)

    @torch.no_grad()
    def publish(self) -> None:
        """Host, after every reduction: add the step's gradient to ``.grad``."""
        if (step_grad := self._step_grad) is None:
            return
        self._step_grad = None
        for param, extent in zip(self.sharded_params, self._extents, strict=True):
            local = self._local_rows(step_grad, extent)
            if param.grad is None:
                param.grad = self._as_dtensor(local, extent.shape)
            else:
                _local_of(param.grad).add_(local)

    def zero_grad(self, *, set_to_none: bool) -> None:
        """As ``nn.Module.zero_grad``, for the sharded parameters."""
        for param in self.sharded_params:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.detach_().zero_()

    def drop_grads(self) -> None:
        """After a failure: forget all of this step's contributions."""
        self._pending.clear()
        self._accumulated = None
        self._sealed.clear()
        self._step_grad = None
        for param in self.compute_params:
            param.grad = None

    # ---- construction -------------------------------------------------------------------------

    def _make_main_weights(self) -> tuple[Tensor, int]:
        """The main weights, and where in the layout they start."""
        if self.placements.main is Placement.REPLICATE:
            return self.storage.flat, 0
        start, stop = self.layout.shard_range(self._rank)
        return self.storage.flat[start:stop].clone(), start

    def _make_compute_param(self, index: int) -> nn.Parameter:
        view = self.storage.param_view(self._extents[index])
        param = nn.Parameter(view, requires_grad=self.requires_grad)
        # Frameworks mark parameters (Megatron: ``allreduce``, ``sequence_parallel``, ...).
        vars(param).update(vars(self.slots[index].param))
        return param

    def _make_sharded_param(self, index: int) -> nn.Parameter:
        extent = self._extents[index]
        local = self._local_rows(self._main, extent)
        param = nn.Parameter(
            self._as_dtensor(local, extent.shape), requires_grad=self.requires_grad
        )
        vars(param).update(vars(self.slots[index].param))
        return param

    def _local_rows(self, flat: Tensor, extent: ParamExtent) -> Tensor:
        """This rank's part of a parameter, in main weights or in a gradient laid out like them."""
        if self.placements.main is Placement.REPLICATE:
            return flat.data[extent.start : extent.stop].view(extent.shape)
        return rows_of(flat, self.layout, extent, self._rank, offset=self._main_offset)

    def _as_dtensor(self, local: Tensor, shape: tuple[int, ...]) -> DTensor:
        """A DTensor of the parameter's global shape over ``local``.

        Where sharded, the rows a rank holds follow the flat layout, not ``torch.chunk``: what is
        elementwise is right, ``full_tensor()`` is not (see docs/decisions.md).
        """
        sharded = self.placements.main is Placement.SHARD
        return DTensor.from_local(
            local,
            self.mesh,
            [Shard(0) if sharded else Replicate()],
            run_check=False,
            shape=torch.Size(shape),
            stride=torch.empty(shape, device="meta").stride(),
        )

    def _pack(self, grads: Sequence[Tensor | None]) -> Tensor:
        """The flat input of the reduction. Padding keeps what memory held; nobody reads it."""
        whole = torch.empty(self.layout.numel, dtype=self._main.dtype, device=self._main.device)
        views: list[Tensor] = []
        present: list[Tensor] = []
        for grad, extent in zip(grads, self._extents, strict=True):
            view = whole[extent.start : extent.stop].view(extent.shape)
            if grad is None:
                view.zero_()
            else:
                views.append(view)
                present.append(grad)
        if views:
            torch._foreach_copy_(views, present)  # pyright: ignore[reportPrivateUsage]
        return whole


def _local_of(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor), "the gradient of a sharded parameter is a DTensor"
    return tensor.to_local()
