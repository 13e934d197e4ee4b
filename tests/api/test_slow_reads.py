"""A read that is too much for the database is given up, said to be so, and not asked again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from ecluse.db.connect import pool
from ecluse.db.reads import Reads, ReadTimeout
from tests.support.waits import wait_for


async def asked_of(dsn: str, statement: str, **settings: str) -> tuple[int, type[BaseException]]:
    """How often it was asked, and how it went."""
    asked = 0

    async def ask(connection):
        nonlocal asked
        asked += 1
        await connection.execute(statement)

    async with pool(dsn, size=1, settings=settings, checked=False) as quick, pool(dsn, size=1) as checked:
        with pytest.raises((psycopg.Error, ReadTimeout)) as raised:
            await Reads(quick, checked)(ask)
    return asked, raised.type


async def test_what_was_too_much_is_not_asked_again(dsn):
    slow = await asked_of(dsn, "SELECT pg_sleep(30)", statement_timeout="50ms")
    assert slow == (1, ReadTimeout)
    with psycopg.connect(dsn) as blocker:
        blocker.execute("LOCK TABLE runs IN ACCESS EXCLUSIVE MODE")
        locked = await asked_of(dsn, "SELECT 1 FROM runs", lock_timeout="50ms")
    assert locked == (1, psycopg.errors.LockNotAvailable)
    full = "DO $$ BEGIN RAISE 'out of memory' USING ERRCODE = '53200'; END $$"
    assert await asked_of(dsn, full) == (1, psycopg.errors.OutOfMemory)


async def test_what_a_lost_connection_cost_is_asked_again(dsn):
    lost = await asked_of(dsn, "SELECT pg_terminate_backend(pg_backend_pid())")
    assert lost == (2, psycopg.errors.AdminShutdown)


def test_a_caller_whose_read_takes_too_long_is_told_to_ask_for_less(api, query):
    run_id = api.post("/api/runs", {"flow": "test"}).json["run_id"]
    query("ALTER TABLE run_log RENAME TO hidden")
    query("CREATE VIEW run_log AS SELECT h.* FROM (SELECT pg_sleep(30)) s LEFT JOIN hidden h ON true")
    with ThreadPoolExecutor(1) as beside:
        answer = beside.submit(api.get, f"/api/runs/{run_id}/log")
        wait_for(
            lambda: query(
                "SELECT pg_cancel_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND wait_event = 'PgSleep'"
            )
        )
        assert (answer.result().status, answer.result().code) == (503, "READ_TIMEOUT")


def test_who_asks_whether_it_is_ready_is_shown_no_words_of_the_driver(api, dsn):
    anybody, watching = api.with_key(None), api.app.state.watching
    assert anybody.get("/readyz").json["status"] == "ready"
    api.app.state.watching = pool(dsn, size=1)  # never opened
    try:
        answer = wait_for(lambda: (found := anybody.get("/readyz")).status == 503 and found)  # kept for a second
    finally:
        api.app.state.watching = watching
    assert answer.json == {"status": "database away"}
