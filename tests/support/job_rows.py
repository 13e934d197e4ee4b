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


# A host without servers, its agent and a server elsewhere; a job that waits, one that has failed, one that is running.
JOB = """
WITH host AS (
    INSERT INTO job_hosts (id, tenant_id, name, created_by, created_at, updated_at)
    VALUES (%(id)s, 'default', 'matrix ' || %(id)s, 'a test', ecluse_now(), ecluse_now())
    ON CONFLICT (id) DO UPDATE SET deleted_at = NULL),
agent AS (
    INSERT INTO job_agents (id, tenant_id, host_id, hostname, platform, version, credential_hash, enrolled_at,
        last_seen_at)
    VALUES (%(id)s, 'default', %(id)s, 'h', 'p', '1', sha256(%(id)s::bytea), ecluse_now(), ecluse_now())
    ON CONFLICT (id) DO UPDATE SET revoked_at = NULL),
server AS (
    INSERT INTO job_servers (id, tenant_id, host_id, name, created_by, created_at, updated_at)
    VALUES (%(id)s, 'default', %(server)s, 'matrix ' || %(id)s, 'a test', ecluse_now(), ecluse_now())
    ON CONFLICT (id) DO UPDATE SET deleted_at = NULL),
job AS (
    INSERT INTO jobs (id, tenant_id, key, job_schedule_id, server_instance_id, host_id, type, payload, max_attempts,
        backoff_ms, backoff_type, status, created_by, created_at, ended_at)
    SELECT n.id, 'default', n.id, %(id)s, %(server)s, n.host, 'noop', '{}', 1, 0, 'fixed', n.status, 'a test',
        ecluse_now(), CASE n.status WHEN 'failed' THEN ecluse_now() END
    FROM (VALUES (%(id)s, 'pending', %(id)s), (%(failed)s, 'failed', %(id)s), ('r' || %(id)s, 'running', %(server)s))
        AS n(id, status, host)
    ON CONFLICT (id) DO UPDATE SET status = excluded.status, ended_at = excluded.ended_at)
INSERT INTO job_runs (id, tenant_id, job_id, host_id, attempt, status, fence, due_at, agent_id, claim_key, started_at,
    lease_ends_at, ended_at, error_code)
VALUES ('w' || %(id)s, 'default', %(id)s, %(id)s, 1, 'pending', 0, ecluse_now(), NULL, NULL, NULL, NULL, NULL, NULL),
    ('f' || %(id)s, 'default', %(failed)s, %(id)s, 1, 'failed', 0, ecluse_now(), NULL, NULL, NULL, NULL, ecluse_now(),
        'NO_AGENT'),
    (%(id)s, 'default', 'r' || %(id)s, %(server)s, 1, 'running', 1, ecluse_now(), 'matrix', gen_random_uuid(),
        ecluse_now(), ecluse_now() + interval '1 hour', NULL, NULL)
ON CONFLICT (id) DO UPDATE SET status = excluded.status, ended_at = excluded.ended_at, error_code = excluded.error_code
"""
AGENT = """
WITH host AS (
    INSERT INTO job_hosts (id, tenant_id, name, created_by, created_at, updated_at)
    VALUES (%(server)s, 'default', 'matrix', 'a test', ecluse_now(), ecluse_now()) ON CONFLICT DO NOTHING)
INSERT INTO job_agents (id, tenant_id, host_id, hostname, platform, version, credential_hash, enrolled_at, last_seen_at)
VALUES ('matrix', 'default', %(server)s, 'h', 'p', '1', sha256(%(credential)s), ecluse_now(), ecluse_now())
"""
