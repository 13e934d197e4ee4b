"""From any database that this program may meet to its schema, or a clear refusal."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psycopg
import pytest

from ecluse.base.errors import SetUpError
from ecluse.migrations.runner import LOCK, upgrade
from tests.support.engine_flows import flow, stage
from tests.support.servers import HEAD

TABLES = {
    "alembic_version",
    "alerts",
    "api_keys",
    "attempts",
    "audit_config_versions",
    "audit_configs",
    "audit_trail",
    "audits",
    "automation_run_facts",
    "automation_run_fiches",
    "automation_settings",
    "budgets",
    "claims",
    "clock_offset",
    "connections",
    "deliveries",
    "effects",
    "events_outbox",
    "fiche_cache",
    "fiche_cache_information",
    "idempotency_keys",
    "items",
    "lanes",
    "leases",
    "mail_addresses",
    "mail_counts",
    "maintenance",
    "notification_endpoints",
    "outcomes",
    "paid_calls",
    "pricing_counters",
    "companies",
    "company_snapshots",
    "enrichment_jobs",
    "enrichment_sources",
    "enrolment_tokens",
    "requests",
    "job_agents",
    "job_hosts",
    "job_logs",
    "job_runs",
    "job_schedules",
    "job_servers",
    "jobs",
    "pricing_projects",
    "pricing_rules",
    "pruned",
    "pruned_runs",
    "pruning",
    "realtime_apps",
    "realtime_interests",
    "realtime_replicas",
    "recording_transcription_chunks",
    "recordings",
    "replicas",
    "rule_executions",
    "rule_exclusions",
    "rule_history",
    "rule_mismatches",
    "rule_pages",
    "rule_reconciliations",
    "rule_runs",
    "rule_targets",
    "run_log",
    "run_waiters",
    "runs",
    "schedule_slots",
    "schedules",
    "secrets",
    "speech_results",
    "spend_totals",
    "stages",
    "tenants",
    "transcription_requests",
    "transcription_runs",
    "workflow_logs",
}
DATA = """
INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, created_at)
VALUES ('t', 'f', 'kept', false, 'queued', 'queued', now())
"""
# Every object with the instant of its last change: two equal answers mean that nothing was touched.
CATALOGUE = """
SELECT c.oid, c.relname, c.relnamespace::regnamespace::text, c.xmin::text FROM pg_class c
WHERE c.relnamespace NOT IN ('pg_catalog'::regnamespace, 'pg_toast'::regnamespace) ORDER BY 1
"""


def ask(dsn: str, sql: str, *parameters: object):
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(sql, parameters or None)
        return cursor.fetchall() if cursor.description else []


def state(dsn: str):
    versions = ask(dsn, "SELECT version_num FROM alembic_version")
    return ask(dsn, CATALOGUE), versions, ask(dsn, "SELECT event_key, xmin::text FROM runs")


@pytest.mark.req("G-02")
def test_a_fresh_database_is_brought_to_the_newest_schema(empty_dsn):
    assert upgrade(empty_dsn) == HEAD
    assert ask(empty_dsn, "SELECT version_num FROM alembic_version") == [(HEAD,)]
    tables = ask(empty_dsn, "SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    assert {name for (name,) in tables} == TABLES


def test_the_orchestration_brings_its_own_schema(empty_dsn):
    upgrade(empty_dsn)
    names = {
        name for (name,) in ask(empty_dsn, "SELECT proname FROM pg_proc WHERE pronamespace = 'dbos'::regnamespace")
    }
    assert names >= {"enqueue_workflow", "send_message"}
    assert ask(empty_dsn, "SELECT count(*) FROM dbos.workflow_status") == [(0,)]


def test_a_second_migration_changes_nothing(empty_dsn):
    upgrade(empty_dsn)
    ask(empty_dsn, DATA)
    before = state(empty_dsn)
    assert upgrade(empty_dsn) == HEAD
    assert state(empty_dsn) == before


def test_threads_that_migrate_at_once_all_succeed(empty_dsn):
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(upgrade, [empty_dsn] * 4)) == [HEAD] * 4
    assert ask(empty_dsn, "SELECT count(*) FROM clock_offset") == [(1,)]


def test_processes_that_migrate_at_once_all_succeed(empty_dsn):
    code = "import sys; from ecluse.migrations.runner import upgrade; print(upgrade(sys.argv[1]))"
    starts = [
        subprocess.Popen([sys.executable, "-c", code, empty_dsn], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    assert [(process.communicate(timeout=30)[0].strip(), process.returncode) for process in starts] == [(HEAD, 0)] * 2


def test_a_migration_waits_for_the_one_that_runs_and_leaves_no_lock_behind(empty_dsn):
    with ThreadPoolExecutor(1) as threads, psycopg.connect(empty_dsn, autocommit=True) as other:
        other.execute("SELECT pg_advisory_lock(%s)", (LOCK,))
        waiting = threads.submit(upgrade, empty_dsn)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.5)
        assert ask(empty_dsn, "SELECT to_regclass('runs')") == [(None,)]
        other.execute("SELECT pg_advisory_unlock(%s)", (LOCK,))
        assert waiting.result(timeout=30) == HEAD
        other.execute("SET lock_timeout = '10s'")
        other.execute("SELECT pg_advisory_lock(%s)", (LOCK,))  # to be had as soon as the server has seen it leave


def test_a_database_that_a_newer_program_has_migrated_is_refused_and_nothing_is_changed(dsn):
    ask(dsn, DATA)
    ask(dsn, "UPDATE alembic_version SET version_num = '9999'")
    before = state(dsn)
    brings_tables = flow(stage(), schema="CREATE TABLE IF NOT EXISTS not_made (id int)")
    with pytest.raises(SetUpError) as refused:
        upgrade(dsn, [brings_tables])
    assert "9999" in refused.value.message
    assert HEAD in refused.value.message
    assert "newer" in refused.value.message
    assert "Nothing was changed" in refused.value.message
    assert state(dsn) == before


def test_a_migration_that_fails_leaves_the_database_as_it_was(empty_dsn):
    ask(empty_dsn, "CREATE TABLE outcomes (of_another_program int)")
    with pytest.raises(psycopg.errors.DuplicateTable):
        upgrade(empty_dsn)
    assert ask(
        empty_dsn, "SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace"
    ) == [("outcomes",)]
    ask(empty_dsn, "DROP TABLE outcomes")
    assert upgrade(empty_dsn) == HEAD


def test_the_tables_that_flows_bring_along_are_made_once(dsn):
    first = flow(stage(), "first", schema="CREATE TABLE IF NOT EXISTS of_first (id int); SELECT 1")
    second = flow(stage(), "second", schema="CREATE TABLE IF NOT EXISTS of_second (id int)")
    upgrade(dsn, [first, flow(stage(), "without"), second])
    ask(dsn, "INSERT INTO of_first VALUES (1)")
    upgrade(dsn, [first, second])
    assert ask(dsn, "SELECT id FROM of_first") == [(1,)]
    assert ask(dsn, "SELECT count(*) FROM of_second") == [(0,)]


def test_the_clock_of_the_database_follows_its_one_offset_row(dsn):
    differences = "SELECT ecluse_now() - clock_timestamp() BETWEEN %s::interval - interval '1 s' AND %s::interval"
    assert ask(dsn, differences, timedelta(0), timedelta(0)) == [(True,)]
    for offset in (timedelta(days=40), timedelta(hours=-3)):
        ask(dsn, 'UPDATE clock_offset SET "offset" = %s', offset)
        assert ask(dsn, differences, offset, offset) == [(True,)]
    with pytest.raises(psycopg.errors.UniqueViolation):
        ask(dsn, "INSERT INTO clock_offset DEFAULT VALUES")
    with pytest.raises(psycopg.errors.CheckViolation):
        ask(dsn, "INSERT INTO clock_offset (one) VALUES (false)")


def test_the_clock_of_the_database_moves_within_a_transaction_too(dsn):
    with psycopg.connect(dsn) as connection:
        first = connection.execute("SELECT ecluse_now(), pg_sleep(0.01)").fetchone()
        second = connection.execute("SELECT ecluse_now()").fetchone()
    assert first is not None
    assert second is not None
    assert second[0] > first[0]
