"""An upgrade beside a working server: large tables are not rewritten, and no statement waits long for a lock."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from alembic.script import ScriptDirectory

from ecluse.migrations import revisions, runner
from tests.support.servers import upgrade_to

OLD = "0001"
HOT = ("items", "outcomes", "runs", "claims", "attempts", "run_log")
FILL = """
INSERT INTO items (tenant_id, run_id, flow, stage, key, target, lane_id, due_at, status, finished_at)
SELECT 't', 1, 'f', 's', n::text, n::text, 1, now(), 'succeeded', now() FROM generate_series(1, %(rows)s) n;
INSERT INTO outcomes (run_id, target, outcome) SELECT 1, n::text, 'successful' FROM generate_series(1, %(rows)s) n;
INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, created_at)
SELECT 't', 'f', n::text, false, 'queued', 'queued', now() FROM generate_series(1, %(rows)s / 10) n;
INSERT INTO claims (replica_id, run_id, stage, lane_id, taken, taken_at)
SELECT 'r', n, 's', 1, 10, now() FROM generate_series(1, %(rows)s / 10) n;
INSERT INTO run_log (run_id, at, level, message)
SELECT n, now(), 'info', 'm' FROM generate_series(1, %(rows)s / 10) n;
"""
# What a worker does all the time: rows of the hot tables are read and written, one after the other.
WORK = [
    "UPDATE items SET executions = executions + 1 WHERE id = (SELECT min(id) FROM items)",
    "UPDATE runs SET status = status WHERE id = 1",
    "UPDATE claims SET taken = taken WHERE id = 1",
    "INSERT INTO run_log (run_id, at, level, message) VALUES (1, now(), 'info', 'm')",
    "SELECT count(*) FROM outcomes WHERE run_id = 1 AND target = '1'",
    "INSERT INTO outcomes (run_id, target) VALUES (1, 'x' || clock_timestamp())",
]
ALL_FILES = """
SELECT relname, pg_relation_filenode(oid) FROM pg_class
WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace
"""
SMALL = {"lanes", "automation_settings"}  # some thousand rows at most
FILES = "SELECT relname, pg_relation_filenode(oid) FROM pg_class WHERE relname = ANY(%s)"


class Worker(threading.Thread):
    """Works on, and remembers how long a statement took at most."""

    def __init__(self, dsn: str) -> None:
        super().__init__()
        self.dsn = dsn
        self.longest = (0.0, "")
        self.over = threading.Event()

    def run(self) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            while not self.over.is_set():
                for statement in WORK:
                    began = time.monotonic()
                    connection.execute(statement)
                    self.longest = max(self.longest, (time.monotonic() - began, statement))
                time.sleep(0.005)


@pytest.mark.parametrize("rows", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_an_upgrade_rewrites_no_hot_table_and_locks_none_for_long(empty_dsn, rows):
    upgrade_to(empty_dsn, OLD)
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute(FILL.replace("%(rows)s", str(rows)))
        before = dict(connection.execute(FILES, (list(HOT),)).fetchall())
    worker = Worker(empty_dsn)
    worker.start()
    began = time.monotonic()
    try:
        runner.upgrade(empty_dsn)
    finally:
        worker.over.set()
        worker.join()
    print(
        f"{rows} items: {time.monotonic() - began:.1f} s, a statement waited {worker.longest[0] * 1000:.0f} ms at most"
    )
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        assert dict(connection.execute(FILES, (list(HOT),)).fetchall()) == before
        assert connection.execute("SELECT count(*) FROM items WHERE order_at IS DISTINCT FROM due_at").fetchone() == (
            0,
        )
    assert worker.longest[0] <= 1, worker.longest


def test_no_revision_rewrites_a_table_of_the_ones_before(empty_dsn):
    """Also tables that came after the first revision. An empty table gets another file, too, when it is rewritten."""
    scripts = ScriptDirectory.from_config(revisions.config_for(None)).walk_revisions()
    rewritten = []
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        for one in reversed(list(scripts)):
            before = dict(connection.execute(ALL_FILES).fetchall())
            upgrade_to(empty_dsn, one.revision)
            after = dict(connection.execute(ALL_FILES).fetchall())
            rewritten += [name for name in before.keys() & after.keys() if before[name] != after[name]]
    assert set(rewritten) == SMALL


def test_an_upgrade_that_waits_for_a_lock_lets_others_pass(empty_dsn):
    upgrade_to(empty_dsn, OLD)
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute(FILL.replace("%(rows)s", "100"))
    worker = Worker(empty_dsn)
    with psycopg.connect(empty_dsn) as busy, ThreadPoolExecutor(1) as threads:
        busy.execute("SELECT count(*) FROM runs")  # holds a lock that every ALTER TABLE waits for
        worker.start()
        upgrade = threads.submit(runner.upgrade, empty_dsn)
        with pytest.raises(TimeoutError):
            upgrade.result(timeout=3 * revisions.LOCK_SECONDS)
        busy.rollback()
        upgrade.result(timeout=60)
    worker.over.set()
    worker.join()
    assert worker.longest[0] <= 1, worker.longest


def test_an_index_whose_build_was_interrupted_is_built_again(empty_dsn):
    scripts = ScriptDirectory.from_config(revisions.config_for(None)).walk_revisions()
    (builds,) = [one for one in scripts if "runs_of_tenant" in getattr(one.module, "INDEXES", ())]
    upgrade_to(empty_dsn, builds.down_revision)
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute(FILL.replace("%(rows)s", "100"))
        with pytest.raises(psycopg.errors.UniqueViolation):
            connection.execute("CREATE UNIQUE INDEX CONCURRENTLY runs_of_tenant ON runs (flow)")
        runner.upgrade(empty_dsn)
        built = "SELECT indisvalid, NOT indisunique FROM pg_index WHERE indexrelid = 'runs_of_tenant'::regclass"
        assert connection.execute(built).fetchone() == (True, True)
