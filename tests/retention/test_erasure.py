"""Erasure of a fiche, over everything that a day of work leaves: content is gone from every table, facts add up."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from ecluse.access.envelope import Refused
from ecluse.base.errors import NotFound
from ecluse.engine import Event
from ecluse.flows.automation import erasure
from ecluse.flows.automation.queries import list_fiches
from ecluse.flows.transcriptions.start import start
from ecluse.notify.dispatch import Recipient, notify
from ecluse.notify.flow import working
from ecluse.retention import erasure as engine_erasing
from ecluse.retention.pace import Pace
from ecluse.verify import audit
from tests.support.notify_world import new_secrets, receiving, setup_of
from tests.support.transcription_world import ONE_BLANK, until

PUBLISHED = "SELECT count(*) FROM events_outbox WHERE published_seq IS NULL"
OPEN = "SELECT count(*) FROM runs WHERE ended_at IS NULL"
TABLES = """
SELECT table_schema || '.' || table_name FROM information_schema.tables
WHERE table_schema IN ('public', 'dbos') AND table_type = 'BASE TABLE'
"""
# A word of the fiche's content in every place that may hold some: what nobody should find afterwards.
PLANT = """
UPDATE fiche_cache SET raw_data = jsonb_build_object('name', %(word)s) WHERE fiche_id = %(fiche)s;
UPDATE fiche_cache_information SET data = data || jsonb_build_object('phone', %(word)s)
    WHERE fiche_cache_id = (SELECT id FROM fiche_cache WHERE fiche_id = %(fiche)s);
UPDATE recordings SET transcription_text = transcription_text || ' ' || %(word)s, recording_url = %(word)s
    WHERE fiche_cache_id = (SELECT id FROM fiche_cache WHERE fiche_id = %(fiche)s);
UPDATE speech_results SET text = text || ' ' || %(word)s WHERE call_id LIKE %(fiche)s || '-%%';
UPDATE audits SET result = result || jsonb_build_object('quote', %(word)s)
    WHERE fiche_id = %(fiche)s AND result IS NOT NULL;
UPDATE items SET payload = jsonb_build_object('said', %(word)s), result = jsonb_build_object('said', %(word)s),
    error = %(word)s WHERE %(fiche)s IN (key, target) OR key LIKE %(fiche)s || '-%%';
UPDATE outcomes SET reason = %(word)s WHERE target = %(fiche)s OR target LIKE %(fiche)s || '-%%';
UPDATE runs SET reason = %(word)s, error_message = %(word)s, error_details = jsonb_build_object('said', %(word)s)
    WHERE input ->> 'fiche_id' = %(fiche)s;
UPDATE run_log SET data = jsonb_build_object('said', %(word)s) WHERE run_id IN (
    SELECT run_id FROM transcription_runs WHERE fiche_id = %(fiche)s);
INSERT INTO run_log (run_id, at, level, message, event_id, data)
    SELECT run_id, now(), 'error', %(word)s, 'automation-' || run_id || '-fetch-' || %(fiche)s, NULL::jsonb
    FROM automation_run_facts
    UNION ALL SELECT run_id, now(), 'warning', 'fiche ' || %(fiche)s || ': ' || %(word)s, NULL, NULL
    FROM automation_run_facts;
INSERT INTO run_log (run_id, at, level, message, event_id, count, targets)
    SELECT run_id, now(), 'error', 'NO: ' || %(word)s, NULL, 1, ARRAY[%(fiche)s] FROM automation_run_facts
    UNION ALL SELECT run_id, now(), 'error', 'fiche ' || %(fiche)s || ' and others: ' || %(word)s, NULL, 3,
        ARRAY['2', %(fiche)s, '3'] FROM automation_run_facts;
INSERT INTO run_log (run_id, at, level, message, data)
    SELECT run_id, now(), 'warning', 'Transcription failed', jsonb_build_object('fiches', 2, 'sample',
        jsonb_build_array(%(fiche)s || ': ' || %(word)s, '3000: another', %(fiche)s)) FROM automation_run_facts
    UNION ALL SELECT run_id, now(), 'error', 'Automation run failed',
        jsonb_build_object('failed_fiches', 1, 'error', 'fiche ' || %(fiche)s || ': ' || %(word)s)
    FROM automation_run_facts;
UPDATE automation_run_facts SET result_summary = result_summary
    || jsonb_build_object('said about ' || %(fiche)s, 'fiche ' || %(fiche)s || ': ' || %(word)s) WHERE %(whole)s;
UPDATE events_outbox SET payload = payload || jsonb_build_object('error', 'fiche ' || %(fiche)s || ': ' || %(word)s)
    WHERE event_type = 'automation.run.completed' AND %(whole)s;
UPDATE lanes SET last_failure = 'fiche ' || %(fiche)s || ': ' || %(word)s WHERE name = %(lane)s;
INSERT INTO attempts (run_id, item_id, event_id, round, execution, at, replica_id, error_code, error, ambiguous,
                      maybe_paid)
    SELECT run_id, id, flow || '-' || run_id || '-' || stage || '-' || key, round, 0, now(), 'r', 'WORKER_CRASHED',
           %(word)s, true, true
    FROM items WHERE %(fiche)s IN (key, target) OR key LIKE %(fiche)s || '-%%';
UPDATE events_outbox SET payload = payload || jsonb_build_object('reason', %(word)s)
    WHERE payload ->> 'fiche_id' = %(fiche)s;
UPDATE deliveries SET message = jsonb_set(message, '{data,reason}', to_jsonb(%(word)s::text))
    WHERE message -> 'data' ->> 'fiche_id' = %(fiche)s;
INSERT INTO workflow_logs (created_at, tenant_id, workflow, entity_type, entity_id, run_id, level, message)
    SELECT now(), 'default', 'transcription', 'fiche', %(fiche)s, run_id, 'info', %(word)s FROM transcription_runs
    WHERE fiche_id = %(fiche)s
    UNION ALL SELECT now(), 'default', 'automation', 'automation_run', run_id::text, run_id, 'info',
        'fiche ' || %(fiche)s || ' ' || %(word)s FROM automation_run_facts;
"""


def planted(dsn: str, fiche: str, word: str) -> None:
    """Around the guards, which are for the program."""
    with psycopg.ClientCursor(psycopg.connect(dsn)) as cursor:
        cursor.execute("SELECT DISTINCT tgrelid::regclass::text FROM pg_trigger WHERE NOT tgisinternal")
        guarded = [row[0] for row in cursor.fetchall()]
        for table in guarded:
            cursor.execute(f"ALTER TABLE {table} DISABLE TRIGGER USER")
        # One text for all fiches goes as a whole: it is planted for one of them only.
        whole = fiche == "1000"
        cursor.execute(PLANT, {"fiche": fiche, "word": word, "lane": "crm" if whole else "llm", "whole": whole})
        for table in guarded:
            cursor.execute(f"ALTER TABLE {table} ENABLE TRIGGER USER")
        cursor.connection.commit()
        cursor.connection.close()


def found(query: Any, word: str) -> dict[str, int]:
    """Rows that have the word anywhere, by table."""
    tables = [row[0] for row in query(TABLES)]
    counts = {table: query(f"SELECT count(*) FROM {table} t WHERE t::text LIKE %s", f"%{word}%") for table in tables}  # noqa: S608
    return {table: rows[0][0] for table, rows in counts.items() if rows[0][0]}


@pytest.fixture
async def day(automate, connection, query, dsn):
    """One run over three fiches, one of which fails, and deliveries about one of them; a transcription by hand."""
    async with receiving() as receiver:
        world = await automate(working(setup_of(dsn, new_secrets())))
        await world.config()
        run = await world.ended(await world.trigger(await world.schedule("1000", "1001", ONE_BLANK)))
        assert run["status"] == "partial"
        (alone,) = await start(connection, world.kit.by_name["transcription"], "default", ["1000"], event_ids=["again"])
        about = Event("default", "told", "fiche/transcribed", f"run:{alone.run_id}", {"fiche_id": "1000"}, "c")
        words = {"run_id": str(run["id"]), "error": "fiche 1000: TOLD-99"}
        shared = Event("default", "told too", "automation/failed", f"run:{run['id']}", words, "c")
        async with connection.transaction():
            for event in (about, shared):
                await notify(connection, [Recipient("webhook", receiver.url)], event)
        await until(lambda: query(PUBLISHED) == [(0,)] and query(OPEN) == [(0,)])
        await world.kit.stop()
        yield world, run["id"]


@pytest.mark.req("G-71")
async def test_nothing_of_an_erased_fiche_is_found_anywhere_and_the_facts_add_up(day, connection, query, dsn):
    world, run = day
    said = query("SELECT transcription_id FROM recordings WHERE call_id = '1000-1'")[0][0]
    planted(dsn, "1000", "PLANTED-42")
    planted(dsn, "1001", "SPARED-17")
    before, others = found(query, "PLANTED-42"), found(query, "SPARED-17")
    holding = {"fiche_cache", "fiche_cache_information", "recordings", "speech_results", "audits", "items", "outcomes"}
    holding |= {"runs", "run_log", "attempts", "events_outbox", "deliveries", "workflow_logs", "lanes"}
    holding |= {"automation_run_facts"}
    assert {table.removeprefix("public.") for table in before} == holding
    outcomes = query("SELECT target, outcome, error_code FROM outcomes WHERE run_id = %s ORDER BY 1", run)
    subject = await erasure.find(connection, "default", "1000")
    assert (subject.shared, len(subject.runs), len(subject.deliveries), len(subject.calls)) == ([run], 2, 2, 1)
    foreseen = await erasure.foresee(connection, subject)
    assert found(query, "PLANTED-42") == before, "a look changes nothing"
    async with connection.transaction():
        done = await erasure.erase(connection, subject)
    assert done == foreseen
    assert (done["fiche"], done["audits"], done["recordings and transcripts"]) == (1, 1, 1)
    assert [found(query, word) for word in ("PLANTED-42", "TOLD-99", said)] == [{}, {}, {}]
    assert found(query, "SPARED-17") == others
    assert query("SELECT target, outcome, error_code FROM outcomes WHERE run_id = %s ORDER BY 1", run) == outcomes
    assert query("SELECT targets, message FROM run_log WHERE count = 3 ORDER BY id") == [
        (["2", "3"], "[erased]"), (["2", "1001", "3"], "fiche 1001 and others: SPARED-17"),
    ]  # fmt: skip
    assert query("SELECT data FROM run_log WHERE message LIKE '%% failed' ORDER BY id") == [
        ({"fiches": 2, "sample": ["1000: [erased]", "3000: another", "1000"]},),
        ({"failed_fiches": 1},),
        ({"fiches": 2, "sample": ["1001: SPARED-17", "3000: another", "1001"]},),
        ({"failed_fiches": 1, "error": "fiche 1001: SPARED-17"},),
    ]
    report = audit(dsn, world.sandbox.url)
    assert report.violations == [], report.text()
    # Once more there is nothing to do; the runs can still be looked at.
    assert not any((await erasure.foresee(connection, await erasure.find(connection, "default", "1000"))).values())
    shown = {row["fiche_id"]: row for row in await list_fiches(connection, "default", run, limit=10, offset=0)}
    assert (shown["1000"]["status"], shown["1000"]["details"]) == ("successful", "missing")


async def test_a_fiche_of_an_open_run_is_not_erased_and_the_run_is_named(world, connection, query):
    transcribing = await world()
    await transcribing.pause()
    (started,) = await transcribing.start("9000")
    await until(lambda: query("SELECT count(*) FROM items WHERE stage = 'recordings'") == [(5,)])
    subject = await erasure.find(connection, "default", "9000")
    with pytest.raises(Refused) as refused:
        async with connection.transaction():
            await erasure.erase(connection, subject)
    assert f"({started.run_id})" in refused.value.message
    assert query("SELECT count(*) FROM recordings") == [(5,)]
    with pytest.raises(NotFound):
        await erasure.find(connection, "default", "9001")


async def test_a_fiche_whose_call_outlived_its_run_is_not_erased(world, connection, query):
    transcribing = await world()
    await transcribing.ended((await transcribing.start("9000"))[0])
    query(
        "INSERT INTO leases (tenant_id, key, fence, owner, ttl, acquired_at, expires_at)"
        " VALUES ('default', %s, 99, 'host-1', '30 s', now(), now())",
        "lock:transcription:recording:9000:9000-1",
    )
    with pytest.raises(Refused, match="in flight"):
        async with connection.transaction():
            await erasure.erase(connection, await erasure.find(connection, "default", "9000"))
    assert query("SELECT count(*) FROM recordings") == [(5,)]


async def test_a_tenant_whose_runs_cannot_be_deleted_is_told_why(connection, query, dsn):
    run = """
        INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, created_at, selected, successful,
            failed, ignored, end_cause, ended_at)
        VALUES ('default', 'f', 'open', false, 'running', 'running', now(), 0, NULL, NULL, NULL, NULL, NULL),
               ('default', 'f', 'over', false, 'completed', 'succeeded', now(), 0, 0, 0, 0, 'normal', now())"""
    query(run)

    async def deleted() -> None:
        await engine_erasing.delete_tenant(connection, {}, "default", (), Pace(rest=0))

    with pytest.raises(engine_erasing.Stuck, match="are open, such as 1:"):
        await deleted()
    assert query("SELECT id FROM runs") == [(1,)], "what can be deleted is"
    query("UPDATE runs SET status = 'completed', state = 'succeeded', successful = 0, failed = 0, ignored = 0,"
          " end_cause = 'normal', ended_at = now()")  # fmt: skip
    with psycopg.connect(dsn) as other:
        other.execute("SELECT 1 FROM runs FOR UPDATE")
        with pytest.raises(engine_erasing.Stuck, match="locked by another session, such as 1:"):
            await deleted()
    await deleted()
    assert query("SELECT count(*) FROM runs") == [(0,)]
