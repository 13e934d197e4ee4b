"""Fixtures for tests of flows, with real parts: a PostgreSQL database per test, the engine, the sandbox of simulated
vendors, and a clock that can be moved. In a `conftest.py`: `pytest_plugins = ["ecluse.testing"]`.

    def test_prices_are_set(engine, sandbox):
        sandbox.set_faults([{"vendor": "price_list", "kind": "server_error", "times": 3}])
        run = engine.run(FLOW, skus=["SKU-00001"])
        assert run["status"] == "completed"
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from ecluse.db import embedded
from ecluse.db.connect import normalise
from ecluse.db.query import Row, fetch_rows
from ecluse.engine import Flow, Start, start_run
from ecluse.engine.kit import Kit
from ecluse.insight import run_queries
from ecluse.migrations.runner import upgrade
from ecluse.testing.sandbox import SandboxProcess, running_sandbox

MOST = timedelta(minutes=1)


@dataclass(frozen=True)
class Engine:
    """An engine on a database that belongs to one test."""

    dsn: str

    def run(self, flow: Flow, *, max_wait: timedelta = MOST, **given: Any) -> Row:
        """Start a run of the flow with this input and wait for its end, at most `max_wait`. Return the run, ended or
        not; its `outcomes` maps each target to outcome and error code."""
        return asyncio.run(self._run(flow, max_wait, given))

    async def _run(self, flow: Flow, max_wait: timedelta, given: Row) -> Row:
        if flow.schema:
            with psycopg.connect(self.dsn, autocommit=True) as connection:
                connection.execute(flow.schema)  # type: ignore[arg-type, unused-ignore]
        kit = Kit(self.dsn, [flow])
        await kit.start()
        try:
            async with kit.pool.connection() as connection:
                started = await start_run(connection, Start(flow, f"test-{uuid.uuid4()}", input=given))
            await kit.wait_for_run(started.run.id, max_wait)
            async with kit.pool.connection() as connection:
                run = await run_queries.show_run(connection, started.run.tenant_id, started.run.id)
                sql = "SELECT target, outcome, error_code FROM outcomes WHERE run_id = %s ORDER BY target"
                rows = await fetch_rows(connection, sql, (started.run.id,))
        finally:
            await kit.stop()
        return {**run, "outcomes": {target: (outcome, code) for target, outcome, code in rows}}

    def ask(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Return the rows of a query on the test's database."""
        with psycopg.connect(self.dsn) as connection:
            return connection.execute(sql, parameters or None).fetchall()  # type: ignore[arg-type, unused-ignore]

    def move_clock(self, by: timedelta) -> None:
        """Add `by` to the time that Ecluse reads, in all processes that use this database."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute('UPDATE clock_offset SET "offset" = "offset" + %s', (by,))
            connection.execute("SELECT pg_notify('ecluse_clock', '')")


@pytest.fixture(scope="session")
def ecluse_server() -> Iterator[tuple[embedded.Embedded, str]]:
    """An embedded PostgreSQL with a migrated database to copy, for all tests of the session."""
    folder = Path(tempfile.mkdtemp(prefix="ecluse-testing-"))
    folder.chmod(0o711)
    server = embedded.start(folder / "postgres")
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE DATABASE ecluse_template TEMPLATE template0")
    upgrade(normalise(server.dsn("ecluse_template")))
    yield server, "ecluse_template"
    server.release()
    shutil.rmtree(folder)


@pytest.fixture
def engine(ecluse_server: tuple[embedded.Embedded, str]) -> Iterator[Engine]:
    """An engine on an empty, migrated database."""
    server, template = ecluse_server
    name = f"test_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")  # type: ignore[arg-type, unused-ignore]
    yield Engine(normalise(server.dsn(name)))
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")  # type: ignore[arg-type, unused-ignore]


@pytest.fixture(scope="session")
def sandbox_process() -> Iterator[SandboxProcess]:
    with running_sandbox() as process:
        yield process


@pytest.fixture
def sandbox(sandbox_process: SandboxProcess, monkeypatch: pytest.MonkeyPatch) -> SandboxProcess:
    """The simulated vendors, without faults and with an empty ledger; `PRICE_LIST_URL` leads to their price list."""
    sandbox_process.set_faults([])
    sandbox_process.reset()
    monkeypatch.setenv("PRICE_LIST_URL", f"{sandbox_process.url}/price-list")
    return sandbox_process
