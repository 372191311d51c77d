"""What is wrong with ``bench``'s arguments, measurement by measurement. Imports no torch.

``argument_checks.py`` asks; what other commands have too is checked there.
"""

import math
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Final

from ep_overlap.commands.arguments import (
    BenchArguments,
    ModelName,
    Peer,
    TransformerImpl,
    spelled,
)
from ep_overlap.config import GRAPHED_TILE
from ep_overlap.links.emulated_speed import parse_emulated_links
from ep_overlap.links.speed import parse_rate
from ep_overlap.plan.lower import Strategy

NUM_BYTES: Final = 256
LINK_KINDS: Final = ("paced", "shaped")
PLOT_FORMATS: Final = (".png", ".svg")
_EXPERT_SETTINGS: Final = (
    "model",
    "num_layers",
    "num_microbatches",
    "num_experts",
    "moe_router_topk",
    "moe_layer_freq",
    "moe_shared_expert_intermediate_size",
    "transformer_impl",
    "bf16",
    "grad_reduce_in_bf16",
    "delay_wgrad_compute",
    "gradient_accumulation_fusion",
    "overlap_dispatch_backward_with_experts_wgrad",
    "recompute_granularity",
    "recompute_modules",
    "moe_router_force_load_balancing",
    "expert_model_parallel_size",
)
"""What the dense model of ``bench --sharding`` has no use for."""
_FUSION_SETTINGS: Final = (
    "num_blocks",
    "hidden_size",
    "num_attention_heads",
    "moe_ffn_hidden_size",
    "seq_length",
    "micro_batch_size",
    "num_microbatches",
    "seed",
    "transformer_impl",
    "bf16",
    "grad_reduce_in_bf16",
    "device",
    "rounds",
    "lr",
    "optimizer",
)
"""What ``bench --wgrad-fusion`` reads."""
_MEGATRON_SETTINGS: Final = (
    "plot",
    "emulate",
    "emulate_world",
    "num_query_groups",
    "kv_channels",
    "vocab_size",
    "moe_router_force_biased",
    "cuda_graphs",
)
"""What of ``bench`` only ``--against megatron`` reads."""
_MEGATRON_READS: Final = (
    *_MEGATRON_SETTINGS,
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "moe_layer_freq",
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "seq_length",
    "micro_batch_size",
    "num_microbatches",
    "seed",
    "transformer_impl",
    "device",
    "rounds",
    "moe_router_force_load_balancing",
    "data_parallel_sharding_strategy",
    "max_unsharded_units",
)
"""What it reads, all in all."""


def measurement_problems(args: BenchArguments, environ: Mapping[str, str]) -> Iterator[str]:
    """Why the measurement that is asked for cannot work."""
    yield from _bad_plot(args)
    if args.link is not None:
        yield from _bad_link(args.link)
    if sum((args.sharding, args.wgrad_fusion, args.host_overhead, bool(args.suite))) > 1:
        yield "--sharding, --wgrad-fusion, --host-overhead and --suite are measurements; choose one"
    if args.sharding:
        yield from _bad_sharding(args, environ)
    elif args.suite is not None:
        yield from _bad_suite(args, environ)
    elif args.against is Peer.MEGATRON and not args.wgrad_fusion:
        yield from _bad_emulation(args, environ)


def measurement_remarks(args: BenchArguments) -> Iterator[str]:
    """Settings that change nothing in the measurement that is asked for."""
    if args.host_overhead:
        yield from _unused_by_host_overhead(args)
    elif args.wgrad_fusion:
        yield from _unused_by_fusion(args)
    elif args.suite is not None:
        for name in _given_beside(args, "suite", "json", "plot", "nproc", "device", "rounds"):
            yield f"{spelled(name)} has no effect with --suite, which runs the same everywhere"
    elif args.sharding:
        yield from _unused_by_sharding(args)
        yield from _unused_without_megatron(args)
    elif args.against is Peer.MEGATRON:
        unread = ("emulate_world",) if args.emulates_nothing else ("nproc",)
        reads = {*_MEGATRON_READS, "emulate_world", "nproc"}.difference(unread)
        for name in _given_beside(args, "against", "json", *reads):
            yield f"{spelled(name)} has no effect with --against megatron"
    else:
        yield from _unused_without_sharding(args)
        yield from _unused_without_megatron(args)


def _unused_by_host_overhead(args: BenchArguments) -> Iterator[str]:
    for name in _given_beside(args, "host_overhead", "json"):
        yield f"{spelled(name)} has no effect with --host-overhead: its sizes are fixed"


def _unused_by_fusion(args: BenchArguments) -> Iterator[str]:
    for name in _given_beside(args, "wgrad_fusion", "json", *_FUSION_SETTINGS):
        yield (
            f"{spelled(name)} has no effect with --wgrad-fusion: it trains a dense model, sharded "
            "with optim_grads_params, on one rank"
        )


def _given_beside(args: BenchArguments, *used: str) -> Iterator[str]:
    given, default = vars(args), vars(BenchArguments())
    return (name for name in given if name not in used and given[name] != default[name])


def _unused_by_sharding(args: BenchArguments) -> Iterator[str]:
    given, default = vars(args), vars(BenchArguments())
    for name in _EXPERT_SETTINGS:
        if given[name] != default[name]:
            yield f"{spelled(name)} has no effect with --sharding: its model is dense"
    if args.data_parallel_sharding_strategy not in (Strategy.NO_SHARD, Strategy.OPTIM_GRADS_PARAMS):
        yield (
            "--data-parallel-sharding-strategy has no effect with --sharding: it measures "
            f"{Strategy.OPTIM_GRADS_PARAMS}"
        )


def _unused_without_sharding(args: BenchArguments) -> Iterator[str]:
    given, default = vars(args), vars(BenchArguments())
    for name, flags in (
        ("against", "--sharding"),
        ("num_blocks", "--sharding or --wgrad-fusion"),
    ):
        if given[name] != default[name]:
            yield f"{spelled(name)} has no effect without {flags}"


def _unused_without_megatron(args: BenchArguments) -> Iterator[str]:
    given, default = vars(args), vars(BenchArguments())
    for name in _MEGATRON_SETTINGS:
        if given[name] != default[name]:
            yield f"{spelled(name)} has no effect without --against megatron"


def _bad_link(text: str) -> Iterator[str]:
    kind, colon, rate = text.partition(":")
    if kind not in LINK_KINDS or not colon:
        yield f"--link {text!r}: expected paced:RATE or shaped:RATE, such as paced:800mbit"
        return
    try:
        parse_rate(rate)
    except ValueError as error:
        yield f"--link {text!r}: {error}"


def _bad_suite(args: BenchArguments, environ: Mapping[str, str]) -> Iterator[str]:
    num_ranks = args.num_ranks(environ)
    if num_ranks not in (2, 4, 8):
        yield f"--nproc {num_ranks} with --suite: expected 2, 4 or 8"
    if find_spec("megatron") is None:
        yield "--suite: megatron-core is not installed; pip install 'ep-overlap[megatron]'"


def _bad_plot(args: BenchArguments) -> Iterator[str]:
    if args.plot is not None and args.plot.suffix not in PLOT_FORMATS:
        yield f"--plot {args.plot}: expected a name that ends in {' or '.join(PLOT_FORMATS)}"


def _bad_emulation(args: BenchArguments, environ: Mapping[str, str]) -> Iterator[str]:
    if args.model is not ModelName.MEGATRON:
        yield f"--against megatron with --model {args.model}: it has no schedule of that model's"
    flag, size = "--emulate-world", args.emulate_world
    if args.emulates_nothing:
        flag, size = "--nproc", args.num_ranks(environ)
    if args.num_experts % size:
        yield (
            f"--num-experts {args.num_experts} is not divisible by {flag} {size}, the "
            "expert-parallel size"
        )
    heads, groups = args.num_attention_heads, args.num_query_groups or args.num_attention_heads
    if heads % groups:
        yield f"--num-query-groups {groups} does not divide --num-attention-heads {heads}"
    if args.vocab_size < NUM_BYTES:
        yield f"--vocab-size {args.vocab_size}: expected {NUM_BYTES} or more: the text is bytes"
    if (spread := args.moe_router_force_biased) is not None and not math.isfinite(spread):
        yield f"--moe-router-force-biased {spread}: expected a number, such as -0.75"
    if args.cuda_graphs and args.transformer_impl is not TransformerImpl.TRANSFORMER_ENGINE:
        yield "--cuda-graphs with local layers: expected --transformer-impl transformer_engine"
    if args.cuda_graphs and args.data_parallel_sharding_strategy is Strategy.OPTIM_GRADS_PARAMS:
        yield (
            "--cuda-graphs with optim_grads_params, whose weights are elsewhere after each gather; "
            "expected another --data-parallel-sharding-strategy"
        )
    if args.cuda_graphs and args.seq_length % GRAPHED_TILE:
        yield (
            f"--cuda-graphs with --seq-length {args.seq_length}: expected a multiple of "
            f"{GRAPHED_TILE}"
        )
    if size == 1:
        yield f"{flag} 1 with --against megatron: its overlap needs expert parallelism, 2 or more"
    if args.emulates_nothing:
        return
    try:
        parse_emulated_links(args.emulate)
    except ValueError as error:
        yield str(error)


def _bad_sharding(args: BenchArguments, environ: Mapping[str, str]) -> Iterator[str]:
    if args.against is Peer.MEGATRON:
        yield "--sharding --against megatron: expected --against fsdp2, or no --sharding"
    if args.num_ranks(environ) < 2:
        yield "--sharding with --nproc 1: expected 2 or more, since one rank has nothing to share"
    if args.link is not None and args.link.startswith("paced:"):
        yield (
            f"--link {args.link} with --sharding: it would pace our communicators and not FSDP2's; "
            "use shaped:RATE, which slows both, or leave it out"
        )
    for name, is_set in (
        ("trace", args.trace is not None),
        ("max_unsharded_units", args.max_unsharded_units is not None),
    ):
        if is_set:
            yield f"{spelled(name)} with --sharding: it has none; leave it out"
