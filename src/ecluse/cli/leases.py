"""`ecluse leases …`: list held leases, and release one by force from a holder that will not release it."""

from __future__ import annotations

from typing import Annotated

import typer

from ecluse.access import audit_trail
from ecluse.base.errors import NotFound
from ecluse.base.logging import harmless
from ecluse.cli.database import operator, with_connection
from ecluse.cli.options import Limit, Offset, Tenant, TenantFilter
from ecluse.db.connect import Connection
from ecluse.engine import force_release, list_leases

app = typer.Typer(no_args_is_help=True, help="List held leases, and release one by force.")


@app.command("list")
def list_held(
    tenant: TenantFilter = None,
    limit: Limit = 50,
    offset: Offset = 0,
) -> None:
    """List held leases, by tenant and key."""
    rows = with_connection(lambda connection: list_leases(connection, tenant, limit=limit, offset=offset))
    if not rows:
        typer.echo("no leases are held")
    for row in rows:
        until = f"run {row['run_id']}" if row["run_id"] else f"{row['remaining_seconds']:.0f} s left"
        held = f"attempt {row['attempt']}, {until}, token {row['token']}…"
        typer.echo(harmless(f"{row['tenant_id']:<12} {row['key']:<40} {row['owner']:<24} {held}"))


@app.command()
def release(
    key: Annotated[str, typer.Argument(help="Key of the lease, as `ecluse leases list` shows it.")],
    reason: Annotated[str, typer.Option(help="Reason, stored with the lease and in the audit trail.")],
    tenant: Tenant = "default",
) -> None:
    """Release a lease by force: its holder can no longer write under it. A dead holder's lease expires by itself."""

    async def ask(connection: Connection) -> bool:
        async with connection.transaction():
            released = await force_release(connection, tenant, key, reason=reason, by=operator())
            if released:
                await audit_trail.record(connection, tenant, operator(), "lease.release", f"lease:{key}", reason)
            return released

    if not with_connection(ask):
        raise NotFound(f"No lease {key!r} of tenant {tenant!r} is held. `ecluse leases list` lists held leases.")
    typer.echo(f"released lease {key}")
