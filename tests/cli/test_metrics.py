"""Metrics as a monitoring system scrapes them: over HTTP, from a real server, also while its database is away."""

from __future__ import annotations

import time

import psycopg
import pytest

from ecluse.flows.connections.lanes import BASES
from tests.support.api_server import SECRET_KEY
from tests.support.metrics import scrape
from tests.support.vendor_clients import PLACES

FLOW = "hello_flow:FLOW"


def scrape_until(server, good, seconds=40.0):
    until = time.monotonic() + seconds
    while not good(found := scrape(server)):
        assert time.monotonic() < until, found
        time.sleep(0.2)
    return found


@pytest.mark.req("AUT-95")
def test_a_server_tells_what_it_has_done_and_what_is_waiting(serve, query, sandbox):
    server = serve("--flow", FLOW, PRICE_LIST_URL=f"{sandbox.url}/price-list")
    server.wait_until_ready()
    before = scrape(server)
    assert before["ecluse_database_up"] == {(): 1}
    assert before["ecluse_replicas"] == {("live",): 1, ("dead",): 0, ("left",): 0}
    assert before["ecluse_hands_busy"] == {(): 0}
    assert before["ecluse_outbox_oldest_seconds"][()] >= 0
    assert before["ecluse_schedules_overdue"] == {(): 0}
    assert before["process_resident_memory_bytes"][()] > 0

    lane = next(iter(before["ecluse_items_waiting"]))
    query("UPDATE lanes SET paused_at = now(), paused_by = 'test', paused_reason = 'test' WHERE name = %s", lane[0])
    held = scrape_until(server, lambda found: found["ecluse_lane_held"][lane] == 1)
    assert held["ecluse_lane_in_flight"][lane] == 0
    query("UPDATE lanes SET paused_at = NULL, paused_by = NULL, paused_reason = NULL")

    sandbox.set_faults([{"kind": "not_found", "ids": ["SKU-00003"]}, {"kind": "unauthorized", "ids": ["SKU-00004"]}])
    server.done("runs", "start", "hello", "--input", '{"articles": 20}')
    after = scrape_until(server, lambda found: found.get("ecluse_runs_ended_total"))
    assert after["ecluse_runs_ended_total"] == {("hello", "partial"): 1}
    finished = after["ecluse_items_finished_total"]
    assert finished["hello", "read", "succeeded"] == 18
    assert finished["hello", "read", "failed"] == 1
    assert sum(finished.values()) == 20
    # What slows a run down: a vendor that is slow, fails or throttles; how often gates read; what nobody has taken up.
    assert after["ecluse_vendor_errors_total"]["UNAUTHORIZED", "hello", "read"] >= 1
    assert after["ecluse_calls_total"]["hello", "read"] >= 20
    assert after["ecluse_call_seconds_total"]["hello", "read"] > 0
    assert after["ecluse_gate_looks_total"]["hello", "read"] >= 1
    assert set(after["ecluse_items_waiting"].values()) == {0}


def test_the_lanes_of_a_connection_have_series_once_it_is_made(serve, sandbox, tmp_path):
    server = serve(ECLUSE_SECRET_KEY=SECRET_KEY, ECLUSE_ALLOWED_NETWORKS="127.0.0.0/8")
    server.wait_until_ready()
    server.done("tenants", "create", "acme", "--name", "Acme Ltd")
    of_lanes = ("ecluse_items_waiting", "ecluse_lane_in_flight", "ecluse_lane_held", "ecluse_lane_down")
    own = {(f"{base}/acme",) for kind in ("crm", "speech") for base in BASES[kind]}
    before = scrape(server)
    assert [own & before[name].keys() for name in of_lanes] == [set()] * len(of_lanes)
    (file := tmp_path / "key").write_text("a-key-that-is-long-enough-3f9a")
    for kind in ("crm", "speech"):
        at = ("--base-url", sandbox.url + PLACES[kind], "--api-key-file", str(file))
        server.done("--tenant", "acme", "connections", "create", kind, *at)
    made = scrape_until(server, lambda found: own <= found["ecluse_items_waiting"].keys())
    assert {made[name].get(lane) for name in of_lanes for lane in own} == {0}
    server.done("--tenant", "acme", "lanes", "pause", "crm-transcription/acme", "--reason", "test", "--yes")
    server.done("--tenant", "acme", "transcriptions", "start", "9010")
    waiting = scrape_until(server, lambda found: found["ecluse_items_waiting"]["crm-transcription/acme",] == 1)
    assert waiting["ecluse_items_waiting"]["crm-transcription",] == 0
    held = waiting["ecluse_lane_held"]
    assert (held["crm-transcription/acme",], held["crm-transcription",], held["crm/acme",]) == (1, 0, 0)


def test_requests_are_counted_by_route_and_not_by_path(serve):
    server = serve()
    server.wait_until_ready()
    for path in ("/healthz", "/nowhere/1", "/nowhere/2"):
        server.get(path)
    found = scrape(server)
    counted = found["ecluse_http_requests_total"]
    assert counted["GET", "/healthz", "200"] == 1
    assert counted["GET", "none", "404"] == 2
    assert not [labels for labels in counted if "nowhere" in labels[1]]
    assert found["ecluse_http_request_duration_seconds_count"]["GET", "/healthz"] == 1


def test_a_scrape_without_a_database_still_answers(serve, server, dsn, one):
    """Its sessions end, and it gets no new one."""
    ours = serve()
    ours.wait_until_ready()
    name = one("SELECT current_database()")
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")  # type: ignore[arg-type]
        try:
            admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,))
            away = scrape_until(ours, lambda found: found["ecluse_database_up"] == {(): 0})
            assert "ecluse_items_waiting" not in away
            assert away["ecluse_hands_busy"] == {(): 0}
            assert away["process_cpu_seconds_total"][()] > 0
        finally:
            admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")  # type: ignore[arg-type]
    scrape_until(ours, lambda found: found["ecluse_database_up"] == {(): 1} and found["ecluse_replicas"])
