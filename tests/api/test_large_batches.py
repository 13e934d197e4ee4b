"""Batches of as many fiches as allowed, and large rule runs: taken in chunks, so that the loop is free in between, in
one transaction."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ecluse.db.query import fetch_value
from ecluse.flows.transcriptions.surface import MOST
from tests.support.api_server import new_key, serving
from tests.support.loop_probe import probing
from tests.support.pricing_rows import connected, new_project, new_run

BATCH = "/api/transcriptions/batch"
# 50 ms is the goal, on two cores that nothing else uses; tests share them with others, but for the slow ones.
LONGEST_SECONDS = {1_500: 0.25, MOST: 0.05}
TARGETS = 50_000  # of a rule run, which has no limit


@pytest.mark.req("TRX-09")
@pytest.mark.parametrize("count", [1_500, pytest.param(MOST, marks=pytest.mark.slow)])
def test_a_large_batch_leaves_the_loop_free_and_is_taken_once(api, one, count):
    fiche_ids = [str(n) for n in reversed(range(count))]
    with probing(api) as held, ThreadPoolExecutor(1) as beside:
        began, waits = time.perf_counter(), []
        batch = beside.submit(api.post, BATCH, {"fiche_ids": fiche_ids}, headers={"Idempotency-Key": "all"})
        while not batch.done():
            asked = time.perf_counter()
            assert api.get("/api/me").status == 200
            waits.append(time.perf_counter() - asked)
            time.sleep(0.005)  # a key has 6,000 requests a minute
        seconds = time.perf_counter() - began
    first = batch.result()
    assert (first.status, first.json["queued"], first.json["deduplicated"]) == (200, count, 0)
    assert [row["fiche_id"] for row in first.json["fiches"]] == fiche_ids
    assert one("SELECT count(*) FROM runs") == count
    print(f"{seconds:.1f} s; the loop was held for {held.longest * 1000:.0f} ms, /api/me {max(waits) * 1000:.0f} ms")
    assert held.longest < LONGEST_SECONDS[count]  # pytest -rP shows the figure
    again = api.post(BATCH, {"fiche_ids": fiche_ids}, headers={"Idempotency-Key": "all"})
    assert (again.headers["Idempotent-Replay"], again.json) == ("true", first.json)
    assert one("SELECT count(*) FROM runs") == count


def test_a_batch_whose_last_chunk_is_refused_queues_nothing(api, one, query):
    query(
        "INSERT INTO transcription_requests (tenant_id, fiche_id, minute, requests, last_ms)"
        " VALUES ('default', 'zz', ecluse_now(), 1000000, 0)"
    )
    refused = api.post(BATCH, {"fiche_ids": [*(f"a{n}" for n in range(500)), "zz"]})
    assert (refused.status, refused.code) == (429, "RATE_LIMITED")
    assert refused.json["error"]["details"][0]["where"] == "fiche_requests"
    assert int(refused.headers["Retry-After"]) > 0
    assert one("SELECT count(*) FROM runs") == 0


@pytest.mark.alone
@pytest.mark.req("PRC-46")
def test_a_large_rule_run_is_queued_without_holding_the_loop(dsn):
    async def planned() -> tuple[int, str]:
        async with connected(dsn) as connection:
            run = await new_run(connection, await new_project(connection), TARGETS)
            return run, await fetch_value(connection, "SELECT plan_hash FROM rule_runs WHERE id = %s", (run,))

    run, plan_hash = asyncio.run(planned())
    with serving(dsn) as client:
        client = client.with_key(new_key(dsn))
        with probing(client) as held:
            queued = client.post(f"/api/pricing/runs/{run}/queue", {"plan_hash": plan_hash})
        shown = client.get(f"/api/pricing/runs/{run}").json
    assert (queued.status, shown["status"], shown["counts"]) == (200, "QUEUED", {"QUEUED": TARGETS})
    print(f"the loop was held for {held.longest * 1000:.0f} ms")
    assert held.longest < 0.12  # in one piece: 0.2 to 0.6
