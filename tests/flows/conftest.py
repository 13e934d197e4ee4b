"""A connection of the test's own; an engine that transcribes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
import pytest

from tests.flows.transcription_world import Gate, World, transcription


@pytest.fixture
async def connection(dsn):
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
def world(start_kit, sandbox, query) -> Callable[..., Awaitable[World]]:
    """Make an engine that transcribes at full speed, unless told otherwise."""

    async def make(
        *,
        access: dict[str, Any] | None = None,
        kit: dict[str, Any] | None = None,
        gate: Gate | None = None,
        **config: Any,
    ) -> World:
        made, lives = transcription(sandbox, access=access, **config), []
        if gate is not None:
            gate.before(made)
        return World(await start_kit(made.flow, live=lives.extend, **(kit or {})), made, sandbox, query, lives)

    return make
