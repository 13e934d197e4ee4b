"""How runs end: by counts, by force, before they have begun; once, whatever is repeated; and what schedules say."""

from __future__ import annotations

import re

import pytest

from ecluse.engine import Start, enable_schedule, load_run
from ecluse.engine.lead import durable
from ecluse.flows.automation import schedules, select, snapshot, start
from ecluse.flows.automation.plan import Plan
from ecluse.vendors.guarded import GuardedHttp
from tests.support.automation_scenes import (
    MONDAY,
    NO_AUDITS,
    ONLY_DETAILS,
    held_up,
    known,
    log_rows,
    out_of_order,
    over,
)
from tests.support.automation_world import automation
from tests.support.runs import end_run, start_run
from tests.support.transcription_world import until

RESULTS = "SELECT * FROM automation_run_fiche_results WHERE run_id = %s ORDER BY fiche_id"
DETAILS = "crm"


def counters(world, schedule):
    stated = world.stated(schedule)
    totals = [stated[name] for name in ("total_runs", "successful_runs", "partial_runs", "failed_runs")]
    return stated["last_run_status"], *totals


async def looks_at_details(world, run_id):
    await until(lambda: any(line.startswith("Fiche details progress: ") for line in world.logs(run_id)))


@pytest.mark.req("AUT-40", "AUT-42", "AUT-47", "AUT-49", "AUT-57", "AUT-122", "AUT-123", "AUT-124", "AUT-204")
@pytest.mark.req("AUT-81", "AUT-82", "AUT-83", "AUT-84", "AUT-85", "AUT-86")
async def test_status_follows_from_the_counts_and_the_schedule_from_the_status(automate, query):
    world = await automate()
    schedule = await world.schedule(**ONLY_DETAILS)
    assert counters(world, schedule) == (None, 0, 0, 0, 0)
    world.sandbox.set_faults([{"kind": "unauthorized", "vendor": "crm", "ids": ["1001", "1003"]}])
    async with held_up(world, DETAILS):
        first = await world.trigger(schedule, fiche_ids=["1000", "1002"])
        await looks_at_details(world, first)
        running, stated = world.run(first), world.stated(schedule)
        assert (running["status"], running["phase"], running["total_fiches"]) == ("running", "fetching", 2)
        assert (running["successful_fiches"], running["completed_at"], world.results(first)) == (0, None, {})
        assert (stated["last_run_status"], stated["last_run_id"]) == ("running", first)
        assert stated["last_run_at"] >= running["created_at"]
    done = await world.ended(first)
    assert (done["status"], done["successful_fiches"], done["failed_fiches"]) == ("completed", 2, 0)
    assert done["completed_at"] is not None
    assert counters(world, schedule) == ("success", 1, 1, 0, 0)
    partial = await world.ended(await world.trigger(schedule, fiche_ids=["1000", "1001"]))
    assert (partial["status"], partial["successful_fiches"], partial["failed_fiches"]) == ("partial", 1, 1)
    assert counters(world, schedule) == ("partial", 2, 1, 1, 0)
    last = await world.trigger(schedule, fiche_ids=["1001", "1003", "9300"])
    failed = await world.ended(last)
    assert (failed["status"], failed["total_fiches"], failed["failed_fiches"]) == ("failed", 2, 2)
    assert counters(world, schedule) == ("failed", 3, 1, 1, 1)
    with pytest.raises(Exception, match="outcomes_pkey"):
        query("INSERT INTO outcomes (run_id, target) VALUES (%s, '1001')", last)

    before = query(RESULTS, last)
    assert await end_run(world.kit, last, "once more") is False
    assert (query(RESULTS, last), world.run(last), counters(world, schedule)[1]) == (before, failed, 3)


@pytest.mark.req("AUT-40", "AUT-124", "AUT-85")
async def test_a_schedule_stays_running_while_one_of_its_runs_does(automate):
    world = await automate()
    schedule = await world.schedule(**ONLY_DETAILS)
    async with held_up(world, DETAILS):
        first = await world.trigger(schedule, fiche_ids=["1000"])
        await looks_at_details(world, first)
        second = await world.trigger(schedule, fiche_ids=["1001"])
        await looks_at_details(world, second)
        await end_run(world.kit, first, "not that one")
        assert counters(world, schedule) == ("running", 1, 0, 0, 0)  # an end on request is no failure
    await world.ended(second)
    assert counters(world, schedule) == ("success", 2, 1, 0, 0)


@pytest.mark.req("AUT-24", "AUT-31", "AUT-45", "AUT-126", "AUT-125", "AUT-23", "G-44")
async def test_a_broken_run_is_announced_as_failed_and_nothing_else(automate, query):
    world = await automate()
    world.sandbox.set_faults(out_of_order(MONDAY))
    await known(world, MONDAY, f1000="Paris", f1001="Lyon")
    schedule = await world.schedule(fiche_selection=over(), **ONLY_DETAILS)
    async with held_up(world, DETAILS):
        run_id = await world.trigger(schedule)
        await looks_at_details(world, run_id)
        query(
            "UPDATE automation_run_facts SET config_snapshot = config_snapshot - 'selection' WHERE run_id = %s", run_id
        )
    run = await world.ended(run_id)
    assert (run["status"], run["end_cause"], run["error_code"]) == ("failed", "catastrophic", "BUG")
    assert run["error_message"] == "'selection'"
    details = run["error_details"]
    assert (details["cause"], details["code"], details["phase"]) == ("stopped by an error", "BUG", "fetching")
    assert details["apiErrors"][0]["status"] == 503
    assert world.results(run_id) == dict.fromkeys(("1000", "1001"), ("failed", "Run stopped by an error: 'selection'"))
    payloads = dict(world.events(run_id))
    assert {"automation/failed", "automation.run.failed"} <= set(payloads)
    assert not {"automation/completed", "automation.run.completed"} & set(payloads)
    about = {"run_id": str(run_id), "schedule_id": str(schedule), "error": "'selection'"}
    assert about.items() <= payloads["automation/failed"].items()
    assert {**about, "job_id": f"automation-run-{run_id}"}.items() <= payloads["automation.run.failed"].items()
    ((level, metadata),) = log_rows(world, run_id, "Automation run failed")
    assert (level, metadata["end_cause"]) == ("error", "stopped by an error")
    assert log_rows(world, run_id, "Automation run completed") == []
    assert counters(world, schedule) == ("failed", 1, 0, 0, 1)
    read = query("SELECT message, data::text FROM run_log") + query("SELECT reason FROM outcomes")
    assert "catastrophic" not in str(read), "nowhere but in the field of the contract"


@pytest.mark.req("AUT-170", "AUT-42", "G-41")
async def test_a_schedule_that_is_gone_or_off_when_its_run_begins_is_not_run(automate, sandbox, connection):
    """The runs are there before any server is."""
    made, _ = automation(sandbox)
    ids = []
    for n in range(2):
        given = {"name": f"schedule {n}", "schedule_type": "MANUAL", "fiche_selection": {"mode": "manual"}}
        plan, guard = Plan.model_validate(given), GuardedHttp([])
        row = await schedules.create(connection, made.flow, "default", plan, secrets=None, guard=guard)
        started = await start.start(connection, made.flow, "default", row["id"], None)
        ids.append((row["id"], started.run.id))
    (deleted, first), (off, second) = ids
    await schedules.delete(connection, "default", deleted)
    await enable_schedule(connection, "default", off, enabled=False)
    world = await automate()
    third = (await start_run(world.kit, Start(world.flow, "by POST /api/runs"))).run.id
    texts = {
        first: f"Schedule {deleted} was deleted before its run began.",
        second: f"Schedule {off} was switched off before its run began.",
        third: "An automation run is started by its schedule: use POST /api/automation/trigger.",
    }
    for run_id, text in texts.items():
        run = await world.ended(run_id)
        assert (run["status"], run["error_code"], run["error_message"]) == ("failed", "NO_SCHEDULE", text)
        assert (run["total_fiches"], world.results(run_id)) == (0, {})
        names = [name for name, _ in world.events(run_id)]
        assert "automation.run.failed" in names
        assert not {"automation.run.started", "automation.run.selection"} & set(names)
    assert dict(world.events(third))["automation.run.failed"]["schedule_id"] is None
    assert world.sandbox.ledger(vendor="crm") == []
    assert counters(world, off) == ("failed", 1, 0, 0, 1)


@pytest.mark.req("AUT-44", "AUT-76", "G-41")
async def test_what_a_run_has_decided_it_does_not_decide_again(automate, connection):
    """Though its schedule is deleted meanwhile, and its day has more fiches: that goes for a step that is repeated."""
    world = await automate()
    world.sandbox.set_faults(out_of_order(MONDAY))
    await known(world, MONDAY, f1000="Paris")
    schedule = await world.schedule(fiche_selection=over(), **ONLY_DETAILS)
    async with held_up(world, DETAILS):
        run_id = await world.trigger(schedule)
        await looks_at_details(world, run_id)
        await schedules.delete(connection, "default", schedule)
        await known(world, MONDAY, f1001="Lyon")
        run, before = await load_run(connection, run_id), story_of(world, run_id)
        assert await snapshot.make(connection, run) is False
        assert await select.select(connection, run) == 1
        assert story_of(world, run_id) == before
    assert (await world.ended(run_id))["status"] == "completed"
    assert list(world.results(run_id)) == ["1000"]


def without_what_differs(run):
    """Ids and instants of a run's rows."""
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+(\+00:00)?", "T", repr(run))
    text = re.sub(r"automation-manual-[0-9a-f-]+", "KEY", text)
    return re.sub(r"'(duration_ms|schedule_id|run_id|id|job_id|schedule_name)': ('[^']*'|\d+)", r"'\1'", text)


LOG = """
SELECT level, message, metadata - 'duration_ms' FROM automation_logs
WHERE run_id = %s AND event_id IS NULL AND message !~ '^(FAN-OUT|gate |.* progress: )' ORDER BY id
"""


def story_of(world, run_id):
    """All that a run leaves behind, but for what the engine says of dispatches and looks."""
    lines = [repr(line) for line in world.query(LOG, run_id)]
    # What is said of a lane depends on the runs before.
    lines = [line for line in lines if "vendor down since" not in line and "vendor answers" not in line]
    logs = [re.sub(r"automation-\d+-", "automation-N-", line) for line in lines]
    audits = world.query("SELECT fiche_id, status FROM audits WHERE run_id = %s ORDER BY fiche_id", run_id)
    events = [(name, without_what_differs(payload)) for name, payload in world.events(run_id)]
    run = without_what_differs({k: v for k, v in world.run(run_id).items() if not k.endswith("_at")})
    return {"logs": logs, "events": events, "run": run, "results": world.results(run_id), "audits": audits}


@pytest.mark.req("AUT-76", "AUT-123", "AUT-26", "AUT-23", "AUT-204")
async def test_a_step_that_is_done_twice_has_done_it_once(automate, monkeypatch):
    """As after a crash between what a step has done and the note that it is done: each of them, one after the other."""
    world = await automate()
    config = await world.config()
    refused = [f"automation-{n}-audit-1002-{config}" for n in range(1, 99)]
    world.sandbox.set_faults(
        [
            *out_of_order(MONDAY),
            {"kind": "unauthorized", "vendor": "crm", "ids": ["1001"]},
            {"kind": "chat_refusal", "vendor": "llm", "ids": refused},
        ]
    )
    await known(world, MONDAY, f1000="Paris", f1001="Lyon", f1002=None, f9200="Paris", f9300="Paris")
    chosen = {"fiche_selection": over(only_with_recordings=True)}
    await world.run_over(**chosen, run_audits=False)  # from here on, all transcripts are there
    plain = await world.run_over(**chosen)
    once, twice = durable.step, []

    async def repeated(name, function):
        twice.append(name)
        await once(f"{name}, lost", function)
        return await once(name, function)

    monkeypatch.setattr(durable, "step", repeated)
    again = await world.run_over(**chosen)
    assert {"load-schedule", "select-fiches", "fan-out-fetch", "filter-fiches", "dispatch-transcriptions"} < set(twice)
    assert {"settle-transcriptions", "resolve-audit-configs", "fan-out-audit", "finalize"} < set(twice)
    assert plain["status"] == "partial"
    expected, found = story_of(world, plain["id"]), story_of(world, again["id"])
    for part, what in expected.items():
        assert found[part] == what, part
    schedule = plain["schedule_id"]
    assert counters(world, again["schedule_id"]) == counters(world, schedule) == ("partial", 1, 0, 1, 0)


@pytest.mark.req("AUT-116", "AUT-107", "AUT-76", "G-31")
async def test_who_stops_half_way_stops_once(automate, monkeypatch):
    world = await automate()
    once = durable.step

    async def repeated(name, function):
        await once(f"{name}, lost", function)
        return await once(name, function)

    monkeypatch.setattr(durable, "step", repeated)
    run = await world.run_over("1000", "9200", continue_on_error=False, **NO_AUDITS)
    assert (run["status"], run["result_summary"]["reasons"]) == ("partial", {"NO_URL": 1})
    assert [line for line in world.logs(run["id"]) if "completed 3/4" in line] == [
        "Transcription failed (fiches): 1 × NO_URL - recordings completed 3/4"  # noqa: RUF001 - as it is known
    ]
    await world.config()
    stopped = await world.run_over("1000", "9200", continue_on_error=False)
    assert stopped["result_summary"]["reasons"] == {"NO_URL": 1, "STOPPED": 1}
    assert len(log_rows(world, stopped["id"], "Stopped: a fiche has failed, and continueOnError is false")) == 1
    world.query("UPDATE audit_configs SET is_active = false")
    unaudited = await world.run_over("1000")
    assert unaudited["result_summary"]["reasons"] == {"NO_AUDIT_CONFIGS": 1}


@pytest.mark.req("AUT-116")
async def test_without_an_audit_config_a_run_makes_no_transcripts(automate):
    """The transcripts would be paid for, and no audit could use them."""
    world = await automate()
    run = await world.run_over("1000", "1001")
    assert run["result_summary"]["reasons"] == {"NO_AUDIT_CONFIGS": 2}
    assert {why for _, why in world.results(run["id"]).values()} == {"No audit configs resolved"}
    assert world.query("SELECT count(*) FROM runs WHERE flow = 'transcription'") == [(0,)]
    assert world.query("SELECT count(*) FROM paid_calls") == [(0,)]
    assert len(log_rows(world, run["id"], "No audit configs resolved")) == 1


async def test_a_run_whose_fiches_are_all_ignored_misses_no_audit_config(automate):
    world = await automate()
    run = await world.run_over("9300", "9301")
    assert (run["status"], run["ignored_fiches"], run["failed_fiches"]) == ("completed", 2, 0)
    assert log_rows(world, run["id"], "No audit configs resolved") == []
