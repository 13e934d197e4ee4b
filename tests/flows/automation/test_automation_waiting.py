"""Why an automation run waits, shown for the run itself while it is its transcriptions that wait: by the API, the
command line and the run's page, whatever the cause, and soon."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from ecluse.api import shapes
from ecluse.engine import Breaker, acquire_lease, pause_lane, resume_lane
from ecluse.flows.transcriptions.rules import recording_lock
from tests.support.api_server import new_key, serving
from tests.support.automation_scenes import NO_AUDITS
from tests.support.automation_world import World, automation
from tests.support.engine_flows import until
from tests.support.pages import LivePage, Reader

FIVE = "9000"  # recordings, as the sandbox numbers its fiches
LANE = "elevenlabs"
SOON = 3.0  # seconds
SLOW_ANSWER = {"kind": "latency", "vendor": "elevenlabs", "seconds": 60}
PATIENT = {"access": {"speech_deadline": 120}}
AWAY = {"kind": "server_error", "vendor": "elevenlabs"}


@dataclass(frozen=True)
class Case:
    """`begins` makes the cause, if the run alone does not; `is_there` asks the database whether it has begun."""

    cause: str
    says: str
    is_there: str
    speech: dict[str, Any] = field(default_factory=dict)
    faults: tuple[dict[str, Any], ...] = ()
    breaker: Breaker | None = None
    before: Callable[[World], Awaitable[None]] | None = None
    begins: Callable[[World], Awaitable[None]] | None = None
    in_flight: int = 0


async def pause(world: World) -> None:
    async with world.kit.pool.connection() as connection:
        await pause_lane(connection, LANE, reason="invoice 4711", by="cli:ann")


async def lock(world: World) -> None:
    """As a call does that outlived its run."""
    async with world.kit.pool.connection() as connection:
        for n in range(1, 6):
            key = recording_lock(FIVE, f"{FIVE}-{n}")
            await acquire_lease(connection, world.tenant, key, owner="another process", ttl=timedelta(minutes=5))


async def leave(world: World) -> None:
    """Stop the only replica, then resume the lane."""
    await world.kit.stop()
    async with await psycopg.AsyncConnection.connect(world.kit.dsn, autocommit=True) as connection:
        await resume_lane(connection, LANE, reason="paid", by="cli:ann")


async def shut(world: World) -> None:
    """The lane is open again, and nothing of it is due: its window is closed for an hour."""
    later = "UPDATE items SET due_at = ecluse_now() + interval '1 hour' WHERE stage = 'recordings' RETURNING 1"
    await until(lambda: world.query("SELECT count(*) FROM items WHERE stage = 'recordings'") == [(5,)])
    assert len(world.query(later)) == 5
    async with world.kit.pool.connection() as connection:
        await resume_lane(connection, LANE, reason="paid", by="cli:ann")


WAITING = "SELECT 1 FROM items WHERE stage = 'recordings' AND claim_id IS NULL"
IN_FLIGHT = "SELECT 1 FROM claims WHERE stage = 'recordings' HAVING sum(in_flight) = "
CALLS = "SELECT coalesce(sum(in_flight), 0) FROM claims WHERE stage = 'recordings'"
HELD = f"{WAITING} AND EXISTS (SELECT 1 FROM lanes WHERE held_until > ecluse_now())"  # noqa: S608 - our own
CASES = {
    "pause": Case(
        "paused",
        "lane elevenlabs was paused by an operator: invoice 4711",
        "SELECT 1 FROM lanes WHERE paused_at IS NOT NULL",
        speech={"per_minute": 1},
        begins=pause,
    ),
    "hold": Case(
        "held",
        "lane elevenlabs is held until",
        HELD,
        speech={"recording_concurrency": 1},
        faults=({"kind": "throttle", "vendor": "elevenlabs", "retry_after": 120},),
    ),
    "breaker": Case(
        "breaker",
        "vendor down since",
        HELD,
        speech={"recording_concurrency": 1, "backoff_base": 0.01, "backoff_longest": 0.02},
        faults=(AWAY,),
        breaker=Breaker(failures=1, pause=timedelta(minutes=2), codes=frozenset({"VENDOR_ERROR_503"})),
    ),
    "rate": Case("throttled", "lane elevenlabs starts 1 call a minute", WAITING, speech={"per_minute": 1}),
    "cap": Case(
        "in flight",
        "lane elevenlabs has its 1 call in flight",
        f"{IN_FLIGHT} 1",
        speech={"recording_concurrency": 1, **PATIENT},
        faults=(SLOW_ANSWER,),
        in_flight=1,
    ),
    "cap per key": Case(
        "per key",
        "2 of its group are in flight",
        f"{IN_FLIGHT} 2",
        speech={"per_fiche": 2, **PATIENT},
        faults=(SLOW_ANSWER,),
        in_flight=2,
    ),
    "lease": Case(
        "lease", "another call is transcribing this recording", f"{WAITING} AND postponed_cause = 'lease'", before=lock
    ),
    "gate": Case("gate", "5 calls are in flight", f"{IN_FLIGHT} 5", speech=PATIENT, faults=(SLOW_ANSWER,), in_flight=5),
    "no worker": Case(
        "no worker",
        "no live worker can do transcription/recordings",
        "SELECT 1 FROM lanes WHERE name = 'elevenlabs' AND paused_at IS NULL",
        before=pause,
        begins=leave,
    ),
    "window": Case(
        "window",
        "not before 20",
        f"{WAITING} AND due_at > ecluse_now() AND NOT EXISTS (SELECT FROM lanes WHERE paused_at IS NOT NULL)",
        before=pause,
        begins=shut,
    ),
    "retry": Case(
        "retry",
        "VENDOR_ERROR_503",
        f"{WAITING} AND error_code IS NOT NULL HAVING count(*) = 5",
        speech={"backoff_base": 60, "backoff_longest": 60},
        faults=(AWAY,),
    ),
}


@pytest.fixture
def watched(dsn):
    """A server that only answers, and a key."""
    with serving(dsn) as client:
        yield client, new_key(dsn, "viewer")


def causes_by_api(client: Any, run_id: int) -> shapes.WaitingPage:
    answer = client.get(f"/api/runs/{run_id}/waiting?limit=10")
    assert answer.status == 200, answer.body
    return shapes.WaitingPage.model_validate(answer.json)


def shown_within(page: LivePage, *words: str) -> float:
    """Seconds until the page that is open has said all of these, in whatever it was sent."""
    began, seen = time.monotonic(), ""
    while not all(word in seen for word in words):
        event = page.next()
        assert event is not None, "the stream has ended"
        seen = event[1] if "part-waiting" in event[1] else seen
    return time.monotonic() - began


@pytest.mark.parametrize("name", CASES)
async def test_the_run_names_the_cause_while_its_transcriptions_wait(
    name,
    start_kit,
    sandbox,
    query,
    watched,
    ecluse,
):
    case, (client, key) = CASES[name], watched
    made, transcribing = automation(sandbox, speech=case.speech)
    if case.breaker is not None:
        stages = [
            replace(one, lane=replace(one.lane, breaker=case.breaker)) if one.lane.name == LANE else one
            for one in transcribing.stages
        ]
        transcribing = replace(transcribing, stages=tuple(stages))
    world = World(await start_kit(transcribing, made.flow), made.flow, sandbox, query)
    sandbox.set_faults(list(case.faults))
    if case.before is not None:
        await case.before(world)
    run_id = await world.trigger(await world.schedule(FIVE, **NO_AUDITS))
    await until(lambda: query("SELECT 1 FROM run_waiters w JOIN items i ON i.run_id = w.run_id"))
    server = {"ECLUSE_URL": f"http://127.0.0.1:{client.port}", "ECLUSE_KEY": key}
    await asyncio.to_thread(ecluse, "runs", "list", **server)  # the first command of all loads the program
    reader = Reader(client, key)
    page = await asyncio.to_thread(LivePage, reader, f"/ui/runs/{run_id}/live")
    try:
        if case.begins is not None:
            await case.begins(world)
        await until(lambda: query(case.is_there))
        on_page = asyncio.create_task(
            asyncio.to_thread(shown_within, page, f">{case.cause}</span>", case.says.replace("'", "&#39;"))
        )
        await until(lambda: query(CALLS) == [(case.in_flight,)])
        asked = time.monotonic()
        found = await asyncio.to_thread(causes_by_api, client.with_key(key), run_id)
        answered = time.monotonic()
        group = found.groups[0]
        assert group.cause == case.cause
        assert case.says in group.detail
        assert case.says in found.summary
        assert (group.flow, found.in_flight) == ("automation" if name == "gate" else "transcription", case.in_flight)
        assert [(found.total,)] == [(len(found.waiting),)] == query(WAITING.replace("1", "count(*)"))
        assert {row.cause for row in found.waiting} == {group.cause for group in found.groups if group.lane}
        assert {row.run_id for row in found.waiting}.isdisjoint({str(run_id)})
        typed = time.monotonic()
        said = await asyncio.to_thread(ecluse, "runs", "why", str(run_id), "--json", **server)
        printed = time.monotonic()
        assert (said.code, said.err) == (0, "")
        assert json.loads(said.out)["groups"][0]["cause"] == case.cause
        seconds = {"page": await on_page, "API": answered - asked, "command": printed - typed}
        print(name, {face: f"{taken:.1f} s" for face, taken in seconds.items()})
        assert max(seconds.values()) <= SOON
    finally:
        await asyncio.to_thread(page.close)
    (transcribe,) = [
        row for row in client.with_key(key).get(f"/api/runs/{run_id}").json["stages"] if row["stage"] == "transcribe"
    ]
    assert (transcribe["in_flight"], transcribe["waiting"]) == (case.in_flight, 5 - case.in_flight - transcribe["done"])
