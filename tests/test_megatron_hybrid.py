"""megatron-core's HybridModel: which patterns are taken, and two units as one under every core.

What it computes, bit for bit: ``test_megatron_features.py``, ``test_megatron_differential.py``.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import megatron_ddp_support as ddp
import megatron_features as features
import megatron_fsdp_support as fsdp
import pytest
import schedule_support as support
import torch
import torch.distributed as dist
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron_features import Groups
from megatron_script import forward_step, script, sizes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ep_overlap.config import OverlapConfig
from ep_overlap.models.groups import lone_expert_groups
from ep_overlap.models.megatron import (
    HybridParts,
    get_forward_backward_func,
    mean_loss,
)
from ep_overlap.models.megatron_cpu import megatron_on_cpu
from ep_overlap.models.megatron_hybrid_build import build_hybrid
from ep_overlap.plan.action import LayerKind
from ep_overlap.run.joined import GatherOrder, JoinedUnit
from ep_overlap.run.layer import modules_of
from ep_overlap.schedule import OverlapSchedule
from ep_overlap.testing import RankPool, record
from fsdp_hooks import fully_shard
from fsdp_hooks.lifecycle import NOTHING_DONE, UnitState
from fsdp_hooks.streams import Completion, Event

pytestmark = [  # what megatron-core's FSDP v1 raises when it is built and when it steps
    pytest.mark.filterwarnings("ignore:MimoModelConfig is experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

BF16 = torch.bfloat16
UNIT_OPS = ("UNSHARD", "RESHARD", "REDUCE")


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """megatron-core on the CPU, with this process as the whole world."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with megatron_on_cpu():
        yield
    dist.destroy_process_group()


def hybrid(pattern: str = "*E*-", **changed: Any) -> Any:
    return build_hybrid(sizes(**changed), pattern, lone_expert_groups())


# ---- which layers there are ----------------------------------------------------------------------

TO_DO = (
    r" Expected '\*' and '\+' \(attention\), 'E' \(experts\) and '-' \(an MLP\) alone; change the "
    r"pattern, or turn overlap_moe_expert_parallel_comm off$"
)


@pytest.mark.usefixtures("on_cpu")
def test_neighbours_are_a_layer_that_owns_the_parameters_of_both() -> None:
    parts = HybridParts(hybrid("*E*-*E", shared_expert_ffn_hidden_size=12))
    assert [layer.kind for layer in parts.layers] == [
        LayerKind.MOE_SHARED,
        LayerKind.DENSE,
        LayerKind.MOE_SHARED,
    ]
    held = [list(layer.module.parameters()) for layer in parts.layers]
    decoder: Any = parts.module.decoder
    expected = [
        [p for layer in decoder.layers[i : i + 2] for p in layer.parameters()] for i in (0, 2, 4)
    ]
    assert [list(map(id, each)) for each in held] == [list(map(id, each)) for each in expected]
    assert list(parts.module.modules()).count(parts.layers[0].module) == 0


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*EE", [("*E", LayerKind.MOE), ("E", LayerKind.MOE)]),
        ("E*E", [("E", LayerKind.MOE), ("*E", LayerKind.MOE)]),
        (
            "-*E**-E*",
            [
                ("-", LayerKind.DENSE),
                ("*E", LayerKind.MOE),
                ("*", LayerKind.DENSE),
                ("*-", LayerKind.DENSE),
                ("E", LayerKind.MOE),
                ("*", LayerKind.DENSE),
            ],
        ),
    ],
)
def test_what_stands_alone_is_a_layer(pattern: str, expected: list[tuple[str, LayerKind]]) -> None:
    parts = HybridParts(hybrid(pattern))
    decoder: Any = parts.module.decoder
    symbols = dict(zip(decoder.layers, pattern, strict=True))
    found = [
        ("".join(symbols[module] for module in modules_of(layer.module)), layer.kind)
        for layer in parts.layers
    ]
    assert found == expected
    assert [m for layer in parts.layers for m in modules_of(layer.module)] == list(decoder.layers)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("symbols", "problem"),
    [
        ("M*E*", r"layer 0 is 'M' \(Mamba\)"),
        ("*EM*", r"layer 2 is 'M' \(Mamba\)"),
        ("GE*E", r"layer 0 is 'G' \(gated delta net\)"),
        ("DEDE", r"layer 0 is 'D' \(sparse attention\)"),
        ("", "nothing is a layer"),
    ],
)
def test_layers_of_other_kinds_are_refused_by_name(symbols: str, problem: str) -> None:
    model = hybrid()
    model.decoder.layer_type_list = list(symbols)  # of some, the kernels are on GPUs alone
    message = rf"^this HybridModel cannot be cut into parts: of its pattern .*, {problem}\."
    with pytest.raises(ValueError, match=message + TO_DO):
        HybridParts(model)


@pytest.mark.usefixtures("on_cpu")
def test_the_drop_in_refuses_it_before_anything_runs() -> None:
    model = hybrid("*E-*E")
    model.config.overlap_moe_expert_parallel_comm = True
    model.decoder.layer_type_list[2] = "M"
    with pytest.raises(ValueError, match=r"layer 2 is 'M' \(Mamba\)\." + TO_DO):
        script(
            get_forward_backward_func(),
            model,
            forward_step_func=never,
            pg_collection=model.pg_collection,
        )


def never(*args: Any) -> Any:
    raise AssertionError("it is refused before")


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("index", "name", "module", "problem"),
    [
        (0, "mlp", nn.Linear(2, 2), r"layer 0 \('\*'\) has a Linear as its mlp"),
        (2, "pre_mlp_layernorm", nn.RMSNorm(2), r"layer 2 \('\*'\) has a RMSNorm as its pre_mlp_"),
        (1, "self_attention", nn.Linear(2, 2), r"layer 1 \('E'\) has a Linear as its self_att"),
        (3, "input_layernorm", nn.RMSNorm(2), r"layer 3 \('-'\) has a RMSNorm as its input_lay"),
        (1, "mlp", nn.Linear(2, 2), r"layer 1 \('E'\) has a Linear as its mlp"),
        (0, "mlp_bda", get_bias_dropout_add, r"layer 0 \('\*'\) has a function as its mlp_bda"),
        (3, "self_attn_bda", get_bias_dropout_add, r"layer 3 \('-'\) has a function as its self"),
    ],
)
def test_a_layer_that_does_more_than_its_symbol_says_is_refused(
    index: int, name: str, module: object, problem: str
) -> None:
    model = hybrid("*E*-")
    layer = model.decoder.layers[index]
    del layer._modules[name]  # a function is no module
    setattr(layer, name, module)
    with pytest.raises(ValueError, match=problem):
        HybridParts(model)


@pytest.mark.usefixtures("on_cpu")
def test_its_settings_are_refused_as_those_of_a_gpt_model() -> None:
    model = hybrid()
    model.config.fp8 = "hybrid"
    model.decoder.post_layer_norm = False
    message = (
        r"^this HybridModel cannot be cut into parts; change in its settings: "
        r"fp8='hybrid' \(supported: None\), post_layer_norm=False \(supported: True\)$"
    )
    with pytest.raises(ValueError, match=message):
        HybridParts(model)


@pytest.mark.usefixtures("on_cpu")
def test_what_cannot_be_built_of_local_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^the pattern 'M\*E' has M, expected \* and \+ \(att"):
        hybrid("M*E")
    with pytest.raises(ValueError, match=r"^the pattern '\+E' has \+ \(multi-latent attention\), "):
        hybrid("+E")
    with pytest.raises(ValueError, match=r"^the pattern '/\*E' has no layers of the decoder, exp"):
        hybrid("/*E")
    with pytest.raises(ValueError, match=r"^transformer_impl is 'transformer_engine', expected"):
        hybrid(transformer_impl="transformer_engine")


@pytest.mark.usefixtures("on_cpu")
def test_arguments_are_told_by_the_models_own_forward() -> None:
    """The fifth is the labels here, and the sixth is not what it is of a GPTModel."""
    model = hybrid()
    model.config.overlap_moe_expert_parallel_comm = True

    def by_position(data: Any, called: Any) -> Any:
        def call(tokens: Any, positions: Any, mask: Any, *, labels: Any, loss_mask: Any) -> Any:
            return called(
                tokens, positions, mask, None, labels, None, loss_mask, loss_mask=loss_mask
            )

        return forward_step(data, call)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match=r"^the model is called with runtime_gather_output, whi"):
        script(
            get_forward_backward_func(),
            model,
            forward_step_func=by_position,
            pg_collection=model.pg_collection,
        )


# ---- several units as one ------------------------------------------------------------------------


class Unit:
    """Of a core; returns the events that it is told to, in turn."""

    gathers = releases = True
    state = UnitState.SHARDED

    def __init__(self, log: list[str], name: str, *events: Event) -> None:
        self.name = name
        self._log = log
        self._events = list(events)

    def _issue(self, what: str, after: Sequence[Event], word: str | None) -> Event:
        self._log.append(f"{what} {self.name} {word} after {len(after)}")
        return self._events.pop(0)

    def unshard(self, *, after: Sequence[Event] = (), word: str | None = None) -> Event:
        return self._issue("unshard", after, word)

    def reshard(self, *, after: Sequence[Event] = (), word: str | None = None) -> Event:
        return self._issue("reshard", after, word)

    def reduce(self, *, after: Sequence[Event] = (), word: str | None = None) -> Event:
        return self._issue("reduce", after, word)

    def drop_reduced(self) -> None:
        self._log.append(f"drop {self.name}")

    def ensure(self) -> None:
        self._log.append(f"ensure {self.name}")

    def seal(self, microbatch: int, *, is_last: bool) -> None:
        self._log.append(f"seal {self.name} {microbatch} {is_last}")


def test_each_unit_is_asked_in_order() -> None:
    log: list[str] = []
    done = [Completion(str(i)) for i in range(6)]
    a, b = Unit(log, "a", *done[::2]), Unit(log, "b", *done[1::2])
    unit = JoinedUnit("L0", [a, b], GatherOrder(2))
    assert unit.unshard(after=[done[0]], word="UNSHARD.L0") is done[1]
    unit.ensure()
    unit.seal(3, is_last=True)
    assert unit.reshard(after=[], word="RESHARD.L0") is done[3]
    assert unit.reduce(after=[done[0], done[1]], word="REDUCE.L0") is done[5]
    unit.drop_reduced()
    assert log == [
        "unshard a UNSHARD.L0 after 1",
        "unshard b UNSHARD.L0 after 1",
        "ensure a",
        "ensure b",
        "seal a 3 True",
        "seal b 3 True",
        "reshard a RESHARD.L0 after 0",
        "reshard b RESHARD.L0 after 0",
        "reduce a REDUCE.L0 after 2",
        "reduce b REDUCE.L0 after 2",
        "drop a",
        "drop b",
    ]


def test_its_event_is_that_of_the_work_issued_last() -> None:
    """As DDP's buckets have it, which span units: g0 to g2 in the order of issue."""
    log: list[str] = []
    g0, g1, g2 = (Completion(name) for name in ("g0", "g1", "g2"))
    order = GatherOrder(5)
    root = JoinedUnit("root", [Unit(log, "root", g0)], order)
    first = JoinedUnit("L0", [Unit(log, "a", g1, g1), Unit(log, "b", g0, g0)], order)
    second = JoinedUnit("L1", [Unit(log, "c", g1), Unit(log, "d", g2)], order)
    third = JoinedUnit("L2", [Unit(log, "e", g2), Unit(log, "f", g1)], order)
    units = (root, first, second, third, first)
    assert [unit.unshard() for unit in units] == [g0, g1, g2, g2, g1]


def test_what_was_not_issued_is_waited_for_by_nobody() -> None:
    log: list[str] = []
    event = Completion("reduced")
    one = JoinedUnit("L0", [Unit(log, "a", event), Unit(log, "b", NOTHING_DONE)], GatherOrder(2))
    none = JoinedUnit("L1", [Unit(log, "c", NOTHING_DONE)], GatherOrder(2))
    assert one.reduce() is event
    assert none.reduce() is NOTHING_DONE


# ---- sharded -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_a_pair_sharded_as_one_module_is_refused(strategy: str) -> None:
    """It is none of the model's, so neither checkpoints nor the root would find it."""
    mesh = init_device_mesh("cpu", (1,))
    parts = HybridParts(hybrid())
    for layer in parts.layers:
        fully_shard(layer.module, mesh=mesh, strategy=strategy)
    message = (
        r"^parameter decoder\.layers\.0\.input_layernorm\.weight of HybridModel is a DTensor: "
    )
    with pytest.raises(ValueError, match=message + "sharded already"):
        fully_shard(parts.module, mesh=mesh, strategy=strategy)


@pytest.mark.usefixtures("on_cpu")
def test_half_a_pair_sharded_is_refused() -> None:
    mesh = init_device_mesh("cpu", (1,))
    parts = HybridParts(hybrid())
    for layer in parts.layers:
        fully_shard(modules_of(layer.module)[0], mesh=mesh, strategy="optim")
    fully_shard(parts.module, mesh=mesh, strategy="optim")
    message = r"^layer 0 \(MoETransformerLayer\) is not a unit of its own; call fully_shard on each"
    with pytest.raises(ValueError, match=message):
        OverlapSchedule(parts, OverlapConfig(num_microbatches=1))


OVERLAPPED = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}
DDP_CASES = [
    ddp.Case(pattern="*E*-*E", ddp=OVERLAPPED, delay=True),
    ddp.Case(pattern="*-*E", ddp=OVERLAPPED, tied=True, shared=True, dtype=BF16),
    ddp.Case(pattern="*E*E", ddp={**OVERLAPPED, "bucket_size": 40000}, microbatches=2),
    ddp.Case(pattern="E*EE*-", ddp=OVERLAPPED, delay=True, shared=True),
]


def test_ddp_with_every_overlap_changes_no_bit(ranks2: RankPool) -> None:
    assert ranks2.run(ddp.differences, DDP_CASES, timeout_s=150.0) == [{}, {}]


def differences_of_scripts() -> list[str]:
    """megatron-core's function, and what is installed in its place."""
    case = ddp.Case(pattern="*E*-", dtype=BF16, float16_module=True, ddp=OVERLAPPED, delay=True)
    with ddp.one_world() as groups:
        expected = ddp.train_by_script(case, ddp.trained(case, groups))
        got = ddp.train_installed(case, ddp.trained(case, groups))
    return ddp.unequal(got, expected)


def test_an_unchanged_script_trains_to_the_same_bits(ranks2: RankPool) -> None:
    assert ranks2.run(differences_of_scripts) == [[], []]


def test_fsdp_v1_whose_units_are_the_models_layers_changes_no_bit(ranks2: RankPool) -> None:
    """Experts are on all ranks: FSDP v1 is wrong with gradients of experts on one."""
    cases = [
        fsdp.Case(pattern="*E*-", delay=True, microbatches=2),
        fsdp.Case(pattern="-E*E", microbatches=2),
    ]
    assert ranks2.run(fsdp.differences, cases, 1) == [{}, {}]


def differences_of_evaluation() -> list[str]:
    """Losses of an evaluation between steps, and what the next step makes of it."""
    case = features.Case(feature="hybrid, all alone, MTP 1", order="paired", strategy="optim")
    with megatron_on_cpu():
        groups, meshes = Groups.new(), support.Groups()
        ours = features.sharded(case, groups, meshes)
        theirs = features.sharded(case, groups, meshes)
        schedule = OverlapSchedule(ours, OverlapConfig(num_microbatches=2, order="paired"))
        batches = features.batches_of(ours, 2)
        got = schedule.evaluate(batches, mean_loss).losses
        with torch.no_grad():
            expected = [theirs.whole(batch).mean() for batch in batches]
        wrong = [str(i) for i in (0, 1) if not torch.equal(got[i], expected[i])]
        features.scale_auxiliary_losses(0.5)
        schedule.step(batches, mean_loss)
        support.standard_step(theirs, batches, mean_loss)
        return wrong + support.unequal(support.gradients(ours), support.gradients(theirs))


def test_an_evaluation_is_the_models_own_forward(ranks2: RankPool) -> None:
    assert ranks2.run(differences_of_evaluation) == [[], []]


def words_of_units() -> list[str]:
    """Gathers, releases and reductions of layers, of two pairs and one microbatch."""
    case = features.Case(feature="hybrid", microbatches=1, strategy="optim_grads_params")
    with megatron_on_cpu(), record() as recording:
        parts = features.sharded(case, Groups.new(), support.Groups())
        schedule = OverlapSchedule(parts, OverlapConfig(num_microbatches=1, order="serial"))
        schedule.observe(recording)
        schedule.step(features.batches_of(parts, 1), mean_loss)
    return [word for word in recording.words if word.startswith(UNIT_OPS) and ".L" in word]


def test_both_units_of_a_pair_follow_the_plan(ranks2: RankPool) -> None:
    for words in ranks2.run(words_of_units):
        assert words[::2] == words[1::2]
        assert sorted(set(words)) == sorted(f"{op}.L{i}" for op in UNIT_OPS for i in (0, 1))
        reduced = [word for word in words if word.startswith("REDUCE")]
        assert reduced == ["REDUCE.L1", "REDUCE.L1", "REDUCE.L0", "REDUCE.L0"]
