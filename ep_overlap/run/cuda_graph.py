"""A function of one tensor, replayed from CUDA graphs: one launch in place of its Python.

::

    called      tensor -> Python, a launch for each kernel -> output
    replayed    tensor -> copy -> [static input ... static output]        a graph
                grad   -> copy -> [static grad ... static gradients]      another

Between its forward and its backward, a call's graphs hold what autograd has saved; so each call in
flight has graphs of its own. They are captured when all others are in use: in a schedule's first
steps, as many as it has microbatches in flight; later none. A capture waits for the device, and its
graphs keep the memory of what they save, and of the parameters' gradients, until weights have moved
or been frozen: then all are made anew.

``torch.cuda.make_graphed_callables`` captures in the same way. It hands out the memory of its
gradients, which autograd may take for the ``.grad`` that further microbatches add to; and it lets
no other thread, such as NCCL's watchdog, ask anything of CUDA meanwhile.
"""

# A module's own parameters, without a walk through it: this is the host's time for every call.
# pyright: reportPrivateUsage=false

import gc
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, final, override

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

NUM_WARMUPS: Final = 3
"""Of a function before it is captured: kernels are loaded and tuned, workspaces allocated."""

_Key = tuple[torch.Size, torch.dtype, bool, tuple[tuple[int, bool], ...]]
"""What graphs hold for: a tensor's shape, dtype and wish for a gradient, and of each parameter the
address and such a wish."""


@dataclass(frozen=True, kw_only=True)
class _Captured:
    """The graphs of one call at a time, and where they read and write."""

    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph
    input: Tensor
    output: Tensor
    output_grad: Tensor
    input_grad: Tensor | None
    parameter_grads: tuple[Tensor | None, ...]
    """None where none is wanted, or the function does not read the parameter."""
    constants: Sequence[Any]
    """The graphs read them."""


@final
class GraphedFunction:
    """``function``, replayed where gradients are on, and called elsewhere. On CUDA.

    Args:
        function: ``(tensor, *constants) -> output``. For tensors of one shape it must launch the
            same work on the same memory, draw nothing random and call no collective.
        modules: whose own parameters it reads, which stay where they are.
        check: raises for a tensor that it cannot be captured with.
        aside: the stream of captures; None: one of its own. Functions that are never replayed at
            once do well to share one: cuBLAS keeps a workspace of tens of MB for each stream, which
            is then theirs together.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        modules: Sequence[nn.Module],
        *,
        check: Callable[[Tensor], None] | None = None,
        aside: Callable[[], torch.cuda.Stream] | None = None,
    ) -> None:
        self._function = function
        self._check = check
        self._aside = aside or cache(torch.cuda.Stream)
        self._modules = tuple(m for module in modules for m in module.modules() if m._parameters)
        self._idle: dict[_Key, list[_Captured]] = {}
        self.num_captured = 0
        """Graphs that were made: where weights stay, as many as calls were in flight at once."""

    def __call__(self, tensor: Tensor, *constants: Any) -> Tensor:
        """``function`` of them. ``constants``: the same with every tensor of one shape."""
        # Asked for at each call: a sharding core puts others in their place between steps.
        parameters = [
            parameter
            for module in self._modules
            for parameter in module._parameters.values()
            if parameter is not None
        ]
        wants_grad = tensor.requires_grad or any(p.requires_grad for p in parameters)
        if not (wants_grad and torch.is_grad_enabled()):
            return self._function(tensor, *constants)
        read = tuple((parameter.data_ptr(), parameter.requires_grad) for parameter in parameters)
        key = (tensor.shape, tensor.dtype, tensor.requires_grad, read)
        if key not in self._idle:
            # Graphs of weights that are elsewhere by now, or frozen since, are of the past.
            self._idle = {known: kept for known, kept in self._idle.items() if known[-1] == read}
        idle = self._idle.setdefault(key, [])
        if idle:
            captured = idle.pop()
        else:
            if self._check is not None:
                self._check(tensor)
            with _stand_ins(self._modules) as stand_ins:
                captured = _capture(self._function, tensor, constants, stand_ins, self._aside())
            self.num_captured += 1
        return _Replay.apply(_Lease(captured, idle), tensor, *parameters)  # type: ignore[no-any-return]


@final
class _Lease:
    """A call's hold on its graphs until autograd lets go of the call: after its backward, or when a
    step is dropped."""

    __slots__ = ("_idle", "captured")

    def __init__(self, captured: _Captured, idle: list[_Captured]) -> None:
        self.captured = captured
        self._idle = idle

    def __del__(self) -> None:
        self._idle.append(self.captured)


class _Context(FunctionCtx):
    lease: _Lease


@final
class _Replay(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: _Context, lease: _Lease, tensor: Tensor, *parameters: Tensor) -> Tensor:
        ctx.lease, call = lease, lease.captured
        call.input.copy_(tensor)
        call.forward.replay()
        return call.output.detach()

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        call = ctx.lease.captured
        call.output_grad.copy_(grad)
        call.backward.replay()
        # The next replay writes over them. Of the input's gradient autograd may keep an alias; of a
        # tensor that is not only its own, as the parameters' are here, it keeps a copy.
        input_grad = None if call.input_grad is None else call.input_grad.clone()
        return None, input_grad, *call.parameter_grads


@contextmanager
def _stand_ins(modules: Sequence[nn.Module]) -> Generator[list[Tensor]]:
    """Other parameters in place of the modules', of the same memory, until the block ends.

    Where autograd adds up a parameter's gradient is bound to the stream that first used it, and a
    capture may not wait for another stream.
    """
    own = [(module, dict(module._parameters)) for module in modules]
    stand_ins: list[Tensor] = []
    try:
        for module, parameters in own:
            for name, parameter in parameters.items():
                if parameter is not None:
                    needs_grad = parameter.requires_grad
                    stand_in = nn.Parameter(parameter.detach(), requires_grad=needs_grad)
                    module._parameters[name] = stand_in
                    stand_ins.append(stand_in)
        yield stand_ins
    finally:
        for module, parameters in own:
            module._parameters.update(parameters)


def _capture(
    function: Callable[..., Tensor],
    tensor: Tensor,
    constants: Sequence[Any],
    parameters: Sequence[Tensor],
    aside: torch.cuda.Stream,
) -> _Captured:
    static = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    leaves = (static, *parameters)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    caller = torch.cuda.current_stream()
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    aside.wait_stream(caller)  # protects the copy
    with torch.cuda.stream(aside):
        for _ in range(NUM_WARMUPS):
            _warm_up(function, static, constants, wanted)
        aside.synchronize()  # else the capture would begin in the middle of it
        with _capturing(forward):
            output = function(static, *constants)
        output_grad = torch.empty_like(output)
        with _capturing(backward, pool=forward.pool()):
            made = iter(_gradients(output, wanted, output_grad))
    caller.wait_stream(aside)  # protects the memory that warming up has given back
    input_grad, *parameter_grads = (next(made) if x.requires_grad else None for x in leaves)
    return _Captured(
        forward=forward,
        backward=backward,
        input=static.detach(),
        output=output.detach(),
        output_grad=output_grad,
        input_grad=input_grad,
        parameter_grads=tuple(parameter_grads),
        constants=constants,
    )


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Generator[None]:
    """Capture what the current stream is given.

    ``torch.cuda.graph`` does so, too; each time it collects all garbage and empties the allocator's
    cache, which adds up to seconds.
    """
    # Garbage may hold what a capturing thread must not touch.
    collects = gc.isenabled()
    gc.disable()
    try:
        # Of this thread alone: others, such as NCCL's watchdog, may ask CUDA for events meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # of a capture that is not valid any more
                graph.capture_end()
            raise
        graph.capture_end()
    finally:
        if collects:
            gc.enable()


def _warm_up(
    function: Callable[..., Tensor], static: Tensor, constants: Sequence[Any], wanted: list[Tensor]
) -> None:
    # Nothing of it may live on: the leaves' gradients are bound to the stream of a graph that does.
    output = function(static, *constants)
    _gradients(output, wanted, torch.zeros_like(output))


def _gradients(output: Tensor, wanted: Sequence[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(output, wanted, grad, allow_unused=True)
