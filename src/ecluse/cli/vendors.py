"""`ecluse vendors …`: list the lanes to the vendors with their load and state; pause and resume a lane."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated, Any

import typer

from ecluse.access import audit_trail
from ecluse.base.logging import harmless
from ecluse.cli import confirm
from ecluse.cli.database import operator, with_connection
from ecluse.db.connect import Connection
from ecluse.engine import MovedDeadline, list_lanes, needing_lane, pause_lane, resume_lane

SYSTEM = "system"  # a lane belongs to no tenant
NAMED = 20  # affected stages listed at most
AT = "%Y-%m-%d %H:%M:%S%z"
app = typer.Typer(no_args_is_help=True, help="List the lanes to the vendors; pause and resume a lane.")

Name = Annotated[str, typer.Argument(help="Name of the lane, as `ecluse vendors list` shows it.")]
Reason = Annotated[str, typer.Option(help="Reason, shown wherever a wait for this lane is explained.")]


@app.command("list")
def list_vendors() -> None:
    """List all lanes: caps, items in flight and waiting, and the reason if a lane is paused, held or down."""
    lanes = with_connection(list_lanes)
    if not lanes:
        typer.echo("no lanes yet: a server creates the lanes of its flows when it starts")
    for lane in lanes:
        work = f"{lane['in_flight']:>6} in flight {lane['waiting']:>8} waiting"
        typer.echo(harmless(f"{lane['name']:<24} {_caps(lane):<34} {work}  {_standing(lane)}"))


@app.command()
def pause(
    name: Name,
    reason: Reason,
    stop_clock: Annotated[
        bool, typer.Option("--stop-clock", help="Stop the clock of stages that need the lane until it is resumed.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation, even if runs may fail.")] = False,
) -> None:
    """Pause a lane: no replica starts its items until it is resumed. Calls in flight finish. Stages that need the lane
    still time out, unless their clock is stopped."""
    waiting = with_connection(lambda connection: needing_lane(connection, name))
    if not stop_clock:
        fails = [(one, f"fails items that still wait at {one.deadline_at:{AT}}") for one in waiting[:NAMED]]
        _say(fails, len(waiting), err=True)
        if waiting:
            confirm.ask(
                "Pause the lane anyway? (--stop-clock extends the deadlines of these stages by the pause)", yes=yes
            )

    async def ask(connection: Connection) -> None:
        async with connection.transaction():
            await pause_lane(connection, name, reason=reason, by=operator(), stop_clock=stop_clock)
            full = f"{reason} (clock stopped)" if stop_clock else reason
            await audit_trail.record(connection, SYSTEM, operator(), "lane.pause", f"lane:{name}", full)

    with_connection(ask)
    typer.echo(f"lane {name} is paused; resume it with `ecluse vendors resume {name} --reason …`")
    if stop_clock:
        runs = len({one.run_id for one in waiting})
        typer.echo(f"the clock of stages that need the lane is stopped until then: {runs} runs now", err=True)
    else:
        typer.echo(
            "the clock of stages that need the lane keeps running: items that still wait at the deadline fail", err=True
        )


@app.command()
def resume(name: Name, reason: Reason) -> None:
    """Resume a paused lane, at once. The deadline of each stage moves by the time its clock was stopped."""

    async def ask(connection: Connection) -> list[MovedDeadline] | None:
        async with connection.transaction():
            moved = await resume_lane(connection, name, reason=reason, by=operator())
            if moved is not None:
                await audit_trail.record(connection, SYSTEM, operator(), "lane.resume", f"lane:{name}", reason)
            return moved

    moved = with_connection(ask)
    if moved is None:
        typer.echo(f"lane {name} is not paused; nothing was changed", err=True)
        return
    typer.echo(f"lane {name} is resumed")
    said = []
    for one in moved[:NAMED]:
        by = timedelta(seconds=round(one.by.total_seconds()))
        said.append((one, f"has the deadline {one.deadline_at:{AT}}: its clock was stopped for {by}"))
    _say(said, len(moved))


def _say(stages: Sequence[tuple[Any, str]], total: int, *, err: bool = False) -> None:
    """Print a line per stage, and how many stages are not shown."""
    for one, said in stages:
        typer.echo(harmless(f"run {one.run_id} ({one.flow}, {one.tenant_id}): stage {one.stage} {said}"), err=err)
    if total > len(stages):
        typer.echo(f"and {total - len(stages):,} more", err=err)


def _caps(lane: dict[str, Any]) -> str:
    caps = [f"max {lane['max_in_flight']} in flight"] if lane["max_in_flight"] else []
    caps += [f"{lane['max_per_key']} per key"] if lane["max_per_key"] else []
    if lane["per_second"]:
        slow = lane["per_second"] < 1
        caps.append(f"{lane['per_second'] * (60 if slow else 1):g}/{'min' if slow else 's'} burst {lane['burst']}")
    return ", ".join(caps) or "no caps"


def _standing(lane: dict[str, Any]) -> str:
    if lane["paused_at"] is not None:
        clock = ", clock stopped" if lane["clock_stopped_at"] is not None else ""
        return f"PAUSED by {lane['paused_by']} at {lane['paused_at']:{AT}}{clock}: {lane['paused_reason']}"
    if lane["down_since"] is not None:
        probe = "with the next call" if lane["held_until"] is None else f"at {lane['held_until']:{AT}}"
        return f"DOWN since {lane['down_since']:{AT}}, probed {probe}: {lane['last_failure']}"
    if lane["held_until"] is not None:
        return f"HELD until {lane['held_until']:{AT}}: {lane['held_reason']}"
    return "open"
