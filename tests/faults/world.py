"""A world to do damage in: one database, one simulated vendor, replicas as real `ecluse serve` processes, runs of one
subject. Its methods inject faults; `check` then raises if a fault has changed a result."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import dict_row

from ecluse import bootstrap, settings
from ecluse.engine import Flow, Start
from ecluse.testing.sandbox import SandboxProcess
from tests.faults import tally
from tests.faults.postgres import Postgres, SmallDisk, own_postgres
from tests.faults.subjects import Subject
from tests.faults.tally import Tally
from tests.support.fork_server import ROOT, Child, ForkServer, running_fork_server

# Short, so that a death is noticed in a second; cases that measure the take-over use the program's own defaults.
QUICK_HEART = {"ECLUSE_HEARTBEAT_SECONDS": "0.25", "ECLUSE_DEAD_AFTER_SECONDS": "1.25"}
LOGGED = {"ECLUSE_LOG_FORMAT": "json", "ECLUSE_LOG_LEVEL": "INFO"}
READY_SECONDS = 30.0
POLL_SECONDS = 0.05  # several worlds at once ask the database or the ledger as often
ENDED_SECONDS = 60.0
AUDIT_SECONDS = 60.0

# Every claim of every item, as it happened: an item's row only knows the last one.
WITNESS = """
CREATE TABLE witness (item_id bigint NOT NULL, claim_id bigint NOT NULL, at timestamptz NOT NULL);
CREATE FUNCTION witness_claims() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO witness SELECT n.id, n.claim_id, clock_timestamp() FROM new_rows n JOIN old_rows o USING (id)
    WHERE n.claim_id IS DISTINCT FROM o.claim_id AND n.claim_id IS NOT NULL;
    RETURN NULL;
END $$;
CREATE TRIGGER witness AFTER UPDATE ON items REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION witness_claims();
"""


ENDED = """
SELECT count(*) FROM runs r WHERE event_key = ANY(%s) AND ended_at IS NOT NULL
  AND NOT EXISTS (SELECT 1 FROM runs c WHERE c.parent_run_id = r.id AND c.ended_at IS NULL)
"""


def load_flow(name: str) -> Flow:
    """As --flow takes it, or of one in the box."""
    if ":" in name:
        return bootstrap.load_flows(settings.Settings(), [name])[-1]
    return next(flow for flow in bootstrap.load_flows(settings.Settings()) if flow.name == name)


class Violated(AssertionError):
    """A fault has changed a result; the message lists what and how."""

    def __init__(self, tally: Tally, diagnosis: str) -> None:
        super().__init__("\n".join([*tally.problems(), diagnosis]))
        self.tally = tally


class Replica:
    """One `ecluse serve`."""

    def __init__(self, child: Child, arguments: tuple[str, Mapping[str, str]]) -> None:
        self.child = child
        self.arguments = arguments  # to start another one like it
        self.paused = False
        self.replaced = False  # another one was started in its place
        self._id: str | None = None

    @property
    def lives(self) -> bool:
        return self.child.lives

    @property
    def is_ready(self) -> bool:
        return self.lives and self.id is not None

    @property
    def is_up(self) -> bool:
        """All of it: what it does last is to answer."""
        return self.lives and any(self.events("Application startup complete."))

    @property
    def id(self) -> str | None:
        """Its name among the replicas, once it serves."""
        if self._id is None:
            self._id = next((str(line["replica"]) for line in self.events("server: started")), None)
        return self._id

    def events(self, event: str) -> Iterator[dict[str, Any]]:
        """What it logged under this name."""
        for line in self.child.said().splitlines():
            if event in line:
                with contextlib.suppress(json.JSONDecodeError):
                    said = json.loads(line)
                    if said.get("event") == event:
                        yield said

    def wait_until_ready(self, seconds: float = READY_SECONDS) -> None:
        until = time.monotonic() + seconds
        while self.id is None:
            if not self.lives or time.monotonic() > until:
                raise RuntimeError(f"a replica did not come up (exit code {self.child.code}):\n{self.child.tail()}")
            time.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        self.child.signal(number)
        self.paused = number == signal.SIGSTOP or (self.paused and number != signal.SIGCONT)

    def kill(self) -> None:
        self.child.signal(signal.SIGKILL)
        self.child.wait(10)


class World:
    def __init__(
        self,
        subject: Subject,
        dsn: str,
        postgres: Postgres,
        fork_server: ForkServer,
        sandbox: SandboxProcess,
        folder: Path,
        heart: Mapping[str, str],
    ) -> None:
        self.subject = subject
        self.dsn = dsn  # as the harness reaches the database
        self.replicas_dsn = dsn  # as the replicas do: through a bad wire, say
        self.postgres = postgres
        self.fork_server = fork_server
        self.sandbox = sandbox
        self.folder = folder
        # Its own directory: servers write the key there that commands use.
        own = {"ECLUSE_DATA_DIR": str(folder)}
        self.environment: dict[str, str] = {**heart, **LOGGED, **own, **subject.environment(sandbox.url)}
        self.replicas: list[Replica] = []  # the dead ones too
        self.runs: dict[str, list[str]] = {}  # their targets, by event key
        self.disk: SmallDisk | None = None
        self.supervised = False  # who dies is started again
        self._flow = load_flow(subject.flow)
        self._connection: psycopg.Connection[dict[str, Any]] | None = None
        if self._flow.schema:
            self.ask(self._flow.schema)

    # The database, as another client sees it

    def ask(self, sql: str, *parameters: object) -> list[dict[str, Any]]:
        """Rows as dictionaries. Raises psycopg.OperationalError while the database is away."""
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(self.dsn, autocommit=True, row_factory=dict_row)
        cursor = self._connection.execute(sql, parameters or None)  # type: ignore[arg-type, unused-ignore]
        return cursor.fetchall() if cursor.description else []

    def one(self, sql: str, *parameters: object) -> Any:
        """The one value of the one row."""
        ((value,),) = (row.values() for row in self.ask(sql, *parameters))
        return value

    def now(self) -> datetime:
        at: datetime = self.one("SELECT clock_timestamp()")
        return at

    def watch_claims(self) -> None:
        """From now on the table `witness` holds every claim of every item."""
        self.ask(WITNESS)

    # Replicas

    def start_replica(
        self, variables: Mapping[str, str] | None = None, *, flow: str | None = None, wait: bool = True
    ) -> Replica:
        return self._start((flow or self.subject.flow, variables or {}), wait=wait)

    def start_replicas(self, count: int, variables: Mapping[str, str] | None = None) -> list[Replica]:
        started = [self.start_replica(variables, wait=False) for _ in range(count)]
        for replica in started:
            replica.wait_until_ready()
        return started

    def start_again(self, replica: Replica) -> Replica:
        replica.replaced = True
        return self._start(replica.arguments, wait=False)

    def _start(self, arguments: tuple[str, Mapping[str, str]], *, wait: bool) -> Replica:
        flow, variables = arguments
        environment = {**self.environment, "DATABASE_URL": self.replicas_dsn, **variables}
        extra = ["--flow", flow] if ":" in flow else []
        child = self.fork_server.start("ecluse", ["serve", *extra, "--port", "0"], environment)
        self.replicas.append(Replica(child, arguments))
        if wait:
            self.replicas[-1].wait_until_ready()
        return self.replicas[-1]

    @property
    def living(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.lives]

    def tend(self) -> None:
        """Start replicas that ended again, as a supervisor does; called while a test waits."""
        for replica in list(self.replicas) if self.supervised else ():
            if not replica.lives and not replica.replaced:
                self.start_again(replica)

    # Runs

    def start_run(self, targets: int | None = None) -> int:
        """Start a run and return its id; a run per target if they are runs of their own, the last of which is returned.
        No two runs of a world share a target."""
        first = 1 + sum(map(len, self.runs.values()))
        names = [self.subject.target(n) for n in range(first, first + (targets or self.subject.targets))]
        groups = [[name] for name in names] if self.subject.apart else [names]
        new = {f"faults-{first + place}": group for place, group in enumerate(groups)}
        self.runs |= new

        async def ask() -> int:
            async with await psycopg.AsyncConnection.connect(self.dsn, autocommit=True) as connection:
                for key, group in new.items():
                    start = Start(self._flow, key, input=self.subject.given(group))
                    run = await self.subject.start(connection, start, self.sandbox.url)
            return run.id

        return asyncio.run(ask())

    def command(self, *arguments: str) -> tuple[int, str, str]:
        """`ecluse …`: exit code, output, complaints."""
        flows = {"ECLUSE_FLOWS": self.subject.flow} if ":" in self.subject.flow else {}
        return self.fork_server.run("ecluse", arguments, {**self.environment, "DATABASE_URL": self.dsn, **flows})

    # Waiting

    def wait_for(self, condition: Callable[[], Any], what: str, seconds: float = 30.0) -> Any:
        """What `condition()` is once it is true. A database that is away is no answer."""
        until = time.monotonic() + seconds
        while True:
            self.tend()
            with contextlib.suppress(psycopg.OperationalError):
                if value := condition():
                    return value
            if time.monotonic() > until:
                raise AssertionError(f"not within {seconds:g} s: {what}\n{self.diagnosis()}")
            time.sleep(POLL_SECONDS)

    def ended(self) -> int:
        """How many of the runs that were started have ended; not those of which others go on on their behalf."""
        return int(self.one(ENDED, list(self.runs)))

    def wait_until_ended(self, seconds: float = ENDED_SECONDS) -> None:
        self.wait_for(lambda: self.ended() == len(self.runs), "every run has ended", seconds)

    def wait_until_busy(self, replica: Replica | None = None, items: int = 1) -> None:
        """Wait until that many items are in flight, at this replica or at any."""
        held = "SELECT coalesce(sum(in_flight), 0) >= %s FROM claims WHERE replica_id = coalesce(%s, replica_id)"
        self.wait_for(lambda: self.one(held, items, replica.id if replica else None), f"{items} items in hand")

    def effects(self) -> list[dict[str, Any]]:
        """Applied at the vendor so far, or paid for."""
        return self.sandbox.ledger(vendor=self.subject.vendor or "", kind=self.subject.kind)

    def wait_for_effects(self, count: int) -> None:
        self.wait_for(lambda: len(self.effects()) >= count, f"{count} effects at the vendor")

    # The account

    def tally(self) -> Tally:
        ledger = self.sandbox.ledger(vendor=self.subject.vendor) if self.subject.vendor is not None else []
        counted = tally.take(self.subject, self.runs, self.ask, ledger)
        counted.verify = self.audit()
        return counted

    def audit(self) -> Any:
        """What `python -m ecluse.verify` says: "clean", or the violations."""
        arguments = ["--database-url", self.dsn, "--ledger", self.sandbox.url, "--json"]
        code, out, err = self.fork_server.run("ecluse.verify", arguments, seconds=AUDIT_SECONDS)
        try:
            said = json.loads(out.splitlines()[-1])["verify"]
        except (IndexError, KeyError, ValueError):
            return [f"the auditor failed (exit code {code}): {out[-500:]} {err[-1500:]}"]
        return said if (code == 0) == (said == "clean") else [f"exit code {code}, but it said {said}"]

    def check(self) -> Tally:
        """Every run ended as without the faults, nothing lost, nothing twice, nothing claimed that is not so."""
        counted = self.tally()
        if counted.problems():
            raise Violated(counted, self.diagnosis())
        return counted

    def diagnosis(self) -> str:
        """Return the state of replicas, runs and claims as text, for the message of a failed check."""
        lines = [
            f"replica {r.id or '(never served)'}: {'lives' if r.lives else f'exit code {r.child.code}'}"
            for r in self.replicas[-12:]
        ]
        questions = {
            "replicas": "SELECT id, state, beat_at::time, ended_at::time FROM replicas"
            " ORDER BY started_at DESC LIMIT 8",
            "runs": "SELECT id, status, phase, selected, successful, failed, ended_at::time, error_code, error_message"
            " FROM runs ORDER BY ended_at IS NULL DESC, id DESC LIMIT 5",
            "items": "SELECT i.run_id, i.stage, i.status, c.replica_id, count(*), max(crashes) AS crashes,"
            " min(due_at)::time AS due FROM items i LEFT JOIN claims c ON c.id = i.claim_id AND i.status = 'open'"
            " JOIN runs r ON r.id = i.run_id AND r.ended_at IS NULL GROUP BY 1, 2, 3, 4 ORDER BY 1, 2 LIMIT 20",
            "errors": "SELECT error_code, count(*), min(error) AS error FROM attempts GROUP BY 1",
            "effects": "SELECT run_id, stage, state, count(*) FROM effects WHERE state <> 'applied' GROUP BY 1, 2, 3"
            " ORDER BY 1 LIMIT 20",
            "log": "SELECT * FROM (SELECT id, run_id, at::time, message FROM run_log ORDER BY id DESC LIMIT 12) l"
            " ORDER BY id",
        }
        for name, sql in questions.items():
            try:
                rows = self.ask(sql)
            except psycopg.Error as error:
                lines.append(f"{name}: {error}")
            else:
                lines += [f"{name}: " + " ".join(f"{key}={value}" for key, value in row.items()) for row in rows]
        for replica in self.living[-2:]:
            lines.append(f"replica {replica.id} says:\n{replica.child.tail(8)[-3000:]}")
        return "\n".join(lines)

    def close(self) -> None:
        self.supervised = False
        for replica in self.living:
            replica.kill()
        if self._connection is not None:
            self._connection.close()


@contextlib.contextmanager
def running_sandbox(fork_server: ForkServer, seed: int = 1) -> Iterator[SandboxProcess]:
    child = fork_server.start("ecluse.sandbox", ["--port", "0", "--seed", str(seed)])
    until = time.monotonic() + READY_SECONDS
    while not (said := child.stdout.read_text() if child.stdout.exists() else "").endswith("\n"):
        if not child.lives or time.monotonic() > until:
            raise RuntimeError(f"the sandbox did not start: {child.tail()}")
        time.sleep(0.01)
    try:
        yield SandboxProcess(said.removeprefix("sandbox ready on ").strip(), child.pid)
    finally:
        child.signal(signal.SIGKILL)
        child.wait(10)


@contextlib.contextmanager
def open_world(
    subject: Subject,
    postgres: Postgres,
    fork_server: ForkServer,
    folder: Path,
    *,
    heart: Mapping[str, str] = QUICK_HEART,
    tablespace: str | None = None,
    seed: int = 1,
) -> Iterator[World]:
    with postgres.clone(tablespace) as dsn, running_sandbox(fork_server, seed) as sandbox:
        world = World(subject, dsn, postgres, fork_server, sandbox, folder, heart)
        try:
            yield world
        finally:
            world.close()


Open = Callable[[Subject], AbstractContextManager[World]]


@contextlib.contextmanager
def own_worlds(seed: int) -> Iterator[Open]:
    """Yield a function that opens worlds on a server of their own."""
    sys.path.insert(0, str(ROOT / "examples"))  # as pytest has it
    folder = Path(tempfile.mkdtemp(prefix="ecluse-chaos-"))
    try:
        with own_postgres(folder) as postgres, running_fork_server(folder) as fork_server:
            # The program's own heartbeat: what is measured is what an operator gets.
            yield partial(open_world, postgres=postgres, fork_server=fork_server, folder=folder, heart={}, seed=seed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
