"""One fork server for all fault cases, and the cases that only wait played side by side."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.faults.cases import CASES, Case
from tests.faults.postgres import Postgres, SmallDisk, own_postgres, small_disk
from tests.faults.subjects import SUBJECTS, Subject
from tests.faults.world import World, open_world
from tests.support.fork_server import ForkServer
from tests.support.servers import Server

AT_ONCE = 6
# The replicas of many cases, and for some seconds the sessions of killed ones, share the connections of one server.
SMALL_POOLS = {"ECLUSE_DB_POOL": "3"}
DISK_MEGABYTES = 48
Opened = Callable[..., World]


@contextmanager
def short_folder() -> Iterator[Path]:
    """Under a short path, for the sake of Unix sockets, and open to the account that runs PostgreSQL."""
    folder = Path(tempfile.mkdtemp(prefix="ecl-"))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def shared(server: Server, template: str) -> Postgres:
    return Postgres(server, template)


@pytest.fixture
def world_of(shared: Postgres, fork_server: ForkServer) -> Iterator[Opened]:
    """A world of this subject, on the server that all tests share."""
    with ExitStack() as stack:
        yield lambda subject: stack.enter_context(
            open_world(subject, shared, fork_server, stack.enter_context(short_folder()))
        )


def played(case: Case, subject: Subject, shared: Postgres, fork_server: ForkServer) -> float:
    """Returns how long it took."""
    began = time.monotonic()
    if case.needs == "small disk" and not SmallDisk.possible():
        pytest.skip("a disk of its own is mounted: needs root")
    with ExitStack() as stack:
        folder, tablespace, disk = stack.enter_context(short_folder()), None, None
        postgres = shared if case.needs == "nothing" else stack.enter_context(own_postgres(folder))
        if case.needs == "small disk":
            disk, tablespace = stack.enter_context(small_disk(postgres, folder, DISK_MEGABYTES)), SmallDisk.NAME
        variables = {**case.heart, **(SMALL_POOLS if postgres is shared else {})}
        world = stack.enter_context(
            open_world(subject, postgres, fork_server, folder, heart=variables, tablespace=tablespace)
        )
        world.disk = disk
        case.play(world)
        if case.checked:
            world.wait_until_ended()
            world.check()
    return time.monotonic() - began


@pytest.fixture(scope="session")
def side_by_side(
    request: pytest.FixtureRequest, shared: Postgres, fork_server: ForkServer
) -> dict[tuple[Subject, str], Future[float]]:
    """Most cases are mostly waiting, for heartbeats and quiet periods: those that were asked for are played together,
    before the first of their tests. Those that measure come alone."""
    tests = [item for item in request.session.items if "side_by_side" in getattr(item, "fixturenames", ())]
    asked = [tuple(item.callspec.params[name] for name in ("subject", "case")) for item in tests]  # type: ignore[attr-defined]
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="case") as pool:
        return {
            (subject, case): pool.submit(played, CASES[case], subject, shared, fork_server)
            for subject in SUBJECTS
            for case in CASES
            if (subject, case) in asked
        }
