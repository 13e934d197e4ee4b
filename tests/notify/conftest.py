from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ecluse.engine import Flow
from ecluse.notify.dispatch import dispatch
from ecluse.notify.flow import working
from tests.support.notify_world import World, new_secrets, setup_of


@pytest.fixture
def start_world(dsn, query, start_kit) -> Callable[..., Awaitable[World]]:
    """A function that starts an engine whose events are delivered; `options` are those of the set-up."""

    async def start(*flows: Flow, **options: Any) -> World:
        secrets = new_secrets()
        kit = await start_kit(
            *flows,
            working(setup_of(dsn, secrets, **options)),
            sinks=[lambda events: dispatch(world.kit.pool, events)],
        )
        world = World(kit, query, secrets)
        return world

    return start
