"""Runs that look stuck: something waits, is due, and nobody has taken anything of its lane for a while, though nothing
holds the lane back. First a warning and a knock on every worker's door; if that did not help, the recordings are given
up and the run ends by itself. A queue that moves, however slowly, is not a stall."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from ecluse.db.connect import Connection
from ecluse.engine import Run, give_up, wake_workers, write_events
from ecluse.flows.transcriptions import rules, traces
from ecluse.flows.transcriptions.planning import event_of

# Lanes first: while they move, nothing else is read. The newest claims are enough to see that.
STUCK = """
WITH clock AS MATERIALIZED (SELECT ecluse_now() AS now, ecluse_now() - %(stall)s AS since),
idle AS MATERIALIZED (
    SELECT l.id FROM lanes l, clock
    WHERE l.name = ANY(%(lanes)s) AND l.paused_at IS NULL AND (l.held_until IS NULL OR l.held_until <= since)
      AND l.next_free_at <= since
      AND NOT EXISTS (SELECT 1 FROM claims c WHERE c.lane_id = l.id AND c.in_flight > 0)
      AND NOT EXISTS (SELECT 1 FROM (SELECT lane_id, taken_at FROM claims ORDER BY id DESC LIMIT 5000) c
                      WHERE c.lane_id = l.id AND c.taken_at > since))
SELECT i.run_id, i.stage, i.key FROM clock, idle JOIN items i ON i.lane_id = idle.id AND i.claim_id IS NULL
WHERE i.flow = %(flow)s AND i.status = 'open' AND i.due_at <= since
"""

MOVING = """
UPDATE transcription_runs SET stalled_at = NULL FROM runs r
WHERE r.id = run_id AND r.ended_at IS NULL AND stalled_at IS NOT NULL AND run_id <> ALL (%s)
"""

# Whoever comes second finds nothing to warn of.
WARN = """
UPDATE transcription_runs t SET stalled_at = ecluse_now() FROM runs r
WHERE t.run_id = ANY(%s) AND t.stalled_at IS NULL AND r.id = t.run_id AND r.ended_at IS NULL
RETURNING r.id, r.tenant_id, r.flow, r.event_key, r.input, r.correlation_id, t.fiche_id, t.stalled_at
"""

GIVEN_UP = "SELECT run_id FROM transcription_runs WHERE run_id = ANY(%s) AND stalled_at <= ecluse_now() - %s"


async def watch(stall: timedelta, lanes: list[str], connection: Connection) -> None:
    async with connection.transaction():
        cursor = await connection.execute(STUCK, {"stall": stall, "lanes": lanes, "flow": rules.FLOW})
        stuck = await cursor.fetchall()
        runs = sorted({run_id for run_id, *_ in stuck})
        await connection.execute(MOVING, (runs,))
        if not runs:
            return
        lost = {row[0] for row in await (await connection.execute(GIVEN_UP, (runs, stall))).fetchall()}
        warned = await (await connection.execute(WARN, (runs,))).fetchall()
        events = []
        for *columns, fiche_id, at in warned:
            run = Run(*columns)
            waiting = sorted(key for run_id, _, key in stuck if run_id == run.id)
            facts: dict[str, Any] = {"waiting": len(waiting), "minutes": stall.total_seconds() / 60}
            told = {**rules.about(fiche_id, run.id), **facts}
            events.append(event_of(run, "transcription.stalled", told, suffix=f":{at.isoformat()}"))
            traces.orchestrator(run, fiche_id).warn("stalled: nothing was taken up", **facts, call_ids=waiting[:20])
        await write_events(connection, events)
        if warned:
            await wake_workers(connection)
        if lost:
            minutes = 2 * stall.total_seconds() / 60
            why = f"Nobody took it up for {minutes:g} minutes, though nothing held it back."
            for stage in sorted({stage for run_id, stage, _ in stuck if run_id in lost}):
                await give_up(connection, sorted(lost), stage, rules.STALLED, why)
