"""The life of a run row: started once per event key, begun, selected (`finalize.py` ends it). `set_status` is the
only writer of a run's status, by compare-and-set on the word it had."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import psycopg
from psycopg.rows import class_row
from pydantic import ValidationError
from pydantic_core import to_json

from ecluse.base.errors import InvalidInput, NotFound
from ecluse.base.ids import retry_id
from ecluse.base.validation import readable
from ecluse.db.connect import Connection
from ecluse.engine.model.flow import Flow, Run
from ecluse.engine.model.states import State, cause_in_words
from ecluse.engine.outbox import events

RUNS_CHANNEL = "ecluse_runs"
ENDED_CHANNEL = "ecluse_ended"
# No slash: a workflow id is tenant/event key, and must say which is which.
TENANT = re.compile(r"[A-Za-z0-9._-]{1,100}")

# Runs before claims: the one lock order. Only where a `save` will change its run.
LOCK_RUNS = "SELECT 1 FROM runs WHERE id = ANY(%s) ORDER BY id FOR NO KEY UPDATE"


class RunEnded(Exception):
    """Somebody ended the run: its story is over, too."""


@dataclass(frozen=True)
class Started:
    run: Run
    deduplicated: bool  # the key was known: this is the run it started then, and nothing new was started


@dataclass(frozen=True)
class Start:
    """What it takes to start a run. The event key names the decision to run, so that taking it twice is harmless."""

    flow: Flow
    event_key: str
    tenant_id: str = "default"
    input: dict[str, Any] | None = None
    parent_run_id: int | None = None
    correlation_id: str | None = None
    schedule_id: int | None = None
    redrive_of: int | None = None  # the run whose targets it takes once more; its parent, too
    # A run that ended does not block its key: a deliberate repetition is a new run, under the key's next name.
    again: bool = False


# In one order for everybody: two callers with the same keys must not wait for each other in a circle.
INSERT = f"""
WITH r AS (
    INSERT INTO runs (tenant_id, flow, event_key, parent_run_id, orchestrated, status, state, input, correlation_id,
                      schedule_id, redrive_of, created_at)
    SELECT tenant, flow, key, parent, orchestrated, status, state, input, correlation, schedule, redrive, ecluse_now()
    FROM jsonb_to_recordset(%(rows)s::jsonb) AS n(tenant text, flow text, key text, parent bigint,
        orchestrated boolean, status text, state text, input jsonb, correlation text, schedule bigint, redrive bigint)
    ORDER BY tenant, key
    ON CONFLICT ON CONSTRAINT runs_event_key DO NOTHING RETURNING *),
{events.OF_RUNS}{events.WRITTEN_FIRST}
SELECT id, tenant_id, flow, event_key, input, correlation_id, schedule_id FROM r
"""  # noqa: S608 - our own names


KNOWN = """
SELECT r.ended_at IS NOT NULL, r.id, r.tenant_id, r.flow, r.event_key, r.input, r.correlation_id, r.schedule_id
FROM runs r JOIN unnest(%s::text[], %s::text[]) AS k(tenant, key) ON r.tenant_id = k.tenant AND r.event_key = k.key
"""


# The keys, then their names as `retry_id` makes them, for as long as their runs have ended.
REPETITIONS = """
WITH RECURSIVE ended AS (
    SELECT k.tenant, k.key, 0 AS times FROM unnest(%(tenants)s::text[], %(keys)s::text[]) AS k(tenant, key)
    JOIN runs r ON r.tenant_id = k.tenant AND r.event_key = k.key AND r.ended_at IS NOT NULL
    UNION ALL
    SELECT e.tenant, e.key, e.times + 1 FROM ended e CROSS JOIN LATERAL (
        SELECT FROM runs WHERE tenant_id = e.tenant AND event_key = e.key || '-retry-' || e.times + 1
        AND ended_at IS NOT NULL LIMIT 1) r)
SELECT tenant, key, count(*) FROM ended GROUP BY tenant, key
"""


async def insert(connection: Connection, start: Start) -> Started:
    return (await insert_many(connection, [start]))[0]


async def insert_many(connection: Connection, starts: Sequence[Start]) -> list[Started]:
    """In few statements and the caller's transaction, if there is one; one that is wrong fails them all. Runs of a flow
    without a story have their first stage opened here, too."""
    rows = {(start.tenant_id, start.event_key): _row(start) for start in starts}
    again = {(start.tenant_id, start.event_key) for start in starts if start.again}
    names = {key: key[1] for key in rows}
    found: dict[tuple[str, str], Started] = {}
    async with connection.transaction():
        while left := set(rows) - set(found):
            for key, times in (await _repetitions(connection, left & again)).items():
                names[key] = retry_id(key[1], times)
            by_name = {(key[0], names[key]): key for key in left}
            for started, ended in await _insert(connection, [{**rows[by_name[n]], "key": n[1]} for n in by_name]):
                key = by_name[started.run.tenant_id, started.run.event_key]
                if not (ended and key in again):
                    found[key] = started
        new = [(start.flow, found[key]) for key, start in {(s.tenant_id, s.event_key): s for s in starts}.items()]
        by_flow: dict[str, tuple[Flow, list[Run]]] = {}
        for flow, started in new:
            if flow.story is None and flow.begin is not None and not started.deduplicated:
                by_flow.setdefault(flow.name, (flow, []))[1].append(started.run)
        for flow, begun in by_flow.values():
            await _begin_items(connection, flow, begun)
    return [found[start.tenant_id, start.event_key] for start in starts]


async def _begin_items(connection: Connection, flow: Flow, begun: Sequence[Run]) -> None:
    """Those for which there is nothing to do end here, too: no item of theirs will ever be finished."""
    from ecluse.engine.runs import finalize  # which knows how runs begin

    await flow.begin(connection, begun)  # type: ignore[misc]
    if idle := await finalize.complete(connection, [run.id for run in begun]):
        await finalize.end_many(connection, flow, idle)


async def _repetitions(connection: Connection, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], int]:
    if not keys:
        return {}
    tenants, names = zip(*keys, strict=True)
    cursor = await connection.execute(REPETITIONS, {"tenants": list(tenants), "keys": list(names)})
    return {(tenant, key): times for tenant, key, times in await cursor.fetchall()}


async def _insert(connection: Connection, rows: Sequence[dict[str, Any]]) -> list[tuple[Started, bool]]:
    """The runs of these keys, new or known; and whether they have ended."""
    async with connection.cursor(row_factory=class_row(Run)) as cursor:
        try:
            await cursor.execute(INSERT, _rows(rows))
        except psycopg.DataError as error:
            raise InvalidInput(f"input of flow {rows[0]['flow']}: {error.diag.message_primary}") from error
        new = await cursor.fetchall()
    keys = {(row["tenant"], row["key"]) for row in rows} - {(run.tenant_id, run.event_key) for run in new}
    started = [(Started(run, deduplicated=False), False) for run in new]
    if keys:  # committed by somebody else, hence visible to this second statement
        known = await connection.execute(KNOWN, [list(column) for column in zip(*keys, strict=True)])
        started += [(Started(Run(*run), deduplicated=True), ended) for ended, *run in await known.fetchall()]
    return started


def _row(start: Start) -> dict[str, Any]:
    flow = start.flow
    if not 1 <= len(start.event_key) <= 500 or "\x00" in start.event_key:
        raise InvalidInput("the event key of a run is 1 to 500 characters without NUL")
    if not TENANT.fullmatch(start.tenant_id):
        raise InvalidInput(f"a tenant is 1 to 100 letters, digits, '.', '_' or '-', not {start.tenant_id!r}")
    return {
        "tenant": start.tenant_id,
        "flow": flow.name,
        "key": start.event_key,
        "parent": start.parent_run_id or start.redrive_of,
        "redrive": start.redrive_of,
        "orchestrated": flow.story is not None,
        "status": flow.words.initial,
        "state": flow.words.meaning[flow.words.initial],
        "input": valid_input(flow, start.input),
        "correlation": start.correlation_id,
        "schedule": start.schedule_id,
    }


def _rows(rows: Iterable[dict[str, Any]]) -> dict[str, str]:
    # Half a character is escaped here, and refused by the database like everything else that it cannot hold.
    return {"rows": json.dumps(list(rows)), "what": "started"}


def valid_input(flow: Flow, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """As the flow's own model reads it, defaults filled in."""
    try:
        return flow.input.model_validate(given or {}).model_dump(mode="json")
    except ValidationError as error:
        raise InvalidInput(f"input of flow {flow.name}: {readable(error)}") from error


async def announce(connection: Connection) -> None:
    """Somebody else leads: a server that hears this takes up the runs whose workflow has not been started."""
    await connection.execute("SELECT pg_notify(%s, '')", (RUNS_CHANNEL,))


async def load_many(connection: Connection, run_ids: Collection[int]) -> list[Run]:
    """Those there are, by id."""
    async with connection.cursor(row_factory=class_row(Run)) as cursor:
        await cursor.execute(
            "SELECT id, tenant_id, flow, event_key, input, correlation_id, schedule_id FROM runs"
            " WHERE id = ANY(%s) ORDER BY id",
            (list(run_ids),),
        )
        return await cursor.fetchall()


async def load(connection: Connection, run_id: int) -> Run:
    if not (found := await load_many(connection, [run_id])):
        raise NotFound(f"there is no run {run_id}")
    return found[0]


async def has_ended(connection: Connection, run_id: int) -> bool:
    row = await (await connection.execute("SELECT ended_at IS NOT NULL FROM runs WHERE id = %s", (run_id,))).fetchone()
    if row is None:
        raise NotFound(f"there is no run {run_id}")
    return bool(row[0])


async def keep_open(connection: Connection, run: Run) -> None:
    """For what a story starts outside its own items: nobody ends the run before the caller's transaction is over. One
    that has ended ends the story instead."""
    cursor = await connection.execute(
        "SELECT 1 FROM runs WHERE id = %s AND ended_at IS NULL FOR NO KEY UPDATE", (run.id,)
    )
    if await cursor.fetchone() is None:
        raise RunEnded


async def lock_open(connection: Connection, run_ids: Collection[int]) -> set[int]:
    """Those of them that are open, and stay so until the caller's transaction is over: for a caller that begins to wait
    for them."""
    cursor = await connection.execute(
        "SELECT id FROM runs WHERE id = ANY(%s) AND ended_at IS NULL ORDER BY id FOR SHARE", (list(run_ids),)
    )
    return {row[0] for row in await cursor.fetchall()}


async def begin(connection: Connection, flow: Flow, run: Run) -> bool:
    """Queued to running. False if it was running already (a replay); an ended run refuses."""
    async with connection.transaction():
        word = await lock(connection, run.id)
        if flow.words.meaning[word] is State.RUNNING:
            return False
        await set_status(connection, flow, [Move(run, word, State.RUNNING)])
    run.trace.start(f"run-{flow.name}", event_key=run.event_key, **flow.about(run))
    return True


async def begin_many(connection: Connection, flow: Flow, queued: Sequence[Run]) -> None:
    """Of runs that this transaction has inserted, hence nobody else has seen."""
    await set_status(connection, flow, [Move(run, flow.words.initial, State.RUNNING) for run in queued])
    for run in queued:
        run.trace.start(f"run-{flow.name}", event_key=run.event_key)


async def set_phase(connection: Connection, run: Run, phase: str) -> None:
    await connection.execute(
        "UPDATE runs SET phase = %s WHERE id = %s AND ended_at IS NULL AND phase IS DISTINCT FROM %s",
        (phase, run.id, phase),
    )


async def note_errors(connection: Connection, run: Run, details: Mapping[str, Any]) -> None:
    """What went wrong and did not end the run: kept beside whatever ends it."""
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
    """A run's status, from the word it had to the flow's word for a state; `shown` is that state where the run's own is
    another (`states.ended_as`). `facts` are columns set with it."""

    run: Run
    from_word: str
    state: State
    facts: Mapping[str, Any] = {}
    shown: State | None = None


FACTS = dict.fromkeys(("successful", "failed", "ignored"), "integer") | dict.fromkeys(
    ("end_cause", "ended_by", "reason", "error_code", "error_message"), "text"
)
# A run that has ended is in no phase; one that was ended by force says in which it was, and a sweep ends the runs that
# only it waited for.
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
    """Returns the flow's words for them."""
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
