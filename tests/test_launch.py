"""Launched ranks: environment, output, exit codes, interruption; and the shaped link."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ep_overlap.processes.launch import launch
from ep_overlap.processes.shaped_link import ShapedLink


def _python(code: str, *args: str) -> list[str]:
    return [sys.executable, "-c", code, *args]


def _is_running(pid: int) -> bool:
    return Path("/proc", str(pid)).exists()


SHOW_ENVIRONMENT = """
import json, os, pathlib, sys
names = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS EXTRA"
found = {name: os.environ.get(name) for name in names.split()}
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(found))
"""


def test_every_rank_gets_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    argv = _python(SHOW_ENVIRONMENT, str(tmp_path))
    assert launch(argv, nproc=2, env={"EXTRA": "x"}) == 0
    first, second = (json.loads((tmp_path / rank).read_text()) for rank in ("0", "1"))
    assert int(first["MASTER_PORT"]) > 0
    assert first == {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": second["MASTER_PORT"],
        "OMP_NUM_THREADS": "1",
        "EXTRA": "x",
    }
    assert (second["RANK"], second["LOCAL_RANK"]) == ("1", "1")


def test_a_set_thread_count_and_a_free_set_port_are_kept(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    argv = _python(SHOW_ENVIRONMENT, str(tmp_path))
    assert launch(argv, nproc=1, env={"OMP_NUM_THREADS": "3", "MASTER_PORT": port}) == 0
    found = json.loads((tmp_path / "0").read_text())
    assert (found["OMP_NUM_THREADS"], found["MASTER_PORT"]) == ("3", port)


def test_a_set_port_that_is_in_use_is_refused_with_what_to_do() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ValueError, match=f"port in use: MASTER_PORT={port}.*unset MASTER_PORT"):
            launch(_python(""), nproc=1, env={"MASTER_PORT": str(port)})
    with pytest.raises(ValueError, match="port number from 1 to 65535, got 'http'"):
        launch(_python(""), nproc=1, env={"MASTER_PORT": "http"})


PRINT_AND_EXIT = """
import os, sys
rank = os.environ["RANK"]
for i in range(40):
    print(f"line {i} of {rank}", flush=True)
sys.exit(int(sys.argv[1 + int(rank)]))
"""


def test_only_rank_0_prints_while_all_goes_well(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(_python(PRINT_AND_EXIT, "0", "0"), nproc=2) == 0
    out, err = capfd.readouterr()
    assert out.splitlines() == [f"line {i} of 0" for i in range(40)]
    assert err == ""


def test_a_failed_ranks_last_lines_are_shown_and_its_code_returned(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert launch(_python(PRINT_AND_EXIT, "0", "7"), nproc=2) == 7
    out, err = capfd.readouterr()
    assert len(out.splitlines()) == 40
    assert err.splitlines() == [
        "rank 0: [finished]",
        "rank 1: (10 lines before)",
        *(f"rank 1: line {i} of 1" for i in range(10, 40)),
        "rank 1: [exit code 7]",
    ]


def test_a_refusal_stays_2_and_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print('refused: no such order', file=sys.stderr); sys.exit(2)"
    assert launch(_python(code), nproc=2) == 2
    assert capfd.readouterr().err == "refused: no such order\n"


HANG_ON_RANK_0 = """
import os, pathlib, signal, sys, time
rank = os.environ["RANK"]
if rank == "1":
    while not pathlib.Path(sys.argv[1], "0").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
pathlib.Path(sys.argv[1], rank).write_text(str(os.getpid()))
time.sleep(600)
"""


def test_when_one_rank_dies_the_others_are_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    started = time.monotonic()
    assert launch(_python(HANG_ON_RANK_0, str(tmp_path)), nproc=2) == 128 + signal.SIGKILL
    assert time.monotonic() - started < 10
    assert not _is_running(int((tmp_path / "0").read_text()))
    assert "rank 0: [ended by the launcher]" in capfd.readouterr().err


IGNORE_SIGNALS = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
part = pathlib.Path(sys.argv[1], os.environ["RANK"] + ".part")
part.write_text(str(os.getpid()))
part.rename(part.with_suffix(""))
time.sleep(600)
"""
LAUNCH = """
import sys
from ep_overlap.processes import launch
launch.TERMINATE_S = 0.3
sys.exit(launch.launch([sys.executable, "-c", sys.argv[1], sys.argv[2]], nproc=2))
"""


def started(ranks: str, directory: Path) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A launcher of two ranks that ignore being asked to end, and their process ids."""
    launcher = subprocess.Popen(
        _python(LAUNCH, ranks, str(directory)),
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parent.parent,
        start_new_session=True,
    )
    files = [directory / "0", directory / "1"]
    wait_until(lambda: all(file.exists() for file in files), "the ranks did not start")
    return launcher, [int(file.read_text()) for file in files]


def wait_until(is_so: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_launcher_leaves_no_rank_behind(
    sent: signal.Signals, tmp_path: Path
) -> None:
    """Not even ranks that ignore being asked to end."""
    launcher, pids = started(IGNORE_SIGNALS, tmp_path)
    assert all(map(_is_running, pids))
    launcher.send_signal(sent)
    # An unhandled KeyboardInterrupt ends Python by SIGINT itself.
    assert launcher.wait(20) == (-signal.SIGINT if sent is signal.SIGINT else 128 + sent)
    assert not any(map(_is_running, pids))


END_WITH_LAUNCHER = """
from ep_overlap.processes.launch import end_with_launcher
end_with_launcher()
"""


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    launcher, pids = started(END_WITH_LAUNCHER + IGNORE_SIGNALS, tmp_path)
    launcher.kill()
    launcher.wait(20)
    wait_until(lambda: not any(map(_is_running, pids)), "the ranks go on")


def test_a_number_of_ranks_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="nproc must be at least 1, got 0"):
        launch(_python(""), nproc=0)
    with pytest.raises(ValueError, match="the shaped link has 3 ranks, and nproc is 2"):
        launch(_python(""), nproc=2, netns=ShapedLink(num_ranks=3))


# --- shaped link --------------------------------------------------------------------------------


@pytest.fixture
def shaped() -> ShapedLink:
    """A link of 400 Mbit/s for two ranks, not yet entered."""
    link = ShapedLink(num_ranks=2, rate="400mbit")
    try:
        with link:
            pass
    except ValueError as error:
        pytest.skip(str(error))
    return link


def _namespaces() -> set[str]:
    root = Path("/run/netns")
    return {entry.name for entry in root.iterdir()} if root.is_dir() else set()


def _own_namespaces() -> set[str]:
    return {name for name in _namespaces() if name.startswith(f"epo{os.getpid()}-")}


MEASURE_RATE = """
import json, os, pathlib, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
tokens = torch.ones(2_500_000)  # 10 MB
for peer in (1, 0):  # Way and back.
    dist.barrier()
    start = time.perf_counter()
    dist.send(tokens, peer) if peer != rank else dist.recv(tokens, 1 - rank)
    dist.barrier()
    elapsed_s = time.perf_counter() - start
    if peer != rank:
        sent = {"bytes_per_s": 10e6 / elapsed_s, "master": os.environ["MASTER_ADDR"]}
        pathlib.Path(sys.argv[1], str(rank)).write_text(json.dumps(sent))
dist.destroy_process_group()
"""


def test_each_rank_on_a_shaped_link_sends_at_its_rate(shaped: ShapedLink, tmp_path: Path) -> None:
    """One way at a time: gloo's exchange is often half-duplex.

    A rank that enters late sends its data before the word that it is ready to receive.
    """
    with shaped:
        assert launch(_python(MEASURE_RATE, str(tmp_path)), nproc=2, netns=shaped) == 0
    for rank in ("0", "1"):
        sent = json.loads((tmp_path / rank).read_text())
        assert 0.9 * 50e6 < sent["bytes_per_s"] < 1.03 * 50e6
        assert sent["master"] == "10.77.0.1"
    assert not _own_namespaces()


def _fail_inside(link: ShapedLink) -> None:
    with link:
        assert len(_own_namespaces()) == 3
        raise KeyError


def test_a_shaped_link_is_torn_down_after_an_exception(shaped: ShapedLink) -> None:
    with pytest.raises(KeyError):
        _fail_inside(shaped)
    assert not _own_namespaces()
    with pytest.raises(RuntimeError, match="not built"):
        shaped.command(0, ["true"])


def test_two_shaped_links_live_side_by_side(shaped: ShapedLink) -> None:
    with shaped, ShapedLink(num_ranks=1, rate="1gbit"):
        assert len(_own_namespaces()) == 5
    assert not _own_namespaces()


def test_what_a_killed_process_left_is_removed_and_a_live_ones_is_not(
    shaped: ShapedLink,
) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    stale, live = f"epo{dead.pid}-00r0", f"epo{os.getppid()}-00r0"
    for namespace in (stale, live):
        subprocess.run(["ip", "netns", "add", namespace], check=True)
    try:
        with shaped:
            assert stale not in _namespaces()
            assert live in _namespaces()
    finally:
        subprocess.run(["ip", "netns", "delete", live], check=True)


def test_loopback_works_inside_a_namespace(shaped: ShapedLink) -> None:
    code = (
        "import socket; a = socket.create_server(('127.0.0.1', 0)); "
        "socket.create_connection(a.getsockname(), timeout=5)"
    )
    with shaped:
        assert launch(_python(code), nproc=2, netns=shaped) == 0


def test_without_the_tools_the_refusal_names_what_is_missing_and_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        pytest.raises(
            ValueError, match=r"needs iproute2; not installed: ip, tc; .*--link paced:800mbit"
        ),
        ShapedLink(num_ranks=2),
    ):
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_ranks": 0}, "num_ranks must be 1 to 250"),
        ({"num_ranks": 2, "rate": "fast"}, "not a link rate"),
        ({"num_ranks": 2, "latency_us": -1}, "latency_us must not be negative"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShapedLink(**arguments)  # type: ignore[arg-type]


CONNECT = """
import os, socket, time
if os.environ["RANK"] == "0":
    socket.create_server(("10.77.0.1", 4000)).accept()
else:
    time.sleep(0.5)
    start = time.perf_counter()
    socket.create_connection(("10.77.0.1", 4000))
    assert time.perf_counter() - start > 0.09
"""


def test_a_link_with_latency_has_it_or_names_the_queue_that_the_kernel_lacks(
    shaped: ShapedLink,
) -> None:
    assert shaped.latency_us == 0
    slow = ShapedLink(num_ranks=2, latency_us=50_000)
    refusal, code = "", 0
    try:
        with slow:
            code = launch(_python(CONNECT), nproc=2, netns=slow)
    except ValueError as error:
        refusal = str(error)
    assert code == 0
    assert not refusal or ("netem" in refusal and "paced:800mbit" in refusal)
    assert not _own_namespaces()
