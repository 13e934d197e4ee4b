"""Queries about runs for API, pages, command line and metrics; all of them show the same figures of a run, because they
are computed here only.

The counts of a stage come from the counters of `claims`, not from counting items; only `vitals` counts waiting items. A
run of another tenant is not found, except by functions whose docstring says that the caller has checked the tenant.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any

from ecluse.base.errors import NotFound
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_all, fetch_one, fetch_value
from ecluse.engine.runs.items import COUNTS
from ecluse.engine.runs.waiters import IN_FLIGHT
from ecluse.insight.redrive_chains import redrives_of, standing

SOME = 5  # targets named with the reason for which they failed
WILL_FAIL = "will fail"  # standing of a target that has no outcome yet, but is known to fail

LIST = """
SELECT id, tenant_id, flow, event_key, parent_run_id, redrive_of, schedule_id, correlation_id, status, state, phase,
       selected, successful, failed, ignored, cancelled, reason, error_code, end_cause, ended_by, created_at,
       started_at, ended_at
FROM runs WHERE id IN (SELECT id FROM runs WHERE {where} ORDER BY id DESC LIMIT %(limit)s OFFSET %(offset)s)
ORDER BY id DESC
"""

# Most outcomes are settled at the end, in one commit: until then, the outcomes of the largest runs are not counted.
SHOW = """
SELECT r.*, CASE WHEN r.ended_at IS NOT NULL OR r.selected <= 5000 THEN (
    SELECT coalesce(jsonb_object_agg(code, n), '{}') FROM (
        SELECT coalesce(error_code, outcome, 'open') AS code, count(*) AS n FROM outcomes
        WHERE run_id = r.id GROUP BY 1) o)
    WHEN r.selected > 0 THEN jsonb_build_object('open', r.selected) ELSE '{}' END AS outcomes,
    r.error_details ->> 'selection_incomplete' AS selection_incomplete, p.*,
    CASE WHEN r.state = 'failed' AND r.reason IS NULL AND r.failed > 0 THEN (
        SELECT min(error_code) FROM outcomes WHERE run_id = r.id AND outcome = 'failed'
        HAVING min(error_code) = max(error_code) AND count(error_code) = count(*)) END AS common_code
FROM runs r CROSS JOIN LATERAL (
    SELECT trim_scale(round(sum(coalesce(cost, reserved)) FILTER (WHERE state <> 'reserved' AND priced), 6)) AS cost,
           trim_scale(round(sum(reserved) FILTER (WHERE state = 'reserved' AND priced), 6)) AS cost_reserved,
           trim_scale(round(sum(reserved) FILTER (WHERE state = 'unknown' AND priced), 6)) AS cost_unknown,
           (count(*) FILTER (WHERE NOT priced))::int AS unpriced_calls
    FROM paid_calls WHERE run_id = r.id OR root_run_id = r.id) p
WHERE r.id = %(run)s AND r.tenant_id = %(tenant)s
"""

# If the work of a stage is done by other runs, its calls in flight are those of the runs that this one waits for.
STAGES = f"""
WITH RECURSIVE {IN_FLIGHT}
SELECT s.run_id, s.stage, coalesce(s.units, s.expected) AS expected, c.done, c.failed, c.ignored, c.unfinished,
       c.in_flight, greatest(coalesce(s.units, s.expected) - c.done - c.failed - c.ignored - c.unfinished - c.in_flight,
                             0) AS waiting,
       s.round, s.started_at, s.fanned_out_at, s.progress_at, s.deadline_at, s.ended_at, s.end_cause
FROM stages s CROSS JOIN LATERAL {COUNTS} n CROSS JOIN LATERAL (
    SELECT CASE WHEN s.units IS NULL THEN n.unfinished
                WHEN s.end_cause = 'run ended' THEN s.units - s.progress - coalesce(s.units_failed, 0)
                ELSE 0 END AS unfinished) u CROSS JOIN LATERAL (
    SELECT CASE WHEN s.units IS NULL THEN n.succeeded ELSE s.progress END AS done,
           CASE WHEN s.units IS NULL THEN n.failed - n.unfinished WHEN s.ended_at IS NULL THEN 0
                ELSE s.units - s.progress - u.unfinished END AS failed,
           u.unfinished, n.ignored,
           CASE WHEN s.units IS NULL THEN n.in_flight WHEN s.ended_at IS NULL THEN (
               SELECT coalesce(sum(b.calls), 0) FROM busy b JOIN above a ON a.busy_run = b.run_id WHERE a.id = s.run_id)
               ELSE 0 END::int AS in_flight) c
WHERE s.run_id = ANY(%(runs)s) ORDER BY s.started_at, s.stage
"""  # noqa: S608 - our own names

LOG = """
SELECT id, at, level, run_log_message(message, count, targets) AS message, event_id, data, count, targets, last_at
FROM run_log WHERE run_id = %(run)s
ORDER BY id {order} LIMIT %(limit)s OFFSET %(offset)s
"""

# Reads what is open or waiting, each through an index that holds nothing else: finished rows cost nothing here.
VITALS = """
SELECT 'runs_open' AS what, ARRAY[flow, state] AS labels, count(*)::float8 AS value
FROM runs WHERE ended_at IS NULL GROUP BY flow, state
UNION ALL
SELECT 'items_waiting', ARRAY[l.name], coalesce(w.n, 0) FROM lanes l LEFT JOIN (
    SELECT lane_id, count(*) AS n FROM items WHERE claim_id IS NULL GROUP BY lane_id) w ON w.lane_id = l.id
UNION ALL
SELECT 'lane_held', ARRAY[name], (paused_at IS NOT NULL OR held_until > ecluse_now() IS TRUE)::int FROM lanes
UNION ALL
SELECT 'lane_down', ARRAY[name], (trips > 0)::int FROM lanes
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

# Open targets that are known to fail. Once the run has ended it has no open target, and the view is not read.
IS_OPEN = "(SELECT ended_at IS NULL FROM runs WHERE id = %(run)s)"
EXPECTED = f"SELECT target, error_code, error FROM expected_failures WHERE run_id = %(run)s AND {IS_OPEN}"  # noqa: S608
WILL_FAIL_WHY = "CASE WHEN e.target IS NOT NULL THEN jsonb_build_object('code', e.error_code, 'reason', e.error) END"
CODES = f"SELECT error_code, count(*)::int AS count FROM ({EXPECTED}) e GROUP BY 1 ORDER BY 2 DESC, 1"  # noqa: S608

# The page is read first, so that expected failures are read for its targets only.
OUTCOMES = f"""
WITH page AS MATERIALIZED (
    SELECT * FROM outcomes WHERE run_id = %(run)s {{where}} ORDER BY target LIMIT %(limit)s),
expected AS MATERIALIZED (
    {EXPECTED} AND target BETWEEN (SELECT min(target) FROM page) AND (SELECT max(target) FROM page))
SELECT o.target, o.outcome, o.error_code, o.reason, o.effect_may_exist, {WILL_FAIL_WHY} AS will_fail
FROM page o LEFT JOIN expected e ON e.target = o.target ORDER BY o.target
"""  # noqa: S608 - our own words

# All results on a run's page in one statement, so that expected failures are read once. The reason shown to people is
# the code, or else the text; a code comes with an example of its texts. While nothing is settled, no list is sorted.
RESULTS = f"""
WITH expected AS MATERIALIZED ({EXPECTED}),
known AS NOT MATERIALIZED (
    SELECT o.*, coalesce(o.outcome, CASE WHEN e.target IS NULL THEN 'open' ELSE '{WILL_FAIL}' END) AS standing,
           coalesce(o.error_code, o.reason, e.error_code) AS why, coalesce(o.reason, e.error) AS words,
           coalesce(o.error_code, e.error_code) AS code, {WILL_FAIL_WHY} AS will_fail
    FROM outcomes o LEFT JOIN expected e ON e.target = o.target WHERE o.run_id = %(run)s),
reasons AS MATERIALIZED (
    SELECT standing AS outcome, why, min(code) AS code, count(*) AS count,
           min(words) FILTER (WHERE code IS NOT NULL) AS example
    FROM known GROUP BY 1, 2 ORDER BY standing NOT IN ('failed', '{WILL_FAIL}'), 4 DESC, 1, 2 LIMIT %(reasons)s),
-- apart from the counts, so that only targets that fail are sorted
named AS MATERIALIZED (
    SELECT standing, why, array_agg(target ORDER BY target) AS targets FROM (
        SELECT standing, why, target, row_number() OVER (PARTITION BY standing, why ORDER BY target) AS place
        FROM known WHERE standing IN ('failed', '{WILL_FAIL}')) f
    WHERE place <= {SOME} GROUP BY 1, 2),
unsettled AS MATERIALIZED (
    SELECT {IS_OPEN} AND %(outcome)s::text IS NULL AND coalesce(bool_and(outcome = 'open'), false) AS it FROM reasons)
SELECT (SELECT count(*) FROM expected)::int AS will_fail, u.it AS unsettled,
       (SELECT coalesce(jsonb_agg(to_jsonb(r) || jsonb_build_object('some', coalesce(s.targets, '{{}}'))
                                  ORDER BY r.outcome NOT IN ('failed', '{WILL_FAIL}'), r.count DESC, r.outcome, r.why),
                        '[]')
        FROM reasons r LEFT JOIN named s ON s.standing = r.outcome AND s.why IS NOT DISTINCT FROM r.why) AS reasons,
       CASE WHEN u.it THEN '[]' ELSE (
           SELECT coalesce(jsonb_agg(p), '[]') FROM (
               SELECT target, outcome, error_code, reason, effect_may_exist, will_fail FROM known
               WHERE (%(outcome)s::text IS NULL OR %(outcome)s IN (coalesce(outcome, 'open'), standing))
                 AND (%(why)s::text IS NULL OR why = %(why)s)
               ORDER BY array_position(ARRAY['{WILL_FAIL}', 'failed', 'ignored', 'open', 'successful'], standing),
                        target LIMIT %(limit)s OFFSET %(offset)s) p) END AS outcomes
FROM unsettled u
"""  # noqa: S608 - our own words

SCHEDULES_OF_RUNS = """
SELECT id, name, deleted_at IS NOT NULL AS deleted FROM schedules WHERE tenant_id = %(tenant)s AND id = ANY(%(ids)s)
"""


async def list_runs(
    connection: Connection,
    *,
    tenant: str,
    flow: str | None = None,
    state: str | None = None,
    but: Collection[str] = (),
    top: bool = False,
    folded: bool = False,
    parent: int | None = None,
    schedule: int | None = None,
    target: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    ids: Collection[int] | None = None,
    limit: int,
    offset: int,
) -> list[Row]:
    """Return a page of runs, the newest first, that meet all the filters given. `state` is a neutral state or a flow's
    own status label, which does not find cancelled runs; flows in `but` are left out unless `flow` names one. `top`:
    only runs started by people or schedules, not by other runs; `folded`: without redrives, which belong to their run;
    `parent`: runs that this run started; `target`: runs that selected it; `since` and `until` compare the instant at
    which a run was created."""
    filters: dict[str, tuple[Any, str]] = {
        "tenant": (tenant, "tenant_id = %(tenant)s"),
        "flow": (flow, "flow = %(flow)s"),
        "state": (state, "(state = %(state)s OR (status = %(state)s AND state <> 'cancelled'))"),
        "but": (list(but) if but and flow is None else None, "flow <> ALL(%(but)s)"),
        "top": (top or None, "(parent_run_id IS NULL OR schedule_id IS NOT NULL)"),
        "folded": (folded or None, "redrive_of IS NULL"),
        "parent": (parent, "parent_run_id = %(parent)s"),
        "schedule": (schedule, "schedule_id = %(schedule)s"),
        "target": (target, "id IN (SELECT o.run_id FROM outcomes o WHERE o.target = %(target)s)"),
        "since": (since, "created_at >= %(since)s"),
        "until": (until, "created_at < %(until)s"),
        "ids": (None if ids is None else list(ids), "id = ANY(%(ids)s)"),
    }
    where = " AND ".join(text for value, text in filters.values() if value is not None)
    statement = LIST.format(where=where)
    given = {name: value for name, (value, _) in filters.items()}
    return await fetch_all(connection, dict, statement, {**given, "limit": limit, "offset": offset})


async def show_run(connection: Connection, tenant: str, run_id: int) -> Row:
    """Return the run as `run_itself` does, with `will_fail` added: the number of its open targets that are known to
    fail, in total and by code. Raise NotFound if the tenant has no such run."""
    run = await run_itself(connection, tenant, run_id)
    return {**run, "will_fail": await will_fail(connection, run_id)}


async def run_itself(connection: Connection, tenant: str, run_id: int) -> Row:
    """Return a run: its columns, `stages` (with counts of done, failed, in flight and waiting), `outcomes` (counts by
    error code, or by outcome where there is no code; all `open` while a run of over 5,000 targets is open), costs of
    its paid calls, `selection_incomplete` (which part of the selection is missing, as text), `redrives`, and
    `after_redrives` (counts of its targets by latest outcome). The `reason` of a failed run without its own names the
    code that all its failed targets share, if they do. Raise NotFound if the tenant has no such run."""
    run = await fetch_one(connection, dict, SHOW, {"run": run_id, "tenant": tenant})
    if run is None:
        raise _unknown(run_id)
    del run["ends_waited_for"], run["ending"]  # internal to the engine
    if (code := run.pop("common_code")) is not None:
        run["reason"] = failed_alike(run["failed"], run["selected"], code)
    run["stages"] = (await stages_of(connection, [run_id])).get(run_id, [])
    run["redrives"] = (await redrives_of(connection, [run_id])).get(run_id, [])
    run["after_redrives"] = (await standing(connection, [run_id] if run["redrives"] else [])).get(run_id)
    return run


def failed_alike(failed: int, selected: int, code: str) -> str:
    """Return, as a sentence, the reason of a failed run without a reason of its own whose failed targets all have this
    code."""
    if failed == selected:
        return f"the only target failed: {code}" if failed == 1 else f"all {failed:,} targets failed: {code}"
    return f"{failed:,} of {selected:,} targets failed{', each of them' if failed > 1 else ''}: {code}"


async def will_fail(connection: Connection, run_id: int) -> Row:
    """Count the open targets of the run that are known to fail, in total and by code. The caller has checked the
    tenant."""
    codes = {row["error_code"]: row["count"] for row in await fetch_all(connection, dict, CODES, {"run": run_id})}
    return {"count": sum(codes.values()), "codes": codes}


async def stages_of(connection: Connection, run_ids: Collection[int]) -> dict[int, list[Row]]:
    """Return the stages by run, in the order in which they began. The caller has checked the tenant."""
    found: dict[int, list[Row]] = {}
    for row in await fetch_all(connection, dict, STAGES, {"runs": list(run_ids)}) if run_ids else []:
        found.setdefault(row.pop("run_id"), []).append(row)
    return found


async def schedules_of(connection: Connection, tenant: str, ids: Collection[int]) -> dict[int, Row]:
    """Return id, name and `deleted` of the schedules with these ids that belong to the tenant, by id; deleted schedules
    are included. For lists of runs."""
    rows = await fetch_all(connection, dict, SCHEDULES_OF_RUNS, {"tenant": tenant, "ids": list(ids)}) if ids else []
    return {row["id"]: row for row in rows}


async def list_log(
    connection: Connection, tenant: str, run_id: int, *, newest_first: bool = False, limit: int, offset: int
) -> list[Row]:
    """Return a page of the run's log (`run_log`), the oldest line first unless `newest_first`. Raise NotFound if the
    tenant has no such run."""
    await check_tenant(connection, tenant, run_id)
    statement = LOG.format(order="DESC" if newest_first else "ASC")
    return await fetch_all(connection, dict, statement, {"run": run_id, "limit": limit, "offset": offset})


async def count_log(connection: Connection, run_id: int) -> int:
    """Return the number of lines of the run's log. The caller has checked the tenant."""
    return int(await fetch_value(connection, "SELECT count(*) FROM run_log WHERE run_id = %s", (run_id,)))


async def list_outcomes(
    connection: Connection, tenant: str, run_id: int, *, after: str | None = None, limit: int
) -> list[Row]:
    """Return a page of the outcomes of the run's targets, sorted by target. To read the next page, pass the last target
    as `after`. Raise NotFound if the tenant has no such run."""
    await check_tenant(connection, tenant, run_id)
    statement = OUTCOMES.format(where="" if after is None else "AND target > %(after)s")
    return await fetch_all(connection, dict, statement, {"run": run_id, "after": after, "limit": limit})


async def results(
    connection: Connection,
    run_id: int,
    *,
    outcome: str | None = None,
    why: str | None = None,
    reasons: int,
    limit: int,
    offset: int = 0,
) -> Row:
    """Return the results for the page of a run: `reasons` (counts of targets by outcome and reason, failures first,
    then by frequency, at most `reasons` of them; failures with their first targets), a page of `outcomes`, failed ones
    first, and `will_fail`, the number of open targets known to fail. The page is filtered by `outcome`, which may be
    `open`, or `will fail`, and by `why`, the code of a reason, or else its text. `unsettled`: nothing is known of any
    target yet. The caller has checked the tenant."""
    given = {"run": run_id, "outcome": outcome, "why": why, "reasons": reasons, "limit": limit, "offset": offset}
    (row,) = await fetch_all(connection, dict, RESULTS, given)
    return row


async def vitals(connection: Connection) -> list[Row]:
    """Return the gauges of the system, each as a row with `what`, `labels` and `value`. One statement, cheap enough to
    be run every few seconds."""
    return await fetch_all(connection, dict, VITALS, {})


async def check_tenant(connection: Connection, tenant: str, run_id: int) -> None:
    """Raise NotFound if the tenant has no such run."""
    if await fetch_value(connection, "SELECT tenant_id FROM runs WHERE id = %s", (run_id,)) != tenant:
        raise _unknown(run_id)


def _unknown(run_id: int) -> NotFound:
    return NotFound(f"There is no run {run_id}.")
