"""The environment of every demonstration: simulated vendors, an embedded PostgreSQL of its own or a given database, a
server that can be killed, the auditor. At the end all of it is stopped and removed; only the rows in a given database
stay."""

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
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import dict_row
from rich.console import Console

from ecluse.base.errors import SetUpError
from ecluse.db import embedded
from ecluse.db.connect import check, normalise
from ecluse.settings import Settings

UP_SECONDS = 120.0
DOWN_SECONDS = 20.0
ANSWER_SECONDS = 30.0
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Scene:
    """A running demonstration: the simulated vendors, the database, and the server process with its
    `environment`. Files are in `data`."""

    vendor: str  # URL of the simulated vendors
    dsn: str
    data: Path
    environment: dict[str, str]
    psql: str  # command that opens psql on the database
    process: subprocess.Popen[bytes] | None = None
    port: int = 0

    @property
    def log(self) -> Path:
        return self.data / "serve.log"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start_server(self) -> None:
        """Start the server, on the same port each time, and wait until it is ready. Raise SetUpError, with its last log
        lines, if it exits or is not ready within UP_SECONDS."""
        self.port = self.port or _free_port()
        command = [sys.executable, "-m", "ecluse", "serve", "--port", str(self.port)]
        # Failures are part of the demonstration: the server's output goes to a file, not to the terminal.
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(  # noqa: S603 - our own program
                command, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )
        until = time.monotonic() + UP_SECONDS
        while self.process.poll() is None and time.monotonic() < until:
            with suppress(OSError):
                get(f"{self.url}/readyz")
                return
            time.sleep(0.05)
        raise SetUpError(not_started(self.process.poll(), self.log.read_text(errors="replace")))

    def kill_server(self) -> None:
        """Kill the server (SIGKILL) and wait for its end."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()

    def stop_server(self) -> None:
        """Stop the server normally."""
        if self.process is not None:
            _end(self.process)

    def operator_key(self) -> str:
        """Return the key that the server has written for the operator of this host."""
        written: dict[str, Any] = json.loads((self.data / "postgres" / "operator.json").read_text())
        return str(written["key"])

    def query(self, query: str, *parameters: object) -> list[dict[str, Any]]:
        """Run a query on the database and return its rows."""
        with psycopg.connect(self.dsn, autocommit=True, row_factory=dict_row) as connection:
            return connection.execute(query, parameters or None).fetchall()

    def stats(self) -> dict[str, Any]:
        """Return the sandbox's counts by vendor."""
        answer: dict[str, Any] = json.loads(get(f"{self.vendor}/_sandbox/stats"))
        return answer

    def paid(self, vendor: str) -> list[str]:
        """Return the records that the vendor charged for, from its ledger; a record charged twice is there twice."""
        return [entry["ref"] for entry in self.ledger(vendor, "paid")]

    def ledger(self, vendor: str, kind: str) -> list[dict[str, Any]]:
        """Return the entries of this kind in the vendor's ledger, 10,000 at most."""
        found: list[dict[str, Any]] = json.loads(
            get(f"{self.vendor}/_sandbox/ledger?vendor={vendor}&kind={kind}&limit=10000")
        )["entries"]
        return found

    def audit(self) -> str | list[dict[str, str]]:
        """Run the auditor; return "clean" or the violations. Raise SetUpError if it prints no verdict."""
        address = conninfo_to_dict(self.dsn)
        environment = {**self.environment, "PGPASSWORD": str(address.pop("password", ""))}  # not in the process list
        where = ("--database-url", make_conninfo("", **address), "--ledger", self.vendor)
        command = [sys.executable, "-m", "ecluse.verify", *where, "--json"]
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
        if not answer.stdout:
            raise SetUpError(f"The auditor failed: {answer.stderr.strip()}")
        verdict: str | list[dict[str, str]] = json.loads(answer.stdout.splitlines()[-1])["verify"]
        return verdict


@contextmanager
def scene(
    environment: Mapping[str, str], faults: Sequence[Mapping[str, object]], *, given: str | None = None
) -> Iterator[Scene]:
    """Start the processes that a demonstration needs, yield them, and stop them at the end. `{vendor}` in the
    environment's values becomes the URL of the simulated vendors. Knobs in the caller's environment are dropped: a
    demonstration touches no database but the `given` one, and does not use the caller's mail server."""
    with _tidy(), _folder() as data, _database(data, given) as (dsn, reached_by), _sandbox(faults) as vendor:
        own = {name: value.format(vendor=vendor) for name, value in environment.items()}
        whole = {**_inherited(data), **own, **reached_by, "no_proxy": "127.0.0.1"}
        where = "DATABASE_URL=…" if given else f"ECLUSE_DATA_DIR={data}/postgres"
        played = Scene(vendor, dsn, data, whole, f"{where} {sys.executable} -m ecluse psql")
        try:
            played.start_server()
            yield played
        finally:
            _ignore_signals()
            played.stop_server()


@contextmanager
def _database(data: Path, given: str | None) -> Iterator[tuple[str, dict[str, str]]]:
    """Provide the database, the given one or an embedded server; yield its DSN and the knobs by which the server finds
    it."""
    knobs = {"ECLUSE_DATA_DIR": str(data / "postgres")}
    if given is not None:
        dsn = normalise(given)
        check(dsn)
        _refuse_used(dsn)
        yield dsn, {**knobs, "DATABASE_URL": dsn, "ECLUSE_SECRET_KEY": b64encode(os.urandom(32)).decode()}
        return
    database = embedded.start(data / "postgres")  # `ecluse serve` joins it
    try:
        yield database.dsn(), knobs
    finally:
        database.release()


def _refuse_used(dsn: str) -> None:
    """Raise SetUpError if the database has runs or schedules."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for table in ("runs", "schedules"):
            if connection.execute("SELECT 1 WHERE to_regclass(%s) IS NOT NULL", (table,)).fetchone():
                ((count,),) = connection.execute(f"SELECT count(*) FROM {table}").fetchall()  # noqa: S608 - ours
                if count:
                    raise SetUpError(
                        f"The database {connection.info.dbname} holds {count} {table}: a demonstration needs one "
                        "without runs and schedules."
                    )


def _inherited(data: Path) -> dict[str, str]:
    """Return the caller's environment without the knobs of Ecluse."""
    inherited = {name: value for name, value in os.environ.items() if name not in Settings.model_fields}
    # Without bytecode files beside the sources, the server started after the kill would compile everything again.
    if inherited.pop("PYTHONDONTWRITEBYTECODE", ""):
        inherited["PYTHONPYCACHEPREFIX"] = str(data / "compiled")
    return inherited


@contextmanager
def _tidy() -> Iterator[None]:
    """Turn stop signals into exceptions for the duration of the context, so that `finally` runs. After the first
    signal, further ones are ignored, so that they do not interrupt the clean-up."""
    before = {number: signal.getsignal(number) for number in _handled_signals()}
    for number in before:
        signal.signal(number, _go)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _handled_signals() -> list[signal.Signals]:
    """Return the stop signals, without those that this process ignores already, as under nohup."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def _go(number: int, _: object) -> None:
    """Handle a stop signal: ignore further ones, and raise the exception that ends the program."""
    _ignore_signals()
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


def _ignore_signals() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def _folder() -> Iterator[Path]:
    """Make a temporary folder, and remove it at the end."""
    data = Path(tempfile.mkdtemp(prefix="ecluse-demo-"))
    data.chmod(0o711)  # PostgreSQL's account must pass through; only the owner may list
    try:
        yield data
    finally:
        _ignore_signals()
        until = time.monotonic() + DOWN_SECONDS
        while data.exists() and time.monotonic() < until:
            # Retry: a process that was killed may still write its last file while the folder is being emptied.
            shutil.rmtree(data, ignore_errors=True)


@contextmanager
def _sandbox(faults: Sequence[Mapping[str, object]]) -> Iterator[str]:
    """Start a sandbox with these fault rules, yield its URL, and stop it at the end."""
    # A session of its own, like the server: Ctrl-C reaches only this process, which stops both at the end.
    process = subprocess.Popen(
        [sys.executable, "-m", "ecluse.sandbox", "--port", "0", "--seed", "7"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        line = process.stdout.readline() if process.stdout else ""
        url = line.rsplit(" ", 1)[-1].strip()
        post(f"{url}/_sandbox/faults", faults)
        yield url
    finally:
        _ignore_signals()
        _end(process)


def _end(process: subprocess.Popen[Any]) -> None:
    """Stop a process, by SIGKILL if it does not stop in time."""
    process.terminate()
    try:
        process.wait(timeout=DOWN_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def stay(announce: Callable[[], None]) -> None:
    """Call `announce`, then wait for a stop signal. Stop signals stay blocked, so that none interrupts the clean-up."""
    handled = _handled_signals()
    signal.pthread_sigmask(signal.SIG_BLOCK, handled)
    announce()
    signal.sigwait(handled)


def what_stays(console: Console, played: Scene, key: str, *more: str) -> None:
    """Print how to use the server and the vendors that keep running; `more`: further lines to print."""
    for line in (
        "",
        "server and vendors keep running. Open the pages in a browser, and log in with this key:",
        f"  {played.url}/ui",
        f"  {key}",
        *more,
        "open the database, or follow the log of the server:",
        f"  {played.psql}",
        f"  tail -f {played.log}",
        f"stop and remove everything: Ctrl-C, or kill {os.getpid()}",
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def write_json(report: dict[str, Any]) -> None:
    """Print the report as one line of JSON."""
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()


def audited(report: dict[str, Any]) -> str:
    """Return the auditor's verdict from the report, as text."""
    found = report["verify"]
    return "clean" if found == "clean" else f"{len(found)} violations: {found}"


def get(url: str, key: str | None = None) -> bytes:
    """Send a GET, with an API key if given, and return the body. Raise OSError if the server cannot be reached or
    answers with an error."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with NO_PROXY.open(urllib.request.Request(url, headers=headers), timeout=ANSWER_SECONDS) as response:  # noqa: S310
        return bytes(response.read())


def post(url: str, body: object, key: str | None = None, *, headers: Mapping[str, str] | None = None) -> Any:
    """Send a POST with a JSON body and return the parsed answer. Raise SetUpError if the server answers with an
    error."""
    sent = {
        "Content-Type": "application/json",
        **({"Authorization": f"Bearer {key}"} if key else {}),
        **(headers or {}),
    }
    request = urllib.request.Request(url, json.dumps(body).encode(), sent)  # noqa: S310 - our own
    try:
        with NO_PROXY.open(request, timeout=ANSWER_SECONDS) as response:
            return json.loads(response.read() or b"null")
    except urllib.error.HTTPError as error:
        raise SetUpError(f"{url}: {error.code} {error.read().decode()}") from error


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def not_started(code: int | None, log: str) -> str:
    """Return the message that the server is not ready, with its last log lines. `code`: the exit code of its process;
    None if it is still running."""
    why = f"was not ready within {UP_SECONDS:.0f} s" if code is None else f"ended with exit code {code}"
    lines = log.strip().splitlines()[-5:]
    return "\n".join((f"The server {why}. {'Its last log lines:' if lines else 'It logged nothing.'}", *lines))
