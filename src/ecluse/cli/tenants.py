"""`ecluse tenants …`: create, list, disable and enable tenants. Changes are recorded in the audit trail."""

from __future__ import annotations

from typing import Annotated

import typer

from ecluse.access import audit_trail, tenants
from ecluse.base.errors import InvalidInput
from ecluse.base.logging import harmless
from ecluse.cli.database import operator, with_connection
from ecluse.db.connect import Connection

app = typer.Typer(no_args_is_help=True, help="Create, list, disable and enable tenants.")
TenantArgument = Annotated[str, typer.Argument(help="Id of the tenant.")]


@app.command()
def create(
    tenant: TenantArgument, name: Annotated[str | None, typer.Option(help="Display name. Default: the id.")] = None
) -> None:
    """Create a tenant."""

    async def ask(connection: Connection) -> None:
        async with connection.transaction():
            if not await tenants.create(connection, tenant, name):
                raise InvalidInput(f"Tenant {tenant!r} exists already.")
            await audit_trail.record(connection, tenant, operator(), "tenant.create", f"tenant:{tenant}")

    with_connection(ask)
    typer.echo(f"created tenant {tenant}; create a key with `ecluse keys create --tenant {tenant} --role … --name …`")


@app.command()
def disable(
    tenant: TenantArgument, reason: Annotated[str, typer.Option(help="Reason, stored in the audit trail.")]
) -> None:
    """Disable a tenant: its API keys are refused. Its open runs continue."""
    _set_disabled(tenant, True, reason)


@app.command()
def enable(tenant: TenantArgument) -> None:
    """Enable a tenant: its API keys are accepted again."""
    _set_disabled(tenant, False, None)


def _set_disabled(tenant: str, disabled: bool, reason: str | None) -> None:
    word = "disable" if disabled else "enable"

    async def ask(connection: Connection) -> bool:
        async with connection.transaction():
            changed = await tenants.set_disabled(connection, tenant, disabled)
            if changed:
                await audit_trail.record(connection, tenant, operator(), f"tenant.{word}", f"tenant:{tenant}", reason)
            return changed

    typer.echo(f"{word}d tenant {tenant}" if with_connection(ask) else f"tenant {tenant} was {word}d already")


@app.command("list")
def list_tenants() -> None:
    """List all tenants, with the number of keys that are not revoked."""
    for row in with_connection(tenants.listed):
        state = f"disabled {row['disabled_at']:%Y-%m-%d %H:%M}" if row["disabled_at"] else "enabled"
        typer.echo(harmless(f"{row['id']:<24} {row['keys']:>4} keys  {state:<26} {row['name']}"))
