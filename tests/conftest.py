"""One embedded PostgreSQL for the session, one migrated template, and a clone of it per test: real databases, cheap."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from ecluse.db import embedded
from ecluse.db.connect import normalise
from ecluse.engine import Flow, Kit
from ecluse.migrations.runner import upgrade
from tests.sandbox_process import SandboxProcess, running_sandbox


@pytest.fixture(scope="session", autouse=True)
def _compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where nothing may be compiled beside the sources, every process would compile the whole program anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        patch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path_factory.mktemp("compiled")))
        yield


@pytest.fixture(scope="session")
def server() -> Iterator[embedded.Embedded]:
    folder = Path(tempfile.mkdtemp(prefix="ecluse-tests-"))
    folder.chmod(0o711)
    handle = embedded.start(folder / "postgres")
    yield handle
    handle.release()
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def template(server: embedded.Embedded) -> str:
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE DATABASE template_ecluse")
    upgrade(normalise(server.dsn("template_ecluse")))
    return "template_ecluse"


@contextmanager
def new_database(server: embedded.Embedded, template: str) -> Iterator[str]:
    name = f"test_{os.getpid()}_{uuid.uuid4().hex[:8]}"  # not counted: this module is imported under two names
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY wal_log")  # type: ignore[arg-type]
        yield normalise(server.dsn(name))
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")  # type: ignore[arg-type]


@pytest.fixture
def dsn(server: embedded.Embedded, template: str) -> Iterator[str]:
    """A migrated, empty database of this test's own."""
    with new_database(server, template) as dsn:
        yield dsn


@pytest.fixture
def empty_dsn(server: embedded.Embedded) -> Iterator[str]:
    """A database without any schema."""
    with new_database(server, "template0") as dsn:
        yield dsn


@pytest.fixture
def query(dsn: str) -> Callable[..., list[Any]]:
    """Ask the test's database: rows as tuples."""

    def ask(sql: str, *parameters: object) -> list[Any]:
        with psycopg.connect(dsn, autocommit=True) as connection:
            cursor = connection.execute(sql, parameters or None)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []

    return ask


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
        kit = Kit(dsn=dsn, flows=flows, **options)
        await kit.start()
        kits.append(kit)
        return kit

    yield start
    for kit in kits:
        if kit.running:
            await kit.stop()


@pytest.fixture(scope="session")
def sandbox_server() -> Iterator[SandboxProcess]:
    with running_sandbox(seed=1) as process:
        yield process


@pytest.fixture
def sandbox(sandbox_server: SandboxProcess) -> SandboxProcess:
    """Simulated vendors in a process of their own, as good as new."""
    sandbox_server.reset()
    return sandbox_server
