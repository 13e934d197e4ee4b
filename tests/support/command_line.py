"""The command line as an operator uses it: processes, exit codes, what they print."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ecluse.engine import Flow
from tests.support.fork_server import ROOT, ForkServer, environment, running_fork_server

__all__ = ["EXAMPLES", "ROOT", "Answer", "Server", "environment", "free_port"]
EXAMPLES = ROOT / "examples"


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """The program, loaded once for all commands and servers of the tests."""
    with tempfile.TemporaryDirectory(prefix="ecl-") as folder, running_fork_server(Path(folder)) as one:
        yield one


@pytest.fixture(scope="session")
def bare(fork_server) -> Callable[..., Answer]:
    """`ecluse …` with exactly the variables given."""
    return lambda *arguments, **variables: Answer(*fork_server.run("ecluse", arguments, variables))


@pytest.fixture
def ecluse(bare, dsn) -> Callable[..., Answer]:
    """`ecluse …` on the test's database: commands of the host."""

    def run(*arguments: str, **variables: str) -> Answer:
        return bare(*arguments, **({"DATABASE_URL": dsn} | variables))

    return run


@dataclass(frozen=True)
class Operator:
    """`ecluse …` with an administrator's key, at a server of the test's database."""

    bare: Callable[..., Answer]
    variables: dict[str, str]

    def __call__(self, *arguments: str, **variables: str) -> Answer:
        return self.bare(*arguments, **(self.variables | variables))

    def done(self, *arguments: str, **variables: str) -> Any:
        """The answer of a command that succeeds."""
        answer = self(*arguments, "--json", **variables)
        assert answer.code == 0, answer
        return answer.json


@pytest.fixture
def operator(bare, dsn) -> Iterator[Operator]:
    with operating(bare, dsn) as one:
        yield one


@contextlib.contextmanager
def operating(bare: Callable[..., Answer], dsn: str, *flows: Flow, **knobs: Any) -> Iterator[Operator]:
    from hello_flow import FLOW as HELLO  # here: this file is imported by all tests, and a server takes long to import
    from tests.support.api_server import new_key, serving

    with serving(dsn, HELLO, *flows, **knobs) as client:
        variables = {"ECLUSE_URL": f"http://127.0.0.1:{client.port}", "ECLUSE_KEY": new_key(dsn, "admin")}
        yield Operator(bare, {"DATABASE_URL": dsn, **variables})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A real `ecluse serve`, in a process of its own."""

    def __init__(self, fork_server: ForkServer, *arguments: str, **variables: str) -> None:
        self.port = free_port()
        self._fork_server = fork_server
        self.variables = {"ECLUSE_DATA_DIR": fork_server.new_folder()} | variables
        self.process = fork_server.start("ecluse", ["serve", "--port", str(self.port), *arguments], self.variables)

    def ecluse(self, *arguments: str) -> Answer:
        """A command on the server's host; it waits for the server."""
        return Answer(*self._fork_server.run("ecluse", arguments, self.variables))

    def done(self, *arguments: str) -> Any:
        answer = self.ecluse(*arguments, "--json")
        assert answer.code == 0, answer
        return answer.json

    def get(self, path: str) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def wait_until_ready(self) -> dict[str, str]:
        until = time.monotonic() + 40
        while time.monotonic() < until and self.process.poll() is None:
            with contextlib.suppress(OSError):
                status, answer = self.get("/readyz")
                if status == 200:
                    return dict(answer)
            time.sleep(0.05)
        raise AssertionError(f"the server is not ready: {self.end(signal.SIGKILL)}")

    def end(self, signum: signal.Signals = signal.SIGTERM) -> tuple[int, float, str]:
        """Exit code, seconds it took, what it said."""
        began = time.monotonic()
        self.process.signal(signum)
        code, seconds = self.process.wait(30), time.monotonic() - began
        return code, seconds, self.process.said()


@pytest.fixture
def serve(dsn, fork_server) -> Iterator[Callable[..., Server]]:
    """Servers on the test's database; whatever still runs at the end is killed."""
    servers: list[Server] = []

    def start(*arguments: str, **variables: str) -> Server:
        servers.append(Server(fork_server, *arguments, **({"DATABASE_URL": dsn} | variables)))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.end(signal.SIGKILL)
