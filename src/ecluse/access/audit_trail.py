"""The audit trail: actor, action and reason of each recorded change. A row is written in the transaction of the change,
so that neither exists without the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ecluse.base.text import storable
from ecluse.db.connect import Connection
from ecluse.retention.kinds import Aged

KEPT = Aged("audit trail", "audit_trail", "t.at")


INSERT = """
INSERT INTO audit_trail (tenant_id, at, actor, action, subject, reason, request_id, address)
SELECT tenant, ecluse_now(), actor, action, subject, reason, request_id, address
FROM unnest(%s::text[], %s::text[], %s::text[], %s::text[], %s::text[], %s::text[], %s::text[])
    AS e(tenant, actor, action, subject, reason, request_id, address)
"""


class Entry(NamedTuple):
    """A row of the audit trail. `actor` is `key:<id>` or `agent:<id>` over HTTP and `cli:<user>` on the command line;
    `action` is noun.verb; `address` is that of the client, over HTTP."""

    tenant: str
    actor: str
    action: str
    subject: str
    reason: str | None = None
    request_id: str | None = None
    address: str | None = None


async def record_all(connection: Connection, entries: Sequence[Entry]) -> None:
    """Write rows of the audit trail, in one statement and in the caller's transaction. A subject or reason that is too
    long is cut."""
    if entries:
        rows = [
            one._replace(subject=storable(one.subject), reason=None if one.reason is None else storable(one.reason))
            for one in entries
        ]
        await connection.execute(INSERT, [list(column) for column in zip(*rows, strict=True)])
