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
from ecluse.access.refusal_log import address_of
from ecluse.access.wire import writes_of
from ecluse.db.connect import Connection


@asynccontextmanager
async def change(request: Request, action: str, subject: str, reason: str | None = None) -> AsyncIterator[Connection]:
    """Open a transaction for a change by the caller of the request, and yield its connection. If the block ends without
    an error, the change is recorded in the audit trail and committed."""
    async with writes_of(request).connection(caller_of(request).tenant) as connection, connection.transaction():
        yield connection
        await record(connection, request, action, subject, reason)


class Change(NamedTuple):
    """A change by the caller of a request, as it is recorded in the audit trail."""

    request: Request
    action: str
    subject: str
    reason: str | None = None

    @property
    def entry(self) -> Entry:
        caller = caller_of(self.request)
        return Entry(caller.tenant, caller.actor, *self[1:], request_id(self.request), address_of(self.request))


async def record(
    connection: Connection, request: Request, action: str, subject: str, reason: str | None = None
) -> None:
    """Record a change by the caller of the request in the audit trail, in the transaction of `connection`."""
    await record_all(connection, [Change(request, action, subject, reason)])


async def record_all(connection: Connection, changes: Sequence[Change]) -> None:
    """Record several changes in the audit trail, in one statement and in the transaction of `connection`."""
    await audit_trail.record_all(connection, [change.entry for change in changes])
