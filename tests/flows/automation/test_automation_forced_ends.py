"""Ends of automation that are not normal: by an operator, of a run that no replica leads, of one that hangs. A worker
that comes back afterwards finds nothing to do."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from ecluse import bootstrap, settings
from ecluse.engine import load_run
from ecluse.engine.cluster.forced_ends import end_stale
from ecluse.engine.runs.lifecycle import RunEnded
from ecluse.engine.runs.stages import open_units
from ecluse.flows.automation import eligibility, select, snapshot
from ecluse.flows.automation import flow as story
from ecluse.flows.automation.config import Config
from ecluse.flows.automation.transcripts import Transcripts
from tests.support.automation_trouble import Deaf, maker, move
from tests.support.fiche_rows import call, details, save
from tests.support.notify_world import new_secrets
from tests.support.runs import end_run
from tests.support.transcription_world import until

WEBHOOK = "http://127.0.0.1:9/hook"
ENDS = ("automation/completed", "automation/failed", "automation.run.completed", "automation.run.failed")
LIMIT = Config().longest
BEGUN = """
UPDATE runs SET status = 'running', state = 'running', started_at = ecluse_now() - %s::interval WHERE id = %s
"""
# It is logged once: after the line is deleted, the next check writes it again, which shows that there was one.
AGED = """
WITH aged AS (UPDATE runs SET started_at = ecluse_now() - %s::interval WHERE id = %s RETURNING id)
DELETE FROM run_log l USING aged WHERE l.run_id = aged.id AND l.message = 'overdue: still being led'
"""
OVERDUE = """
SELECT level FROM run_log WHERE run_id = %s AND message = 'overdue: still being led' AND data ->> 'why' LIKE %s
"""


@pytest.fixture
def troubled(start_kit, sandbox, query):
    return maker(start_kit, sandbox, query)


def delivered_events(query, run_id):
    return [event for (event,) in query("SELECT event_type FROM deliveries WHERE about_run = %s", run_id)]


async def at_audits(troubled, sandbox, query, **given):
    """A run at its last gate: one fiche has failed, the audit of one is there, that of another is being made."""
    model = Deaf("ask", "audit-1016")
    world = await troubled(model=model, audit_poll=timedelta(seconds=30))
    await world.config()
    sandbox.set_faults([{"kind": "unauthorized", "vendor": "crm", "ids": ["1008"]}])
    schedule = await world.schedule("1000", "1008", "1016", secrets=new_secrets(), webhook_url=WEBHOOK, **given)
    run_id = await world.trigger(schedule)
    await model.asked.wait()
    await until(lambda: query("SELECT 1 FROM audits WHERE fiche_id = '1000' AND status = 'completed'"))
    return world, schedule, run_id, model


@pytest.mark.req("G-89", "G-82", "AUT-126", "AUT-24", "AUT-31", "AUT-85", "AUT-124", "G-43")
async def test_a_run_that_an_operator_ends_says_so_and_keeps_what_was_known(troubled, sandbox, query):
    world, schedule, run_id, model = await at_audits(troubled, sandbox, query)
    assert world.stated(schedule)["last_run_status"] == "running"
    assert await end_run(world.kit, run_id, "wrong day", by="laptop")
    run = world.run(run_id)
    assert (run["status"], run["state"], run["end_cause"]) == ("partial", "cancelled", "operator")
    assert (run["error_message"], run["ended_by"], run["phase"]) == ("wrong day", "laptop", None)
    assert run["error_details"] == {"cause": "operator", "code": None, "phase": "auditing"}
    assert (run["total_fiches"], run["successful_fiches"], run["failed_fiches"]) == (3, 1, 2)
    assert (run["selected"], run["cancelled_fiches"]) == (3, 1)
    ended = {"1000": ("successful", None), "1016": ("failed", "Cancelled by laptop: wrong day")}
    results = world.results(run_id)
    assert results.pop("1008")[1].startswith("Fiche not found in cache")
    assert results == ended
    stated = world.stated(schedule)
    assert (stated["last_run_status"], stated["cancelled_runs"], stated["total_runs"]) == ("cancelled", 1, 1)
    assert (stated["partial_runs"], stated["failed_runs"]) == (0, 0)
    events = world.events(run_id, *ENDS)
    assert [name for name, _ in events] == ["automation/failed", "automation.run.failed"]
    assert events[0][1].items() >= {"end_cause": "operator", "cancelled": 1, "ended_by": "laptop"}.items()
    assert events[1][1].items() >= {"error": "wrong day", "end_cause": "operator", "cancelled_fiches": 1}.items()
    assert delivered_events(query, run_id) == [], "an end on request is no error"
    assert query("SELECT status FROM audits WHERE fiche_id = '1016'") == [("failed",)]
    assert "Automation run cancelled" in world.logs(run_id)
    # It was paid for: the audit is kept, and nothing else.
    model.let.set()
    await until(lambda: query("SELECT 1 FROM audits WHERE fiche_id = '1016' AND status = 'completed'"))
    assert (world.run(run_id), world.stated(schedule)) == (run, stated)
    assert {fiche: world.results(run_id)[fiche] for fiche in ended} == ended


@pytest.mark.req("G-89", "G-82")
async def test_what_a_child_of_a_run_that_was_ended_was_paying_for_is_kept(troubled, query):
    speech = Deaf("transcribe")
    world = await troubled(deaf_speech=speech, transcription_poll=timedelta(seconds=30))
    await world.config()
    run_id = await world.trigger(await world.schedule("1000"))
    await speech.asked.wait()
    assert await end_run(world.kit, run_id, "wrong day")
    over = "SELECT status FROM dbos.workflow_status WHERE workflow_uuid LIKE 'default/automation-manual-%%'"
    await until(lambda: query(over) == [("SUCCESS",)])
    child = "SELECT state, status FROM runs WHERE parent_run_id = %s"
    await until(lambda: query(child, run_id) == [("cancelled", "failed")])
    written = "SELECT count(*) FILTER (WHERE has_transcription) = count(*) FROM recordings"
    assert query(written) == [(False,)]
    speech.let.set()
    await until(lambda: query(written) == [(True,)])
    assert world.results(run_id) == {"1000": ("failed", "Cancelled by operator: wrong day")}
    assert world.run(run_id)["transcriptions_run"] == 0, "none of it was there when the run ended"


@pytest.mark.req("G-89", "G-26")
async def test_a_story_that_has_not_heard_of_the_end_starts_nothing_more(troubled, connection, query):
    """The replica that leads it was away for a moment: each of its next steps finds the run ended."""
    world = await troubled(kit={"roles": frozenset({"api"})})
    await world.config()
    await save(connection, ("1000", details(call("1000-1"))))
    run = await load_run(connection, await world.trigger(await world.schedule("1000")))
    await snapshot.make(connection, run)
    await select.select(connection, run)
    assert await eligibility.decide(connection, run, None) == (1, 0)
    waits = replace(world.flow.stage("fetch"), name="transcribe")
    await open_units(connection, run, waits)
    assert await story._resolve(connection, run) == 1
    assert await end_run(world.kit, run.id, "wrong day")
    transcripts = Transcripts(world.kit.flow("transcription"), Config(), 1)
    before = query("SELECT count(*) FROM runs")
    assert await transcripts.dispatch(connection, run, timedelta(minutes=15)) == 0
    with pytest.raises(RunEnded):  # of which it had looked up before the end
        await transcripts._start(connection, run, ["1000"], "normal", 0)
    with pytest.raises(RunEnded):
        await story._audits(None, world.flow.stage("audit"), connection, run)
    with pytest.raises(RunEnded):
        await open_units(connection, run, replace(waits, name="other"))
    assert (query("SELECT count(*) FROM runs"), query("SELECT count(*) FROM audits")) == (before, [(0,)])


@pytest.mark.req("AUT-136", "AUT-93")
def test_how_long_a_run_may_take_follows_from_the_knobs(monkeypatch):
    assert timedelta(minutes=70) == LIMIT
    assert bootstrap.automation_config(settings.Settings()).longest == LIMIT
    monkeypatch.setenv("AUTOMATION_AUDIT_MAX_WAIT_MS", str(60 * 60_000))
    monkeypatch.setenv("AUTOMATION_SCHEDULER_STALE_GRACE_MS", "0")
    known = settings.Settings()
    assert bootstrap.automation_config(known).longest == timedelta(minutes=85)
    (flow,) = (flow for flow in bootstrap.load_flows(known) if flow.name == "automation")
    assert flow.stale_after == timedelta(minutes=85)


@pytest.mark.req("AUT-137", "AUT-138", "AUT-205", "AUT-136", "G-26", "G-89", "ENG-93")
async def test_a_run_that_no_replica_leads_is_ended_as_stale_and_its_schedule_is_free(troubled, connection, query):
    face = await troubled(kit={"roles": frozenset({"api"})})
    old = await face.schedule("1000", secrets=new_secrets(), webhook_url=WEBHOOK)
    young = await face.schedule("1000")
    stale, fresh = await face.trigger(old), await face.trigger(young)
    # As if a replica had begun them, and been lost without a trace.
    for run_id in (stale, fresh):
        run = await load_run(connection, run_id)
        await snapshot.make(connection, run)
        await select.select(connection, run)
    query(BEGUN, LIMIT + timedelta(minutes=1), stale)
    query(BEGUN, LIMIT - timedelta(minutes=1), fresh)
    world = await troubled(kit={"sweep_every": 0.2})
    run = await world.ended(stale)
    assert (run["status"], run["end_cause"], run["error_code"]) == ("failed", "stale", "STALE")
    assert "longer than the 1 h 10 min" in run["error_message"]
    assert world.results(stale)["1000"][1].startswith("Run ended: stale: running for 1 h 11 min")
    errors = query("SELECT message FROM automation_logs WHERE run_id = %s AND level = 'error' ORDER BY id", stale)
    assert errors == [("running -> failed",), ("Automation run failed",)]
    stated = world.stated(old)
    assert (stated["last_run_status"], stated["failed_runs"]) == ("failed", 1)
    assert [name for name, _ in world.events(stale, *ENDS)] == ["automation/failed", "automation.run.failed"]
    assert delivered_events(query, stale) == ["automation/failed"]
    assert world.run(fresh)["completed_at"] is None
    # Free: the next run of it holds it.
    again = await world.trigger(old)
    assert world.stated(old)["holding_run_id"] == again


@pytest.mark.req("G-26", "AUT-136", "AUT-137")
async def test_a_run_that_is_led_is_overdue_first_and_gets_twice_the_time(troubled, sandbox, query):
    world, schedule, run_id, _ = await at_audits(troubled, sandbox, query)

    async def sweep_at(age):
        query(AGED, age, run_id)
        await end_stale(world.kit.pool, world.kit.by_name)

    for age, said in ((LIMIT + timedelta(minutes=1), "1 h 11 min"), (2 * LIMIT - timedelta(minutes=1), "2 h 19 min")):
        await sweep_at(age)
        await until(lambda said=said: query(OVERDUE, run_id, f"running for {said}%") == [("warning",)])
        assert (world.run(run_id)["completed_at"], world.stated(schedule)["last_run_status"]) == (None, "running")
    await sweep_at(2 * LIMIT + timedelta(minutes=1))
    run = await world.ended(run_id)
    assert (run["status"], run["end_cause"]) == ("failed", "stale")
    assert world.stated(schedule)["last_run_status"] == "failed"
    assert world.results(run_id)["1000"] == ("successful", None)


@pytest.mark.req("AUT-139")
async def test_a_run_that_cannot_be_reconciled_does_not_hold_up_the_others(troubled, connection, query):
    face = await troubled(kit={"roles": frozenset({"api"})})
    schedules = [await face.schedule("1000"), await face.schedule("1000")]
    runs = [await face.trigger(schedule) for schedule in schedules]
    for run_id in runs:
        query(BEGUN, LIMIT + timedelta(minutes=10), run_id)
    query(
        "CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'cannot be written'; END $$;"
        f" CREATE TRIGGER broken BEFORE UPDATE ON automation_settings FOR EACH ROW WHEN (old.id = {schedules[0]})"
        " EXECUTE FUNCTION broken()"
    )
    world = await troubled(kit={"sweep_every": 0.2})
    assert (await world.ended(runs[1]))["end_cause"] == "stale"
    assert world.run(runs[0])["completed_at"] is None
    query("DROP TRIGGER broken ON automation_settings")
    assert (await world.ended(runs[0]))["end_cause"] == "stale"
    assert not world.kit.broken.is_set()


@pytest.mark.req("G-89", "AUT-136", "AUT-137", "G-26")
async def test_a_run_that_no_worker_takes_up_is_ended_by_the_scheduler_too_and_its_schedule_is_free(troubled, query):
    """No process works here; what is due while the run waits fires once it is over."""
    world = await troubled(kit={"roles": frozenset({"scheduler"})})
    schedule = await world.schedule("1000", schedule_type="CRON", cron_expression="*/5 * * * *")
    run_id = await world.trigger(schedule)
    state = "SELECT state, end_cause, started_at IS NULL FROM runs WHERE id = %s"
    for age in (LIMIT - timedelta(minutes=1), timedelta(minutes=2)):
        assert query(state, run_id) == [("queued", None, True)]
        move(query, age)
        await end_stale(world.kit.pool, world.kit.by_name)
    run = await world.ended(run_id)
    assert (run["status"], run["end_cause"], run["error_code"]) == ("failed", "stale", "STALE")
    assert run["error_message"].startswith("not taken up by any worker for 1 h 11 min")
    slots = "SELECT state FROM schedule_slots WHERE schedule_id = %s AND run_id > %s ORDER BY due_at DESC LIMIT 1"
    assert await until(lambda: query(slots, schedule, run_id)) == [("fired",)]
    ((held,),) = query("SELECT holding_run_id FROM schedules WHERE id = %s", schedule)
    assert held > run_id
