"""An engine with the flow of company enrichment on the test's own database."""

from __future__ import annotations

from typing import Any

import pytest

from ecluse.testing.sandbox import SandboxProcess
from tests.support.enrichment_world import Make, World, enrichment


@pytest.fixture
def make(start_kit, sandbox: SandboxProcess, query) -> Make:
    async def make(**given: Any) -> World:
        made = enrichment(sandbox.url, **given)
        return World(await start_kit(made.flow), made, sandbox, query)

    return make


@pytest.fixture
async def world(make: Make) -> World:
    return await make()
