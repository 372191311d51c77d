"""``ep-overlap train``: starts its ranks, trains, and says how it went."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from ep_overlap.commands.arguments import TrainArguments
from ep_overlap.commands.checkpoint_record import Start
from ep_overlap.commands.checkpointing import load, save
from ep_overlap.commands.history import History, Iteration, progress_bar, report
from ep_overlap.commands.parity import Baseline, Difference, Parity
from ep_overlap.commands.plan_arguments import order_of, read_order
from ep_overlap.commands.results import write_json, write_trace
from ep_overlap.commands.running import (
    batches_of,
    model_environment,
    own_command,
    recipe_of,
    running,
)
from ep_overlap.commands.trainee import ScheduledStep, StandardStep, Stepper, Trainee, build_trainee
from ep_overlap.commands.world import Meshes, World, choose_device, open_world
from ep_overlap.config import OverlapConfig
from ep_overlap.processes.launch import launch
from ep_overlap.run.trace import ChromeTrace, StepTrace
from fsdp_hooks.grad_norm import global_grad_norm


def run(args: TrainArguments) -> int:
    """Be a rank, under torchrun or started by ourselves; else start the ranks. Returns the status.

    Raises:
        ValueError: what can be found wrong only here: no GPU, a port in use, data too short.
    """
    if "RANK" not in os.environ:
        choose_device(args.device)
        return launch(own_command(), nproc=args.nproc)
    with open_world(args.device, speed=None) as world, model_environment(args.model, world):
        difference = _train(args, world)
    return 1 if difference is not None and difference.parity is Parity.FAILED else 0


def overlap_config(args: TrainArguments) -> OverlapConfig:
    """The schedule that the flags ask for."""
    order = order_of(args)
    return OverlapConfig(
        num_microbatches=args.num_microbatches,
        order=None if isinstance(order, Path) else order,
        order_text=read_order(order) if isinstance(order, Path) else None,
        delay_wgrad=args.delay_wgrad_compute,
        dispatch_over_wgrad=args.overlap_dispatch_backward_with_experts_wgrad,
        recompute_granularity="full" if args.recomputes_layers else None,
        max_unsharded_units=args.max_unsharded_units,
        trace=args.trace is not None,
    )


def _train(args: TrainArguments, world: World) -> Difference | None:
    """Returns what ``--check-parity`` has found."""
    data = batches_of(args, world, path=args.data)
    recipe = recipe_of(args)
    meshes = Meshes.of(world, recipe.expert_parallel_size)
    trainee = build_trainee(recipe, world, meshes)
    start = Start.of(args, world.size)
    if args.load is not None:
        load(args.load, trainee, world, lr=args.lr)
    stepper: Stepper
    if args.is_scheduled:
        stepper = ScheduledStep(trainee, overlap_config(args), world)
    else:
        stepper = StandardStep(
            trainee, args.num_microbatches, world, delay_wgrad=args.delay_wgrad_compute
        )
    baseline = None
    if args.check_parity:
        twin = build_trainee(recipe, world, meshes)
        if args.load is not None:
            load(args.load, twin, world, lr=args.lr)
        baseline = Baseline(
            trainee,
            twin,
            StandardStep(twin, args.num_microbatches, world),
            world,
            steps_before=start.iteration,
        )
    step_tokens = args.seq_length * args.micro_batch_size * args.num_microbatches * world.size
    history = History(step_tokens=step_tokens)
    chrome = None if args.trace is None else ChromeTrace(rank=world.rank, origin_ns=0)
    bar = progress_bar(args.train_iters, done=start.iteration, quiet=world.rank != 0)
    with running(), bar as progress:
        for iteration in range(start.iteration, args.train_iters):
            pairs = data.microbatches(start.batch_of(iteration), args.num_microbatches)
            pairs = [(a.to(world.device), b.to(world.device)) for a, b in pairs]
            done, trace = _iterate(trainee, stepper, baseline, pairs, world)
            history.add(done)
            if chrome is not None and trace is not None:
                chrome.add(trace, step=iteration + 1)  # as the progress bar counts
            progress.advance(history.line())
        if args.save is not None:
            save(args.save, trainee, start.after(args), world)
    difference = None if baseline is None else baseline.difference
    result = history.result(trainee.lifecycle.stats, difference) | {
        "first_iteration": start.iteration
    }
    if world.rank == 0:
        report(result)
    write_trace(args.trace, chrome, world)
    if world.rank == 0:
        write_json(args.json, result)
    return difference


def _iterate(
    trainee: Trainee,
    stepper: Stepper,
    baseline: "Baseline | None",
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    world: World,
) -> tuple[Iteration, StepTrace | None]:
    trainee.optimizer.zero_grad()
    start_s = world.now_s()
    result = stepper.step([trainee.make_batch(tokens, targets) for tokens, targets in pairs])
    step_time_s = world.now_s() - start_s
    if baseline is not None:
        baseline.step(pairs, result.losses)
    norm = global_grad_norm(trainee.module.parameters(), group=world.control)
    trainee.optimizer.step()
    if baseline is not None:
        baseline.after_update()
    (loss,) = world.mean([float(torch.stack(result.losses).mean())])
    done = Iteration(loss=loss, grad_norm=norm, step_time_s=step_time_s, share=result.hidden_share)
    return done, result.trace
