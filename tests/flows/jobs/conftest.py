"""One server and one database for all tests of jobs in a file, with short leases; hosts are each test's own."""

from __future__ import annotations

import pytest

from tests.support.api_server import new_key, serving
from tests.support.job_world import JobWorld

LEASE = 3.0


@pytest.fixture(scope="module")
def shared_dsn(databases):
    with databases.one() as dsn:
        yield dsn


@pytest.fixture(scope="module")
def job_server(shared_dsn):
    knobs = {"ECLUSE_JOB_LEASE_SECONDS": LEASE, "ECLUSE_JOB_PENDING_SECONDS": 3600}
    with serving(shared_dsn, roles=frozenset({"api", "scheduler"}), **knobs) as client:
        yield client.with_key(new_key(shared_dsn))


@pytest.fixture
def world(job_server, tmp_path):
    world = JobWorld(job_server, tmp_path)
    yield world
    world.close()
