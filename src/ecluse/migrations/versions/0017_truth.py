"""View of open targets that are known to fail, and folded log lines: the same failure of many items is one line."""

from __future__ import annotations

from alembic import op

from ecluse.migrations.online import update_in_batches

revision = "0017"
down_revision = "0016"

# A stage stores how many rounds it may open: with none left, a failure is final. Among runs that are open during the
# upgrade only those of automation have rounds; their number is in the run's snapshot.
STAGES = """
ALTER TABLE stages ADD COLUMN IF NOT EXISTS rounds smallint NOT NULL DEFAULT 0;
COMMENT ON COLUMN stages.rounds IS 'how many rounds may be opened after the first; with none left a failure is final';
"""
ROUNDS = """
rounds = (SELECT (f.config_snapshot ->> 'max_retries')::smallint FROM automation_run_facts f
    WHERE f.run_id = stages.run_id)
"""
OPEN_WITH_ROUNDS = """
ended_at IS NULL AND EXISTS (SELECT FROM automation_run_facts f
    WHERE f.run_id = stages.run_id AND (f.config_snapshot ->> 'retry_failed')::boolean)
"""

# One row per failed item, in three parts: targets of the run itself; fiches whose details could not be fetched and are
# not cached; targets of a run that waits for another run (the latest one for the target counts). In the last part the
# recordings decide, so a recording that has a transcript by now is no failure, whichever run transcribed it.
# OFFSET keeps the lookups by key, whatever the planner estimates for tables that were just filled.
FINAL = """
CREATE VIEW final_failures AS
SELECT c.run_id, i.target, i.key, i.error_code, i.error, i.finished_at, NULL::integer AS recordings
FROM (SELECT DISTINCT run_id, stage FROM claims WHERE failed > 0) c
JOIN stages s ON s.run_id = c.run_id AND s.stage = c.stage
CROSS JOIN LATERAL (
    SELECT * FROM items i WHERE i.run_id = c.run_id AND i.stage = c.stage AND i.status = 'failed' AND i.target <> ''
      AND (i.permanent OR s.round >= s.rounds OR s.ended_at IS NOT NULL) OFFSET 0) i
UNION ALL
SELECT c.run_id, i.key, i.key, 'DETAILS_NOT_FETCHED', 'Fiche details not fetched: ' || i.error, i.finished_at, NULL
FROM (SELECT DISTINCT run_id, stage FROM claims WHERE failed > 0 AND stage = 'fetch') c
JOIN stages s ON s.run_id = c.run_id AND s.stage = c.stage
CROSS JOIN LATERAL (
    SELECT * FROM items i WHERE i.run_id = c.run_id AND i.stage = c.stage AND i.status = 'failed' AND i.target = ''
      AND i.flow = 'automation' AND (i.permanent OR s.round >= s.rounds OR s.ended_at IS NOT NULL) OFFSET 0) i
WHERE NOT EXISTS (
    SELECT FROM fiche_cache f LEFT JOIN fiche_cache_information d ON d.fiche_cache_id = f.id
    WHERE f.tenant_id = i.tenant_id AND f.fiche_id = i.key
      AND (d.fiche_cache_id IS NOT NULL OR jsonb_typeof(f.raw_data -> 'information') = 'object'
           OR NOT f.details_success AND strpos(upper(f.details_message), 'NOT_FOUND') > 0))
UNION ALL
SELECT w.waiter_run_id, w.target, i.key, coalesce(i.last_code, i.error_code), coalesce(i.last_word, i.error),
       i.finished_at, i.recordings
FROM run_waiters w
CROSS JOIN LATERAL (SELECT FROM claims c WHERE c.run_id = w.run_id AND c.failed > 0 LIMIT 1) c
CROSS JOIN LATERAL (
    SELECT coalesce(bool_and(s.ended_at IS NOT NULL), true) AS ended,
           coalesce(bool_and(s.ended_at IS NOT NULL OR s.round >= s.rounds), true) AS no_round_left,
           min(s.started_at) AS began
    FROM stages s WHERE s.run_id = w.waiter_run_id AND s.units IS NOT NULL) s
CROSS JOIN LATERAL (
    SELECT i.*, o.error_code AS last_code, o.reason AS last_word,
           CASE WHEN i.target <> '' THEN t.total_recordings END AS recordings
    FROM items i JOIN runs r ON r.id = i.run_id LEFT JOIN transcription_runs t ON t.run_id = i.run_id
    LEFT JOIN outcomes o ON o.run_id = i.run_id AND o.target = i.key
    WHERE i.run_id = w.run_id AND i.status = 'failed'
      AND (i.permanent AND i.target <> '' OR s.ended OR s.no_round_left AND r.parent_run_id = w.waiter_run_id)
      AND NOT EXISTS (SELECT FROM run_waiters l
                      WHERE l.waiter_run_id = w.waiter_run_id AND l.target = w.target AND l.run_id > w.run_id)
      AND NOT EXISTS (SELECT FROM recordings g WHERE g.fiche_cache_id = t.fiche_cache_id AND g.call_id = i.key
                      AND (g.has_transcription OR g.removed_at IS NOT NULL OR g.created_at > s.began))
    OFFSET 0) i
WHERE w.waiter_run_id IS NOT NULL;
COMMENT ON VIEW final_failures IS 'failed items that no further round will repeat, by the target they belong to';
"""

# One row per target: its code is that of the first failure; for recordings the text has how many of how many failed so,
# which ones, and how many others failed for another reason.
EXPECTED = """
CREATE VIEW expected_failures AS
SELECT run_id, target, codes[1] AS error_code,
       CASE WHEN recordings IS NULL THEN errors[1] ELSE
           alike || ' of ' || recordings || CASE recordings WHEN 1 THEN ' recording' ELSE ' recordings' END
           || CASE codes[1] WHEN 'NO_URL' THEN
                  CASE alike WHEN 1 THEN ' has' ELSE ' have' END || ' no URL in the CRM' ELSE ': ' || errors[1] END
           || ' (' || array_to_string(named[1:3], ', ') || CASE WHEN alike > 3 THEN ', …' ELSE '' END || ')'
           || CASE WHEN failed > alike THEN
                  '; ' || failed - alike || ' more failed (' || array_to_string(others, ', ') || ')' ELSE '' END
       END AS error, CASE WHEN recordings IS NOT NULL THEN failed END AS failed
FROM (
    SELECT k.run_id, k.target, k.codes, k.errors, k.recordings, cardinality(k.codes) AS failed,
           cardinality(array_positions(k.codes, k.codes[1])) AS alike,
           ARRAY(SELECT u.key FROM unnest(k.codes, k.keys) WITH ORDINALITY AS u(code, key, n)
                 WHERE u.code = k.codes[1] ORDER BY u.n) AS named,
           ARRAY(SELECT DISTINCT u.code FROM unnest(k.codes) AS u(code) WHERE u.code <> k.codes[1] ORDER BY 1) AS others
    FROM (
        SELECT f.run_id, f.target, max(f.recordings) AS recordings,
               array_agg(coalesce(f.error_code, 'FAILED') ORDER BY f.finished_at, f.key) AS codes,
               array_agg(f.error ORDER BY f.finished_at, f.key) AS errors,
               array_agg(f.key ORDER BY f.finished_at, f.key) AS keys
        FROM final_failures f
        CROSS JOIN LATERAL (
            SELECT FROM outcomes o WHERE o.run_id = f.run_id AND o.target = f.target AND o.outcome IS NULL OFFSET 0) o
        GROUP BY f.run_id, f.target) k) told;
COMMENT ON VIEW expected_failures IS 'targets without an outcome that are known to fail, and why';
"""

# Unique per failure text: an item that fails in the same way increments the count of the line.
LOG = """
ALTER TABLE run_log ADD COLUMN count integer NOT NULL DEFAULT 1;
ALTER TABLE run_log ADD COLUMN targets text[];
ALTER TABLE run_log ADD COLUMN last_at timestamptz;
ALTER TABLE run_log ADD COLUMN fold bytea;
COMMENT ON COLUMN run_log.count IS 'how often it was said: first `at`, last `last_at`';
COMMENT ON COLUMN run_log.targets IS 'the targets it is about, the first five of them';
COMMENT ON COLUMN run_log.fold IS 'of a failure: digest of stage, code and message, by which equal ones are one line';

CREATE FUNCTION run_log_message(message text, count integer, targets text[]) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN count > 1 THEN count || ' × ' ELSE '' END || message
        || coalesce(' (' || array_to_string(targets, ', ') || CASE WHEN count > 5 AND cardinality(targets) >= 5
                                                                  THEN ', …' ELSE '' END || ')', '') $$;
COMMENT ON FUNCTION run_log_message IS 'a line of run_log as people read it';

DROP VIEW automation_logs;
CREATE VIEW automation_logs AS
SELECT l.id, l.run_id, l.at AS "timestamp", l.level, run_log_message(l.message, l.count, l.targets) AS message,
       l.data AS metadata, l.event_id, r.tenant_id, l.count, l.targets, l.last_at
FROM run_log l JOIN runs r ON r.id = l.run_id AND r.flow = 'automation';
"""  # noqa: RUF001 - a multiplication sign on purpose


def upgrade() -> None:
    connection = op.get_bind().connection.driver_connection
    connection.execute(STAGES)  # type: ignore[union-attr]
    update_in_batches("stages", ROUNDS, OPEN_WITH_ROUNDS, key="run_id")
    for part in (FINAL, EXPECTED, LOG):
        connection.execute(part)  # type: ignore[union-attr]
