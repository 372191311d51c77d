"""Trains a small GPTModel with experts by ``pretrain``, the entry of megatron.training.

::

    torchrun --nproc-per-node 2 docs/examples/pretrain_gpt.py --train-iters 10
    torchrun --nproc-per-node 2 docs/examples/pretrain_gpt.py --train-iters 10 \
        --overlap-moe-expert-parallel-comm

Both print the same losses. Every flag of Megatron may follow; ``DEFAULTS`` make a run of seconds.
``# (1)`` and ``# (2)`` are what overlap takes beside Megatron's flag; ``# (cpu)`` is what CPU ranks
take; the rest is a ``pretrain_gpt.py`` as Megatron's users have it, on the bytes of a text.
"""

import contextlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # (cpu): its compiler asks for a GPU

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from torch import Tensor

from ep_overlap.models import megatron  # (1)
from ep_overlap.models.megatron_cpu_pretrain import megatron_pretrain_on_cpu  # (cpu)

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"

DEFAULTS = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --swiglu
    --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01
    --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --bf16 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2
    --global-batch-size 16 --train-iters 10 --eval-iters 1 --eval-interval 5 --log-interval 1
    --lr 1e-3 --lr-decay-style constant --attention-dropout 0 --hidden-dropout 0
    --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights
    --tokenizer-type NullTokenizer --vocab-size 255 --dataloader-type external
    --no-gradient-accumulation-fusion --no-bias-dropout-fusion
"""
CPU_DEFAULTS = """
    --transformer-impl local --distributed-backend gloo --use-cpu-initialization
    --no-persist-layer-norm --no-bias-swiglu-fusion --no-masked-softmax-fusion --no-rope-fusion
"""

Batches = Iterator[tuple[Tensor, Tensor]]


def model_provider(
    pre_process: bool = True, post_process: bool = True, config: Any = None, **_: Any
) -> GPTModel:
    """Megatron calls it, and wraps what it returns."""
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    return GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=ON_GPU),
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process,
        post_process,
        position_embedding_type=args.position_embedding_type,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
    )


def batches(seed: int) -> Batches:
    """Tokens and labels, ``[B, S]``: bytes of Python's own standard library."""
    args = get_args()
    text = Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    draw = torch.Generator().manual_seed(seed)
    num_starts = len(data) - args.seq_length
    while True:
        starts = torch.randint(num_starts, (args.micro_batch_size,), generator=draw)
        rows = torch.stack([data[start : start + args.seq_length + 1] for start in starts])
        yield rows[:, :-1].to(DEVICE), rows[:, 1:].to(DEVICE)


def train_valid_test_datasets_provider(_: Any) -> tuple[Batches, Batches, Batches]:
    """An endless one each: ``--dataloader-type external``."""
    rank = dist.get_rank()
    return batches(rank), batches(1000 + rank), batches(2000 + rank)


# Megatron asks: whether every rank is to call it.
setattr(train_valid_test_datasets_provider, "is_distributed", True)  # noqa: B010


def loss_func(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The sum of a microbatch's losses, over how many tokens, and both to be logged."""
    loss = output.float().sum()
    num_tokens = torch.tensor(output.numel(), dtype=torch.int, device=DEVICE)
    reported = torch.stack([loss.detach().clone(), num_tokens.float()])
    return loss, num_tokens, {"lm loss": reported}


def forward_step(data: Batches, model: GPTModel) -> tuple[Tensor, Any]:
    """It knows of no schedule."""
    tokens, labels = next(data)
    length = tokens.shape[1]
    positions = torch.arange(length, device=DEVICE).expand(len(tokens), -1)
    hidden = torch.ones(length, length, dtype=torch.bool, device=DEVICE).triu(1)[None, None]
    return model(tokens, positions, hidden, labels=labels), loss_func


def main() -> None:
    """What follows on the command line is Megatron's."""
    given = sys.argv[1:]
    sys.argv[1:] = [*DEFAULTS.split(), *(() if ON_GPU else CPU_DEFAULTS.split()), *given]
    args = parse_and_validate_args()
    settings = pretrain_cfg_container_from_args(args)
    megatron.install()  # (2)
    with contextlib.ExitStack() as on_cpu:
        if not ON_GPU:  # (cpu)
            dist.init_process_group("gloo")
            parallel_state.initialize_model_parallel(
                expert_model_parallel_size=args.expert_model_parallel_size
            )
            on_cpu.enter_context(megatron_pretrain_on_cpu())
        pretrain(
            settings,
            train_valid_test_datasets_provider,
            ModelType.encoder_or_decoder,
            forward_step,
            model_provider=model_provider,
        )


if __name__ == "__main__":
    main()
