"""The one read side: what API, pages, command line and metrics say about runs is computed here and nowhere else.

Counts of work come from the counters of `claims`, never from counting items. `tenant` None is anybody's run, which only
the command line may ask for; a run of somebody else does not exist.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from psycopg.rows import dict_row

from ecluse.base.errors import NotFound
from ecluse.base.ids import item_event_id
from ecluse.db.connect import Connection

Row = dict[str, Any]

LIST = """
SELECT id, tenant_id, flow, event_key, parent_run_id, schedule_id, correlation_id, status, state, phase, selected,
       successful, failed, ignored, reason, error_code, end_cause, created_at, started_at, ended_at
FROM runs WHERE id IN (SELECT id FROM runs {where} ORDER BY id DESC LIMIT %(limit)s OFFSET %(offset)s) ORDER BY id DESC
"""

# Most outcomes are settled at the end, in one commit: until then, those of the largest runs are not counted.
SHOW = """
SELECT r.*, CASE WHEN r.ended_at IS NOT NULL OR r.selected <= 20000 THEN (
    SELECT coalesce(jsonb_object_agg(code, n), '{}') FROM (
        SELECT coalesce(error_code, outcome, 'open') AS code, count(*) AS n FROM outcomes
        WHERE run_id = r.id GROUP BY 1) o)
    WHEN r.selected > 0 THEN jsonb_build_object('open', r.selected) ELSE '{}' END AS outcomes
FROM runs r WHERE r.id = %(run)s AND (%(tenant)s::text IS NULL OR r.tenant_id = %(tenant)s)
"""

STAGES = """
SELECT s.run_id, s.stage, coalesce(s.units, s.expected) AS expected, c.done, c.failed, c.ignored, c.in_flight,
       greatest(coalesce(s.units, s.expected) - c.done - c.failed - c.ignored - c.in_flight, 0) AS waiting,
       s.round, s.started_at, s.fanned_out_at, s.progress_at, s.deadline_at, s.ended_at, s.end_cause
FROM stages s, LATERAL (
    SELECT coalesce(sum(succeeded), CASE WHEN s.units IS NOT NULL THEN s.progress END, 0)::int AS done,
           coalesce(sum(failed), CASE WHEN s.ended_at IS NOT NULL THEN s.units - s.progress END, 0)::int AS failed,
           coalesce(sum(ignored), 0)::int AS ignored, coalesce(sum(in_flight), 0)::int AS in_flight
    FROM claims WHERE run_id = s.run_id AND stage = s.stage) c
WHERE s.run_id = ANY(%(runs)s) ORDER BY s.started_at, s.stage
"""

# By (stage, key): the order of the index that finds them, so that any page costs what it shows.
ITEMS = """
SELECT i.id, i.flow, i.stage, i.key, i.target, l.name AS lane, i.status,
       i.status = 'open' AND i.claim_id IS NOT NULL AS in_flight, i.permanent, i.round, i.executions, i.crashes,
       i.error_code, i.error, i.result, i.due_at, i.finished_at
FROM items i JOIN lanes l ON l.id = i.lane_id
WHERE i.run_id = %(run)s {where} ORDER BY i.stage, i.key LIMIT %(limit)s OFFSET %(offset)s
"""

LOG = """
SELECT id, at, level, message, event_id, data FROM run_log WHERE run_id = %(run)s
ORDER BY id {order} LIMIT %(limit)s OFFSET %(offset)s
"""

TRACE = """
SELECT created_at, level, message, data, workflow, entity_type, entity_id, trace_id, inngest_event_id, function_id
FROM workflow_logs WHERE run_id = %(run)s ORDER BY created_at, id LIMIT %(limit)s OFFSET %(offset)s
"""

# Of what is open or waiting, each by an index that holds nothing else: what is finished costs nothing here.
VITALS = """
SELECT 'runs_open' AS what, ARRAY[flow, state] AS labels, count(*)::float8 AS value
FROM runs WHERE ended_at IS NULL GROUP BY flow, state
UNION ALL
SELECT 'items_waiting', ARRAY[l.name], coalesce(w.n, 0) FROM lanes l LEFT JOIN (
    SELECT lane_id, count(*) AS n FROM items WHERE claim_id IS NULL GROUP BY lane_id) w ON w.lane_id = l.id
UNION ALL
SELECT 'lane_held', ARRAY[name], (paused_at IS NOT NULL OR held_until > ecluse_now() IS TRUE)::int FROM lanes
UNION ALL
SELECT 'lane_in_flight', ARRAY[l.name], coalesce(c.n, 0) FROM lanes l LEFT JOIN (
    SELECT lane_id, sum(in_flight) AS n FROM claims WHERE in_flight > 0 GROUP BY lane_id) c ON c.lane_id = l.id
UNION ALL
SELECT 'outbox_unpublished', '{}', count(*) FROM events_outbox WHERE published_seq IS NULL
UNION ALL
SELECT 'outbox_oldest_seconds', '{}', coalesce((SELECT greatest(0, extract(epoch FROM ecluse_now() - occurred_at))
    FROM events_outbox WHERE published_seq IS NULL ORDER BY id LIMIT 1), 0)
UNION ALL
SELECT 'replicas', ARRAY[s.state], count(r.id) FROM unnest(ARRAY['live', 'dead', 'left']) AS s(state)
    LEFT JOIN replicas r ON r.state = s.state GROUP BY s.state
UNION ALL
SELECT 'schedules_overdue', '{}', count(*) FROM schedules
    WHERE next_due_at < (SELECT ecluse_now()) - interval '1 minute'
"""

OUTCOMES = """
SELECT target, outcome, error_code, reason, effect_may_exist FROM outcomes
WHERE run_id = %(run)s {where} ORDER BY {order} target LIMIT %(limit)s OFFSET %(offset)s
"""
WORST_FIRST = "array_position(ARRAY['failed', 'ignored', 'open', 'successful'], coalesce(outcome, 'open')),"

# What people call the reason: its code, or else its words. With an example of the words behind a code.
REASONS = """
SELECT coalesce(outcome, 'open') AS outcome, coalesce(error_code, reason) AS why, count(*) AS count,
       min(reason) FILTER (WHERE error_code IS NOT NULL) AS example
FROM outcomes WHERE run_id = %(run)s GROUP BY 1, 2 ORDER BY 3 DESC, 1, 2 LIMIT %(limit)s
"""

SCHEDULES_OF_RUNS = """
SELECT id, name, deleted_at IS NOT NULL AS deleted FROM schedules WHERE tenant_id = %(tenant)s AND id = ANY(%(ids)s)
"""


async def list_runs(
    connection: Connection,
    *,
    tenant: str | None,
    flow: str | None = None,
    state: str | None = None,
    but: Collection[str] = (),
    top: bool = False,
    parent: int | None = None,
    schedule: int | None = None,
    ids: Collection[int] | None = None,
    limit: int,
    offset: int,
) -> list[Row]:
    """The newest first. `state` is a neutral state or a flow's own word for it; flows in `but` are shown only to who
    asks for them by name. `top`: only what people or the clock started, not what other runs did."""
    filters = {
        "tenant": "tenant_id = %(tenant)s",
        "flow": "flow = %(flow)s",
        "state": "%(state)s IN (state, status)",
        "but": "flow <> ALL(%(but)s)",
        "top": "(parent_run_id IS NULL OR schedule_id IS NOT NULL)",
        "parent": "parent_run_id = %(parent)s",
        "schedule": "schedule_id = %(schedule)s",
        "ids": "id = ANY(%(ids)s)",
    }
    given: dict[str, Any] = {
        "tenant": tenant,
        "flow": flow,
        "state": state,
        "but": list(but) if but and flow is None else None,
        "top": top or None,
        "parent": parent,
        "schedule": schedule,
        "ids": None if ids is None else list(ids),
    }
    where = " AND ".join(text for name, text in filters.items() if given[name] is not None)
    return await _rows(
        connection,
        LIST.format(where=f"WHERE {where}" if where else ""),
        {**given, "limit": limit, "offset": offset},
    )


async def show_run(connection: Connection, tenant: str | None, run_id: int) -> Row:
    """The run's columns, `stages` (what each expects, has done and still waits for), `outcomes` (how many by reason,
    successes under their own name)."""
    rows = await _rows(connection, SHOW, {"run": run_id, "tenant": tenant})
    if not rows:
        raise _unknown(run_id)
    return {**rows[0], "stages": (await stages_of(connection, [run_id])).get(run_id, [])}


async def stages_of(connection: Connection, run_ids: Collection[int]) -> dict[int, list[Row]]:
    """By run, in the order in which they began. Whose runs these are was asked before."""
    found: dict[int, list[Row]] = {}
    for row in await _rows(connection, STAGES, {"runs": list(run_ids)}) if run_ids else []:
        found.setdefault(row.pop("run_id"), []).append(row)
    return found


async def schedules_of(connection: Connection, tenant: str, ids: Collection[int]) -> dict[int, Row]:
    """Their names, also of those that are deleted."""
    rows = await _rows(connection, SCHEDULES_OF_RUNS, {"tenant": tenant, "ids": list(ids)}) if ids else []
    return {row["id"]: row for row in rows}


async def list_items(
    connection: Connection,
    tenant: str | None,
    run_id: int,
    *,
    stage: str | None = None,
    status: str | None = None,
    limit: int,
    offset: int,
) -> list[Row]:
    await _allowed(connection, tenant, run_id)
    given: dict[str, Any] = {"stage": stage, "status": status}
    where = "".join(f" AND i.{name} = %({name})s" for name, value in given.items() if value is not None)
    rows = await _rows(
        connection, ITEMS.format(where=where), {**given, "run": run_id, "limit": limit, "offset": offset}
    )
    for row in rows:
        row["event_id"] = item_event_id(row.pop("flow"), run_id, row["stage"], row["key"], row["round"])
    return rows


async def list_log(
    connection: Connection, tenant: str | None, run_id: int, *, newest_first: bool = False, limit: int, offset: int
) -> list[Row]:
    """The run's own account."""
    await _allowed(connection, tenant, run_id)
    statement = LOG.format(order="DESC" if newest_first else "ASC")
    return await _rows(connection, statement, {"run": run_id, "limit": limit, "offset": offset})


async def list_trace(connection: Connection, tenant: str | None, run_id: int, *, limit: int, offset: int) -> list[Row]:
    """Its log lines, where WORKFLOW_LOG_DB_ENABLED keeps them."""
    await _allowed(connection, tenant, run_id)
    return await _rows(connection, TRACE, {"run": run_id, "limit": limit, "offset": offset})


async def list_outcomes(
    connection: Connection,
    tenant: str | None,
    run_id: int,
    *,
    after: str | None = None,
    outcome: str | None = None,
    why: str | None = None,
    worst_first: bool = False,
    limit: int,
    offset: int = 0,
) -> list[Row]:
    """What became of its targets, by target, or those that failed before all others. Whoever reads all of them asks for
    those `after` the last one seen, and holds no connection between the pages. `outcome` may be `open`; `why` is a
    reason's code, or else its words."""
    await _allowed(connection, tenant, run_id)
    filters = {
        "after": "target > %(after)s",
        "outcome": "coalesce(outcome, 'open') = %(outcome)s",
        "why": "coalesce(error_code, reason) = %(why)s",
    }
    given: dict[str, Any] = {"after": after, "outcome": outcome, "why": why}
    where = "".join(f" AND {text}" for name, text in filters.items() if given[name] is not None)
    statement = OUTCOMES.format(where=where, order=WORST_FIRST if worst_first else "")
    return await _rows(connection, statement, {**given, "run": run_id, "limit": limit, "offset": offset})


async def reasons(connection: Connection, tenant: str | None, run_id: int, *, limit: int) -> list[Row]:
    """How many of its targets came to what, and why; the most frequent first."""
    await _allowed(connection, tenant, run_id)
    return await _rows(connection, REASONS, {"run": run_id, "limit": limit})


async def vitals(connection: Connection) -> list[Row]:
    """How it goes, in figures: what, labels, value. One statement, cheap enough to be asked every few seconds."""
    return await _rows(connection, VITALS, {})


async def _allowed(connection: Connection, tenant: str | None, run_id: int) -> None:
    row = await (await connection.execute("SELECT tenant_id FROM runs WHERE id = %s", (run_id,))).fetchone()
    if row is None or tenant not in (None, row[0]):
        raise _unknown(run_id)


def _unknown(run_id: int) -> NotFound:
    return NotFound(f"there is no run {run_id}")


async def _rows(connection: Connection, statement: str, parameters: Mapping[str, Any]) -> list[Row]:
    async with connection.cursor(row_factory=dict_row) as cursor:
        await cursor.execute(statement, parameters)  # type: ignore[arg-type, unused-ignore]
        return await cursor.fetchall()
