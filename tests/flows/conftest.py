"""A connection of the test's own."""

from __future__ import annotations

import psycopg
import pytest


@pytest.fixture
async def connection(dsn):
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        yield connection
