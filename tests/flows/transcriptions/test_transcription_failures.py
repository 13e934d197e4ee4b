"""What goes wrong around a run: locks taken away, rows that vanish, an operator's end, a stall; a cap that holds."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from ecluse.base.clock import Clock
from ecluse.engine import force_release
from ecluse.engine.lanes.registry import Lanes
from ecluse.engine.work.claim import Claimant, claim_items
from ecluse.engine.work.completion import sweep
from ecluse.flows.transcriptions import rules
from ecluse.flows.transcriptions.precheck import Looks
from ecluse.flows.transcriptions.start import start
from tests.support.engine_flows import NO_SHARE
from tests.support.fiche_rows import call, details, save
from tests.support.runs import end_run
from tests.support.transcription_world import FIVE, Gate, World, transcription, until

STALL = timedelta(minutes=10)


async def release(w, key):
    async with w.kit.pool.connection() as connection:
        assert await force_release(connection, "default", key, reason="a test", by="test")


@pytest.mark.req("TRX-64", "TRX-62", "G-24", "TRX-48")
async def test_a_recording_that_another_run_has_in_hand_is_waited_for_and_never_called_done_unseen(world, query):
    w = await world()
    await w.pause()
    (first,) = await w.start("1000")
    await until(lambda: query("SELECT 1 FROM items WHERE stage = 'recordings'"))
    await release(w, rules.fiche_lock("1000"))
    (second,) = await w.start("1000")
    assert not second.attached
    await until(lambda: query("SELECT 1 FROM items WHERE stage = 'recordings' AND run_id = %s", second.run_id))
    # The first is held back: only the second could be taken up, and must not be.
    query("UPDATE items SET due_at = 'infinity' WHERE run_id = %s", first.run_id)
    await w.resume()
    await until(
        lambda: query(
            "SELECT 1 FROM items WHERE run_id = %s AND stage = 'recordings' AND due_at > ecluse_now()", second.run_id
        )
    )
    assert query("SELECT status, executions FROM items WHERE run_id = %s AND key = '1000-1'", second.run_id) == [
        ("open", 0)
    ]
    assert w.paid() == []
    query("UPDATE items SET due_at = ecluse_now() WHERE run_id = %s", first.run_id)
    assert (await w.ended(first))["successful"] == 1
    query("UPDATE items SET due_at = ecluse_now() WHERE run_id = %s", second.run_id)
    assert (await w.ended(second))["successful"] == 1
    assert w.paid() == ["1000-1"]
    assert dict(w.events(second.run_id))["transcription.completed"]["cached"] == 1


@pytest.mark.req("TRX-64", "G-24")
async def test_a_recording_whose_lock_was_taken_away_is_locked_again_before_the_call(world, query):
    w = await world()
    await w.pause()
    (started,) = await w.start("1000")
    await until(lambda: query("SELECT 1 FROM items WHERE stage = 'recordings'"))
    await release(w, rules.recording_lock("1000", "1000-1"))
    await w.resume()
    assert (await w.ended(started))["successful"] == 1
    fences = query(
        "SELECT run_id, fence, end_cause FROM leases WHERE key LIKE 'lock:transcription:rec%%' ORDER BY fence"
    )
    assert fences == [(started.run_id, 1, "forced"), (started.run_id, 2, "run ended")]


async def test_a_replica_without_a_key_leaves_recordings_to_others(start_kit, sandbox, query):
    made = transcription(sandbox, access={"speech_key": None})
    kit = await start_kit(made.flow)
    async with kit.pool.connection() as connection:
        await save(connection, ("1000", details(call("1000-1"))))
        await start(connection, made.flow, "default", ["1000"], event_ids=["transcribe-1000-1"], refresh=False)
    waits = "SELECT status, executions FROM items WHERE stage = 'recordings' AND due_at > ecluse_now()"
    assert await until(lambda: query(waits)) == [("open", 0)]
    assert sandbox.ledger(vendor="elevenlabs", kind="call") == []


@pytest.mark.req("TRX-69", "TRX-63", "TRX-71", "TRX-68")
async def test_a_last_look_before_the_call_finds_what_has_changed_since_the_plan(world, query):
    w = await world()
    await w.pause()
    (started,) = await w.start("1003")
    await until(lambda: query("SELECT count(*) FROM items WHERE stage = 'recordings'") == [(4,)])
    query("DELETE FROM recordings WHERE call_id = '1003-1'")
    query(
        "UPDATE recordings SET has_transcription = true, transcription_text = 'by hand', transcribed_at = ecluse_now()"
        " WHERE call_id = '1003-2'"
    )
    query("UPDATE recordings SET recording_url = ' ' WHERE call_id = '1003-3'")
    await w.resume()
    run = await w.ended(started)
    assert (run["status"], run["successful"], run["failed"]) == ("partial", 2, 2)
    assert w.calls() == ["1003-4"]
    await until(lambda: len(w.emitted("recording_failed")) == 2)
    assert {event["call_id"]: event["error_code"] for event in w.emitted("recording_failed")} == {
        "1003-1": "RECORDING_MISSING",
        "1003-3": "NO_URL",
    }
    assert {event["call_id"]: event["cached"] for event in w.emitted("recording_completed")} == {
        "1003-2": True,
        "1003-4": False,
    }
    assert query("SELECT transcription_text FROM recordings WHERE call_id = '1003-2'") == [("by hand",)]


@pytest.mark.req("TRX-77", "TRX-44")
async def test_a_completion_claims_no_more_than_the_recordings_say(world, query):
    w = await world()
    await w.pause()
    (started,) = await w.start("1001")
    await until(lambda: query("SELECT 1 FROM items WHERE stage = 'recordings'"))
    # Something that is not ours unmakes one as soon as it is stored.
    query(
        "CREATE FUNCTION unmake() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " IF NEW.call_id = '1001-1' THEN NEW.has_transcription := false; END IF; RETURN NEW; END $$"
    )
    query("CREATE TRIGGER unmade BEFORE UPDATE ON recordings FOR EACH ROW EXECUTE FUNCTION unmake()")
    await w.resume()
    await w.ended(started)
    completed = dict(w.events(started.run_id))["transcription.completed"]
    assert (completed["processed"], completed["transcribed"], completed["failed"]) == (2, 1, 1)
    assert (await w.status("1001"))["run"]["failed"] == 1


@pytest.mark.req("G-82", "G-21", "TRX-13")
async def test_a_run_that_is_ended_by_hand_says_what_was_not_tried_and_keeps_what_was_paid_for(world, query):
    gate = Gate()
    w = await world(gate=gate, recording_concurrency=1)
    (started,) = await w.start("1001")
    await asyncio.wait_for(gate.asked.wait(), 60)
    assert await end_run(w.kit, started.run_id, "wrong fiche")
    payloads = dict(w.events(started.run_id))
    assert "transcription.completed" not in payloads
    assert "wrong fiche" in payloads["transcription.failed"]["reason"]
    assert (payloads["fiche/transcribed"]["status"], payloads["fiche/transcribed"]["counts"]["processed"]) == (
        "failed",
        0,
    )
    gate.let.set()
    # The call that was under way is paid for: its result is kept, the run's outcomes are not touched.
    await until(lambda: query("SELECT 1 FROM recordings WHERE has_transcription"))
    assert query("SELECT DISTINCT outcome FROM outcomes") == [("failed",)]
    status = await w.status("1001")
    assert (status["run"]["status"], status["run"]["processed"], status["activeRun"]) == ("failed", 0, None)
    assert sorted(one["state"] for one in status["recordings"]) == ["not_tried", "transcribed"]
    (again,) = await w.start("1001")
    assert (await w.ended(again))["successful"] == 1
    assert sorted(w.calls()) == ["1001-1", "1001-2"]


@pytest.mark.req(
    "TRX-13", "TRX-15", "TRX-76", "TRX-87", "TRX-93", "TRX-83", "TRX-03", "TRX-51", "G-71", "G-23", "TRX-50"
)
async def test_the_status_alone_is_enough_to_follow_a_run_to_its_end(world, query, connection):
    w = await world()
    await w.pause()
    (started,) = await w.start("9200")

    async def waits():
        status = await w.status("9200")
        return status["run"]["phase"] == "recordings" and status["processed"] == 1 and status

    status = await until(waits)
    assert (status["activeRun"], status["failed"], status["target_total"]) == (str(started.run_id), 1, 3)
    assert [one["state"] for one in status["recordings"]] == ["throttled", "failed", "throttled"]
    assert "paused" in status["recordings"][0]["reason"]
    assert "paused" in status["run"]["waiting_for"]
    assert status["run"]["remaining"] == 2
    assert status["run"]["functions"]["transcribe-recording"] == {"queued": 2, "running": 0, "done": 0, "failed": 1}
    lock = status["lock"]
    assert (lock["key"], lock["run_id"], lock["ttl_seconds"]) == (
        "lock:transcription:fiche:9200",
        str(started.run_id),
        None,
    )
    await w.resume()
    await w.ended(started)
    ended = await w.status("9200")
    assert (ended["activeRun"], ended["processed"], ended["failed"], ended["target_total"]) == (None, 3, 1, 3)
    assert (ended["run"]["status"], ended["run"]["phase"], ended["lock"]) == ("partial", "ended", None)
    # Recordings that are added later change the coverage, and nothing about the run.
    url = f"{w.sandbox.url}/audio/recordings/new.mp3"
    await save(connection, ("9200", details(*(call(f"9200-{n}", url) for n in range(1, 5)))))
    later = await w.status("9200")
    assert (later["total"], later["pending"], later["percentage"]) == (4, 2, 50)
    assert later["run"] == ended["run"]
    assert later["recordings"][-1]["state"] == "not_tried"


@pytest.fixture
async def alone(sandbox, start_kit, query):
    """A flow whose runs no worker takes: an engine with the role api only."""
    made = transcription(sandbox)
    kit = await start_kit(made.flow, roles=frozenset({"api"}))
    query(
        "INSERT INTO lanes (name, next_free_at) SELECT unnest(%s::text[]), '-infinity'",
        [s.lane.name for s in made.flow.stages],
    )
    return made, kit


def move(query, by):
    query('UPDATE clock_offset SET "offset" = "offset" + %s', by)


STALLED = "SELECT count(*) FROM events_outbox WHERE event_type = 'transcription.stalled'"


@pytest.mark.req("TRX-79", "G-25", "TRX-78")
async def test_items_that_no_worker_claims_are_warned_of_and_then_given_up(alone, connection, query, one):
    made, kit = alone
    await save(connection, ("77", details(call("a"), call("b"))))
    (started,) = await start(connection, made.flow, "default", ["77"], event_ids=["e"], refresh=False)
    await made.flow.watch(connection)
    move(query, STALL - timedelta(seconds=1))
    await made.flow.watch(connection)
    assert one(STALLED) == 0
    move(query, timedelta(seconds=2))
    await made.flow.watch(connection)
    await made.flow.watch(connection)
    assert one(STALLED) == 1
    payload = one("SELECT payload FROM events_outbox WHERE event_type = 'transcription.stalled'")
    assert (payload["fiche_id"], payload["run_id"], payload["waiting"]) == ("77", str(started.run_id), 2)
    assert one("SELECT count(*) FROM items WHERE status = 'failed'") == 0
    move(query, STALL + timedelta(seconds=1))
    await made.flow.watch(connection)
    assert query("SELECT DISTINCT status, error_code FROM items") == [("failed", "STALLED")]
    await sweep(kit.pool, {made.flow.name: made.flow})
    row = one("SELECT status, failed FROM runs")
    assert row == ("failed", 2)
    assert one("SELECT count(*) FROM leases WHERE ended_at IS NULL") == 0, "the fiche can be asked for again"
    assert one("SELECT payload->>'failed' FROM events_outbox WHERE event_type = 'transcription.completed'") == "2"


@pytest.mark.req("TRX-79", "TRX-71")
async def test_only_due_items_are_given_up_with_one_event_per_recording(alone, connection, query):
    made, _ = alone
    await save(connection, ("77", details(call("a"), call("b"))))
    (started,) = await start(connection, made.flow, "default", ["77"], event_ids=["e"], refresh=False)
    move(query, STALL + timedelta(seconds=1))
    await made.flow.watch(connection)
    query("UPDATE items SET due_at = ecluse_now() + %s WHERE key = 'b'", STALL)
    move(query, STALL + timedelta(seconds=1))
    for _ in range(2):
        await made.flow.watch(connection)
        assert query("SELECT key, status FROM items ORDER BY key") == [("a", "failed"), ("b", "open")]
    for _ in range(2):
        move(query, STALL + timedelta(seconds=1))
        await made.flow.watch(connection)
    assert query("SELECT DISTINCT status FROM items") == [("failed",)]
    payloads = query(
        "SELECT payload FROM events_outbox WHERE event_type = 'transcription.recording_failed' ORDER BY id"
    )
    facts = ("fiche_id", "run_id", "call_id", "ok", "error_code")
    assert [tuple(payload[name] for name in facts) for (payload,) in payloads] == [
        ("77", str(started.run_id), call_id, False, "STALLED") for call_id in ("a", "b")
    ]


BLOCKED = "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"


@pytest.mark.req("TRX-79")
async def test_who_looks_for_stalls_and_who_ends_runs_do_not_wait_for_each_other(alone, connection, query, dsn):
    made, _ = alone
    await save(connection, ("77", details(call("a"))), ("78", details(call("b"))))
    await start(connection, made.flow, "default", ["77"], event_ids=["e"], refresh=False)
    move(query, STALL + timedelta(seconds=1))
    await made.flow.watch(connection)
    # One to give up, one to warn of; and a transaction that ends both.
    await start(connection, made.flow, "default", ["78"], event_ids=["f"], refresh=False)
    move(query, STALL + timedelta(seconds=1))
    async with await psycopg.AsyncConnection.connect(dsn) as other:
        await other.execute("SELECT 1 FROM runs ORDER BY id FOR NO KEY UPDATE")
        watching = asyncio.create_task(made.flow.watch(connection))
        await until(lambda: query(BLOCKED, connection.info.backend_pid))
        await other.execute("UPDATE transcription_runs SET processed = 0")
    await watching
    assert query("SELECT key, status FROM items ORDER BY key") == [("a", "failed"), ("b", "open")]


HOLDS = {
    "paused": "UPDATE lanes SET paused_at = ecluse_now(), paused_reason = 'test', paused_by = 'test'",
    "held": "UPDATE lanes SET held_until = ecluse_now() + interval '1 day', held_reason = 'test'",
    "in use": "INSERT INTO claims (replica_id, run_id, stage, lane_id, taken, taken_at)"
    " SELECT 'x', 0, 'recordings', id, 1, ecluse_now() FROM lanes",
    "moving": "INSERT INTO claims (replica_id, run_id, stage, lane_id, taken, failed, taken_at)"
    " SELECT 'x', 0, 'recordings', id, 1, 1, ecluse_now() + interval '9 minutes' FROM lanes",
    "throttled": "UPDATE lanes SET next_free_at = ecluse_now() + interval '9 minutes'",
    "not due": "UPDATE items SET due_at = ecluse_now() + interval '9 minutes'",
}


@pytest.mark.req("G-25", "TRX-79", "TRX-82")
@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
async def test_a_queue_that_is_held_back_or_moves_is_no_stall(alone, connection, query, one, hold):
    made, _ = alone
    await save(connection, ("77", details(call("a"))))
    await start(connection, made.flow, "default", ["77"], event_ids=["e"], refresh=False)
    query(hold)
    move(query, STALL + timedelta(minutes=1))
    await made.flow.watch(connection)
    assert one(STALLED) == 0


@pytest.mark.req("TRX-79")
async def test_a_warning_is_forgotten_when_things_move_again(alone, connection, query, one):
    made, _ = alone
    await save(connection, ("77", details(call("a"))))
    await start(connection, made.flow, "default", ["77"], event_ids=["e"], refresh=False)
    move(query, STALL + timedelta(seconds=1))
    await made.flow.watch(connection)
    query(HOLDS["moving"])
    await made.flow.watch(connection)
    assert one("SELECT stalled_at FROM transcription_runs") is None
    move(query, 2 * STALL)
    await made.flow.watch(connection)
    assert (one(STALLED), one("SELECT status FROM items")) == (2, "open")


SET_CLOCK = 'UPDATE clock_offset SET "offset" = %s - clock_timestamp()'
FINISH = "UPDATE items SET status = 'succeeded', finished_at = ecluse_now() WHERE claim_id = ANY(%s)"


@pytest.mark.req("TRX-81", "TRX-35", "TRX-33", "TRX-34")
async def test_no_minute_has_more_starts_than_the_cap_over_all_fiches_and_replicas(
    sandbox, start_kit, connection, query
):
    made = transcription(sandbox, per_minute=10)
    kit = await start_kit(made.flow, roles=frozenset({"api"}))
    await Lanes(kit.pool, [made.flow], Clock()).put()
    fiches = [(f"{n}", details(*(call(f"{n}-{k}") for k in range(5)))) for n in range(5)]
    await save(connection, *fiches)
    await start(
        connection, made.flow, "default", [n for n, _ in fiches], event_ids=[n for n, _ in fiches], refresh=False
    )
    replicas = ("one", "two", "three")
    for replica in replicas:
        query("INSERT INTO replicas (id, host, pid) VALUES (%s, '', 0)", replica)
    lane = query("SELECT id FROM lanes WHERE name = 'elevenlabs'")[0][0]
    noon, starts = datetime(2030, 1, 1, 12, tzinfo=UTC), []
    for second in range(0, 300, 2):
        await connection.execute(SET_CLOCK, (noon + timedelta(seconds=second),))
        for replica in replicas:
            claimant = Claimant(replica, ["transcription/recordings"], [1])
            taken = await claim_items(connection, claimant, [lane], 10, capped=True, left=NO_SHARE)
            starts += [one.start_at for one in taken]
            if taken:
                await connection.execute(FINISH, ([one.claim_id for one in taken],))
                await connection.execute("UPDATE claims SET succeeded = taken")
    assert len(starts) == 25
    for at in starts:
        assert sum(at <= other < at + timedelta(minutes=1) for other in starts) <= 10
    assert max(starts) - min(starts) >= timedelta(minutes=2.4)


@pytest.mark.req("TRX-27", "TRX-33", "TRX-34")
def test_caps_are_those_of_the_lanes(sandbox):
    made = transcription(sandbox, fiche_concurrency=3, recording_concurrency=4, per_fiche=2)
    assert made.refresh.lane.max_in_flight == 3
    assert (made.recordings.lane.max_in_flight, made.recordings.lane.max_per_key) == (4, 2)


@pytest.mark.req("TRX-34")
async def test_one_fiche_does_not_take_all_hands(world, sandbox, query):
    sandbox.set_faults([{"kind": "latency", "seconds": 0.4, "vendor": "elevenlabs"}])
    w = await world(per_fiche=1, recording_concurrency=2)
    started = await w.start("1002", "1010")
    for one in started:
        assert (await w.ended(one))["status"] == "completed"
    calls = [
        (entry["ref"].partition("-")[0], entry["at"]) for entry in sandbox.ledger(vendor="elevenlabs", kind="call")
    ]
    for fiche_id in ("1002", "1010"):
        at = sorted(when for name, when in calls if name == fiche_id)
        assert all(later - earlier >= 0.39 for earlier, later in itertools.pairwise(at))


@pytest.mark.req("TRX-62", "G-80", "G-82")
async def test_calls_in_flight_of_a_run_that_was_ended_are_waited_for_by_the_next_and_not_paid_twice(world, query):
    gate = Gate()
    w = await world(gate=gate)
    (first,) = await w.start(FIVE)
    await gate.asked.wait()
    await until(lambda: len(w.emitted("recording_started")) == 5)
    assert await end_run(w.kit, first.run_id, "wrong")
    # This process has them in hand from now on: who comes next must wait.
    held = "SELECT count(*) FROM leases WHERE ended_at IS NULL AND run_id IS NULL AND key LIKE '%%recording%%'"
    await until(lambda: query(held) == [(5,)])
    (second,) = await w.start(FIVE)
    assert not second.attached
    await until(lambda: query("SELECT 1 FROM items WHERE stage = 'recordings' AND run_id = %s", second.run_id))
    gate.let.set()
    assert (await w.ended(second))["status"] == "completed"
    assert sorted(w.paid()) == sorted(set(w.paid()))
    assert len(w.paid()) == 5
    await until(lambda: query(held) == [(0,)])


@pytest.mark.req("TRX-49", "G-82")
async def test_a_run_that_ends_before_the_last_look_holds_nothing_and_pays_for_nothing(start_kit, sandbox, query):
    made, lives = transcription(sandbox), []
    inner, asked, let, looked = made.flow.vendors, asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Late:
        def __init__(self, looks):
            self._looks = looks

        async def look(self, context, item):
            asked.set()
            await let.wait()
            try:
                return await self._looks.look(context, item)
            finally:
                looked.set()

    @asynccontextmanager
    async def late(clock):
        async with inner(clock) as vendors:
            looks = Late(vendors.shared(Looks))
            vendors.shared = lambda _: looks
            yield vendors

    made.flow = replace(made.flow, vendors=late)
    kit = await start_kit(made.flow, live=lives.extend)
    kit.worker.drop = lambda _: None  # no call is dropped at the end of the run
    w = World(kit, made, sandbox, query, lives)
    (first,) = await w.start(FIVE)
    await asked.wait()
    assert await end_run(kit, first.run_id, "wrong")
    let.set()
    await looked.wait()
    await until(lambda: not kit.worker.slots.busy)
    assert query("SELECT key FROM leases WHERE ended_at IS NULL") == []
    assert w.paid() == []
