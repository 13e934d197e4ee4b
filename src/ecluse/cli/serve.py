"""`ecluse serve`: load settings and flows, open and migrate the database, and run the server until it is stopped."""

from __future__ import annotations

import gc
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ecluse.base.errors import SetUpError
from ecluse.cli import operator_file


def run(flows: Sequence[str], host: str | None, port: int | None, roles: Sequence[str] | None) -> int:
    # Turn SIGTERM into SystemExit: `finally` must run, or the embedded PostgreSQL would be left running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if roles and "api" not in roles:
        return _serve(flows, host, port, roles, lambda *_: None)
    folder = operator_file.data_dir()
    try:
        operator_file.announce(folder)  # first: the imports below take seconds, and commands wait meanwhile
    except OSError as error:
        problem = error
        return _serve(flows, host, port, roles, lambda *_: _warn(problem))
    try:
        return _serve(flows, host, port, roles, partial(_let_operator_in, folder))
    finally:
        operator_file.leave(folder)


def _warn(problem: OSError) -> None:
    from ecluse.cli import welcome

    welcome.log.warning("server: operator.json was not written, commands on this host need --url", error=str(problem))


def _let_operator_in(folder: Path, listener: socket.socket, dsn: str) -> None:
    from ecluse.cli import welcome

    welcome.let_operator_in(folder, listener, dsn)


def _serve(
    flows: Sequence[str],
    host: str | None,
    port: int | None,
    chosen: Sequence[str] | None,
    before_serving: Callable[[socket.socket, str], None],
) -> int:
    gc.disable()  # collecting garbage, of which there is none, would take a fifth of the time of these imports
    from ecluse import bootstrap, settings
    from ecluse.app import Server, create_app
    from ecluse.base import descriptors, logging
    from ecluse.cli import welcome
    from ecluse.engine import ROLES, Role
    from ecluse.migrations import runner

    gc.enable()
    descriptors.raise_limit()
    logging.configure(*settings.log_settings())
    welcome.name_program()
    given = settings.load()
    logging.configure(given.ECLUSE_LOG_LEVEL, given.ECLUSE_LOG_FORMAT)
    loaded, packages = bootstrap.load_flows(given, flows), bootstrap.load_packages(given, flows)
    with _bound(host or given.ECLUSE_HOST, given.ECLUSE_PORT if port is None else port) as listener:
        database = bootstrap.open_database(given)
        try:
            runner.upgrade(database.dsn, loaded, packages)
            roles: frozenset[Role] = frozenset(one for one in ROLES if one in chosen) if chosen else ROLES
            application = create_app(given, database, loaded, roles, packages=packages)
            server = Server(application)
            # uvicorn raises the signal that stopped it again after its shutdown: ignore it, the server is down by then.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: setattr(server, "should_exit", True))
            welcome.log.info("server: listening", address=listener.getsockname()[:2])
            if "api" in roles:
                welcome.say_where(listener, database.dsn, given.ECLUSE_PUBLIC_URL)
            before_serving(listener, database.dsn)
            server.run(sockets=[listener])
        finally:
            database.release()
    if not server.started:
        return 3
    return 70 if application.state.kit.broken.is_set() else 0


def _bound(host: str, port: int) -> socket.socket:
    """Return a listening socket; raise SetUpError if the address cannot be bound. Called before the database is opened:
    a server that cannot listen must not join the cluster."""
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
