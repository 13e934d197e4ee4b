"""How it stands with a schedule: when it last ran, how that ended, and how often. Written by its runs, in the
transactions in which they begin and end."""

from __future__ import annotations

from ecluse.db.connect import Connection

# A run that ends has the last word, unless another one holds the schedule: that goes on, and will have it.
WORDS = {"completed": "success", "partial": "partial", "failed": "failed"}
TOTALS = {"completed": "successful_runs", "partial": "partial_runs", "failed": "failed_runs"}

TRIGGERED = "UPDATE automation_settings SET last_run_at = ecluse_now(), last_run_status = 'running' WHERE id = %s"
ENDED = """
UPDATE automation_settings a SET total_runs = total_runs + 1, {total} = {total} + 1,
    last_run_status = CASE WHEN EXISTS (
        SELECT FROM schedules s JOIN runs r ON r.id = s.holding_run_id AND r.ended_at IS NULL
        WHERE s.id = a.id AND r.id <> %(run)s) THEN 'running' ELSE %(word)s END
WHERE id = %(schedule)s
"""


async def mark_triggered(connection: Connection, schedule_id: int) -> None:
    await connection.execute(TRIGGERED, (schedule_id,))


async def mark_ended(connection: Connection, schedule_id: int, run_id: int, status: str) -> None:
    """`status` is the run's: completed, partial or failed. Once per run."""
    statement = ENDED.format(total=TOTALS[status])
    await connection.execute(statement, {"schedule": schedule_id, "run": run_id, "word": WORDS[status]})
