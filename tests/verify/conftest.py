"""The world of `world.py`, in order, with a database of the test's own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from ecluse.testing.sandbox import SandboxProcess
from tests.support.databases import Databases
from tests.support.servers import Server, database, own_name
from tests.verify.world import AS_IF_OLD, World, healthy

FRESH_SECONDS = 20.0  # much less than what may stay open in a world in order, such as a lease


class Worlds:
    """Worlds in order. To make one takes hundreds of statements: tests get copies of its database, until a test calls
    the vendor (a ledger cannot be copied) or it is no longer fresh."""

    def __init__(self, server: Server, template: str, sandbox: SandboxProcess) -> None:
        self._server, self._template, self._sandbox = server, template, sandbox
        self._parts = ExitStack()
        self._make()

    @contextmanager
    def one(self) -> Iterator[World]:
        if time.monotonic() > self._fresh_until or self._sandbox.stats() != self._stats:
            self._make()
        with self._copies.one() as dsn:
            world = World(dsn, self._sandbox)
            with world.db:
                world.runs, world.items, world.effects = map(dict, self._ids)
                world.sql(AS_IF_OLD)
                world.sql("UPDATE replicas SET beat_at = now() WHERE state = 'live'")  # the copy may be 20 s old
                yield world

    def close(self) -> None:
        self._parts.close()

    def _make(self) -> None:
        self.close()
        self._sandbox.reset()
        name = own_name("world")
        made = World(self._parts.enter_context(database(self._server, name, self._template)), self._sandbox)
        with made.db:
            healthy(made)
        self._ids: tuple[dict[str, Any], ...] = (made.runs, made.items, made.effects)
        self._stats = self._sandbox.stats()
        self._copies = Databases(self._server, name)
        self._parts.callback(self._copies.close)
        self._fresh_until = time.monotonic() + FRESH_SECONDS


@pytest.fixture(scope="module")
def worlds(server: Server, template: str, sandbox_server: SandboxProcess) -> Iterator[Worlds]:
    made = Worlds(server, template, sandbox_server)
    yield made
    made.close()


@pytest.fixture
def world(worlds: Worlds) -> Iterator[World]:
    with worlds.one() as one:
        yield one
