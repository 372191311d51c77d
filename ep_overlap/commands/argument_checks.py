"""What is wrong with a command's arguments, found before anything starts. Imports no torch.

``problems`` refuses, ``remarks`` warns of settings without effect; both yield one-line texts.
"""

import math
import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final, cast

from ep_overlap.commands.arguments import (
    Arguments,
    BenchArguments,
    DeviceChoice,
    ModelFlags,
    ModelName,
    Peer,
    PlanArguments,
    RankFlags,
    RecomputeFlags,
    RecomputeGranularity,
    RecomputeModule,
    TimelineArguments,
    TrainArguments,
    TransformerImpl,
    spelled,
)
from ep_overlap.commands.bench_checks import measurement_problems, measurement_remarks
from ep_overlap.commands.checkpoint_record import (
    load_problems,
    load_remarks,
    parent_problem,
    save_problems,
    unwritable,
)
from ep_overlap.commands.plan_arguments import plan_of
from ep_overlap.plan.check import PlanError
from ep_overlap.plan.lower import Strategy
from ep_overlap.plan.order import OrderName
from fsdp_hooks.placement import placements_of

_LARGEST: Final = {"num_layers": 10_000, "num_microbatches": 10_000}
"""A plan names each layer of each microbatch."""
_COUNTS: Final = (
    "num_layers",
    "num_blocks",
    "hidden_size",
    "num_attention_heads",
    "moe_layer_freq",
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_shared_expert_intermediate_size",
    "seq_length",
    "micro_batch_size",
    "num_microbatches",
    "nproc",
    "expert_model_parallel_size",
    "max_unsharded_units",
    "train_iters",
    "rounds",
    "emulate_world",
    "num_query_groups",
    "kv_channels",
    "vocab_size",
)
"""The fields that must be 1 or more where a command has them and they are given."""

_FILES: Final = ("data", "order", "load", "trace_file", "save", "trace", "output", "plot", "json")
"""The fields that name a file or a directory, those that are read first."""
_OUTPUTS: Final = ("json", "trace", "output", "plot")
"""The fields that name a file to write."""


def problems(args: Arguments, environ: Mapping[str, str]) -> Iterator[str]:
    """Why the arguments cannot work; the first is what a user should be told."""
    yield from _bad_counts(args)
    yield from _bad_modules(args)
    yield from _bad_outputs(args)
    yield from _same_files(args)
    match args:
        case TrainArguments():
            yield from _bad_model(args)
            yield from _bad_parts(args)
            yield from _bad_ranks(args, args.num_experts, environ)
            yield from _bad_setup(args)
            yield from _bad_layers(args)
            yield from _bad_training(args, environ)
            yield from _no_order(args)
            if args.overlap_moe_expert_parallel_comm:
                yield from _bad_plan(args)
        case BenchArguments():
            yield from measurement_problems(args, environ)
            if args.sharding:
                yield from _bad_heads(args)
            elif args.suite is not None:
                pass  # its sizes are fixed
            elif args.wgrad_fusion:
                yield from _bad_heads(args)
                yield from _bad_layers(args)
            elif args.against is Peer.MEGATRON:
                yield from _bad_model(args)
                yield from _odd_heads(args)
                yield from _bad_layers(args)
            else:
                yield from _bad_model(args)
                yield from _bad_parts(args)
                yield from _bad_ranks(args, args.num_experts, environ)
                yield from _bad_setup(args)
                yield from _bad_layers(args)
                yield from _bad_budget(args)
        case PlanArguments():
            yield from _no_order(args)
            yield from _bad_budget(args)
        case TimelineArguments():
            yield from _bad_window(args)
        case _:
            pass


def remarks(args: Arguments, environ: Mapping[str, str]) -> Iterator[str]:
    """Settings that change nothing."""
    match args:
        case TrainArguments():
            yield from _unused_order(args)
            yield from _unused_budget(args)
            yield from _unused_wgrad(args)
            yield from _unused_modules(args)
            if args.hides_exchanges:
                yield from _nothing_to_hide(args, environ)
            if args.load is not None:
                yield from load_remarks(args.load, args)
        case PlanArguments():
            yield from _unused_order(args)
            yield from _unused_budget(args)
            yield from _unused_wgrad(args)
            yield from _unused_by_plan(args)
        case BenchArguments() if args.host_overhead or args.wgrad_fusion or args.suite is not None:
            yield from measurement_remarks(args)
        case BenchArguments() if args.against is Peer.MEGATRON and not args.sharding:
            yield from measurement_remarks(args)
        case BenchArguments() if args.sharding:
            yield from _unused_budget(args)
            yield from measurement_remarks(args)
        case BenchArguments():
            yield from _unused_budget(args)
            yield from _unused_modules(args)
            yield from _nothing_to_hide(args, environ)
            yield from measurement_remarks(args)
        case _:
            pass


def _nothing_to_hide(args: RankFlags, environ: Mapping[str, str]) -> Iterator[str]:
    if args.expert_parallel_size(environ) == 1:
        yield (
            "there is nothing to hide with --expert-model-parallel-size 1: "
            "a rank that has all experts exchanges nothing"
        )


def _no_order(args: TrainArguments | PlanArguments) -> Iterator[str]:
    if args.order is not None and not args.order.strip():
        yield f"--order: expected {', '.join(OrderName)}, or a file of action words, got nothing"


def _unused_order(args: TrainArguments | PlanArguments) -> Iterator[str]:
    if args.order is not None and not args.overlap_moe_expert_parallel_comm:
        yield "--order has no effect without --overlap-moe-expert-parallel-comm"


def _unused_wgrad(args: TrainArguments | PlanArguments) -> Iterator[str]:
    is_delayed, overlaps = args.delay_wgrad_compute, args.overlap_moe_expert_parallel_comm
    if isinstance(args, TrainArguments) and is_delayed and not args.hides_exchanges:
        yield (
            "--delay-wgrad-compute hides nothing without --overlap-moe-expert-parallel-comm: "
            "weight gradients are made right after each backward"
        )
    if args.overlap_dispatch_backward_with_experts_wgrad and is_delayed and overlaps:
        yield (
            "--overlap-dispatch-backward-with-experts-wgrad has no effect beside "
            "--overlap-moe-expert-parallel-comm --delay-wgrad-compute: they do that already"
        )


def _unused_modules(args: TrainArguments | BenchArguments) -> Iterator[str]:
    """Parts that no layer has, and that megatron-core takes without a word."""
    flag, modules = "--recompute-modules", args.modules_recomputed
    has_dense = args.num_layers > 1 and args.moe_layer_freq > 1
    if RecomputeModule.MLP in modules and not has_dense:
        yield f"{flag} mlp has no effect: every layer has experts (--moe-layer-freq)"
    has_shared = args.moe_shared_expert_intermediate_size is not None
    if RecomputeModule.SHARED_EXPERTS in modules and not has_shared:
        yield f"{flag} shared_experts has no effect without --moe-shared-expert-intermediate-size"


def _unused_by_plan(args: PlanArguments) -> Iterator[str]:
    if args.recompute_granularity is RecomputeGranularity.SELECTIVE:
        yield (
            "--recompute-granularity selective does not change a plan: what it names lies within "
            "a node"
        )
    if args.gradient_accumulation_fusion:
        yield "--gradient-accumulation-fusion does not change a plan"
    has_shared = args.moe_shared_expert_intermediate_size is not None
    if has_shared and not args.delay_wgrad_compute:
        yield (
            "--moe-shared-expert-intermediate-size does not change a plan without "
            "--delay-wgrad-compute: shared experts run within attn"
        )


def _unused_budget(args: TrainArguments | PlanArguments | BenchArguments) -> Iterator[str]:
    if args.max_unsharded_units is None:
        return
    if args.data_parallel_sharding_strategy is not Strategy.OPTIM_GRADS_PARAMS:
        yield (
            "--max-unsharded-units has no effect with --data-parallel-sharding-strategy "
            f"{args.data_parallel_sharding_strategy}: only optim_grads_params gathers units"
        )
    elif isinstance(args, TrainArguments) and not args.is_scheduled:
        yield (
            "--max-unsharded-units has no effect without --overlap-moe-expert-parallel-comm: "
            "module hooks gather one unit ahead"
        )


def _bad_counts(args: Arguments) -> Iterator[str]:
    values = cast("dict[str, object]", vars(args))
    for name in _COUNTS:
        value = values.get(name)
        if isinstance(value, int) and value < 1:
            yield f"{spelled(name)}: expected 1 or more, got {value}"
        elif isinstance(value, int) and value > _LARGEST.get(name, value):
            yield f"{spelled(name)}: expected at most {_LARGEST[name]}, got {value}"


def _same_files(args: Arguments) -> Iterator[str]:
    """A file that is written is none that is read, nor written by another flag."""
    seen: dict[Path, str] = {}
    given = vars(args)
    for name in _FILES:
        value = given.get(name)
        if not isinstance(value, str | Path):
            continue
        path = Path(os.path.normpath(value))
        if name in _OUTPUTS and path in seen:
            other = seen[path]
            yield f"{spelled(name)} {value}: the file of {other}, too; expected one of its own"
        seen[path] = "the trace" if name == "trace_file" else spelled(name)


def _bad_outputs(args: Arguments) -> Iterator[str]:
    values = cast("dict[str, object]", vars(args))
    for name in _OUTPUTS:
        path = values.get(name)
        if not isinstance(path, Path):
            continue
        if problem := parent_problem(path) or unwritable(path.parent):
            yield f"{spelled(name)} {path}: {problem}"
        elif path.is_dir():
            yield f"{spelled(name)} {path}: expected a file, got a directory"


def _bad_heads(args: ModelFlags) -> Iterator[str]:
    if args.hidden_size % args.num_attention_heads:
        yield (
            f"--hidden-size {args.hidden_size} is not divisible by "
            f"--num-attention-heads {args.num_attention_heads}; take a multiple"
        )


def _bad_model(args: ModelFlags) -> Iterator[str]:
    yield from _bad_heads(args)
    if args.moe_router_topk > args.num_experts:
        yield (
            f"--moe-router-topk {args.moe_router_topk}: expected at most "
            f"--num-experts {args.num_experts}"
        )


def _bad_parts(args: TrainArguments | BenchArguments) -> Iterator[str]:
    """What the model that was chosen has not."""
    if args.model is ModelName.MEGATRON:
        yield from _odd_heads(args)
        return
    if args.moe_shared_expert_intermediate_size is not None:
        yield (
            "--moe-shared-expert-intermediate-size with --model reference: it has no shared "
            "experts; take --model megatron, or leave it out"
        )
    if args.recompute_granularity is RecomputeGranularity.SELECTIVE:
        yield (
            "--recompute-granularity selective with --model reference: it recomputes no parts of "
            "a layer; take full, or --model megatron"
        )


def _odd_heads(args: TrainArguments | BenchArguments) -> Iterator[str]:
    width = args.hidden_size // args.num_attention_heads
    flags = (
        f"--hidden-size {args.hidden_size} with --num-attention-heads {args.num_attention_heads}"
    )
    if isinstance(args, BenchArguments) and args.kv_channels is not None:
        width, flags = args.kv_channels, f"--kv-channels {args.kv_channels}"
    if width % 2:
        yield (
            f"{flags}: heads of {width}, expected an even number, as rotary embedding turns pairs; "
            "choose others"
        )


def _bad_modules(args: Arguments) -> Iterator[str]:
    if not isinstance(args, RecomputeFlags) or args.recompute_modules is None:
        return
    granularity = args.recompute_granularity
    if granularity is not RecomputeGranularity.SELECTIVE:
        got = "none" if granularity is None else granularity
        yield (
            f"--recompute-modules {' '.join(args.recompute_modules)}: expected "
            f"--recompute-granularity selective beside it, got {got}; add it, or leave them out"
        )


def _bad_ranks(args: RankFlags, num_experts: int, environ: Mapping[str, str]) -> Iterator[str]:
    num_ranks, ep_size = args.num_ranks(environ), args.expert_parallel_size(environ)
    if num_ranks % ep_size:
        yield (
            f"--expert-model-parallel-size {ep_size} does not divide the number of ranks, "
            f"{num_ranks} (--nproc)"
        )
    if num_experts % ep_size:
        yield (
            f"--num-experts {num_experts} is not divisible by "
            f"--expert-model-parallel-size {ep_size} (default: all ranks)"
        )


def _bad_setup(args: TrainArguments | BenchArguments) -> Iterator[str]:
    """What the run's model and sharding need and is not there."""
    try:
        placements_of(str(args.data_parallel_sharding_strategy))
    except ValueError as error:
        yield f"--data-parallel-sharding-strategy: {error}"
    if args.model is ModelName.MEGATRON and find_spec("megatron") is None:
        yield (
            "--model megatron: megatron-core is not installed; "
            "pip install 'ep-overlap[megatron]', or take --model reference"
        )


def _bad_layers(args: TrainArguments | BenchArguments) -> Iterator[str]:
    if args.grad_reduce_in_bf16 and not args.bf16:
        yield "--grad-reduce-in-bf16 without --bf16: gradients are float32; add --bf16"
    if args.transformer_impl is not TransformerImpl.TRANSFORMER_ENGINE:
        return
    flag = "--transformer-impl transformer_engine"
    if args.model is not ModelName.MEGATRON:
        yield f"{flag} with --model {args.model}: expected --model megatron; or leave it out"
    if args.device is DeviceChoice.CPU:
        yield f"{flag} with --device cpu: its layers need a GPU; take --transformer-impl local"
    if find_spec("transformer_engine") is None:
        yield f"{flag}: Transformer Engine is not installed; pip install 'ep-overlap[te]'"


def _bad_training(args: TrainArguments, environ: Mapping[str, str]) -> Iterator[str]:
    if not (math.isfinite(args.lr) and args.lr >= 0):
        yield f"--lr: expected a finite number, 0 or more, got {args.lr}"
    if args.data is not None:
        yield from _bad_data(args.data, args.seq_length + 1)
    if args.save is not None:
        yield from save_problems(args.save)
    if args.load is not None:
        yield from load_problems(args.load, args, environ)


def _bad_plan(args: TrainArguments) -> Iterator[str]:
    try:
        plan_of(args)
    except PlanError as error:
        yield f"{_first_line(error)}; `ep-overlap plan` shows the place"
    except ValueError as error:
        yield _first_line(error)


def _bad_budget(args: PlanArguments | BenchArguments) -> Iterator[str]:
    """``plan`` says itself what else is wrong with its plan, and shows where."""
    if args.max_unsharded_units is None:
        return
    has_order = isinstance(args, PlanArguments)
    plan_args = args if has_order else _widest_plan(args)
    try:
        plan_of(plan_args)
    except PlanError:
        return
    except ValueError as error:
        yield _first_line(error) if has_order else _first_line(error).partition(", or ")[0]


def _widest_plan(args: BenchArguments) -> PlanArguments:
    """Of the orders that ``bench`` compares, the one that reads the most units side by side."""
    return PlanArguments(
        num_layers=args.num_layers,
        moe_layer_freq=args.moe_layer_freq,
        num_microbatches=args.num_microbatches,
        data_parallel_sharding_strategy=args.data_parallel_sharding_strategy,
        max_unsharded_units=args.max_unsharded_units,
        overlap_moe_expert_parallel_comm=True,
        recompute_granularity=args.recompute_granularity,
    )


def _first_line(error: ValueError) -> str:
    return str(error).partition("\n")[0]


def _bad_data(path: Path, min_bytes: int) -> Iterator[str]:
    if path.exists() and not path.is_file():
        kind = "a directory" if path.is_dir() else "a device or a pipe"
        yield f"--data {path}: expected a text file, got {kind}"
    elif not path.is_file():
        yield f"--data {path}: no such file"
    elif path.stat().st_size < min_bytes:
        yield (
            f"--data {path}: expected at least {min_bytes} bytes (--seq-length and one more), "
            f"got {path.stat().st_size}"
        )


def _bad_window(args: TimelineArguments) -> Iterator[str]:
    if args.start_ms < 0:
        yield f"--start-ms: expected 0 or more, got {args.start_ms:g}"
    if args.end_ms is not None and args.end_ms <= args.start_ms:
        yield f"--end-ms {args.end_ms:g}: expected more than --start-ms {args.start_ms:g}"
