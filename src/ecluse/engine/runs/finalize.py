"""End runs in one transaction: settle outcomes, close open work, tally, set the status. A second end of the same run
changes nothing; a constraint trigger of the database counts the outcomes again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ecluse.base.crash import crashpoint
from ecluse.base.text import storable
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_all, fetch_rows
from ecluse.engine.model import counters
from ecluse.engine.model.flow import Flow, Run
from ecluse.engine.model.states import ON_REQUEST, STOPPED, EndCause, State, cause_in_words, ended_as
from ecluse.engine.outbox import events
from ecluse.engine.runs import items, leases, lifecycle, units
from ecluse.engine.runs.waiters import MARK_ABANDONED

FEW = 500  # targets
CANCELLED = "CANCELLED"  # error code of an unfinished target of a run that was ended on request

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

# Nothing of an ended run is stored any more: the fences of its claims are incremented.
CLOSE_WORK = """
WITH fenced AS (
    UPDATE claims SET fence = fence + 1, released = released + in_flight
    WHERE run_id = ANY(%(runs)s) AND in_flight > 0)
UPDATE stages SET ended_at = ecluse_now(), end_cause = 'run ended' WHERE run_id = ANY(%(runs)s) AND ended_at IS NULL
"""
# The first failed item of runs that never selected targets: the run itself has failed, for that item's reason.
BROKEN = """
SELECT DISTINCT ON (run_id) run_id, error_code, error FROM items
WHERE run_id = ANY(%(runs)s) AND status = 'failed' ORDER BY run_id, finished_at, id
"""
TALLY = """
SELECT r.id, count(*) FILTER (WHERE o.outcome = 'successful'), count(*) FILTER (WHERE o.outcome = 'failed'),
       count(*) FILTER (WHERE o.outcome = 'ignored'),
       count(*) FILTER (WHERE %(on_request)s AND o.outcome = 'failed' AND o.error_code = %(cancelled)s),
       extract(epoch FROM ecluse_now() - coalesce(r.started_at, r.created_at))::float8
FROM runs r LEFT JOIN outcomes o ON o.run_id = r.id AND o.run_id = ANY(%(runs)s)
WHERE r.id = ANY(%(runs)s) GROUP BY r.id
"""
ALL_COMPLETE = f"""
SELECT {lifecycle.RUN} FROM runs r
WHERE r.id = ANY(%s) AND r.ended_at IS NULL AND EXISTS (SELECT 1 FROM stages s WHERE s.run_id = r.id) AND NOT EXISTS (
    SELECT 1 FROM stages s CROSS JOIN LATERAL {items.COUNTS} n WHERE s.run_id = r.id AND NOT {items.COMPLETE})
ORDER BY r.id
"""  # noqa: S608 - our own names


async def find_complete_runs(connection: Connection, run_ids: Collection[int]) -> list[Run]:
    """Return the open runs among `run_ids` whose stages are all complete. For runs without a story, which no workflow
    ends."""
    return await fetch_all(connection, Run, ALL_COMPLETE, (list(run_ids),))


@dataclass(frozen=True)
class RunEnd:
    """Why a run ends; `by` names the operator who asked for it, or the run whose end ends this one."""

    cause: EndCause
    code: str | None = None
    reason: str | None = None
    by: str | None = None

    @property
    def of_targets(self) -> tuple[str, str]:
        """The error code and the reason of unfinished targets."""
        if self.cause == "normal":
            return "NOT_PROCESSED", "No work was done for this target"
        if self.cause == "operator":
            return CANCELLED, storable(f"Cancelled by {self.by}: {self.reason}")
        if self.cause == "parent":
            return CANCELLED, storable(f"Cancelled: {self.reason}")
        why = self.reason or self.code or "no reason given"
        how = STOPPED if self.cause == "catastrophic" else f"ended: {self.cause}"
        return self.code or "RUN_ENDED", storable(f"Run {how}: {why}")


NORMAL = RunEnd("normal")


async def end_runs(
    connection: Connection,
    flow: Flow,
    ending: Sequence[Run],
    cause: RunEnd = NORMAL,
    record: Callable[[], Awaitable[None]] | None = None,
) -> int:
    """Settle and end those of the runs that are still open, in one transaction with what `record` writes; return how
    many."""
    by_id = {run.id: run for run in ending}
    ended: list[EndedRun] = []
    async with connection.transaction():
        found = {
            run_id: locked
            for run_id, locked in (await lifecycle.lock_runs(connection, by_id)).items()
            if flow.statuses.meaning[locked.status] in (State.QUEUED, State.RUNNING)
        }
        if not found:
            return 0
        causes = dict.fromkeys(found, cause)
        unselected = [run_id for run_id, locked in found.items() if locked.selected is None]
        if unselected:
            await connection.execute("UPDATE runs SET selected = 0 WHERE id = ANY(%s)", (unselected,))
        await lifecycle.lock_claims(connection, found)
        if cause.cause == "normal" and unselected:
            broken = await fetch_rows(connection, BROKEN, {"runs": unselected})
            causes |= {run_id: RunEnd("catastrophic", code, error) for run_id, code, error in broken}
        if flow.units is not None:
            await units.keep_counts(connection, flow.units, [by_id[run_id] for run_id in found])
        await _settle(connection, flow, list(found), cause, sum(locked.selected or 0 for locked in found.values()))
        crashpoint("in finalize")
        asked = {"runs": list(found), "on_request": cause.cause in ON_REQUEST, "cancelled": CANCELLED}
        for run_id, successful, failed, ignored, cancelled, seconds in await fetch_rows(connection, TALLY, asked):
            tally = {"successful": successful, "failed": failed, "ignored": ignored, "cancelled": cancelled}
            as_what = ended_as(causes[run_id].cause, successful, failed)
            ended.append(EndedRun(by_id[run_id], found[run_id].status, causes[run_id], tally, seconds, *as_what))
        moves = [lifecycle.StatusChange(one.run, one.from_status, one.state, one.facts, one.shown) for one in ended]
        to_statuses = await lifecycle.set_status(connection, flow, moves)
        if forced := [one.run.id for one in ended if one.cause.cause != "normal"]:
            await connection.execute(MARK_ABANDONED, (forced,))
        if record is not None:
            await record()
        for what, wanted in (("completed", True), ("failed", False)):
            if of_these := [one.run.id for one in ended if (one.cause.cause == "normal") is wanted]:
                await events.write_run_events(connection, of_these, what)  # type: ignore[arg-type]
        if flow.ended is not None:
            await events.write(connection, await flow.ended(connection, [one.run for one in ended]))
    for one, to_status in zip(ended, to_statuses, strict=True):
        counters.runs_ended[flow.name, one.state] += 1
        facts = {
            "cause": cause_in_words(one.cause.cause),
            "code": one.cause.code,
            "reason": one.cause.reason,
            **one.tally,
        }
        one.run.trace.end(to_status, one.seconds, event_key=one.run.event_key, **facts)
    return len(ended)


async def _settle(connection: Connection, flow: Flow, run_ids: list[int], cause: RunEnd, selected: int) -> None:
    code, reason = cause.of_targets
    rest = {"code": code, "reason": reason}
    facts = {"runs": run_ids, "normal": cause.cause == "normal", "last": flow.last_stages, **rest}
    # Freshly filled tables have no statistics: a planner that expects one row would run a nested loop over thousands.
    if many := selected > FEW:
        await connection.execute("SET LOCAL enable_nestloop = off")
    all_good = (await connection.execute(SETTLE[0], facts)).rowcount == selected
    for stroke in () if all_good else SETTLE[1:]:
        await connection.execute(stroke, facts)
    if many:
        await connection.execute("SET LOCAL enable_nestloop = on")
    if not all_good:
        await connection.execute(MAY_EXIST, facts)
    await items.fail_waiting(connection, run_ids, None, "RUN_ENDED", "The run ended first", by="end of run")
    for statement in (CLOSE_WORK, leases.END_OF_RUNS):
        await connection.execute(statement, facts)


class EndedRun(NamedTuple):
    run: Run
    from_status: str
    cause: RunEnd
    tally: dict[str, int]
    seconds: float
    state: State
    shown: State  # as which the flow shows it

    @property
    def facts(self) -> dict[str, Any]:
        cause, code, reason = self.cause.cause, self.cause.code, self.cause.reason
        why = reason
        if cause == "normal" and self.tally["successful"] + self.tally["failed"] == 0:
            why = "all_ignored" if self.tally["ignored"] else "no_targets"
        return self.tally | {
            "end_cause": cause,
            "ended_by": None if self.cause.by is None else storable(self.cause.by),
            "reason": None if why is None else storable(why),
            "error_code": code,
            "error_message": None if cause == "normal" or reason is None else storable(reason),
        }
