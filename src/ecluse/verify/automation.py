"""Automation: a successful fiche has its transcripts and its audits (I-04), the sums of a run and of its schedule equal
their rows (I-12), no audit is undecided after the end of its run (I-19), and the end is published exactly once
(I-09)."""

from __future__ import annotations

from ecluse.verify.retention import before

# Recordings that came after the stage began, were removed upstream, or were updated after the stage ended are excluded.
NO_TRANSCRIPT = """
SELECT format('run %s fiche %s', o.run_id, o.target) AS subject, o.run_id, o.target,
       format('successful, but %s recordings have no transcript', count(*)) AS message
FROM automation_run_fiches f JOIN outcomes o ON o.run_id = f.run_id AND o.target = f.fiche_id
JOIN stages s ON s.run_id = f.run_id AND s.stage = 'transcribe'
JOIN recordings r ON r.fiche_cache_id = f.fiche_cache_id AND r.created_at <= s.started_at AND r.removed_at IS NULL
    AND r.updated_at <= s.ended_at
WHERE o.outcome = 'successful' AND NOT r.has_transcription GROUP BY o.run_id, o.target ORDER BY 2, 3
"""

UNAUDITED = """
SELECT format('run %s fiche %s', o.run_id, o.target) AS subject, o.run_id, o.target,
       format('successful, but %s of %s audits are completed', count(a.id) FILTER (WHERE a.status = 'completed'),
              count(a.id)) AS message
FROM automation_run_facts f JOIN outcomes o ON o.run_id = f.run_id
LEFT JOIN audits a ON a.automation_run_id = o.run_id AND a.fiche_id = o.target
WHERE o.outcome = 'successful' AND f.config_snapshot -> 'run_audits' = 'true' AND NOT EXISTS (
    SELECT 1 FROM automation_run_fiches e
    WHERE e.run_id = o.run_id AND e.fiche_id = o.target AND e.erased_at IS NOT NULL) GROUP BY o.run_id, o.target
HAVING count(a.id) = 0 OR bool_or(a.status <> 'completed') ORDER BY 2, 3
"""

# Transcripts may be added after the end of the run; audits exist, decided or not, when it ends. Audits of an erased
# fiche count, too. Of a run beyond retention, the transcription runs may be deleted already.
SUMMARY = f"""
SELECT 'run ' || r.id AS subject, r.id AS run_id, CASE
    WHEN coalesce(a.n, 0) + coalesce(g.n, 0) <> f.audits_run THEN
        format('reports %s audits, but has %s', f.audits_run, coalesce(a.n, 0) + coalesce(g.n, 0))
    WHEN coalesce(t.n, 0) < f.transcriptions_run AND r.ended_at >= {before("runs")} THEN
        format('reports %s transcripts, but its transcription runs made %s', f.transcriptions_run, coalesce(t.n, 0))
    ELSE format('summary reports %s successful and %s failed of %s, and %s ignored, but the run %s, %s and %s',
        f.result_summary -> 'successful_fiches', f.result_summary -> 'failed_fiches',
        f.result_summary -> 'total_fiches', f.result_summary -> 'ignored_fiches', r.successful, r.failed, r.ignored) END
    AS message
FROM runs r JOIN automation_run_facts f ON f.run_id = r.id
LEFT JOIN (SELECT automation_run_id, count(*) AS n FROM audits GROUP BY 1) a ON a.automation_run_id = r.id
LEFT JOIN (SELECT run_id, sum(erased_audits) AS n FROM automation_run_fiches GROUP BY 1) g ON g.run_id = r.id
LEFT JOIN (
    SELECT c.parent_run_id, count(*) AS n FROM runs c JOIN items i ON i.run_id = c.id
    WHERE c.flow = 'transcription' AND i.status = 'succeeded' AND i.stage <> 'refresh' GROUP BY 1) t
    ON t.parent_run_id = r.id
WHERE r.ended_at IS NOT NULL AND (
    coalesce(a.n, 0) + coalesce(g.n, 0) <> f.audits_run OR
    coalesce(t.n, 0) < f.transcriptions_run AND r.ended_at >= {before("runs")} OR
    (f.result_summary -> 'successful_fiches', f.result_summary -> 'failed_fiches', f.result_summary -> 'ignored_fiches',
     f.result_summary -> 'total_fiches') IS DISTINCT FROM
    (to_jsonb(r.successful), to_jsonb(r.failed), to_jsonb(r.ignored), to_jsonb(r.successful + r.failed)))
ORDER BY r.id
"""  # noqa: S608 - the fragment of retention

# After redrives the last status is computed from the targets of the last run, so it need not be the status of any run.
STATISTICS = """
SELECT 'schedule ' || a.id AS subject, a.id AS schedule_id, format('counts %s runs (%s successful, %s partial, '
    '%s failed, %s cancelled; the last %s), but its ended runs are: %s', a.total_runs, a.successful_runs,
    a.partial_runs, a.failed_runs, a.cancelled_runs, coalesce(a.last_run_status, 'none'),
    coalesce(left(array_to_string(n.words, ', '), 200), 'none')) AS message
FROM automation_settings a LEFT JOIN (
    SELECT schedule_id, array_agg(CASE WHEN state = 'cancelled' THEN state WHEN status = 'completed' THEN 'success'
               ELSE status END ORDER BY id) AS words,
           bool_or(redrive_of IS NOT NULL OR id = 0) AS redriven
    FROM (SELECT schedule_id, status, state, redrive_of, id FROM runs
          WHERE flow = 'automation' AND ended_at IS NOT NULL
          UNION ALL SELECT schedule_id, status, status, NULL, 0 FROM pruned_runs, generate_series(1, runs)) r
    GROUP BY 1) n ON n.schedule_id = a.id
WHERE a.total_runs <> coalesce(cardinality(n.words), 0)
   OR a.successful_runs <> coalesce(cardinality(array_positions(n.words, 'success')), 0)
   OR a.partial_runs <> coalesce(cardinality(array_positions(n.words, 'partial')), 0)
   OR a.failed_runs <> coalesce(cardinality(array_positions(n.words, 'failed')), 0)
   OR a.cancelled_runs <> coalesce(cardinality(array_positions(n.words, 'cancelled')), 0)
   OR (a.last_run_status IS NULL) <> (n.words IS NULL)
   OR NOT n.redriven AND a.last_run_status <> ALL (n.words) ORDER BY a.id
"""

UNDECIDED = """
SELECT 'audit ' || a.id AS subject, a.run_id, a.fiche_id AS target,
       format('%s, but the run has ended', a.status) AS message
FROM audits a JOIN runs r ON r.id = a.run_id
WHERE a.status IN ('pending', 'running') AND r.ended_at IS NOT NULL ORDER BY a.id
"""

END_PUBLISHED = f"""
SELECT 'run ' || r.id AS subject, r.id AS run_id, format('ended %s, but published %s automation.run.completed and '
    '%s automation.run.failed', r.end_cause, count(*) FILTER (WHERE e.event_type = 'automation.run.completed'),
    count(*) FILTER (WHERE e.event_type = 'automation.run.failed')) AS message
FROM runs r LEFT JOIN events_outbox e ON e.tenant_id = r.tenant_id AND e.aggregate = 'run:' || r.id
    AND e.event_type IN ('automation.run.completed', 'automation.run.failed')
WHERE r.flow = 'automation' AND r.ended_at IS NOT NULL GROUP BY r.id
HAVING count(e.id) > 1 OR count(e.id) = 0 AND r.ended_at >= {before("events")}
    OR bool_or((e.event_type = 'automation.run.completed') <> (r.end_cause = 'normal'))
ORDER BY r.id
"""  # noqa: S608 - the fragment of retention
