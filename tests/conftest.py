"""One PostgreSQL for the session, the one in DATABASE_URL or an embedded one; one migrated template, and a clone of it
per test: real databases, cheap."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from ecluse.db import embedded
from ecluse.engine import Flow
from ecluse.engine.kit import Kit
from ecluse.migrations.runner import upgrade
from ecluse.testing.sandbox import SandboxProcess, running_sandbox
from tests.support.databases import Databases
from tests.support.servers import Given, Server, database, own_name
from tests.support.session import Session

pytest_plugins = ["tests.support.command_line", "tests.support.demos", "tests.support.flow_fixtures"]

# A database per test takes seconds to make and drop on a busy disk, and a fifth of a second in memory.
MEMORY, ROOM = Path("/dev/shm"), 6 * 2**30  # noqa: S108 - each name in it is made by mkdtemp
if "TMPDIR" not in os.environ and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM:
    os.environ["TMPDIR"] = str(MEMORY)
    tempfile.tempdir = None  # read again


# Where nothing may be compiled beside the sources, this process and each that it starts would compile all they import.
sys.dont_write_bytecode, sys.pycache_prefix = False, str(Path(__file__).parents[1] / ".pytest_cache" / "compiled")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix


gc.disable()  # while all tests are imported: nothing of it is garbage


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, so that at the end no worker waits for one of them."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> Iterator[None]:
    """A shell makes what it runs in the background ignore SIGINT, and so do all its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def given_url() -> Iterator[str | None]:
    """DATABASE_URL, which no test and none of its children finds in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        url = os.environ.get("DATABASE_URL")
        patch.delenv("DATABASE_URL", raising=False)
        yield url


@pytest.fixture(scope="session")
def server(given_url: str | None) -> Iterator[Server]:
    if given_url:
        yield Given(given_url)
        return
    folder = Path(tempfile.mkdtemp(prefix="ecluse-tests-"))
    folder.chmod(0o711)
    handle = embedded.start(folder / "postgres")
    yield handle
    handle.release()
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def template(server: Server) -> Iterator[str]:
    """Of this process alone: others may use the same server at the same time."""
    name = own_name("template")
    with database(server, name, "template0") as dsn:
        upgrade(dsn)
        yield name


@pytest.fixture(scope="session")
def databases(server: Server, template: str) -> Iterator[Databases]:
    made = Databases(server, template)
    yield made
    made.close()


@pytest.fixture
def dsn(databases: Databases) -> Iterator[str]:
    """A migrated, empty database of this test's own."""
    with databases.one() as dsn:
        yield dsn


@pytest.fixture
def empty_dsn(server: Server) -> Iterator[str]:
    """A database without any schema."""
    with database(server, own_name("empty"), "template0") as dsn:
        yield dsn


@pytest.fixture
def query(dsn: str) -> Iterator[Callable[..., list[Any]]]:
    """Ask the test's database: rows as tuples."""
    session = Session(dsn)
    yield session.ask
    session.close()


@pytest.fixture
def one(query: Callable[..., list[Any]]) -> Callable[..., Any]:
    """Ask for one row; a row of one column is its value."""

    def ask(sql: str, *parameters: object) -> Any:
        (row,) = query(sql, *parameters)
        return row[0] if len(row) == 1 else row

    return ask


@pytest.fixture
async def start_kit(dsn: str) -> AsyncIterator[Callable[..., Awaitable[Kit]]]:
    """Start an engine on the test's database; it is stopped at the end."""
    kits: list[Kit] = []

    async def start(*flows: Flow, **options: Any) -> Kit:
        for flow in flows:
            if flow.schema:
                async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
                    await connection.execute(flow.schema)  # type: ignore[arg-type]
        kit = Kit(flows=flows, **({"dsn": dsn} | options))
        await kit.start()
        kits.append(kit)
        return kit

    yield start
    for kit in kits:
        if kit.running:
            await kit.stop(grace=0.05)


@pytest.fixture(scope="session")
def sandbox_server() -> Iterator[SandboxProcess]:
    with running_sandbox(seed=1) as process:
        yield process


@pytest.fixture
def sandbox(sandbox_server: SandboxProcess) -> SandboxProcess:
    """Simulated vendors in a process of their own, as good as new."""
    sandbox_server.reset()
    return sandbox_server
