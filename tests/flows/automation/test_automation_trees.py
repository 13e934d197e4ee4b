"""Ending a run ends the runs that only it waits for: no further call of its tree is sent, other waiters are served."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from ecluse.engine.cluster.forced_ends import end_orphans
from ecluse.flows.transcriptions.start import start
from tests.support.automation_scenes import NO_AUDITS
from tests.support.automation_trouble import Deaf, maker
from tests.support.runs import end_run, wait_for_run
from tests.support.transcription_world import until

PAID = "elevenlabs"
REASON = "wrong day"
CHILDREN = "SELECT id, state, end_cause, ended_by, reason FROM runs WHERE parent_run_id = %s ORDER BY id"
OPEN_CHILDREN = "SELECT count(*) FROM runs WHERE parent_run_id = %s AND ended_at IS NULL"
SHARED = "1000"


@pytest.fixture
def troubled(start_kit, sandbox, query):
    return maker(start_kit, sandbox, query)


def fiches(count):
    return [str(number) for number in range(1000, 1000 + count)]


def late_calls(sandbox, ended_at, seconds=2.0):
    """What a vendor was asked for so much later than the end."""
    calls = [entry for entry in sandbox.ledger(kind="call") if entry["at"] > ended_at.timestamp() + seconds]
    return [(entry["vendor"], entry["ref"], round(entry["at"] - ended_at.timestamp(), 2)) for entry in calls]


async def at_transcripts(world, *fiche_ids, **given):
    run_id = await world.trigger(await world.schedule(*fiche_ids, **NO_AUDITS, **given))
    await until(lambda: len(world.query(CHILDREN, run_id)) == len(fiche_ids))
    return run_id


def ended_at(query, run_id):
    ((at,),) = query("SELECT ended_at FROM runs WHERE id = %s", run_id)
    return at


@pytest.mark.req("G-89")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("count", "per_minute", "transcripts"), [(80, 720, 20), pytest.param(800, 3600, 540, marks=pytest.mark.slow)]
)
async def test_no_call_of_the_tree_starts_later_than_two_seconds_after_the_end(
    troubled, sandbox, query, count, per_minute, transcripts
):
    """4.5 recordings per fiche, each call takes a second. 80 fiches are ended as soon as some calls are over, 800
    fiches at 15 %."""
    sandbox.set_faults([{"kind": "latency", "vendor": PAID, "seconds": 1.0}])
    world = await troubled(speech={"per_minute": per_minute}, transcription_poll=timedelta(seconds=30))
    run_id = await at_transcripts(world, *fiches(count))
    done = "SELECT count(*) FROM recordings WHERE has_transcription"
    await until(lambda: query(done)[0][0] >= transcripts, 120)
    assert await end_run(world.kit, run_id, REASON, by="laptop")
    at = ended_at(query, run_id)
    in_flight = {e["ref"] for e in sandbox.ledger(vendor=PAID, kind="call") if e["done_at"] is None}
    assert in_flight, "nothing was under way: the test proves less than it says"
    await until(lambda: query(OPEN_CHILDREN, run_id) == [(0,)], 2)
    await asyncio.sleep(3.5)
    after = late_calls(sandbox, at, 0.0)
    print(f"{count} fiches: {len(after)} calls after the end, the last after {max([0.0, *(c[2] for c in after)])} s")
    assert late_calls(sandbox, at) == []
    waiting = query("SELECT count(*) FROM recordings WHERE NOT has_transcription")[0][0]
    assert waiting > 50, "all of it was done before the end: the test proves nothing"
    # What was paid for is kept, whatever became of its run.
    paid = {entry["ref"] for entry in sandbox.ledger(vendor=PAID, kind="paid")}
    assert in_flight <= paid
    kept = {call for (call,) in query("SELECT call_id FROM recordings WHERE has_transcription")}
    assert {ref.rpartition("/")[2] for ref in paid} == kept
    ends = {row[1:] for row in query(CHILDREN, run_id) if row[2] != "normal"}
    assert ends == {("cancelled", "parent", f"run:{run_id}", f"run {run_id}, which waited for it, ended: {REASON}")}
    assert query("SELECT ends_waited_for FROM runs WHERE id = %s", run_id) == [(False,)]


@pytest.mark.req("G-89", "G-82")
@pytest.mark.parametrize("who", ["a person", "another run"])
async def test_a_child_that_another_waiter_needs_goes_on(troubled, query, who):
    speech = Deaf("transcribe")
    world = await troubled(deaf_speech=speech, transcription_poll=timedelta(seconds=0.2))
    run_id = await at_transcripts(world, SHARED, "1008")
    if who == "a person":
        async with world.kit.pool.connection() as connection:
            flow = world.kit.flow("transcription")
            (asked,) = await start(connection, flow, "default", [SHARED], event_ids=["a click"])
        assert asked.attached
        child, other = asked.run_id, None
    else:
        other = await world.trigger(await world.schedule(SHARED, **NO_AUDITS))
        find = "SELECT run_id FROM run_waiters WHERE waiter_run_id = %s"
        ((child,),) = await until(lambda: query(find, other))
    await speech.asked.wait()
    assert await end_run(world.kit, run_id, REASON)
    await until(lambda: query("SELECT ends_waited_for FROM runs WHERE id = %s", run_id) == [(False,)], 3)
    states = {found: state for found, state, *_ in query(CHILDREN, run_id)}
    assert states.pop(child) == "running"
    assert list(states.values()) == ["cancelled"]
    speech.let.set()
    assert (await wait_for_run(world.kit, child, timedelta(seconds=30)))["status"] == "completed"
    if other is not None:
        assert (await world.ended(other))["status"] == "completed"


@pytest.mark.req("G-82")
async def test_a_run_that_ends_by_itself_leaves_its_children_running(troubled, query):
    """Its gate has given up on them; they come to their own end."""
    speech = Deaf("transcribe")
    world = await troubled(deaf_speech=speech, transcription_wait=timedelta(seconds=1))
    run_id = await at_transcripts(world, SHARED)
    assert (await world.ended(run_id))["status"] == "failed"
    await end_orphans(world.kit.pool, world.kit.by_name)
    assert query(OPEN_CHILDREN, run_id) == [(1,)]
    speech.let.set()
    await until(lambda: query(CHILDREN, run_id)[0][1] == "succeeded")


@pytest.mark.req("G-89", "G-82")
@pytest.mark.parametrize("cause", ["stale", "catastrophic"])
async def test_every_forced_end_ends_the_tree(troubled, query, cause):
    speech = Deaf("transcribe")
    world = await troubled(deaf_speech=speech, transcription_poll=timedelta(seconds=0.2), kit={"sweep_every": 0.2})
    run_id = await at_transcripts(world, *fiches(3))
    if cause == "stale":
        query("UPDATE runs SET started_at = started_at - interval '1 day' WHERE id = %s", run_id)
    else:
        query("UPDATE dbos.workflow_status SET status = 'ERROR', updated_at = 0")
    assert (await world.ended(run_id))["end_cause"] == cause
    await until(lambda: query(OPEN_CHILDREN, run_id) == [(0,)], 2)
    assert {row[2] for row in query(CHILDREN, run_id)} == {"parent"}


@pytest.mark.req("G-89")
async def test_what_was_finished_stays_counted(troubled, sandbox, query):
    speech = Deaf("transcribe", "1008-")
    world = await troubled(deaf_speech=speech, transcription_poll=timedelta(seconds=30))
    await world.config()
    run_id = await world.trigger(await world.schedule(SHARED, "1008", "9200", run_audits=False))
    done = "SELECT count(*) FROM recordings WHERE has_transcription"
    whole = "SELECT count(*) FROM recordings"
    ((expected,),) = await until(lambda: query(OPEN_CHILDREN, run_id)[0][0] and query(whole))
    await until(lambda: query(OPEN_CHILDREN, run_id) == [(1,)])
    ((finished,),) = query(done)
    assert 0 < finished < expected - 1
    await speech.asked.wait()
    assert await end_run(world.kit, run_id, REASON)
    await asyncio.sleep(1.5)  # its gate has looked once more
    over = "SELECT 1 FROM dbos.workflow_status WHERE status = 'SUCCESS' AND workflow_uuid LIKE '%%automation-manual%%'"
    await until(lambda: query(over))
    row = await wait_for_run(world.kit, run_id, timedelta(0))
    (stage,) = (one for one in row["stages"] if one["stage"] == "transcribe")
    counts = {name: stage[name] for name in ("expected", "done", "failed", "unfinished", "waiting")}
    left = expected - finished - 1
    assert counts == {"expected": expected, "done": finished, "failed": 1, "unfinished": left, "waiting": 0}
    assert stage["end_cause"] == "run ended"
