"""The outcomes of the targets of a run. A flow may settle a target while its run is open (`settle_targets`); the end of
the run settles the others (`settle_outcomes`) and counts all of them (`tally`). The first outcome of a target is
final."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from ecluse.base.text import storable
from ecluse.db.connect import Connection
from ecluse.db.query import as_json, fetch_rows
from ecluse.engine.model.flow import Flow, Run
from ecluse.engine.model.states import ON_REQUEST, STOPPED, RunEnd
from ecluse.engine.runs.lifecycle import lock_runs

CANCELLED = "CANCELLED"  # error code of an unfinished target of a run that was ended on request
FEW = 500  # targets


class Settled(NamedTuple):
    """The outcome of a target that is settled before its run has ended. `reason` says why it failed or is ignored."""

    target: str
    outcome: Literal["successful", "failed", "ignored"]
    error_code: str | None = None
    reason: str | None = None


SETTLE_TARGETS = """
UPDATE outcomes o SET outcome = t.outcome, error_code = t.error_code, reason = t.reason
FROM jsonb_to_recordset(%s::jsonb) AS t(target text, outcome text, error_code text, reason text), runs r
WHERE o.run_id = %s AND o.target = t.target AND o.outcome IS NULL AND r.id = o.run_id AND r.ended_at IS NULL
"""


async def settle_targets(connection: Connection, run: Run, settled: Sequence[Settled]) -> int:
    """Settle targets of an open run for good, for a flow that knows their outcome early; return the number of targets
    settled. Targets that have an outcome, and all targets of a run that has ended, stay unchanged. Locks the run."""
    rows = [one._replace(reason=storable(one.reason))._asdict() if one.reason else one._asdict() for one in settled]
    async with connection.transaction():
        await lock_runs(connection, [run.id])
        return (await connection.execute(SETTLE_TARGETS, (as_json(rows), run.id))).rowcount


# Three statements, so that the common case is cheap:
# 1. Targets whose items all succeeded.
# 2. Targets with an item that did not: failed goes before unfinished before ignored, and the first one gives the
#    reason. An unfinished item is INCOMPLETE, with the error of the gate that gave up on it.
# 3. All other targets.
# When a run is ended by force, only targets that failed, are ignored or have passed a last stage count as finished.
SETTLE = (
    """
UPDATE outcomes o SET outcome = 'successful'
FROM (SELECT run_id, target FROM items WHERE run_id = ANY(%(runs)s) GROUP BY run_id, target
      HAVING bool_and(status = 'succeeded') AND (%(normal)s OR bool_or(stage = ANY(%(last)s)))) w
WHERE o.run_id = ANY(%(runs)s) AND o.run_id = w.run_id AND o.target = w.target AND o.outcome IS NULL
""",
    """
UPDATE outcomes o SET outcome = CASE w.status WHEN 'ignored' THEN 'ignored' ELSE 'failed' END,
    error_code = CASE w.status WHEN 'open' THEN 'INCOMPLETE' ELSE w.error_code END,
    reason = CASE WHEN w.status = 'open' AND NOT w.permanent THEN 'Not finished when the run ended' ELSE w.error END
FROM (SELECT DISTINCT ON (run_id, target) run_id, target, status, permanent, error_code, error FROM items
      WHERE run_id = ANY(%(runs)s) AND status <> 'succeeded'
      ORDER BY run_id, target, array_position(ARRAY['failed', 'open', 'ignored'], status), finished_at, id) w
WHERE o.run_id = ANY(%(runs)s) AND o.run_id = w.run_id AND o.target = w.target AND o.outcome IS NULL
  AND (%(normal)s OR w.status <> 'open')
""",
    """
UPDATE outcomes SET outcome = 'failed', error_code = %(code)s, reason = %(reason)s
WHERE run_id = ANY(%(runs)s) AND outcome IS NULL
""",
)

# Mark failed targets whose write was, or may have been, applied at the vendor; `effects` knows which, or will.
MAY_EXIST = """
UPDATE outcomes o SET effect_may_exist = true FROM effects e
WHERE o.run_id = ANY(%(runs)s) AND e.run_id = o.run_id AND e.target = o.target AND o.outcome = 'failed'
  AND e.sends > 0 AND e.state IN ('sending', 'unknown', 'applied', 'conflict')
"""


def of_unfinished(end: RunEnd) -> tuple[str, str]:
    """Return the error code and the reason of targets that are not finished when their run ends."""
    if end.cause == "normal":
        return "NOT_PROCESSED", "No work was done for this target"
    if end.cause == "operator":
        return CANCELLED, storable(f"Cancelled by {end.by}: {end.reason}")
    if end.cause == "parent":
        return CANCELLED, storable(f"Cancelled: {end.reason}")
    why = end.reason or end.code or "no reason given"
    how = STOPPED if end.cause == "catastrophic" else f"ended: {end.cause}"
    return end.code or "RUN_ENDED", storable(f"Run {how}: {why}")


async def settle_outcomes(
    connection: Connection, flow: Flow, run_ids: Collection[int], end: RunEnd, selected: int
) -> None:
    """Settle the targets of these ending runs that have no outcome yet, in the transaction that ends the runs.
    `selected`: the number of all targets of these runs, with or without an outcome."""
    code, reason = of_unfinished(end)
    rest = {"code": code, "reason": reason}
    given = {"runs": list(run_ids), "normal": end.cause == "normal", "last": flow.last_stages, **rest}
    # Freshly filled tables have no statistics: a planner that expects one row would run a nested loop over thousands.
    if many := selected > FEW:
        await connection.execute("SET LOCAL enable_nestloop = off")
    all_good = (await connection.execute(SETTLE[0], given)).rowcount == selected
    for statement in () if all_good else SETTLE[1:]:
        await connection.execute(statement, given)
    if many:
        await connection.execute("SET LOCAL enable_nestloop = on")
    if not all_good:
        await connection.execute(MAY_EXIST, given)


TALLIED = ("successful", "failed", "ignored", "cancelled")
TALLY = """
SELECT r.id, count(*) FILTER (WHERE o.outcome = 'successful'), count(*) FILTER (WHERE o.outcome = 'failed'),
       count(*) FILTER (WHERE o.outcome = 'ignored'),
       count(*) FILTER (WHERE %(on_request)s AND o.outcome = 'failed' AND o.error_code = %(cancelled)s),
       extract(epoch FROM ecluse_now() - coalesce(r.started_at, r.created_at))::float8
FROM runs r LEFT JOIN outcomes o ON o.run_id = r.id AND o.run_id = ANY(%(runs)s)
WHERE r.id = ANY(%(runs)s) GROUP BY r.id
"""


async def tally(
    connection: Connection, run_ids: Collection[int], end: RunEnd
) -> list[tuple[int, dict[str, int], float]]:
    """Count the targets of these ending runs by outcome, after `settle_outcomes`. Return for each run its id, the
    counts by the names in TALLIED, and the seconds since the run began (since its creation, if it never began).
    `cancelled` counts the failed targets that an end on request cut short; `failed` includes them."""
    given = {"runs": list(run_ids), "on_request": end.cause in ON_REQUEST, "cancelled": CANCELLED}
    rows = await fetch_rows(connection, TALLY, given)
    return [(run_id, dict(zip(TALLIED, counts, strict=True)), seconds) for run_id, *counts, seconds in rows]
