"""Schedules: create, change, list and fire them. A schedule is due only for instants after it was created, enabled or
given another timetable. If such a change finds an instant that was due before it and was not fired, that instant
becomes a skipped slot with the reason."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, get_args

import psycopg
from psycopg.types.json import Jsonb

from ecluse.base.cron import ZONE_RULES
from ecluse.base.errors import Conflict, InvalidInput, NotFound
from ecluse.base.timetable import Timetable, timetable
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_all, fetch_now, fetch_one, fetch_value
from ecluse.engine.effects.budgets import require_budget
from ecluse.engine.model.fires import Overlap, Unfired
from ecluse.engine.model.flow import Flow
from ecluse.engine.runs.start import Start, Started, check_tenant_name, start_run, valid_input
from ecluse.engine.schedule.slot_decisions import MOST_SLOTS

LONGEST_NAME = 200


@dataclass(frozen=True)
class NewSchedule:
    """The columns of a schedule that people set. `cron` None: the schedule is started by hand only."""

    flow: Flow
    name: str
    cron: str | None
    timezone: str = "UTC"
    window_start: str | None = None
    window_end: str | None = None
    input: dict[str, Any] = field(default_factory=dict)
    overlap: Overlap = "wait"
    catch_up: Literal["latest", "skip"] = "latest"
    enabled: bool = True
    tenant_id: str = "default"

    def columns(self) -> dict[str, Any]:
        """Return the columns as they are stored. Raise InvalidInput if one is invalid, or the flow cannot be
        scheduled."""
        check_schedulable(self.flow)
        if not 1 <= len(self.name.strip()) <= LONGEST_NAME or "\x00" in self.name:
            raise InvalidInput(f"name: must be 1 to {LONGEST_NAME} characters, without NUL")
        check_tenant_name(self.tenant_id)
        if self.overlap not in get_args(Overlap):
            raise InvalidInput("overlap: must be wait, allow or skip")
        if self.catch_up not in ("latest", "skip"):
            raise InvalidInput("catch_up: must be latest or skip")
        if self.flow.fire is not None and self.overlap == "wait":
            raise InvalidInput(f"overlap: must be allow or skip for flow {self.flow.name}")
        timetable("@daily" if self.cron is None else self.cron, self.timezone, self.window_start, self.window_end)
        own = {"flow": self.flow.name, "name": self.name.strip(), "unique_name": self.flow.unique_names}
        given = {**vars(self), **own}
        return given | {"input": Jsonb(valid_input(self.flow, self.input))}


def check_schedulable(flow: Flow) -> None:
    """Raise InvalidInput if the flow cannot have schedules."""
    if not flow.schedulable:
        raise InvalidInput(f"flow: {flow.name} cannot be scheduled, because its runs are only items")


TIMING = ("cron", "timezone", "window_start", "window_end", "enabled")

LOAD = "SELECT * FROM schedules WHERE id = %s AND tenant_id = %s AND deleted_at IS NULL"
# Without `input`, which may be large.
LIST = """
SELECT id, tenant_id, flow, name, cron, timezone, window_start, window_end, overlap, catch_up, enabled, next_due_at,
       failures, error, holding_run_id, last_run_id, last_fired_at, created_at, updated_at
FROM schedules WHERE deleted_at IS NULL AND tenant_id = %s AND flow <> ALL(%s) ORDER BY name, id LIMIT %s OFFSET %s
"""
SLOTS = """
SELECT due_at, state, reason, run_id, reference, decided_at FROM schedule_slots WHERE schedule_id = %s
ORDER BY due_at DESC LIMIT 20
"""
# A redrive belongs to the run that it repeats: it does not become the schedule's last run.
FIRED = """
UPDATE schedules s SET last_run_id = CASE WHEN %(redrive)s THEN s.last_run_id ELSE %(run)s END,
    last_fired_at = ecluse_now(), holding_run_id = CASE
        WHEN EXISTS (SELECT 1 FROM runs r WHERE r.id = s.holding_run_id AND r.ended_at IS NULL) THEN s.holding_run_id
        ELSE %(run)s END
WHERE id = %(id)s
"""
DROP_WAITING = """
UPDATE schedule_slots SET state = 'skipped', reason = %s, decided_at = %s WHERE schedule_id = %s AND state = 'waiting'
"""
DROP_DUE = """
INSERT INTO schedule_slots (schedule_id, due_at, tenant_id, state, reason, decided_at)
SELECT %s, due_at, %s, 'skipped', %s, %s FROM unnest(%s::timestamptz[]) AS due_at ON CONFLICT DO NOTHING
"""


async def create_schedule(connection: Connection, new: NewSchedule) -> int:
    """Create a schedule and return its id. Raise InvalidInput if a column is invalid, Conflict if the name is taken."""
    columns = new.columns()
    now = await fetch_now(connection)
    columns |= {"handled_until": now, "created_at": now, "updated_at": now, "zone_rules": ZONE_RULES}
    columns["next_due_at"] = _next(columns, now)
    names, marks = ", ".join(columns), ", ".join(f"%({name})s" for name in columns)
    try:
        insert = f"INSERT INTO schedules ({names}) VALUES ({marks}) RETURNING id"  # noqa: S608 - our own names
        return int(await fetch_value(connection, insert, columns))
    except psycopg.errors.UniqueViolation as error:
        raise _name_taken(columns["name"]) from error


async def update_schedule(connection: Connection, tenant_id: str, schedule_id: int, new: NewSchedule) -> None:
    """Replace all columns of a schedule that people set, except its tenant. Raise InvalidInput if a column is invalid,
    Conflict if the name is taken, NotFound if the tenant has no such schedule."""
    why = "the schedule was changed before it was fired"
    await _change(connection, tenant_id, schedule_id, new.columns(), why, new.flow)


async def enable_schedule(
    connection: Connection, tenant_id: str, schedule_id: int, *, enabled: bool = True, flow: Flow | None = None
) -> None:
    """Enable a schedule, or disable it (`enabled` False). `flow`: its flow, whose `on_unfired` is called for a due
    instant that is skipped. Raise NotFound if the tenant has no such schedule."""
    why = "the schedule was switched off before it was fired"
    await _change(connection, tenant_id, schedule_id, {"enabled": enabled}, why, flow)


async def delete_schedule(
    connection: Connection, tenant_id: str, schedule_id: int, *, flow: Flow | None = None
) -> None:
    """Delete a schedule. Its runs and slots stay, and its name can be used again. `flow`: as in `enable_schedule`.
    Raise NotFound if the tenant has no such schedule."""
    gone = {"enabled": False, "deleted_at": await fetch_now(connection)}
    await _change(connection, tenant_id, schedule_id, gone, "the schedule was deleted before it was fired", flow)


async def load_schedule(
    connection: Connection, tenant_id: str, schedule_id: int, *, lock: bool = False
) -> dict[str, Any]:
    """Return the columns of a schedule. Raise NotFound if the tenant has no such schedule, or it was deleted. `lock`:
    keep the row locked until the end of the caller's transaction."""
    statement = LOAD + (" FOR NO KEY UPDATE" if lock else "")
    row: dict[str, Any] | None = await fetch_one(connection, dict, statement, (schedule_id, tenant_id))
    if row is None:
        raise NotFound(f"There is no schedule {schedule_id}.")
    return row


async def show_schedule(connection: Connection, tenant_id: str, schedule_id: int) -> dict[str, Any]:
    """Return a schedule with its 20 latest slots, newest first. Raise NotFound if the tenant has no such schedule."""
    row = await load_schedule(connection, tenant_id, schedule_id)
    return {**row, "slots": await fetch_all(connection, dict, SLOTS, (schedule_id,))}


async def list_schedules(
    connection: Connection, tenant_id: str, *, but: Sequence[str] = (), limit: int, offset: int
) -> list[dict[str, Any]]:
    """Return the schedules of a tenant, ordered by name, without their input: at most `limit`, after the first
    `offset`. `but`: flows whose schedules are left out."""
    return await fetch_all(connection, dict, LIST, (tenant_id, list(but), limit, offset))


async def fire_by_hand(
    connection: Connection,
    tenant_id: str,
    schedule_id: int,
    flow: Flow,
    *,
    input: dict[str, Any] | None = None,  # noqa: A002 - the name of a run's input everywhere
    start: Callable[[Start], Start] = lambda start: start,
) -> Started:
    """Start a run of the schedule now, even if other runs of it are open; no due instant is used up. The run holds the
    schedule if no other open run does. `input` replaces the schedule's own; `start` may change the request, such as its
    event key. If the run of that key exists already, it is returned. Raise Conflict if a budget is used up, NotFound if
    the tenant has no such schedule, InvalidInput if it belongs to another flow."""
    async with connection.transaction():
        row = await load_schedule(connection, tenant_id, schedule_id, lock=True)
        if flow.name != row["flow"]:
            raise InvalidInput(f"flow: schedule {schedule_id} belongs to flow {row['flow']}, not to {flow.name}")
        key = flow.slot_key.format(schedule=schedule_id, due=f"manual-{uuid.uuid4()}")
        given = row["input"] if input is None else input
        wanted = start(Start(flow, key, tenant_id, given, schedule_id=schedule_id))
        started = await start_run(connection, wanted)
        if started.deduplicated:
            return started
        await require_budget(connection, flow, tenant_id, schedule_id)
        fired = {"run": started.run.id, "redrive": wanted.redrive_of is not None, "id": schedule_id}
        await connection.execute(FIRED, fired)
    return started


async def _change(
    connection: Connection,
    tenant_id: str,
    schedule_id: int,
    columns: dict[str, Any],
    why: str,
    flow: Flow | None,
) -> None:
    """Set these columns of a schedule. If one of them decides when it is due, the instants until now that were not
    fired are skipped, with the reason `why`, and the next due instant is computed again. Raise NotFound if the tenant
    has no such schedule, Conflict if the name is taken."""
    async with connection.transaction():
        row = await load_schedule(connection, tenant_id, schedule_id, lock=True)
        now = await fetch_now(connection)
        columns = {**columns, "tenant_id": tenant_id, "updated_at": now}
        if any(name in columns and columns[name] != row[name] for name in TIMING):
            await _drop(connection, row, now, why, flow)
            since = max(now, row["handled_until"])  # if the clock was set back, no instant is decided again
            columns |= {"handled_until": since, "next_due_at": _next({**row, **columns}, since)}
            columns |= {"failures": 0, "error": None, "zone_rules": ZONE_RULES}
        sets = ", ".join(f"{name} = %({name})s" for name in columns)
        try:
            await connection.execute(
                f"UPDATE schedules SET {sets} WHERE id = %(id)s",  # noqa: S608 - our own names
                {**columns, "id": schedule_id},
            )
        except psycopg.errors.UniqueViolation as error:
            raise _name_taken(columns["name"]) from error


def _name_taken(name: str) -> Conflict:
    return Conflict(f"There is a schedule {name!r} already: choose another name.", code="NAME_TAKEN")


async def _drop(connection: Connection, row: dict[str, Any], now: datetime, why: str, flow: Flow | None) -> None:
    """Skip the instants of a schedule that are due by `now` and were not fired, with the reason `why`."""
    await connection.execute(DROP_WAITING, (why, now, row["id"]))
    if row["next_due_at"] is not None:
        with suppress(InvalidInput):  # a timetable that is no longer valid may still be replaced
            due, _ = _timetable(row).latest(row["handled_until"], now, MOST_SLOTS)
            await connection.execute(DROP_DUE, (row["id"], row["tenant_id"], why, now, due))
            if due and flow is not None and flow.on_unfired is not None:
                await flow.on_unfired(connection, [Unfired(row["id"], row["tenant_id"], due[-1], "skipped", why)])


def next_fires(row: dict[str, Any], now: datetime, count: int) -> list[dict[str, Any]]:
    """Return the next `count` due times of a schedule, each with a mark where a clock change or its window moves it.
    Empty if the schedule has no cron, or one that this version cannot read."""
    if row["cron"] is None:
        return []
    with suppress(InvalidInput):  # stored by another version: the schedule's `error` says so once it is due
        return [fire._asdict() for fire in _timetable(row).preview(now, count)]
    return []


def _timetable(row: dict[str, Any]) -> Timetable:
    return timetable(row["cron"], row["timezone"], row["window_start"], row["window_end"])


def _next(row: dict[str, Any], now: datetime) -> datetime | None:
    return _timetable(row).next(now) if row["enabled"] and row["cron"] is not None else None
