"""Agents of hosts: enrolment with a token that is used once and expires, the credential of each host, its rotation and
revocation. Tokens and credentials are random, and only their SHA-256 is stored."""

from __future__ import annotations

import secrets
from datetime import datetime, timedelta
from typing import NamedTuple

from ecluse.access.keys import digest
from ecluse.base.errors import NotFound
from ecluse.base.ids import cuid
from ecluse.base.text import storable
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_now, fetch_one, fetch_row

CHANNEL = "ecluse_jobs"  # the payload is the id of a host: a job waits for it, or its agent was revoked
TOKEN, CREDENTIAL = "ecl_enrol_", "ecl_agent_"  # how they begin; logs hide what begins with ecl_
TOKEN_LIFETIME = timedelta(hours=1)

OFFER = """
INSERT INTO enrolment_tokens (id, tenant_id, host_id, token_hash, created_by, created_at, expires_at)
SELECT %s, h.tenant_id, h.id, %s, %s, %s, %s FROM job_hosts h
WHERE h.tenant_id = %s AND h.id = %s AND h.deleted_at IS NULL RETURNING host_id
"""
# A host has one agent: the one that is enrolled replaces the one before.
ENROL = f"""
WITH token AS MATERIALIZED (
    SELECT t.id, t.tenant_id, t.host_id FROM enrolment_tokens t JOIN tenants o ON o.id = t.tenant_id
    JOIN job_hosts h ON h.id = t.host_id
    WHERE t.token_hash = %(token)s AND t.used_at IS NULL AND t.expires_at > ecluse_now() AND o.disabled_at IS NULL
      AND h.deleted_at IS NULL FOR UPDATE OF t),
replaced AS (
    UPDATE job_agents a SET revoked_at = ecluse_now() FROM token
    WHERE a.host_id = token.host_id AND a.revoked_at IS NULL RETURNING pg_notify('{CHANNEL}', a.host_id)),
agent AS (
    INSERT INTO job_agents (id, tenant_id, host_id, hostname, platform, version, credential_hash, enrolled_at,
        last_seen_at)
    SELECT %(agent)s, token.tenant_id, token.host_id, %(hostname)s, %(platform)s, %(version)s, %(credential)s,
        ecluse_now(), ecluse_now() FROM token, (SELECT count(*) FROM replaced) AS first RETURNING id, host_id)
UPDATE enrolment_tokens t SET used_at = ecluse_now(), agent_id = agent.id FROM agent
WHERE t.token_hash = %(token)s RETURNING agent.id, t.tenant_id AS tenant, agent.host_id
"""  # noqa: S608 - our own words
ROTATE = """
UPDATE job_agents SET former_credential_hash = %s, credential_hash = %s, rotated_at = ecluse_now()
WHERE id = %s AND revoked_at IS NULL
"""
REVOKE = f"""
UPDATE job_agents SET revoked_at = ecluse_now() WHERE tenant_id = %s AND id = %s AND revoked_at IS NULL
RETURNING pg_notify('{CHANNEL}', host_id)
"""  # noqa: S608 - our own words


class Enrolled(NamedTuple):
    """An enrolled agent and its host."""

    id: str
    tenant: str
    host_id: str


async def new_token(connection: Connection, tenant: str, host: str, by: str) -> tuple[str, datetime]:
    """Create an enrolment token for the agent of a host; return the token, of which only the hash is stored, and the
    time at which it expires. Raise NotFound if the tenant has no such host. `by`: the actor who asked for it."""
    token, now = TOKEN + secrets.token_urlsafe(32), await fetch_now(connection)
    expires_at = now + TOKEN_LIFETIME
    given = (cuid(int(now.timestamp() * 1000)), digest(token), by, now, expires_at, tenant, host)
    if await fetch_row(connection, OFFER, given) is None:
        raise NotFound(f"There is no host {storable(host, 50)}. `ecluse jobs hosts list` shows them.")
    return token, expires_at


async def enrol(
    connection: Connection, token: str, *, hostname: str, platform: str, version: str
) -> tuple[Enrolled, str] | None:
    """Enrol an agent for the host of the token, revoke the former agent of that host, and mark the token as used;
    return the new agent and its credential. Return None if the token is unknown, expired or used, its host is deleted,
    or its tenant is disabled."""
    credential, now = CREDENTIAL + secrets.token_urlsafe(32), await fetch_now(connection)
    given = {"hostname": storable(hostname, 200), "platform": storable(platform, 200), "version": storable(version, 50)}
    hashes = {"token": digest(token), "credential": digest(credential)}
    agent = {"agent": cuid(int(now.timestamp() * 1000))}
    found = await fetch_one(connection, Enrolled, ENROL, given | hashes | agent)
    return None if found is None else (found, credential)


async def rotate(connection: Connection, agent: str, used: bytes) -> str:
    """Replace the credential of an agent and return the new one. `used`: the hash of the credential that the agent
    sent; it stays valid until the first claim with the new one, so that a lost answer does not lock the agent out."""
    credential = CREDENTIAL + secrets.token_urlsafe(32)
    await connection.execute(ROTATE, (used, digest(credential), agent))
    return credential


async def revoke(connection: Connection, tenant: str, agent: str) -> bool:
    """Revoke the credential of an agent, irreversibly, and end its long poll. Return False if the tenant has no such
    agent or the agent was revoked before."""
    return await fetch_row(connection, REVOKE, (tenant, agent)) is not None
