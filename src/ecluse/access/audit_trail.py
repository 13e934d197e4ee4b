"""The audit trail: actor, action and reason of each recorded change. A row is written in the transaction of the change,
so that neither exists without the other."""

from __future__ import annotations

from ecluse.base.text import storable
from ecluse.db.connect import Connection
from ecluse.retention.kinds import Aged

KEPT = Aged("audit trail", "audit_trail", "t.at")


async def record(
    connection: Connection,
    tenant: str,
    actor: str,
    action: str,
    subject: str,
    reason: str | None = None,
    request_id: str | None = None,
) -> None:
    """Write one row of the audit trail. `actor` is `key:<id>` over HTTP and `cli:<user>` on the command line; `action`
    is noun.verb."""
    await connection.execute(
        "INSERT INTO audit_trail (tenant_id, at, actor, action, subject, reason, request_id)"
        " VALUES (%s, ecluse_now(), %s, %s, %s, %s, %s)",
        (tenant, actor, action, storable(subject), None if reason is None else storable(reason), request_id),
    )
