"""Batches of as many fiches as allowed: taken in chunks, so that the loop is free in between, in one transaction."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ecluse.flows.transcriptions.surface import MOST
from tests.support.loop_probe import probing

BATCH = "/api/transcriptions/batch"
# 50 ms is the goal, on two cores that nothing else uses; tests share them with others.
LONGEST_SECONDS = 0.25


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
        seconds = time.perf_counter() - began
    first = batch.result()
    assert (first.status, first.json["queued"], first.json["deduplicated"]) == (200, count, 0)
    assert [row["fiche_id"] for row in first.json["fiches"]] == fiche_ids
    assert one("SELECT count(*) FROM runs") == count
    print(f"{seconds:.1f} s; the loop was held for {held.longest * 1000:.0f} ms, /api/me {max(waits) * 1000:.0f} ms")
    assert held.longest < LONGEST_SECONDS  # pytest -rP shows the figure
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
