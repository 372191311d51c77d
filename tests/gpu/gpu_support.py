"""What the tests on a GPU share."""

import torch
import torch.distributed as dist

# First of all: it loads the system's cuDNN, which fails once torch has loaded parts of its own.
import transformer_engine.pytorch  # noqa: F401


def take_gpu() -> str:
    """This rank's device, made the current one; ranks share GPUs where there are too few."""
    index = dist.get_rank() % torch.cuda.device_count() if dist.is_initialized() else 0
    torch.cuda.set_device(index)
    return f"cuda:{index}"
