"""The story of a transcription as its lines tell it: in the log, in the database, in a file per run."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from structlog.testing import capture_logs

from ecluse.base import trace
from ecluse.base.clock import Clock
from ecluse.base.trace_files import TraceFiles, TraceFolder
from ecluse.bootstrap import Lacking, lacking, load_flows, trace_files, transcription_config, vendor_setup
from ecluse.settings import Settings
from ecluse.vendors.elevenlabs import Speech
from tests.support.transcription_world import until


def said(lines, area, ids):
    return [f"{one['verb']} {one['event']}" for one in lines if (one.get("area"), one.get("ids")) == (area, ids)]


@pytest.mark.req("TRX-88", "TRX-89", "TRX-90", "TRX-91", "G-87")
async def test_each_function_logs_what_it_does_under_the_ids_of_fiche_and_call(world):
    w = await world()
    with capture_logs() as lines:
        await w.transcribe("1001")
        await until(lambda: len(w.emitted("recording_completed")) == 2)
    fiche = said(lines, "TRANSCRIPTION", "1001")
    assert fiche == [
        "START: transcribe-fiche",
        "STEP: force-refresh-fiche",
        "DONE: force-refresh-fiche",
        "FAN-OUT: transcription/recording.transcribe x2",
        "END: enqueued",
        "END: completed",
    ]
    for n in (1, 2):
        assert said(lines, "TX-WORKER", f"1001/1001-{n}") == [
            "START: transcribe-recording",
            "DONE: recording-lock",
            "STEP: speech-to-text",
            "DONE: speech-to-text",
            "DONE: update-recording-transcription",
        ]
        assert said(lines, "TX-FINALIZER", f"1001/1001-{n}")[0] == "START: finalize-recording"
    by_verb = {(one.get("verb"), one["event"]): one for one in lines}
    start = by_verb["START:", "transcribe-fiche"]
    assert (start["priority"], start["wait_for_completion"]) == ("normal", False)
    assert by_verb["FAN-OUT:", "transcription/recording.transcribe x2"]["call_ids"] == ["1001-1", "1001-2"]
    assert by_verb["DONE:", "speech-to-text"]["duration_ms"] >= 0
    worker = by_verb["START:", "transcribe-recording"]
    assert worker["url"].endswith(".mp3?***")
    assert {one["index"] for one in lines if one["event"] == "transcribe-recording"} == {1, 2}
    assert by_verb["START:", "finalize-recording"]["ok"] is True
    assert ("STEP:", "All recordings processed! Finalizing run...") in by_verb
    assert not [one for one in lines if "redis" in str(one).lower()]
    assert "Signature=" not in str([one for one in lines if one.get("area", "").startswith("T")])


@pytest.mark.req("TRX-90")
async def test_while_more_is_to_come_the_finalizer_says_how_much(world):
    w = await world(recording_concurrency=1)
    with capture_logs() as lines:
        await w.transcribe("1002")
        await until(lambda: len(w.emitted("recording_completed")) == 3)
    waiting = [one for one in lines if one.get("area") == "TX-FINALIZER" and one["verb"] == "END:"]
    first = waiting[0]
    assert (first["event"], first["remaining"], first["processed"]) == ("waiting", 2, 1)


PLAYBOOK = """
SELECT message FROM workflow_logs WHERE workflow = 'transcription' AND entity_type = 'fiche' AND entity_id = '1000'
ORDER BY created_at ASC, id LIMIT 200
"""


@pytest.mark.req("TRX-17", "TRX-92", "TRX-40", "ENG-83")
async def test_the_lines_are_stored_by_fiche_and_run_where_that_is_wanted(world, query):
    w = await world(kit={"trace_rows": True})
    run = await w.transcribe("1000")
    await until(lambda: ("END: completed",) in query(PLAYBOOK))
    messages = [message for (message,) in query(PLAYBOOK)]
    assert messages[0] == "START: transcribe-fiche"
    assert {"START: transcribe-recording", "START: finalize-recording"} < set(messages)
    functions = query("SELECT DISTINCT function_id, trace_id FROM workflow_logs WHERE entity_type = 'fiche' ORDER BY 1")
    assert functions == [
        (name, str(run["id"])) for name in ("finalize-fiche-transcription", "transcribe-fiche", "transcribe-recording")
    ]
    shown = query("SELECT tenant_id, fiche_id, trace_id, message FROM transcription_logs ORDER BY created_at, id")
    assert shown == [("default", "1000", str(run["id"]), message) for message in messages]


@pytest.mark.req("ENG-87", "TRX-40")
def test_a_run_has_a_file_of_its_own_where_that_is_wanted(tmp_path, monkeypatch):
    monkeypatch.setenv("ECLUSE_DATA_DIR", str(tmp_path))
    files = TraceFiles(
        TraceFolder(tmp_path / "logs", "transcription", ".log"), lambda: datetime(2026, 3, 2, tzinfo=UTC)
    )
    monkeypatch.setattr(trace, "listeners", [files])
    of = {"area": "T", "workflow": "transcription", "entity": ("fiche", "12"), "tenant_id": "t", "correlation_id": "c"}
    trace.Tracer(**of, run_id=7).start("transcribe-fiche", url="https://x.test/?Signature=abcdef")
    trace.Tracer(**of, run_id=7).end("completed", 1.5)
    trace.Tracer(**of, run_id=8).start("transcribe-fiche")
    trace.Tracer(**{**of, "workflow": "other"}, run_id=9).start("something")
    assert sorted(file.name for file in (tmp_path / "logs").iterdir()) == [
        "transcription-run-7.log",
        "transcription-run-8.log",
    ]
    lines = [json.loads(line) for line in (tmp_path / "logs" / "transcription-run-7.log").read_text().splitlines()]
    assert [line["message"] for line in lines] == ["START: transcribe-fiche", "END: completed"]
    assert "abcdef" not in str(lines)


@pytest.mark.req("ENG-87", "TRX-40")
def test_no_file_is_written_unless_it_is_switched_on(tmp_path, monkeypatch):
    monkeypatch.setenv("ECLUSE_DATA_DIR", str(tmp_path))
    assert trace_files(Settings(), Clock()) == []
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("TRANSCRIPTION_DEBUG_LOG_TO_FILE", "true")
    assert len(trace_files(Settings(), Clock())) == 1


KNOBS = {
    "TRANSCRIPTION_FICHE_CONCURRENCY": "3",
    "TRANSCRIPTION_RECORDING_WORKER_CONCURRENCY": "4",
    "TRANSCRIPTION_RECORDING_PER_FICHE_CONCURRENCY": "2",
    "TRANSCRIPTION_ELEVENLABS_RATE_LIMIT_PER_MINUTE": "30",
    "TRANSCRIPTION_ELEVENLABS_MAX_ATTEMPTS": "5",
    "TRANSCRIPTION_ELEVENLABS_BACKOFF_BASE_SECONDS": "1",
    "TRANSCRIPTION_ELEVENLABS_BACKOFF_MAX_SECONDS": "9",
    "TRANSCRIPTION_PROGRESS_WEBHOOK_FREQUENCY": "7",
    "TRANSCRIPTION_MAX_WAIT_SECONDS": "60",
    "TRANSCRIPTION_STALL_MINUTES": "5",
    "RATE_LIMITS_TRANSCRIPTION": "8",
    "ELEVENLABS_API_KEY": "key",
    "ELEVENLABS_MODEL": "scribe_v2",
}


@pytest.mark.req("TRX-26", "TRX-27", "TRX-28", "TRX-32", "TRX-33", "TRX-34", "TRX-35", "TRX-36", "TRX-37", "TRX-39")
def test_every_knob_reaches_what_it_is_for(monkeypatch):
    for name, value in KNOBS.items():
        monkeypatch.setenv(name, value)
    config = transcription_config(Settings())
    assert (config.configured, config.requests_per_minute, config.progress_every) == (True, 8, 7)
    assert (config.max_wait.total_seconds(), config.stall.total_seconds()) == (60, 300)
    flow = next(flow for flow in load_flows(Settings()) if flow.name == "transcription")
    refresh, _, recordings = flow.stages
    assert refresh.lane.max_in_flight == 3
    lane, retry = recordings.lane, recordings.retry
    assert (lane.max_in_flight, lane.max_per_key, lane.per_second) == (4, 2, 0.5)
    assert (retry.executions, retry.base, retry.longest) == (5, 1, 9)


def test_what_the_provider_is_asked_for_is_what_a_result_is_known_by(monkeypatch):
    for name, value in KNOBS.items():
        monkeypatch.setenv(name, value)
    assert vendor_setup(Settings()).speech == transcription_config(Settings()).speech == Speech(model="scribe_v2")


@pytest.mark.req("TRX-27", "TRX-28", "TRX-29", "TRX-30", "TRX-31", "TRX-33", "TRX-34", "TRX-38", "TRX-40", "G-87")
def test_defaults_follow_the_replicas_and_what_has_no_effect_is_still_read(monkeypatch):
    for name in Settings.model_fields:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SERVER_REPLICAS", "3")
    monkeypatch.setenv("INNGEST_PARALLELISM_PER_SERVER", "4")
    monkeypatch.setenv("TRANSCRIPTION_MAX_WAIT_SECONDS", "7")
    given = Settings()
    assert given.TRANSCRIPTION_MAX_WAIT_SECONDS == 30
    assert given.TRANSCRIPTION_FICHE_CONCURRENCY == given.TRANSCRIPTION_RECORDING_WORKER_CONCURRENCY == 12
    assert (given.TRANSCRIPTION_RECORDING_PER_FICHE_CONCURRENCY, given.TRANSCRIPTION_FINALIZER_CONCURRENCY) == (4, 12)
    assert (given.TRANSCRIPTION_LOCK_TTL_MS, given.TRANSCRIPTION_RUN_STATE_TTL_SECONDS) == (1_800_000, 7200)
    assert (given.TRANSCRIPTION_POLL_INTERVAL_SECONDS, given.REDIS_URL) == (5, None)
    monkeypatch.setenv("TRANSCRIPTION_MAX_WAIT_SECONDS", "3600")
    assert Settings().TRANSCRIPTION_LOCK_TTL_MS == 4_200_000
    for name in ("LOCK_TTL_MS", "RUN_STATE_TTL_SECONDS", "POLL_INTERVAL_SECONDS", "FINALIZER_CONCURRENCY"):
        assert Settings.model_fields[f"TRANSCRIPTION_{name}"].description.startswith("No effect, because ")
    assert Settings.model_fields["REDIS_URL"].description.startswith("No effect, because ")


@pytest.mark.req("TRX-26")
def test_what_a_flow_lacks_is_known_before_it_runs(monkeypatch):
    for name in Settings.model_fields:
        monkeypatch.delenv(name, raising=False)
    knobs = ["CRM_BASE_URL", "CRM_API_KEY", "ELEVENLABS_API_KEY"]
    assert Lacking("transcription", knobs, begun=False) in lacking(Settings())
    monkeypatch.setenv("CRM_BASE_URL", "http://crm.test")
    monkeypatch.setenv("CRM_API_KEY", "key")
    monkeypatch.setenv("ELEVENLABS_API_KEY", " ")
    assert Lacking("transcription", ["ELEVENLABS_API_KEY"], begun=True) in lacking(Settings())
    monkeypatch.setenv("ELEVENLABS_API_KEY", "key")
    assert "transcription" not in {one.flow for one in lacking(Settings())}
