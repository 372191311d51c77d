"""A process-group backend that runs one rank of an emulated world, on CPU or on one GPU.

::

    emulation = Emulation(parse_emulated_links("a2a=50GBps,dp=100GBps,latency=20us"))
    register_emulated_backend()
    dist.init_process_group("emulated", rank=0, world_size=8, store=dist.HashStore(),
                            pg_options=emulation)
    dist.new_group([0, 1, 2, 3])      # of the same emulation; groups without this rank are nobody's

There are no other ranks: a collective moves real bytes locally (``emulated_copies``), then holds
its stream, or on CPU the calling thread, for latency plus the bytes that a real rank would move
over the rate of its role (``emulated_run``). All-to-alls have the role ``a2a``, everything else
``dp``. Each group has links of its own, so groups do not slow each other. A group of one rank costs
no link time. Times are those of such a world; values are not: use it to measure, not to train.

Refused: ``send`` and ``recv`` (nobody is there), reductions by PREMUL_SUM, and integers or objects
from another root. megatron-core needs ``create_gloo_process_groups=False``: gloo wants real ranks.
"""

# torch's stubs leave out the collectives of its backends and list more overloads of a process
# group's methods than anything calls; the private names are its extension interface.
# pyright: reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from collections.abc import Sequence
from typing import Final, NoReturn, final, override

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import distributed_c10d as c10d

from ep_overlap.links import emulated_copies as copies
from ep_overlap.links.emulated_run import Collective
from ep_overlap.links.emulated_speed import EmulatedLinks, parse_emulated_links
from ep_overlap.links.emulation import Emulation, GroupRunner
from ep_overlap.links.times import CollectiveKind
from ep_overlap.links.wire_bytes import foreign_bytes, nbytes, passed_on_bytes, rooted_bytes

__all__ = [
    "EmulatedGroup",
    "EmulatedLinks",
    "Emulation",
    "parse_emulated_links",
    "register_emulated_backend",
]

BACKEND_NAME: Final = "emulated"

SUM: Final = dist.ReduceOp.SUM


@final
class EmulatedGroup(dist.ProcessGroup):
    """This rank's part in a group of emulated ranks. See the module's docstring.

    A second thread that enters while a first is inside gets a ``RuntimeError``, as of a
    ``LinkGroup``.
    """

    def __init__(self, rank: int, size: int, ranks: Sequence[int], emulation: Emulation) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]
        self.emulation = emulation
        self._rank, self._size = rank, size
        self._runner = GroupRunner(emulation, ranks, rank)
        # Torch asks a registered backend for devices and names. Were it reached by a collective,
        # which C++ might do, past the methods below, it would raise.
        options = FakeProcessGroup.Options()  # pyright: ignore[reportCallIssue]
        options.error_on_collective = True
        make = FakeProcessGroup._create_internal
        never = make(rank, size, options)  # pyright: ignore[reportCallIssue]
        for device in ("cpu", "cuda"):
            backend = dist.ProcessGroup.BackendType.CUSTOM
            self._register_backend(torch.device(device), backend, never)

    def getBackendName(self) -> str:  # noqa: N802 (torch calls it by this name)
        """The name under which torch knows the backend."""
        return BACKEND_NAME

    def describe(self) -> str:
        """For reports, such as ``emulated: 8 ranks, a2a 50 GB/s, dp 100 GB/s, latency 20 us``."""
        return self.emulation.links.describe(self._size)

    # --- exchange -------------------------------------------------------------------------------

    @override
    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: c10d.AllToAllOptions | None = None,
    ) -> dist.Work:
        rank, size = self._rank, self._size
        copies.check_same([output], [input], factor=0)
        copies.check_splits(output, output_split_sizes, size, name="output")
        copies.check_splits(input, input_split_sizes, size, name="input")
        item = Collective(
            op="all_to_all_single",
            kind=CollectiveKind.A2A,
            wire_bytes=max(
                foreign_bytes(input, input_split_sizes, rank, size),
                foreign_bytes(output, output_split_sizes, rank, size),
            ),
            copy=lambda: copies.fill(output, input),
            outputs=[output],
            inputs=[input],
            is_async=opts is None or opts.asyncOp,
        )
        return self._run(item)

    @override
    def alltoall(
        self,
        output_tensors: Sequence[Tensor],
        input_tensors: Sequence[Tensor],
        opts: c10d.AllToAllOptions | None = None,
    ) -> dist.Work:
        copies.check_same(output_tensors, input_tensors, factor=0)
        own = self._rank
        item = Collective(
            op="all_to_all",
            kind=CollectiveKind.A2A,
            wire_bytes=max(
                nbytes(input_tensors) - input_tensors[own].nbytes,
                nbytes(output_tensors) - output_tensors[own].nbytes,
            ),
            copy=lambda: copies.fill_each(output_tensors, input_tensors),
            outputs=output_tensors,
            inputs=input_tensors,
            is_async=opts is None or opts.asyncOp,
        )
        return self._run(item)

    # --- gather ---------------------------------------------------------------------------------

    @override
    def _allgather_base(
        self, output: Tensor, input: Tensor, opts: c10d.AllgatherOptions | None = None
    ) -> dist.Work:
        return self._gather("all_gather_into_tensor", [output], [input], opts)

    @override
    def allgather_into_tensor_coalesced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: c10d.AllgatherOptions | None = None,
    ) -> dist.Work:
        return self._gather("all_gather_into_tensor_coalesced", outputs, inputs, opts)

    def _gather(
        self,
        op: str,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: c10d.AllgatherOptions | None,
    ) -> dist.Work:
        copies.check_same(outputs, inputs, factor=self._size)
        item = Collective(
            op=op,
            kind=CollectiveKind.AG,
            wire_bytes=nbytes(inputs) * (self._size - 1),
            copy=lambda: copies.fill_each(outputs, inputs),
            outputs=outputs,
            inputs=inputs,
            is_async=opts is None or opts.asyncOp,
        )
        return self._run(item)

    @override
    def allgather(
        self,
        output_tensors: Sequence[Sequence[Tensor]],
        input_tensors: Sequence[Tensor],
        opts: c10d.AllgatherOptions | None = None,
    ) -> dist.Work:
        return self._gather_lists("all_gather", output_tensors, input_tensors, opts)

    @override
    def allgather_coalesced(
        self,
        output_lists: Sequence[Sequence[Tensor]],
        input_list: Sequence[Tensor],
        opts: c10d.AllgatherOptions | None = None,
    ) -> dist.Work:
        # Torch hands over one list for each rank, here as in gloo.
        by_tensor = [list(tensors) for tensors in zip(*output_lists, strict=True)]
        return self._gather_lists("all_gather_coalesced", by_tensor, input_list, opts)

    def _gather_lists(
        self,
        op: str,
        output_lists: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: c10d.AllgatherOptions | None,
    ) -> dist.Work:
        """One list of outputs for each input. Those of other ranks may have other sizes."""
        pairs = list(zip(output_lists, inputs, strict=True))
        outputs = [output for listed, _ in pairs for output in listed]
        sources = [source for listed, source in pairs for _ in listed]
        copies.check_same(outputs, sources, factor=0)
        item = Collective(
            op=op,
            kind=CollectiveKind.AG,
            wire_bytes=nbytes(inputs) * (self._size - 1),
            copy=lambda: copies.fill_each(outputs, sources),
            outputs=outputs,
            inputs=inputs,
            is_async=opts is None or opts.asyncOp,
        )
        return self._run(item)

    @override
    def gather(
        self,
        output_tensors: Sequence[Sequence[Tensor]],
        input_tensors: Sequence[Tensor],
        opts: c10d.GatherOptions,
    ) -> dist.Work:
        """To the root, what every rank holds: what this one does."""
        is_root = self._rank == opts.rootRank
        outputs = [output for listed in output_tensors for output in listed]
        (source,) = input_tensors
        copies.check_same(outputs, [source] * len(outputs), factor=1)
        item = Collective(
            op="gather",
            kind=CollectiveKind.OTHER,
            wire_bytes=rooted_bytes(source.nbytes, self._size, is_root=is_root),
            copy=lambda: copies.fill_each(outputs, [source] * len(outputs)),
            outputs=outputs,
            inputs=input_tensors,
            is_async=opts.asyncOp,
        )
        return self._run(item)

    # --- reduce ---------------------------------------------------------------------------------

    @override
    def _reduce_scatter_base(
        self, output: Tensor, input: Tensor, opts: c10d.ReduceScatterOptions | None = None
    ) -> dist.Work:
        return self._scatter_sums("reduce_scatter_tensor", [output], [input], opts)

    @override
    def reduce_scatter_tensor_coalesced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: c10d.ReduceScatterOptions | None = None,
    ) -> dist.Work:
        return self._scatter_sums("reduce_scatter_tensor_coalesced", outputs, inputs, opts)

    def _scatter_sums(
        self,
        op: str,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: c10d.ReduceScatterOptions | None,
    ) -> dist.Work:
        copies.check_same(inputs, outputs, factor=self._size)
        reduction = SUM if opts is None else opts.reduceOp
        copies.check_reduction(reduction)

        def copy() -> None:
            for output, whole in zip(outputs, inputs, strict=True):
                copies.take_chunk(output, whole, self._rank)
            copies.reduce_alone(outputs, reduction, self._size)

        item = Collective(
            op=op,
            kind=CollectiveKind.RS,
            wire_bytes=nbytes(outputs) * (self._size - 1),
            copy=copy,
            outputs=outputs,
            inputs=inputs,
            is_async=opts is None or opts.asyncOp,
        )
        return self._run(item)

    @override
    def reduce_scatter(
        self,
        output_tensors: Sequence[Tensor],
        input_tensors: Sequence[Sequence[Tensor]],
        opts: c10d.ReduceScatterOptions | None = None,
    ) -> dist.Work:
        own = [listed[self._rank] for listed in input_tensors]
        copies.check_same(output_tensors, own, factor=1)
        reduction = SUM if opts is None else opts.reduceOp
        copies.check_reduction(reduction)

        def copy() -> None:
            copies.fill_each(output_tensors, own)
            copies.reduce_alone(output_tensors, reduction, self._size)

        inputs = [tensor for listed in input_tensors for tensor in listed]
        item = Collective(
            op="reduce_scatter",
            kind=CollectiveKind.RS,
            wire_bytes=nbytes(inputs) * (self._size - 1) // self._size,
            copy=copy,
            outputs=output_tensors,
            inputs=inputs,
            is_async=opts is None or opts.asyncOp,
        )
        return self._run(item)

    @override
    def allreduce(
        self, tensors: Sequence[Tensor], opts: c10d.AllreduceOptions | None = None
    ) -> dist.Work:
        return self._reduce("all_reduce", tensors, opts)

    @override
    def allreduce_coalesced(
        self, tensors: Sequence[Tensor], opts: c10d.AllreduceCoalescedOptions | None = None
    ) -> dist.Work:
        return self._reduce("all_reduce_coalesced", tensors, opts)

    def _reduce(
        self, op: str, tensors: Sequence[Tensor], opts: c10d.AllreduceOptions | None
    ) -> dist.Work:
        reduction = SUM if opts is None else opts.reduceOp
        copies.check_reduction(reduction)
        item = Collective(
            op=op,
            kind=CollectiveKind.AR,
            wire_bytes=2 * nbytes(tensors) * (self._size - 1) // self._size,
            copy=lambda: copies.reduce_alone(tensors, reduction, self._size),
            outputs=tensors,
            inputs=(),
            is_async=opts is None or opts.asyncOp,
        )
        return self._run(item)

    @override
    def reduce(self, tensors: Sequence[Tensor], opts: c10d.ReduceOptions) -> dist.Work:
        """At the root the sum, elsewhere what was there."""
        copies.check_reduction(opts.reduceOp)
        to_reduce = tensors if self._rank == opts.rootRank else ()
        item = Collective(
            op="reduce",
            kind=CollectiveKind.OTHER,
            wire_bytes=passed_on_bytes(nbytes(tensors), self._size),
            copy=lambda: copies.reduce_alone(to_reduce, opts.reduceOp, self._size),
            outputs=tensors,
            inputs=(),
            is_async=opts.asyncOp,
        )
        return self._run(item)

    # --- from one rank, and none ----------------------------------------------------------------

    @override
    def broadcast(self, tensors: Sequence[Tensor], opts: c10d.BroadcastOptions) -> dist.Work:
        copies.check_source(tensors, opts.rootRank, self._rank, op="broadcast")
        item = Collective(
            op="broadcast",
            kind=CollectiveKind.OTHER,
            wire_bytes=passed_on_bytes(nbytes(tensors), self._size),
            copy=_nothing,
            outputs=tensors,
            inputs=(),
            is_async=opts.asyncOp,
        )
        return self._run(item)

    @override
    def scatter(
        self,
        output_tensors: Sequence[Tensor],
        input_tensors: Sequence[Sequence[Tensor]],
        opts: c10d.ScatterOptions,
    ) -> dist.Work:
        copies.check_source(output_tensors, opts.rootRank, self._rank, op="scatter")
        own = [listed[self._rank] for listed in input_tensors]  # empty where another is the root
        outputs = output_tensors if own else ()
        copies.check_same(outputs, own, factor=1)
        item = Collective(
            op="scatter",
            kind=CollectiveKind.OTHER,
            wire_bytes=rooted_bytes(
                nbytes(output_tensors), self._size, is_root=self._rank == opts.rootRank
            ),
            copy=lambda: copies.fill_each(outputs, own),
            outputs=output_tensors,
            inputs=[tensor for listed in input_tensors for tensor in listed],
            is_async=opts.asyncOp,
        )
        return self._run(item)

    @override
    def barrier(self, opts: c10d.BarrierOptions | None = None) -> dist.Work:
        """As NCCL's, blocks the host until the caller's stream is done, then for the latency."""
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        item = Collective(
            op="barrier",
            kind=CollectiveKind.OTHER,
            wire_bytes=0,
            copy=_nothing,
            outputs=(),
            inputs=(),
            is_async=False,
        )
        return self._run(item)

    @override
    def send(self, tensors: Sequence[Tensor], dstRank: int, tag: int) -> NoReturn:
        self._refuse("send", f"to rank {dstRank}")

    @override
    def recv(self, tensors: Sequence[Tensor], srcRank: int, tag: int) -> NoReturn:
        self._refuse("recv", f"from rank {srcRank}")

    @override
    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> NoReturn:
        self._refuse("recv", "from any rank")

    def _refuse(self, op: str, peer: str) -> NoReturn:
        raise RuntimeError(  # as torch's backends that lack an operation
            f"{op} {peer}, {self.describe()}: expected a collective, as nobody else is there; "
            "emulate a world without pipeline stages"
        )

    # --- several as one -------------------------------------------------------------------------

    @override
    def _start_coalescing(self, device: torch.device) -> None:
        self._runner.start_coalescing()

    @override
    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """One work for all since ``_start_coalescing``; each has taken its time."""
        return self._runner.end_coalescing()

    def _run(self, item: Collective) -> dist.Work:
        return self._runner.run(item, self.group_desc)


def _nothing() -> None:
    """The tensors hold already what the collective gives."""


def _create(torch_options: c10d._DistributedBackendOptions, options: object) -> EmulatedGroup:
    """The creator that torch calls for the backend (extended API of ``register_backend``)."""
    rank, size = torch_options.group_rank, torch_options.group_size
    ranks = torch_options.global_ranks_in_group or range(size)  # torch leaves it empty for WORLD
    if options is None:
        world = dist.group.WORLD
        if isinstance(world, EmulatedGroup):
            options = world.emulation
        elif world is None:
            options = Emulation()
    if not isinstance(options, Emulation):
        raise ValueError(
            f"backend {BACKEND_NAME!r}: expected pg_options=Emulation(...), or none within an "
            f"emulated world; got {type(options).__name__}"
        )
    return EmulatedGroup(rank, size, ranks, options)


def register_emulated_backend() -> None:
    """Make torch.distributed know ``emulated``, for tensors on CPU and CUDA. Repeatable.

    ``init_process_group`` takes an ``Emulation`` as ``pg_options``; without one links cost nothing.
    Groups made later share the world's.
    """
    if BACKEND_NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            BACKEND_NAME, _create, extended_api=True, devices=["cpu", "cuda"]
        )
