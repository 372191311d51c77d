"""Trains a small GPTModel with experts by megatron-core alone; ``--overlap`` adds ours.

::

    torchrun --nproc-per-node 2 docs/examples/train_gpt.py
    torchrun --nproc-per-node 2 docs/examples/train_gpt.py --overlap

Both print the same losses and norms. What overlap takes is marked by ``# (1)`` to ``# (3)``. The
rest is a Megatron script: its process groups, its ``DistributedDataParallel`` and distributed
optimizer, a forward step that knows of no schedule. ``# (cpu)`` marks what CPU ranks take:
stand-ins for the GPU that megatron-core takes for granted.
"""

import argparse
import contextlib
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ep_overlap.models import megatron  # (1)
from ep_overlap.models.megatron_cpu import megatron_training_on_cpu  # (cpu)

SEQ_LENGTH, BATCH_SIZE, NUM_MICROBATCHES, NUM_STEPS = 64, 4, 4, 10
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if ON_GPU else torch.device("cpu")


def config(overlap: bool) -> TransformerConfig:
    """Sizes for a run of seconds."""
    return TransformerConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=128,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
        moe_aux_loss_coeff=1e-2,
        add_bias_linear=False,
        expert_model_parallel_size=2,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        normalization="RMSNorm",
        use_cpu_initialization=not ON_GPU,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
        overlap_moe_expert_parallel_comm=overlap,  # (3)
    )


def build(overlap: bool) -> DistributedDataParallel:
    """Weights in bf16, gradients summed and reduced in fp32."""
    c = config(overlap)
    spec = get_gpt_decoder_block_spec(c, use_transformer_engine=ON_GPU)
    model = GPTModel(c, spec, 256, SEQ_LENGTH, position_embedding_type="rope").bfloat16().to(DEVICE)
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, grad_reduce_in_fp32=True
    )
    return DistributedDataParallel(c, settings, model)


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Bytes of Python's own standard library."""
    text = Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    draw = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - SEQ_LENGTH - 1, (BATCH_SIZE,), generator=draw)
        rows = torch.stack([data[start : start + SEQ_LENGTH + 1] for start in starts]).to(DEVICE)
        yield rows[:, :-1], rows[:, 1:]


def loss_func(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean loss of a microbatch, and what to log."""
    loss = output.float().mean()
    return loss, {"lm loss": loss.detach().clone()}  # megatron-core scales the first in place


def forward_step(
    data: Iterator[tuple[Tensor, Tensor]], model: GPTModel
) -> tuple[Tensor, Callable[..., Any]]:
    """It knows of no schedule."""
    tokens, labels = next(data)
    positions = torch.arange(SEQ_LENGTH, device=DEVICE).expand(BATCH_SIZE, -1)
    hidden = torch.ones(SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool, device=DEVICE).triu(1)
    output = model(tokens, positions, hidden[None, None], labels=labels)
    return output, loss_func


def train(overlap: bool) -> None:
    """Ten steps; the first rank prints."""
    model = build(overlap)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=3e-3, bf16=True, use_distributed_optimizer=True, clip_grad=1.0
        ),
        [model],
    )
    forward_backward = get_forward_backward_func()
    data = batches(seed=dist.get_rank())
    for step in range(NUM_STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        logged = forward_backward(
            forward_step_func=forward_step,
            data_iterator=data,
            model=[model],
            num_microbatches=NUM_MICROBATCHES,
            seq_length=SEQ_LENGTH,
            micro_batch_size=BATCH_SIZE,
        )
        _, grad_norm, _ = optimizer.step()
        loss = torch.stack([each["lm loss"] for each in logged]).mean()
        dist.all_reduce(loss, op=dist.ReduceOp.AVG if ON_GPU else dist.ReduceOp.SUM)
        if dist.get_rank() == 0:
            mean = float(loss) / (1 if ON_GPU else dist.get_world_size())
            print(f"step {step}: loss {mean:.6f}, gradient norm {float(grad_norm):.6f}", flush=True)


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description="a small GPTModel with experts")
    parser.add_argument("--overlap", action="store_true", help="hide the exchanges of experts")
    args = parser.parse_args()
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    torch.manual_seed(1)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    with contextlib.nullcontext() if ON_GPU else megatron_training_on_cpu():
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        if args.overlap:
            megatron.install()  # (2)
        train(args.overlap)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
