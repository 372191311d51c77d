"""A step by megatron-core's own function and by the drop-in, on any device: what differs.

With ``device="cpu"`` and local layers all of it runs on CPU ranks, too. megatron-core is imported
within functions: a test's own process has no use for it.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import megatron_features as features
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ep_overlap.links.emulated import register_emulated_backend
from ep_overlap.links.emulated_speed import EmulatedLinks
from ep_overlap.links.emulation import Emulation
from ep_overlap.models.megatron_globals import replace as replace_global
from fsdp_hooks.collectives import new_torch_group
from fsdp_hooks.wgrad import ManagedLayer

LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 16,
}
"""Multi-latent attention of widths that kernels take."""
SEED = 3
"""Of weights."""
FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One of ``megatron_features.FEATURES``, by name, trained without an optimizer: the gradients
    of two steps add up."""

    feature: str
    dtype: torch.dtype = torch.bfloat16
    transformer_engine: bool = False
    """Whose layers, else megatron-core's local ones; needs a GPU."""
    microbatches: int = 2
    delay: bool = False
    """Ours."""
    recompute: bool = False
    """Each layer whole, on both sides: by megatron-core itself, and as a phase of ours."""
    combined: bool = False
    """Against megatron-core's overlapped schedule, in place of its plain one."""
    evaluates: bool = False
    """Between the steps."""

    def __str__(self) -> str:
        flags = [name for name, value in vars(self).items() if value is True]
        return ", ".join([f"{self.feature}: {self.dtype}", *flags])


# ---- where it runs -------------------------------------------------------------------------------


@contextmanager
def deterministic() -> Generator[None]:
    """Sums in one order, as of a scatter-add. What has no such kernel warns: whether that matters
    is what the comparison is for."""
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


@contextmanager
def megatron_on(device: str) -> Generator[None]:
    """What megatron-core's two schedules and ours need process-wide, until the block ends."""
    from megatron.core.tensor_parallel import random

    from ep_overlap.models.megatron_cpu import megatron_schedule_on_cpu
    from ep_overlap.models.megatron_globals import megatron_schedule_globals

    with ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(megatron_schedule_on_cpu())
        else:
            stack.enter_context(megatron_schedule_globals())
            # Of selective recompute; its own is an extension that takes a compiler and half a
            # minute.
            replace_global(stack, random, "_get_share_storage", lambda: _copy_storage)
        yield


def _copy_storage(to: Tensor, source: Tensor) -> None:
    """All views of ``to``, whose storage was emptied, see what ``source`` holds."""
    storage = source.untyped_storage()
    to.untyped_storage().resize_(storage.nbytes())
    to.untyped_storage().copy_(storage)


def enter_emulated_world(size: int, links: EmulatedLinks) -> None:
    """Make this process rank 0 of an emulated world, in place of the one it is in. For a rank of a
    pool, which ends whichever there is."""
    if dist.is_initialized():
        dist.destroy_process_group()
    register_emulated_backend()
    dist.init_process_group(
        "emulated", rank=0, world_size=size, store=dist.HashStore(), pg_options=Emulation(links)
    )


# ---- models --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where models are, and the process groups that they share: each has threads of its own."""

    device: str
    groups: features.Groups
    alone: ProcessGroup

    @staticmethod
    def new(device: str) -> "Place":
        """Collective."""
        alone = new_torch_group([dist.get_rank()], "one_rank")
        return Place(device=device, groups=features.Groups.new(), alone=alone)


def model_of(case: Case, place: Place) -> Any:
    from ep_overlap.models.megatron_build import build_gpt
    from ep_overlap.models.megatron_hybrid_build import build_hybrid

    sizes = replace(
        features.sizes_of(case.feature, case.dtype),
        hidden_size=64,
        num_heads=4,
        ffn_hidden_size=64,
        transformer_impl="transformer_engine" if case.transformer_engine else "local",
    )
    if sizes.settings.get("multi_latent_attention", False):
        sizes = replace(sizes, settings={**sizes.settings, **LATENT})
    pattern = features.FEATURES[case.feature].get("pattern")
    if pattern is not None and case.transformer_engine:
        return hybrid_of_te(sizes, pattern, place)
    experts, everyone = place.groups.experts, place.groups.everyone
    options: dict[str, Any] = {"seed": SEED, "device": place.device, "everyone": everyone}
    if pattern is not None:
        return build_hybrid(sizes, pattern, experts, **options)
    return build_gpt(sizes, experts, alone=place.alone, **options)


def hybrid_of_te(sizes: Any, pattern: str, place: Place) -> Any:
    """By megatron-core's own spec, of Transformer Engine's layers; as ``build_hybrid``."""
    from megatron.core.models.hybrid.hybrid_layer_allocation import (
        get_hybrid_total_layer_count,
        parse_hybrid_pattern,
    )
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from ep_overlap.models.megatron_build import initialise, process_groups, transformer_config

    groups = place.groups
    sizes = replace(
        sizes,
        num_layers=get_hybrid_total_layer_count(pattern),
        mtp_num_layers=parse_hybrid_pattern(pattern).mtp_num_depths or None,
    )
    model = HybridModel(
        transformer_config(sizes, groups.experts.size),
        hybrid_stack_spec,
        hybrid_layer_pattern=pattern,
        share_embeddings_and_output_weights=sizes.tied_embeddings,
        vocab_size=sizes.vocab_size,
        max_sequence_length=sizes.seq_length,
        position_embedding_type=sizes.positions,
        pg_collection=process_groups(groups.experts, groups.everyone, alone=place.alone),
    )
    initialise(model, SEED)
    return model.to(device=place.device, dtype=sizes.dtype)


# ---- steps ---------------------------------------------------------------------------------------


def differences(cases: Sequence[Case], device: str) -> dict[str, list[str]]:
    """By case, what differs on this rank; where megatron-core's own differs from itself, that, too.
    Expert parallelism of two. Collective."""
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    from ep_overlap.models.megatron import ForwardBackward

    found: dict[str, list[str]] = {}
    with deterministic(), megatron_on(device):
        place = Place.new(device)
        for case in cases:
            theirs = left_by(forward_backward_no_pipelining, case, place, is_ours=False)
            ours = ForwardBackward(recompute_granularity="full" if case.recompute else None)
            wrong = unequal(left_by(ours, case, place, is_ours=True), theirs)
            if wrong:
                again = left_by(forward_backward_no_pipelining, case, place, is_ours=False)
                wrong += [f"megatron-core's own: {name}" for name in unequal(again, theirs)]
            found[str(case)] = wrong
    return {case: wrong for case, wrong in found.items() if wrong}


def left_by(
    function: Callable[..., Any],
    case: Case,
    place: Place,
    *,
    is_ours: bool,
) -> list[Any]:
    """What each of two steps leaves, and an evaluation."""
    from megatron_script import script

    model = model_of(case, place)
    model.config.overlap_moe_expert_parallel_comm = is_ours or case.combined
    model.config.delay_wgrad_compute = is_ours and case.delay
    if case.recompute and not is_ours:
        for name, value in FULL_RECOMPUTE.items():
            setattr(model.config, name, value)
    called = list[None]()
    model.register_forward_pre_hook(lambda *_: called.append(None))
    options = {"num_microbatches": case.microbatches, "pg_collection": model.pg_collection}
    left = [script(function, model, seed=0, **options)]
    if case.evaluates:
        with torch.no_grad():
            left.append(script(function, model, seed=7, forward_only=True, **options))
    left.append(script(function, model, seed=1, **options))
    *_, last = left
    missing = [name for name, grad in last.grads.items() if grad is None]
    assert not missing, f"no gradient of {missing}"
    assert all(len(logged) == case.microbatches for step in left for logged in step.logged)
    # A step that fell back to the plain schedule, or delayed nothing, would be equal, too.
    is_overlapped = is_ours or case.combined
    num_calls = 2 * (not is_overlapped) + case.evaluates
    assert len(called) == num_calls * case.microbatches, "an overlapped step calls no model"
    if is_ours and case.delay:
        assert any(isinstance(module, ManagedLayer) for module in model.modules())
    return left


def unequal(ours: Sequence[Any], theirs: Sequence[Any]) -> list[str]:
    import megatron_script

    return [
        f"{index}: {name}"
        for index, pair in enumerate(zip(ours, theirs, strict=True))
        for name in megatron_script.unequal(*pair)
    ]


# ---- in megatron-core's own wrappers -------------------------------------------------------------

LINKS = EmulatedLinks(a2a_bytes_per_s=50e9, dp_bytes_per_s=50e9, latency_s=20e-6)


def differences_in_ddp(device: str) -> list[str]:
    """A script with DDP and its distributed optimizer, with every overlap, by the function that it
    gets from megatron-core, and by what is installed in its place: losses, an evaluation between
    steps, gradients, weights. On one rank of an emulated world of four."""
    import megatron_ddp_support as ddp

    case = ddp.Case(
        dtype=torch.bfloat16,
        float16_module=True,
        shared=True,
        tied=True,
        ddp={
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
        device=device,
        transformer_engine=device != "cpu",
    )
    enter_emulated_world(4, LINKS)
    with deterministic(), ddp.one_world(device) as groups:
        theirs, model = ddp.trained(case, groups), ddp.trained(case, groups)
        for each in (theirs, model):
            # Weights as gathers leave them in an emulated world, this rank's part again and again:
            # one of the two gathers before the first step, too.
            each.ddp.start_param_sync(force_sync=True)
        expected = ddp.train_by_script(case, theirs)
        got = ddp.train_installed(case, model)
    return ddp.unequal(got, expected)


def differences_in_fsdp(device: str) -> dict[str, list[str]]:
    """Losses and gradients of the drop-in over FSDP v1, with every parameter sharded. On one rank
    of an emulated world of four, where two ranks hold the same experts."""
    import megatron_fsdp_support as fsdp

    from ep_overlap.models.megatron_emulated import megatron_fsdp_of_one_rank

    cases = [
        fsdp.Case(
            dtype=torch.bfloat16,
            shared=True,
            delay=delay,
            overlap=True,
            steps=1,
            optimizes=False,
            device=device,
            transformer_engine=device != "cpu",
        )
        for delay in (False, True)
    ]
    enter_emulated_world(4, LINKS)
    with deterministic(), megatron_fsdp_of_one_rank():
        return fsdp.dropin_differences(cases)
