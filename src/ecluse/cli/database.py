"""Commands on the database itself: migrate, psql, verify."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from ecluse import bootstrap, settings
from ecluse.base import logging
from ecluse.cli import show
from ecluse.cli.failure import OK
from ecluse.db import embedded


def migrate(flows: Sequence[str], *, as_json: bool) -> int:
    from ecluse.migrations import runner

    logging.configure("WARNING", settings.log_settings()[1])
    given = settings.load()
    database = bootstrap.open_database(given)
    try:
        packages = bootstrap.load_packages(given, flows)
        schema = runner.upgrade(database.dsn, bootstrap.load_flows(given, flows), packages)
    finally:
        database.release()
    if as_json:
        show.write_json({"schema": schema})
    else:
        show.write(f"schema {schema}")
    return OK


def psql(arguments: Sequence[str]) -> int:
    logging.configure("WARNING", settings.log_settings()[1])
    database = bootstrap.open_database(settings.load())
    # Run psql as a child, not by exec: this process keeps the embedded server up while psql runs. Ctrl-C is left to
    # psql. The password goes through the environment, because all users of the host can read command lines.
    signal.signal(signal.SIGINT, lambda *_: None)
    address = conninfo_to_dict(database.dsn)
    environment = {**os.environ, "PGPASSWORD": str(address.pop("password", os.environ.get("PGPASSWORD", "")))}
    command = [str(embedded.psql()), make_conninfo("", **address), *arguments]
    try:
        return subprocess.run(command, env=environment, check=False).returncode  # noqa: S603 - what psql is for
    finally:
        database.release()


def verify(ledger: str | None, *, as_json: bool) -> int:
    from ecluse.verify.__main__ import run

    logging.configure("WARNING", settings.log_settings()[1])
    given = settings.load()
    invariants = [one for package in bootstrap.load_packages(given) for one in package.invariants]
    database = bootstrap.open_database(given)
    try:
        return run(database.dsn, ledger, as_json=as_json, more=invariants)
    finally:
        database.release()
