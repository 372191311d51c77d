"""Warm ranks for the multi-rank tests: one pool of each size for the whole session."""

import pytest

from ep_overlap import testing

ranks2 = pytest.fixture(scope="session")(testing.ranks2)
ranks4 = pytest.fixture(scope="session")(testing.ranks4)
