"""Changes made over HTTP: one transaction each, with a row in the audit trail that names the caller and the request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from fastapi import Request

from ecluse.access import audit_trail
from ecluse.access.audit_trail import Entry
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


class Change(NamedTuple):
    """A change by the caller of a request, as the audit trail names it."""

    request: Request
    action: str
    subject: str
    reason: str | None = None

    @property
    def entry(self) -> Entry:
        caller = caller_of(self.request)
        return Entry(caller.tenant, caller.actor, *self[1:], request_id=request_id(self.request))


async def record(
    connection: Connection, request: Request, action: str, subject: str, reason: str | None = None
) -> None:
    """Record a change by the caller of this request in the audit trail, in the caller's transaction."""
    await record_all(connection, [Change(request, action, subject, reason)])


async def record_all(connection: Connection, changes: Sequence[Change]) -> None:
    """Record changes in one statement, as `record` does one."""
    await audit_trail.record_all(connection, [change.entry for change in changes])
