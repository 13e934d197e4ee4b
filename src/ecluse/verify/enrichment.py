"""Company enrichment: a company that is RUNNING has its lock (I-10); a job ends with its run (I-19); the end of a job
is published exactly once to the tenant that began it (I-09). The other invariants of its states are constraints."""

from __future__ import annotations

from ecluse.verify.retention import before

UNLOCKED = """
SELECT 'company ' || c.siren AS subject, j.run_id, format('RUNNING since %s, but its lock %s is not held by %s',
       c.status_at, 'company_enrichment:' || c.siren, coalesce('run ' || j.run_id, 'a job: it has none')) AS message
FROM companies c LEFT JOIN enrichment_jobs j ON j.siren = c.siren AND j.ended_at IS NULL
WHERE c.enrichment_status = 'RUNNING' AND NOT EXISTS (
    SELECT 1 FROM leases l WHERE l.tenant_id = 'system' AND l.key = 'company_enrichment:' || c.siren
      AND l.ended_at IS NULL AND l.run_id = j.run_id)
ORDER BY c.siren
"""

OUTLIVED = """
SELECT 'enrichment job ' || j.run_id AS subject, j.run_id,
       format('open (%s), but its run ended at %s', j.status, r.ended_at) AS message
FROM enrichment_jobs j JOIN runs r ON r.id = j.run_id
WHERE j.ended_at IS NULL AND r.ended_at IS NOT NULL ORDER BY j.run_id
"""

END_PUBLISHED = f"""
SELECT 'enrichment job ' || j.run_id AS subject, j.run_id,
       format('CompanyEnrichmentCompleted was published %s times', count(e.id)) AS message
FROM enrichment_jobs j JOIN runs r ON r.id = j.run_id LEFT JOIN events_outbox e
  ON e.tenant_id = j.tenant_id AND e.aggregate = 'company:' || j.siren
     AND e.event_type = 'CompanyEnrichmentCompleted' AND e.payload ->> 'job_id' = j.run_id::text
WHERE j.ended_at IS NOT NULL GROUP BY j.run_id, j.ended_at
HAVING count(e.id) > 1 OR count(e.id) = 0 AND j.ended_at >= {before("events")} ORDER BY j.run_id
"""  # noqa: S608 - the fragment of retention
