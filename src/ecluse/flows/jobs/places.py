"""Storage of hosts and server instances. Jobs refer to them: they are marked as deleted, not removed."""

from __future__ import annotations

from collections.abc import Mapping

import psycopg

from ecluse.access.agents import CHANNEL
from ecluse.base.errors import Conflict, NotFound
from ecluse.base.ids import cuid
from ecluse.base.text import storable
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_now, fetch_one, fetch_row

NEW_HOST = """
INSERT INTO job_hosts (id, tenant_id, name, created_by, created_at, updated_at)
VALUES (%(id)s, %(tenant)s, %(name)s, %(by)s, %(now)s, %(now)s)
"""
NEW_SERVER = """
INSERT INTO job_servers (id, tenant_id, host_id, name, created_by, created_at, updated_at)
SELECT %(id)s, h.tenant_id, h.id, %(name)s, %(by)s, %(now)s, %(now)s FROM job_hosts h
WHERE h.tenant_id = %(tenant)s AND h.id = %(host_id)s AND h.deleted_at IS NULL FOR KEY SHARE RETURNING id
"""
CHANGE_SERVER = """
UPDATE job_servers s SET name = coalesce(%(name)s, s.name), host_id = coalesce(%(host_id)s, s.host_id),
    updated_at = ecluse_now()
WHERE s.tenant_id = %(tenant)s AND s.id = %(id)s AND s.deleted_at IS NULL
  AND (%(host_id)s::text IS NULL OR EXISTS (SELECT FROM job_hosts h
      WHERE h.tenant_id = s.tenant_id AND h.id = %(host_id)s AND h.deleted_at IS NULL))
RETURNING s.id
"""
SHOWN = "SELECT * FROM job_{kind}_list WHERE tenant_id = %s AND id = %s"
OPEN_JOBS = """
SELECT (SELECT count(*)::int FROM job_runs WHERE host_id = %(host)s AND status = 'pending') AS pending,
       (SELECT count(*)::int FROM job_runs WHERE host_id = %(host)s AND status = 'running') AS running
"""
IN_USE = "SELECT name FROM job_servers WHERE tenant_id = %s AND host_id = %s AND deleted_at IS NULL LIMIT 1"
DELETE = {
    "host": "UPDATE job_hosts SET deleted_at = ecluse_now() WHERE tenant_id = %s AND id = %s",
    "server": "UPDATE job_servers SET deleted_at = ecluse_now() WHERE tenant_id = %s AND id = %s",
}
RETIRE = f"""
UPDATE job_agents SET revoked_at = ecluse_now() WHERE tenant_id = %s AND host_id = %s AND revoked_at IS NULL
RETURNING pg_notify('{CHANNEL}', host_id)
"""  # noqa: S608 - our own words


async def create(connection: Connection, tenant: str, name: str, by: str, host_id: str | None = None) -> str:
    """Create a server instance on this host, or a host if `host_id` is None; return its id. Raise Conflict if the name
    is taken."""
    now = await fetch_now(connection)
    given = {"id": cuid(int(now.timestamp() * 1000)), "tenant": tenant, "name": name, "by": by, "now": now}
    try:
        if host_id is None:
            await connection.execute(NEW_HOST, given)
        elif await fetch_row(connection, NEW_SERVER, given | {"host_id": host_id}) is None:
            raise _no_host(host_id)
    except psycopg.errors.UniqueViolation as error:
        raise _taken(name) from error
    return str(given["id"])


async def change_server(connection: Connection, tenant: str, server: str, given: Mapping[str, str | None]) -> None:
    await show(connection, tenant, "server", server)
    values = {"tenant": tenant, "id": server, "name": given.get("name"), "host_id": given.get("host_id")}
    try:
        if await fetch_row(connection, CHANGE_SERVER, values) is None:
            raise _no_host(str(values["host_id"]))
    except psycopg.errors.UniqueViolation as error:
        raise _taken(str(values["name"])) from error


async def show(connection: Connection, tenant: str, kind: str, record_id: str) -> Row:
    """Return a host, server or agent (`kind`) as it is listed; raise NotFound if the tenant has none with this id."""
    row = await fetch_one(connection, dict, SHOWN.format(kind=kind), (tenant, record_id))
    if row is None:
        raise NotFound(f"There is no {kind} {storable(record_id, 50)}. `ecluse jobs {kind}s list` shows them.")
    return row


async def open_jobs(connection: Connection, host: str) -> Row:
    """Return how many jobs of a host are `pending`, and how many `running`."""
    return await fetch_one(connection, dict, OPEN_JOBS, {"host": host}) or {}


async def delete(connection: Connection, tenant: str, kind: str, record_id: str) -> None:
    """Delete a host, whose agent is revoked, or a server instance, whose schedules then fail to make jobs. Raise
    NotFound if there is none, Conflict for a host that has server instances."""
    await show(connection, tenant, kind, record_id)
    if kind == "host":
        if (used := await fetch_row(connection, IN_USE, (tenant, record_id))) is not None:
            raise Conflict(f"Server {used[0]} is on this host: delete it, or move it to another host.", code="CONFLICT")
        await connection.execute(RETIRE, (tenant, record_id))
    await connection.execute(DELETE[kind], (tenant, record_id))


def _no_host(host: str) -> NotFound:
    return NotFound(f"hostId: there is no host {storable(host, 50)}: `ecluse jobs hosts list` shows them.")


def _taken(name: str) -> Conflict:
    return Conflict(f"The name {storable(name, 50)} is taken: choose another one.", code="NAME_TAKEN")
