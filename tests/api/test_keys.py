"""The life of an API key: shown once, stored as a hash, used, expired, revoked; and nowhere to be read."""

from __future__ import annotations

import time
from datetime import timedelta

import psycopg
import pytest

from ecluse.access import keys
from tests.support.api_server import FLOW, Client, serving
from tests.support.command_line import Server
from tests.support.databases import everything_stored
from tests.support.waits import wait_for


def test_a_key_is_random_and_only_its_hash_is_stored(make_key, query):
    made = {make_key() for _ in range(20)}
    assert len(made) == 20
    assert all(key.startswith("ecl_") and len(key) >= 40 for key in made)
    stored = query("SELECT hash, hint FROM api_keys")
    assert {bytes(hashed) for hashed, _ in stored} == {keys.digest(key) for key in made}
    assert {hint for _, hint in stored} == {key[:8] for key in made}


@pytest.mark.req("G-33")
def test_a_revoked_key_and_a_disabled_tenant_are_out_within_two_seconds_on_every_replica(api, dsn, query):
    with serving(dsn, FLOW) as second:
        replicas = [api, second.with_key(api.key)]
        for statement, status, back in [
            (
                "UPDATE tenants SET disabled_at = ecluse_now()",
                403,
                "UPDATE tenants SET disabled_at = NULL",
            ),
            ("UPDATE api_keys SET revoked_at = ecluse_now()", 401, None),
        ]:
            wait_for(lambda: [one.get("/api/me").status for one in replicas] == [200, 200])
            query(statement)
            changed = time.monotonic()
            time.sleep(keys.FRESH_SECONDS)
            assert [one.get("/api/me").status for one in replicas] == [status, status]
            print(f"{time.monotonic() - changed:.2f} s")  # pytest -rP
            if back:
                query(back)


def test_a_key_expires_by_itself(api, make_key, query):
    soon = api.with_key(make_key(expires_in=timedelta(hours=1)))
    assert soon.get("/api/me").status == 200
    query("UPDATE clock_offset SET \"offset\" = '2 hours'")
    wait_for(lambda: soon.get("/api/me").status == 401)
    assert api.get("/api/me").status == 200


def test_the_last_use_is_written_beside_the_request_and_at_most_once_a_minute(api, one, query):
    used = "SELECT last_used_at FROM api_keys WHERE last_used_at IS NOT NULL"
    api.get("/api/me")
    ((first,),) = wait_for(lambda: query(used))
    for _ in range(3):
        api.get("/api/me")
    wait_for(lambda: not api.app.state.keys._writing)
    assert one(used) == first


def test_requests_of_a_key_share_one_note_of_its_use(api, dsn):
    noting = (
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%last_used_at%'"
    )
    with psycopg.connect(dsn) as blocker:
        blocker.execute("SELECT 1 FROM api_keys FOR UPDATE")  # the note waits, so that it can be counted
        assert {api.get("/api/me").status for _ in range(10)} == {200}
        wait_for(lambda: blocker.execute(noting).fetchone()[0] > 0)
        assert len(api.app.state.keys._writing) == 1


def test_a_request_does_not_wait_for_the_note_of_its_keys_use(api, dsn, query):
    with psycopg.connect(dsn) as blocker:
        blocker.execute("SELECT 1 FROM api_keys FOR UPDATE")
        began = time.monotonic()
        assert api.get("/api/me").status == 200
        assert time.monotonic() - began < 2  # the note waits for three seconds, then gives up
        assert query("SELECT 1 FROM api_keys WHERE last_used_at IS NOT NULL") == []


def test_reads_go_on_when_the_server_has_dropped_all_connections(api, query):
    for _ in range(3):
        assert api.get("/api/runs").status == 200
        query(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )
        assert api.get("/api/runs").status == 200


@pytest.mark.req("ENG-88", "G-33")
def test_a_key_is_to_be_found_in_no_log_no_table_and_no_answer(dsn, make_key, query, fork_server):
    good, bad = make_key("admin"), "ecl_" + "canary" * 7
    query(
        "INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, created_at)"
        " VALUES ('default', 'x', 'x', false, 'queued', 'queued', ecluse_now())"
    )
    query("ALTER TABLE run_log RENAME TO hidden")  # something that goes wrong inside
    knobs = {"DATABASE_URL": dsn, "ECLUSE_LOG_LEVEL": "DEBUG", "ECLUSE_LOG_FORMAT": "json"}
    server = Server(fork_server, "--role", "api", **knobs)
    answers = []
    try:
        server.wait_until_ready()
        for key in (good, bad):
            client = Client(server.port, key)
            answers += [client.get(path) for path in ("/api/me", "/api/runs?limit=x", "/api/runs/1/log", "/nowhere")]
            answers += [client.post("/api/runs", {"flow": "x"})]
        wait_for(lambda: query("SELECT 1 FROM api_keys WHERE last_used_at IS NOT NULL"))
    finally:
        _, _, said = server.end()
    assert '"http_status": 401' in said
    assert "Traceback" in said
    told = "\n".join([*(answer.body.decode() for answer in answers), said, everything_stored(dsn)])
    for key in (good, bad):
        assert key[8:] not in told
