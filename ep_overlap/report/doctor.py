"""What this machine has, and which features that allows.

``examine`` looks, ``features`` judges what was seen, so that a test can judge machines that are
not there.
"""

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

CONNECTIONS: Final = "CUDA_DEVICE_MAX_CONNECTIONS"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What was found. None: not installed, or not set."""

    python: str
    num_cores: int
    """Cores this process may run on."""
    torch: str | None
    cuda_devices: tuple[str, ...]
    has_gloo: bool
    has_nccl: bool
    megatron_core: str | None
    transformer_engine: str | None
    is_root: bool
    has_iproute2: bool
    can_make_network_namespaces: bool
    cuda_device_max_connections: str | None


class Verdict(StrEnum):
    """Whether a feature works here."""

    YES = "yes"
    WARNING = "warning"
    NO = "no"


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One thing the project does, and whether it works here."""

    name: str
    verdict: Verdict
    reason: str
    """What it rests on, or what is missing and how to get it."""


def examine(environ: Mapping[str, str]) -> Machine:
    """Look at this machine. Changes nothing; imports torch where it is installed."""
    devices, has_gloo, has_nccl = _torch_facts()
    return Machine(
        python=platform.python_version(),
        num_cores=len(os.sched_getaffinity(0)),
        torch=_version("torch"),
        cuda_devices=devices,
        has_gloo=has_gloo,
        has_nccl=has_nccl,
        megatron_core=_version("megatron-core"),
        transformer_engine=_version("transformer-engine"),
        is_root=os.geteuid() == 0,
        has_iproute2=shutil.which("ip") is not None and shutil.which("tc") is not None,
        can_make_network_namespaces=_can_unshare_network(),
        cuda_device_max_connections=environ.get(CONNECTIONS),
    )


def features(machine: Machine) -> tuple[Feature, ...]:
    """What works on that machine."""
    return (
        Feature(name="plan", verdict=Verdict.YES, reason="needs Python alone"),
        _cpu_ranks(machine),
        _gpu_ranks(machine),
        _megatron(machine),
        _transformer_engine(machine),
        _shaped_link(machine),
        _gpu_overlap(machine),
    )


def as_json(machine: Machine) -> dict[str, object]:
    """The machine and its features, as ``json.dump`` takes them."""
    return {
        "machine": asdict(machine) | {"cuda_devices": list(machine.cuda_devices)},
        "features": [asdict(feature) for feature in features(machine)],
    }


def report(machine: Machine) -> Group:
    """Two tables for a terminal."""
    found = Table(title="this machine", title_justify="left", show_header=False)
    for name, value in asdict(machine).items():
        found.add_row(name.replace("_", " "), _shown(value))
    allowed = Table("feature", "works", "why", title="what it allows", title_justify="left")
    styles = {Verdict.YES: "green", Verdict.WARNING: "yellow", Verdict.NO: "red"}
    for feature in features(machine):
        verdict = Text(feature.verdict, style=styles[feature.verdict])
        allowed.add_row(Text(feature.name), verdict, Text(feature.reason))  # no markup: [te]
    return Group(found, allowed)


def _shown(value: object) -> str:
    match value:
        case None | ():
            return "-"
        case bool():
            return "yes" if value else "no"
        case tuple():
            return ", ".join(str(item) for item in value)
        case _:
            return str(value)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _torch_facts() -> tuple[tuple[str, ...], bool, bool]:
    """Names of the GPUs, and whether gloo and NCCL are built in."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        return (), False, False
    devices = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    is_built = dist.is_available()
    return devices, is_built and dist.is_gloo_available(), is_built and dist.is_nccl_available()


def _can_unshare_network() -> bool:
    """Whether a child process gets a network namespace of its own; it ends at once."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return False
    return subprocess.run([unshare, "--net", "true"], capture_output=True).returncode == 0


def _cpu_ranks(machine: Machine) -> Feature:
    name = "train and overlap on CPU ranks"
    if machine.torch is None or not machine.has_gloo:
        return Feature(name=name, verdict=Verdict.NO, reason="needs torch with gloo")
    if machine.num_cores < 2:
        reason = "one core: two ranks share it, so compute leaves little to hide behind"
        return Feature(name=name, verdict=Verdict.WARNING, reason=reason)
    return Feature(name=name, verdict=Verdict.YES, reason=f"gloo, {machine.num_cores} cores")


def _gpu_ranks(machine: Machine) -> Feature:
    name = "GPU ranks"
    if not machine.cuda_devices:
        return Feature(name=name, verdict=Verdict.NO, reason="torch sees no GPU")
    if not machine.has_nccl:
        return Feature(name=name, verdict=Verdict.NO, reason="needs a torch with NCCL")
    reason = f"NCCL, {len(machine.cuda_devices)} GPUs"
    return Feature(name=name, verdict=Verdict.YES, reason=reason)


def _megatron(machine: Machine) -> Feature:
    name = "--model megatron"
    if machine.megatron_core is None:
        reason = "needs megatron-core: pip install 'ep-overlap[megatron]'"
        return Feature(name=name, verdict=Verdict.NO, reason=reason)
    reason = f"megatron-core {machine.megatron_core}"
    if not machine.megatron_core.startswith("0.19."):
        return Feature(
            name=name, verdict=Verdict.WARNING, reason=f"{reason}; expected 0.19, the rest untested"
        )
    return Feature(name=name, verdict=Verdict.YES, reason=reason)


def _transformer_engine(machine: Machine) -> Feature:
    name = "Transformer Engine layers"
    if machine.transformer_engine is None:
        reason = "needs a GPU and pip install 'ep-overlap[te]'"
        return Feature(name=name, verdict=Verdict.NO, reason=reason)
    reason = f"Transformer Engine {machine.transformer_engine}"
    if not machine.cuda_devices:
        return Feature(name=name, verdict=Verdict.NO, reason=f"{reason}, but no GPU")
    return Feature(name=name, verdict=Verdict.YES, reason=reason)


def _shaped_link(machine: Machine) -> Feature:
    missing = [
        what
        for has, what in (
            (machine.is_root, "root"),
            (machine.has_iproute2, "iproute2 (ip and tc)"),
            (machine.can_make_network_namespaces, "permission to make network namespaces"),
        )
        if not has
    ]
    name = "bench --link shaped:RATE"
    if missing:
        reason = f"needs {', '.join(missing)}; --link paced:RATE works for any user"
        return Feature(name=name, verdict=Verdict.NO, reason=reason)
    return Feature(name=name, verdict=Verdict.YES, reason="root, iproute2, network namespaces")


def _gpu_overlap(machine: Machine) -> Feature:
    name = "overlap on GPUs"
    if not machine.cuda_devices:
        return Feature(name=name, verdict=Verdict.NO, reason="torch sees no GPU")
    if machine.cuda_device_max_connections == "1":
        reason = f"{CONNECTIONS}=1 runs kernels of all streams in issue order: set it to 8 or more"
        return Feature(name=name, verdict=Verdict.WARNING, reason=reason)
    shown = machine.cuda_device_max_connections or "not set (CUDA's default, 8)"
    return Feature(name=name, verdict=Verdict.YES, reason=f"{CONNECTIONS} {shown}")
