"""Which fiches a run answers for: days asked for again at the CRM, the cache where that fails, lists made by hand."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from ecluse.engine import load_run
from ecluse.engine.lead import durable
from ecluse.flows.automation import events, schedules, select, snapshot
from ecluse.flows.automation.plan import Changes
from ecluse.settings import Settings
from ecluse.vendors.guarded import GuardedHttp
from tests.support.automation_scenes import (
    MONDAY,
    ONLY_DETAILS,
    asked,
    at_the_crm,
    known,
    log_rows,
    out_of_order,
    over,
    sold,
)
from tests.support.runs import start_run

DAYS = [MONDAY + timedelta(days=n) for n in range(5)]
SELECTION_LOG = ("Processing", "Using", "Calculated", "Revalidating", "Loaded", "Final")


def at_once(entries) -> int:
    """The most calls that were under way together."""
    moments = sorted([(e["at"], 1) for e in entries] + [(e["done_at"], -1) for e in entries])
    running = most = 0
    for _, step in moments:
        running += step
        most = max(most, running)
    return most


def selection_log(world, run_id):
    return [line for line in world.logs(run_id) if line.startswith(SELECTION_LOG)]


STATEMENTS = """
SELECT count(DISTINCT (xmin::text, cmin::text)) FROM fiche_cache WHERE fetched_at IS NULL AND last_revalidated_at > %s
"""


@pytest.mark.req("AUT-29", "AUT-60", "AUT-61", "AUT-62", "AUT-67", "AUT-71", "AUT-72", "AUT-186", "G-47", "G-90")
@pytest.mark.req("AUT-63", "G-87")
async def test_every_day_is_asked_for_again_and_then_read_from_the_cache_at_once(automate, query, one):
    world = await automate()
    listed = dict.fromkeys(fiche for day in DAYS for fiche in sold(world, day))
    await known(world, DAYS[4] + timedelta(days=1), f8888="Paris")  # the day after
    world.sandbox.reset()
    world.sandbox.set_faults(
        [{"kind": "latency", "seconds": 0.3, "vendor": "crm", "ids": [at_the_crm(d) for d in DAYS]}]
    )
    run_id = await world.trigger(
        await world.schedule(fiche_selection=over(DAYS[0], DAYS[4], max_fiches=3), **ONLY_DETAILS)
    )
    run = await world.ended(run_id)

    lists = [entry for entry in world.sandbox.ledger(vendor="crm") if "sales" in entry["path"]]
    assert sorted(entry["ref"] for entry in lists) == [at_the_crm(day) for day in DAYS]
    assert at_once(lists) <= 3
    cached = dict(
        query("SELECT fiche_id, sales_date FROM fiche_cache WHERE last_revalidated_at > %s", run["created_at"])
    )
    assert (set(cached), set(cached.values())) == (set(listed), set(DAYS))

    # A statement per commit, not one per fiche: the knob for that has no effect, and says so.
    assert one(STATEMENTS, run["created_at"]) <= len(DAYS)
    knob = Settings.model_fields["FICHE_SALES_CACHE_CONCURRENCY"]
    assert (knob.default, (knob.description or "").partition(",")[0]) == (10, "No effect")

    picked = query("SELECT fiche_id FROM fiche_cache WHERE sales_date = %s ORDER BY id LIMIT 3", MONDAY)
    assert sorted(world.results(run_id)) == sorted(fiche for (fiche,) in picked)
    assert run["total_fiches"] == 3
    assert selection_log(world, run_id) == [
        "Calculated 5 dates to query",
        "Revalidating fiche cache for 5 date(s) before automation",
        f"Loaded {len(listed)} fiches from DB",
        "Final: 3 fiches to process",
    ]
    dropped = {"max_fiches": len(listed) - 3}
    assert run["config_snapshot"]["selection_summary"]["selection"] == {"picked": 3, "dropped": dropped}
    ((_, payload),) = world.events(run_id, "automation.run.selection")
    assert (payload["job_id"], payload["total_fiches"]) == (f"automation-run-{run_id}", 3)
    assert payload["fiche_ids"] == [fiche for (fiche,) in picked]
    assert (payload["selection"]["start_date"], payload["selection"]["max_fiches"]) == ("2026-03-02", 3)
    assert one("SELECT count(*) FROM fiche_cache WHERE fiche_id = '8888'") == 1


@pytest.mark.req("AUT-64", "AUT-65", "AUT-66", "AUT-45", "AUT-162", "G-83")
async def test_days_that_the_crm_does_not_list_are_taken_from_the_cache_and_named(automate):
    world = await automate()
    refused, broken, cut = DAYS[1:4]
    world.sandbox.set_faults(
        out_of_order(refused, kind="unauthorized") + out_of_order(broken) + out_of_order(cut, kind="reset")
    )
    await known(world, broken, f1001="Lyon")
    run_id = await world.trigger(await world.schedule(fiche_selection=over(refused, cut), **ONLY_DETAILS))
    run = await world.ended(run_id)
    assert (run["status"], run["end_cause"], run["error_message"]) == ("completed", "normal", None)
    assert world.results(run_id) == {"1001": ("successful", None)}

    errors = run["error_details"]["apiErrors"]
    assert [(e["date"], e["code"], e["status"]) for e in errors] == [
        (at_the_crm(refused), "UNAUTHORIZED", 401),
        (at_the_crm(broken), "VENDOR_ERROR_503", 503),
        (at_the_crm(cut), "VENDOR_DISCONNECTED", None),
    ]
    assert all("crm GET /sales" in e["error"] for e in errors)
    days = [day.isoformat() for day in (refused, broken, cut)]
    message = "The selection is incomplete, of these days it has only fiches known before: the CRM did not list 3 of 3"
    message += f" days ({', '.join(days)}): {errors[0]['error']}"
    assert log_rows(world, run_id, message) == [("warning", {"apiErrors": errors})]
    assert run["error_details"] == {"apiErrors": errors, "missing_days": days, "selection_incomplete": message}
    calls = asked(world, "crm")
    assert [calls.count(at_the_crm(day)) for day in (refused, broken, cut)] == [1, 3, 3]


PARIS_UNAUDITED = {"groupes": ["Paris"], "only_unaudited": True, "only_with_recordings": True}


@pytest.mark.req("AUT-68", "AUT-69", "AUT-70", "AUT-72", "AUT-73", "AUT-102", "AUT-163", "AUT-105")
async def test_what_a_sales_list_may_lack_is_judged_by_the_details(automate, query):
    world = await automate()
    config = await world.config()
    world.sandbox.set_faults(out_of_order(MONDAY))
    # By their numbers, 1000, 1004, 1008 and 9100 are of Paris, 1001 and 1005 of Lyon; 9100 has no recordings.
    await known(world, MONDAY, f1000="Paris", f1001="Lyon", f1004=None, f1005=None, f1008="Paris", f9100="Paris")
    query("INSERT INTO tenants (id, name, created_at) VALUES ('other', 'Other', now())")
    await known(world, MONDAY, tenant="other", f1012="Paris")
    query(
        "INSERT INTO audits (tenant_id, run_id, fiche_cache_id, fiche_id, audit_config_id, config_version,"
        " trigger_source, status, is_latest, error_code, error, finished_at, created_at)"
        " SELECT tenant_id, 0, id, fiche_id, %s, 1, 'api', 'failed', true, 'X', 'x', ecluse_now(), ecluse_now()"
        " FROM fiche_cache WHERE fiche_id = '1008'",
        config,
    )
    run_id = await world.trigger(
        await world.schedule(fiche_selection=over(mode="filter", **PARIS_UNAUDITED), **ONLY_DETAILS)
    )
    run = await world.ended(run_id)
    assert world.results(run_id) == {
        "1000": ("successful", None),
        "1004": ("successful", None),
        "1005": ("ignored", "Groupe 'Lyon' is not among those selected"),
        "9100": ("ignored", "It has no recordings"),
    }
    assert "Loaded 6 fiches from DB" in world.logs(run_id)
    assert run["config_snapshot"]["selection_summary"] == {
        "selection": {"picked": 4, "dropped": {"groupe": 1, "audited": 1}},
        "filters": {"picked": 2, "ignored": {"GROUPE": 1, "NO_RECORDINGS": 1}, "failed": {}},
    }
    assert (run["status"], run["total_fiches"], run["ignored_fiches"]) == ("completed", 2, 2)
    everything = await world.run_over(fiche_selection=over(), **ONLY_DETAILS)
    assert set(world.results(everything["id"])) == {"1000", "1001", "1004", "1005", "1008", "9100"}


@pytest.mark.req("AUT-29", "AUT-58", "AUT-186", "AUT-44", "G-47", "G-88")
async def test_a_list_made_by_hand_is_split_cleaned_and_cut_and_may_be_another_one_this_time(automate):
    world = await automate()
    given = {"mode": "manual", "fiche_ids": " 1003, 1001\n1002,,1001\t1003  1000 ", "max_fiches": 3}
    schedule = await world.schedule(fiche_selection=given, **ONLY_DETAILS)
    first = await world.trigger(schedule)
    await world.ended(first)
    assert sorted(world.results(first)) == ["1001", "1002", "1003"]
    assert selection_log(world, first) == [
        "Processing manual fiche selection",
        "Using 3 manually selected fiches",
        "Final: 3 fiches to process",
    ]
    ((_, payload),) = world.events(first, "automation.run.selection")
    assert (payload["total_fiches"], payload["fiche_ids"]) == (3, ["1003", "1001", "1002"])
    assert "sales" not in str([entry["path"] for entry in world.sandbox.ledger(vendor="crm")])

    second = await world.trigger(schedule, fiche_ids=["1004", "9100"], max_fiches=None, only_with_recordings=True)
    run = await world.ended(second)
    assert world.results(second) == {"1004": ("successful", None), "9100": ("ignored", "It has no recordings")}
    snapshot = run["config_snapshot"]
    assert snapshot["overrides"] == {"fiche_ids": 2, "max_fiches": None, "only_with_recordings": True}
    assert (snapshot["selection"]["mode"], snapshot["selection"]["only_with_recordings"]) == ("manual", True)
    stated = world.stated(schedule)
    assert stated["fiche_selection_fiche_ids"] == ["1003", "1001", "1002", "1000"]
    assert (stated["fiche_selection_max_fiches"], stated["fiche_selection_only_with_recordings"]) == (3, False)
    assert world.run(first)["config_snapshot"]["overrides"] is None


@pytest.mark.req("AUT-29")
@pytest.mark.parametrize("count", [200, 201])
async def test_of_a_long_list_events_name_the_first_and_count_them_all(automate, connection, query, count):
    """Without a worker: a manual list is announced at once, and no vendor is called."""
    world = await automate(kit={"roles": frozenset({"api"})})
    ids = [str(1000 + n) for n in range(count, 0, -1)]
    run = await load_run(connection, await world.trigger(await world.schedule("7"), fiche_ids=ids))
    await events.begun(connection, run)
    await snapshot.make(connection, run)
    assert await select.select(connection, run) == count
    ((_, payload),) = world.events(run.id, "automation.run.selection")
    assert (payload["job_id"], payload["total_fiches"]) == (f"automation-run-{run.id}", count)
    assert (payload["fiche_ids"], payload.get("truncated", False)) == (ids[:200], count > 200)
    assert (payload["selection"]["mode"], "fiche_ids" in payload["selection"]) == ("manual", False)
    ((_, asked_for),) = world.events(run.id, "automation/run")
    given = asked_for["override_fiche_selection"]
    assert (given["fiche_ids"], given.get("fiche_ids_given", count)) == (ids[:200], count)
    assert query("SELECT count(*) FROM outcomes WHERE run_id = %s", run.id) == [(count,)], "all of them are targets"


@pytest.mark.req("AUT-18", "AUT-44", "AUT-60", "G-90")
async def test_a_run_goes_by_its_schedule_as_it_was_and_by_the_days_of_its_due_instant(automate, query):
    world = await automate()
    world.sandbox.set_faults(out_of_order(MONDAY))
    await known(world, MONDAY, f1000="Paris")
    schedule = await world.schedule(
        name="Yesterday's calls",
        schedule_type="CRON",
        cron_expression="30 23 2 3 *",
        timezone="America/New_York",
        fiche_selection={"mode": "date_range", "date_range": "yesterday"},
        **ONLY_DETAILS,
    )
    # 23:30 on 3 March over there is the 4th in UTC already; yesterday is the 2nd.
    due = datetime(2026, 3, 4, 4, 30, tzinfo=UTC)
    run = await start_run(world.kit, world.fired(schedule, due))
    ended = await world.ended(run.run.id)
    async with world.kit.pool.connection() as connection:
        changes = Changes.model_validate({"name": "Another", "run_audits": True, "timezone": "UTC"})
        guard = GuardedHttp([])
        await schedules.update(connection, world.flow, "default", schedule, changes, secrets=None, guard=guard)
    assert list(world.results(run.run.id)) == ["1000"]
    assert asked(world, "crm")[0] == at_the_crm(MONDAY)
    snapshot = world.run(run.run.id)["config_snapshot"]
    assert snapshot == ended["config_snapshot"]
    assert (snapshot["schedule_name"], snapshot["schedule_type"]) == ("Yesterday's calls", "CRON")
    assert (snapshot["run_audits"], snapshot["timezone"]) == (False, "America/New_York")
    assert datetime.fromisoformat(snapshot["due_at"]) == due
    payload = dict(world.events(run.run.id))["automation/run"]
    assert (payload["schedule_id"], datetime.fromisoformat(payload["due_at"])) == (str(schedule), due)


@pytest.mark.req("AUT-59", "AUT-122", "AUT-125", "G-42", "AUT-56")
async def test_a_run_without_anything_to_do_is_completed_and_says_why(automate):
    world = await automate()
    await known(world, MONDAY, **{f"f{fiche}": "Paris" for fiche in sold(world, MONDAY)})
    empty = {"mode": "manual", "fiche_ids": []}
    cases = {
        "no_fiches_manual": await world.schedule(fiche_selection=empty),
        "no_fiches": await world.schedule(fiche_selection=over(mode="filter", groupes=["nowhere"])),
        "all_ignored": await world.schedule("9300", "9302"),
    }
    for reason, schedule in cases.items():
        run_id = await world.trigger(schedule)
        run = await world.ended(run_id)
        assert (run["status"], run["result_summary"]["reason"]) == ("completed", reason)
        assert (run["total_fiches"], run["phase"]) == (0, None)
        names = [name for name, _ in world.events(run_id)]
        assert names[-2:] == ["automation/completed", "automation.run.completed"]
        assert names.count("automation.run.selection") == 1
        assert world.stated(schedule)["last_run_status"] == "success"
        assert log_rows(world, run_id, "Automation run completed")[0][1]["reason"] == reason


@pytest.mark.req("AUT-171", "AUT-64", "AUT-66", "G-43", "G-42")
@pytest.mark.parametrize("kind", ["unauthorized", "server_error"])
async def test_a_run_for_which_days_were_refused_and_nothing_was_selected_has_failed(automate, query, kind):
    """One of two days was listed, but nothing of it is wanted: what the other one had is not known."""
    world = await automate()
    await known(world, MONDAY, **{f"f{fiche}": "Paris" for fiche in sold(world, MONDAY)})
    tuesday = DAYS[1]
    world.sandbox.set_faults(out_of_order(tuesday, kind=kind))
    schedule = await world.schedule(fiche_selection=over(MONDAY, tuesday, mode="filter", groupes=["nowhere"]))
    run_id = await world.trigger(schedule)
    run = await world.ended(run_id)
    assert (run["status"], run["error_code"]) == ("failed", "CRM_UNAVAILABLE")
    assert run["error_message"].startswith(
        "No fiche was selected: the CRM did not list 1 of 2 days (2026-03-03): crm GET /sales: "
    )
    assert (run["error_details"]["missing_days"], run["total_fiches"]) == (["2026-03-03"], 0)
    assert world.stated(schedule)["last_run_status"] == "failed"
    names = [name for name, _ in world.events(run_id)]
    assert (names.count("automation.run.failed"), names.count("automation.run.completed")) == (1, 0)
    assert log_rows(world, run_id, run["error_message"])[0][0] == "error"
    assert query("SELECT selected, successful, failed, ignored FROM runs WHERE id = %s", run_id) == [(0, 0, 0, 0)]
    assert "reason" not in run["result_summary"], "no_fiches would be untrue: the day was not listed"
    assert run["result_summary"]["missing_days"] == ["2026-03-03"]


@pytest.mark.req("AUT-76", "AUT-171")
async def test_a_selection_that_failed_fails_again_when_its_step_is_repeated(automate, monkeypatch):
    world = await automate()
    world.sandbox.set_faults(out_of_order(MONDAY))
    once, seen = durable.step, []

    async def repeated(name, function):
        if name != "select-fiches":
            return await once(name, function)
        with pytest.raises(select.CrmUnavailable):
            await once(f"{name}, lost", function)
        seen.append(name)
        return await once(name, function)

    monkeypatch.setattr(durable, "step", repeated)
    run = await world.run_over(fiche_selection=over())
    assert (run["status"], run["error_code"], seen) == ("failed", "CRM_UNAVAILABLE", ["select-fiches"])
