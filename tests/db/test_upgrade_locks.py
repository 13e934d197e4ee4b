"""An upgrade beside a working server: large tables are not rewritten, and no statement waits long for a lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
import sqlalchemy
from alembic.script import ScriptDirectory

from ecluse.migrations import revisions, runner
from tests.support.servers import upgrade_to

OLD = "0001"
HOT = ("items", "outcomes", "runs", "stages", "claims", "attempts", "run_log")
# Rows of servers that have worked for long, by the revision that they are inserted at: run 1 is open, of the others
# nine in ten have ended; every third is of automation, every second was started by run 1.
FILLS = {
    "0001": """
INSERT INTO items (tenant_id, run_id, flow, stage, key, target, lane_id, due_at, status, finished_at)
SELECT 't', 1, 'f', 's', n::text, n::text, 1, now(), 'succeeded', now() FROM generate_series(1, %(rows)s) n;
INSERT INTO outcomes (run_id, target, outcome) SELECT 1, n::text, 'successful' FROM generate_series(1, %(rows)s) n;
INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, phase, parent_run_id, created_at, ended_at,
                  end_cause, selected, successful, failed, ignored)
SELECT 't', CASE n % 3 WHEN 0 THEN 'automation' ELSE 'f' END, n::text, false, s, s, 'audits',
       CASE WHEN n > 1 AND n % 2 = 0 THEN 1 END, now(), CASE s WHEN 'succeeded' THEN now() END,
       CASE s WHEN 'succeeded' THEN 'normal' END, 0, 0, 0, 0
FROM generate_series(1, %(rows)s) n, LATERAL (SELECT CASE n % 10 WHEN 1 THEN 'running' ELSE 'succeeded' END) AS r(s);
INSERT INTO stages (run_id, stage, started_at, deadline_at, progress_at, ended_at, end_cause)
SELECT id, 's', now(), now(), now(), ended_at, CASE WHEN ended_at IS NOT NULL THEN 'done' END FROM runs;
INSERT INTO claims (replica_id, run_id, stage, lane_id, taken, taken_at)
SELECT 'r', n, 's', 1, 10, now() FROM generate_series(1, %(rows)s) n;
INSERT INTO attempts (run_id, item_id, event_id, round, execution, at, replica_id, error_code, error, ambiguous)
SELECT 1, n, n::text, 0, 1, now(), 'r', 'HTTP', 'e', false FROM generate_series(1, %(rows)s) n;
INSERT INTO run_log (run_id, at, level, message)
SELECT n, now(), 'info', 'm' FROM generate_series(1, %(rows)s) n;
""",
    "0014": """
INSERT INTO leases (tenant_id, key, fence, owner, ttl, acquired_at, expires_at, ended_at, end_cause)
SELECT 't', n::text, 1, 'o', '1 minute', now(), now(), now(), 'released' FROM generate_series(1, %(rows)s) n;
INSERT INTO events_outbox (tenant_id, event_key, event_type, aggregate, correlation_id, producer, occurred_at,
                           published_seq, published_at)
SELECT 't', n::text, 'e', 'run-' || n, 'c', 'p', now(), n, now() FROM generate_series(1, %(rows)s) n;
INSERT INTO audit_trail (tenant_id, at, actor, action, subject)
SELECT 't', now(), 'key:1', 'a', n::text FROM generate_series(1, %(rows)s) n;
INSERT INTO deliveries (run_id, tenant_id, kind, recipient, event_key, event_type, message, created_at)
SELECT id, 't', 'mail', 'a@b.example', event_key, 'e', '{}', now() FROM runs WHERE flow = 'f';
INSERT INTO automation_run_facts (run_id, schedule_id, config_snapshot)
SELECT id, 1, '{"retry_failed": true, "max_retries": 2}' FROM runs WHERE flow = 'automation';
INSERT INTO schedules (tenant_id, flow, name, zone_rules, handled_until, created_at, updated_at)
VALUES ('t', 'f', 'n', '', now(), now(), now());
INSERT INTO schedule_slots (schedule_id, due_at, tenant_id, state, run_id, decided_at)
SELECT 1, now() - n * interval '1 minute', 't', 'fired', n, now() FROM generate_series(1, %(rows)s) n;
""",
    "0030": """
INSERT INTO tenants (id, name, created_at) VALUES ('t', 'T', now());
INSERT INTO pricing_projects (tenant_id, name, connector, base_url, currency, created_by, created_at, updated_by,
                              updated_at)
VALUES ('t', 'n', 'shopify', 'https://shop.example', 'EUR', 'c', now(), 'c', now());
INSERT INTO rule_runs (tenant_id, project_id, rule, currency, status, plan_hash, totals, actor, correlation_id, source,
                       created_at)
SELECT 't', 1, '{}', 'EUR', 'PREVIEW', 'h', '{}', 'a', 'c', 's', now() FROM generate_series(1, %(rows)s / 100) n;
INSERT INTO rule_targets (tenant_id, rule_run_id, variant_id, product_id, sku, title, status, before_amount,
                          after_amount)
SELECT 't', 1 + n / 101, n::text, 'p', 's', 't', 'PREVIEW', 1, 2 FROM generate_series(1, %(rows)s) n;
INSERT INTO rule_exclusions (rule_run_id, variant_id, sku, title, amount, reason)
SELECT 1 + n / 101, n::text, 's', 't', 1, 'r' FROM generate_series(1, %(rows)s) n;
""",
    "0034": """
INSERT INTO jobs (id, tenant_id, key, job_schedule_id, server_instance_id, host_id, type, payload, max_attempts,
                  backoff_ms, backoff_type, status, created_by, created_at, ended_at)
SELECT n::text, 't', n::text, '1', '1', '1', 'y', '{}', 1, 0, 'fixed', 'succeeded', 'c', now(), now()
FROM generate_series(1, %(rows)s) n;
INSERT INTO job_runs (id, tenant_id, job_id, host_id, attempt, status, due_at, agent_id, claim_key, lease_ends_at,
                      started_at, ended_at)
SELECT n::text, 't', n::text, '1', 1, 'succeeded', now(), '1', gen_random_uuid(), now(), now(), now()
FROM generate_series(1, %(rows)s) n;
""",
}
# What servers do all the time from the same revisions on: rows of tables that grow are read and written, one after the
# other.
WORK = {
    "0001": [
        "UPDATE items SET executions = executions + 1 WHERE id = (SELECT min(id) FROM items)",
        "UPDATE runs SET status = status WHERE id = 1",
        "UPDATE stages SET progress = progress + 1 WHERE run_id = 1 AND stage = 's'",
        "UPDATE claims SET taken = taken WHERE id = 1",
        "UPDATE attempts SET ambiguous = true WHERE id = 1",
        "INSERT INTO run_log (run_id, at, level, message) VALUES (1, now(), 'info', 'm')",
        "SELECT count(*) FROM outcomes WHERE run_id = 1 AND target = '1'",
        "INSERT INTO outcomes (run_id, target) VALUES (1, 'x' || clock_timestamp())",
    ],
    "0014": [
        "UPDATE leases SET reason = reason WHERE tenant_id = 't' AND key = '1'",
        "UPDATE events_outbox SET tries = tries WHERE id = 1",
        "INSERT INTO audit_trail (tenant_id, at, actor, action, subject) VALUES ('t', now(), 'key:1', 'a', 's')",
        "UPDATE deliveries SET sent_at = now() WHERE run_id = 2",
        "UPDATE automation_run_facts SET audits_run = audits_run + 1 WHERE run_id = 3",
        "UPDATE schedule_slots SET decided_at = now() WHERE schedule_id = 1 AND run_id = 1",
    ],
    "0030": [
        "UPDATE rule_runs SET actor = actor WHERE id = 1",
        "UPDATE rule_targets SET attempts = 0 WHERE id = 1",
        "SELECT reason FROM rule_exclusions WHERE rule_run_id = 1 AND variant_id = '1'",
    ],
    "0034": ["UPDATE job_runs SET fence = fence + 1 WHERE id = '1'"],
}
# Rows that the upgrade should have changed, and has not; or has changed, and should not have.
UNCHANGED = {
    "items": "order_at IS DISTINCT FROM due_at",
    "runs": """(phase IS NULL) <> (ended_at IS NOT NULL)
        OR redrive_of IS DISTINCT FROM CASE flow WHEN 'automation' THEN parent_run_id END""",
    "stages": """rounds <> CASE WHEN ended_at IS NULL
        AND (SELECT flow = 'automation' FROM runs WHERE id = run_id) THEN 2 ELSE 0 END""",
    "rule_exclusions": "tenant_id <> 't'",
}
ALL_FILES = """
SELECT relname, pg_relation_filenode(oid) FROM pg_class
WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace
"""
SMALL = {"lanes", "automation_settings"}  # some thousand rows at most
STOP = """
CREATE FUNCTION stop() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'stopped here'; END $$;
CREATE TRIGGER stop BEFORE UPDATE ON alembic_version EXECUTE FUNCTION stop();
"""
FILES = "SELECT relname, pg_relation_filenode(oid) FROM pg_class WHERE relname = ANY(%s)"


class Worker(threading.Thread):
    """Works on, and remembers how long a statement took at most."""

    def __init__(self, dsn: str, work: Sequence[str]) -> None:
        super().__init__()
        self.dsn = dsn
        self.work = work
        self.longest = (0.0, "")
        self.over = threading.Event()

    def run(self) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            while not self.over.is_set():
                for statement in self.work:
                    began = time.monotonic()
                    connection.execute(statement)
                    self.longest = max(self.longest, (time.monotonic() - began, statement))
                time.sleep(0.005)


def fill(dsn: str, revision: str, rows: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(FILLS[revision].replace("%(rows)s", str(rows)))
        connection.execute("ANALYZE")


def upgrade_beside_a_worker(dsn: str, work: Sequence[str], to: str | None) -> tuple[float, str]:
    """Return how long a statement of the worker took at most, and which one."""
    worker = Worker(dsn, work)
    worker.start()
    try:
        upgrade_to(dsn, to) if to else runner.upgrade(dsn)
    finally:
        worker.over.set()
        worker.join()
    return worker.longest


def check_values(connection):
    for table, condition in UNCHANGED.items():
        wrong = connection.execute(f"SELECT count(*) FROM {table} WHERE {condition}").fetchone()  # noqa: S608
        assert (table, wrong) == (table, (0,))


@pytest.mark.parametrize("rows", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
@pytest.mark.timeout(1200)
def test_an_upgrade_rewrites_no_hot_table_and_locks_none_for_long(empty_dsn, rows):
    upgrade_to(empty_dsn, OLD)
    before, work, longest = [], [], {}
    for revision, then in zip(FILLS, [*list(FILLS)[1:], None], strict=True):
        fill(empty_dsn, revision, rows)
        work += WORK[revision]
        with psycopg.connect(empty_dsn, autocommit=True) as connection:
            before = before or connection.execute(FILES, (list(HOT),)).fetchall()
        longest[revision] = upgrade_beside_a_worker(empty_dsn, work, then)
    print(f"{rows} rows, longest statement by the revision that the upgrade began at: {longest}")
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        assert set(connection.execute(FILES, (list(HOT),)).fetchall()) == set(before)
        check_values(connection)
    assert max(seconds for seconds, _ in longest.values()) <= 1, longest


def test_a_revision_that_was_interrupted_runs_again(empty_dsn):
    """Each one stops at its last statement, which notes the revision, after all that it commits on its way. The tables
    have rows, which batches change and constraints are compared with."""
    scripts = ScriptDirectory.from_config(revisions.config_for(None)).walk_revisions()
    revision_ids = sorted(one.revision for one in scripts)
    upgrade_to(empty_dsn, OLD)
    fill(empty_dsn, OLD, 100)
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute(STOP)
        for revision in revision_ids[1:]:
            connection.execute("ALTER TABLE alembic_version ENABLE TRIGGER stop")
            with pytest.raises(sqlalchemy.exc.ProgrammingError, match="stopped here"):
                upgrade_to(empty_dsn, revision)
            connection.execute("ALTER TABLE alembic_version DISABLE TRIGGER stop")
            upgrade_to(empty_dsn, revision)
            if revision in FILLS:
                fill(empty_dsn, revision, 100)
        check_values(connection)


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
    fill(empty_dsn, OLD, 100)
    worker = Worker(empty_dsn, WORK[OLD])
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
        connection.execute("""INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, created_at)
            SELECT 't', 'f', n::text, false, 'queued', 'queued', now() FROM generate_series(1, 100) n""")
        with pytest.raises(psycopg.errors.UniqueViolation):
            connection.execute("CREATE UNIQUE INDEX CONCURRENTLY runs_of_tenant ON runs (flow)")
        runner.upgrade(empty_dsn)
        built = "SELECT indisvalid, NOT indisunique FROM pg_index WHERE indexrelid = 'runs_of_tenant'::regclass"
        assert connection.execute(built).fetchone() == (True, True)
