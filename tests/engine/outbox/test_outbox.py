"""What must be told is written with what makes it true: once, with everything on it, in the order of the commits."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import psycopg
import pytest

from ecluse.base.errors import PermanentError
from ecluse.db.connect import Pool
from ecluse.db.connect import pool as open_pool
from ecluse.engine import Done, Event, Start, read_published, start_run, write_events
from ecluse.engine.outbox.events import write_run_events
from tests.support.engine_flows import flow, run_to_end, stage, until
from tests.support.runs import end_run

EVENTS = "SELECT event_type, event_key, payload, aggregate, correlation_id FROM events_outbox ORDER BY id"


@pytest.fixture
async def pool(dsn: str) -> AsyncIterator[Pool]:
    async with open_pool(dsn, size=12) as pool:
        yield pool


def event(key: str, aggregate: str = "fiche:1", **fields: object) -> Event:
    given = {"event_type": "fiche/read", "payload": {"n": 1}, "correlation_id": "request-1"}
    return Event(tenant_id="t", event_key=key, aggregate=aggregate, **{**given, **fields})  # type: ignore[arg-type]


@pytest.mark.req("ENG-60", "ENG-64")
async def test_an_event_is_written_with_the_state_it_announces_or_not_at_all(pool, query, one):
    async with pool.connection() as connection:
        async with connection.transaction() as given_up:
            await write_events(connection, [event("lost")])
            raise psycopg.Rollback(given_up)
        async with connection.transaction():
            await write_events(connection, [event("b"), event("a", "fiche:2", producer="M3")])
    assert query("SELECT event_key, aggregate, producer, payload FROM events_outbox ORDER BY id") == [
        ("b", "fiche:1", "ecluse", {"n": 1}),
        ("a", "fiche:2", "M3", {"n": 1}),
    ]
    assert one("SELECT bool_and(occurred_at BETWEEN now() - interval '1 minute' AND now()) FROM events_outbox")


@pytest.mark.req("ENG-64")
async def test_a_key_written_twice_is_one_event_per_tenant(pool, query):
    async with pool.connection() as connection:
        await write_events(connection, [event("a"), event("a", payload={"n": 2})])
        await write_events(connection, [event("a", payload={"n": 3})])
        await write_events(connection, [])
    assert query("SELECT payload FROM events_outbox") == [({"n": 1},)]


@pytest.mark.req("ENG-61")
@pytest.mark.parametrize("field", ["tenant_id", "correlation_id", "producer", "event_key", "event_type", "aggregate"])
@pytest.mark.parametrize("nothing", ["", None])
async def test_what_is_mandatory_cannot_be_left_out(pool, query, field, nothing):
    whole = vars(event("a")) | {field: nothing}
    async with pool.connection() as connection:
        with pytest.raises(psycopg.IntegrityError):
            await write_events(connection, [Event(**whole)])
    assert query("SELECT 1 FROM events_outbox") == []


@pytest.mark.req("G-93", "ENG-85", "ENG-60")
async def test_a_run_tells_that_it_started_what_it_selected_and_how_it_ended(start_kit, query):
    async def work(_, item):
        if item.key == "b":
            raise PermanentError("no")
        return Done({})

    kit = await start_kit(one := flow(stage(work)))
    row = await run_to_end(kit, one, ["a", "b", "c"], "monday", correlation_id="request-7")
    number = str(row["id"])
    assert query(EVENTS) == [
        (f"test/{what}", f"monday:{what}", {"run_id": number, **payload}, f"run:{number}", "request-7")
        for what, payload in (
            ("started", {"status": "queued", "state": "queued"}),
            ("selected", {"status": "running", "state": "running", "selected": 3}),
            (
                "completed",
                {"status": "partial", "state": "partial", "selected": 3, "successful": 2, "failed": 1, "ignored": 0}
                | {"end_cause": "normal"},
            ),
        )
    ]


@pytest.mark.req("G-93")
async def test_a_run_ended_by_force_tells_that_it_failed(start_kit, query, pool):
    kit = await start_kit(one := flow(stage()))
    async with pool.connection() as connection:
        run = (await start_run(connection, Start(one, "monday"))).run
    await end_run(kit, run.id, "enough")
    facts = "payload->>'status', payload->>'state', payload->>'end_cause'"
    told = query(f"SELECT event_type, {facts} FROM events_outbox ORDER BY id")  # noqa: S608 - our own words
    assert told == [("test/started", "queued", "queued", None), ("test/failed", "failed", "cancelled", "operator")]


@pytest.mark.req("ENG-64")
async def test_a_second_start_with_a_key_tells_nothing(pool, one):
    async with pool.connection() as connection:
        for _ in range(2):
            await start_run(connection, Start(flow(stage()), "monday"))
    assert one("SELECT count(*) FROM events_outbox") == 1


async def test_many_runs_tell_in_one_statement(pool, query):
    insert = (
        "INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, created_at, schedule_id)"
        " SELECT 't', 'test', 'slot-' || n, true, 'queued', 'queued', ecluse_now(), 7 FROM generate_series(1, 3) n"
        " RETURNING id"
    )
    async with pool.connection() as connection, connection.transaction():
        runs = [row[0] for row in await (await connection.execute(insert)).fetchall()]
        await write_run_events(connection, runs, "started")
    assert query("SELECT event_key, payload->>'run_id', payload->>'schedule_id' FROM events_outbox ORDER BY id") == [
        (f"slot-{n}:started", str(run), "7") for n, run in enumerate(runs, 1)
    ]


@pytest.mark.req("ENG-62")
async def test_however_transactions_overlap_nothing_is_lost_and_an_aggregate_is_told_in_order(start_kit, pool, query):
    """Ids in the order of the commits: one that is committed late would be told after its successors, or never."""
    told: list[int] = []

    async def sink(events):
        told.extend(event.id for event in events)

    await start_kit(sinks=[sink])

    async def writer(name: int) -> None:
        chance = random.Random(name)  # noqa: S311
        for n in range(40):
            async with pool.connection() as connection, connection.transaction():
                both = [event(f"{name}-{n}-{part}", f"fiche:{chance.randrange(4)}") for part in "ab"]
                await write_events(connection, both)
                await asyncio.sleep(chance.uniform(0, 0.004))

    await asyncio.gather(*map(writer, range(8)))
    await until(lambda: query("SELECT 1 WHERE NOT EXISTS (SELECT FROM events_outbox WHERE published_seq IS NULL)"), 30)
    assert sorted(told) == [number for (number,) in query("SELECT id FROM events_outbox ORDER BY id")]
    assert len(told) == 640
    late = (
        "SELECT 1 FROM (SELECT published_seq - lag(published_seq) OVER (PARTITION BY aggregate ORDER BY id) AS step"
        " FROM events_outbox) s WHERE step < 0"
    )
    assert query(late) == []
    async with pool.connection() as connection:
        first = await read_published(connection, 0, limit=600)
        rest = await read_published(connection, first[-1].seq or 0, "t", limit=600)
        assert await read_published(connection, 0, "other") == []
    assert [one.id for one in (*first, *rest)] == told
