"""`ecluse realtime …`: show the app that a tenant's clients and publishers connect with."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ecluse import bootstrap, settings
from ecluse.access import tenants
from ecluse.base.errors import SetUpError
from ecluse.base.logging import harmless
from ecluse.cli.database import with_connection
from ecluse.cli.options import AsJson, Tenant
from ecluse.db.connect import Connection

app = typer.Typer(no_args_is_help=True, help="Show the realtime app that clients of a tenant connect with.")


@app.callback()
def everything() -> None:
    pass


@app.command()
def show(
    tenant: Tenant = "default",
    secret: Annotated[
        bool, typer.Option("--secret", help="Print the secret as well, which publishers sign with.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show id and key of the tenant's app, for clients of the Pusher protocol. The app is created if there is none."""
    from ecluse.realtime.apps import App, app_of

    given = settings.load()
    database = bootstrap.open_database(given)
    try:
        vault = bootstrap.open_secrets(given, database)
    finally:
        database.release()
    if vault is None:
        raise SetUpError(
            "Realtime is disabled: there is no key to encrypt the app's secret with. Set ECLUSE_SECRET_KEY or "
            "ECLUSE_SECRET_KEY_FILE, to the same key as the servers."
        )

    async def ask(connection: Connection) -> App:
        await tenants.require(connection, tenant)
        return await app_of(connection, vault, tenant)

    found = with_connection(ask)
    shown = {"tenant_id": tenant, "app_id": found.app_id, "key": found.key} | (
        {"secret": found.secret} if secret else {}
    )
    if as_json:
        typer.echo(json.dumps(shown))
    else:
        for name, value in shown.items():
            typer.echo(harmless(f"{name:<10} {value}"))
