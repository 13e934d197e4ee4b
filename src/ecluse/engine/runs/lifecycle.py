"""Rows of runs: load, lock, begin, phase and status (`start.py` inserts them, `finalize.py` ends them). `set_status` is
the only writer of a run's status, by compare-and-set on the former status."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ecluse.base.errors import NotFound
from ecluse.db.connect import Connection
from ecluse.db.query import as_json, fetch_all, fetch_column, fetch_rows, fetch_value
from ecluse.engine.model.flow import Flow, Run
from ecluse.engine.model.states import State, cause_in_words

# The columns of a `Run`.
RUN = "id, tenant_id, flow, event_key, input, correlation_id, schedule_id"
LOAD = f"SELECT {RUN} FROM runs WHERE id = ANY(%s) ORDER BY id"  # noqa: S608 - our own names
RUNS_CHANNEL = "ecluse_runs"  # a run with a story was started
CLOSING_CHANNEL = "ecluse_closing"  # a run without a story may be complete
ENDED_CHANNEL = "ecluse_ended"

# The one lock order, in which no two transactions deadlock: runs, then claims, then items, then outcomes; rows of one
# table by id. A transaction that changes a run, or must not run beside its end, locks the run exclusively and first
# (`lock_runs`, `keep_open`); one that only needs the run to stay open shares the lock (`lock_open`) and changes no run
# after it. A commit locks runs only if a `save` in it will change them (`Stage.opens`).
LOCK_RUNS = "SELECT id, status, selected, ended_at IS NULL FROM runs WHERE id = ANY(%s) ORDER BY id FOR NO KEY UPDATE"
LOCK_OPEN = "SELECT id FROM runs WHERE id = ANY(%s) AND ended_at IS NULL ORDER BY id FOR SHARE"
LOCK_CLAIMS = """
SELECT 1 FROM claims WHERE run_id = ANY(%s) AND stage = coalesce(%s, stage) ORDER BY id FOR NO KEY UPDATE
"""


class RunEnded(Exception):
    """The run has ended (by an operator, say), so its story stops, too."""


async def load_runs(connection: Connection, run_ids: Collection[int]) -> list[Run]:
    """Return the runs with these ids, ordered by id; ids without a run are left out."""
    return await fetch_all(connection, Run, LOAD, (list(run_ids),))


async def load_run(connection: Connection, run_id: int) -> Run:
    """Return the run. Raise NotFound if it does not exist."""
    if not (found := await load_runs(connection, [run_id])):
        raise NotFound(f"There is no run {run_id}.")
    return found[0]


async def has_ended(connection: Connection, run_id: int) -> bool:
    """Return whether the run has ended. Raise NotFound if it does not exist."""
    ended = await fetch_value(connection, "SELECT ended_at IS NOT NULL FROM runs WHERE id = %s", (run_id,))
    if ended is None:
        raise NotFound(f"There is no run {run_id}.")
    return bool(ended)


class LockedRun(NamedTuple):
    """The columns of a run that `lock_runs` reads; `selected`: the number of its targets, None before they are
    selected."""

    status: str
    selected: int | None
    is_open: bool


async def lock_runs(connection: Connection, run_ids: Collection[int]) -> dict[int, LockedRun]:
    """Lock the runs until the end of the caller's transaction, which changes them or must not run beside their end.
    Return the state of each, by id; runs that do not exist are left out."""
    return {row[0]: LockedRun(*row[1:]) for row in await fetch_rows(connection, LOCK_RUNS, (list(run_ids),))}


async def keep_open(connection: Connection, run: Run) -> None:
    """Lock the run, so that it cannot end before the caller's transaction does. Raise RunEnded if it has ended. For
    work that a story starts outside its own items."""
    locked = (await lock_runs(connection, [run.id])).get(run.id)
    if locked is None or not locked.is_open:
        raise RunEnded


async def lock_open(connection: Connection, run_ids: Collection[int]) -> set[int]:
    """Lock the open runs among `run_ids`, which then stay open until the caller's transaction ends, and return their
    ids. Other such callers may hold the lock at the same time."""
    return set(await fetch_column(connection, LOCK_OPEN, (list(run_ids),)))


async def lock_claims(connection: Connection, run_ids: Collection[int], stage: str | None = None) -> None:
    """Lock the claims of a stage of these runs (None: of all stages). Needed before items in flight are changed."""
    await connection.execute(LOCK_CLAIMS, (list(run_ids), stage))


async def begin(connection: Connection, run: Run, flow: Flow) -> None:
    """Change the run's status from queued to running, unless it is running already, and write the first line of its
    trace. The replica that began a running run stopped before this step was stored, so the line may be missing. Raise
    ForbiddenTransition if the run has ended."""
    async with connection.transaction():
        status = (await lock_runs(connection, [run.id]))[run.id].status
        if flow.statuses.meaning[status] is not State.RUNNING:
            await set_status(connection, flow, [StatusChange(run, status, State.RUNNING)])
    trace_begin(run, flow)


def trace_begin(run: Run, flow: Flow) -> None:
    """Write the first line of the run's trace."""
    run.trace.start(f"run-{flow.name}", event_key=run.event_key, **flow.about(run))


async def begin_runs(connection: Connection, flow: Flow, queued: Sequence[Run]) -> None:
    """Change the status of runs of `flow` from queued to running. The current transaction has inserted or locked
    them."""
    await set_status(connection, flow, [StatusChange(run, flow.statuses.initial, State.RUNNING) for run in queued])


async def set_phase(connection: Connection, run: Run, phase: str) -> None:
    """Store the phase of an open run, which is shown to people; an ended run is left unchanged."""
    await connection.execute(
        "UPDATE runs SET phase = %s WHERE id = %s AND ended_at IS NULL AND phase IS DISTINCT FROM %s",
        (phase, run.id, phase),
    )


async def note_errors(connection: Connection, run: Run, details: Mapping[str, Any]) -> None:
    """Merge errors that did not end the run into its `error_details`, which stay there after its end."""
    await connection.execute(
        "UPDATE runs SET error_details = coalesce(error_details, '{}') || %s::jsonb WHERE id = %s",
        (as_json(details), run.id),
    )


class StatusChange(NamedTuple):
    """A status change of a run, from `from_status` to the flow's word for `state`; or for `shown`, where the flow shows
    another state than the run's own (`states.ended_as`). `facts`: further columns that are set with it; with
    `end_cause` among them, the run ends."""

    run: Run
    from_status: str
    state: State
    facts: Mapping[str, Any] = {}
    shown: State | None = None


FACTS = dict.fromkeys(("successful", "failed", "ignored"), "integer") | dict.fromkeys(
    ("end_cause", "ended_by", "reason", "error_code", "error_message"), "text"
)
# An ended run has no phase. A run ended by force keeps its phase in `error_details`, and with `ends_waited_for` set, a
# sweep ends the runs that only it waited for.
SET_STATUS = f"""
WITH m AS MATERIALIZED (
    SELECT * FROM jsonb_to_recordset(%(moves)s::jsonb)
        AS m(run bigint, from_status text, to_status text, state text, ends boolean, level text, data jsonb,
             cancelled integer, {", ".join(f"{name} {kind}" for name, kind in FACTS.items())})),
moved AS (
    UPDATE runs r SET status = m.to_status, state = m.state,
        started_at = CASE WHEN m.ends THEN r.started_at ELSE ecluse_now() END,
        ended_at = CASE WHEN m.ends THEN ecluse_now() END, cancelled = coalesce(m.cancelled, 0),
        phase = CASE WHEN NOT m.ends THEN r.phase END,
        error_details = CASE WHEN r.phase IS NOT NULL AND m.end_cause <> 'normal'
            THEN coalesce(r.error_details, '{{}}') || jsonb_build_object('phase', r.phase) ELSE r.error_details END,
        ends_waited_for = coalesce(m.end_cause <> 'normal', false)
            AND EXISTS (SELECT 1 FROM run_waiters w WHERE w.waiter_run_id = r.id),
        {", ".join(f"{name} = m.{name}" for name in FACTS)}
    FROM m WHERE r.id = ANY(%(runs)s) AND r.id = m.run AND r.status = m.from_status RETURNING r.id),
noted AS (
    INSERT INTO run_log (run_id, at, level, message, data)
    SELECT run, ecluse_now(), level, from_status || ' -> ' || to_status, data FROM m ORDER BY run)
SELECT pg_notify('{ENDED_CHANNEL}', id::text) FROM moved JOIN m ON m.run = moved.id WHERE m.ends
"""  # noqa: S608 - our own names


def _noted(facts: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the facts of a status change as they are written to the run's log; None if there are none."""
    if "end_cause" in facts:
        return {**facts, "end_cause": cause_in_words(facts["end_cause"])}
    return facts or None


async def set_status(connection: Connection, flow: Flow, moves: Sequence[StatusChange]) -> list[str]:
    """Change the status of these runs of `flow`, each only if it still has its `from_status`, and log it; return the
    new statuses in the same order. Raise ForbiddenTransition if the flow does not allow a change. The caller has locked
    or inserted the runs, so that no status changes in between."""
    statuses, rows = [], []
    for run, from_status, state, facts, shown in moves:
        to_status = flow.statuses.status(shown or state, after=from_status)
        flow.statuses.check(from_status, to_status)
        statuses.append(to_status)
        rows.append(
            {"run": run.id, "from_status": from_status, "to_status": to_status, "state": state}
            | {"ends": "end_cause" in facts, "level": "error" if state is State.FAILED else "info"}
            | {"data": _noted(facts), **facts}
        )
    runs = [move.run.id for move in moves]
    await connection.execute(SET_STATUS, {"runs": runs, "moves": as_json(rows)})
    return statuses
