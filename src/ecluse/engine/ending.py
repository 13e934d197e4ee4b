"""How a run ends, in one transaction: outcomes settled, work closed, counts, status. Whoever comes second changes
nothing; the database counts once more."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

from ecluse.base.crash import crashpoint
from ecluse.base.text import storable
from ecluse.db.connect import Connection
from ecluse.engine import counts, leases, outbox, runs
from ecluse.engine.flow import Flow, Run
from ecluse.engine.states import State, terminal_state

EndCause = Literal["normal", "operator", "stale", "catastrophic"]

# In three strokes, the common one cheap: all items succeeded; something did not (failed before ignored, the first one
# names the reason, an item nobody finished is incomplete); the rest. When a run is ended by force, only those count as
# finished that have failed, are out, or have been through the last stage.
SETTLE = (
    """
UPDATE outcomes o SET outcome = 'successful'
FROM (SELECT target FROM items WHERE run_id = %(run)s GROUP BY target
      HAVING bool_and(status = 'succeeded') AND (%(normal)s OR bool_or(stage = %(last_stage)s))) w
WHERE o.run_id = %(run)s AND o.target = w.target AND o.outcome IS NULL
""",
    """
UPDATE outcomes o SET outcome = CASE w.status WHEN 'ignored' THEN 'ignored' ELSE 'failed' END,
    error_code = CASE w.status WHEN 'open' THEN 'INCOMPLETE' ELSE w.error_code END,
    reason = CASE w.status WHEN 'open' THEN 'Not finished when the run ended' ELSE w.error END
FROM (SELECT DISTINCT ON (target) target, status, error_code, error FROM items
      WHERE run_id = %(run)s AND status <> 'succeeded'
      ORDER BY target, array_position(ARRAY['failed', 'open', 'ignored'], status), finished_at, id) w
WHERE o.run_id = %(run)s AND o.target = w.target AND o.outcome IS NULL AND (%(normal)s OR w.status <> 'open')
""",
    """
UPDATE outcomes SET outcome = 'failed', error_code = %(code)s, reason = %(reason)s
WHERE run_id = %(run)s AND outcome IS NULL
""",
)

# A failure that has, or may have, left something at the vendor says so; `effects` knows what, or will.
MAY_EXIST = """
UPDATE outcomes o SET effect_may_exist = true FROM effects e
WHERE o.run_id = %(run)s AND e.run_id = o.run_id AND e.target = o.target AND o.outcome = 'failed'
  AND e.sends > 0 AND e.state IN ('sending', 'unknown', 'applied', 'conflict')
"""

# Nothing of an ended run is started or stored any more: waiting items go under a closed claim, fences move on.
CLOSE_WORK = """
WITH late AS (
    SELECT id, stage, lane_id FROM items WHERE run_id = %(run)s AND status = 'open'
    ORDER BY id FOR UPDATE),
fenced AS (
    UPDATE claims SET fence = fence + 1, released = released + in_flight WHERE run_id = %(run)s AND in_flight > 0),
claim AS (
    INSERT INTO claims (replica_id, run_id, stage, lane_id, taken, failed, taken_at)
    SELECT 'end of run', %(run)s, stage, lane_id, count(*), count(*), ecluse_now() FROM late GROUP BY stage, lane_id
    RETURNING id, stage, lane_id),
closed AS (
    UPDATE items i SET claim_id = c.id, status = 'failed', permanent = true, error_code = 'RUN_ENDED',
        error = coalesce(i.error, 'The run ended first'), finished_at = ecluse_now()
    FROM late JOIN claim c ON c.stage = late.stage AND c.lane_id = late.lane_id WHERE i.id = late.id)
UPDATE stages SET ended_at = ecluse_now(), end_cause = 'run ended' WHERE run_id = %(run)s AND ended_at IS NULL
"""


async def end(
    connection: Connection,
    flow: Flow,
    run: Run,
    *,
    cause: EndCause = "normal",
    code: str | None = None,
    reason: str | None = None,
    record: Callable[[], Awaitable[None]] | None = None,
) -> bool:
    """Settle and end, together with what `record` writes. False if it had ended already: whoever comes second changes
    nothing."""
    async with connection.transaction():
        word = await runs.lock(connection, run.id)
        if flow.words.meaning[word] not in (State.QUEUED, State.RUNNING):
            return False
        await connection.execute("UPDATE runs SET selected = coalesce(selected, 0) WHERE id = %s", (run.id,))
        # Claims before items before outcomes: the one lock order.
        await connection.execute("SELECT 1 FROM claims WHERE run_id = %s ORDER BY id FOR NO KEY UPDATE", (run.id,))
        rest = {"code": "NOT_PROCESSED", "reason": "No work was done for this target"}
        if cause != "normal":
            text = storable(f"Run ended: {cause}: {reason or code or 'no reason given'}")
            rest = {"code": code or "RUN_ENDED", "reason": text}
        # Freshly filled tables have no statistics: a planner that believes in one row would loop over thousands.
        await connection.execute("SET LOCAL enable_nestloop = off")
        for stroke in SETTLE:
            facts = {"run": run.id, "normal": cause == "normal", "last_stage": flow.stages[-1].name, **rest}
            await connection.execute(stroke, facts)
        await connection.execute("SET LOCAL enable_nestloop = on")
        await connection.execute(MAY_EXIST, {"run": run.id})
        await connection.execute(CLOSE_WORK, {"run": run.id})
        await connection.execute(leases.END_OF_RUN, (run.id,))
        crashpoint("in finalize")
        to_word, seconds, tally = await _finish(connection, flow, run, word, cause, code, reason)
        if record is not None:
            await record()
        await outbox.tell(connection, [run.id], "completed" if cause == "normal" else "failed")
    counts.runs_ended[flow.name, flow.words.meaning[to_word]] += 1
    run.trace.end(to_word, seconds, cause=cause, code=code, reason=reason, event_key=run.event_key, **tally)
    return True


async def _finish(
    connection: Connection, flow: Flow, run: Run, word: str, cause: EndCause, code: str | None, reason: str | None
) -> tuple[str, float, dict[str, int]]:
    """The flow's word for how it ended, how long it took, what became of its targets."""
    row = await (
        await connection.execute(
            "SELECT count(*) FILTER (WHERE outcome = 'successful'), count(*) FILTER (WHERE outcome = 'failed'),"
            " count(*) FILTER (WHERE outcome = 'ignored'), (SELECT extract(epoch FROM ecluse_now() -"
            " coalesce(started_at, created_at)) FROM runs WHERE id = %(run)s) FROM outcomes WHERE run_id = %(run)s",
            {"run": run.id},
        )
    ).fetchone()
    successful, failed, ignored, seconds = row or (0, 0, 0, 0)
    state = terminal_state(successful, failed) if cause == "normal" else State.FAILED
    why = reason
    if cause == "normal" and successful + failed == 0:
        why = "all_ignored" if ignored else "no_targets"
    to_word = await runs.set_status(
        connection,
        flow,
        run,
        word,
        state,
        ended=True,
        successful=successful,
        failed=failed,
        ignored=ignored,
        end_cause=cause,
        reason=None if why is None else storable(why),
        error_code=code,
        error_message=None if cause == "normal" or reason is None else storable(reason),
    )
    return to_word, float(seconds), {"successful": successful, "failed": failed, "ignored": ignored}
