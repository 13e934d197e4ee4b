"""`ecluse keys …`: API keys. A key is printed once, when it is created. Changes are recorded in the audit trail."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from ecluse.access import audit_trail, keys
from ecluse.base.logging import harmless
from ecluse.cli.database import operator, with_connection
from ecluse.cli.options import Tenant, TenantFilter
from ecluse.db.connect import Connection

app = typer.Typer(no_args_is_help=True, help="Create, list and revoke API keys.")


class RoleName(StrEnum):
    viewer = "viewer"
    operator = "operator"
    admin = "admin"


class ScopeName(StrEnum):
    ALL = "ALL"
    GROUP = "GROUP"
    SELF = "SELF"


@app.command()
def create(
    role: Annotated[RoleName, typer.Option(help="Role: viewer reads, operator also acts, admin also administers.")],
    name: Annotated[str, typer.Option(help="Name of the key: the person or program that uses it.")],
    tenant: Tenant = "default",
    expires: Annotated[str | None, typer.Option(help="Lifetime: 90m, 12h, 30d. Default: unlimited.")] = None,
    scope: Annotated[
        ScopeName, typer.Option(help="Readable fiches: all of the tenant, those of groupes, or those of one CRM user.")
    ] = ScopeName.ALL,
    groupe: Annotated[list[str] | None, typer.Option(help="Groupe, for scope GROUP. Repeatable.")] = None,
    crm_user: Annotated[str | None, typer.Option(metavar="ID", help="Id of the CRM user, for scope SELF.")] = None,
) -> None:
    """Create a key and print it: it cannot be shown again."""
    lifetime = None if expires is None else keys.lifetime(expires)

    async def ask(connection: Connection) -> tuple[int, str]:
        async with connection.transaction():
            key_id, key = await keys.create(
                connection,
                tenant,
                role,
                name,
                expires_in=lifetime,
                scope=scope,
                groupes=groupe or (),
                crm_user_id=crm_user,
            )
            await audit_trail.record(connection, tenant, operator(), "key.create", f"key:{key_id}")
        return key_id, key

    key_id, key = with_connection(ask)
    typer.echo(f"created key {key_id} for tenant {tenant}, role {role}; it is not shown again:", err=True)
    typer.echo(key)


@app.command()
def revoke(key_id: Annotated[int, typer.Argument(metavar="ID", min=1, max=2**63 - 1, help="Id of the key.")]) -> None:
    """Revoke a key for good. It is refused within about a second."""

    async def ask(connection: Connection) -> bool:
        async with connection.transaction():
            tenant, revoked = await keys.revoke(connection, key_id)
            if revoked:
                await audit_trail.record(connection, tenant, operator(), "key.revoke", f"key:{key_id}")
        return revoked

    typer.echo(f"revoked key {key_id}" if with_connection(ask) else f"key {key_id} was revoked already")


@app.command("list")
def list_keys(tenant: TenantFilter = None) -> None:
    """List keys: id, tenant, first characters, role, state, last use, name, and the scope unless it is ALL."""
    rows = with_connection(lambda connection: keys.listed(connection, tenant))
    if not rows:
        none = "no keys yet: create one with `ecluse keys create --role … --name …`"
        typer.echo("no matching keys" if tenant else none)
    for row in rows:
        state = "revoked" if row["revoked_at"] else "expired" if row["expired"] else "valid"
        used = f"{row['last_used_at']:%Y-%m-%d %H:%M}" if row["last_used_at"] else "never used"
        whose = f"{row['id']:>8}  {row['tenant_id']:<16} {row['hint']}…"
        limits = {
            "ALL": "",
            "GROUP": f"  (GROUP {', '.join(row['groupes'])})",
            "SELF": f"  (SELF {row['crm_user_id']})",
        }
        typer.echo(harmless(f"{whose}  {row['role']:<9} {state:<8} {used:<17} {row['name']}{limits[row['scope']]}"))
