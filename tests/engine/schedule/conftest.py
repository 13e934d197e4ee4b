from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.tick_world import World, tick_world


@pytest.fixture
async def world(dsn, query) -> AsyncIterator[World]:
    async with tick_world(dsn, query) as opened:
        yield opened
