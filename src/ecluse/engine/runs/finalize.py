"""End runs in one transaction: settle outcomes, close open work, tally, set the status. A second end of the same run
changes nothing; a constraint trigger of the database counts the outcomes again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from psycopg.rows import class_row

from ecluse.base.crash import crashpoint
from ecluse.base.text import storable
from ecluse.db.connect import Connection
from ecluse.engine.model import counters
from ecluse.engine.model.flow import Flow, Run
from ecluse.engine.model.states import ON_REQUEST, STOPPED, EndCause, State, cause_in_words, ended_as
from ecluse.engine.outbox import events
from ecluse.engine.runs import leases, lifecycle, units
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

# Nothing of an ended run is started or stored any more: open items get a closed claim, and fences are incremented.
END_OF_RUN = "end of run"
CLOSE_WORK = f"""
WITH late AS (
    SELECT id, run_id, stage, lane_id FROM items WHERE run_id = ANY(%(runs)s) AND status = 'open'
    ORDER BY id FOR UPDATE),
fenced AS (
    UPDATE claims SET fence = fence + 1, released = released + in_flight
    WHERE run_id = ANY(%(runs)s) AND in_flight > 0),
claim AS (
    INSERT INTO claims (replica_id, run_id, stage, lane_id, taken, failed, taken_at)
    SELECT '{END_OF_RUN}', run_id, stage, lane_id, count(*), count(*), ecluse_now() FROM late
    GROUP BY run_id, stage, lane_id RETURNING id, run_id, stage, lane_id),
closed AS (
    UPDATE items i SET claim_id = c.id, status = 'failed', permanent = true, error_code = 'RUN_ENDED',
        error = coalesce(i.error, 'The run ended first'), finished_at = ecluse_now()
    FROM late JOIN claim c ON c.run_id = late.run_id AND c.stage = late.stage AND c.lane_id = late.lane_id
    WHERE i.id = late.id)
UPDATE stages SET ended_at = ecluse_now(), end_cause = 'run ended' WHERE run_id = ANY(%(runs)s) AND ended_at IS NULL
"""  # noqa: S608 - our own word

LOCK = """
SELECT id, status, selected FROM runs WHERE id = ANY(%(runs)s) ORDER BY id FOR NO KEY UPDATE
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


ALL_COMPLETE = """
SELECT r.id, r.tenant_id, r.flow, r.event_key, r.input, r.correlation_id, r.schedule_id FROM runs r
WHERE r.id = ANY(%s) AND r.ended_at IS NULL AND EXISTS (SELECT 1 FROM stages s WHERE s.run_id = r.id) AND NOT EXISTS (
    SELECT 1 FROM stages s WHERE s.run_id = r.id AND (s.fanned_out_at IS NULL OR s.expected <> (
        SELECT coalesce(sum(c.succeeded + c.failed + c.ignored), 0) FROM claims c
        WHERE c.run_id = s.run_id AND c.stage = s.stage)))
ORDER BY r.id
"""


async def complete(connection: Connection, run_ids: Collection[int]) -> list[Run]:
    """Return the open runs among `run_ids` whose stages are all complete. For runs without a story, which no workflow
    ends."""
    async with connection.cursor(row_factory=class_row(Run)) as rows:
        return await (await rows.execute(ALL_COMPLETE, (list(run_ids),))).fetchall()


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


async def end(
    connection: Connection,
    flow: Flow,
    run: Run,
    *,
    cause: EndCause = "normal",
    code: str | None = None,
    reason: str | None = None,
    by: str | None = None,
    record: Callable[[], Awaitable[None]] | None = None,
) -> bool:
    """Settle and end one run; `record` writes in the same transaction. Return False if the run had ended already: then
    nothing is changed."""
    return await end_many(connection, flow, [run], RunEnd(cause, code, reason, by), record) == 1


async def end_many(
    connection: Connection,
    flow: Flow,
    ending: Sequence[Run],
    cause: RunEnd = NORMAL,
    record: Callable[[], Awaitable[None]] | None = None,
) -> int:
    """End those of the runs that are still open, in one transaction; return how many."""
    by_id = {run.id: run for run in ending}
    ended: list[EndedRun] = []
    async with connection.transaction():
        cursor = await connection.execute(LOCK, {"runs": list(by_id)})
        words = {
            run: (word, selected)
            for run, word, selected in await cursor.fetchall()
            if flow.words.meaning[word] in (State.QUEUED, State.RUNNING)
        }
        if not words:
            return 0
        runs_too = {"runs": list(words)}
        causes = dict.fromkeys(words, cause)
        unselected = [run for run, (_, selected) in words.items() if selected is None]
        if unselected:
            await connection.execute("UPDATE runs SET selected = 0 WHERE id = ANY(%s)", (unselected,))
        # Lock order: claims before items before outcomes.
        await connection.execute(
            "SELECT 1 FROM claims WHERE run_id = ANY(%(runs)s) ORDER BY id FOR NO KEY UPDATE", runs_too
        )
        if cause.cause == "normal" and unselected:
            cursor = await connection.execute(BROKEN, {"runs": unselected})
            causes |= {run: RunEnd("catastrophic", code, error) for run, code, error in await cursor.fetchall()}
        if flow.units is not None:
            await units.keep_counts(connection, flow.units, [by_id[run_id] for run_id in words])
        await _settle(connection, flow, list(words), cause, sum(selected or 0 for _, selected in words.values()))
        crashpoint("in finalize")
        asked = {"on_request": cause.cause in ON_REQUEST, "cancelled": CANCELLED}
        cursor = await connection.execute(TALLY, runs_too | asked)
        for run_id, successful, failed, ignored, cancelled, seconds in await cursor.fetchall():
            tally = {"successful": successful, "failed": failed, "ignored": ignored, "cancelled": cancelled}
            ended.append(EndedRun(by_id[run_id], words[run_id][0], causes[run_id], tally, seconds))
        moves = [lifecycle.Move(one.run, one.from_word, one.state, one.facts, one.shown) for one in ended]
        to_words = await lifecycle.set_status(connection, flow, moves)
        if forced := [one.run.id for one in ended if one.cause.cause != "normal"]:
            await connection.execute(MARK_ABANDONED, (forced,))
        if record is not None:
            await record()
        for what, wanted in (("completed", True), ("failed", False)):
            if of_these := [one.run.id for one in ended if (one.cause.cause == "normal") is wanted]:
                await events.tell(connection, of_these, what)  # type: ignore[arg-type]
        if flow.ended is not None:
            await events.write(connection, await flow.ended(connection, [one.run for one in ended]))
    for one, to_word in zip(ended, to_words, strict=True):
        counters.runs_ended[flow.name, one.state] += 1
        facts = {
            "cause": cause_in_words(one.cause.cause),
            "code": one.cause.code,
            "reason": one.cause.reason,
            **one.tally,
        }
        one.run.trace.end(to_word, one.seconds, event_key=one.run.event_key, **facts)
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
    for statement in (*(() if all_good else (MAY_EXIST,)), CLOSE_WORK, leases.END_OF_RUNS):
        await connection.execute(statement, {"runs": run_ids})


class EndedRun(NamedTuple):
    run: Run
    from_word: str
    cause: RunEnd
    tally: dict[str, int]
    seconds: float

    @property
    def state(self) -> State:
        return ended_as(self.cause.cause, self.tally["successful"], self.tally["failed"])[0]

    @property
    def shown(self) -> State:
        return ended_as(self.cause.cause, self.tally["successful"], self.tally["failed"])[1]

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
