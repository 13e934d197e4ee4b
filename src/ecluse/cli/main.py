"""`ecluse …`: all commands in one list. An EcluseError ends the program with exit code 2 and its message on stderr."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import structlog
import typer
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from ecluse import bootstrap, settings
from ecluse.base import logging
from ecluse.base.errors import EcluseError, SetUpError
from ecluse.base.version import version
from ecluse.cli import (
    audits,
    automation,
    erase,
    fiches,
    keys,
    leases,
    notifications,
    prune,
    realtime,
    runs,
    schedules,
    tenants,
    transcriptions,
    vendors,
)
from ecluse.cli.options import AsJson, Flows, JsonLine
from ecluse.db import embedded
from ecluse.engine import ROLES, Role

log = structlog.get_logger(__name__)
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Periodic work over records held in other people's systems, with one truthful outcome per record.",
)
app.add_typer(runs.app, name="runs")
app.add_typer(tenants.app, name="tenants")
app.add_typer(keys.app, name="keys")
app.add_typer(leases.app, name="leases")
app.add_typer(notifications.app, name="notifications")
app.add_typer(fiches.app, name="fiches")
app.add_typer(audits.app, name="audits")
app.add_typer(automation.app, name="automation")
app.add_typer(schedules.app, name="schedules")
app.add_typer(vendors.app, name="vendors")
app.add_typer(transcriptions.app, name="transcriptions")
app.add_typer(realtime.app, name="realtime")
app.add_typer(erase.app, name="erase")
app.command()(prune.prune)
demo = typer.Typer(invoke_without_command=True)
app.add_typer(demo, name="demo")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ecluse {version()}")
        raise typer.Exit


@app.callback()
def everything(
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


class RoleName(StrEnum):
    api = "api"
    worker = "worker"
    scheduler = "scheduler"


@app.command()
def serve(
    flow: Flows = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: ECLUSE_HOST.")] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on; 0 picks a free one. Default: ECLUSE_PORT.", min=0, max=65535)
    ] = None,
    role: Annotated[
        list[RoleName] | None,
        typer.Option("--role", help="Run only this role; health and metrics are always served. Repeatable."),
    ] = None,
) -> None:
    """Run the server: API, scheduler and worker in one process. Start it again to add a replica."""
    from ecluse.app import Server, create_app  # imported here: slow, and not needed by other commands
    from ecluse.cli import welcome
    from ecluse.migrations import runner

    logging.configure(*settings.log_settings())
    welcome.name_program()
    given = settings.load()
    logging.configure(given.ECLUSE_LOG_LEVEL, given.ECLUSE_LOG_FORMAT)
    flows = bootstrap.load_flows(given, flow or ())
    # Turn SIGTERM into SystemExit: `finally` must run, or the embedded PostgreSQL would be left running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with _bound(host or given.ECLUSE_HOST, given.ECLUSE_PORT if port is None else port) as listener:
        database = bootstrap.open_database(given)
        try:
            runner.upgrade(database.dsn, flows)
            roles: frozenset[Role] = frozenset(one.value for one in role) if role else ROLES
            application = create_app(given, database, flows, roles)
            server = Server(application)
            # uvicorn raises the signal that stopped it again after its shutdown: ignore it, the server is down by then.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: setattr(server, "should_exit", True))
            log.info("listening", address=listener.getsockname()[:2])
            if "api" in roles:
                welcome.say_where(listener, database.dsn, given.ECLUSE_PUBLIC_URL)
            server.run(sockets=[listener])
        finally:
            database.release()
    if not server.started:
        raise typer.Exit(3)
    if application.state.kit.broken.is_set():
        raise typer.Exit(70)


def _bound(host: str, port: int) -> socket.socket:
    """Bind the listening socket, before anything is started: a server that cannot listen must not join the cluster."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise SetUpError(
            f"Cannot listen on {host}:{port}: {error.strerror}. Choose another address with --host and --port, "
            "or with ECLUSE_HOST and ECLUSE_PORT."
        ) from error
    return listener


@app.command()
def migrate(flow: Flows = None) -> None:
    """Migrate the database to this program's schema. Servers also do this when they start."""
    from ecluse.migrations import runner

    given = settings.load()
    logging.configure("WARNING", given.ECLUSE_LOG_FORMAT)
    database = bootstrap.open_database(given)
    try:
        typer.echo(f"schema {runner.upgrade(database.dsn, bootstrap.load_flows(given, flow or ()))}")
    finally:
        database.release()


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def psql(context: typer.Context) -> None:
    """Open psql on the database in use; further arguments are passed to psql."""
    database = bootstrap.open_database(settings.load())
    # Run psql as a child, not by exec: this process keeps the embedded server up while psql runs. Ctrl-C is left to
    # psql. The password goes through the environment, because all users of the host can read command lines.
    signal.signal(signal.SIGINT, lambda *_: None)
    address = conninfo_to_dict(database.dsn)
    environment = {**os.environ, "PGPASSWORD": str(address.pop("password", os.environ.get("PGPASSWORD", "")))}
    command = [str(embedded.psql()), make_conninfo("", **address), *context.args]
    try:
        code = subprocess.run(command, env=environment, check=False).returncode  # noqa: S603 - what psql is for
    finally:
        database.release()
    raise typer.Exit(code)


@app.command()
def sandbox(
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.", min=0, max=65535)] = 8089,
    seed: Annotated[int, typer.Option(help="Seed: the same seed gives the same records and faults.")] = 1,
    faults: Annotated[Path | None, typer.Option(help="JSON file with the fault rules to start with.")] = None,
) -> None:
    """Simulate the vendors over HTTP, with faults on demand and a ledger of every call they receive."""
    from ecluse.sandbox.__main__ import main as sandbox_main

    arguments = ["--port", str(port), "--seed", str(seed), *(["--faults", str(faults)] if faults else [])]
    raise typer.Exit(sandbox_main(arguments))


@app.command()
def verify(
    ledger: Annotated[
        str | None, typer.Option(metavar="URL", help="Compare with the ledger of the sandbox at this URL as well.")
    ] = None,
    as_json: JsonLine = False,
) -> None:
    """Check that stored data keeps the documented promises. Read-only. Exit code 0: clean, 1: violations, 2: the check
    was not possible."""
    from ecluse.verify.__main__ import run as verify_run

    database = bootstrap.open_database(settings.load())
    try:
        code = verify_run(database.dsn, ledger, as_json=as_json)
    finally:
        database.release()
    raise typer.Exit(code)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Check settings and database, with advice for each problem. Read-only. Exit code 0 if no check failed, else 1."""
    from ecluse.cli.doctor import look

    findings = look()
    healthy = all(finding.level != "fail" for finding in findings)
    if as_json:
        typer.echo(json.dumps({"ok": healthy, "findings": [asdict(finding) for finding in findings]}))
    else:
        for finding in findings:
            advice = f"; {finding.do}" if finding.do else ""
            typer.echo(logging.harmless(f"{finding.level:<4}  {finding.what:<12} {finding.says}{advice}"))
    raise typer.Exit(0 if healthy else 1)


Keep = Annotated[bool, typer.Option("--keep", help="Leave server and sandbox running at the end.")]


@demo.callback()
def demo_default(context: typer.Context) -> None:
    """Run a scripted demonstration, offline, with simulated vendors. Without a name: `automation`."""
    if context.invoked_subcommand is None:
        demo_automation()


@demo.command("automation")
def demo_automation(
    fiches: Annotated[int, typer.Option(help="Number of fiches.", min=10, max=1_000)] = 200,
    keep: Keep = False,
    as_json: JsonLine = False,
    given_database: Annotated[
        bool, typer.Option("--given-database", help="Use the database of DATABASE_URL, which must hold no runs.")
    ] = False,
) -> None:
    """Transcribe and audit the calls of 200 fiches at unreliable vendors, and kill the server half-way."""
    from ecluse.demo import automation

    given = settings.load().DATABASE_URL if given_database else None
    if given_database and given is None:
        raise SetUpError("--given-database needs DATABASE_URL.")
    _play(lambda: automation.run(fiches=fiches, keep=keep, as_json=as_json, given=given))


@demo.command("transcription")
def demo_transcription(as_json: JsonLine = False) -> None:
    """Transcribe 20 fiches at unreliable vendors, kill the server half-way, and compare API, database and vendor."""
    from ecluse.demo import transcription

    _play(lambda: transcription.run(as_json=as_json))


@demo.command("hello")
def demo_hello(keep: Keep = False, as_json: JsonLine = False) -> None:
    """Read 2,000 prices from an unreliable vendor, kill the worker half-way, and account for every price."""
    from ecluse.demo import hello

    _play(lambda: hello.run(keep=keep, as_json=as_json))


def _play(play: Callable[[], int]) -> None:
    logging.configure("WARNING")
    try:
        code = play()
    except KeyboardInterrupt:
        typer.echo("demonstration stopped: its processes and temporary files are removed", err=True)
        code = 130
    raise typer.Exit(code)


def main() -> None:
    logging.configure("WARNING", settings.log_settings()[1])
    try:
        app()
    except EcluseError as error:
        sys.stderr.write(f"ecluse: {logging.harmless(error.message)}\n")
        sys.exit(2)
