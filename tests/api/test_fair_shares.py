"""What one tenant does at once takes its own share of connections and of the loop, and leaves the others theirs."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

import psycopg
import pytest

from ecluse.access import answers
from ecluse.api.health import Readiness
from ecluse.db.pools import READING, WRITING, share
from ecluse.db.shares import Shares
from tests.support.api_server import FLOW, add_tenant, new_key, serving
from tests.support.loop_probe import probing
from tests.support.realtime_events import on_its_loop
from tests.support.waits import wait_for

SLOW = "CREATE VIEW run_log AS SELECT h.* FROM (SELECT pg_sleep(30)) s LEFT JOIN hidden h ON true"
SLEEPING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"
WAKE = SLEEPING.replace("count(*)", "pg_cancel_backend(pid)")
START = {"flow": "test", "input": {"targets": ["a"]}}
ITEMS = """
WITH lane AS (INSERT INTO lanes (name) VALUES ('lane') ON CONFLICT (name) DO UPDATE SET name = 'lane' RETURNING id)
INSERT INTO items (tenant_id, run_id, flow, stage, key, target, lane_id, due_at, result)
SELECT 'default', %(run)s, 'test', 'work', n, n, lane.id, ecluse_now(), to_jsonb(repeat('x', %(bytes)s))
FROM lane, generate_series(1, %(count)s) n
"""


@pytest.fixture
def rival(api, dsn):
    add_tenant(dsn, "rival")
    return api.with_key(new_key(dsn, "operator", "rival"))


@pytest.fixture
def slow_log(api, query):
    """The path of a read that takes until it is woken."""
    run_id = api.post("/api/runs", START).json["run_id"]
    query("ALTER TABLE run_log RENAME TO hidden")
    query(SLOW)
    return f"/api/runs/{run_id}/log"


def test_slow_reads_of_a_tenant_leave_readers_to_others(api, rival, slow_log, one, query):
    with ThreadPoolExecutor(2 * READING) as beside:
        slow = [beside.submit(api.get, slow_log) for _ in range(2 * READING)]
        wait_for(lambda: one(SLEEPING) == share(READING))
        began = time.monotonic()
        assert rival.get("/api/runs").status == 200
        assert time.monotonic() - began < 1
        refused = wait_for(lambda: [task.result() for task in slow if task.done()])
        wait_for(lambda: (query(WAKE), all(task.done() for task in slow))[1])
    assert {answer.code for answer in refused} == {"TOO_MANY_AT_ONCE"}
    assert (refused[0].status, refused[0].headers["Retry-After"]) == (429, "1")
    assert refused[0].json["error"]["details"][0]["where"] == "reads_at_once"


def test_a_known_key_survives_a_database_that_does_not_answer(api, dsn, query):
    """For a short while: nothing but the look-up of the key may need the database."""
    assert api.get("/api/me").status == 200
    with psycopg.connect(dsn) as blocker:
        blocker.execute("LOCK TABLE api_keys IN ACCESS EXCLUSIVE MODE")
        time.sleep(1)  # as long as a look-up is fresh
        began = time.monotonic()
        assert api.get("/api/me").status == 200
        assert time.monotonic() - began < 1.5
        query('UPDATE clock_offset SET "offset" = "offset"')  # the blocker holds only the keys
    query("UPDATE api_keys SET revoked_at = ecluse_now()")
    began = time.monotonic()
    wait_for(lambda: api.get("/api/me").status == 401)
    assert time.monotonic() - began < 3


def test_writes_of_requests_leave_the_engine_its_connections(api, rival, query, one):
    """Writers that wait for a lock hold the share of their tenant, not the pool of ticks and sweeps."""
    with psycopg.connect(api.app.state.kit.dsn) as blocker, ThreadPoolExecutor(WRITING) as beside:
        blocker.execute("SELECT FROM tenants WHERE id = 'default' FOR UPDATE")
        body = {"kind": "webhook", "url": "https://hooks.example.com/x", "events": ["*"]}
        waiting = [beside.submit(api.post, "/api/notifications/endpoints", body) for _ in range(WRITING)]
        locked = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        wait_for(lambda: one(locked) == share(WRITING))
        assert rival.post("/api/runs", START).status == 201
        stats = api.app.state.kit.pool.get_stats()
        assert stats.get("requests_waiting", 0) == 0
        assert stats["pool_available"] == stats["pool_size"]
        blocker.rollback()
        assert {task.result().status for task in waiting} <= {201, 429}


def test_a_server_whose_engine_uses_all_its_connections_is_ready_and_measured(api):
    kit, held, over = api.app.state.kit, threading.Event(), asyncio.Event()

    async def hold_all() -> None:
        async with AsyncExitStack() as stack:
            for _ in range(kit.db_pool):
                await stack.enter_async_context(kit.pool.connection())
            held.set()
            await over.wait()

    holding = on_its_loop(api, lambda: asyncio.create_task(hold_all()))
    try:
        assert held.wait(10)
        api.app.state.readiness = Readiness()  # without the result of an earlier request
        api.app.state.metrics._good_until = 0.0
        assert api.get("/readyz").status == 200
        assert b"ecluse_database_up 1.0" in api.get("/metrics").body
        assert not holding.done()
    finally:
        on_its_loop(api, over.set)


def test_repetitions_beside_a_long_first_request_do_not_wait(api, dsn, query):
    key = {"Idempotency-Key": "long"}
    with psycopg.connect(dsn) as blocker, ThreadPoolExecutor(1) as beside:
        blocker.execute("LOCK TABLE runs IN ACCESS EXCLUSIVE MODE")
        first = beside.submit(api.post, "/api/runs", START, headers=key)
        wait_for(lambda: query("SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND granted"))
        began = time.monotonic()
        repeated = [api.post("/api/runs", START, headers=key) for _ in range(24)]
        assert time.monotonic() - began < 2.5  # less than a lock is waited for
        assert {(one.status, one.code, one.headers["Retry-After"]) for one in repeated} == {(409, "IN_PROGRESS", "1")}
        blocker.rollback()
        assert first.result().status == 201
    again = api.post("/api/runs", START, headers=key)
    assert (again.status, again.json, again.headers["Idempotent-Replay"]) == (201, first.result().json, "true")


def test_a_body_of_many_small_values_does_not_hold_the_loop(api):
    body = json.dumps({"flow": "test", "input": {"targets": [], "more": [{"a": n} for n in range(68_000)]}}).encode()
    assert 900_000 < len(body) < 1_000_000
    with probing(api) as held, ThreadPoolExecutor(2) as together:
        answers = list(together.map(lambda _: api.post("/api/runs", raw=body), range(4)))
    assert {answer.status for answer in answers} == {201}
    print(f"the loop was held for {held.longest * 1000:.0f} ms")
    assert held.longest < 0.2


def test_a_large_body_that_waits_too_long_for_its_turn_is_told_which_limit_it_met(api, monkeypatch):
    monkeypatch.setattr(api.app.state.limits, "large", Shares("large_bodies_at_once", 0, patience=0.01))
    refused = api.post("/api/runs", raw=json.dumps({"flow": "test", "input": {"targets": ["x" * 70_000]}}).encode())
    assert (refused.status, refused.code) == (429, "TOO_MANY_AT_ONCE")
    assert refused.json["error"]["details"][0]["where"] == "large_bodies_at_once"


@pytest.fixture(scope="module")
def large(databases):
    """A server with answers of at most a megabyte, and the path of a list of 200 items with results of 9 kB each."""
    with databases.one() as dsn, serving(dsn, FLOW, ECLUSE_LIMIT_ANSWER_MEGABYTES=1) as client:
        client = client.with_key(new_key(dsn))
        run_id = client.post("/api/runs", START).json["run_id"]
        with psycopg.connect(dsn) as connection:
            connection.execute(ITEMS, {"run": run_id, "count": 200, "bytes": 9_000})
        yield client, f"/api/runs/{run_id}/items"


def test_an_answer_has_a_limit_of_bytes_and_says_how_to_ask_for_less(large):
    client, path = large
    refused = client.get(f"{path}?limit=200")
    assert (refused.status, refused.code) == (422, "ANSWER_TOO_LARGE")
    assert "limit" in refused.json["error"]["message"]
    assert [one["key"] for one in client.get(f"{path}?limit=3").json["items"]] == ["1", "10", "100"]


def test_a_large_answer_is_compressed_for_those_who_accept_it(large):
    client, path = large
    plain = client.get(path)
    squeezed = client.get(path, headers={"Accept-Encoding": "gzip"})
    assert (plain.headers["Content-Encoding"], squeezed.headers["Content-Encoding"]) == (None, "gzip")
    assert len(squeezed.body) < len(plain.body) // 10
    assert json.loads(gzip.decompress(squeezed.body)) == plain.json


@pytest.mark.parametrize("what", ["answer", "body"])
def test_a_large_answer_is_made_and_a_large_body_parsed_in_a_thread_while_the_loop_answers_others(large, what):
    client, path = large
    free = threading.Event()
    ask = {
        "answer": lambda: client.get(path),
        "body": lambda: client.post("/api/audit-configs", raw=json.dumps({"name": 70_000 * "x"}).encode()),
    }[what]

    def at_once():
        return {one["name"]: one["used"] for one in client.get("/api/limits").json["limits"]}["large_bodies_at_once"]

    answers.THREAD.submit(free.wait, 20)  # it makes and parses nothing meanwhile
    try:
        with ThreadPoolExecutor(1) as beside:
            asked = beside.submit(ask)
            wait_for(lambda: at_once() == 1)
            assert not asked.done()
            free.set()
            assert asked.result().status == {"answer": 200, "body": 422}[what]
    finally:
        free.set()
    assert at_once() == 0
