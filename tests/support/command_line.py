"""The command line as an operator uses it: processes, exit codes, what they print."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ecluse.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without our knobs, plus these."""
    inherited = {name: value for name, value in os.environ.items() if name not in Settings.model_fields}
    ours = {"PYTHONPATH": f"{EXAMPLES}:{ROOT / 'src'}", "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    return inherited | ours | variables


@pytest.fixture(scope="session")
def preloaded() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.support.preloaded_program"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(10) == 0


@pytest.fixture
def bare(preloaded, tmp_path) -> Callable[..., Answer]:
    """`ecluse …` with exactly the variables given."""

    def run(*arguments: str, **variables: str) -> Answer:
        files = {"stdout": tmp_path / "stdout", "stderr": tmp_path / "stderr"}
        for file in files.values():
            file.unlink(missing_ok=True)
        request = {"arguments": arguments, "environment": environment(**variables)}
        preloaded.stdin.write(json.dumps(request | {name: str(path) for name, path in files.items()}) + "\n")
        preloaded.stdin.flush()
        code = int(preloaded.stdout.readline())
        return Answer(code, files["stdout"].read_text(), files["stderr"].read_text())

    return run


@pytest.fixture
def ecluse(bare, dsn) -> Callable[..., Answer]:
    """`ecluse …` on the test's database."""

    def run(*arguments: str, **variables: str) -> Answer:
        return bare(*arguments, **({"DATABASE_URL": dsn} | variables))

    return run


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A real `ecluse serve`, in a process of its own."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "ecluse", "serve", "--port", str(self.port), *arguments]
        # Not a pipe: one that nobody reads is full after 64 kB, and then the server stands still.
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed when the server has ended
        self.process = subprocess.Popen(command, env=environment(**variables), stderr=self._said)

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
        if self.process.poll() is None:
            self.process.send_signal(signum)
        code, seconds = self.process.wait(30), time.monotonic() - began
        with self._said:
            self._said.seek(0)
            return code, seconds, self._said.read()


@pytest.fixture
def serve(dsn) -> Iterator[Callable[..., Server]]:
    """Servers on the test's database; whatever still runs at the end is killed."""
    servers: list[Server] = []

    def start(*arguments: str, **variables: str) -> Server:
        servers.append(Server(*arguments, **({"DATABASE_URL": dsn} | variables)))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.end(signal.SIGKILL)
        server._said.close()
