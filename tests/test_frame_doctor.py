"""What the doctor finds here, and what it would say of other machines."""

import dataclasses
import importlib.metadata
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from ep_overlap.cli import main
from ep_overlap.report.doctor import Machine, Verdict, as_json, examine, features, report

CPU_MACHINE = Machine(
    python="3.12.1",
    num_cores=4,
    torch="2.11.0",
    cuda_devices=(),
    has_gloo=True,
    has_nccl=False,
    megatron_core="0.19.2",
    transformer_engine=None,
    is_root=False,
    has_iproute2=True,
    can_make_network_namespaces=False,
    cuda_device_max_connections=None,
)
GPU_MACHINE = dataclasses.replace(
    CPU_MACHINE, cuda_devices=("A", "A"), has_nccl=True, transformer_engine="2.10.0"
)


def judged(machine: Machine) -> dict[str, tuple[Verdict, str]]:
    return {feature.name: (feature.verdict, feature.reason) for feature in features(machine)}


def test_a_cpu_machine_trains_but_has_no_gpu_ranks() -> None:
    says = judged(CPU_MACHINE)
    assert says["train and overlap on CPU ranks"] == (Verdict.YES, "gloo, 4 cores")
    assert says["GPU ranks"] == (Verdict.NO, "torch sees no GPU")
    assert says["bench --link shaped:RATE"] == (
        Verdict.NO,
        "needs root, permission to make network namespaces; --link paced:RATE works for any user",
    )


def test_a_gpu_machine_has_gpu_ranks_and_transformer_engine() -> None:
    says = judged(GPU_MACHINE)
    assert says["GPU ranks"] == (Verdict.YES, "NCCL, 2 GPUs")
    assert says["Transformer Engine layers"] == (Verdict.YES, "Transformer Engine 2.10.0")


@pytest.mark.parametrize(
    ("value", "verdict"), [("1", Verdict.WARNING), ("8", Verdict.YES), (None, Verdict.YES)]
)
def test_one_connection_is_warned_of_where_there_is_a_gpu(
    value: str | None, verdict: Verdict
) -> None:
    with_gpu = dataclasses.replace(GPU_MACHINE, cuda_device_max_connections=value)
    without = dataclasses.replace(CPU_MACHINE, cuda_device_max_connections=value)
    assert judged(with_gpu)["overlap on GPUs"][0] is verdict
    assert judged(without)["overlap on GPUs"][0] is Verdict.NO


def test_a_missing_torch_leaves_the_plan() -> None:
    bare = dataclasses.replace(CPU_MACHINE, torch=None, has_gloo=False, megatron_core=None)
    says = judged(bare)
    assert says["plan"][0] is Verdict.YES
    assert says["train and overlap on CPU ranks"] == (Verdict.NO, "needs torch with gloo")
    assert says["--model megatron"][0] is Verdict.NO


def test_another_megatron_is_warned_of() -> None:
    other = dataclasses.replace(CPU_MACHINE, megatron_core="0.20.0")
    assert judged(other)["--model megatron"][0] is Verdict.WARNING


def test_it_finds_what_is_installed_here() -> None:
    machine = examine({"CUDA_DEVICE_MAX_CONNECTIONS": "32"})
    assert machine.python == ".".join(str(part) for part in sys.version_info[:3])
    assert machine.torch == importlib.metadata.version("torch")
    assert machine.has_gloo
    assert machine.num_cores >= 1
    assert machine.cuda_device_max_connections == "32"


def test_the_table_shows_extras_as_they_are_typed() -> None:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(report(CPU_MACHINE))
    assert "pip install 'ep-overlap[te]'" in captured.get()


def test_the_command_writes_what_it_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "doctor.json"
    assert main(["doctor", "--json", str(result)]) == 0
    written = json.loads(result.read_text())
    shown = capsys.readouterr().out
    assert written["machine"]["torch"] in shown
    assert {feature["name"] for feature in written["features"]} == set(judged(CPU_MACHINE))
    assert json.loads(json.dumps(as_json(GPU_MACHINE)))["machine"]["cuda_devices"] == ["A", "A"]
