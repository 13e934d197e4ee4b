"""Transcriptions over HTTP, with nobody working: what is queued stays as it is until we look."""

from __future__ import annotations

import asyncio
import json
import re
from datetime import UTC, datetime
from urllib.parse import quote

import psycopg
import pytest

from ecluse.flows.transcriptions import surface as shapes
from tests.support.api_server import add_connections, add_tenant, new_key
from tests.support.fiche_rows import call, details, save
from tests.support.loop_probe import probing

EARLY, LATE = "2026-03-02T09:00:00Z", "2026-03-02T10:00:00Z"
TRANSCRIBE = """
UPDATE recordings SET has_transcription = true, transcription_id = 't', transcription_text = 'Bonjour.',
    transcribed_at = ecluse_now(), transcription_data = %s::jsonb WHERE call_id = %s
"""
END = """
UPDATE runs SET state = 'failed', status = 'failed', ended_at = ecluse_now(), end_cause = 'operator', selected = 0,
    successful = 0, failed = 0, ignored = 0 WHERE id = %s
"""


@pytest.fixture(scope="module")
def fiches(shared_dsn):
    """Of `default`: 10 of group A and user 7, with three recordings; 11 of group B and user 8."""
    add_tenant(shared_dsn, "acme")
    recordings = [call("never", " "), call("late", start_time=LATE), call("early", start_time=EARLY)]

    async def fill() -> None:
        async with await psycopg.AsyncConnection.connect(shared_dsn, autocommit=True) as c:
            await save(c, ("10", details(*recordings)), ("11", details(call("x"), groupe="B", user="8")))
            await c.execute(TRANSCRIBE, (None, "early"))
            await c.execute(TRANSCRIBE, ('{"text": "Bonjour.", "words": [{"text": "Bonjour."}]}', "x"))

    asyncio.run(fill())


@pytest.fixture(scope="module")
def ask(shared_dsn):
    def ask(sql, *parameters):
        with psycopg.connect(shared_dsn, autocommit=True) as connection:
            cursor = connection.execute(sql, parameters or None)
            return cursor.fetchall() if cursor.description else []

    return ask


def narrow(client, dsn, scope, groupes=(), user=None, role="operator"):
    key = new_key(dsn, role)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "UPDATE api_keys SET scope = %s, groupes = %s, crm_user_id = %s WHERE hint = %s",
            (scope, list(groupes), user, key[:8]),
        )
    return client.with_key(key)


@pytest.mark.req("TRX-02", "TRX-06", "TRX-08", "TRX-19", "TRX-57", "TRX-95", "G-34")
def test_a_click_is_queued_and_the_next_is_told_of_the_same_run(shared_api, fiches, ask):
    first = shared_api.post("/api/transcriptions/500?priority=high")
    queued = shapes.Queued.model_validate(first.json)
    assert (first.status, queued.fiche_id, queued.attached) == (200, "500", False)
    assert re.fullmatch(r"transcribe-500-[0-9]{13}", queued.event_id)
    (row,) = ask("SELECT id::text, event_key, input, correlation_id FROM runs WHERE event_key = %s", queued.event_id)
    assert row[0] == queued.run_id
    assert row[2] == {"fiche_id": "500", "priority": "high", "wait_for_completion": False, "refresh": True}
    assert row[3] == first.headers["X-Request-Id"]
    again = shapes.Queued.model_validate(shared_api.post("/api/transcriptions/500").json)
    assert (again.run_id, again.attached) == (queued.run_id, True)
    assert again.event_id != queued.event_id
    # The remedy for a fiche that looks stuck is to ask again: no lock need be touched.
    ask(END, queued.run_id)
    ask("UPDATE leases SET ended_at = ecluse_now(), end_cause = 'run ended' WHERE run_id = %s", queued.run_id)
    third = shapes.Queued.model_validate(shared_api.post("/api/transcriptions/500").json)
    assert (third.attached, third.run_id != queued.run_id) == (False, True)


def test_clicks_of_the_same_millisecond_have_different_names(shared_api, fiches, ask):
    shared_api.post("/api/transcriptions/501")
    ask("UPDATE transcription_requests SET last_ms = 4102444800000 WHERE fiche_id = '501'")
    names = [shared_api.post("/api/transcriptions/501").json["event_id"] for _ in range(3)]
    assert names == [f"transcribe-501-{4102444800000 + n}" for n in (1, 2, 3)]


@pytest.mark.req("G-81")
@pytest.mark.parametrize("fiche_id", ["%20", "a%00", "1" * 201, "%20x"])
def test_what_cannot_be_an_id_is_no_fiche(shared_api, fiches, fiche_id):
    for answer in (
        shared_api.post(f"/api/transcriptions/{fiche_id}"),
        shared_api.get(f"/api/transcriptions/{fiche_id}/status"),
        shared_api.get(f"/api/transcriptions/{fiche_id}/logs"),
        shared_api.get(f"/api/transcriptions/{fiche_id}/recordings/x"),
    ):
        assert (answer.status, answer.code) == (404, "NOT_FOUND")


@pytest.mark.req("G-81")
@pytest.mark.parametrize("fiche_id", ["A-17", "FR/9", "9/status", "Né: 3", "x" * 200, "a-retry-1", "100%"])
def test_a_fiche_is_whatever_the_crm_calls_it(shared_api, fiches, ask, fiche_id):
    path = f"/api/transcriptions/{quote(fiche_id, safe='')}"
    queued = shared_api.post("/api/transcriptions/batch", {"fiche_ids": [fiche_id, fiche_id]})
    (row,) = queued.json["fiches"]
    assert (row["fiche_id"], row["deduplicated"], queued.json["folded"]) == (fiche_id, False, 1)
    again = shared_api.post(path)
    if "/" in fiche_id:  # may as well be meant as the path of something else
        assert again.status in (404, 405)
    else:
        assert (again.status, again.json["run_id"], again.json["attached"]) == (200, row["run_id"], True)
    status = shared_api.get(f"{path}/status")
    assert (status.status, status.json["fiche_id"], status.json["activeRun"]) == (200, fiche_id, row["run_id"])
    assert shared_api.get(f"{path}/logs").status == 200
    assert ask("SELECT input->>'fiche_id' FROM runs WHERE id = %s", row["run_id"]) == [(fiche_id,)]


def test_a_body_that_nobody_would_read_is_refused(shared_api, fiches, ask):
    refused = shared_api.post("/api/transcriptions/599", {"priority": "high"})
    assert (refused.status, "?priority=" in refused.json["error"]["message"]) == (422, True)
    assert ask("SELECT 1 FROM runs WHERE input->>'fiche_id' = '599'") == []
    assert shared_api.post("/api/transcriptions/599", {}).status == 200


@pytest.mark.req("G-77")
def test_a_priority_that_there_is_not_is_a_bad_request(shared_api, fiches, ask):
    single = shared_api.post("/api/transcriptions/502?priority=urgent")
    batch = shared_api.post("/api/transcriptions/batch", {"fiche_ids": ["502"], "priority": "urgent"})
    assert [(answer.status, answer.code) for answer in (single, batch)] == [(400, "INVALID_PRIORITY")] * 2
    assert ask("SELECT count(*) FROM runs WHERE input->>'fiche_id' = '502'") == [(0,)]
    shared_api.post("/api/transcriptions/502")
    assert ask("SELECT input->>'priority' FROM runs WHERE input->>'fiche_id' = '502'") == [("normal",)]


def test_a_repeated_request_gets_the_first_ones_answer(shared_api, fiches, ask):
    key = {"Idempotency-Key": "once"}
    first, second = (shared_api.post("/api/transcriptions/503", headers=key) for _ in range(2))
    assert first.json == second.json
    assert second.headers["Idempotent-Replay"] == "true"
    assert ask("SELECT requests FROM transcription_requests WHERE fiche_id = '503'") == [(1,)]


@pytest.mark.req("TRX-32", "G-88")
def test_the_fifty_first_request_in_a_minute_is_told_when_to_come_back(shared_api, fiches, ask):
    shared_api.post("/api/transcriptions/504")
    ask("UPDATE transcription_requests SET requests = 49 WHERE fiche_id = '504'")
    assert shared_api.post("/api/transcriptions/504").status == 200
    for refused in (
        shared_api.post("/api/transcriptions/504"),
        shared_api.post("/api/transcriptions/batch", {"fiche_ids": ["505", "504"]}),
    ):
        assert (refused.status, refused.code) == (429, "RATE_LIMITED")
        assert 1 <= int(refused.headers["Retry-After"]) <= 60
        assert "504" in refused.json["error"]["message"]
    assert ask("SELECT count(*) FROM runs WHERE input->>'fiche_id' = '505'") == [(0,)]
    ask("UPDATE transcription_requests SET minute = minute - interval '1 minute' WHERE fiche_id = '504'")
    assert shared_api.post("/api/transcriptions/504").status == 200
    assert ask("SELECT requests FROM transcription_requests WHERE fiche_id = '504'") == [(1,)]


@pytest.mark.req("TRX-09", "TRX-10", "TRX-11", "G-19")
def test_a_batch_says_of_each_fiche_what_became_of_it(shared_api, fiches, ask):
    wanted = {"fiche_ids": ["600", "601"], "priority": "low"}
    day = datetime.now(UTC).date().isoformat()
    first = shapes.BatchAnswer.model_validate(shared_api.post("/api/transcriptions/batch", wanted).json)
    assert [(one.fiche_id, one.deduplicated) for one in first.fiches] == [("600", False), ("601", False)]
    assert all(re.fullmatch(r"transcribe-60[01]-[0-9]{4}-[0-9]{2}-[0-9]{2}", one.event_id) for one in first.fiches)
    assert first.fiches[0].event_id[-10:] >= day
    ask(END, first.fiches[0].run_id)
    ask("UPDATE leases SET ended_at = ecluse_now(), end_cause = 'run ended' WHERE run_id = %s", first.fiches[0].run_id)
    again = shapes.BatchAnswer.model_validate(shared_api.post("/api/transcriptions/batch", wanted).json)
    assert (again.queued, again.deduplicated) == (1, 1)
    today = datetime.now(UTC).date().isoformat()  # a day is as long as its midnight is not passed
    assert again.fiches[0].event_id in (f"{first.fiches[0].event_id}-retry-1", f"transcribe-600-{today}")
    assert again.fiches[1].model_dump() == {**first.fiches[1].model_dump(), "deduplicated": True}


def test_ids_that_are_doubled_in_a_batch_are_folded_and_counted(shared_api, fiches, ask):
    answer = shared_api.post("/api/transcriptions/batch", {"fiche_ids": ["710", "711", "710", "710"]})
    told = shapes.BatchAnswer.model_validate(answer.json)
    assert (told.queued, told.deduplicated, told.folded) == (2, 0, 2)
    assert [one.fiche_id for one in told.fiches] == ["710", "711"]
    assert ask("SELECT count(*) FROM runs WHERE input->>'fiche_id' IN ('710', '711')") == [(2,)]


@pytest.mark.req("TRX-09", "G-34")
@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"fiche_ids": []}, "fiche_ids"),
        ({"fiche_ids": [str(n) for n in range(10_001)]}, "fiche_ids"),
        ({"fiche_ids": ["700", "x7 ", "701"]}, "'x7 '"),
        ({"fiche_ids": [700]}, "fiche_ids"),
        ({"fiche_ids": ["700"], "when": "now"}, "when"),
        ({}, "fiche_ids"),
    ],
    ids=["none", "too many", "no ids", "not text", "unknown field", "nothing"],
)
def test_a_batch_with_anything_wrong_in_it_queues_nothing(shared_api, fiches, ask, body, named):
    refused = shared_api.post("/api/transcriptions/batch", body)
    assert (refused.status, refused.code) == (422, "INVALID_INPUT")
    assert named in str(refused.json)
    assert ask("SELECT count(*) FROM runs WHERE input->>'fiche_id' IN ('700', '701')") == [(0,)]


@pytest.mark.req("TRX-20", "TRX-21")
def test_whoever_is_limited_to_some_fiches_can_neither_queue_nor_see_others(shared_api, shared_dsn, fiches, ask):
    mine = narrow(shared_api, shared_dsn, "GROUP", groupes=["A"]), narrow(shared_api, shared_dsn, "SELF", user="7")
    for client in mine:
        assert client.post("/api/transcriptions/10").status == 200
        assert client.get("/api/transcriptions/10/status").status == 200
        assert client.get("/api/transcriptions/10/logs").status == 200
        assert client.get("/api/transcriptions/10/recordings/early").status == 200
        for fiche_id in ("11", "999"):  # somebody else's, and nobody's
            for answer in (
                client.post(f"/api/transcriptions/{fiche_id}"),
                client.post("/api/transcriptions/batch", {"fiche_ids": ["10", fiche_id]}),
                client.get(f"/api/transcriptions/{fiche_id}/status"),
                client.get(f"/api/transcriptions/{fiche_id}/logs"),
                client.get(f"/api/transcriptions/{fiche_id}/recordings/x"),
            ):
                assert (answer.status, answer.code) == (403, "SCOPE")
    viewer = narrow(shared_api, shared_dsn, "GROUP", groupes=["A"], role="viewer")
    assert viewer.get("/api/transcriptions/10/status").status == 200
    assert viewer.post("/api/transcriptions/10").code == "FORBIDDEN"
    assert shared_api.with_key(None).get("/api/transcriptions/10/status").status == 401
    assert ask("SELECT count(*) FROM runs WHERE input->>'fiche_id' IN ('11', '999')") == [(0,)]


@pytest.mark.req("TRX-12", "TRX-14", "TRX-94", "G-23", "G-88")
def test_the_status_shows_coverage_recordings_by_start_and_the_run(shared_api, fiches, ask):
    ask("DELETE FROM transcription_requests")
    run_id = shared_api.post("/api/transcriptions/10").json["run_id"]
    answer = shared_api.get("/api/transcriptions/10/status")
    status = shapes.Status.model_validate(answer.json)
    assert (status.known, status.total, status.transcribed, status.pending, status.percentage) == (True, 3, 1, 2, 33)
    assert [(one.call_id, one.url_missing, one.state) for one in status.recordings] == [
        ("early", False, "transcribed"),
        ("late", False, "not_tried"),
        ("never", True, "not_tried"),
    ]
    assert "URL" in status.recordings[2].reason
    assert (status.activeRun, status.run.id, status.run.phase) == (run_id, run_id, "refresh")
    assert status.run.waiting_for.startswith("no worker")
    assert (status.lock.key, status.lock.run_id) == ("lock:transcription:fiche:10", run_id)
    assert (status.processed, status.failed, status.target_total) == (0, 0, None)


@pytest.mark.req("G-23")
def test_a_fiche_that_was_never_heard_of_has_no_status_and_one_that_was_just_asked_for_has(shared_api, fiches):
    for part in ("status", "logs", "recordings/x"):
        assert shared_api.get(f"/api/transcriptions/999/{part}").code == "NOT_FOUND"
    shared_api.post("/api/transcriptions/510")
    status = shared_api.get("/api/transcriptions/510/status").json
    assert (status["known"], status["total"], status["pending"], status["percentage"]) == (False, None, None, None)
    assert (status["recordings"], status["details"]) == ([], "missing")
    assert status["activeRun"]


def test_another_tenant_has_its_own_fiches_under_the_same_numbers(shared_api, shared_dsn, fiches):
    add_connections(shared_dsn, "acme")
    acme = shared_api.with_key(new_key(shared_dsn, tenant="acme"))
    for part in ("status", "logs", "recordings/early"):
        assert acme.get(f"/api/transcriptions/10/{part}").status == 404
    theirs, ours = acme.post("/api/transcriptions/520").json, shared_api.post("/api/transcriptions/520").json
    assert not theirs["attached"]
    assert not ours["attached"]
    assert theirs["run_id"] != ours["run_id"]


@pytest.mark.alone
def test_a_transcript_of_hours_does_not_hold_the_loop(shared_api, fiches, ask):
    spoken = {"type": "word", "speaker_id": "speaker_0", "logprob": -0.125}
    words = [{"text": "Bonjour", "start": n * 0.5, "end": n * 0.5 + 0.25, **spoken} for n in range(60_000)]
    said = {"text": "Bonjour.", "words": words}
    ask("UPDATE recordings SET transcription_data = %s::jsonb WHERE call_id = 'late'", json.dumps(said))
    with probing(shared_api) as held:
        answer = shared_api.get("/api/transcriptions/10/recordings/late")
    ask("UPDATE recordings SET transcription_data = NULL WHERE call_id = 'late'")
    assert answer.json["transcription"] == said
    print(f"{len(answer.body)} bytes: the loop was held for {held.longest * 1000:.0f} ms")
    assert held.longest < 0.08  # parsed and encoded in one piece each: 0.13


@pytest.mark.req("TRX-18", "G-34")
def test_a_transcript_is_shown_with_its_words_where_they_were_kept(shared_api, fiches):
    text = shapes.TranscriptAnswer.model_validate(shared_api.get("/api/transcriptions/10/recordings/early").json)
    assert (text.transcription, text.transcription_id) == ({"text": "Bonjour.", "words": []}, "t")
    words = shapes.TranscriptAnswer.model_validate(shared_api.get("/api/transcriptions/11/recordings/x").json)
    assert words.transcription["words"] == [{"text": "Bonjour."}]
    for missing in ("late", "nothing"):
        assert shared_api.get(f"/api/transcriptions/10/recordings/{missing}").code == "NOT_FOUND"


LOG = """
INSERT INTO workflow_logs (created_at, tenant_id, workflow, entity_type, entity_id, run_id, trace_id, level, message)
VALUES (%s, %s, %s, 'fiche', %s, 1, %s, %s, %s)
"""


@pytest.mark.req("TRX-16", "TRX-92", "G-33")
def test_log_lines_are_those_of_the_fiche_the_run_the_level_and_the_time_asked_for(shared_api, fiches, ask):
    at = [datetime(2026, 3, 2, hour, tzinfo=UTC) for hour in range(5)]
    ask(LOG, at[3], "default", "transcription", "10", "71", "error", "third")
    ask(LOG, at[1], "default", "transcription", "10", "71", "info", "first")
    ask(LOG, at[2], "default", "transcription", "10", "72", "info", "second")
    ask(LOG, at[2], "acme", "transcription", "10", "71", "info", "somebody else's")
    ask(LOG, at[2], "default", "automation", "10", "71", "info", "of another flow")
    ask(LOG, at[2], "default", "transcription", "11", "71", "info", "of another fiche")

    def lines(query=""):
        page = shapes.LOGS.page.model_validate(shared_api.get(f"/api/transcriptions/10/logs{query}").json)
        return [line.message for line in page.logs]

    assert lines() == ["first", "second", "third"]
    assert lines("?run_id=71") == ["first", "third"]
    assert lines("?level=error") == ["third"]
    assert lines("?since=2026-03-02T02:00:00Z") == ["second", "third"]
    assert lines("?until=2026-03-02T02:00:00") == ["first"]
    assert lines("?limit=1&offset=1") == ["second"]
    for wrong in ("level=loud", "since=yesterday", "limit=201", "limit=0", "offset=-1"):
        assert shared_api.get(f"/api/transcriptions/10/logs?{wrong}").status == 422
