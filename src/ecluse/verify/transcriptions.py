"""Transcriptions: a successful item has its transcript (I-04), the summary of a run equals its items (I-12), and the
end of a run is published exactly once (I-09)."""

from __future__ import annotations

from ecluse.verify.retention import before

NO_TRANSCRIPT = """
SELECT format('run %s recording %s', i.run_id, i.key) AS subject, i.run_id, i.target,
       'successful, but the recording has no transcript' AS message
FROM items i JOIN transcription_runs t ON t.run_id = i.run_id
LEFT JOIN recordings r ON r.fiche_cache_id = t.fiche_cache_id AND r.call_id = i.key
WHERE i.stage IN ('known', 'recordings') AND i.status = 'succeeded' AND r.has_transcription IS NOT TRUE
  AND t.erased_at IS NULL ORDER BY i.id
"""

SUMMARY = """
SELECT 'run ' || r.id AS subject, r.id AS run_id, format('summary reports %s processed and %s failed of %s, but its '
    'items are %s and %s of %s', t.processed, t.failed, t.target_total, i.processed, i.failed, i.all_of_them) AS message
FROM runs r JOIN transcription_runs t ON t.run_id = r.id, LATERAL (
    SELECT count(*) AS all_of_them, count(*) FILTER (WHERE error_code IS DISTINCT FROM 'RUN_ENDED') AS processed,
           count(*) FILTER (WHERE status <> 'succeeded' AND error_code IS DISTINCT FROM 'RUN_ENDED') AS failed
    FROM items WHERE run_id = r.id AND stage IN ('known', 'recordings')) i
WHERE r.ended_at IS NOT NULL
  AND (t.processed, t.failed, coalesce(t.target_total, 0)) IS DISTINCT FROM
      (i.processed::int, i.failed::int, i.all_of_them::int) ORDER BY r.id
"""

END_PUBLISHED = f"""
SELECT 'run ' || r.id AS subject, r.id AS run_id,
       format('fiche/transcribed was published %s times', count(e.id)) AS message
FROM runs r JOIN transcription_runs t ON t.run_id = r.id LEFT JOIN events_outbox e
  ON e.tenant_id = r.tenant_id AND e.aggregate = 'run:' || r.id AND e.event_type = 'fiche/transcribed'
WHERE r.ended_at IS NOT NULL GROUP BY r.id
HAVING count(e.id) > 1 OR count(e.id) = 0 AND r.ended_at >= {before("events")} ORDER BY r.id
"""  # noqa: S608 - the fragment of retention
