"""What troubles of automation are made of: time that is moved, vendors that do not hear before they are let, and what
became of a run's events."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime, timedelta
from typing import Any

from ecluse.engine import EphemeralEvent, Flow
from ecluse.engine.kit import Kit
from ecluse.testing.sandbox import SandboxProcess
from tests.support.automation_world import World, automation
from tests.support.vendor_clients import heard_by

Query = Callable[..., list[Any]]

# Everything that waits is woken, as if its time had come: engines read the clock again, workers and gates poll.
MOVE = """
WITH moved AS (UPDATE clock_offset SET "offset" = "offset" + %s RETURNING 1)
SELECT pg_notify('ecluse_clock', ''), pg_notify('ecluse_work', '') FROM moved
"""
LOOK = """
SELECT dbos.send_message(r.tenant_id || '/' || r.event_key, 'null'::json, 'gate:' || s.stage)
FROM runs r JOIN stages s ON s.run_id = r.id AND s.ended_at IS NULL WHERE r.ended_at IS NULL AND r.orchestrated
"""


def set_clock(query: Query, now: datetime) -> None:
    """It is this late, and time passes as ever."""
    query('UPDATE clock_offset SET "offset" = %s - clock_timestamp()', now)
    query("SELECT pg_notify('ecluse_clock', ''), pg_notify('ecluse_work', '')")


def move(query: Query, by: timedelta) -> None:
    query(MOVE, by)
    query(LOOK)


class Deaf:
    """In the place of a vendor's client: calls about these wait until they are let; of anything, if none is named."""

    def __init__(self, method: str, *about: str) -> None:
        self.method, self.about = method, about
        self.asked, self.let = asyncio.Event(), asyncio.Event()
        self._inner: Any = None

    def instead_of(self, inner: Any) -> Deaf:
        self._inner = inner
        return self

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name != self.method:
            return found

        async def heard(*given: Any, **named: Any) -> Any:
            said = [str(one) for one in (*given, *named.values())]
            if not self.about or any(about in one for about in self.about for one in said):
                self.asked.set()
                await self.let.wait()
            return await found(*given, **named)

        return heard


def maker(
    start_kit: Callable[..., Awaitable[Kit]], sandbox: SandboxProcess, query: Query
) -> Callable[..., Awaitable[World]]:
    """Like the fixture `automate`, at vendors that may be deaf."""

    async def make(
        *others: Flow,
        fiches: Deaf | None = None,
        model: Deaf | None = None,
        deaf_speech: Deaf | None = None,
        kit: dict[str, Any] | None = None,
        **how: Any,
    ) -> World:
        made, transcribing = automation(sandbox, **how)
        lives: list[EphemeralEvent] = []
        flow = made.flow
        if fiches is not None:
            flow = heard_by(flow, "crm", fiches.instead_of)
        if model is not None:
            flow = heard_by(flow, "llm", model.instead_of)
        if deaf_speech is not None:
            transcribing = heard_by(transcribing, "speech", deaf_speech.instead_of)
        engine = await start_kit(transcribing, flow, *others, live=lives.extend, **(kit or {}))
        return World(engine, flow, sandbox, query, lives)

    return make


def failing(vendor: str, ids: Iterable[str], times: int, **fault: Any) -> dict[str, Any]:
    """Each of these, so often."""
    return {"kind": "server_error", "vendor": vendor, "ids": list(ids), "per_id_times": times, **fault}
