"""The scheduler: a tick every second, on one replica at a time, decides on the due instants of schedules.

A batch is one transaction: runs, slots, schedules and events are committed together or not at all, so that a crash
neither loses nor doubles an instant. Lock order: schedules before everything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import structlog

from ecluse.base.crash import crashpoint
from ecluse.base.cron import ZONE_RULES
from ecluse.base.errors import InvalidInput
from ecluse.base.text import storable
from ecluse.db.connect import Connection, Pool
from ecluse.db.outage import is_unavailable
from ecluse.db.query import as_json, fetch_all, fetch_column, fetch_value
from ecluse.engine.model import counters
from ecluse.engine.model.flow import Flow
from ecluse.engine.runs.start import KeyTaken, Start, start_runs
from ecluse.engine.schedule.fires import fire_without_runs, pass_on_unfired
from ecluse.engine.schedule.slot_decisions import Decision, FiringLimits, Schedule, decide, event_key

log = structlog.get_logger(__name__)

TICK_SECONDS = 1.0
BATCH = 200
LOCK = 0x7EC1_05E5  # an arbitrary number, used by no other advisory lock
BACK_OFF = timedelta(seconds=5)
LONGEST_BACK_OFF = timedelta(minutes=1)

# Slots that need wait no longer.
RELEASED = f"""
SELECT s.id FROM schedule_slots w JOIN schedules s ON s.id = w.schedule_id
LEFT JOIN runs r ON r.id = s.holding_run_id AND r.ended_at IS NULL
WHERE w.state = 'waiting' AND r.id IS NULL AND s.flow = ANY(%(flows)s) AND s.failures = 0 LIMIT {BATCH}
"""  # noqa: S608 - a number of ours
# The time is read in a subquery, once: as a volatile function in the condition it would prevent the use of the index.
# The first one in order, and not EXISTS: the planner, which does not know that few are due, would read the table.
ANY_DUE = f"""
SELECT (SELECT s.id FROM schedules s WHERE s.next_due_at <= (SELECT ecluse_now()) AND s.flow = ANY(%(flows)s)
        ORDER BY s.next_due_at LIMIT 1) IS NOT NULL OR EXISTS ({RELEASED})
"""  # noqa: S608 - the statement above
# Tenants take turns: each one's share of a batch is found by its own range of the index; the tenants are found by
# stepping from one to the next in it, so that the many due schedules of one tenant are not read.
LOCK_DUE = f"""
WITH RECURSIVE armed AS (
    SELECT min(s.tenant_id) AS tenant_id FROM schedules s WHERE s.next_due_at IS NOT NULL
    UNION ALL
    SELECT (SELECT min(s.tenant_id) FROM schedules s WHERE s.next_due_at IS NOT NULL AND s.tenant_id > a.tenant_id)
    FROM armed a WHERE a.tenant_id IS NOT NULL),
moment AS MATERIALIZED (SELECT ecluse_now() AS now),
tenants AS MATERIALIZED (
    SELECT a.tenant_id FROM armed a WHERE EXISTS (
        SELECT 1 FROM schedules s WHERE s.tenant_id = a.tenant_id AND s.next_due_at <= (SELECT now FROM moment)
            AND s.flow = ANY(%(flows)s))),
turns AS (
    SELECT d.id, row_number() OVER (PARTITION BY t.tenant_id ORDER BY d.next_due_at) AS turn
    FROM tenants t CROSS JOIN LATERAL (
        SELECT s.id, s.next_due_at FROM schedules s
        WHERE s.tenant_id = t.tenant_id AND s.next_due_at <= (SELECT now FROM moment) AND s.flow = ANY(%(flows)s)
        ORDER BY s.next_due_at LIMIT (SELECT 1 + {BATCH} / count(*) FROM tenants)) d),
due AS (
    (SELECT id FROM turns ORDER BY turn, random() LIMIT {BATCH})
    UNION ALL
    ({RELEASED}))
SELECT id FROM schedules WHERE id IN (SELECT id FROM due) ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
"""  # noqa: S608 - a number of ours
# In a statement after the lock, so that it sees changes committed just before.
READ = """
SELECT s.id, s.tenant_id, s.flow, s.cron, s.timezone, s.window_start, s.window_end, s.input, s.overlap, s.catch_up,
s.handled_until, s.failures, r.id IS NOT NULL AS held, w.due_at AS waiting, t.disabled_at IS NOT NULL AS tenant_disabled
FROM schedules s LEFT JOIN runs r ON r.id = s.holding_run_id AND r.ended_at IS NULL
LEFT JOIN schedule_slots w ON w.schedule_id = s.id AND w.state = 'waiting'
LEFT JOIN tenants t ON t.id = s.tenant_id
WHERE s.id = ANY(%s) AND s.next_due_at IS NOT NULL ORDER BY s.id
"""

PUT_SLOTS = """
INSERT INTO schedule_slots (schedule_id, due_at, tenant_id, state, reason, run_id, reference, decided_at)
SELECT schedule_id, due_at, tenant_id, state, reason, run_id, reference, ecluse_now()
FROM jsonb_to_recordset(%s::jsonb) AS n(schedule_id bigint, due_at timestamptz, tenant_id text, state text, reason text,
    run_id bigint, reference text)
ON CONFLICT (schedule_id, due_at) DO UPDATE SET state = excluded.state, reason = excluded.reason,
    run_id = excluded.run_id, reference = excluded.reference, decided_at = excluded.decided_at
    WHERE schedule_slots.state = 'waiting'
"""
# A run holds its schedule from now on if no open run held it.
PUT_SCHEDULES = """
UPDATE schedules s SET handled_until = n.handled_until, next_due_at = n.next_due_at, zone_rules = %(rules)s,
    missed_uncounted = missed_uncounted + n.uncounted, failures = 0, error = NULL,
    last_run_id = coalesce(n.run_id, last_run_id),
    last_fired_at = CASE WHEN n.fired THEN ecluse_now() ELSE last_fired_at END,
    holding_run_id = CASE WHEN n.held THEN holding_run_id ELSE n.run_id END
FROM jsonb_to_recordset(%(rows)s::jsonb) AS n(id bigint, handled_until timestamptz, next_due_at timestamptz,
    uncounted bigint, run_id bigint, fired boolean, held boolean)
WHERE s.id = n.id
"""
PUT_FAILURE = "UPDATE schedules SET failures = failures + 1, error = %s, next_due_at = %s WHERE id = %s"
# Schedules computed with other time zone rules are computed again, as if they were due.
RENEW = """
UPDATE schedules SET next_due_at = ecluse_now() WHERE next_due_at > (SELECT ecluse_now()) AND zone_rules <> %s
"""


class TickResult(NamedTuple):
    """The result of a tick for one schedule."""

    schedule_id: int
    status: str  # of its latest instant: fired, waiting, skipped, missed, failed; failed also if it is to be retried
    run_id: int | None
    reason: str | None
    reference: str | None = None
    due_at: datetime | None = None  # None: not decided yet


class Scheduler:
    """The periodic job of scheduler replicas: a tick and, before the first one, `renew`."""

    def __init__(self, flows: Mapping[str, Flow], rules: FiringLimits) -> None:
        self._flows = flows
        self._rules = rules
        self._renewed = False

    async def run(self, pool: Pool) -> None:
        if not self._renewed:
            await renew(pool)
            self._renewed = True
        await tick(pool, self._flows, self._rules)


async def renew(pool: Pool) -> None:
    """Make the schedules due now whose next instants were computed with other time zone rules, so that the next tick
    computes them again."""
    async with pool.connection() as connection:
        cursor = await connection.execute(RENEW, (ZONE_RULES,))
    if cursor.rowcount:
        log.warning(
            "scheduler: new time zone rules, due times are computed again", schedules=cursor.rowcount, rules=ZONE_RULES
        )


async def tick(pool: Pool, flows: Mapping[str, Flow], rules: FiringLimits) -> list[TickResult]:
    """Decide on the due instants of all schedules of these flows, and fire those that are to be fired, about BATCH
    schedules per transaction, tenants in turn. Stop if another replica is ticking. Return one result per schedule that
    had a due instant."""
    done: list[TickResult] = []
    schedulable = {"flows": [name for name, flow in flows.items() if flow.schedulable]}
    async with pool.connection() as connection:
        while await fetch_value(connection, ANY_DUE, schedulable):
            async with connection.transaction():
                if not await fetch_value(connection, "SELECT pg_try_advisory_xact_lock(%s)", (LOCK,)):
                    break
                locked = await fetch_column(connection, LOCK_DUE, schedulable)
                due = await fetch_all(connection, Schedule, READ, (locked,))
                now = await fetch_value(connection, "SELECT ecluse_now()")
                lines = await _handle(connection, flows, due, now, rules)
                crashpoint("in tick")
            crashpoint("after tick")
            _count({one.id: one.flow for one in due}, lines, now)
            done += lines
            if not locked:  # the rest is being changed by others
                break
    return done


def _count(flows: Mapping[int, str], results: Sequence[TickResult], now: datetime) -> None:
    for one in results:
        flow = flows[one.schedule_id]
        counters.fires[flow, one.status] += 1
        if one.status == "fired" and one.due_at is not None:
            counters.fire_lag_seconds[(flow,)] += (now - one.due_at).total_seconds()


async def _handle(
    connection: Connection, flows: Mapping[str, Flow], due: Sequence[Schedule], now: datetime, rules: FiringLimits
) -> list[TickResult]:
    """Handle a batch of schedules in one transaction; if that fails on data, in halves, until the invalid schedule is
    alone. That one keeps its instants, and later ticks retry it with backoff. But its instant is used up if its event
    key is taken, or if its flow fires without runs and failed (unless its timetable is invalid)."""
    if not due:
        return []
    try:
        async with connection.transaction():
            return await _store(connection, flows, [(one, decide(one, now, rules)) for one in due])
    except Exception as error:  # the edge of stored data and of the flows' models: data refused, or a bug in a model
        if is_unavailable(error):
            raise
        if len(due) > 1:
            middle = len(due) // 2
            first = await _handle(connection, flows, due[:middle], now, rules)
            return first + await _handle(connection, flows, due[middle:], now, rules)
        (one,) = due
        why = storable(" ".join(str(error).split()))
        if isinstance(error, KeyTaken):  # it stays taken: the instant is used up
            log.error("scheduler: slot skipped, its event key is taken", schedule_id=one.id, error=why)
            return await _store(
                connection, flows, [(one, decide(one, now, rules).with_latest(state="skipped", reason=why))]
            )
        if flows[one.flow].fire is not None and not isinstance(error, InvalidInput):  # that: of its timetable
            log.error("scheduler: slot failed", schedule_id=one.id, tenant_id=one.tenant_id, error=why)
            return await _store(
                connection, flows, [(one, decide(one, now, rules).with_latest(state="failed", reason=why))]
            )
        again = now + min(BACK_OFF * 2 ** min(one.failures, 10), LONGEST_BACK_OFF)
        await connection.execute(PUT_FAILURE, (why, again, one.id))
        log.error(
            "scheduler: schedule could not be fired, will retry", schedule_id=one.id, tenant_id=one.tenant_id, error=why
        )
        return [TickResult(one.id, "failed", None, why)]


async def _store(
    connection: Connection, flows: Mapping[str, Flow], decided: Sequence[tuple[Schedule, Decision]]
) -> list[TickResult]:
    """Fire the instants that the decisions say, and store the decisions: write the slots, update the schedules. Return
    one result per schedule with a slot."""
    decided = await fire_without_runs(connection, flows, decided)
    starts = [
        _start(flows[one.flow], one, at)
        for one, decision in decided
        if (at := decision.fires) is not None and flows[one.flow].fire is None
    ]
    started = await start_runs(connection, starts) if starts else []
    run_ids = {(each.run.tenant_id, each.run.event_key): each.run.id for each in started}
    lines: list[TickResult] = []
    slots: list[dict[str, Any]] = []
    schedules: list[dict[str, Any]] = []
    for one, decision in decided:
        at, flow = decision.fires, flows[one.flow]
        run_id = None
        if at is not None and flow.fire is None:
            run_id = run_ids[one.tenant_id, event_key(flow.slot_key, one.id, at)]
        for slot in decision.slots:
            whose = {"schedule_id": one.id, "tenant_id": one.tenant_id}
            slots.append({**whose, **slot._asdict(), "run_id": run_id if slot.state == "fired" else None})
        put = {"handled_until": decision.handled_until, "next_due_at": decision.next_due_at, "held": one.held}
        fired = {"run_id": run_id, "fired": at is not None}
        schedules.append({"id": one.id, **put, **fired, "uncounted": decision.uncounted})
        if decision.slots:
            latest = decision.slots[-1]
            lines.append(TickResult(one.id, latest.state, run_id, latest.reason, latest.reference, latest.due_at))
    await connection.execute(PUT_SLOTS, (as_json(slots),))
    await connection.execute(PUT_SCHEDULES, {"rows": as_json(schedules), "rules": ZONE_RULES})
    await pass_on_unfired(connection, flows, decided)
    return lines


def _start(flow: Flow, schedule: Schedule, due_at: datetime) -> Start:
    """Return the request to start the run of a due instant. If the flow's input has a field `due_at`, it is set to that
    instant."""
    due = {"due_at": due_at.isoformat()} if "due_at" in flow.input.model_fields else {}
    key = event_key(flow.slot_key, schedule.id, due_at)
    return Start(flow, key, schedule.tenant_id, {**schedule.input, **due}, schedule_id=schedule.id)
