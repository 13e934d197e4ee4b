"""Ten recordings a minute for fifteen minutes, as the knobs have it by default: more than 150 do not fit, and the run,
its log and the API warn of it. The clock is moved by what a call may take, again and again."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta

import psycopg
import pytest

from ecluse.flows.automation.config import Config
from ecluse.flows.transcriptions.config import Config as SpeechConfig
from tests.support.automation_trouble import LOOK, maker
from tests.support.transcription_world import until

pytestmark = pytest.mark.long

FICHES = [str(number) for number in range(9400, 9414)]  # with twelve recordings each
LATE = timedelta(seconds=1)
NEXT = "SELECT next_free_at FROM lanes WHERE name = 'elevenlabs'"
SET_CLOCK = 'UPDATE clock_offset SET "offset" = %s - clock_timestamp()'
STARTS = "SELECT taken_at FROM claims c, generate_series(1, c.taken) WHERE stage = 'recordings' ORDER BY 1"
WRITTEN = "SELECT count(*) FROM recordings WHERE has_transcription"


class Passing:
    """Time passes as fast as the provider answers: to the instant at which it may be called once more."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection

    @property
    def next(self) -> datetime:
        return self._connection.execute(NEXT).fetchone()[0]

    def written(self) -> int:
        return self._connection.execute(WRITTEN).fetchone()[0]

    def go_to(self, now: datetime) -> None:
        self._connection.execute(SET_CLOCK, (now,))
        self._connection.execute("SELECT pg_notify('ecluse_clock', ''), pg_notify('ecluse_work', '')")

    async def one_more(self) -> None:
        before = self.written()
        self.go_to(self.next)
        async with asyncio.timeout(60):
            while self.written() == before:
                await asyncio.sleep(0.02)


@pytest.mark.req("AUT-113", "G-46", "G-82", "AUT-89", "AUT-111", "TRX-81", "TRX-35")
async def test_what_does_not_fit_into_the_time_fails_and_the_rest_succeeds(start_kit, sandbox, query, dsn):
    usual = {name: getattr(Config(), name) for name in ("transcription_wait", "transcription_poll", "per_minute")}
    assert usual["transcription_wait"] == timedelta(minutes=15)
    speech = {"per_minute": SpeechConfig.per_minute}
    world = await maker(start_kit, sandbox, query)(speech=speech, **usual)
    run_id = await world.trigger(await world.schedule(*FICHES, run_audits=False))
    await until(lambda: query(WRITTEN) == [(1,)])  # the first one need not wait
    with psycopg.connect(dsn, autocommit=True) as connection:
        time_ = Passing(connection)
        ((deadline,),) = query("SELECT deadline_at FROM stages WHERE stage = 'transcribe'")
        while time_.next + LATE < deadline:
            await time_.one_more()
        in_time = time_.written()
        time_.go_to(deadline)
        connection.execute(LOOK)
        run = await world.ended(run_id)
        results = world.results(run_id)
        # What it waited for goes on, at the same pace, and changes nothing about the run.
        while time_.written() < 168:
            await time_.one_more()
    open_ = "SELECT count(*) FROM runs WHERE parent_run_id = %s AND ended_at IS NULL"
    await until(lambda: query(open_, run_id) == [(0,)])
    assert query("SELECT DISTINCT status FROM runs WHERE parent_run_id = %s", run_id) == [("completed",)]
    assert (world.run(run_id), world.results(run_id)) == (run, results)
    # The warning beforehand, and how it ended.
    warning = run["config_snapshot"]["budget_warning"]
    assert "168 recordings" in warning
    assert "17 min at 10 a minute" in warning
    assert any(warning in line for line in world.logs(run_id))
    assert 120 <= in_time <= 151, "fifteen minutes are 150 calls, and the first need not wait"
    failed = sorted(fiche for fiche, (outcome, _) in results.items() if outcome == "failed")
    # Of those that were under way some recordings are missing; the last call may just have made it.
    least = len(FICHES) - (in_time + 1) // 12
    assert least <= len(failed) <= least + 2
    assert run["status"] == "partial"
    assert (run["successful_fiches"], run["failed_fiches"]) == (len(FICHES) - len(failed), len(failed))
    assert {results[fiche][1] for fiche in failed} == {"Transcription incomplete (timeout/stall)"}
    assert len(sandbox.ledger(vendor="elevenlabs", kind="call")) == 168
    starts = [at for (at,) in query(STARTS)]
    # What is claimed waits for its instant, for a tenth of a second at most.
    minute = timedelta(minutes=1) - timedelta(seconds=0.2)
    assert len(starts) == 168
    assert max(sum(at <= other < at + minute for other in starts) for at in starts) <= 10
