"""`ecluse …`: every command, in one list. Errors meant for the operator end with exit code 2 and one clear message."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
import uvicorn

from ecluse import bootstrap, settings
from ecluse.app import create_app
from ecluse.base import logging
from ecluse.base.errors import EcluseError
from ecluse.cli import runs
from ecluse.db import embedded
from ecluse.demo import hello
from ecluse.migrations import runner
from ecluse.sandbox.__main__ import main as sandbox_main

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Periodic work over records held in other people's systems, with one truthful outcome per record.",
)
app.add_typer(runs.app, name="runs")
demo = typer.Typer(no_args_is_help=True, help="Scripted demonstrations, offline, with simulated vendors.")
app.add_typer(demo, name="demo")

FlowOption = Annotated[list[str] | None, typer.Option("--flow", help="A flow to load, as package:NAME. Repeatable.")]


@app.command()
def serve(
    flow: FlowOption = None,
    host: Annotated[str | None, typer.Option(help="Default: ECLUSE_HOST.")] = None,
    port: Annotated[int | None, typer.Option(help="Default: ECLUSE_PORT.", min=0, max=65535)] = None,
) -> None:
    """Run the server: API, scheduler and worker in one process. Start it again to add a replica."""
    given = settings.load()
    logging.configure(given.ECLUSE_LOG_LEVEL, given.ECLUSE_LOG_FORMAT)
    flows = bootstrap.load_flows(given, flow or ())
    database = bootstrap.open_database(given)
    try:
        runner.upgrade(database.dsn, flows)
        uvicorn.run(
            create_app(given, database, flows),
            host=host or given.ECLUSE_HOST,
            port=given.ECLUSE_PORT if port is None else port,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=5,
        )
    finally:
        database.release()


@app.command()
def migrate(flow: FlowOption = None) -> None:
    """Bring the database to this program's schema. Servers do it by themselves when they start."""
    given = settings.load()
    logging.configure("WARNING", given.ECLUSE_LOG_FORMAT)
    database = bootstrap.open_database(given)
    try:
        typer.echo(f"schema {runner.upgrade(database.dsn, bootstrap.load_flows(given, flow or ()))}")
    finally:
        database.release()


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def psql(context: typer.Context) -> None:
    """Open psql on the database in use; further arguments go to psql."""
    database = bootstrap.open_database(settings.load())
    # A child, not exec: this process keeps the embedded server up for as long as psql runs.
    program = str(embedded.binaries() / "psql")
    code = subprocess.run([program, database.dsn, *context.args], check=False).returncode  # noqa: S603 - what psql is for
    database.release()
    raise typer.Exit(code)


@app.command()
def sandbox(
    port: Annotated[int, typer.Option(help="0 is any free port.", min=0, max=65535)] = 8089,
    seed: Annotated[int, typer.Option(help="The same seed gives the same records and the same faults.")] = 1,
    faults: Annotated[Path | None, typer.Option(help="A JSON file with fault rules to start with.")] = None,
) -> None:
    """Simulate the vendors on the wire, with faults on demand and a ledger of every call they received."""
    arguments = ["--port", str(port), "--seed", str(seed), *(["--faults", str(faults)] if faults else [])]
    raise typer.Exit(sandbox_main(arguments))


@demo.command("hello")
def demo_hello(
    keep: Annotated[bool, typer.Option("--keep", help="Leave server and sandbox running at the end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Read 2,000 prices from a flaky vendor, kill the worker half-way, and account for every one."""
    logging.configure("WARNING")
    raise typer.Exit(hello.run(keep=keep, as_json=as_json))


def main() -> None:
    try:
        app()
    except EcluseError as error:
        sys.stderr.write(f"ecluse: {error.message}\n")
        sys.exit(2)
