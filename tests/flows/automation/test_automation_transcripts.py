"""Transcripts of a run's fiches: made by runs of their own, waited for by what the recordings say."""

from __future__ import annotations

import pytest

from ecluse.flows.transcriptions.start import start
from tests.support.automation_scenes import NO_AUDITS, asked, held_up, log_rows
from tests.support.transcription_world import until

PROVIDER = "elevenlabs"
WRITTEN_DOWN = """
UPDATE recordings r SET has_transcription = true, transcription_text = 'said', transcribed_at = ecluse_now()
FROM fiche_cache f WHERE f.id = r.fiche_cache_id AND f.fiche_id = %s
"""
CHILDREN = """
SELECT input ->> 'fiche_id', event_key, input ->> 'priority', input ->> 'wait_for_completion', input ->> 'refresh'
FROM runs WHERE parent_run_id = %s AND flow = 'transcription' ORDER BY id
"""
DISPATCHED = "Dispatched fiche/transcribe fan-out events"


def linked(world, run_id):
    return dict(
        world.query("SELECT fiche_id, transcription_run_id FROM automation_run_fiches WHERE run_id = %s", run_id)
    )


async def waits(world, run_id):
    """Until it has looked at its transcripts."""
    await until(lambda: any(line.startswith("Transcription progress: ") for line in world.logs(run_id)))


@pytest.mark.req("AUT-21", "AUT-43", "AUT-79", "AUT-108", "AUT-109", "AUT-110", "AUT-111", "AUT-164", "AUT-188")
@pytest.mark.req("G-82", "G-88")
async def test_fiches_with_recordings_are_dispatched_once_and_all_are_waited_for(automate, query):
    world = await automate(chunk=2)
    run_id = await world.trigger(
        await world.schedule("1000", "1001", "1002", "9100", "9300", transcription_priority="high", **NO_AUDITS)
    )
    run = await world.ended(run_id)
    names = [f"automation-{run_id}-transcribe-{fiche}" for fiche in ("1000", "1001", "1002")]
    assert query(CHILDREN, run_id) == [
        (fiche, name, "high", "false", "false") for fiche, name in zip(("1000", "1001", "1002"), names, strict=True)
    ]
    events = query("SELECT event_key, payload FROM events_outbox WHERE event_type = 'fiche/transcribe' ORDER BY id")
    assert [name for name, _ in events] == names
    request = {"fiche_id": "1000", "priority": "high", "wait_for_completion": False}
    assert request.items() <= events[0][1].items()
    # 1000 has one recording, 1001 two, 1002 three. A fiche that was just fetched is not fetched again.
    assert sorted(asked(world, PROVIDER)) == ["1000-1", "1001-1", "1001-2", "1002-1", "1002-2", "1002-3"]
    assert sorted(asked(world, "crm")) == ["1000", "1001", "1002", "9100", "9300"]
    assert (run["status"], run["transcriptions_run"], run["audits_run"]) == ("completed", 6, 0)
    progress = [line for line in world.logs(run_id) if line.startswith("Transcription progress: ")]
    assert progress[-1] == "Transcription progress: 6/6"
    assert log_rows(world, run_id, DISPATCHED) == [("info", {"fiches": 3, "skipped": 0, "event_ids": names})]

    # One of 1002's is lost: it alone is dispatched, and the gate counts those of all.
    query("UPDATE recordings SET has_transcription = false WHERE call_id = '1002-2'")
    query("DELETE FROM speech_results")
    again = await world.run_over("1000", "1001", "1002", **NO_AUDITS)
    ((_, data),) = log_rows(world, again["id"], DISPATCHED)
    assert (data["fiches"], data["skipped"]) == (1, 2)
    assert "Transcription progress: 6/6" in world.logs(again["id"])
    assert asked(world, PROVIDER)[6:] == ["1002-2"]
    assert again["transcriptions_run"] == 1
    # Who does not skip dispatches all of them; what is transcribed is not paid for again.
    third = await world.run_over("1000", "1001", "1002", skip_if_transcribed=False, **NO_AUDITS)
    assert [fiche for fiche, *_ in query(CHILDREN, third["id"])] == ["1000", "1001", "1002"]
    assert (third["status"], third["transcriptions_run"], len(asked(world, PROVIDER))) == ("completed", 0, 7)


@pytest.mark.req("AUT-87", "G-87")
async def test_no_more_runs_are_started_together_than_the_chunk_size_says(automate, query):
    world = await automate(chunk=2)
    fiches = ["1000", "1008", "1016", "1024", "1032"]
    run = await world.run_over(*fiches, **NO_AUDITS)
    together = query(
        "SELECT count(*)::int FROM run_log l JOIN runs r ON r.id = l.run_id WHERE r.parent_run_id = %s"
        " AND l.message = 'queued -> running' GROUP BY l.xmin::text ORDER BY min(l.id)",
        run["id"],
    )
    assert together == [(2,), (2,), (1,)]


@pytest.mark.req("AUT-111", "AUT-175", "AUT-177", "AUT-107", "G-31")
async def test_a_fiche_whose_recordings_cannot_all_be_had_fails_and_names_them(automate):
    """The gate, which has a quarter of an hour, does not wait for what is known to have failed."""
    world = await automate()
    await world.config()
    world.sandbox.set_faults(
        [{"kind": "refused", "status": 400, "code": "invalid_audio", "vendor": PROVIDER, "ids": ["1001-2"]}]
    )
    run_id = await world.trigger(await world.schedule("1000", "1001", "9200"))
    run = await world.ended(run_id)
    results = world.results(run_id)
    assert results["1000"] == ("successful", None)
    refused = "1 of 2 recordings: elevenlabs: 400 invalid_audio: a rule of the sandbox (1001-2)"
    assert results["1001"] == ("failed", refused)
    assert results["9200"] == ("failed", "1 of 3 recordings has no URL in the CRM (9200-2)")
    assert (run["status"], run["total_fiches"], run["audits_run"]) == ("partial", 3, 1)
    assert [line for line in world.logs(run_id) if line.endswith("completed 4/6")] == [
        "Transcription failed (fiches): 1 × VENDOR_REFUSED, 1 × NO_URL - recordings completed 4/6"  # noqa: RUF001 - as it is known
    ]
    assert "gate transcribe: done" in world.logs(run_id)
    assert [ref.rpartition("-audit-")[2] for ref in asked(world, "llm")] == ["1000-1"]

    stopped = await world.run_over("1000", "9200", continue_on_error=False)
    assert stopped["status"] == "failed"
    assert world.results(stopped["id"])["1000"] == (
        "ignored",
        "Skipped: earlier stage failed (continueOnError=false)",
    )
    last_stage = await world.run_over("1000", "9200", continue_on_error=False, **NO_AUDITS)
    assert (last_stage["status"], world.results(last_stage["id"])["1000"]) == ("partial", ("successful", None))
    assert len(asked(world, "llm")) == 1


@pytest.mark.req("AUT-03", "AUT-54", "AUT-75", "AUT-111", "G-45", "G-82")
async def test_a_fiche_in_another_transcription_run_is_waited_for(automate, query):
    world = await automate()
    by_hand = world.kit.flow("transcription")
    async with held_up(world, PROVIDER):
        async with world.kit.pool.connection() as connection:
            (manual,) = await start(connection, by_hand, "default", ["9000"], event_ids=["a click"])
        await until(lambda: query("SELECT 1 FROM items WHERE run_id = %s AND stage = 'recordings'", manual.run_id))
        run_id = await world.trigger(await world.schedule("9000", "1000", **NO_AUDITS))
        await waits(world, run_id)
        assert linked(world, run_id)["9000"] == manual.run_id
        assert [fiche for fiche, *_ in query(CHILDREN, run_id)] == ["1000"]
        # The table says that the other one is done, which is enough, whichever run did it.
        query(WRITTEN_DOWN, "1000")
        assert world.run(run_id)["phase"] == "transcribing"
        await until(lambda: "Transcription progress: 1/6" in world.logs(run_id))
    run = await world.ended(run_id)
    assert (run["status"], run["transcriptions_run"]) == ("completed", 0)
    paid = asked(world, PROVIDER, "paid")
    assert sorted(ref for ref in paid if ref.startswith("9000")) == [f"9000-{n}" for n in range(1, 6)]
    assert world.query("SELECT successful FROM runs WHERE id = %s", manual.run_id) == [(5,)]


@pytest.mark.req("AUT-76", "AUT-117", "AUT-22", "G-82", "G-88")
async def test_two_runs_over_the_same_fiches_at_once_pay_once_and_audit_each(automate, query):
    world = await automate()
    await world.config()
    fiches = ("9000", "1001", "9400")
    async with held_up(world, PROVIDER):
        first = await world.trigger(await world.schedule(*fiches))
        await waits(world, first)
        second = await world.trigger(await world.schedule(*fiches))
        await waits(world, second)
        assert linked(world, first) == linked(world, second)
    runs = [await world.ended(run_id) for run_id in (first, second)]
    assert [run["status"] for run in runs] == ["completed", "completed"]
    assert [run["transcriptions_run"] for run in runs] == [19, 0]
    assert [run["audits_run"] for run in runs] == [3, 3]
    paid = asked(world, PROVIDER, "paid")
    assert len(paid) == len(set(paid)) == 19
    assert query("SELECT automation_run_id, count(*) FROM audits GROUP BY 1 ORDER BY 1") == [(first, 3), (second, 3)]
    assert query("SELECT count(*) FROM audits WHERE is_latest") == [(3,)]


@pytest.mark.req("AUT-74", "AUT-75", "AUT-76")
async def test_another_replica_goes_on_where_one_has_left(automate, query):
    world = await automate()
    await world.config()
    async with held_up(world, PROVIDER):
        run_id = await world.trigger(await world.schedule("1001", "9300"))
        await waits(world, run_id)
        await world.kit.stop()
        world.kit = (await automate()).kit
    run = await world.ended(run_id)
    assert world.results(run_id) == {"1001": ("successful", None), "9300": ("ignored", "Fiche not found (404)")}
    assert (run["status"], run["total_fiches"], run["transcriptions_run"]) == ("completed", 1, 2)
    assert sorted(asked(world, "crm")) == ["1001", "9300"]
    names = [name for name, _ in world.events(run_id)]
    assert len(names) == len(set(names))
    replicas = query("SELECT count(DISTINCT c.replica_id) FROM claims c JOIN items i ON i.claim_id = c.id")
    assert replicas == [(2,)]


@pytest.mark.req("AUT-43", "AUT-79", "AUT-188", "G-88")
async def test_transcripts_of_every_round_are_counted(automate, query):
    world = await automate(speech={"attempts": 1})
    world.sandbox.set_faults([{"kind": "server_error", "vendor": PROVIDER, "ids": ["1001-2"], "times": 1}])
    run = await world.run_over("1001", retry_failed=True, max_retries=2, **NO_AUDITS)
    name = f"automation-{run['id']}-transcribe-1001"
    assert [event for _, event, *_ in query(CHILDREN, run["id"])] == [name, f"{name}-retry-1"]
    assert (run["status"], run["transcriptions_run"]) == ("completed", 2)
    assert log_rows(world, run["id"], "Retrying transcriptions (1/2)") == [
        ("warning", {"fiches": 1, "event_ids": [f"{name}-retry-1"]})
    ]


@pytest.mark.req("AUT-111", "AUT-110")
async def test_the_gate_does_not_wait_for_a_recording_that_no_run_transcribes(automate, query):
    """It came while the run waited for others: what was there when the stage began counts."""
    world = await automate()
    await world.run_over("1000", **NO_AUDITS)
    async with held_up(world, PROVIDER):
        run_id = await world.trigger(await world.schedule("1000", "1001", **NO_AUDITS))
        await waits(world, run_id)
        query(
            "INSERT INTO recordings (fiche_cache_id, call_id, created_at, updated_at)"
            " SELECT id, 'new', now(), now() FROM fiche_cache WHERE fiche_id = '1000'"
        )
    run = await world.ended(run_id)
    assert run["status"] == "completed"
    assert world.results(run_id) == {"1000": ("successful", None), "1001": ("successful", None)}
