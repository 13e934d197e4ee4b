"""`ecluse transcriptions`: queue and look, for whoever sits at the machine."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, date, datetime

import psycopg
import pytest

from ecluse.flows.fiches.cache import cache_sales
from tests.support.fiche_rows import call, details, save


@pytest.fixture
def fiche(dsn):
    async def fill() -> None:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            await save(connection, ("171", details(call("never", ""), call("some"))))

    asyncio.run(fill())


def test_a_fiche_is_queued_once_and_the_second_is_told_of_the_run(ecluse, fiche, query):
    first = ecluse("transcriptions", "start", "171", "--priority", "high").json
    second = ecluse("transcriptions", "start", "171").json
    assert (first["attached"], second["attached"], first["run_id"]) == (False, True, second["run_id"])
    assert query("SELECT input->>'priority' FROM runs") == [("high",)]
    # Nobody has asked the CRM yet: nothing is known to be complete.
    check = "SELECT payload->'is_complete', payload->'total_recordings' FROM events_outbox WHERE event_type = %s"
    assert query(check, "transcription.status_check") == [(False, None)]
    lines = [json.loads(line) for line in ecluse("transcriptions", "batch", "172", "171").out.splitlines()]
    assert [(line["fiche_id"], line["attached"]) for line in lines] == [("172", False), ("171", True)]
    for wrong in (("start", " "), ("start", "7", "--tenant", "nobody")):
        assert ecluse("transcriptions", *wrong).code == 2
    folded = ecluse("transcriptions", "batch", "F-1", "2", "F-1")
    assert [json.loads(line)["fiche_id"] for line in folded.out.splitlines()] == ["F-1", "2"]
    assert "1 duplicate ids ignored" in folded.err


@pytest.mark.req("TRX-93")
def test_an_operator_sees_how_it_stands_with_a_fiche(ecluse, fiche, query):
    run_id = ecluse("transcriptions", "start", "171").json["run_id"]
    shown = ecluse("transcriptions", "status", "171").out.splitlines()
    assert shown[0] == "0 of 2 transcribed (0 %)"
    assert shown[1].startswith(f"run {run_id} running (refresh)")
    assert "no worker" in shown[2]
    assert [line.split()[:2] for line in shown[3:]] == [["never", "not_tried"], ["some", "not_tried"]]
    told = ecluse("transcriptions", "status", "171", "--json").json
    assert (told["activeRun"], told["lock"]["key"]) == (run_id, "lock:transcription:fiche:171")
    assert ecluse("transcriptions", "status", "999").code == 2
    assert "WORKFLOW_LOG_DB_ENABLED" in ecluse("transcriptions", "logs", "171").out


@pytest.mark.req("TRX-93")
def test_of_a_run_that_failed_before_its_plan_nothing_is_said_but_why(ecluse):
    run_id = ecluse("transcriptions", "start", "4711").json["run_id"]
    assert ecluse("runs", "end", run_id, "--reason", "a wrong number", "--yes").code == 0
    assert ecluse("transcriptions", "status", "4711").out.splitlines() == [
        "not fetched from the CRM yet: its recordings are unknown",
        f"run {run_id} failed (ended): ended before its recordings were known",
        "  a wrong number",
    ]


@pytest.mark.req("G-23")
def test_of_a_fiche_that_is_only_listed_or_gone_no_percentage_is_told(ecluse, dsn):
    async def fill() -> None:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            rows = [{"id": "172", "groupe": "A", "data": {"id": "172"}}]
            await cache_sales(connection, "default", {date(2026, 3, 2): rows}, datetime.now(UTC))
            await save(connection, ("173", None), ("174", details()))

    asyncio.run(fill())
    said = {fiche: ecluse("transcriptions", "status", fiche).out.splitlines() for fiche in ("172", "173", "174")}
    assert said == {
        "172": ["not fetched from the CRM yet: its recordings are unknown"],
        "173": ["the CRM does not know this fiche (404)"],
        "174": ["0 of 0 transcribed (100 %)"],
    }


@pytest.mark.req("TRX-26")
def test_the_doctor_says_what_is_unset_where_somebody_has_begun_to_set_it_up(ecluse):
    found = {one["what"]: one for one in ecluse("doctor", "--json").json["findings"]}
    assert found["transcription"]["level"] == "ok"
    begun = ecluse("doctor", "--json", CRM_BASE_URL="http://crm.test", CRM_API_KEY="key").json["findings"]
    (lacks,) = [one for one in begun if one["what"] == "transcription"]
    assert lacks["level"] == "warn"
    assert "ELEVENLABS_API_KEY" in lacks["says"]
