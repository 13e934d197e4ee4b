"""Liveness of replicas. Each process with the role worker or scheduler keeps a heartbeat row from a thread of its own,
because a busy event loop must not look like a death. Workers also reap replicas whose heartbeat has stopped: their
items are reopened, their workflows recovered.

A replica that was declared dead must not go on: if its row is gone or marked dead, its heartbeat exits the process at
once."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import psycopg
import structlog

from ecluse.db.connect import open_blocking_session
from ecluse.db.outage import is_unavailable, one_line
from ecluse.engine.cluster.take_over import take_over
from ecluse.engine.lead import durable
from ecluse.engine.model.flow import Stage
from ecluse.engine.runs.leases import RENEW

log = structlog.get_logger(__name__)

ENTER = """
INSERT INTO replicas (id, host, pid, roles, work, batches, permits, hands, tenant_share)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s)
"""
BEAT = "UPDATE replicas SET beat_at = clock_timestamp() WHERE id = %s AND state = 'live'"
LEAVE = "UPDATE replicas SET state = 'left', ended_at = clock_timestamp() WHERE id = %s AND state = 'live'"
# After a restart of the database, or a reconnect of the reaper, every replica gets a full period to beat again.
SILENT = """state = 'live' AND id <> %(replica)s
    AND clock_timestamp() - greatest(beat_at, pg_postmaster_start_time(), %(since)s) > %(dead_after)s"""
REAP = f"""
UPDATE replicas SET state = 'dead', ended_at = clock_timestamp()
WHERE id IN (SELECT id FROM replicas WHERE {SILENT} FOR UPDATE SKIP LOCKED) RETURNING id
"""  # noqa: S608 - our own words
# One query for everything that the reaper may find to do: most often there is nothing.
ANYTHING_DEAD = f"""
SELECT EXISTS (SELECT FROM replicas WHERE {SILENT})
    OR EXISTS (SELECT FROM claims c WHERE c.in_flight > 0
               AND NOT EXISTS (SELECT FROM replicas r WHERE r.id = c.replica_id AND r.state = 'live'))
    OR EXISTS ({durable.STRANDED})
"""  # noqa: S608 - our own words
RARELY = 600  # ticks of the reaper
# Rows of ended replicas are kept for as long as they are evidence for or against an item (`work/suspects.py`).
TOMBSTONES = """
DELETE FROM replicas WHERE state <> 'live' AND ended_at < least(clock_timestamp() - interval '1 hour', (
    SELECT min(first_crash_at) FROM items WHERE first_crash_at IS NOT NULL AND status = 'open'))
"""


class Heartbeat:
    """The heartbeat and the reaper of one process, each a thread with its own connection. The heartbeat beats every
    `beat` seconds; the reaper declares a replica dead after `dead_after` seconds without a beat."""

    def __init__(self, dsn: str, replica: str, *, beat: float, dead_after: float) -> None:
        self._dsn = dsn
        self._replica = replica
        self._beat = beat
        self._dead_after = dead_after
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._since: dict[str, object] = {}  # by thread: when it last reconnected
        self._ticks = 0
        self._beaten_at = 0.0

    def start(self, roles: list[str], work: Mapping[str, Stage], hands: int, tenant_share: float) -> None:
        """Insert the row of this replica and start its heartbeat. `work`: the stages that its worker can execute, by
        "flow/stage"; `hands`: the number of its worker slots; `tenant_share`: one tenant's share of them, and of the
        runs that it leads."""
        calls = ([stage.batch for stage in work.values()], [stage.permits for stage in work.values()])
        with self._connect() as connection:
            self._beaten_at = time.monotonic()
            itself = (self._replica, socket.gethostname(), os.getpid())
            connection.execute(ENTER, (*itself, roles, list(work), *calls, hands, tenant_share))
        self._start("heartbeat", self._keep_beating, self._beat)

    @property
    def beats(self) -> bool:
        """True while the last heartbeat is so recent that no other replica can have declared this one dead, nor can
        within the next `beat` seconds."""
        return time.monotonic() - self._beaten_at < self._dead_after - self._beat

    def start_reaping(self) -> None:
        """Start the reaper. The caller has made sure that this process can recover workflows (DBOS is launched)."""
        self._start("reaper", self._reap, min(1.0, self._beat))

    def _start(self, name: str, act: Callable[[psycopg.Connection[tuple[Any, ...]]], None], every: float) -> None:
        thread = threading.Thread(target=self._repeat, args=(act, every), name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def stop(self) -> None:
        """Leave the cluster: mark this replica as left, reopen the items that it (or any other replica that is not
        live) still holds, and stop its threads."""
        self._stop.set()
        with self._connect() as connection:
            connection.execute(LEAVE, (self._replica,))
            take_over(connection)
        for thread in self._threads:
            thread.join(timeout=5)

    def hand_over(self) -> None:
        """Requeue the pending workflows of this replica for other replicas. The caller has made sure that no task of
        this process leads them any more."""
        with self._connect() as connection:
            connection.execute(durable.HAND_OVER, (self._replica,))

    def _connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        return open_blocking_session(self._dsn)

    def _repeat(self, act: Callable[[psycopg.Connection[tuple[Any, ...]]], None], every: float) -> None:
        """Call `act` with a connection every `every` seconds until the stop; after an error, log it and continue with a
        new connection."""
        name = threading.current_thread().name
        while not self._stop.is_set():
            try:
                with self._connect() as connection:
                    row = connection.execute("SELECT clock_timestamp()").fetchone()
                    self._since[name] = row[0] if row and name in self._since else "-infinity"
                    act(connection)
                    while not self._stop.wait(every):
                        act(connection)
            except Exception as error:  # any error: the end of this thread would go unnoticed
                if is_unavailable(error):
                    log.warning("heartbeat: database unavailable", error=one_line(error))
                else:
                    log.exception("heartbeat: error, trying again")
                self._stop.wait(min(1.0, every))

    def _keep_beating(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        """Update the heartbeat and extend the leases of this process. Exit the process at once if this replica was
        declared dead."""
        asked_at = time.monotonic()
        if connection.execute(BEAT, (self._replica,)).rowcount == 0 and not self._stop.is_set():
            log.critical("heartbeat: this replica was declared dead, exiting at once", replica=self._replica)
            os._exit(70)
        self._beaten_at = asked_at
        connection.execute(RENEW, (self._replica,))

    def _reap(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        """Declare silent replicas dead, and take over the items and workflows of all replicas that are not live. Every
        RARELY calls, delete old rows of ended replicas."""
        facts = {
            "replica": self._replica,
            "since": self._since["reaper"],
            "dead_after": f"{self._dead_after} seconds",
        }
        if connection.execute(ANYTHING_DEAD, facts).fetchone() == (True,):
            dead = [row[0] for row in connection.execute(REAP, facts).fetchall()]
            adopted = take_over(connection)
            stranded = [row[0] for row in connection.execute(durable.STRANDED).fetchall()]
            if dead or adopted or stranded:
                log.warning("failover: adopted work of dead replicas", dead=dead, items=adopted, workflows_of=stranded)
            if stranded:
                durable.recover(stranded)
        self._ticks += 1
        if self._ticks % RARELY == 0:
            connection.execute(TOMBSTONES)
