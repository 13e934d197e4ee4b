"""`ecluse vendors …`: the lanes to the vendors, how full they are, and whether they are open."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ecluse.access import audit_trail
from ecluse.base.logging import harmless
from ecluse.cli.database import operator, with_connection
from ecluse.db.connect import Connection
from ecluse.engine import list_lanes, pause_lane, resume_lane

EVERYBODY = "system"  # a lane belongs to no tenant
app = typer.Typer(no_args_is_help=True, help="The lanes to the vendors: look at them, pause and resume them.")

Name = Annotated[str, typer.Argument(help="The lane's name, as `ecluse vendors list` shows it.")]
Reason = Annotated[str, typer.Option(help="Why; everybody who asks why something waits is shown it.")]


@app.command("list")
def list_vendors() -> None:
    """Every lane: its caps, what is in hand and waiting, and why nothing starts if nothing does."""
    lanes = with_connection(list_lanes)
    if not lanes:
        typer.echo("no lanes yet: a server that has flows writes them when it starts")
    for lane in lanes:
        work = f"{lane['in_flight']:>6} in hand {lane['waiting']:>8} waiting"
        typer.echo(harmless(f"{lane['name']:<24} {_caps(lane):<34} {work}  {_standing(lane)}"))


@app.command()
def pause(name: Name, reason: Reason) -> None:
    """Start nothing more of this lane, on any replica, until it is resumed. Calls under way come to their end."""

    async def ask(connection: Connection) -> None:
        async with connection.transaction():
            await pause_lane(connection, name, reason=reason, by=operator())
            await audit_trail.record(connection, EVERYBODY, operator(), "lane.pause", f"lane:{name}", reason)

    with_connection(ask)
    typer.echo(f"{name} is paused; `ecluse vendors resume {name} --reason …` opens it again")
    typer.echo("runs that need it have the time of their stages, no more: what still waits then fails", err=True)


@app.command()
def resume(name: Name, reason: Reason) -> None:
    """Let a paused lane go on, at once."""

    async def ask(connection: Connection) -> bool:
        async with connection.transaction():
            resumed = await resume_lane(connection, name, reason=reason, by=operator())
            if resumed:
                await audit_trail.record(connection, EVERYBODY, operator(), "lane.resume", f"lane:{name}", reason)
            return resumed

    if not with_connection(ask):
        typer.echo(f"{name} was not paused; nothing was changed", err=True)
    else:
        typer.echo(f"{name} goes on")


def _caps(lane: dict[str, Any]) -> str:
    caps = [f"{lane['max_in_flight']} at once"] if lane["max_in_flight"] else []
    caps += [f"{lane['max_per_key']} per key"] if lane["max_per_key"] else []
    if lane["per_second"]:
        slow = lane["per_second"] < 1
        caps.append(f"{lane['per_second'] * (60 if slow else 1):g}/{'min' if slow else 's'} burst {lane['burst']}")
    return ", ".join(caps) or "no caps"


def _standing(lane: dict[str, Any]) -> str:
    if lane["paused_at"] is not None:
        return f"PAUSED by {lane['paused_by']} at {lane['paused_at']:%Y-%m-%d %H:%M:%S%z}: {lane['paused_reason']}"
    if lane["held_until"] is not None:
        return f"HELD until {lane['held_until']:%Y-%m-%d %H:%M:%S%z}: {lane['held_reason']}"
    return "open"
