"""A client of the session's sandbox, and a second sandbox with another seed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from ecluse.testing.sandbox import SandboxProcess, running_sandbox
from tests.sandbox.client import Client


@pytest.fixture(scope="session")
def other_process() -> Iterator[SandboxProcess]:
    with running_sandbox(seed=2) as running:
        yield running


@pytest.fixture
def other_seed(other_process: SandboxProcess) -> SandboxProcess:
    other_process.reset()
    return other_process


@pytest.fixture
async def http(sandbox: SandboxProcess) -> AsyncIterator[Client]:
    client = Client(sandbox.url)
    async with client.session:
        yield client
