"""The end of runs, in one transaction: settle and count the targets (`outcomes.py`), close open work, set the status,
write the events. Ending a run again changes nothing; a constraint trigger of the database counts the outcomes again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, NamedTuple

from ecluse.base.crash import crashpoint
from ecluse.base.text import storable
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_all, fetch_rows
from ecluse.engine.model import counters
from ecluse.engine.model.flow import Flow, Run
from ecluse.engine.model.states import NORMAL, RunEnd, State, cause_in_words, ended_as
from ecluse.engine.outbox import events
from ecluse.engine.runs import items, leases, lifecycle, outcomes, units
from ecluse.engine.runs.waiters import MARK_ABANDONED

# No result of an ended run is stored any more: the fences of its claims are incremented.
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
ALL_COMPLETE = f"""
SELECT {lifecycle.RUN} FROM runs r
WHERE r.id = ANY(%s) AND r.ended_at IS NULL AND EXISTS (SELECT 1 FROM stages s WHERE s.run_id = r.id) AND NOT EXISTS (
    SELECT 1 FROM stages s CROSS JOIN LATERAL {items.COUNTS} n WHERE s.run_id = r.id AND NOT {items.COMPLETE})
ORDER BY r.id
"""  # noqa: S608 - our own names


async def find_complete_runs(connection: Connection, run_ids: Collection[int]) -> list[Run]:
    """Return the open runs among `run_ids` that have a stage, and whose stages are all complete. For runs without a
    story, which no workflow ends."""
    return await fetch_all(connection, Run, ALL_COMPLETE, (list(run_ids),))


async def end_runs(
    connection: Connection,
    flow: Flow,
    ending: Sequence[Run],
    end: RunEnd = NORMAL,
    record: Callable[[], Awaitable[None]] | None = None,
) -> int:
    """End the runs among `ending` that are still open, for the reason `end`: settle their targets, close their work and
    set their status, in one transaction; `record` is called in it. Return the number of runs ended. All of them must be
    runs of `flow`. A run that never selected targets and has a failed item ends as failed, even if `end` is a normal
    end."""
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
        ends = dict.fromkeys(found, end)
        unselected = [run_id for run_id, locked in found.items() if locked.selected is None]
        if unselected:
            await connection.execute("UPDATE runs SET selected = 0 WHERE id = ANY(%s)", (unselected,))
        await lifecycle.lock_claims(connection, found)
        if end.cause == "normal" and unselected:
            broken = await fetch_rows(connection, BROKEN, {"runs": unselected})
            ends |= {run_id: RunEnd("catastrophic", code, error) for run_id, code, error in broken}
        if flow.units is not None:
            await units.keep_counts(connection, flow.units, [by_id[run_id] for run_id in found])
        selected = sum(locked.selected or 0 for locked in found.values())
        await outcomes.settle_outcomes(connection, flow, found, end, selected)
        await items.fail_waiting(connection, found, None, "RUN_ENDED", "The run ended first", by="end of run")
        for statement in (CLOSE_WORK, leases.END_OF_RUNS):
            await connection.execute(statement, {"runs": list(found)})
        crashpoint("in finalize")
        for run_id, counts, seconds in await outcomes.tally(connection, found, end):
            as_what = ended_as(ends[run_id].cause, counts["successful"], counts["failed"])
            ended.append(EndedRun(by_id[run_id], found[run_id].status, ends[run_id], counts, seconds, *as_what))
        moves = [lifecycle.StatusChange(one.run, one.from_status, one.state, one.facts, one.shown) for one in ended]
        to_statuses = await lifecycle.set_status(connection, flow, moves)
        if forced := [one.run.id for one in ended if one.end.cause != "normal"]:
            await connection.execute(MARK_ABANDONED, (forced,))
        if record is not None:
            await record()
        for what, wanted in (("completed", True), ("failed", False)):
            if of_these := [one.run.id for one in ended if (one.end.cause == "normal") is wanted]:
                await events.write_run_events(connection, of_these, what)  # type: ignore[arg-type]
        if flow.ended is not None:
            await events.write(connection, await flow.ended(connection, [one.run for one in ended]))
    for one, to_status in zip(ended, to_statuses, strict=True):
        counters.runs_ended[flow.name, one.state] += 1
        facts = {
            "cause": cause_in_words(one.end.cause),
            "code": one.end.code,
            "reason": one.end.reason,
            **one.tally,
        }
        one.run.trace.end(to_status, one.seconds, event_key=one.run.event_key, **facts)
    return len(ended)


class EndedRun(NamedTuple):
    """A run whose targets are settled, before its status is set. `tally`: its counts (see `outcomes.tally`); `seconds`:
    how long it ran; `shown`: the state for which its status word is chosen (`states.ended_as`)."""

    run: Run
    from_status: str
    end: RunEnd
    tally: dict[str, int]
    seconds: float
    state: State
    shown: State

    @property
    def facts(self) -> dict[str, Any]:
        """The columns of the run that are set together with its status."""
        cause, code, reason = self.end.cause, self.end.code, self.end.reason
        why = reason
        if cause == "normal" and self.tally["successful"] + self.tally["failed"] == 0:
            why = "all_ignored" if self.tally["ignored"] else "no_targets"
        return self.tally | {
            "end_cause": cause,
            "ended_by": None if self.end.by is None else storable(self.end.by),
            "reason": None if why is None else storable(why),
            "error_code": code,
            "error_message": None if cause == "normal" or reason is None else storable(reason),
        }
