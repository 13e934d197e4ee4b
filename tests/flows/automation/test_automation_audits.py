"""Audits of a run: which configs, linked to what, and what their results make of a fiche."""

from __future__ import annotations

import pytest

from ecluse.flows.audits import configs
from ecluse.flows.automation.config import Config
from tests.support.automation_scenes import asked, held_up, log_rows
from tests.support.fiche_rows import call, details, save
from tests.support.transcription_world import until

AUDITS = """
SELECT fiche_id, audit_config_id, status, trigger_source, automation_schedule_id, use_rlm, is_latest FROM audits
WHERE automation_run_id = %s ORDER BY fiche_id, audit_config_id
"""
ITEMS = "SELECT key FROM items WHERE run_id = %s AND stage = 'audit' ORDER BY key"


async def deleted(world, config):
    async with world.kit.pool.connection() as connection, connection.transaction():
        await configs.delete(connection, "default", config)


@pytest.mark.req("AUT-22", "AUT-36", "AUT-55", "AUT-80", "AUT-114", "AUT-115", "AUT-117", "AUT-189", "AUT-43")
@pytest.mark.req("G-40", "G-88", "G-91")
async def test_every_fiche_is_audited_once_with_every_config_that_is_meant(automate, query):
    world = await automate()
    automatic, named, both, off = [
        await world.config(name=name, run_automatically=name in ("automatic", "both"))
        for name in ("automatic", "named", "both", "off")
    ]
    gone = await world.config(name="gone", run_automatically=False)
    wanted = {"specific_audit_configs": [both, named, off, gone]}
    chosen = {"mode": "manual", "fiche_ids": ["1000", "1001"], "use_rlm": True}
    schedule = await world.schedule(fiche_selection=chosen, **wanted)
    query("UPDATE audit_configs SET is_active = false WHERE id = %s", off)
    await deleted(world, gone)
    run_id = await world.trigger(schedule)
    run = await world.ended(run_id)
    three = (automatic, named, both)
    assert query(AUDITS, run_id) == [
        (fiche, config, "completed", "automation", schedule, True, True)
        for fiche in ("1000", "1001")
        for config in three
    ]
    names = [f"automation-{run_id}-audit-{fiche}-{config}" for fiche in ("1000", "1001") for config in three]
    assert sorted(asked(world, "llm")) == sorted(names)
    assert (run["status"], run["audits_run"]) == ("completed", 6)
    assert [one["name"] for one in run["config_snapshot"]["audit_configs"]] == ["automatic", "named", "both"]
    message = "Some audit configs do not exist or are not active: left out"
    assert log_rows(world, run_id, message) == [("warning", {"unknown": [gone], "inactive": [off]})]
    logs = world.logs(run_id)
    assert "Running 3 configs × 2 fiches = 6 total audits" in logs  # noqa: RUF001 - as it is known
    assert [line for line in logs if line.startswith("Audit progress: ")][-1] == (
        "Audit progress: 6/6 (completed=6, failed=0)"
    )
    sample = {"audits": 6, "event_ids": names[:3]}
    assert log_rows(world, run_id, "Dispatched audit/run fan-out events") == [("info", sample)]

    # Only those that are named; and what was audited is audited again, for this run.
    only = await world.run_over("1000", use_automatic_audits=False, specific_audit_configs=[named])
    assert query(AUDITS, only["id"]) == [("1000", named, "completed", "automation", only["schedule_id"], False, True)]
    assert ("1000", named, "completed", "automation", schedule, True, False) in query(AUDITS, run_id)


@pytest.mark.req("AUT-120", "AUT-122", "AUT-174", "G-42")
async def test_a_config_that_fails_fails_the_fiche_with_its_error(automate, query):
    world = await automate()
    first, second = [await world.config(name=name) for name in ("first", "second")]
    world.sandbox.set_faults([{"kind": "chat_refusal", "vendor": "llm", "ids": [f"automation-1-audit-1000-{second}"]}])
    partial = await world.run_over("1000", "1008", "9100")
    assert partial["id"] == 1
    results = world.results(1)
    assert results["1008"] == ("successful", None)
    (error,) = query("SELECT error FROM audits WHERE status = 'failed' AND fiche_id = '1000'")
    assert results["1000"] == ("failed", error[0])
    assert results["9100"] == (
        "failed",
        "Fiche 9100 has no transcript: it has no recordings, or they are not transcribed yet.",
    )
    assert (partial["status"], partial["total_fiches"], partial["failed_fiches"]) == ("partial", 3, 2)
    assert partial["audits_run"] == 6
    assert query("SELECT audit_config_id, status FROM audits WHERE fiche_id = '1000' ORDER BY 1") == [
        (first, "completed"),
        (second, "failed"),
    ]
    assert "Audit progress: 6/6 (completed=3, failed=3)" in world.logs(1)
    # A failure in the last stage stops no other fiche.
    failed = await world.run_over("9100", "9102", continue_on_error=False)
    assert (failed["status"], failed["successful_fiches"], failed["failed_fiches"]) == ("failed", 0, 2)
    assert {status for status, _ in world.results(failed["id"]).values()} == {"failed"}


@pytest.mark.req("AUT-02", "AUT-116", "AUT-165", "G-82")
async def test_a_schedule_that_only_audits_has_transcripts_made_first_if_it_has_audit_configs(automate, query):
    world = await automate()
    none = await world.run_over("1000", "1001", run_transcription=False)
    assert world.results(none["id"]) == dict.fromkeys(("1000", "1001"), ("failed", "No audit configs resolved"))
    assert (none["status"], none["config_snapshot"]["audit_configs"]) == ("failed", [])
    assert log_rows(world, none["id"], "No audit configs resolved") == [("error", None)]
    assert asked(world, "elevenlabs") == []

    await world.config()
    async with held_up(world, "elevenlabs"):
        run_id = await world.trigger(await world.schedule("1000", "1001", "9200", run_transcription=False))
        await until(lambda: "Transcription progress: 0/6" in world.logs(run_id))
        assert world.run(run_id)["phase"] == "auditing"
        assert asked(world, "llm") == []
    run = await world.ended(run_id)
    assert (run["status"], run["transcriptions_run"], run["audits_run"]) == ("partial", 5, 2)
    assert world.results(run_id)["9200"][1] == "1 of 3 recordings has no URL in the CRM (9200-2)"
    # Both come out of the time of the audits.
    budgets = dict(query("SELECT stage, deadline_at - started_at FROM stages WHERE run_id = %s", run_id))
    assert budgets["audit"] < budgets["transcribe"] == Config().audit_wait
    assert len(asked(world, "llm")) == 2

    stopped = await world.run_over("1000", "9200", run_transcription=False, continue_on_error=False)
    assert (stopped["status"], world.results(stopped["id"])["1000"][0]) == ("failed", "ignored")
    neither = await world.run_over("1002", run_transcription=False, run_audits=False)
    assert (neither["status"], neither["transcriptions_run"], neither["audits_run"]) == ("completed", 0, 0)
    assert query("SELECT stage FROM stages WHERE run_id = %s", neither["id"]) == [("fetch",)]


@pytest.mark.req("AUT-115", "G-40")
async def test_a_run_audits_with_the_configs_that_it_has_resolved(automate, query):
    """Whatever becomes of them, or joins them, while it waits."""
    world = await automate()
    config = await world.config()
    async with held_up(world, "llm"):
        run_id = await world.trigger(await world.schedule("1000"))
        await until(lambda: "Audit progress: 0/1 (completed=0, failed=0)" in world.logs(run_id))
        await world.config(name="another")
        await deleted(world, config)
    run = await world.ended(run_id)
    assert (run["status"], query(ITEMS, run_id)) == ("completed", [(f"1000-{config}",)])


@pytest.mark.req("AUT-53", "AUT-109", "AUT-111", "G-82")
async def test_a_recording_that_is_gone_upstream_counts_nowhere(automate, query):
    world = await automate()
    await world.config()
    async with world.kit.pool.connection() as connection:
        await save(connection, ("1000", details(call("gone"), call("1000-1"))))
    run = await world.run_over("1000")
    assert (run["status"], run["transcriptions_run"]) == ("completed", 1)
    assert "Transcription progress: 1/1" in world.logs(run["id"])
    assert query("SELECT call_id, has_transcription FROM recordings WHERE removed_at IS NOT NULL") == [("gone", False)]
