"""Why a run waits: for the run and every run that it waits for, the causes, the number of items per cause, and when
these items start, where that can be predicted; or the same item by item.

Computed on read, from the items, their lanes and the live replicas; nothing is written while an item waits. Items are
grouped in one statement, by everything that decides their cause, and only the first and the last of a group are
explained. A position is the number of calls before that of this item in the order of the claim: tenants in turn, each
in its own order. Items that a call carries together (`BatchWrite`) have the position of the first of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ecluse.base.errors import NotFound
from ecluse.base.text import count_of
from ecluse.db.connect import Connection
from ecluse.db.query import as_json, fetch_all, fetch_column, fetch_one, fetch_value
from ecluse.engine.model.roles import RUNS_AT_ONCE
from ecluse.engine.runs.waiters import IN_FLIGHT, TREE
from ecluse.insight.causes import (
    BLOCKING,
    Cause,
    Facts,
    Group,
    cause_of,
    detail_with_position,
    expected,
    grouped,
    instant,
    merged,
    summary,
)
from ecluse.insight.run_queries import check_tenant
from ecluse.insight.stalls import PROGRESS

MOST_COUNTED = 20_000  # queued items of a lane
Budgets = Mapping[str, int]
NO_BUDGETS: Budgets = {}

RUN = f"""
WITH RECURSIVE {IN_FLIGHT}
SELECT r.id, r.tenant_id, r.flow, r.event_key, r.orchestrated, r.status, r.state, r.phase, r.ended_at,
       s.stage, s.round, s.next_round_at,
       {PROGRESS} AS progress_at, b.calls, b.since,
       EXISTS (SELECT 1 FROM replicas p, unnest(p.work) AS w(name)
               WHERE p.state = 'live' AND split_part(w.name, '/', 1) = r.flow) AS workers
FROM runs r
LEFT JOIN LATERAL (SELECT * FROM stages s WHERE s.run_id = r.id AND s.ended_at IS NULL
                   ORDER BY s.started_at DESC, s.stage LIMIT 1) s ON true,
LATERAL (SELECT coalesce(sum(b.calls), 0)::int AS calls, min(b.since) AS since FROM busy b JOIN above a
         ON a.busy_run = b.run_id AND a.id = r.id) b
WHERE r.id = %(run)s AND r.tenant_id = %(tenant)s
"""  # noqa: S608 - our own names

FULL_KEYS = """
CASE WHEN l.max_per_key IS NOT NULL THEN ARRAY(
    SELECT i.group_key FROM claims c JOIN items i ON i.claim_id = c.id
    WHERE c.lane_id = l.id AND c.in_flight > 0 AND i.group_key IS NOT NULL AND i.status = 'open'
    GROUP BY 1 HAVING count(*) >= l.max_per_key) END"""
# OFFSET 0 is an optimization fence: the items of each run are found by the index of waiting items, whatever the planner
# estimates.
ITEMS = """
items_of_tree AS (
    SELECT i.* FROM tree t CROSS JOIN LATERAL (
        SELECT id, lane_id, flow, stage, group_key, due_at, order_at, suspicion, error_code IS NOT NULL AS failed,
               postponed_cause
        FROM items i WHERE i.run_id = t.id AND i.claim_id IS NULL OFFSET 0) i)"""
# Grouped by everything that decides the cause of an item, so that all items of a group have the same. The sort key is a
# float, so that one pass finds the first and the last: an array of key and id has a minimum. The same pass finds two
# more examples, the latest even and the latest odd id: array_agg would build an array of all ids to take two.
GROUPS = f"""
WITH RECURSIVE clock AS MATERIALIZED (SELECT ecluse_now() AS now), {TREE}, {ITEMS},
lane AS MATERIALIZED (
    SELECT l.id, CASE WHEN l.held_until > now THEN l.held_until END AS held_until, {FULL_KEYS} AS full_keys
    FROM clock, lanes l)
SELECT count(*)::int AS count, (min(i.at_id))[2]::bigint AS first, (max(i.at_id))[2]::bigint AS last,
       array_remove(ARRAY[max(i.id) FILTER (WHERE i.id %% 2 = 0), max(i.id) FILTER (WHERE i.id %% 2 = 1)], NULL) AS some
FROM (
    SELECT i.id, i.lane_id, i.flow, i.stage, w.later, i.failed, i.suspicion > 0 AS suspect,
           i.postponed_cause, l.held_until >= i.due_at AS held, i.group_key = ANY(l.full_keys) AS key_full,
           ARRAY[date_part('epoch', CASE WHEN w.later THEN i.due_at ELSE i.order_at END), i.id] AS at_id
    FROM items_of_tree i CROSS JOIN clock CROSS JOIN LATERAL (SELECT i.due_at > now AS later) w
    LEFT JOIN lane l ON l.id = i.lane_id) i
GROUP BY i.lane_id, i.flow, i.stage, i.later, i.failed, i.suspect, i.postponed_cause, i.held, i.key_full
"""  # noqa: S608 - our own names

# The progress of the runs that it waits for is not in its own rows until its gate polls.
DONE = f"""
WITH RECURSIVE {TREE}
SELECT max(c.done_at) FROM tree t CROSS JOIN LATERAL (SELECT done_at FROM claims WHERE run_id = t.id OFFSET 0) c
"""  # noqa: S608 - our own names

PAGE = f"""
WITH RECURSIVE {TREE}, {ITEMS}
SELECT i.id FROM items_of_tree i ORDER BY i.order_at, i.id LIMIT %(limit)s OFFSET %(offset)s
"""  # noqa: S608 - our own names

FACTS = f"""
WITH RECURSIVE clock AS MATERIALIZED (SELECT ecluse_now() AS now),
mine AS MATERIALIZED (SELECT i.* FROM items i WHERE i.id = ANY(%(ids)s) AND i.claim_id IS NULL),
recent AS MATERIALIZED (SELECT * FROM claims ORDER BY id DESC LIMIT 5000),
lane AS MATERIALIZED (
    SELECT l.*, (SELECT coalesce(sum(c.in_flight), 0) FROM claims c WHERE c.lane_id = l.id AND c.in_flight > 0)::int
               AS in_flight, {FULL_KEYS} AS full_keys,
           (SELECT sum(p.taken - p.released - p.in_flight) / nullif(extract(epoch FROM now - min(p.taken_at)), 0)
            FROM recent p WHERE p.lane_id = l.id AND p.taken_at > now - interval '1 minute') AS pace
    FROM clock, lanes l WHERE l.id IN (SELECT lane_id FROM mine)),
-- the tenants that wait in each lane, as the claim finds them; of each, the head of its line
waiting AS (
    SELECT l.id AS lane_id, (SELECT i.tenant_id FROM items i WHERE i.lane_id = l.id AND i.claim_id IS NULL
                             ORDER BY i.tenant_id LIMIT 1) AS tenant_id FROM lane l
    UNION ALL
    SELECT w.lane_id, (SELECT i.tenant_id FROM items i WHERE i.lane_id = w.lane_id AND i.claim_id IS NULL
                       AND i.tenant_id > w.tenant_id ORDER BY i.tenant_id LIMIT 1)
    FROM waiting w WHERE w.tenant_id IS NOT NULL),
queued AS MATERIALIZED (
    SELECT i.*, w.lane_id, w.tenant_id
    FROM clock, (SELECT *, count(*) OVER (PARTITION BY lane_id) AS tenants FROM waiting WHERE tenant_id IS NOT NULL) w,
    LATERAL (SELECT id, order_at, due_at, run_id, flow, stage, group_key, suspicion FROM items
             WHERE lane_id = w.lane_id AND tenant_id = w.tenant_id AND claim_id IS NULL AND NOT permanent
             ORDER BY order_at, id LIMIT greatest(1, %(most)s / w.tenants)) i WHERE i.due_at <= now),
-- what a call of a stage is, as its workers say: of different versions, the larger
call AS MATERIALIZED (
    SELECT w.name, max(w.batch) AS batch, max(w.permits) AS permits
    FROM replicas r, unnest(r.work, r.batches, r.permits) AS w(name, batch, permits)
    WHERE r.state = 'live' AND w.batch IS NOT NULL GROUP BY 1),
-- the items of one call, as `work/mates.py` finds them: the place of each among those that may share calls
mates AS (
    SELECT q.id, q.lane_id, q.run_id, q.stage, q.group_key, c.batch,
           row_number() OVER (PARTITION BY q.lane_id, q.run_id, q.stage, q.group_key ORDER BY q.order_at, q.id) - 1
               AS place
    FROM queued q JOIN call c ON c.name = q.flow || '/' || q.stage AND c.batch > 1
    WHERE q.group_key IS NOT NULL AND q.suspicion = 0),
leader AS (
    SELECT id, first_value(id) OVER (PARTITION BY lane_id, run_id, stage, group_key, place / batch ORDER BY place)
               AS leader
    FROM mates),
place AS MATERIALIZED (
    SELECT q.id, coalesce(m.leader, q.id) AS leader, q.lane_id, q.tenant_id,
           count(*) FILTER (WHERE coalesce(m.leader, q.id) = q.id) OVER line - 1 AS ahead,
           coalesce(c.permits, 1) AS permits,
           coalesce(sum(coalesce(c.permits, 1)) FILTER (WHERE coalesce(m.leader, q.id) = q.id) OVER line, 0) AS taken
    FROM queued q LEFT JOIN leader m ON m.id = q.id LEFT JOIN call c ON c.name = q.flow || '/' || q.stage
    WINDOW line AS (PARTITION BY q.lane_id, q.tenant_id ORDER BY q.order_at, q.id)),
line AS MATERIALIZED (
    SELECT lane_id, tenant_id, max(ahead) + 1 AS n, max(taken)::float / (max(ahead) + 1) AS permits
    FROM place GROUP BY 1, 2),
crew AS MATERIALIZED (
    SELECT s.flow, s.stage, s.tenant_id, s.base, count(r.id)::int AS workers,
           coalesce(sum(r.hands), 0)::int AS hands, coalesce(sum(c.busy), 0)::int AS busy,
           coalesce(sum(c.own), 0)::int AS own,
           coalesce(bool_and(share_left(r.tenant_share, r.hands, c.own, c.busy - c.own) <= 0), false) AS share_full
    FROM (SELECT DISTINCT m.flow, m.stage, m.tenant_id, l.base FROM mine m JOIN lane l ON l.id = m.lane_id) s
    LEFT JOIN replicas r ON r.state = 'live' AND s.flow || '/' || s.stage = ANY(r.work)
    LEFT JOIN LATERAL (
        SELECT coalesce(sum(c.in_flight), 0)::bigint AS busy,
               coalesce(sum(c.in_flight) FILTER (WHERE u.tenant_id = s.tenant_id AND l.base = s.base), 0)::bigint AS own
        FROM claims c JOIN lanes l ON l.id = c.lane_id JOIN runs u ON u.id = c.run_id
        WHERE c.replica_id = r.id AND c.in_flight > 0) c ON true
    GROUP BY s.flow, s.stage, s.tenant_id, s.base)
SELECT now, m.id, m.run_id, m.flow, m.stage, m.key, m.target, m.due_at, m.executions, m.crashes, m.suspicion,
       m.error_code, m.error, m.postponed_cause, m.postponed_why,
       (p.ahead + (SELECT coalesce(sum(least(o.n, p.ahead + 1)), 0) FROM line o
                   WHERE o.lane_id = m.lane_id AND o.tenant_id <> m.tenant_id))::int AS position,
       (p.taken - p.permits + (SELECT coalesce(sum(least(o.n, p.ahead + 1) * o.permits), 0) FROM line o
                               WHERE o.lane_id = m.lane_id AND o.tenant_id <> m.tenant_id))::float AS permits_ahead,
       coalesce((SELECT sum(least(o.n, y.n)) FROM line y JOIN line o ON o.lane_id = y.lane_id
                 WHERE y.lane_id = m.lane_id AND y.tenant_id = m.tenant_id), 0)::int AS counted,
       l.name AS lane, l.paused_at, l.paused_reason,
       CASE WHEN l.held_until > now THEN l.held_until END AS held_until,
       l.held_reason, CASE WHEN l.trips > 0 THEN l.failing_since END AS down_since,
       l.clock_stopped_at IS NOT NULL AS clock_stopped, l.per_second, l.spacing,
       greatest(l.next_free_at, now) AS next_free_at, l.max_in_flight, l.in_flight,
       coalesce(l.failures >= l.break_after, false) AS probing, coalesce(m.group_key = ANY(l.full_keys), false)
           AS key_full,
       l.max_per_key, w.workers, w.hands, w.busy, w.own, w.share_full, l.pace::float, coalesce(k.batch, 1) AS batch,
       coalesce(k.permits, 1) AS permits, l.slowed_to, l.slowed_until,
       (%(budgets)s::jsonb ->> (m.flow || '/' || m.stage))::int AS budget
FROM clock, mine m JOIN lane l ON l.id = m.lane_id
JOIN crew w ON (w.flow, w.stage, w.tenant_id, w.base) = (m.flow, m.stage, m.tenant_id, l.base)
LEFT JOIN place i ON i.id = m.id LEFT JOIN place p ON p.id = i.leader
LEFT JOIN call k ON k.name = m.flow || '/' || m.stage ORDER BY m.order_at, m.id
"""  # noqa: S608 - our own names

OWNER = "SELECT tenant_id FROM runs WHERE id = %s AND ended_at IS NULL"
# The table does not exist before the first server has led a run.
LEADING = "SELECT to_regclass('dbos.workflow_status') IS NOT NULL"
LED = """
SELECT EXISTS (SELECT 1 FROM dbos.workflow_status w JOIN replicas p ON p.id = w.executor_id AND p.state = 'live'
               WHERE w.workflow_uuid = %(workflow)s AND w.status = 'PENDING')
"""
LED_OF_TENANT = """
SELECT count(*) FROM runs WHERE tenant_id = %(tenant_id)s AND orchestrated AND ended_at IS NULL AND state = 'running'
"""


@dataclass(frozen=True)
class Waiting:
    """A waiting item of the run in question, or of a run that it waits for."""

    item_id: int
    run_id: int
    key: str
    target: str
    stage: str
    lane: str
    cause: Cause
    detail: str
    position: int | None  # calls before its own; None: it is not due yet, or too far behind to be counted
    expected_at: datetime | None


@dataclass(frozen=True)
class RunWaits:
    """Why a run and the runs that it waits for do not continue: the waiting items by cause, the number of them and of
    calls in flight, and a sentence for people."""

    summary: str
    waiting: int
    in_flight: int
    in_flight_since: datetime | None  # the oldest of these calls
    progress_at: datetime | None  # the last progress; None: the run has ended
    blocked: bool  # no call is in flight, and no item starts before its cause is gone
    groups: Sequence[Group]


async def why(
    connection: Connection, tenant: str, run_id: int, *, limit: int, offset: int = 0, budgets: Budgets = NO_BUDGETS
) -> list[Waiting]:
    """Return a page of the waiting items of a run and of the runs it waits for, in queue order, each with the cause for
    which it has not started. Raise NotFound if the tenant has no such run."""
    await check_tenant(connection, tenant, run_id)
    page = await fetch_column(connection, PAGE, {"run": run_id, "limit": limit, "offset": offset})
    return await why_items(connection, page, budgets)


async def why_items(connection: Connection, ids: Collection[int], budgets: Budgets = NO_BUDGETS) -> list[Waiting]:
    """Return the items among `ids` that wait, in queue order, each with its cause. The caller has checked the
    tenant."""
    return [
        Waiting(
            one.id,
            one.run_id,
            one.key,
            one.target,
            one.stage,
            one.lane,
            cause_of(one),
            detail_with_position(one),
            one.position,
            expected(one),
        )
        for one in await _facts(connection, ids, budgets)
    ]


async def why_run(connection: Connection, tenant: str, run_id: int, budgets: Budgets = NO_BUDGETS) -> RunWaits:
    """Explain why a run and the runs that it waits for do not continue: their waiting items by cause, the most frequent
    first. `budgets`: of `flow/stage`, the most executions of an item. Raise NotFound if the tenant has no such run."""
    run = await _run(connection, tenant, run_id)
    if run["ended_at"] is not None:
        end = "cancelled" if run["state"] == "cancelled" else run["status"]
        why = (
            f"; ecluse runs targets {run_id} --outcome failed lists why"
            if run["state"] in ("failed", "partial")
            else ""
        )
        return RunWaits(f"nothing of it waits: it has ended, {end}{why}", 0, 0, None, None, False, ())
    rows = await fetch_all(connection, dict, GROUPS, {"run": run_id})
    done_at = await fetch_value(connection, DONE, {"run": run_id})
    progress_at = max(filter(None, [run["progress_at"], done_at]))
    wanted = {item for row in rows for item in (row["first"], row["last"], *row["some"])}
    facts = {one.id: one for one in await _facts(connection, wanted, budgets)}
    groups = []
    for row in rows:
        # An item that was claimed between the two statements no longer waits.
        ids = [item for item in (row["first"], *row["some"], row["last"]) if item in facts]
        if ids:
            groups.append(grouped([facts[item] for item in ids], row["count"]))
    groups = merged(groups) or [await _itself(connection, run)]
    total = sum(group.count for group in groups if group.lane is not None)
    blocked = not run["calls"] and all(group.cause in BLOCKING for group in groups)
    sentence = summary(groups, total, run["calls"])
    return RunWaits(sentence, total, run["calls"], run["since"], progress_at, blocked, groups)


async def why_open(connection: Connection, tenant: str, run_id: int | None) -> str | None:
    """Return what an open run waits for, whichever tenant it belongs to; a tenant is told of its own run how to ask for
    more. None if there is no such run, or it has ended."""
    owner = run_id and await fetch_value(connection, OWNER, (run_id,))
    if not owner or run_id is None:
        return None
    more = f" (`ecluse runs why {run_id}`)" if owner == tenant else ""
    return (await why_run(connection, owner, run_id)).summary + more


async def _itself(connection: Connection, run: dict[str, Any]) -> Group:
    """Explain what the run as a whole waits for, if neither it nor any run that it waits for has a waiting item. `run`
    is a row of RUN."""

    def waits(cause: Cause, detail: str) -> Group:
        return Group(cause, run["flow"], run["stage"], None, run["calls"], detail, run["since"])

    if run["calls"]:
        calls = count_of(run["calls"], "call is", "calls are")
        return waits("gate", f"{calls} in flight, the oldest since {instant(run['since'])}")
    if run["state"] == "queued" and run["workers"]:
        led = await fetch_value(connection, LED_OF_TENANT, run)
        most = f"a replica leads at most {RUNS_AT_ONCE:,}, of one tenant a share: ECLUSE_TENANT_SLOTS_SHARE"
        return waits(
            "queued", f"it waits for a replica to take it up; runs of the tenant that are led: {led:,} ({most})"
        )
    if not run["workers"] or (run["orchestrated"] and not await _is_led(connection, run)):
        return waits("no worker", f"no live replica leads the run: start one that has flow {run['flow']}")
    if run["next_round_at"] is not None:
        when = f"round {run['round'] + 1} opens at {instant(run['next_round_at'])}"
        return waits("gate", f"what failed is tried again: {when}, unless something is done before")
    if run["stage"] is not None:
        return waits("gate", f"all calls of stage {run['stage']} are done: its gate is about to poll")
    steps = f"no stage is open: its own steps are under way ({run['phase'] or run['status']})"
    if (others := await fetch_value(connection, LED_OF_TENANT, run) - 1) > 0:
        of = count_of(others, "other run of the tenant that is", "other runs of the tenant that are")
        steps += f", or wait for steps of the {of} led"
    return waits("gate", steps)


async def _is_led(connection: Connection, run: dict[str, Any]) -> bool:
    workflow = {"workflow": f"{run['tenant_id']}/{run['event_key']}"}
    return bool(await fetch_value(connection, LEADING) and await fetch_value(connection, LED, workflow))


async def _run(connection: Connection, tenant: str, run_id: int) -> dict[str, Any]:
    row = await fetch_one(connection, dict, RUN, {"run": run_id, "tenant": tenant})
    if row is None:
        raise NotFound(f"There is no run {run_id}.")
    return row


async def _facts(connection: Connection, ids: Collection[int], budgets: Budgets) -> list[Facts]:
    """Return the facts about the items among `ids` that still wait, in queue order."""
    if not ids:
        return []
    return await fetch_all(
        connection, Facts, FACTS, {"ids": list(ids), "most": MOST_COUNTED, "budgets": as_json(budgets)}
    )
