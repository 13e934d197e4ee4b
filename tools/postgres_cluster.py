"""Run a command with a PostgreSQL cluster of its own: `python -m tools.postgres_cluster BIN_DIRECTORY COMMAND …`

The cluster is created in a temporary directory with the programs of BIN_DIRECTORY and the default settings of a package
(JIT included; only the number of connections is raised), and runs as an ordinary user. The command gets three
variables: DATABASE_URL for a role with CREATEDB and no other privilege, ECLUSE_TEST_OWNER_URL for a role without
CREATEDB, of which the first is a member, and ECLUSE_TEST_POSTGRES_BIN, the directory. The cluster is deleted at the
end, however the command ended.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from ecluse.base.errors import SetUpError
from ecluse.db.postgres_user import Account, account_for

CONNECTIONS = 500  # three test workers share the cluster, and fault cases start several replicas each
ROLE = "tester"
OWNER = "owner"  # owns databases that the other role creates for it


@contextmanager
def cluster(programs: Path) -> Iterator[dict[str, str]]:
    """Run a cluster with the programs in this directory; yield the URLs of two ordinary roles by the names of the
    environment variables that tests read. The cluster is deleted at the end."""
    folder = Path(tempfile.mkdtemp(prefix="ecl-pg-"))
    folder.chmod(0o711)  # PostgreSQL's account must pass through; only the owner may list
    data, log = folder / "data", folder / "log"
    account = account_for(data)
    try:
        account.make_private_dir(data)
        account.make_private_dir(folder / "run")
        log.touch()
        os.chown(log, account.uid, account.gid)
        # TCP needs a password, as with a remote server; the local socket is for the administrator.
        auth = ("--auth-local=trust", "--auth-host=scram-sha-256")
        _done(account, programs / "initdb", "-D", data, "-U", "postgres", "--encoding=UTF8", "--locale=C.UTF-8", *auth)
        port = _free_port()
        settings = f"-c port={port} -c listen_addresses=127.0.0.1 -c max_connections={CONNECTIONS}"
        options = f"{settings} -c unix_socket_directories={folder / 'run'}"
        _done(account, programs / "pg_ctl", "start", "-w", "-D", data, "-l", log, "-o", options)
        try:
            yield _make_roles(folder / "run", port)
        finally:
            _done(account, programs / "pg_ctl", "stop", "-m", "fast", "-D", data)
    finally:
        shutil.rmtree(folder)


def _make_roles(socket_directory: Path, port: int) -> dict[str, str]:
    password = secrets.token_urlsafe(12)
    admin = f"host={socket_directory} port={port} user=postgres dbname=postgres"
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {OWNER} LOGIN PASSWORD '{password}'".encode())
        connection.execute(f"CREATE ROLE {ROLE} LOGIN CREATEDB PASSWORD '{password}' IN ROLE {OWNER}".encode())
        connection.execute(f"CREATE DATABASE {ROLE} OWNER {ROLE}".encode())
    urls = {"DATABASE_URL": ROLE, "ECLUSE_TEST_OWNER_URL": OWNER}
    return {name: f"postgresql://{role}:{password}@127.0.0.1:{port}/{ROLE}" for name, role in urls.items()}


def _done(account: Account, *command: str | Path) -> None:
    done = account.run(*command)
    if done.returncode != 0:
        raise SetUpError(f"{command[0]}: {done.stderr or done.returncode}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def main(programs: str, *command: str) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `finally` runs
    with cluster(Path(programs)) as urls:
        environment = os.environ | urls | {"ECLUSE_TEST_POSTGRES_BIN": programs}
        return subprocess.run(command, env=environment, check=False).returncode  # noqa: S603 - the caller's command


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
