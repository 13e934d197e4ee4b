"""Starting runs: insert one row per event key, in the caller's transaction. Its commit wakes the workers that lead
runs; for runs of a flow without a story, the first stage is opened in the same transaction."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from pydantic import ValidationError

from ecluse.base.errors import Conflict, InvalidInput
from ecluse.base.ids import retry_id
from ecluse.base.validation import readable
from ecluse.db.connect import Connection
from ecluse.db.query import as_json, fetch_all, fetch_rows
from ecluse.engine.model.flow import Flow, Run
from ecluse.engine.outbox import events
from ecluse.engine.runs import finalize, lifecycle
from ecluse.engine.runs.lifecycle import RUNS_CHANNEL

# No slash: a workflow id is tenant/event key, and must be unambiguous.
TENANT = re.compile(r"[A-Za-z0-9._-]{1,100}")


@dataclass(frozen=True)
class Started:
    """The result of a start: the run, and whether it existed already."""

    run: Run
    deduplicated: bool  # the event key existed: `run` is the run of that key, and no new run was started


class KeyTaken(Conflict):
    """Raised if a run of another flow or schedule has the event key of a start, so that the start is not a
    repetition."""

    code = "KEY_TAKEN"

    def __init__(self, run: Run) -> None:
        whose = f"run {run.id} of flow {run.flow}" + (f" and schedule {run.schedule_id}" if run.schedule_id else "")
        super().__init__(f"The event key {run.event_key!r} is that of {whose}; nothing was started. Use another key.")


@dataclass(frozen=True)
class Start:
    """A request to start a run. `event_key` names the decision to run; a second start with the same key starts no
    second run."""

    flow: Flow
    event_key: str
    tenant_id: str = "default"
    input: dict[str, Any] | None = None
    parent_run_id: int | None = None
    correlation_id: str | None = None
    schedule_id: int | None = None
    redrive_of: int | None = None  # the run whose targets it repeats; also its parent
    # An ended run does not block its key: a deliberate repetition is a new run, under the key's next `retry_id`.
    again: bool = False


# Insert in one order: two callers with the same keys must not deadlock.
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
SELECT {lifecycle.RUN} FROM r
"""  # noqa: S608 - our own names


KNOWN = f"""
SELECT ended_at IS NOT NULL, {lifecycle.RUN}
FROM runs JOIN unnest(%s::text[], %s::text[]) AS k(tenant, key) ON tenant_id = k.tenant AND event_key = k.key
"""  # noqa: S608 - our own names


# Count the ended runs of each key: the key itself, then its `retry_id` names up to the first without an ended run.
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


async def start_run(connection: Connection, start: Start) -> Started:
    """Start one run, as described at `start_runs`, and return it. Raise InvalidInput or KeyTaken under the same
    conditions."""
    return (await start_runs(connection, [start]))[0]


async def start_runs(connection: Connection, starts: Sequence[Start]) -> list[Started]:
    """Start runs in few statements, in the caller's transaction if there is one, and return them in the order of
    `starts`; if an event key exists already, its run is returned instead. All starts fail if one input, key or tenant
    is invalid (InvalidInput), or if a run of another flow or schedule has one of the keys (KeyTaken). A worker takes
    the new runs that have a story when the transaction is committed (`lead/new_runs.py`)."""
    wanted = {(start.tenant_id, start.event_key): start for start in starts}
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
                    _check_same(started, wanted[key])
                    found[key] = started
        new: dict[str, tuple[Flow, list[Run]]] = {}
        for key, start in wanted.items():
            if not found[key].deduplicated:
                new.setdefault(start.flow.name, (start.flow, []))[1].append(found[key].run)
        for flow, runs in new.values():
            if flow.story is None and flow.begin is not None:
                await _begin_items(connection, flow, runs)
        if any(flow.story is not None for flow, _ in new.values()):
            await connection.execute("SELECT pg_notify(%s, '')", (RUNS_CHANNEL,))
    return [found[start.tenant_id, start.event_key] for start in starts]


def _check_same(started: Started, start: Start) -> None:
    """Raise KeyTaken if the start found a run of its key that is of another flow or schedule."""
    run = started.run
    if started.deduplicated and (run.flow, run.schedule_id) != (start.flow.name, start.schedule_id):
        raise KeyTaken(run)


async def _begin_items(connection: Connection, flow: Flow, begun: Sequence[Run]) -> None:
    """Begin runs of a flow without a story: open their first stage, and end the runs that have nothing to do, because
    no finished item would ever end them."""
    await lifecycle.begin_runs(connection, flow, begun)
    for run in begun:
        lifecycle.trace_begin(run, flow)
    await flow.begin(connection, begun)  # type: ignore[misc]
    if idle := await finalize.find_complete_runs(connection, [run.id for run in begun]):
        await finalize.end_runs(connection, flow, idle)


async def _repetitions(connection: Connection, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """Return the number of ended runs per (tenant, event key), repetitions of the key included; keys without an ended
    run are left out."""
    if not keys:
        return {}
    tenants, names = zip(*keys, strict=True)
    rows = await fetch_rows(connection, REPETITIONS, {"tenants": list(tenants), "keys": list(names)})
    return {(tenant, key): times for tenant, key, times in rows}


async def _insert(connection: Connection, rows: list[dict[str, Any]]) -> list[tuple[Started, bool]]:
    """Insert runs for these rows, or find the runs that have their event keys already; return each with whether it has
    ended. Raise InvalidInput if the database refuses the data."""
    given = {"rows": _as_json(rows), "what": "started"}
    try:
        new = await fetch_all(connection, Run, INSERT, given)
    except psycopg.DataError as error:
        raise InvalidInput(f"Input of flow {rows[0]['flow']}: {error.diag.message_primary}") from error
    keys = {(row["tenant"], row["key"]) for row in rows} - {(run.tenant_id, run.event_key) for run in new}
    started = [(Started(run, deduplicated=False), False) for run in new]
    if keys:  # committed by another transaction, hence visible to this second statement
        known = await fetch_rows(connection, KNOWN, [list(column) for column in zip(*keys, strict=True)])
        started += [(Started(Run(*run), deduplicated=True), ended) for ended, *run in known]
    return started


def _as_json(rows: list[dict[str, Any]]) -> str:
    try:
        return as_json(rows)
    except ValueError:
        # Nested too deeply for pydantic, or a lone surrogate: that is escaped here, and refused by the database like
        # everything else that it cannot store.
        return json.dumps(rows)


def _row(start: Start) -> dict[str, Any]:
    flow = start.flow
    if not 1 <= len(start.event_key) <= 500 or "\x00" in start.event_key:
        raise InvalidInput("event_key: must be 1 to 500 characters, without NUL")
    check_tenant_name(start.tenant_id)
    return {
        "tenant": start.tenant_id,
        "flow": flow.name,
        "key": start.event_key,
        "parent": start.parent_run_id or start.redrive_of,
        "redrive": start.redrive_of,
        "orchestrated": flow.story is not None,
        "status": flow.statuses.initial,
        "state": flow.statuses.meaning[flow.statuses.initial],
        "input": valid_input(flow, start.input),
        "correlation": start.correlation_id,
        "schedule": start.schedule_id,
    }


def check_tenant_name(tenant_id: str) -> None:
    """Raise InvalidInput if the text is not a valid name of a tenant."""
    if not TENANT.fullmatch(tenant_id):
        raise InvalidInput(f"tenant: must be 1 to 100 letters, digits, '.', '_' or '-', not {tenant_id!r}")


def valid_input(flow: Flow, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the input of a run as validated by the flow's model, with defaults filled in. Raise InvalidInput if it is
    invalid."""
    try:
        return flow.input.model_validate(given or {}).model_dump(mode="json")
    except ValidationError as error:
        raise InvalidInput(f"Input of flow {flow.name}: {readable(error)}") from error
