"""Run statistics of a schedule: the number of runs that ended with each status, and the status of the last one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ecluse.db.connect import Connection
from ecluse.db.query import Row, as_json, fetch_rows
from ecluse.engine import terminal_state
from ecluse.insight.redrive_chains import first_of, standing

Status = Literal["success", "partial", "failed", "cancelled"]
STATUS: dict[str, Status] = {"completed": "success", "succeeded": "success", "partial": "partial", "failed": "failed"}

ADD = """
UPDATE automation_settings a SET total_runs = total_runs + t.n, successful_runs = successful_runs + t.successful,
    partial_runs = partial_runs + t.partial, failed_runs = failed_runs + t.failed,
    cancelled_runs = cancelled_runs + t.cancelled, last_run_status = coalesce(t.latest, a.last_run_status)
FROM (SELECT schedule_id, count(*) AS n, count(*) FILTER (WHERE came_to = 'success') AS successful,
             count(*) FILTER (WHERE came_to = 'partial') AS partial,
             count(*) FILTER (WHERE came_to = 'failed') AS failed,
             count(*) FILTER (WHERE came_to = 'cancelled') AS cancelled,
             (array_agg(last ORDER BY run_id DESC) FILTER (WHERE last IS NOT NULL))[1] AS latest
      FROM jsonb_to_recordset(%s::jsonb) AS r(run_id bigint, schedule_id bigint, came_to text, last text) GROUP BY 1) t
WHERE a.id = t.schedule_id
"""
# The run of each schedule that ended last. Redrives are left out: they belong to the run that they redrive.
LAST = """
SELECT s.id, r.id FROM unnest(%s::bigint[]) AS s(id), LATERAL (
    SELECT id FROM runs WHERE schedule_id = s.id AND ended_at IS NOT NULL AND redrive_of IS NULL
    ORDER BY ended_at DESC, id DESC LIMIT 1) r
"""


def last_run_status(came_to: Status, redriven: Row | None, *, is_redrive: bool) -> Status | None:
    """Return the last status of a schedule after a run has ended with the status `came_to`; None if it stays unchanged.
    After a redrive it follows from `redriven`, the latest outcomes of the targets of the run that was redriven (None if
    that was not the schedule's last run). A redrive takes failed targets only, so it never makes the status worse; a
    run stays cancelled while some of its targets were never finished."""
    if not is_redrive:
        return came_to
    if redriven is None:
        return None
    return "cancelled" if redriven["cancelled"] else STATUS[terminal_state(redriven["successful"], redriven["failed"])]


async def add(connection: Connection, ended: Sequence[Row]) -> None:
    """Add ended runs to the statistics of their schedules, in the transaction that ends these runs. `ended`: rows of
    `events.SUM_UP`."""
    redrives = [row for row in ended if row["redrive_of"] is not None]
    first = await first_of(connection, [row["id"] for row in redrives]) if redrives else {}
    last: dict[int, int] = {}
    if redrives:
        last = dict(await fetch_rows(connection, LAST, (sorted({row["schedule_id"] for row in redrives}),)))
    stands = await standing(connection, set(first.values()) & set(last.values()))
    rows = []
    for row in ended:
        root, is_redrive = first.get(row["id"]), row["redrive_of"] is not None
        redriven = stands.get(root) if root is not None and root == last.get(row["schedule_id"]) else None
        came_to: Status = "cancelled" if row["state"] == "cancelled" else STATUS[row["status"]]
        latest = last_run_status(came_to, redriven, is_redrive=is_redrive)
        facts = {"run_id": row["id"], "schedule_id": row["schedule_id"]}
        rows.append({**facts, "came_to": came_to, "last": latest})
    await connection.execute(ADD, (as_json(rows),))
