"""A process group for CPU ranks that measures every collective and, on demand, paces it.

::

    stream thread:  enter |--- real bytes, by gloo ---|--- paced: latency + bytes/rate ---| exit
                           last rank entered ^ somewhere in here

A ``LinkGroup`` wraps a gloo group and runs each collective to its end in the calling thread. Each
stream on CPU is a worker thread, and a thread that waits here holds no GIL: that is what lets
compute and collectives overlap. ``async_op=True`` is accepted and returns finished work.

Pacing sleeps the full time after the real move. The time since the last rank entered could be
counted against it, but no rank knows it without another message, so a paced collective costs the
move and the stated time.

``send`` and ``recv`` go to gloo as they are, neither timed nor paced nor logged: were ``isend`` to
wait, two ranks that both send first would wait for each other.
"""

# torch's stubs leave out the collectives of its backends and list more overloads of a process
# group's methods than anything calls; the two private names are its extension interface.
# pyright: reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, override

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from ep_overlap.links.speed import LinkSpeed, Wire, parse_rate
from ep_overlap.links.times import CollectiveKind, CollectiveSpan
from ep_overlap.links.wire_bytes import foreign_bytes, nbytes, passed_on_bytes, rooted_bytes

__all__ = [
    "CollectiveKind",
    "CollectiveSpan",
    "LinkGroup",
    "LinkSpeed",
    "Wire",
    "new_link_group",
    "parse_rate",
]

BACKEND_NAME: Final = "link"
DEFAULT_TIMEOUT: Final = timedelta(minutes=10)


@dataclass(frozen=True, kw_only=True, slots=True)
class _LinkOptions:
    """What ``new_link_group`` hands through torch to ``_create``."""

    name: str
    kind: CollectiveKind | None
    speed: LinkSpeed | None
    wire: Wire
    store: dist.Store


def _one_by_one[OptionsT](
    issue: Callable[[Tensor, Tensor, OptionsT], dist.Work],
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    opts: OptionsT,
) -> dist.Work:
    """A coalesced collective, which gloo's Python interface lacks; the last one's work."""
    works = [issue(*pair, opts) for pair in zip(outputs, inputs, strict=True)]
    for work in works:
        work.wait()
    return works[-1]


class LinkGroup(dist.ProcessGroup):
    """A gloo group whose collectives are synchronous, timed and, with a speed, paced.

    It belongs to one stream: a second thread that enters while a first is inside gets a
    ``RuntimeError`` (gloo itself would mix the two threads' data without a word).
    """

    log: list[CollectiveSpan] | None
    """The collectives so far, in order; set it to None to record nothing."""

    def __init__(
        self, inner: dist.ProcessGroupGloo, ranks: Sequence[int], options: _LinkOptions
    ) -> None:
        super().__init__(inner.rank(), inner.size())  # pyright: ignore[reportCallIssue]
        # The name, shutdown and the device of object collectives come from a registered backend.
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, inner)
        self.link_name = options.name
        self.ranks = tuple(ranks)
        self.speed = options.speed
        self.wire = options.wire
        self.log = []
        self._inner = inner
        self._kind = options.kind
        self._sequence = 0
        self._entered = threading.Lock()
        self._thread_inside = ""

    def getBackendName(self) -> str:  # noqa: N802 (torch calls it by this name)
        """The name under which torch knows the backend."""
        return BACKEND_NAME

    # --- exchange -------------------------------------------------------------------------------

    @override
    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: c10d.AllToAllOptions,
    ) -> dist.Work:
        rank, size = self.rank(), self.size()
        wire_bytes = max(
            foreign_bytes(input, input_split_sizes, rank, size),
            foreign_bytes(output, output_split_sizes, rank, size),
        )
        return self._run(
            "all_to_all_single",
            CollectiveKind.A2A,
            wire_bytes,
            lambda: self._inner.alltoall_base(
                output, input, output_split_sizes, input_split_sizes, opts
            ),
        )

    @override
    def alltoall(
        self,
        output_tensors: Sequence[Tensor],
        input_tensors: Sequence[Tensor],
        opts: c10d.AllToAllOptions,
    ) -> dist.Work:
        """gloo has no exchange of lists: this packs them and exchanges the packed tensors."""
        own = self.rank()

        def move() -> dist.Work:
            sent = torch.cat([tensor.reshape(-1) for tensor in input_tensors])
            received_numel = [tensor.numel() for tensor in output_tensors]
            received = sent.new_empty(sum(received_numel))
            sent_numel = [tensor.numel() for tensor in input_tensors]
            work = self._inner.alltoall_base(received, sent, received_numel, sent_numel, opts)
            work.wait()
            for output, piece in zip(output_tensors, received.split(received_numel), strict=True):
                output.copy_(piece.view(output.shape))
            return work

        wire_bytes = max(
            nbytes(input_tensors) - input_tensors[own].nbytes,
            nbytes(output_tensors) - output_tensors[own].nbytes,
        )
        return self._run("all_to_all", CollectiveKind.A2A, wire_bytes, move)

    # --- gather ---------------------------------------------------------------------------------

    @override
    def allgather(
        self,
        output_tensors: Sequence[Sequence[Tensor]],
        input_tensors: Sequence[Tensor],
        opts: c10d.AllgatherOptions,
    ) -> dist.Work:
        return self._run(
            "all_gather",
            CollectiveKind.AG,
            nbytes(input_tensors) * (self.size() - 1),
            lambda: self._inner.allgather(output_tensors, input_tensors, opts),
        )

    @override
    def _allgather_base(
        self, output: Tensor, input: Tensor, opts: c10d.AllgatherOptions
    ) -> dist.Work:
        return self._run(
            "all_gather_into_tensor",
            CollectiveKind.AG,
            input.nbytes * (self.size() - 1),
            lambda: self._inner._allgather_base(output, input, opts),
        )

    @override
    def allgather_into_tensor_coalesced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: c10d.AllgatherOptions | None = None,
    ) -> dist.Work:
        """Torch's coalescing manager gives no options."""
        options = opts or c10d.AllgatherOptions()
        return self._run(
            "all_gather_into_tensor_coalesced",
            CollectiveKind.AG,
            nbytes(inputs) * (self.size() - 1),
            lambda: _one_by_one(self._inner._allgather_base, outputs, inputs, options),
        )

    @override
    def gather(
        self,
        output_tensors: Sequence[Sequence[Tensor]],
        input_tensors: Sequence[Tensor],
        opts: c10d.GatherOptions,
    ) -> dist.Work:
        return self._run(
            "gather",
            CollectiveKind.OTHER,
            rooted_bytes(nbytes(input_tensors), self.size(), is_root=self.rank() == opts.rootRank),
            lambda: self._inner.gather(output_tensors, input_tensors, opts),
        )

    # --- reduce ---------------------------------------------------------------------------------

    @override
    def reduce_scatter(
        self,
        output_tensors: Sequence[Tensor],
        input_tensors: Sequence[Sequence[Tensor]],
        opts: c10d.ReduceScatterOptions,
    ) -> dist.Work:
        input_bytes = sum(nbytes(tensors) for tensors in input_tensors)
        return self._run(
            "reduce_scatter",
            CollectiveKind.RS,
            input_bytes * (self.size() - 1) // self.size(),
            lambda: self._inner.reduce_scatter(output_tensors, input_tensors, opts),
        )

    @override
    def _reduce_scatter_base(
        self, outputTensor: Tensor, inputTensor: Tensor, opts: c10d.ReduceScatterOptions
    ) -> dist.Work:
        return self._run(
            "reduce_scatter_tensor",
            CollectiveKind.RS,
            inputTensor.nbytes * (self.size() - 1) // self.size(),
            lambda: self._inner._reduce_scatter_base(outputTensor, inputTensor, opts),
        )

    @override
    def reduce_scatter_tensor_coalesced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: c10d.ReduceScatterOptions,
    ) -> dist.Work:
        return self._run(
            "reduce_scatter_tensor_coalesced",
            CollectiveKind.RS,
            nbytes(inputs) * (self.size() - 1) // self.size(),
            lambda: _one_by_one(self._inner._reduce_scatter_base, outputs, inputs, opts),
        )

    @override
    def allreduce(self, tensors: Sequence[Tensor], opts: c10d.AllreduceOptions) -> dist.Work:
        return self._run(
            "all_reduce",
            CollectiveKind.AR,
            2 * nbytes(tensors) * (self.size() - 1) // self.size(),
            lambda: self._inner.allreduce(tensors, opts),
        )

    @override
    def allreduce_coalesced(
        self, tensors: Sequence[Tensor], opts: c10d.AllreduceCoalescedOptions
    ) -> dist.Work:
        return self._run(
            "all_reduce_coalesced",
            CollectiveKind.AR,
            2 * nbytes(tensors) * (self.size() - 1) // self.size(),
            lambda: self._inner.allreduce_coalesced(tensors, opts),
        )

    @override
    def reduce(self, tensors: Sequence[Tensor], opts: c10d.ReduceOptions) -> dist.Work:
        return self._run(
            "reduce",
            CollectiveKind.OTHER,
            passed_on_bytes(nbytes(tensors), self.size()),
            lambda: self._inner.reduce(tensors, opts),
        )

    # --- from one rank, and none ----------------------------------------------------------------

    @override
    def broadcast(self, tensors: Sequence[Tensor], opts: c10d.BroadcastOptions) -> dist.Work:
        return self._run(
            "broadcast",
            CollectiveKind.OTHER,
            passed_on_bytes(nbytes(tensors), self.size()),
            lambda: self._inner.broadcast(tensors, opts),
        )

    @override
    def scatter(
        self,
        output_tensors: Sequence[Tensor],
        input_tensors: Sequence[Sequence[Tensor]],
        opts: c10d.ScatterOptions,
    ) -> dist.Work:
        return self._run(
            "scatter",
            CollectiveKind.OTHER,
            rooted_bytes(nbytes(output_tensors), self.size(), is_root=self.rank() == opts.rootRank),
            lambda: self._inner.scatter(output_tensors, input_tensors, opts),
        )

    @override
    def barrier(self, opts: c10d.BarrierOptions) -> dist.Work:
        return self._run("barrier", CollectiveKind.OTHER, 0, lambda: self._inner.barrier(opts))

    # --- point to point: passed through ---------------------------------------------------------

    @override
    def send(self, tensors: Sequence[Tensor], dstRank: int, tag: int) -> dist.Work:
        return self._inner.send(tensors, dstRank, tag)

    @override
    def recv(self, tensors: Sequence[Tensor], srcRank: int, tag: int) -> dist.Work:
        return self._inner.recv(tensors, srcRank, tag)

    @override
    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> dist.Work:
        return self._inner.recv_anysource(tensors, tag)

    # --- the one way in -------------------------------------------------------------------------

    def _run(
        self, op: str, kind: CollectiveKind, wire_bytes: int, issue: Callable[[], dist.Work]
    ) -> dist.Work:
        """Issue, wait, pace, log. Raises what gloo raises, with this collective as a note."""
        thread_name = threading.current_thread().name
        if not self._entered.acquire(blocking=False):
            raise RuntimeError(
                f"link group {self.link_name!r} is used by two threads at once: {thread_name!r} "
                f"called {op} while {self._thread_inside!r} was inside. A group belongs to one "
                "stream; give each stream a group of its own (new_link_group)."
            )
        sequence = self._sequence
        try:
            self._thread_inside = thread_name
            self._sequence += 1
            enter_ns = time.perf_counter_ns()
            work = issue()
            work.wait()
            # A group of one rank has no wire to pay for.
            if self.speed is not None and self.size() > 1:
                self.wire.carry(wire_bytes, self.speed)
            if self.log is not None:
                span = CollectiveSpan(
                    kind=self._kind or kind,
                    op=op,
                    group=self.link_name,
                    ranks=self.ranks,
                    sequence=sequence,
                    thread_name=thread_name,
                    wire_bytes=wire_bytes,
                    enter_ns=enter_ns,
                    exit_ns=time.perf_counter_ns(),
                )
                self.log.append(span)
            return work
        except Exception as error:
            error.add_note(
                f"in {op}, collective {sequence} of link group {self.link_name!r}, "
                f"rank {self.ranks[self.rank()]} of ranks {list(self.ranks)}"
            )
            raise
        finally:
            self._entered.release()


def _create(torch_options: c10d._DistributedBackendOptions, options: _LinkOptions) -> LinkGroup:
    """The creator that torch calls for the backend (extended API of ``register_backend``)."""
    inner = dist.ProcessGroupGloo(
        options.store, torch_options.group_rank, torch_options.group_size, torch_options.timeout
    )
    return LinkGroup(inner, torch_options.global_ranks_in_group, options)


def new_link_group(
    ranks: Sequence[int],
    *,
    name: str,
    kind: CollectiveKind | None = None,
    speed: LinkSpeed | None = None,
    wire: Wire | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> LinkGroup:
    """Build a link group. Collective over ``ranks`` (global), and only they call it.

    ``kind`` replaces the kind of every logged span (a group for token counts logs ``OTHER``).
    ``wire`` is shared with other groups of this rank; by default the group has its own.

    The members meet under name, ranks and how often this pair was built before, so ranks may build
    different groups in between. Torch names the group after how many groups this process holds:
    after destroying one of several groups with the same ranks, destroy the others as well before
    building anew.

    Raises:
        ValueError: this rank is not in ``ranks``, ranks repeat, or a wire without a speed.
        RuntimeError: torch.distributed is not initialised; a member did not come in ``timeout``.
    """
    if not dist.is_initialized():
        raise RuntimeError("new_link_group needs torch.distributed: call init_process_group first")
    members = sorted(ranks)
    own = dist.get_rank()
    if own not in members or len(set(members)) != len(members):
        raise ValueError(
            f"link group {name!r}: expected distinct ranks with this rank ({own}) among them, "
            f"got {list(ranks)}"
        )
    if wire is not None and speed is None:
        raise ValueError(f"link group {name!r}: a wire has no effect without a speed; give both")
    if BACKEND_NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND_NAME, _create, extended_api=True, devices=["cpu"])

    store = c10d._get_default_store()
    meeting = f"link/{name}/{'-'.join(map(str, members))}"
    build = store.add(f"{meeting}/{own}", 1)
    options = _LinkOptions(
        name=name,
        kind=kind,
        speed=speed,
        wire=wire or Wire(),
        # A rebuilt group must not read the addresses that a dead one left in the store.
        store=dist.PrefixStore(f"{meeting}/build{build}", store),
    )
    group = dist.new_group(
        members,
        backend=BACKEND_NAME,
        timeout=timeout,
        pg_options=options,
        use_local_synchronization=True,
        group_desc=name,
    )
    assert isinstance(group, LinkGroup), f"torch built {type(group)} for backend {BACKEND_NAME}"
    return group
