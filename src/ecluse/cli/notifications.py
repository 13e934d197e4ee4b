"""`ecluse notifications …`: list endpoints and deliveries, and repeat a delivery."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from ecluse.access import audit_trail
from ecluse.base.errors import InvalidInput
from ecluse.base.logging import harmless
from ecluse.cli.database import operator, with_connection
from ecluse.cli.options import Limit, Offset, TenantFilter
from ecluse.db.connect import Connection
from ecluse.engine import Started
from ecluse.notify import endpoints, log

app = typer.Typer(
    no_args_is_help=True, help="List webhook and mail endpoints and their deliveries, and repeat a delivery."
)


class StateName(StrEnum):
    pending = "pending"
    delivered = "delivered"
    failed = "failed"


@app.command("endpoints")
def list_endpoints(tenant: TenantFilter = None, limit: Limit = 50, offset: Offset = 0) -> None:
    """List endpoints with their events. They are created over HTTP: POST /api/notifications/endpoints."""
    rows = with_connection(lambda c: endpoints.list_endpoints(c, tenant, limit=limit, offset=offset))
    if not rows:
        typer.echo("no endpoints: create one with POST /api/notifications/endpoints")
    for row in map(endpoints.shown, rows):
        state = "active" if row["is_active"] else f"disabled: {row['disabled_reason'] or 'by an operator'}"
        to, events = row["url"] or ", ".join(row["addresses"]), ", ".join(row["events"])
        typer.echo(harmless(f"{row['id']:>6}  {row['tenant_id']:<12} {row['kind']:<8} {to}  [{events}]  {state}"))


@app.command("deliveries")
def list_deliveries(
    endpoint: Annotated[int | None, typer.Option(min=1, help="List only deliveries to this endpoint.")] = None,
    state: Annotated[StateName | None, typer.Option(help="List only deliveries in this state.")] = None,
    tenant: TenantFilter = None,
    limit: Limit = 50,
    offset: Offset = 0,
) -> None:
    """List deliveries, newest first."""
    page = {"limit": limit, "offset": offset}
    rows = with_connection(
        lambda c: log.list_deliveries(c, tenant, endpoint_id=endpoint, state=state and state.value, **page)
    )
    if not rows:
        typer.echo("no matching deliveries" if endpoint or state or tenant or offset else "no deliveries yet")
    for row in rows:
        error = f"  {row['error_code']}: {row['error']}" if row["error_code"] else ""
        told = f"{row['event_type']:<28} {row['recipient']}  {row['executions']}x{error}"
        typer.echo(harmless(f"{row['id']:>8}  {row['tenant_id']:<12} {row['state']:<9} {row['kind']:<8} {told}"))


@app.command()
def redeliver(delivery_id: Annotated[int, typer.Argument(metavar="ID", min=1, help="Id of the delivery.")]) -> None:
    """Repeat a delivery, under the same message id."""
    from ecluse.notify import dispatch

    async def ask(connection: Connection) -> Started:
        async with connection.transaction():
            row = await log.show_delivery(connection, None, delivery_id)
            started = await dispatch.redeliver(connection, row["tenant_id"], delivery_id)
            if not started.deduplicated:
                done = (row["tenant_id"], operator(), "delivery.redeliver", f"delivery:{delivery_id}")
                await audit_trail.record(connection, *done)
            return started

    started = with_connection(ask)
    if started.deduplicated:
        raise InvalidInput(f"Delivery {started.run.id} of the same message is still pending: wait for its end.")
    typer.echo(f"started delivery {started.run.id}")
