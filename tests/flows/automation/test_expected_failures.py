"""A fiche that is known to fail is reported as soon as that is known, while the rest of the run still waits, and in the
same words at the end of the run."""

from __future__ import annotations

import asyncio

import pytest

from ecluse.flows.automation import queries
from ecluse.insight import run_queries as engine
from tests.support.automation_scenes import NO_AUDITS, held_up, log_rows
from tests.support.automation_trouble import Deaf, maker
from tests.support.automation_world import PATIENCE
from tests.support.fiche_rows import call, details, save
from tests.support.transcription_world import until

PROVIDER = "elevenlabs"
NO_URL = "1 of 3 recordings has no URL in the CRM (9200-2)"
KNOWN = "SELECT finished_at FROM items WHERE key = %s AND status = 'failed'"


@pytest.fixture
def troubled(start_kit, sandbox, query):
    return maker(start_kit, sandbox, query)


async def reported(world, run_id, fiche_id):
    """Return what the run reports about a fiche, how many will fail, and the first outcome of its list."""
    async with world.kit.pool.connection() as connection, connection.transaction():
        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")  # the run goes on meanwhile
        fiches = await queries.list_fiches(connection, "default", run_id, limit=50, offset=0)
        run = await queries.show_run(connection, "default", run_id, PATIENCE)
        plain = await engine.show_run(connection, "default", run_id)
        outcomes = (await engine.results(connection, run_id, reasons=10, limit=1))["outcomes"]
    assert run["will_fail"] == plain["will_fail"]
    (fiche,) = [one for one in fiches if one["fiche_id"] == fiche_id]
    return fiche, run["will_fail"], outcomes[0] if outcomes else None


@pytest.mark.req("G-30", "AUT-175", "AUT-177")
async def test_a_recording_without_a_url_is_reported_while_the_provider_is_paused(automate, query):
    world = await automate()
    async with held_up(world, PROVIDER):
        run_id = await world.trigger(await world.schedule("1000", "9200", **NO_AUDITS))
        await until(lambda: query("SELECT selected FROM runs WHERE id = %s AND selected > 0", run_id))
        while not (seen := await reported(world, run_id, "9200"))[0]["will_fail"]:
            await asyncio.sleep(0.1)
        assert query("SELECT ecluse_now() - finished_at < interval '3 seconds' FROM items WHERE key = '9200-2'") == [
            (True,)
        ]
        fiche, counted, first = seen
        assert (fiche["status"], fiche["will_fail"]) == ("open", {"code": "NO_URL", "reason": NO_URL})
        assert counted == {"count": 1, "codes": {"NO_URL": 1}}
        assert (first["target"], first["outcome"], first["will_fail"]) == ("9200", None, fiche["will_fail"])
        other, *_ = await reported(world, run_id, "1000")
        assert (other["status"], other["will_fail"]) == ("open", None)
    await world.ended(run_id)
    rows = query("SELECT outcome, error_code, reason FROM outcomes WHERE run_id = %s AND target = '9200'", run_id)
    assert rows == [("failed", "NO_URL", NO_URL)], "the same words as before"
    fiche, counted, _ = await reported(world, run_id, "9200")
    assert (fiche["will_fail"], counted) == (None, {"count": 0, "codes": {}})


@pytest.mark.req("G-30", "AUT-175")
async def test_a_definite_refusal_is_reported_while_other_recordings_wait(troubled, sandbox, query):
    sandbox.set_faults(
        [{"kind": "refused", "status": 422, "code": "invalid_audio", "vendor": PROVIDER, "ids": ["1001-2"]}]
    )
    slow = Deaf("transcribe", "1001-1", "1000-1")
    world = await troubled(deaf_speech=slow)
    run_id = await world.trigger(await world.schedule("1000", "1001", **NO_AUDITS))
    await until(lambda: query(KNOWN, "1001-2"))
    fiche, counted, _ = await reported(world, run_id, "1001")
    assert fiche["status"] == "open"
    code, reason = fiche["will_fail"]["code"], fiche["will_fail"]["reason"]
    assert counted == {"count": 1, "codes": {code: 1}}
    assert reason.startswith("1 of 2 recordings: elevenlabs: 422 invalid_audio")
    assert reason.endswith(" (1001-2)")
    slow.let.set()
    await world.ended(run_id)
    assert world.results(run_id) == {"1000": ("successful", None), "1001": ("failed", reason)}
    assert world.run(run_id)["result_summary"]["reasons"] == {code: 1}
    assert "timeout/stall" not in " ".join(world.logs(run_id))
    ((level, facts),) = log_rows(world, run_id, f"Transcription failed (fiches): 1 × {code} - recordings completed 2/3")  # noqa: RUF001
    assert (level, facts["sample"]) == ("warning", [f"1001: {reason}"])


@pytest.mark.req("G-83")
async def test_what_may_heal_in_a_further_round_is_not_said_to_fail(troubled, sandbox, query):
    sandbox.set_faults([{"kind": "server_error", "vendor": PROVIDER, "ids": ["1001-2"]}])
    slow = Deaf("transcribe", "1000-1")
    world = await troubled(deaf_speech=slow, speech={"attempts": 1})
    again = await world.trigger(await world.schedule("1001", "1000", retry_failed=True, max_retries=1, **NO_AUDITS))
    failed = "SELECT count(*) FROM items WHERE key = '1001-2' AND status = 'failed' AND NOT permanent"
    await until(lambda: query(failed) == [(1,)])
    assert query("SELECT round, rounds FROM stages WHERE stage = 'transcribe'") == [(0, 1)]
    of_run = "SELECT target FROM expected_failures WHERE run_id = %s"
    assert query(of_run, again) == []
    # In the last round there it is final, though an error of this kind may pass.
    await until(lambda: query(failed) == [(2,)])
    fiche, *_ = await reported(world, again, "1001")
    assert fiche["will_fail"]["reason"].startswith("1 of 2 recordings: ")
    slow.let.set()
    await world.ended(again)
    assert world.results(again)["1001"] == ("failed", fiche["will_fail"]["reason"])


@pytest.mark.req("AUT-111")
async def test_what_is_repaired_in_time_is_not_said_to_fail_any_more(automate, query):
    """Another run transcribes it while this run waits: the recordings decide."""
    world = await automate()
    async with held_up(world, PROVIDER):
        run_id = await world.trigger(await world.schedule("9200", "1000", **NO_AUDITS))
        await until(lambda: query("SELECT 1 FROM expected_failures WHERE run_id = %s", run_id))
        query(
            "UPDATE recordings SET has_transcription = true, transcription_text = 'said', transcribed_at = ecluse_now()"
            " WHERE call_id = '9200-2'"
        )
        assert query("SELECT 1 FROM expected_failures WHERE run_id = %s", run_id) == []
    await world.ended(run_id)
    assert world.results(run_id)["9200"] == ("successful", None)


@pytest.mark.req("G-30", "AUT-175")
async def test_the_first_cause_names_the_code_and_the_others_are_counted(troubled, sandbox, query):
    sandbox.set_faults(
        [{"kind": "refused", "status": 422, "code": "invalid_audio", "vendor": PROVIDER, "ids": ["9203-1"]}]
    )
    world = await troubled()
    async with held_up(world, PROVIDER):
        run_id = await world.trigger(await world.schedule("9203", **NO_AUDITS))
        await until(lambda: query(KNOWN, "9203-2"))
    await world.ended(run_id)
    ((code, reason),) = query("SELECT error_code, reason FROM outcomes WHERE run_id = %s", run_id)
    recordings = query("SELECT count(*) FROM recordings")[0][0]
    assert code == "NO_URL"
    assert reason == f"1 of {recordings} recordings has no URL in the CRM (9203-2); 1 more failed (VENDOR_REFUSED)"


@pytest.mark.req("AUT-106", "AUT-171")
async def test_a_fiche_that_the_crm_refuses_will_fail_unless_its_details_are_known(
    troubled, connection, sandbox, query
):
    sandbox.set_faults([{"kind": "unauthorized", "vendor": "crm", "ids": ["1001", "1002"]}])
    slow = Deaf("fiche", "1000")
    world = await troubled(fiches=slow)
    await save(connection, ("1002", details(call("1002-1"))))
    run_id = await world.trigger(await world.schedule("1000", "1001", "1002", **NO_AUDITS))
    await until(lambda: query("SELECT count(*) FROM items WHERE stage = 'fetch' AND status = 'failed'") == [(2,)])
    fiche, counted, _ = await reported(world, run_id, "1001")
    assert counted == {"count": 1, "codes": {"DETAILS_NOT_FETCHED": 1}}
    assert "401" in fiche["will_fail"]["reason"]
    slow.let.set()
    await world.ended(run_id)
    assert world.results(run_id)["1001"][0] == "failed"
