"""Warm ranks for the multi-rank tests, one pool of each size for the whole session; and this
process as a rank."""

import gc
import socket
from collections.abc import Iterator

import pytest
import torch

from ep_overlap import testing

ranks2 = pytest.fixture(scope="session")(testing.ranks2)
ranks4 = pytest.fixture(scope="session")(testing.ranks4)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is the only rank of a world, as under torchrun; what a run changes is undone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)
    gc.unfreeze()
