"""A real server in a thread of this process, with nobody working: what is asked for stays as it is until we look."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.api_server import FLOW, Client, new_key, serving


@pytest.fixture(scope="module")
def shared_dsn(databases) -> Iterator[str]:
    with databases.one() as dsn:
        yield dsn


@pytest.fixture(scope="module")
def shared_api(shared_dsn) -> Iterator[Client]:
    """One server and one database for a whole file, with an operator's key of tenant `default`."""
    with serving(shared_dsn, FLOW) as client:
        yield client.with_key(new_key(shared_dsn))


@pytest.fixture
def api(dsn) -> Iterator[Client]:
    """A server on the test's own database, with an operator's key of tenant `default`."""
    with serving(dsn, FLOW) as client:
        yield client.with_key(new_key(dsn))


@pytest.fixture
def make_key(dsn) -> Callable[..., str]:
    return lambda *arguments, **options: new_key(dsn, *arguments, **options)
