"""Servers and schedules of the tests of jobs, as rows."""

from __future__ import annotations

from typing import Any

from ecluse.flows.jobs import schedules

SERVER, HOST = "cserver000000000000000000", "chost00000000000000000000"
SCHEDULE: dict[str, Any] = {
    "name": "backup",
    "server_instance_id": SERVER,
    "cron_expression": "0 * * * *",
    "job_type": "noop",
    "description": None,
    "payload": {"what": "all"},
    "enabled": True,
    "timezone": "UTC",
    "execution_window_start": None,
    "execution_window_end": None,
    "retry_policy": {"max_retries": 2, "backoff_ms": 500, "backoff_type": "exponential"},
    "overlap": "allow",
    "catch_up": "latest",
    "timeout_seconds": None,
}
PLACES = """
WITH tenant AS (
    INSERT INTO tenants (id, name, created_at) VALUES (%(tenant)s, %(tenant)s, ecluse_now()) ON CONFLICT DO NOTHING),
host AS (
    INSERT INTO job_hosts (id, tenant_id, name, created_by, created_at, updated_at)
    VALUES (%(host)s, %(tenant)s, 'host', 'a test', ecluse_now(), ecluse_now()))
INSERT INTO job_servers (id, tenant_id, host_id, name, created_by, created_at, updated_at)
VALUES (%(server)s, %(tenant)s, %(host)s, 'server', 'a test', ecluse_now(), ecluse_now())
"""


async def add_server(connection: Any, tenant: str = "default", server: str = SERVER, host: str = HOST) -> None:
    await connection.execute(PLACES, {"tenant": tenant, "server": server, "host": host})


def unsealed() -> Any:
    raise AssertionError("there is no secret in the payload")


async def add_schedule(connection: Any, tenant: str = "default", **given: Any) -> schedules.Named:
    made = await schedules.create(connection, tenant, {**SCHEDULE, **given}, "a test", unsealed)
    return await schedules.find(connection, tenant, made)
