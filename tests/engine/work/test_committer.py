"""Group commit: results and their effect are one transaction, one bad result harms nobody else, a zombie nothing."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from decimal import Decimal

import psycopg
import pytest
from pydantic_core import to_json
from structlog.testing import capture_logs

from ecluse.db.connect import TRANSACTION_LIMITS_SINCE
from ecluse.engine import Done, Flow, Item, Result, Saved, Start, WorkContext
from tests.support.engine_flows import PATIENCE, flow, keys, run_to_end, stage, until
from tests.support.runs import start_run, wait_for_run

SCHEMA = "CREATE TABLE IF NOT EXISTS saved (key text PRIMARY KEY, amount numeric CHECK (amount < 1000), run_id bigint)"
INSERT = """
INSERT INTO saved SELECT key, amount, run_id FROM jsonb_to_recordset(%s::jsonb)
    AS t(key text, amount numeric, run_id bigint)
"""


class Shelf:
    """A stage's `save`, and how often and with how many it was called."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    async def save(self, connection: psycopg.AsyncConnection, results: list[Saved]) -> None:
        self.batches.append(len(results))
        rows = [{"key": one.item.key, "run_id": one.item.run_id, **one.result} for one in results]
        await connection.execute(INSERT, (to_json(rows).decode(),))


def saving(work) -> tuple[Flow, Shelf]:
    shelf = Shelf()
    return flow(stage(work, save=shelf.save), schema=SCHEMA), shelf


async def amounts(_: WorkContext, item: Item) -> Result:
    await asyncio.sleep(0.001)
    return Done({"amount": Decimal("19.90")})


async def test_results_and_their_effect_are_stored_together_a_batch_at_a_time(start_kit, one):
    f, shelf = saving(amounts)
    kit = await start_kit(f)
    row = await run_to_end(kit, f, keys(500))
    assert row["status"] == "completed"
    assert one("SELECT count(*), min(amount), max(amount) FROM saved") == (500, Decimal("19.90"), Decimal("19.90"))
    assert sum(shelf.batches) == 500
    assert len(shelf.batches) < 60, "one call of save per batch, not per item"
    assert one("SELECT sum(succeeded), sum(in_flight), sum(taken) FROM claims") == (500, 0, 500)


BAD_RESULTS = {
    "a result that breaks a constraint": {"amount": 5000},
    "a NUL byte in the answer": {"amount": 1, "note": "a\x00b"},
    "broken Unicode in the answer": {"amount": 1, "note": "a\ud800b"},
    "a result that is no JSON": {"amount": object()},
    "a number that the database cannot hold": {"amount": "abc"},
}


@pytest.mark.parametrize("bad", BAD_RESULTS.values(), ids=BAD_RESULTS)
async def test_a_result_that_cannot_be_stored_fails_alone(start_kit, query, one, bad):
    async def work(_: WorkContext, item: Item) -> Result:
        return Done(bad if item.key == "t00042" else {"amount": 1})

    f, _ = saving(work)
    kit = await start_kit(f)
    row = await run_to_end(kit, f, keys(100))
    assert (row["status"], row["successful"], row["failed"]) == ("partial", 99, 1)
    assert query("SELECT target, error_code FROM outcomes WHERE outcome = 'failed'") == [("t00042", "STORE_FAILED")]
    assert "could not be stored" in one("SELECT reason FROM outcomes WHERE outcome = 'failed'")
    assert one("SELECT count(*) FROM saved") == 99
    assert one("SELECT count(*) FROM items WHERE status = 'succeeded'") == 99


async def test_a_bug_in_save_fails_the_items_it_cannot_store_and_no_other(start_kit, query, one):
    shelf = Shelf()

    async def clumsy(connection, results):
        if any(saved.item.key == "t00013" for saved in results):
            raise KeyError("colour")
        await shelf.save(connection, results)

    f = flow(stage(amounts, save=clumsy), schema=SCHEMA)
    kit = await start_kit(f)
    row = await run_to_end(kit, f, keys(50))
    assert (row["status"], row["successful"], row["failed"]) == ("partial", 49, 1)
    assert query("SELECT target, error_code FROM outcomes WHERE outcome = 'failed'") == [("t00013", "STORE_FAILED")]
    assert "KeyError: 'colour'" in one("SELECT reason FROM outcomes WHERE outcome = 'failed'")
    assert one("SELECT count(*) FROM saved") == 49
    assert not kit.broken.is_set()


async def test_a_save_that_hides_what_was_refused_fails_its_items_and_stops_nobody(start_kit, query, one):
    shelf = Shelf()

    async def blind(connection, results):
        if any(saved.item.key == "t00013" for saved in results):
            with suppress(psycopg.Error):
                await (await connection.execute("SELECT 1 / 0")).fetchall()
        await shelf.save(connection, results)

    f = flow(stage(amounts, save=blind), schema=SCHEMA)
    kit = await start_kit(f)
    row = await run_to_end(kit, f, keys(50))
    assert (row["status"], row["successful"], row["failed"]) == ("partial", 49, 1)
    assert query("SELECT target, error_code FROM outcomes WHERE outcome = 'failed'") == [("t00013", "STORE_FAILED")]
    assert one("SELECT count(*) FROM saved") == 49


async def test_what_takes_too_long_together_is_stored_in_parts(start_kit, one, monkeypatch):
    monkeypatch.setattr("ecluse.engine.kit.COMMIT_SECONDS", 1)
    shelf, gave_up = Shelf(), []

    async def slow(connection, results):
        try:
            await (await connection.execute("SELECT pg_sleep(%s)", (0.3 * len(results),))).fetchall()
        except psycopg.Error:
            gave_up.append(len(results))
            raise
        await shelf.save(connection, results)

    f = flow(stage(amounts, save=slow), schema=SCHEMA)
    kit = await start_kit(f)
    row = await run_to_end(kit, f, keys(8))
    assert (row["status"], row["successful"]) == ("completed", 8)
    # Before PostgreSQL 17 a transaction has no limit but its idle time.
    assert bool(gave_up) is (int(one("SHOW server_version_num")) >= TRANSACTION_LIMITS_SINCE)
    assert all(count > 3 for count in gave_up)
    assert one("SELECT count(*) FROM saved") == 8


async def test_the_work_is_not_repeated_because_its_result_was_refused(start_kit, one):
    calls: list[str] = []

    async def work(_: WorkContext, item: Item) -> Result:
        calls.append(item.key)
        return Done({"amount": 5000 if item.key == "t00000" else 1})

    f, _ = saving(work)
    kit = await start_kit(f)
    await run_to_end(kit, f, keys(20))
    assert sorted(calls) == keys(20)


async def test_whoever_was_fenced_out_stores_nothing(start_kit, query, one):
    """The claim's fence moves while the work is under way, as when another replica has taken over."""
    claimed, go_on = asyncio.Event(), asyncio.Event()

    async def work(_: WorkContext, item: Item) -> Result:
        if item.executions == 0 and not go_on.is_set():
            claimed.set()
            await go_on.wait()
        return Done({"amount": 1})

    f, shelf = saving(work)
    kit = await start_kit(f)
    started = await start_run(kit, Start(f, "key", input={"targets": ["a"]}))
    await claimed.wait()
    query("UPDATE claims SET fence = fence + 1, released = released + 1")
    query("UPDATE items SET claim_id = NULL")
    go_on.set()
    row = await wait_for_run(kit, started.run.id, PATIENCE)
    assert row["status"] == "completed"
    assert one("SELECT executions FROM items") == 1, "the fenced execution was not counted"
    assert shelf.batches == [1]
    assert query("SELECT fence, taken, succeeded, released FROM claims ORDER BY id") == [(2, 1, 0, 1), (1, 1, 1, 0)]


async def test_a_lost_commit_answer_doubles_nothing(start_kit, one, monkeypatch):
    """The first COMMIT reaches the database, its answer does not reach us: the batch is stored again, to no effect."""
    f, _ = saving(amounts)
    kit = await start_kit(f)
    committer = kit.worker.committer
    store, failures = committer._store_together, iter([True])

    async def store_and_lose_the_answer(batch):
        await store(batch)
        if next(failures, False):
            raise psycopg.OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(committer, "_store_together", store_and_lose_the_answer)
    row = await run_to_end(kit, f, keys(50))
    assert (row["status"], row["successful"]) == ("completed", 50)
    assert one("SELECT count(*) FROM saved") == 50
    assert one(
        "SELECT sum(succeeded), sum(executions) FROM claims, (SELECT sum(executions) executions FROM items) i"
    ) == (
        50,
        50,
    )


async def test_connections_killed_under_the_committer_lose_nothing(start_kit, dsn, one):
    async def work(_: WorkContext, item: Item) -> Result:
        await asyncio.sleep(0.005)
        return Done({"amount": 1})

    f, _ = saving(work)
    kit = await start_kit(f, hands=20)
    started = await start_run(kit, Start(f, "key", input={"targets": keys(1000)}))
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as killer:
        for _round in range(5):
            await asyncio.sleep(0.1)
            await killer.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name = 'ecluse' AND pid <> pg_backend_pid()"
            )
    row = await wait_for_run(kit, started.run.id, PATIENCE)
    assert (row["status"], row["successful"]) == ("completed", 1000)
    assert one("SELECT count(*) FROM saved") == 1000


READ_ONLY = "ALTER DATABASE {} SET default_transaction_read_only = {}"
KICK_OUT = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
"""


async def test_a_database_that_is_read_only_for_a_while_is_waited_for(start_kit, dsn):
    """After a failover, say: not an OperationalError, and no reason to give up either."""

    async def work(_: WorkContext, item: Item) -> Result:
        await asyncio.sleep(0.02)
        return Done({"amount": 1})

    f, _ = saving(work)
    kit = await start_kit(f, hands=5)
    started = await start_run(kit, Start(f, "key", input={"targets": keys(300)}))
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as operator:
        with capture_logs() as logs:
            await operator.execute(READ_ONLY.format(operator.info.dbname, "on"))
            await operator.execute(KICK_OUT)
            await until(
                lambda: [
                    line
                    for line in logs
                    if line["event"] == "claim: database unavailable" and "read-only" in line["error"]
                ]
            )
        await operator.execute(READ_ONLY.format(operator.info.dbname, "off"))
        await operator.execute(KICK_OUT)
    row = await wait_for_run(kit, started.run.id, PATIENCE)
    assert (row["status"], row["successful"]) == ("completed", 300)
    assert not kit.broken.is_set()
