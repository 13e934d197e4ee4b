"""Detect and end stalled runs. A run is stalled if one of its items is due and waiting and no worker has claimed any
item of its lane for the stall period, although nothing holds the lane back. The first detection writes a warning and
wakes all workers; after a second stall period the due items are given up, and the run ends by itself. A lane that
moves, however slowly, is not stalled."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, NamedTuple

from ecluse.db.connect import Connection
from ecluse.db.query import fetch_all, fetch_column, fetch_rows
from ecluse.engine import Event, Run, give_up, load_runs, lock_runs, wake_workers, write_events
from ecluse.flows.transcriptions import rules, traces
from ecluse.flows.transcriptions.plan import event_of

# Find idle lanes first: while all lanes move, no items are read. The newest claims are enough to see movement; claims
# with replica 'given up' record items that were given up, not claimed by a worker.
WAITING = """
WITH clock AS MATERIALIZED (SELECT ecluse_now() AS now, ecluse_now() - %(stall)s AS since),
idle AS MATERIALIZED (
    SELECT l.id FROM lanes l, clock
    WHERE l.base = ANY(%(lanes)s) AND l.paused_at IS NULL AND (l.held_until IS NULL OR l.held_until <= since)
      AND l.next_free_at <= since
      AND NOT EXISTS (SELECT 1 FROM claims c WHERE c.lane_id = l.id AND c.in_flight > 0)
      AND NOT EXISTS (SELECT 1 FROM (SELECT lane_id, taken_at, replica_id FROM claims ORDER BY id DESC LIMIT 5000) c
                      WHERE c.lane_id = l.id AND c.taken_at > since AND c.replica_id <> 'given up')),
waiting AS MATERIALIZED (
    SELECT i.run_id, i.stage, i.key, since
    FROM clock, idle JOIN items i ON i.lane_id = idle.id AND i.claim_id IS NULL
    WHERE i.flow = %(flow)s AND i.status = 'open' AND i.due_at <= since)
"""

# Runs already marked as stalled are included, so that their mark can be cleared.
CANDIDATES = f"""{WAITING}
SELECT id FROM runs WHERE ended_at IS NULL AND id IN (
    SELECT run_id FROM waiting UNION SELECT run_id FROM transcription_runs WHERE stalled_at IS NOT NULL)
"""  # noqa: S608 - our own names

# Read again after the lock: the locked runs cannot be ended meanwhile.
STUCK = f"{WAITING} SELECT * FROM waiting WHERE run_id = ANY(%(runs)s)"  # noqa: S608 - our own names

MOVING = "UPDATE transcription_runs SET stalled_at = NULL WHERE run_id = ANY(%s) AND stalled_at IS NOT NULL"

# `stalled_at IS NULL` deduplicates: a second replica finds no run to warn about.
WARN = """
UPDATE transcription_runs t SET stalled_at = ecluse_now() FROM runs r
WHERE t.run_id = ANY(%s) AND t.stalled_at IS NULL AND r.id = t.run_id AND r.ended_at IS NULL
RETURNING r.id, r.tenant_id, r.flow, r.event_key, r.input, r.correlation_id, t.fiche_id, t.stalled_at
"""

LOST = "SELECT run_id FROM transcription_runs WHERE run_id = ANY(%s) AND stalled_at <= ecluse_now() - %s"

GIVEN_UP = """
SELECT run_id, key FROM items WHERE run_id = ANY(%s) AND stage <> 'refresh' AND error_code = 'STALLED' ORDER BY id
"""


class Stuck(NamedTuple):
    """A waiting item of an idle lane."""

    run_id: int
    stage: str
    key: str
    since: datetime  # no item of its lane has been claimed since


async def watch(stall: timedelta, lanes: list[str], connection: Connection) -> None:
    """Warn of stalled runs, and give up the due items of runs that were warned of at least `stall` ago; clear the mark
    of runs that move again. Called at intervals by every replica. `lanes` names the lanes that the flow declares."""
    given: dict[str, Any] = {"stall": stall, "lanes": lanes, "flow": rules.FLOW}
    async with connection.transaction():
        candidates = await fetch_column(connection, CANDIDATES, given)
        locked = [run_id for run_id, run in (await lock_runs(connection, candidates)).items() if run.is_open]
        if not locked:
            return
        stuck: dict[int, list[Stuck]] = {}
        for one in await fetch_all(connection, Stuck, STUCK, {**given, "runs": locked}):
            stuck.setdefault(one.run_id, []).append(one)
        runs = sorted(stuck)
        await connection.execute(MOVING, (sorted(set(locked) - set(stuck)),))
        lost = await fetch_column(connection, LOST, (runs, stall))
        warned = await fetch_rows(connection, WARN, (runs,))
        events = []
        for *columns, fiche_id, at in warned:
            run = Run(*columns)
            waiting = sorted(one.key for one in stuck[run.id])
            facts: dict[str, Any] = {"waiting": len(waiting), "minutes": stall.total_seconds() / 60}
            payload = {**rules.about(fiche_id, run.id), **facts}
            events.append(event_of(run, "transcription.stalled", payload, suffix=f":{at.isoformat()}"))
            traces.orchestrator(run, fiche_id).warn(
                "stalled: no worker has claimed its due items", **facts, call_ids=waiting[:20]
            )
        if lost:
            events += await _give_up(connection, {run_id: stuck[run_id] for run_id in lost}, 2 * stall)
        await write_events(connection, events)
        if warned:
            await wake_workers(connection)


async def _give_up(connection: Connection, lost: dict[int, list[Stuck]], patience: timedelta) -> list[Event]:
    """Fail the due items of these runs and return their `recording_failed` events, which no worker writes because no
    worker commits these items. `patience` is the time for which the items have waited. Retries that are not due yet
    keep waiting."""
    why = f"No worker claimed it for {patience.total_seconds() / 60:g} minutes, though nothing held it back."
    late = {one.stage: one.since for several in lost.values() for one in several}
    for stage, since in sorted(late.items()):
        await give_up(connection, sorted(lost), stage, rules.STALLED, why, due_before=since)
    runs = {run.id: run for run in await load_runs(connection, lost)}
    events = []
    for run_id, call_id in await fetch_rows(connection, GIVEN_UP, (sorted(lost),)):
        run = runs[run_id]
        payload = rules.recording_over(run.input["fiche_id"], run_id, call_id, code=rules.STALLED, error=why)
        events.append(event_of(run, "transcription.recording_failed", payload, suffix=f":{call_id}"))
    return events
