"""Run rows: load, lock, begin, phase and status (`start.py` inserts them, `finalize.py` ends them). `set_status` is the
only writer of a run's status, by compare-and-set on the former status word."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from psycopg.rows import class_row
from pydantic_core import to_json

from ecluse.base.errors import NotFound
from ecluse.db.connect import Connection
from ecluse.engine.model.flow import Flow, Run
from ecluse.engine.model.states import State, cause_in_words

RUNS_CHANNEL = "ecluse_runs"  # a run with a story was started
CLOSING_CHANNEL = "ecluse_closing"  # a run without a story may be complete
ENDED_CHANNEL = "ecluse_ended"

# Lock order: runs before claims. A commit takes this lock only if a `save` in it will change its run.
LOCK_RUNS = "SELECT 1 FROM runs WHERE id = ANY(%s) ORDER BY id FOR NO KEY UPDATE"


class RunEnded(Exception):
    """The run was ended from outside: its story stops, too."""


async def load_runs(connection: Connection, run_ids: Collection[int]) -> list[Run]:
    """Return the runs that exist, ordered by id."""
    async with connection.cursor(row_factory=class_row(Run)) as cursor:
        await cursor.execute(
            "SELECT id, tenant_id, flow, event_key, input, correlation_id, schedule_id FROM runs"
            " WHERE id = ANY(%s) ORDER BY id",
            (list(run_ids),),
        )
        return await cursor.fetchall()


async def load_run(connection: Connection, run_id: int) -> Run:
    if not (found := await load_runs(connection, [run_id])):
        raise NotFound(f"there is no run {run_id}")
    return found[0]


async def has_ended(connection: Connection, run_id: int) -> bool:
    row = await (await connection.execute("SELECT ended_at IS NOT NULL FROM runs WHERE id = %s", (run_id,))).fetchone()
    if row is None:
        raise NotFound(f"there is no run {run_id}")
    return bool(row[0])


async def keep_open(connection: Connection, run: Run) -> None:
    """Lock the run, so that it cannot end before the caller's transaction does; raise RunEnded if it has ended. For
    work that a story starts outside its own items."""
    cursor = await connection.execute(
        "SELECT 1 FROM runs WHERE id = %s AND ended_at IS NULL FOR NO KEY UPDATE", (run.id,)
    )
    if await cursor.fetchone() is None:
        raise RunEnded


async def lock_open(connection: Connection, run_ids: Collection[int]) -> set[int]:
    """Lock and return the open runs of `run_ids`, which stay open until the caller's transaction ends. For a caller
    that begins to wait for them."""
    cursor = await connection.execute(
        "SELECT id FROM runs WHERE id = ANY(%s) AND ended_at IS NULL ORDER BY id FOR SHARE", (list(run_ids),)
    )
    return {row[0] for row in await cursor.fetchall()}


async def begin(connection: Connection, flow: Flow, run: Run) -> bool:
    """Move the run from queued to running. Return False if it was running already (a replay); raise if it has ended."""
    async with connection.transaction():
        word = await lock(connection, run.id)
        if flow.words.meaning[word] is State.RUNNING:
            return False
        await set_status(connection, flow, [Move(run, word, State.RUNNING)])
    run.trace.start(f"run-{flow.name}", event_key=run.event_key, **flow.about(run))
    return True


async def begin_runs(connection: Connection, flow: Flow, queued: Sequence[Run]) -> None:
    """Move runs inserted by the current transaction to running. No lock needed: they are not visible to others."""
    await set_status(connection, flow, [Move(run, flow.words.initial, State.RUNNING) for run in queued])
    for run in queued:
        run.trace.start(f"run-{flow.name}", event_key=run.event_key)


async def set_phase(connection: Connection, run: Run, phase: str) -> None:
    await connection.execute(
        "UPDATE runs SET phase = %s WHERE id = %s AND ended_at IS NULL AND phase IS DISTINCT FROM %s",
        (phase, run.id, phase),
    )


async def note_errors(connection: Connection, run: Run, details: Mapping[str, Any]) -> None:
    """Merge errors that did not end the run into its `error_details`; the end of the run keeps them."""
    await connection.execute(
        "UPDATE runs SET error_details = coalesce(error_details, '{}') || %s::jsonb WHERE id = %s",
        (to_json(details).decode(), run.id),
    )


async def lock(connection: Connection, run_id: int) -> str:
    row = await (
        await connection.execute("SELECT status FROM runs WHERE id = %s FOR NO KEY UPDATE", (run_id,))
    ).fetchone()
    if row is None:
        raise NotFound(f"there is no run {run_id}")
    return str(row[0])


class Move(NamedTuple):
    """A status change of a run, from `from_word` to the flow's word for `state`, or for `shown` where the flow shows
    another state than the run's own (`states.ended_as`). `facts` are columns set with it."""

    run: Run
    from_word: str
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
        AS m(run bigint, from_word text, to_word text, state text, ends boolean, level text, data jsonb,
             cancelled integer, {", ".join(f"{name} {kind}" for name, kind in FACTS.items())})),
moved AS (
    UPDATE runs r SET status = m.to_word, state = m.state,
        started_at = CASE WHEN m.ends THEN r.started_at ELSE ecluse_now() END,
        ended_at = CASE WHEN m.ends THEN ecluse_now() END, cancelled = coalesce(m.cancelled, 0),
        phase = CASE WHEN NOT m.ends THEN r.phase END,
        error_details = CASE WHEN r.phase IS NOT NULL AND m.end_cause <> 'normal'
            THEN coalesce(r.error_details, '{{}}') || jsonb_build_object('phase', r.phase) ELSE r.error_details END,
        ends_waited_for = coalesce(m.end_cause <> 'normal', false)
            AND EXISTS (SELECT 1 FROM run_waiters w WHERE w.waiter_run_id = r.id),
        {", ".join(f"{name} = m.{name}" for name in FACTS)}
    FROM m WHERE r.id = ANY(%(runs)s) AND r.id = m.run AND r.status = m.from_word RETURNING r.id),
noted AS (
    INSERT INTO run_log (run_id, at, level, message, data)
    SELECT run, ecluse_now(), level, from_word || ' -> ' || to_word, data FROM m ORDER BY run)
SELECT pg_notify('{ENDED_CHANNEL}', id::text) FROM moved JOIN m ON m.run = moved.id WHERE m.ends
"""  # noqa: S608 - our own names


def _noted(facts: Mapping[str, Any]) -> Mapping[str, Any] | None:
    if "end_cause" in facts:
        return {**facts, "end_cause": cause_in_words(facts["end_cause"])}
    return facts or None


async def set_status(connection: Connection, flow: Flow, moves: Sequence[Move]) -> list[str]:
    """Change the status of these runs, each only if it still has `from_word`; return the new status words."""
    words, rows = [], []
    for run, from_word, state, facts, shown in moves:
        to_word = flow.words.word(shown or state, after=from_word)
        flow.words.check(from_word, to_word)
        words.append(to_word)
        rows.append(
            {"run": run.id, "from_word": from_word, "to_word": to_word, "state": state}
            | {"ends": "end_cause" in facts, "level": "error" if state is State.FAILED else "info"}
            | {"data": _noted(facts), **facts}
        )
    runs = [move.run.id for move in moves]
    await connection.execute(SET_STATUS, {"runs": runs, "moves": to_json(rows).decode()})
    return words
