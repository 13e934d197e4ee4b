"""Changes made over HTTP: one transaction each, with a row in the audit trail that names the caller and the request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Request

from ecluse.access import audit_trail
from ecluse.access.door import caller_of
from ecluse.access.envelope import request_id
from ecluse.access.wire import writes_of
from ecluse.db.connect import Connection


@asynccontextmanager
async def change(request: Request, action: str, subject: str, reason: str | None = None) -> AsyncIterator[Connection]:
    """Open the transaction of a change; at its end the change is recorded in the audit trail."""
    async with writes_of(request).connection(caller_of(request).tenant) as connection, connection.transaction():
        yield connection
        await record(connection, request, action, subject, reason)


async def record(
    connection: Connection, request: Request, action: str, subject: str, reason: str | None = None
) -> None:
    """Record a change by the caller of this request in the audit trail, in the caller's transaction."""
    caller = caller_of(request)
    await audit_trail.record(connection, caller.tenant, caller.actor, action, subject, reason, request_id(request))
