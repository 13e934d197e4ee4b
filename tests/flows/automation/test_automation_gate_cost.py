"""What a look at the gate of transcripts costs when the tables were filled a moment ago, and the planner knows nothing
of them: it must read what is there once, not once for each fiche."""

import psycopg
import pytest

from ecluse.flows.automation import transcripts

FICHES, RECORDINGS = 1_000, 5
FILL = f"""
INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, input, created_at)
    VALUES ('default', 'automation', 'cost', true, 'running', 'running', '{{}}', now());
INSERT INTO stages (run_id, stage, budget, started_at, fanned_out_at, deadline_at, progress_at, units)
    VALUES (1, 'transcribe', 1, now(), now(), now() + interval '1 hour', now(), 0);
INSERT INTO fiche_cache (tenant_id, fiche_id, created_at, updated_at)
    SELECT 'default', n, now(), now() FROM generate_series(1, {FICHES}) n;
INSERT INTO recordings (fiche_cache_id, call_id, has_transcription, transcription_text, transcribed_at, created_at,
                        updated_at)
    SELECT id, n, n = 1, 'text', now(), now() - interval '1 day', now()
    FROM fiche_cache, generate_series(1, {RECORDINGS}) n;
INSERT INTO outcomes (run_id, target) SELECT 1, fiche_id FROM fiche_cache;
INSERT INTO automation_run_fiches (run_id, fiche_id, fiche_cache_id) SELECT 1, fiche_id, id FROM fiche_cache;
"""  # noqa: S608 - our own numbers


def handled(plan: dict) -> float:
    """Rows that any part of the plan has had in its hands."""
    removed = sum(number for name, number in plan.items() if name.startswith("Rows Removed"))
    own = (plan["Actual Rows"] + removed) * plan["Actual Loops"]
    return own + sum(handled(part) for part in plan.get("Plans", []))


@pytest.fixture
def filled(dsn):
    with psycopg.connect(dsn, autocommit=True) as connection:
        for table in ("fiche_cache", "recordings", "outcomes", "automation_run_fiches"):
            connection.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
        connection.execute(FILL)
        yield connection


def cost(connection, statement, parameters) -> float:
    row = connection.execute("EXPLAIN (ANALYZE, FORMAT JSON) " + statement, parameters).fetchone()
    return handled(row[0][0]["Plan"])


@pytest.mark.req("AUT-200")
@pytest.mark.parametrize("statement", ["COUNT", "FICHES", "HEALABLE", "LEFT_BY_OTHERS", "LATE"])
def test_a_look_reads_each_recording_a_few_times_at_most(filled, statement):
    assert cost(filled, getattr(transcripts, statement), {"run": 1}) < 15 * FICHES * RECORDINGS
    counted = filled.execute(transcripts.COUNT, {"run": 1}).fetchone()
    assert counted == (FICHES * RECORDINGS, FICHES, FICHES * (RECORDINGS - 1), 0)
