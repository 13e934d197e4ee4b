"""Executions of rule runs: each preview, round of an apply, rollback and reconciliation is an engine run that is linked
to its rule run. Here are their start, their items, and what becomes of the targets when an execution of an item, or the
whole engine run, has ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from ecluse.db.connect import Connection
from ecluse.db.query import as_json, fetch_all, fetch_rows, fetch_value
from ecluse.engine import Event, Flow, ItemEnd, Lane, NewItem, Run, Start, give_up, start_run, write_events
from ecluse.flows.connections import projects
from ecluse.flows.pricing import runs, states
from ecluse.flows.pricing.rules import MAX_RETRIES, generate_event_key, rollback_event_key
from ecluse.flows.pricing.runs import NewRun
from ecluse.flows.pricing.states import WORKER, By, Move, move_runs, move_targets
from ecluse.vendors.shops import CRITICAL

APPLY_STAGES = ("canary", "apply")
TIMED_OUT = "TARGET_TIMEOUT"
LINK = "INSERT INTO rule_executions (run_id, rule_run_id, kind, number) VALUES (%s, %s, %s, %s)"
NUMBER = "SELECT coalesce(max(number) + 1, 0) FROM rule_executions WHERE rule_run_id = %s AND kind = %s"
OF_RUN = "SELECT rule_run_id FROM rule_executions WHERE run_id = %s"
ITEMS = """
SELECT t.id, t.variant_id AS variant, t.product_id AS product, t.before_amount AS before, t.after_amount AS after,
       t.round, t.rule_run_id AS rule_run, t.project_id AS project, x.number, %(forced)s::boolean AS forced
FROM rule_executions x JOIN rule_target_list t ON t.rule_run_id = x.rule_run_id
WHERE x.run_id = %(execution)s AND t.status = %(status)s AND (%(target_ids)s::bigint[] IS NULL
    OR t.id = ANY(%(target_ids)s)) ORDER BY t.id LIMIT %(limit)s
"""
# Set once per round; a later failure returns the reason again. The share of failures counts those of this execution.
STOP = """
UPDATE rule_runs r SET stopped_reason = coalesce(r.stopped_reason, k.critical,
    format('more than %%s of %%s targets failed', round((r.max_failure_rate * e.selected)::numeric, 2), e.selected))
FROM jsonb_to_recordset(%s::jsonb) AS k(run bigint, critical text)
JOIN rule_executions x ON x.run_id = k.run JOIN runs e ON e.id = k.run
WHERE r.id = x.rule_run_id AND (r.stopped_reason IS NOT NULL OR k.critical IS NOT NULL OR r.max_failure_rate < (
    SELECT count(*) FROM items i WHERE i.run_id = k.run AND i.status = 'failed') / e.selected::double precision)
RETURNING k.run, r.stopped_reason
"""
JUDGE_CANARY = """
UPDATE rule_runs r
SET stopped_reason = coalesce(r.stopped_reason, format('%%s of the first %%s targets failed', n.failed, n.total))
FROM (SELECT count(*) FILTER (WHERE status = 'failed') AS failed, count(*) AS total FROM items
      WHERE run_id = %s AND stage = 'canary') AS n
WHERE r.id = %s AND (r.stopped_reason IS NOT NULL OR n.failed > coalesce(r.max_failure_rate, 0) * n.total)
RETURNING r.id
"""
# What an ended execution leaves behind. A call that was in flight may have been applied.
LEFT = f"""
SELECT t.id,
    CASE WHEN e.id IS NOT NULL THEN 'OUTCOME_UNKNOWN' WHEN i.error_code = '{TIMED_OUT}' THEN i.error_code
         ELSE coalesce(t.error_code, '{states.NOT_ATTEMPTED}') END,
    CASE WHEN e.id IS NOT NULL THEN 'The execution ended during a call: the shop may have applied it'
         WHEN i.error_code = '{TIMED_OUT}' THEN i.error
         ELSE coalesce(t.error, 'Not sent: ' || coalesce(r.stopped_reason, 'the execution ended before')) END
FROM rule_executions x JOIN rule_runs r ON r.id = x.rule_run_id
JOIN rule_targets t ON t.rule_run_id = x.rule_run_id AND t.status = 'QUEUED'
LEFT JOIN items i ON i.run_id = x.run_id AND i.stage = ANY(%(stages)s) AND i.key = t.id::text
LEFT JOIN effects e ON e.run_id = x.run_id AND e.item_id = i.id AND e.state IN ('sending', 'unknown', 'applied')
WHERE x.run_id = ANY(%(runs)s) AND x.kind = 'apply'
"""  # noqa: S608 - our own names
ENDED = """
SELECT r.id, x.kind, r.status FROM rule_executions x JOIN rule_runs r ON r.id = x.rule_run_id
WHERE x.run_id = ANY(%s) AND x.kind IN ('apply', 'rollback') ORDER BY r.id FOR NO KEY UPDATE OF r
"""
# Why targets of an ended rollback do not have their former prices again; NULL if they have.
NOT_ROLLED_BACK = """
UPDATE rule_targets t SET
    rollback_error_code = CASE WHEN e.id IS NOT NULL THEN 'OUTCOME_UNKNOWN'
                               WHEN t.status = 'APPLIED' THEN i.error_code END,
    rollback_error = CASE WHEN e.id IS NOT NULL THEN 'The rollback ended during a call: the shop may have applied it'
                          WHEN t.status = 'APPLIED' THEN i.error END
FROM rule_executions x JOIN items i ON i.run_id = x.run_id AND i.stage = 'rollback'
LEFT JOIN effects e ON e.run_id = x.run_id AND e.item_id = i.id AND e.state IN ('sending', 'unknown')
WHERE x.run_id = ANY(%s) AND t.id = i.key::bigint
"""
# A preview that has ended without a plan stays a preview: only the reason says that nothing more comes of it.
PREVIEWED = """
WITH pages AS (
    DELETE FROM rule_pages p USING rule_executions x WHERE x.run_id = ANY(%(runs)s) AND p.rule_run_id = x.rule_run_id)
UPDATE rule_runs r SET stopped_reason = format('the preview failed (%%s): preview the rule again with `ecluse pricing'
    ' runs preview %%s`', coalesce(e.error_message, e.reason, e.error_code, 'it ended before'), r.rule_id)
FROM rule_executions x JOIN runs e ON e.id = x.run_id
WHERE x.run_id = ANY(%(runs)s) AND x.kind = 'preview' AND r.id = x.rule_run_id AND r.plan_hash IS NULL
"""
OVERDUE = """
SELECT x.run_id, array_agg(t.id::text) FROM rule_runs r
JOIN rule_executions x ON x.rule_run_id = r.id AND x.kind = 'apply' AND x.number = r.round
JOIN rule_targets t ON t.rule_run_id = r.id AND t.status = 'QUEUED' AND t.begun_at < ecluse_now() - %s
WHERE r.status = 'APPLYING' GROUP BY x.run_id
"""


async def start(
    connection: Connection, flow: Flow, tenant: str, run: int, kind: str, by: By, *, within: int = 0, **given: Any
) -> int:
    """Start an execution of a rule run, whose row the caller has locked; return the id of the engine run. Raise
    Conflict while another one is open, but for the caller's own (`within`) and reconciliations, which change
    nothing."""
    if kind != "reconcile":
        await runs.require_idle(connection, run, within)
    number = await fetch_value(connection, NUMBER, (run, kind))
    wanted = {"kind": kind, "rule_run_id": str(run), **given}
    key = f"pricing:{run}:{kind}:{number}"
    made = await start_run(connection, Start(flow, key, tenant, wanted, correlation_id=by.correlation_id))
    await connection.execute(LINK, (made.run.id, run, kind, number))
    return made.run.id


async def new_preview(connection: Connection, tenant: str, rule: int, by: By) -> int:
    """Create a rule run of a rule, without a plan yet; return its id."""
    found = await runs.RULES.show(connection, tenant, rule)
    project = await projects.show(connection, tenant, found["project_id"])
    terms = {one: found[one] for one in runs.TERMS}
    return await runs.create_rule_run(connection, NewRun(tenant, project["id"], project["currency"], rule, terms), by)


async def opened(connection: Connection, run: Run) -> int:
    """Return the rule run of an engine run: that of a schedule is created here, once."""
    async with connection.transaction():
        if (known := await fetch_value(connection, OF_RUN, (run.id,))) is not None:
            return int(known)
        by = By(states.SCHEDULER.actor, states.SCHEDULER.source, run.correlation_id or run.event_key)
        created = await new_preview(connection, run.tenant_id, int(run.input["rule_id"]), by)
        await connection.execute(LINK, (run.id, created, "preview", 0))
        return created


async def begin_apply(connection: Connection, execution: Run, run: int) -> int | None:
    """Have the worker take a queued run; return how many targets are to be applied first. A retry has begun already."""
    async with connection.transaction():
        found = await runs.require_run(connection, execution.tenant_id, run, lock=True)
        if found["status"] == states.QUEUED:
            await move_runs(connection, {run: states.APPLYING}, WORKER)
    canary: int | None = found["canary"]
    return canary


async def may_go_on(connection: Connection, execution: Run, run: int) -> bool:
    """Judge the canary of an apply; return whether the other targets are applied as well."""
    return await fetch_value(connection, JUDGE_CANARY, (execution.id, run)) is None


async def project_of(connection: Connection, _: Run, run: int) -> int:
    return int(await fetch_value(connection, "SELECT project_id FROM rule_runs WHERE id = %s", (run,)))


async def targets(
    lane: Callable[[str, int], Lane], status: str, connection: Connection, run: Run, *, limit: int | None = None
) -> Sequence[NewItem]:
    """Return the items of an execution: the targets of its rule run in this status, or those that its input names;
    `limit`: the first ones only."""
    given = {**run.input, "execution": run.id, "status": status, "limit": limit}
    return [
        NewItem(str(row.pop("id")), row["variant"], row, row["product"], lane(run.tenant_id, row["project"]))
        for row in await fetch_all(connection, dict, ITEMS, given)
    ]


async def applied(connection: Connection, ends: Sequence[ItemEnd]) -> None:
    """Move the targets of executions that have ended; if a run is to be stopped, give up what waits of it. Used as
    `on_end` of the apply stages."""
    following = {"succeeded": states.APPLIED, "failed": states.FAILED, "ignored": states.FAILED, "open": states.QUEUED}
    await move_targets(connection, [_move(one, following[one.status]) for one in ends], WORKER)
    await write_events(connection, [_event(one, following[one.status]) for one in ends])
    reasons = {one.item.run_id: _critical(one) for one in sorted(ends, key=lambda one: bool(_critical(one)))}
    if any(one.status != "succeeded" for one in ends):
        rows = [{"run": run, "critical": why} for run, why in sorted(reasons.items())]
        for run, why in await fetch_rows(connection, STOP, (as_json(rows),)):
            for stage in APPLY_STAGES:
                await give_up(connection, [run], stage, states.NOT_ATTEMPTED, f"Not sent: {why}")


def _move(end: ItemEnd, status: str) -> Move:
    # An item whose last send is in doubt is open once more than it has retries: to read back, and not to send again.
    attempts = min(end.executions, MAX_RETRIES) if status == states.QUEUED else None
    return Move(int(end.item.key), (states.APPLYING, status), end.error_code, end.error, end.retry_at, attempts)


def _critical(one: ItemEnd) -> str | None:
    return f"{one.error_code}: {one.error}" if one.error_code in CRITICAL else None


def _event(one: ItemEnd, status: str) -> Event:
    item, run = one.item, one.item.payload["rule_run"]
    name, key = "apply", generate_event_key(run, int(item.key), item.executions, round=item.payload["round"])
    if item.stage == "rollback":
        name, key = "rollback", rollback_event_key(run, int(item.key), item.payload["number"])
    payload = {"targetId": item.key, "runId": str(run), "status": status, "attempts": item.executions}
    payload |= {} if one.error_code is None else {"error_code": one.error_code, "error": one.error}
    about, correlation_id = f"rule_run:{run}", item.correlation_id or item.event_key
    return Event(item.tenant_id, key, f"automation.target.{name}", about, payload, correlation_id)


async def rolled_back(connection: Connection, ends: Sequence[ItemEnd]) -> None:
    """Move the targets whose former price is restored; if the shop refuses everything, give up what waits. `on_end` of
    the rollback stage."""
    done = [one for one in ends if one.status == "succeeded"]
    await move_targets(connection, [Move(int(one.item.key), (states.ROLLED_BACK,)) for one in done], WORKER)
    await write_events(connection, [_event(one, states.ROLLED_BACK) for one in done])
    for run, why in sorted({one.item.run_id: why for one in ends if (why := _critical(one))}.items()):
        await give_up(connection, [run], "rollback", states.NOT_ATTEMPTED, f"Not sent: {why}")


async def ended(connection: Connection, execution_ids: Sequence[int]) -> Sequence[int]:
    """Settle the rule runs of ended executions, however they ended: what was left of an apply has failed, and statuses
    follow the counts. Return the runs whose apply or rollback has ended."""
    ids = list(execution_ids)
    over = await fetch_all(connection, dict, ENDED, (ids,))
    left = await fetch_rows(connection, LEFT, {"runs": ids, "stages": list(APPLY_STAGES)})
    await move_runs(connection, {one["id"]: states.APPLYING for one in over if one["status"] == states.QUEUED}, WORKER)
    await move_targets(connection, [Move(one, (states.APPLYING, states.FAILED), *why) for one, *why in left], WORKER)
    await connection.execute(NOT_ROLLED_BACK, (ids,))
    for one in over:
        counts: Mapping[str, int] = dict(await fetch_rows(connection, states.COUNTS, (one["id"],)))
        if one["kind"] == "apply":
            await move_runs(connection, {one["id"]: states.status_by_counts(counts)}, WORKER)
        elif one["status"] in (states.APPLIED, states.PARTIAL) and not counts.get(states.APPLIED):
            await move_runs(connection, {one["id"]: states.ROLLED_BACK}, WORKER)
    await connection.execute(PREVIEWED, {"runs": ids})
    return [one["id"] for one in over]


async def give_up_overdue(connection: Connection, after: timedelta) -> None:
    """Give up the waiting retries of targets whose whole time is over; the end of the execution settles them."""
    for run, keys in await fetch_rows(connection, OVERDUE, (after,)):
        for stage in APPLY_STAGES:
            why = f"Not applied within {after.total_seconds():g} s (PRICING_TARGET_TIMEOUT_SECONDS)"
            await give_up(connection, [run], stage, TIMED_OUT, why, keys=keys)
