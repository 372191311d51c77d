"""What the commands that run on ranks share: their environment, and how failures are told."""

import gc
import logging
import os
import sys
import warnings
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ep_overlap.commands.arguments import BatchFlags, BenchArguments, ModelName, TrainArguments
from ep_overlap.commands.data import ByteBatches, load_bytes
from ep_overlap.commands.trainee import Recipe
from ep_overlap.commands.world import World


class RunFailedError(RuntimeError):
    """A run that began could not go on."""


def own_command() -> list[str]:
    """The command line of this process, for its ranks."""
    return [sys.executable, "-m", "ep_overlap.cli", *sys.argv[1:]]


@contextmanager
def model_environment(model: ModelName, world: World) -> Generator[None]:
    """What the model needs around it: megatron-core on CPU wants stand-ins.

    Raises:
        ValueError: megatron-core is not installed.
    """
    with ExitStack() as stack:
        if model is ModelName.MEGATRON:
            try:
                with quiet_import():
                    from ep_overlap.models import megatron_build
                    from ep_overlap.models.megatron_cpu import megatron_on_cpu
                    from ep_overlap.models.megatron_globals import megatron_globals
            except ImportError as error:
                raise ValueError(f"--model megatron: {error}") from error
            assert megatron_build  # imported here, where its notes are kept back
            on_cpu = world.device.type == "cpu"
            stack.enter_context(megatron_on_cpu() if on_cpu else megatron_globals())
        yield


@contextmanager
def quiet_import() -> Generator[None]:
    """Keep back what megatron-core and torch say of absent optional packages when imported."""
    logger = logging.getLogger("torch.utils.cpp_extension")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def running() -> Generator[None]:
    """Errors from here on are a failed run (exit status 1), not a refused command line (2).

    What was imported and built until now is kept from Python's garbage collector, which else walks
    all of it again and again (torch and megatron-core are many objects: 4% of a step's CPU time).
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    except ValueError as error:
        raise RunFailedError(f"{type(error).__name__}: {error}") from error


def recipe_of(args: TrainArguments | BenchArguments) -> Recipe:
    """How to build the model that the flags ask for."""
    return Recipe(
        model=args.model,
        sizes=args,
        seq_length=args.seq_length,
        seed=args.seed,
        expert_parallel_size=args.expert_parallel_size(os.environ),
        strategy=str(args.data_parallel_sharding_strategy),
        optimizer=args.optimizer,
        lr=args.lr,
        transformer_impl=args.transformer_impl,
        bf16=args.bf16,
        grad_reduce_in_bf16=args.grad_reduce_in_bf16,
        fuse_wgrad=args.gradient_accumulation_fusion,
        recompute_modules=args.modules_recomputed,
        force_load_balancing=isinstance(args, BenchArguments)
        and args.moe_router_force_load_balancing,
    )


def batches_of(args: BatchFlags, world: World, *, path: Path | None = None) -> ByteBatches:
    """This rank's part of a text; ``path``: default sources of Python's standard library."""
    return ByteBatches(
        tokens=load_bytes(path),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        seed=args.seed,
        rank=world.rank,
        num_ranks=world.size,
    )
