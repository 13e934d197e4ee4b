"""The world of `world.py`, in order, on a database and a sandbox of the test's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ecluse.testing.sandbox import SandboxProcess
from tests.verify.world import World, healthy


@pytest.fixture
def world(dsn: str, sandbox: SandboxProcess) -> Iterator[World]:
    one = World(dsn, sandbox)
    with one.db:
        healthy(one)
        yield one
