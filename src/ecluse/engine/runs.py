"""The life of a run row: started once per event key, begun, selected (`ending.py` ends it). `set_status` is the
only writer of a run's status, by compare-and-set on the word it had."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import psycopg
from psycopg.rows import class_row
from pydantic import ValidationError
from pydantic_core import to_json

from ecluse.base.errors import InvalidInput, NotFound
from ecluse.base.ids import retry_id
from ecluse.base.text import LONGEST_KEY, storable
from ecluse.db.connect import Connection
from ecluse.engine import outbox, run_log
from ecluse.engine.flow import Flow, NewItem, Run
from ecluse.engine.states import State

RUNS_CHANNEL = "ecluse_runs"
ENDED_CHANNEL = "ecluse_ended"
# No slash: a workflow id is tenant/event key, and must say which is which.
TENANT = re.compile(r"[A-Za-z0-9._-]{1,100}")


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
    # A run that ended does not block its key: a deliberate repetition is a new run, under the key's next name.
    again: bool = False


# In one order for everybody: two callers with the same keys must not wait for each other in a circle.
INSERT = f"""
WITH r AS (
    INSERT INTO runs (tenant_id, flow, event_key, parent_run_id, orchestrated, status, state, input, correlation_id,
                      schedule_id, created_at)
    SELECT tenant, flow, key, parent, orchestrated, status, state, input, correlation, schedule, ecluse_now()
    FROM jsonb_to_recordset(%(rows)s::jsonb) AS n(tenant text, flow text, key text, parent bigint,
        orchestrated boolean, status text, state text, input jsonb, correlation text, schedule bigint)
    ORDER BY tenant, key
    ON CONFLICT ON CONSTRAINT runs_event_key DO NOTHING RETURNING *),
{outbox.OF_RUNS}
SELECT id, tenant_id, flow, event_key, input, correlation_id FROM r
"""  # noqa: S608 - our own names


KNOWN = """
SELECT r.id, r.tenant_id, r.flow, r.event_key, r.input, r.correlation_id FROM runs r
JOIN unnest(%s::text[], %s::text[]) AS k(tenant, key) ON r.tenant_id = k.tenant AND r.event_key = k.key
"""


# The key, then its names as `retry_id` makes them, for as long as their runs have ended.
REPETITIONS = """
WITH RECURSIVE ended AS (
    SELECT 0 AS times FROM runs WHERE tenant_id = %(tenant)s AND event_key = %(key)s AND ended_at IS NOT NULL
    UNION ALL
    SELECT e.times + 1 FROM ended e CROSS JOIN LATERAL (
        SELECT FROM runs WHERE tenant_id = %(tenant)s AND event_key = %(key)s || '-retry-' || e.times + 1
        AND ended_at IS NOT NULL LIMIT 1) r)
SELECT count(*) FROM ended
"""


async def insert(connection: Connection, start: Start) -> Started:
    row = _row(start)
    for times in itertools.count(await _repetitions(connection, row) if start.again else 0):
        started, ended = await _insert(connection, {**row, "key": retry_id(start.event_key, times)})
        if not (ended and start.again):
            break
    return started


async def _repetitions(connection: Connection, row: Mapping[str, Any]) -> int:
    found = await (await connection.execute(REPETITIONS, row)).fetchone()
    return found[0] if found else 0


async def insert_many(connection: Connection, starts: Sequence[Start]) -> list[Started]:
    """Each as `insert` would, in one statement, in the caller's transaction; one that is wrong fails them all."""
    async with connection.cursor(row_factory=class_row(Run)) as cursor:
        await cursor.execute(INSERT, _rows(map(_row, starts)))
        new = await cursor.fetchall()
        keys = {(start.tenant_id, start.event_key) for start in starts} - {
            (run.tenant_id, run.event_key) for run in new
        }
        known: list[Run] = []
        if keys:  # committed by somebody else, hence visible to this second statement
            await cursor.execute(KNOWN, [list(column) for column in zip(*keys, strict=True)])
            known = await cursor.fetchall()
    return [Started(run, deduplicated=False) for run in new] + [Started(run, deduplicated=True) for run in known]


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
        "parent": start.parent_run_id,
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
        raise InvalidInput(f"input of flow {flow.name}: {_readable(error)}") from error


async def _insert(connection: Connection, row: dict[str, Any]) -> tuple[Started, bool]:
    """The run of this key, new or known; and whether it has ended."""
    async with connection.cursor(row_factory=class_row(Run)) as cursor:
        try:
            await cursor.execute(INSERT, _rows([row]))
        except psycopg.DataError as error:
            raise InvalidInput(f"input of flow {row['flow']}: {error.diag.message_primary}") from error
        if (run := await cursor.fetchone()) is not None:
            return Started(run, deduplicated=False), False
    # Committed by somebody else, hence visible to this second statement.
    known = await connection.execute(
        "SELECT ended_at IS NOT NULL, id, tenant_id, flow, event_key, input, correlation_id FROM runs"
        " WHERE tenant_id = %(tenant)s AND event_key = %(key)s",
        row,
    )
    found = await known.fetchone()
    assert found is not None  # noqa: S101 - runs are never deleted while their key is in use
    return Started(Run(*found[1:]), deduplicated=True), bool(found[0])


async def announce(connection: Connection) -> None:
    """Somebody else leads: a server that hears this takes up the runs whose workflow has not been started."""
    await connection.execute("SELECT pg_notify(%s, '')", (RUNS_CHANNEL,))


async def load(connection: Connection, run_id: int) -> Run:
    async with connection.cursor(row_factory=class_row(Run)) as cursor:
        await cursor.execute(
            "SELECT id, tenant_id, flow, event_key, input, correlation_id FROM runs WHERE id = %s", (run_id,)
        )
        run = await cursor.fetchone()
    if run is None:
        raise NotFound(f"there is no run {run_id}")
    return run


async def has_ended(connection: Connection, run_id: int) -> bool:
    row = await (await connection.execute("SELECT ended_at IS NOT NULL FROM runs WHERE id = %s", (run_id,))).fetchone()
    if row is None:
        raise NotFound(f"there is no run {run_id}")
    return bool(row[0])


async def begin(connection: Connection, flow: Flow, run: Run) -> bool:
    """Queued to running. False if it was running already (a replay); an ended run refuses."""
    async with connection.transaction():
        word = await lock(connection, run.id)
        if flow.words.meaning[word] is State.RUNNING:
            return False
        await set_status(connection, flow, run, word, State.RUNNING)
    run.trace.start(f"run-{flow.name}", event_key=run.event_key)
    return True


async def set_phase(connection: Connection, run: Run, phase: str) -> None:
    await connection.execute(
        "UPDATE runs SET phase = %s WHERE id = %s AND ended_at IS NULL AND phase IS DISTINCT FROM %s",
        (phase, run.id, phase),
    )


async def select(connection: Connection, run: Run, targets: Sequence[NewItem]) -> int:
    """The targets this run answers for, each with an open outcome. Decided once: a replay keeps the first answer."""
    names = sorted({storable(item.target or item.key, LONGEST_KEY) for item in targets})
    async with connection.transaction():
        cursor = await connection.execute(
            "UPDATE runs SET selected = %s WHERE id = %s AND selected IS NULL AND ended_at IS NULL",
            (len(names), run.id),
        )
        if cursor.rowcount:
            await connection.execute(
                "INSERT INTO outcomes (run_id, target) SELECT %s, jsonb_array_elements_text(%s::jsonb)",
                (run.id, to_json(names).decode()),
            )
            await run_log.write(connection, run.id, f"selected {len(names)} targets", targets=len(names))
            await outbox.tell(connection, [run.id], "selected")
        row = await (await connection.execute("SELECT selected FROM runs WHERE id = %s", (run.id,))).fetchone()
    return row[0] if row else 0


async def open_targets(connection: Connection, run: Run) -> Sequence[NewItem]:
    """Every target without an outcome of which nothing has failed or is unfinished: what the next stage works on."""
    cursor = await connection.execute(
        "SELECT target FROM outcomes o WHERE run_id = %s AND outcome IS NULL AND NOT EXISTS (SELECT 1 FROM items i"
        " WHERE i.run_id = o.run_id AND i.target = o.target AND i.status <> 'succeeded') ORDER BY target",
        (run.id,),
    )
    return [NewItem(key=str(row[0])) for row in await cursor.fetchall()]


async def lock(connection: Connection, run_id: int) -> str:
    row = await (
        await connection.execute("SELECT status FROM runs WHERE id = %s FOR NO KEY UPDATE", (run_id,))
    ).fetchone()
    if row is None:
        raise NotFound(f"there is no run {run_id}")
    return str(row[0])


async def set_status(
    connection: Connection,
    flow: Flow,
    run: Run,
    from_word: str,
    state: State,
    *,
    ended: bool = False,
    **columns: Any,
) -> str:
    """Returns the flow's word for it."""
    to_word = flow.words.word(state, after=from_word)
    flow.words.check(from_word, to_word)
    sets = "".join(f", {name} = %({name})s" for name in columns)
    instant = "ended_at" if ended else "started_at"
    await connection.execute(
        f"UPDATE runs SET status = %(to)s, state = %(state)s, {instant} = ecluse_now(){sets}"  # noqa: S608 - our names
        " WHERE id = %(run)s AND status = %(from)s",
        {"to": to_word, "state": state, "run": run.id, "from": from_word, **columns},
    )
    if ended:
        await connection.execute("SELECT pg_notify(%s, %s)", (ENDED_CHANNEL, str(run.id)))
    level: Literal["info", "error"] = "error" if state is State.FAILED else "info"
    await run_log.write(connection, run.id, f"{from_word} -> {to_word}", level=level, **columns)
    return to_word


def _readable(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(str(part) for part in e['loc']) or 'input'}: {e['msg']}" for e in error.errors())
