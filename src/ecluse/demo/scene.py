"""What every demonstration plays on: simulated vendors, an embedded PostgreSQL of its own, a server that can be killed,
the auditor. Whatever happens, nothing stays behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import dict_row

from ecluse.base.errors import SetUpError
from ecluse.db import embedded

UP_SECONDS = 60.0


@dataclass
class Scene:
    vendor: str  # where the simulated vendors are
    dsn: str
    data: Path
    environment: dict[str, str]
    arguments: Sequence[str]
    process: subprocess.Popen[bytes] | None = None
    port: int = 0

    @property
    def log(self) -> Path:
        return self.data / "serve.log"

    def start_server(self) -> None:
        self.port = self.port or _free_port()
        command = [sys.executable, "-m", "ecluse", "serve", "--port", str(self.port), *self.arguments]
        # Failures are part of the play: what the server says of them is kept, not shown.
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)  # noqa: S603 - ours
        until = time.monotonic() + UP_SECONDS
        while self.process.poll() is None and time.monotonic() < until:
            with suppress(OSError):
                get(f"http://127.0.0.1:{self.port}/readyz")
                return
            time.sleep(0.05)
        said = self.log.read_text(errors="replace").strip().splitlines()[-5:]
        raise SetUpError("\n".join(("The server did not come up. The last that it said:", *said)))

    def kill_server(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()

    def stop_server(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(timeout=20)

    def command(self, *arguments: str) -> str:
        """What our own program prints when it is called like this."""
        command = [sys.executable, "-m", "ecluse", *arguments]
        answer = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)  # noqa: S603
        if answer.returncode:
            raise SetUpError(f"ecluse {' '.join(arguments)}: {answer.stderr.strip()}")
        return answer.stdout

    def query(self, query: str, *parameters: object) -> list[dict[str, Any]]:
        with psycopg.connect(self.dsn, autocommit=True, row_factory=dict_row) as connection:
            return connection.execute(query, parameters or None).fetchall()

    def stats(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(get(f"{self.vendor}/_sandbox/stats"))
        return answer

    def audit(self) -> str | list[dict[str, str]]:
        """ "clean", or the violations."""
        command = [sys.executable, "-m", "ecluse.verify", "--database-url", self.dsn, "--ledger", self.vendor, "--json"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own program
        if not answer.stdout:
            raise SetUpError(f"The auditor could not look: {answer.stderr.strip()}")
        verdict: str | list[dict[str, str]] = json.loads(answer.stdout.splitlines()[-1])["verify"]
        return verdict


@contextmanager
def scene(
    environment: Mapping[str, str], faults: Sequence[Mapping[str, object]], *, arguments: Sequence[str] = ()
) -> Iterator[Scene]:
    """`{vendor}` in the environment's values is where the simulated vendors are."""
    # However it is told to go, it goes through `finally`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    data = Path(tempfile.mkdtemp(prefix="ecluse-demo-"))
    data.chmod(0o711)  # the account that runs PostgreSQL must get through, nobody else may look
    try:
        with _sandbox(faults) as vendor:
            own = {name: value.format(vendor=vendor) for name, value in environment.items()}
            whole = {**os.environ, **own, "ECLUSE_DATA_DIR": str(data / "postgres")}
            whole.pop("DATABASE_URL", None)
            database = embedded.start(data / "postgres")  # the server joins it
            played = Scene(vendor, database.dsn(), data, whole, arguments)
            try:
                played.start_server()
                yield played
            finally:
                played.stop_server()
                database.release()
    finally:
        shutil.rmtree(data, ignore_errors=True)


@contextmanager
def _sandbox(faults: Sequence[Mapping[str, object]]) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "ecluse.sandbox", "--port", "0", "--seed", "7"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline() if process.stdout else ""
        url = line.rsplit(" ", 1)[-1].strip()
        post(f"{url}/_sandbox/faults", faults)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=10)


def wait_for_interrupt() -> None:
    with suppress(KeyboardInterrupt):
        signal.pause()


def get(url: str, key: str | None = None) -> bytes:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as response:  # noqa: S310 - our own
        return bytes(response.read())


def post(url: str, body: object, key: str | None = None) -> Any:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310 - our own
    try:
        with urllib.request.urlopen(request) as response:  # noqa: S310 - our own
            return json.loads(response.read() or b"null")
    except urllib.error.HTTPError as error:
        raise SetUpError(f"{url}: {error.code} {error.read().decode()}") from error


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
