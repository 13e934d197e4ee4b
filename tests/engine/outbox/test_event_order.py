"""Events of every flow, and the engine's own, are rows of one store with one order."""

from __future__ import annotations

import psycopg
import pytest

from ecluse.engine import Event, read_published, write_events
from tests.support.engine_flows import flow, run_to_end, stage, until

TYPES = ("automation/run", "fiche/fetch", "audit/run", "transcription/transcribe", "automation.target.apply")


@pytest.mark.req("ENG-63")
async def test_whatever_flow_an_event_is_of_it_is_written_told_and_read_in_the_same_way(start_kit, one, dsn):
    kit = await start_kit(f := flow(stage()))
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await write_events(connection, [Event("default", name, name, f"flow:{name}", {}, "c") for name in TYPES])
        await run_to_end(kit, f, ["a"])
        await until(lambda: one("SELECT bool_and(published_seq IS NOT NULL) FROM events_outbox"))
        told = [event.event_type for event in await read_published(connection, 0)]
    assert sorted(told) == sorted([*TYPES, "test/started", "test/selected", "test/completed"])
