"""I-19, nothing stuck: open work has a live replica that is responsible for it, or will be picked up.

A failover takes its time, and no work proceeds while no replica runs: waiting times are counted from the start of the
oldest replica that is alive now (or of the database, if later). Instants of replicas and workflows are real time; runs
and items use a clock that a test may have moved, and then checks of their instants are left out.
"""

from __future__ import annotations

from typing import Any

import psycopg

from ecluse.verify import database, enrichment
from ecluse.verify.automation import UNDECIDED
from ecluse.verify.database import Check
from ecluse.verify.report import Report

CARE = """
WITH care AS MATERIALIZED (
    SELECT greatest(p.started_at, pg_postmaster_start_time()) AS since, "offset" <> '0' AS moved
    FROM replicas p, clock_offset WHERE p.state = 'live' AND p.beat_at > now() - interval '15 seconds'
    ORDER BY p.started_at LIMIT 1)
"""

# A replica marked live without a heartbeat is given ten minutes: after how much silence it is dead is a setting.
GONE = """
(p.id IS NULL OR p.state <> 'live' AND p.ended_at < now() - interval '15 seconds'
 OR p.state = 'live' AND p.beat_at < now() - interval '10 minutes')
"""
WHO = "CASE WHEN p.id IS NULL THEN 'is unknown' ELSE format('is %s, last heartbeat %s', p.state, p.beat_at) END"

CLAIMS = f"""
{CARE}
SELECT 'claim ' || c.id AS subject, c.run_id, format('holds %s open items of stage %s for replica %s, which ',
       c.in_flight, c.stage, c.replica_id) || {WHO} AS message
FROM care, claims c LEFT JOIN replicas p ON p.id = c.replica_id
WHERE c.in_flight > 0 AND {GONE} AND care.since < now() - interval '15 seconds' ORDER BY c.id
"""  # noqa: S608 - the fragments above

ITEMS_OF_ENDED_RUNS = """
SELECT format('run %s item %s/%s', i.run_id, i.stage, i.key) AS subject, i.run_id, i.id AS item_id,
       'open, but the run has ended' AS message
FROM items i JOIN runs r ON r.id = i.run_id WHERE i.status = 'open' AND r.ended_at IS NOT NULL ORDER BY i.id
"""

# A workflow that has not noticed the end may still open a stage: an empty one, since fan-out inserts no items any more.
STAGES_OF_ENDED_RUNS = """
SELECT format('run %s stage %s', s.run_id, s.stage) AS subject, s.run_id, 'open, but the run has ended' AS message
FROM stages s JOIN runs r ON r.id = s.run_id
WHERE s.ended_at IS NULL AND s.expected > 0 AND r.ended_at IS NOT NULL ORDER BY 2, 1
"""

# Workers take new runs in order. A worker leads at most 2,000 runs; the runs beyond have to wait, without a workflow.
ROOM = """
(SELECT count(*) FROM dbos.workflow_status WHERE status = 'PENDING')
    < 2000 * greatest(1, (SELECT count(*) FROM replicas WHERE state = 'live' AND 'worker' = ANY(roles)))
"""
WORKFLOWS = f"""
{CARE}
SELECT 'run ' || r.id AS subject, r.id AS run_id, format('%s, but ', r.state) || CASE
    WHEN r.workflow IS NULL THEN 'the run has no workflow'
    WHEN r.workflow = 'PENDING' THEN format('the workflow is led by replica %s, which ', r.executor_id) || {WHO}
    ELSE 'the workflow is ' || r.workflow END AS message
FROM care, (
    SELECT r.*, w.status AS workflow, w.executor_id, to_timestamp(w.updated_at / 1000.0) AS updated_at,
           row_number() OVER (PARTITION BY w.status IS NULL ORDER BY r.id) AS place
    FROM runs r LEFT JOIN dbos.workflow_status w ON w.workflow_uuid = r.tenant_id || '/' || r.event_key
    WHERE r.ended_at IS NULL AND r.orchestrated AND r.state IN ('queued', 'running')) r
LEFT JOIN replicas p ON p.id = r.executor_id
WHERE CASE
    WHEN r.workflow IS NULL THEN NOT care.moved AND (r.state <> 'queued' OR {ROOM})
                                    AND greatest(coalesce(r.started_at, r.created_at), care.since)
                                    < now() - interval '15 seconds' - r.place * interval '0.1 seconds'
    WHEN r.workflow IN ('ENQUEUED', 'DELAYED') THEN false
    ELSE greatest(r.updated_at, care.since) < now() - interval '15 seconds' AND (r.workflow <> 'PENDING' OR {GONE}) END
ORDER BY r.id
"""  # noqa: S608 - the fragments above

# A sweep ends the runs that only a forcibly ended run waited for, within two seconds.
ORPHANS = f"""
{CARE}
SELECT 'run ' || r.id AS subject, r.id AS run_id,
       format('was ended at %s, but %s runs that only it waited for are open', r.ended_at, count(*)) AS message
FROM care, runs r JOIN run_waiters w ON w.waiter_run_id = r.id JOIN runs c ON c.id = w.run_id AND c.ended_at IS NULL
WHERE NOT care.moved AND r.ends_waited_for AND greatest(r.ended_at, care.since) < now() - interval '60 seconds'
  AND NOT EXISTS (SELECT 1 FROM run_waiters o LEFT JOIN runs p ON p.id = o.waiter_run_id
                  WHERE o.run_id = c.id AND (o.waiter_run_id IS NULL OR p.id IS NOT NULL AND p.ended_at IS NULL))
GROUP BY r.id ORDER BY r.id
"""  # noqa: S608 - the fragment above

# No items of a run marked `ending` are claimed, so there must be an ended run that makes the sweep end it.
ENDING = f"""
{CARE}
SELECT 'run ' || c.id AS subject, c.id AS run_id, 'is marked to be ended, but no ended run is left that ends it'
       AS message
FROM care, runs c WHERE c.ending AND c.ended_at IS NULL AND NOT EXISTS (
    SELECT 1 FROM run_waiters w JOIN runs r ON r.id = w.waiter_run_id WHERE w.run_id = c.id AND r.ends_waited_for)
ORDER BY c.id
"""  # noqa: S608 - the fragment above

# A run waits at one gate after the other: of its open stages, the latest deadline must be kept. A run without a
# workflow has no gate: it goes on for as long as its items do, and then ends by itself.
STAGES = f"""
{CARE}
SELECT 'run ' || s.run_id AS subject, s.run_id, format('stage %s should have ended at %s',
       string_agg(s.stage, ', '), max(s.deadline_at)) AS message
FROM care, stages s JOIN runs r ON r.id = s.run_id
WHERE NOT care.moved AND s.ended_at IS NULL AND r.ended_at IS NULL AND r.orchestrated
  AND NOT clock_stopped(s.run_id, s.stage)
GROUP BY s.run_id, care.since HAVING greatest(max(s.deadline_at), care.since) < now() - interval '60 seconds'
ORDER BY s.run_id
"""  # noqa: S608 - the fragment above

UNCLOSED = f"""
{CARE}
SELECT 'run ' || r.id AS subject, r.id AS run_id,
       format('all items were finished at %s, but the run is open', w.last) AS message
FROM care, runs r JOIN (
    SELECT s.run_id, max(coalesce(i.finished_at, s.fanned_out_at)) AS last FROM stages s
    LEFT JOIN items i ON i.run_id = s.run_id AND i.stage = s.stage GROUP BY s.run_id
    HAVING bool_and(s.fanned_out_at IS NOT NULL AND i.status IS DISTINCT FROM 'open')) w ON w.run_id = r.id
WHERE NOT care.moved AND r.state = 'running' AND NOT r.orchestrated
  AND greatest(w.last, care.since) < now() - interval '60 seconds' ORDER BY r.id
"""  # noqa: S608 - the fragment above

# An item may wait for long in a busy lane: it is stuck if its lane is free and yet no item is claimed from it.
EFFECTS = f"""
{CARE}
SELECT format('run %s item %s/%s', i.run_id, i.stage, i.key) AS subject, i.run_id, i.id AS item_id,
       format('write %s is %s, but has not been read back since %s', e.id, e.state, i.due_at) AS message
FROM care, effects e JOIN items i ON i.id = e.item_id AND i.round = e.round JOIN lanes l ON l.id = i.lane_id
LEFT JOIN (SELECT lane_id, max(taken_at) AS at FROM claims GROUP BY 1) t ON t.lane_id = i.lane_id
WHERE NOT care.moved AND e.state IN ('sending', 'unknown') AND i.status = 'open' AND i.claim_id IS NULL
  AND l.paused_at IS NULL
  AND greatest(i.due_at + e.quiet, care.since, l.held_until, t.at) < now() - interval '60 seconds' ORDER BY i.id
"""  # noqa: S608 - the fragment above

LEASES = f"""
{CARE}
SELECT 'lease ' || l.key AS subject, l.tenant_id || '/' || l.key AS lease,
       format('held by %s (replica %s) since %s, but expired at %s', l.owner, coalesce(l.replica_id, 'none'),
              l.acquired_at, l.expires_at) AS message
FROM care, leases l
WHERE NOT care.moved AND l.ended_at IS NULL AND greatest(l.expires_at, care.since) < now() - interval '60 seconds'
  AND l.run_id IS NULL ORDER BY l.tenant_id, l.key
"""  # noqa: S608 - the fragment above

I_19_NOTHING_STUCK = Check(
    "I-19",
    "SELECT (SELECT count(*) FROM runs) + (SELECT count(*) FROM claims WHERE in_flight > 0)"
    " + (SELECT count(*) FROM effects WHERE state IN ('sending', 'unknown'))"
    " + (SELECT count(*) FROM leases WHERE ended_at IS NULL) AS n",
    (
        *(CLAIMS, ITEMS_OF_ENDED_RUNS, STAGES_OF_ENDED_RUNS, WORKFLOWS, ORPHANS, ENDING, STAGES, UNCLOSED, EFFECTS),
        *(LEASES, UNDECIDED, enrichment.OUTLIVED),
    ),
)


def check(connection: psycopg.Connection[dict[str, Any]], report: Report) -> None:
    """Run the check of this module. Without a live replica nothing is reported as stuck, and the report notes that."""
    if not connection.execute(f"{CARE} SELECT since FROM care").fetchall():  # noqa: S608 - the fragment above
        report.notes.append("no live replica: open work is not reported as stuck")
    database.run(connection, I_19_NOTHING_STUCK, report)
