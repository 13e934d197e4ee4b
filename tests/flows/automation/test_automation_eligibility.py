"""Full details of every candidate, and what they decide: who goes on, who does not count, who has failed and why."""

from __future__ import annotations

import pytest

from ecluse.flows.connections import registry
from tests.support.automation_scenes import MONDAY, NO_AUDITS, ONLY_DETAILS, asked, known, log_rows, out_of_order, over
from tests.support.fiche_rows import call, details, save
from tests.support.notify_world import new_secrets

STOPPED = ("ignored", "Skipped: earlier stage failed (continueOnError=false)")


async def in_full(world, *fiche_ids, calls=1):
    """As an earlier fetch has left them."""
    async with world.kit.pool.connection() as connection:
        answer = details(*(call(f"old-{n}") for n in range(calls)), groupe="Old")
        await save(connection, *((fiche_id, answer) for fiche_id in fiche_ids))


IGNORED = """
SELECT fiche_id, recordings_count FROM automation_run_fiche_results WHERE run_id = %s AND status = 'ignored'
"""
GROUPES = """
SELECT i.groupe FROM fiche_cache f JOIN fiche_cache_information i ON i.fiche_cache_id = f.id
WHERE f.fiche_id IN ('1000', '1001', '1002') ORDER BY f.fiche_id
"""


@pytest.mark.req(
    "AUT-20", "AUT-48", "AUT-52", "AUT-74", "AUT-78", "AUT-96", "AUT-97", "AUT-98", "AUT-101", "AUT-103", "AUT-104"
)
@pytest.mark.req("AUT-160", "AUT-161", "AUT-173", "AUT-187", "G-42")
async def test_every_candidate_is_fetched_anew_and_judged_by_what_came(automate, query):
    world = await automate(max_recordings=11)
    await in_full(world, "1000")
    await known(world, MONDAY, f1001="Lyon")
    # 9300 says so with 404, 9301 with 200; 9400 has twelve recordings, 9100 none.
    fiche_ids = ["1000", "1001", "1002", "9100", "9300", "9301", "9400"]
    run_id = await world.trigger(await world.schedule(*fiche_ids, **ONLY_DETAILS))
    run = await world.ended(run_id)
    assert sorted(asked(world, "crm")) == fiche_ids
    assert {key for (key,) in query("SELECT key FROM items WHERE stage = 'fetch'")} == set(fiche_ids)
    assert query(GROUPES) == [("Paris",), ("Lyon",), ("Marseille",)]
    gone = ("ignored", "Fiche not found (404)")
    assert world.results(run_id) == {
        **dict.fromkeys(("1000", "1001", "1002", "9100"), ("successful", None)),
        **dict.fromkeys(("9300", "9301"), gone),
        "9400": ("ignored", "12 recordings, and 11 is the most"),
    }
    assert dict(query(IGNORED, run_id)) == {"9300": 0, "9301": 0, "9400": 12}
    assert (run["status"], run["total_fiches"], run["successful_fiches"], run["ignored_fiches"]) == (
        "completed",
        4,
        4,
        3,
    )
    assert query("SELECT details_success, details_message FROM fiche_cache WHERE fiche_id = '9301'") == [
        (False, "NOT_FOUND")
    ]

    logs = [line for line in world.logs(run_id) if line.startswith(("Dispatched", "Fiche detail"))]
    progress = [line for line in logs if line.startswith("Fiche details progress: ")]
    assert logs == [
        "Dispatched fiche/fetch fan-out events",
        *progress,
        "Fiche detail fetch complete (distributed)",
    ]
    assert progress[-1] == "Fiche details progress: 7/7"
    ids = [f"automation-{run_id}-fetch-{fiche}" for fiche in fiche_ids[:3]]
    assert log_rows(world, run_id, "Dispatched fiche/fetch fan-out events") == [
        ("info", {"fiches": 7, "event_ids": ids})
    ]

    # The schedule's own limit goes before the general one; a filter may make it fewer still.
    chosen = {
        "mode": "manual",
        "fiche_ids": ["9400", "9100"],
        "max_recordings_per_fiche": 12,
        "only_with_recordings": True,
    }
    own = await world.run_over(fiche_selection=chosen, **ONLY_DETAILS)
    assert world.results(own["id"]) == {"9400": ("successful", None), "9100": ("ignored", "It has no recordings")}
    assert dict(query(IGNORED, own["id"])) == {"9100": 0}


@pytest.mark.req("AUT-51", "AUT-53", "AUT-98", "AUT-106", "AUT-172", "AUT-175", "AUT-82", "G-83")
async def test_details_that_cannot_be_had_fail_a_fiche_unless_they_are_known_already(automate, query):
    world = await automate()
    await in_full(world, "1000")
    await known(world, MONDAY, f1002="Marseille")
    query(
        "INSERT INTO fiche_cache (tenant_id, fiche_id, raw_data, created_at, updated_at) VALUES"
        """ ('default', '1003', '{"seen": true}', now(), now()), ('default', '1004', '{"information":"""
        """ {"groupe": "Paris"}, "recordings": [{}, {}, {}]}', now(), now())"""
    )
    fiches = ["1000", "1001", "1002", "1003", "1004"]
    world.sandbox.set_faults([{"kind": "server_error", "vendor": "crm", "ids": fiches}])
    limit = {"mode": "manual", "fiche_ids": [*fiches, "1005"], "max_recordings_per_fiche": 2}
    run_id = await world.trigger(await world.schedule(fiche_selection=limit, run_transcription=False, run_audits=False))
    run = await world.ended(run_id)
    results = world.results(run_id)
    texts = {
        "1001": "Fiche not found in cache",
        "1002": "Fiche details not fetched (still sales-list-only cache)",
        "1003": "Fiche details not fetched (cache incomplete)",
    }
    for fiche, text in texts.items():
        status, error = results.pop(fiche)
        assert (status, (error or "").partition(": ")[0]) == ("failed", text)
        assert f"crm GET /fiches/{fiche}: 503" in (error or "")
    # 1004 is of an older version, with three recordings; 1005 has six.
    assert results == {
        "1000": ("successful", None),
        "1004": ("ignored", "3 recordings, and 2 is the most"),
        "1005": ("ignored", "6 recordings, and 2 is the most"),
    }
    assert run["status"] == "partial"
    assert run["config_snapshot"]["selection_summary"]["filters"] == {
        "picked": 1,
        "ignored": {"TOO_MANY_RECORDINGS": 2},
        "failed": {"DETAILS_NOT_FETCHED": 3},
    }
    message = "2 fiches go on with the details known before: they could not be fetched anew"
    ((level, data),) = log_rows(world, run_id, message)
    assert (level, sorted(data["sample"])) == ("warning", ["1000", "1004"])
    assert {ref: asked(world, "crm").count(ref) for ref in fiches} == dict.fromkeys(fiches, 3)
    why = query("SELECT message, level FROM automation_logs WHERE run_id = %s AND event_id = %s",
                run_id, f"automation-{run_id}-fetch-1001")  # fmt: skip
    assert why[0][1] == "error"
    assert "503" in why[0][0]


@pytest.mark.req("AUT-107", "AUT-172", "G-31")
async def test_who_does_not_go_on_after_an_error_stops_after_the_details(automate):
    world = await automate()
    await world.config()
    world.sandbox.set_faults([{"kind": "server_error", "vendor": "crm", "ids": ["1001"]}])
    stopped = await world.run_over("1000", "1001", "9300", continue_on_error=False)
    assert world.results(stopped["id"])["1000"] == STOPPED
    assert world.results(stopped["id"])["1001"][0] == "failed"
    assert world.results(stopped["id"])["9300"] == ("ignored", "Fiche not found (404)")
    assert (stopped["status"], stopped["total_fiches"], stopped["ignored_fiches"]) == ("failed", 1, 2)
    ((level, _),) = log_rows(world, stopped["id"], "Stopped: a fiche has failed, and continueOnError is false")
    assert level == "warning"
    only_audits = await world.run_over("1000", "1001", continue_on_error=False, run_transcription=False)
    assert (only_audits["status"], world.results(only_audits["id"])["1000"]) == ("failed", STOPPED)
    assert (asked(world, "elevenlabs"), asked(world, "llm")) == ([], [])
    # Where nothing comes after the details, nothing is left out.
    done = await world.run_over("1000", "1001", continue_on_error=False, **ONLY_DETAILS)
    assert (done["status"], world.results(done["id"])["1000"]) == ("partial", ("successful", None))
    goes_on = await world.run_over("1000", "1001", **NO_AUDITS)
    assert (goes_on["status"], goes_on["transcriptions_run"]) == ("partial", 1)
    assert set(asked(world, "elevenlabs")) == {"1000-1"}


@pytest.mark.req("AUT-171", "AUT-65", "G-90")
async def test_a_schedule_has_a_key_of_its_own_for_the_crm(automate, query):
    """The general one is refused by this CRM."""
    secrets = new_secrets()
    world = await automate(crm={"crm_key": "forbidden", "read_secret": secrets.get})
    day = {"fiche_selection": over(max_fiches=1), **ONLY_DETAILS}
    await known(world, MONDAY, f1000="Paris")
    general = await world.run_over(**day)
    refused = await world.run_over(**day, secrets=secrets, external_api_key="forbidden")
    own = await world.run_over(**day, secrets=secrets, external_api_key="a good one")
    for run, whose in ((general, "CRM_API_KEY"), (refused, "the API key of this schedule")):
        (error,) = run["error_details"]["apiErrors"]
        assert (error["code"], error["status"]) == ("FORBIDDEN", 403)
        assert f"the CRM does not accept {whose}" in error["error"]
        status, why = world.results(run["id"])["1000"]
        assert status == "failed"
        assert why.startswith("Fiche details not fetched (still sales-list-only cache): crm GET /fiches/1000: 403")
        assert (run["status"], run["end_cause"]) == ("failed", "normal")
    assert (own["status"], own["error_details"]) == ("completed", None)
    keys = query("SELECT to_jsonb(i)::text FROM items i") + query(
        "SELECT to_jsonb(f)::text FROM automation_run_facts f"
    )
    assert "a good one" not in str(keys + query("SELECT to_jsonb(e)::text FROM events_outbox e"))
    gone = await world.schedule("1001", secrets=secrets, external_api_key="soon gone", **ONLY_DETAILS)
    query("DELETE FROM secrets")
    run = await world.ended(await world.trigger(gone))
    assert "own API key no longer exists" in world.results(run["id"])["1001"][1]


@pytest.mark.req("G-81")
async def test_a_fiche_is_processed_under_whatever_name_the_crm_has_for_it(automate, query):
    """Sold on a day, and named by hand; fetched and transcribed."""
    world = await automate()
    await known(world, MONDAY, f1000="Paris")
    await in_full(world, "FR-1001")
    query("UPDATE fiche_cache SET sales_date = %s WHERE fiche_id = 'FR-1001'", MONDAY)
    world.sandbox.set_faults(out_of_order(MONDAY))
    sold = await world.run_over(fiche_selection=over(MONDAY), **NO_AUDITS)
    named = await world.ended(await world.trigger(await world.schedule("FR-1001", "FR/1002", **NO_AUDITS)))
    assert world.results(sold["id"]) == dict.fromkeys(("1000", "FR-1001"), ("successful", None))
    assert world.results(named["id"]) == dict.fromkeys(("FR-1001", "FR/1002"), ("successful", None))
    assert {"1000", "FR-1001", "FR/1002"} <= set(asked(world, "crm"))


async def test_a_key_that_was_changed_a_moment_ago_is_asked_for(automate, monkeypatch):
    monkeypatch.setattr(registry, "REFUSED_SECONDS", 0.0)
    secrets = new_secrets()
    world = await automate(crm={"read_secret": secrets.get})
    schedule = await world.schedule("1000", secrets=secrets, external_api_key="forbidden", **ONLY_DETAILS)
    assert (await world.ended(await world.trigger(schedule)))["status"] == "failed"
    async with world.kit.pool.connection() as connection:
        await secrets.put(connection, "default", f"schedule:{schedule}", "another")
    assert (await world.ended(await world.trigger(schedule)))["status"] == "completed"
