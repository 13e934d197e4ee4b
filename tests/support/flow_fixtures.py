"""A connection of the test's own; engines that transcribe, engines that audit, engines that automate."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
import pytest

from tests.support.audit_world import World as AuditWorld
from tests.support.audit_world import by_hand
from tests.support.automation_world import World as AutomationWorld
from tests.support.automation_world import automation
from tests.support.pricing_world import World as PricingWorld
from tests.support.pricing_world import pricing
from tests.support.transcription_world import Gate, World, transcription


@pytest.fixture
async def connection(dsn):
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
def world(start_kit, sandbox, query) -> Callable[..., Awaitable[World]]:
    """Make an engine that transcribes at full speed, unless its knobs are given."""

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


@pytest.fixture
def auditing(start_kit, sandbox, query):
    """Make an engine that audits: by hand, or in the flow given."""

    async def make(flow=None, **options):
        made, lives = flow or by_hand(sandbox, **options).flow, []
        return AuditWorld(await start_kit(made, live=lives.extend), made, sandbox, query, lives)

    return make


@pytest.fixture
def automate(start_kit, sandbox, query):
    """Make an engine that automates, at full speed unless its knobs are given, beside other flows."""

    async def make(*others, kit=None, **options):
        (made, transcribing), lives = automation(sandbox, **options), []
        engine = await start_kit(transcribing, made.flow, *others, live=lives.extend, **(kit or {}))
        return AutomationWorld(engine, made.flow, sandbox, query, lives)

    return make


@pytest.fixture
def shop(start_kit, sandbox, query):
    """Make an engine that changes prices, at full speed unless its knobs are given."""

    async def make(*, kit=None, **config):
        made = pricing(**config)
        return PricingWorld(await start_kit(made.flow, **(kit or {})), made, sandbox, query)

    return make
