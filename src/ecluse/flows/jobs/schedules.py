"""Storage of job schedules: the engine's `schedules` say when they are due, `job_schedules` what their jobs do. A
payload with secrets is encrypted as a whole, under a new name at each change, so that jobs made before keep theirs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from psycopg.types.json import Jsonb

from ecluse.access.secrets import Secrets
from ecluse.base.errors import InvalidInput, NotFound
from ecluse.base.ids import cuid
from ecluse.base.masking import HIDDEN, without_secrets
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_now, fetch_one, fetch_row
from ecluse.engine import NewSchedule, create_schedule, delete_schedule, enable_schedule, update_schedule
from ecluse.flows.jobs.flow import FLOW
from ecluse.retention.kinds import Aged

Sealing = Callable[[], Secrets]  # returns the secrets, or raises if there is no key

# Field of a job schedule → column of the engine's schedule.
TIMETABLE = {
    "name": "name",
    "cron_expression": "cron",
    "timezone": "timezone",
    "execution_window_start": "window_start",
    "execution_window_end": "window_end",
    "overlap": "overlap",
    "catch_up": "catch_up",
    "enabled": "enabled",
}
NAMED = "SELECT id, schedule_id, tenant_id FROM job_schedules WHERE tenant_id = %s AND id = %s"
SHOWN = "SELECT * FROM job_schedule_list WHERE tenant_id = %s AND id = %s"
SERVER = "SELECT 1 FROM job_servers WHERE tenant_id = %s AND id = %s AND deleted_at IS NULL FOR KEY SHARE"
SECRET = "job-payload:"  # noqa: S105 - the beginning of names
# For retention: payloads that no schedule has any more, and no job, which may be repeated.
KEPT = Aged(
    "payloads of jobs",
    "secrets",
    "t.updated_at",
    order="updated_at",
    type="timestamptz",
    where=f"starts_with(t.name, '{SECRET}')",
    also="""NOT EXISTS (SELECT FROM job_schedules j JOIN schedules s ON s.id = j.schedule_id
        WHERE j.tenant_id = t.tenant_id AND j.payload_secret = t.name AND s.deleted_at IS NULL)
    AND NOT EXISTS (SELECT FROM jobs o WHERE o.tenant_id = t.tenant_id AND o.payload_secret = t.name)""",
)


KEPT_JOBS = Aged("jobs", "jobs", "t.ended_at", order="ended_at", type="timestamptz", where="t.ended_at IS NOT NULL")


class Named(NamedTuple):
    """The ids of a job schedule: its own, that of its row in `schedules`, and its tenant."""

    id: str
    schedule_id: int
    tenant_id: str


async def find(connection: Connection, tenant: str, job_schedule: str) -> Named:
    """Return the job schedule of this id, deleted or not; raise NotFound if the tenant never had it."""
    row = await fetch_row(connection, NAMED, (tenant, job_schedule))
    if row is None:
        raise NotFound(f"There is no job schedule {job_schedule}.")
    return Named(*row)


async def show(connection: Connection, tenant: str, job_schedule: str) -> Row:
    """Return the row of a job schedule as it is listed; raise NotFound if there is none, or it was deleted."""
    row = await fetch_one(connection, dict, SHOWN, (tenant, job_schedule))
    if row is None:
        raise NotFound(f"There is no job schedule {job_schedule}.")
    return row


async def create(connection: Connection, tenant: str, given: Mapping[str, Any], by: str, sealing: Sealing) -> str:
    """Create a job schedule and return its id. `given` has all fields of a `JobSchedule`."""
    schedule_id = await create_schedule(connection, _timed(tenant, given))
    columns = await _columns(connection, tenant, given, sealing)
    number = cuid(int((await fetch_now(connection)).timestamp() * 1000))
    columns |= {"id": number, "tenant_id": tenant, "schedule_id": schedule_id, "created_by_id": by}
    names, marks = ", ".join(columns), ", ".join(f"%({name})s" for name in columns)
    await connection.execute(f"INSERT INTO job_schedules ({names}) VALUES ({marks})", columns)  # noqa: S608 - our names
    return number


async def change(connection: Connection, which: Named, given: Mapping[str, Any], sealing: Sealing) -> None:
    """Replace the given fields of a job schedule. Jobs that were made before stay as they are."""
    known = await show(connection, which.tenant_id, which.id)
    await update_schedule(connection, which.tenant_id, which.schedule_id, _timed(which.tenant_id, {**known, **given}))
    columns = await _columns(connection, which.tenant_id, given, sealing)
    if columns:
        sets = ", ".join(f"{name} = %({name})s" for name in columns)
        await connection.execute(
            f"UPDATE job_schedules SET {sets} WHERE id = %(id)s",  # noqa: S608 - our own names
            {**columns, "id": which.id},
        )


async def switch(connection: Connection, which: Named, *, enabled: bool) -> None:
    """Resume a job schedule, or pause it. Due times in the meantime are not caught up on."""
    await enable_schedule(connection, which.tenant_id, which.schedule_id, enabled=enabled, flow=FLOW)


async def delete(connection: Connection, which: Named) -> None:
    """Delete a job schedule. Its jobs and slots stay."""
    await delete_schedule(connection, which.tenant_id, which.schedule_id, flow=FLOW)


def _timed(tenant: str, fields: Mapping[str, Any]) -> NewSchedule:
    columns = {column: fields[name] for name, column in TIMETABLE.items()}
    return NewSchedule(FLOW, **columns, tenant_id=tenant)


async def _columns(connection: Connection, tenant: str, given: Mapping[str, Any], sealing: Sealing) -> Row:
    """Return the columns of `job_schedules` for the given fields; a payload with secrets is encrypted. Raise NotFound
    if the server instance does not exist."""
    plain = ("server_instance_id", "description", "job_type", "timeout_seconds")
    columns = {name: given[name] for name in plain if name in given}
    if "server_instance_id" in given:
        server = given["server_instance_id"]
        if await fetch_row(connection, SERVER, (tenant, server)) is None:
            raise NotFound(f"There is no server instance {server}: `ecluse jobs servers list` shows them.")
    columns |= given.get("retry_policy", {})
    if "payload" in given:
        columns |= await _sealed(connection, tenant, given["payload"], sealing)
    return columns


async def _sealed(connection: Connection, tenant: str, payload: Row, sealing: Sealing) -> Row:
    if any(HIDDEN in text for text in _texts(payload)):
        raise InvalidInput(
            f"payload: {HIDDEN} stands for a secret that is not shown: give it again, or leave payload out"
        )
    shown = without_secrets(payload)
    if shown == payload:
        return {"payload": Jsonb(payload), "payload_secret": None}
    name = SECRET + cuid(int((await fetch_now(connection)).timestamp() * 1000))
    await sealing().put(connection, tenant, name, json.dumps(payload))
    return {"payload": Jsonb(shown), "payload_secret": name}


def _texts(value: Any) -> set[str]:
    """Return all texts in a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return {text for one in value for text in _texts(one)}
    return {value} if isinstance(value, str) else set()
