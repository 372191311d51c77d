"""The command line's flags as typed, frozen values; ``argument_parser.py`` fills them.

A group of flags is a dataclass: the field's name is the flag (``num_layers`` is ``--num-layers``),
its default the flag's default, its annotation the flag's type; the first line of the class's
docstring is the group's title in ``--help``. A command's arguments inherit the groups it takes.
Names and defaults are Megatron's where Megatron has the flag. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from ep_overlap.plan.lower import Strategy

DEFAULT_LINK: Final = "paced:800mbit"
"""Of ``bench``."""
PLAIN_LINK: Final = "plain"
"""Not to be asked for: the ranks' own link, neither paced nor shaped."""


class ModelName(StrEnum):
    """``--model``."""

    MEGATRON = "megatron"
    REFERENCE = "reference"


class DeviceChoice(StrEnum):
    """``--device``."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class TransformerImpl(StrEnum):
    """``--transformer-impl``."""

    LOCAL = "local"
    TRANSFORMER_ENGINE = "transformer_engine"


class RecomputeGranularity(StrEnum):
    """``--recompute-granularity``."""

    SELECTIVE = "selective"
    FULL = "full"


class RecomputeModule(StrEnum):
    """``--recompute-modules``: those of Megatron's that lie within one node of the models here."""

    CORE_ATTN = "core_attn"
    LAYERNORM = "layernorm"
    MLP = "mlp"
    SHARED_EXPERTS = "shared_experts"


class Suite(StrEnum):
    """``--suite``."""

    MULTI_GPU = "multi-gpu"


class OptimizerName(StrEnum):
    """``--optimizer``."""

    ADAMW = "adamw"
    SGD = "sgd"


class Peer(StrEnum):
    """``--against``."""

    FSDP2 = "fsdp2"
    MEGATRON = "megatron"


@dataclass(frozen=True, kw_only=True)
class FlagText:
    """What ``--help`` says of a flag, and how it is spelled where the field's name does not say."""

    help: str
    metavar: str
    short: str
    is_positional: bool = False


def _flag[T](default: T, meaning: str, *, metavar: str = "N", short: str = "") -> T:
    """A field that is a flag. ``meaning`` is one line; the default is added to it unless None."""
    text = FlagText(help=meaning, metavar=metavar, short=short)
    return field(default=default, metadata={FlagText: text})


def _positional(meaning: str, *, metavar: str) -> Any:
    """A required argument without a name."""
    text = FlagText(help=meaning, metavar=metavar, short="", is_positional=True)
    return field(metadata={FlagText: text})


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """model"""

    num_layers: int = _flag(4, "transformer layers")
    hidden_size: int = _flag(128, "width of the residual stream")
    num_attention_heads: int = _flag(4, "attention heads")
    moe_layer_freq: int = _flag(1, "every so-manyth layer, from the first, has experts")
    num_experts: int = _flag(4, "experts of each MoE layer, over all ranks")
    moe_ffn_hidden_size: int = _flag(256, "hidden width of an expert, and of a dense layer's MLP")
    moe_router_topk: int = _flag(2, "experts that each token is sent to")
    moe_shared_expert_intermediate_size: int | None = _flag(
        None, "hidden width of an expert that every token visits; megatron alone (default: none)"
    )


@dataclass(frozen=True, kw_only=True)
class BatchFlags:
    """batch"""

    seq_length: int = _flag(128, "tokens of a sequence")
    micro_batch_size: int = _flag(2, "sequences of a microbatch, per rank")
    num_microbatches: int = _flag(4, "microbatches of a step, per rank")
    seed: int = _flag(1234, "seed of the weights and of the choice of data")


@dataclass(frozen=True, kw_only=True)
class RankFlags:
    """ranks"""

    model: ModelName = _flag(
        ModelName.MEGATRON, "megatron-core's GPTModel, or a small MoE of plain torch"
    )
    transformer_impl: TransformerImpl = _flag(
        TransformerImpl.LOCAL, "layers of --model megatron; transformer_engine needs a GPU"
    )
    bf16: bool = _flag(False, "compute in bfloat16; main weights and gradients stay float32")
    grad_reduce_in_bf16: bool = _flag(False, "with --bf16: reduce gradients in bfloat16, too")
    device: DeviceChoice = _flag(DeviceChoice.AUTO, "auto takes the GPUs when there are any")
    nproc: int = _flag(2, "ranks to start; under torchrun its world size holds instead")
    expert_model_parallel_size: int | None = _flag(
        None, "ranks that share the experts (default: all ranks)"
    )

    def num_ranks(self, environ: Mapping[str, str]) -> int:
        """Ranks of the run: torchrun's ``WORLD_SIZE`` where it is set, else ``--nproc``."""
        return int(environ.get("WORLD_SIZE", self.nproc))

    def expert_parallel_size(self, environ: Mapping[str, str]) -> int:
        """``--expert-model-parallel-size``, by default every rank."""
        size = self.expert_model_parallel_size
        return self.num_ranks(environ) if size is None else size


@dataclass(frozen=True, kw_only=True)
class ShardingFlags:
    """sharding"""

    data_parallel_sharding_strategy: Strategy = _flag(
        Strategy.NO_SHARD, "what the data-parallel ranks share out"
    )
    max_unsharded_units: int | None = _flag(
        None, "units that may be gathered at a time (default: what the order needs)"
    )


@dataclass(frozen=True, kw_only=True)
class OverlapFlags:
    """overlap"""

    overlap_moe_expert_parallel_comm: bool = _flag(
        False, "run each exchange under another microbatch's compute"
    )
    order: str | None = _flag(
        None,
        "plain, paired, serial, or a file of action words (default: paired from two microbatches "
        "on)",
        metavar="plain|paired|serial|FILE",
    )


@dataclass(frozen=True, kw_only=True)
class WgradFlags:
    """weight gradients"""

    delay_wgrad_compute: bool = _flag(
        False, "make weight gradients later than input gradients, where an exchange leaves room"
    )
    gradient_accumulation_fusion: bool = _flag(
        False, "write weight gradients straight into the input of the reduction"
    )
    overlap_dispatch_backward_with_experts_wgrad: bool = _flag(
        False, "run each dispatch's backward under its experts' weight gradients"
    )


@dataclass(frozen=True, kw_only=True)
class RecomputeFlags:
    """activation recompute"""

    recompute_granularity: RecomputeGranularity | None = _flag(
        None, "full: each layer by itself; selective: parts of layers, of --model megatron"
    )
    recompute_modules: tuple[RecomputeModule, ...] | None = _flag(
        None,
        f"parts that selective recomputes: {', '.join(RecomputeModule)} (default: core_attn)",
        metavar="MODULE",
    )

    @property
    def recomputes_layers(self) -> bool:
        """Whether the schedule does, as nodes of its own (R)."""
        return self.recompute_granularity is RecomputeGranularity.FULL

    @property
    def modules_recomputed(self) -> tuple[RecomputeModule, ...]:
        """What the model recomputes by itself, within a node."""
        if self.recompute_granularity is not RecomputeGranularity.SELECTIVE:
            return ()
        return self.recompute_modules or (RecomputeModule.CORE_ATTN,)


@dataclass(frozen=True, kw_only=True)
class ResultFlags:
    """result"""

    json: Path | None = _flag(None, "write the result to FILE as JSON", metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class TraceFlags:
    """trace"""

    trace: Path | None = _flag(
        None, "write what ran when to FILE, for `ep-overlap timeline` or Perfetto", metavar="FILE"
    )


@dataclass(frozen=True, kw_only=True)
class TrainArguments(
    ModelFlags,
    BatchFlags,
    RankFlags,
    ShardingFlags,
    OverlapFlags,
    WgradFlags,
    RecomputeFlags,
    TraceFlags,
    ResultFlags,
):
    """training"""

    data: Path | None = _flag(
        None,
        "text, a token a byte (default: sources of Python's standard library)",
        metavar="FILE",
    )
    train_iters: int = _flag(20, "optimizer steps")
    lr: float = _flag(1e-3, "learning rate")
    optimizer: OptimizerName = _flag(OptimizerName.ADAMW, "optimizer of torch.optim")
    save: Path | None = _flag(None, "write a checkpoint to DIR after the last step", metavar="DIR")
    load: Path | None = _flag(
        None, "go on from the checkpoint in DIR, up to --train-iters steps in all", metavar="DIR"
    )
    check_parity: bool = _flag(
        False,
        "compare bit for bit with a twin's steps, without overlap, delay or full recompute",
    )

    @property
    def hides_exchanges(self) -> bool:
        """Whether some run under compute."""
        return (
            self.overlap_moe_expert_parallel_comm
            or self.overlap_dispatch_backward_with_experts_wgrad
        )

    @property
    def is_scheduled(self) -> bool:
        """Whether a plan runs, not the module's own forward and backward."""
        return self.hides_exchanges or self.recomputes_layers


@dataclass(frozen=True, kw_only=True)
class PlanArguments(ShardingFlags, OverlapFlags, WgradFlags, RecomputeFlags, ResultFlags):
    """plan"""

    num_layers: int = _flag(4, "transformer layers")
    moe_layer_freq: int = _flag(1, "every so-manyth layer, from the first, has experts")
    moe_shared_expert_intermediate_size: int | None = _flag(
        None, "hidden width of an expert that every token visits (default: none)"
    )
    num_microbatches: int = _flag(4, "microbatches of a step, per rank")
    check: bool = _flag(False, "check the plan and say what was proved, instead of printing it")


@dataclass(frozen=True, kw_only=True)
class TimelineArguments(ResultFlags):
    """picture"""

    trace_file: Path = _positional("a trace that `--trace` wrote", metavar="TRACE")
    output: Path = _flag(
        Path("timeline.png"), "the picture, .png, .svg or .html", metavar="FILE", short="-o"
    )
    step: int | None = _flag(None, "the step to draw (default: the last whole one)")
    start_ms: float = _flag(0.0, "start of the window, from the start of the step")
    end_ms: float | None = _flag(None, "end of the window (default: the end of the step)")


@dataclass(frozen=True, kw_only=True)
class BenchArguments(
    ModelFlags,
    BatchFlags,
    RankFlags,
    ShardingFlags,
    WgradFlags,
    RecomputeFlags,
    TraceFlags,
    ResultFlags,
):
    """measuring"""

    link: str | None = _flag(
        None,
        "paced:RATE waits in the communicator; shaped:RATE shapes a network namespace (root); "
        f"default: {DEFAULT_LINK}, and with --sharding the link as it is",
        metavar="KIND:RATE",
    )
    rounds: int = _flag(7, "rounds, each one step of every variant")
    moe_router_force_load_balancing: bool = _flag(
        True, "spread tokens evenly over the experts; --no-...: as the router learns, skew and all"
    )
    lr: float = _flag(1e-3, "learning rate: the variants train on the bytes of a text")
    optimizer: OptimizerName = _flag(OptimizerName.ADAMW, "optimizer of torch.optim")
    host_overhead: bool = _flag(
        False, "measure what the schedule itself costs the host instead; needs no ranks"
    )
    sharding: bool = _flag(
        False, "measure sharding alone instead: a dense model, module hooks, optim_grads_params"
    )
    against: Peer | None = _flag(
        None,
        "compare with fsdp2, torch's fully_shard (with --sharding: default), or with megatron, "
        "megatron-core's own schedules, on emulated links",
    )
    emulate: str = _flag(
        "a2a=50GBps,dp=100GBps,latency=20us",
        "links to emulate, or none",
        metavar="LINKS",
    )
    emulate_world: int = _flag(4, "ranks of the world of --against megatron; one of them runs")
    plot: Path | None = _flag(
        None, "draw the steps of --against megatron, or --suite, .png or .svg", metavar="FILE"
    )
    num_query_groups: int | None = _flag(
        None, "groups of keys and values; --against megatron (default: one for each head)"
    )
    kv_channels: int | None = _flag(
        None, "width of a head; --against megatron (default: the residual's over the heads)"
    )
    vocab_size: int = _flag(256, "of --against megatron, whose text is bytes")
    moe_router_force_biased: float | None = _flag(
        None,
        "skew the routing of --against megatron: the spread of random favours of the experts; "
        "-0.75 gives an eighth of them half of the tokens (megatron-core's setting)",
        metavar="STD",
    )
    cuda_graphs: bool = _flag(
        False,
        "--against megatron: run our orders once more, attention replayed from CUDA graphs; with "
        "--transformer-impl transformer_engine",
    )
    wgrad_fusion: bool = _flag(
        False, "measure fused against separate weight gradients instead: a dense model, one rank"
    )
    suite: Suite | None = _flag(
        None, "run parity, proof of overlap and steps against megatron-core on all GPUs instead"
    )
    num_blocks: int = _flag(6, "blocks of --sharding and --wgrad-fusion, each a unit")
    delay_wgrad_compute: bool = _flag(
        False, "time `delayed` too: the paired order with weight gradients made later"
    )
    gradient_accumulation_fusion: bool = _flag(
        False, "in all variants, write weight gradients straight into the input of the reduction"
    )
    overlap_dispatch_backward_with_experts_wgrad: bool = _flag(
        False,
        "time `serial` too: a dispatch's backward under its experts' weight gradients, no more",
    )
    # Sizes for which communication at the default rate is about 60% of compute on one core a rank.
    num_layers: int = _flag(2, "transformer layers")
    hidden_size: int = _flag(256, "width of the residual stream")
    num_attention_heads: int = _flag(8, "attention heads")
    moe_ffn_hidden_size: int = _flag(704, "hidden width of an expert, and of a dense layer's MLP")
    seq_length: int = _flag(128, "tokens of a sequence")
    micro_batch_size: int = _flag(8, "sequences of a microbatch, per rank")
    num_microbatches: int = _flag(8, "microbatches of a step, per rank")

    @property
    def emulates_nothing(self) -> bool:
        """Whether ``--against megatron`` runs on real ranks."""
        return self.emulate == "none"

    @property
    def link_in_use(self) -> str:
        """``--link``, by default the one that the measurement is meant for."""
        if self.link is not None:
            return self.link
        return PLAIN_LINK if self.sharding else DEFAULT_LINK


@dataclass(frozen=True, kw_only=True)
class DoctorArguments(ResultFlags):
    """doctor"""


Arguments = TrainArguments | PlanArguments | TimelineArguments | BenchArguments | DoctorArguments


def spelled(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")
