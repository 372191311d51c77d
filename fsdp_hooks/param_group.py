"""A unit's parameters of one dtype, one mesh, one requires_grad: what the module holds when.

The words for the tensors of one parameter:

* *compute parameter*: what forward and backward read; a view of the group's whole weights.
* *sharded parameter*: what the module holds at rest: a DTensor of the parameter's own name and
  global shape, whose local part is a view of the main weights.
* *placeholder*: what the module holds while the compute parameter is not filled.

The values are in ``weights.py``, what backward makes of them in ``gradients.py``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_hooks.buffer import rows_of
from fsdp_hooks.gradients import Gradients
from fsdp_hooks.layout import flat_layout
from fsdp_hooks.mesh import GroupMesh, is_primary
from fsdp_hooks.placeholder import Placeholder, placeholder_for, relinquish
from fsdp_hooks.placement import WHOLE, Placement, Placements
from fsdp_hooks.precision import Dtypes
from fsdp_hooks.weights import Parts, Weights
from fsdp_hooks.wgrad import Destination


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
        unit_name: for errors, until ``name_unit`` knows the name from the root.
        mesh: of the ranks that share them.
        placements: of the strategy, over the inner ranks.
        outer: of the main weights, over the outer ranks.
        dtypes: to compute, keep and reduce in.
    """

    def __init__(
        self,
        slots: Sequence[ParamSlot],
        *,
        unit_name: str,
        mesh: GroupMesh,
        placements: Placements,
        outer: Placement,
        dtypes: Dtypes,
    ) -> None:
        first = slots[0].param
        self.slots = tuple(slots)
        self.mesh = mesh
        # On one rank a shard is the whole: nothing to gather, release or reduce.
        self.placements = placements if mesh.inner.size > 1 else WHOLE
        self.outer = outer if mesh.outer.size > 1 else Placement.REPLICATE
        self.requires_grad = first.requires_grad
        self.dtypes = dtypes
        parts = Parts(mesh=mesh, placements=self.placements, outer=self.outer)
        shapes = [tuple(slot.param.shape) for slot in slots]
        self.layout = layout = flat_layout(shapes, parts.num_pieces)
        self._extents = layout.extents
        self._places = tuple(
            (module, attribute, index)
            for index, slot in enumerate(slots)
            for module, attribute in slot.owners
        )
        """Where each parameter is on the modules."""
        self.weights = Weights(
            layout,
            self._initial_values(),
            compute_dtype=dtypes.compute,
            parts=parts,
            keeps_whole=self.placements.param is Placement.REPLICATE,
        )
        self.releases = self.weights.releases
        """Whether the compute parameters' storage is given back between uses."""
        self.gathers = not (self.weights.is_resident or self.weights.is_filled_locally)
        """Whether other ranks are asked for the values of compute parameters."""
        shard_start, shard_stop = parts.shard(layout)
        self.gradients = Gradients(
            layout,
            shard_numel=shard_stop - shard_start,
            main_numel=self.weights.main.numel(),
            placement=self.placements.main,
            has_outer=mesh.outer.size > 1,
            dtypes=dtypes,
            device=first.device,
        )
        self.compute_params = [self._make_compute_param(i) for i in range(len(slots))]
        rows = [rows_of(self.weights.main, e, start=self.weights.main_start) for e in self._extents]
        self._rows = [(tuple(r.shape), r.stride(), r.storage_offset()) for r in rows]
        """This rank's rows of each parameter, in main weights and in a gradient laid out likewise:
        shape, strides and where they start."""
        self.sharded_params = [self._make_sharded_param(i) for i in range(len(slots))]
        self.placeholders = [
            placeholder_for(param, name=slot.name, unit=unit_name)
            for slot, param in zip(self.slots, self.compute_params, strict=True)
        ]
        if self.releases:
            self.weights.release()

    def name_unit(self, unit_name: str) -> None:
        """The unit's name from the root, known once there is a root."""
        for held in self.placeholders:
            assert isinstance(held, Placeholder)
            held.unit_name = unit_name

    def owners(self) -> Iterator[nn.Module]:
        """The modules that hold the parameters; one may come twice."""
        return (module for slot in self.slots for module, _ in slot.owners)

    def rows(self, index: int) -> tuple[int, int]:
        """Rows ``[first, last)`` of parameter ``index`` that this rank's main weights hold."""
        start = self.weights.main_start
        return self._extents[index].rows_within(start, start + self.weights.main.numel())

    @property
    def is_primary(self) -> bool:
        """Whether a checkpoint takes the main weights from this rank."""
        sharded = self.sharded_params[0]
        assert isinstance(sharded, DTensor), "a sharded parameter is a DTensor"
        return is_primary(sharded)

    def destination(self, index: int, microbatch: int, *, each_microbatch: bool) -> Destination:
        """Where a fused gradient of parameter ``index`` goes (``Gradients.destination``)."""
        return self.gradients.destination(
            index,
            microbatch,
            each_microbatch=each_microbatch,
            is_tied=len(self.slots[index].owners) > 1,
        )

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
        dtype = self.dtypes.main
        for module, attribute, index in self._places:
            param = self.sharded_params[index]
            is_same = module._parameters.get(attribute) is param  # pyright: ignore[reportPrivateUsage]
            if is_same and param.dtype is dtype and param.requires_grad is self.requires_grad:
                continue
            raise RuntimeError(
                f"parameter {self.slots[index].name} was replaced, converted or frozen after "
                "fully_shard; expected the sharded parameter as it was made. Do so before "
                "fully_shard, and copy new values into it"
            )

    def install(self, params: Sequence[nn.Parameter]) -> None:
        """Put one of ``compute_params``, ``sharded_params``, ``placeholders`` on the modules."""
        for module, attribute, index in self._places:
            # Not setattr: nn.Module's checks cost microseconds a parameter, each gather.
            module._parameters[attribute] = params[index]  # pyright: ignore[reportPrivateUsage]

    # ---- gradients ----------------------------------------------------------------------------

    @torch.no_grad()
    def publish(self) -> None:
        """Host, after every reduction: add what was reduced to ``.grad``."""
        if (step_grad := self.gradients.take()) is None:
            return
        step_grad = step_grad.data
        assert step_grad.storage_offset() == 0, "rows are counted from where its storage starts"
        for index, (param, rows) in enumerate(zip(self.sharded_params, self._rows, strict=True)):
            local = step_grad.as_strided(*rows)
            if param.grad is None:
                param.grad = self.as_sharded(index, local)
            else:
                _local_of(param.grad).add_(local)

    def as_sharded(self, index: int, local: Tensor) -> DTensor:
        """A DTensor like sharded parameter ``index``, over other rows of the same shape."""
        like = self.sharded_params[index]
        assert isinstance(like, DTensor), "a sharded parameter is a DTensor"
        # from_local takes 38 us to make another spec, for each gradient of each step.
        spec = like._spec  # pyright: ignore[reportPrivateUsage]
        return DTensor(local, spec, requires_grad=False)

    def zero_grad(self, *, set_to_none: bool) -> None:
        """As ``nn.Module.zero_grad``, for the sharded parameters, and for what earlier microbatches
        left to be reduced."""
        self.gradients.drop_kept()
        for param in self.sharded_params:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.detach_().zero_()

    def drop_grads(self) -> bool:
        """After a failure: forget all contributions (``Gradients.drop``)."""
        for param in self.compute_params:
            param.grad = None
        return self.gradients.drop()

    # ---- construction -------------------------------------------------------------------------

    def _initial_values(self) -> Tensor:
        """``[layout.numel]``: the parameters' values in the main dtype, padding zero."""
        device = self.slots[0].param.device
        values = torch.zeros(self.layout.numel, dtype=self.dtypes.main, device=device)
        for slot, extent in zip(self.slots, self._extents, strict=True):
            values[extent.start : extent.stop].view(extent.shape).copy_(slot.param.detach())
        return values

    def _make_compute_param(self, index: int) -> nn.Parameter:
        view = self.weights.whole.param_view(self._extents[index])
        return self._marked(index, nn.Parameter(view, requires_grad=self.requires_grad))

    def _make_sharded_param(self, index: int) -> nn.Parameter:
        """A DTensor of the parameter's global shape over this rank's rows of the main weights.

        Where sharded, the rows a rank holds follow the flat layout, not ``torch.chunk``: what is
        elementwise is right, ``full_tensor()`` is not (see docs/decisions.md).
        """
        shape = self._extents[index].shape
        over = [self.outer, self.placements.main][-self.mesh.device_mesh.ndim :]
        sharded = DTensor.from_local(
            self.weights.main.data.as_strided(*self._rows[index]),
            self.mesh.device_mesh,
            [Shard(0) if placement is Placement.SHARD else Replicate() for placement in over],
            run_check=False,
            shape=torch.Size(shape),
            stride=torch.empty(shape, device="meta").stride(),
        )
        return self._marked(index, nn.Parameter(sharded, requires_grad=self.requires_grad))

    def _marked(self, index: int, param: nn.Parameter) -> nn.Parameter:
        """Frameworks mark parameters (Megatron: ``allreduce``, ``sequence_parallel``, ...)."""
        vars(param).update(vars(self.slots[index].param))
        return param


def _local_of(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor), "the gradient of a sharded parameter is a DTensor"
    return tensor.to_local()
