"""Pricing: targets with their project, and whether another run has changed their price since; what executions that are
not in the counters yet have done. Both were joined anew in each statement that needed them."""

from __future__ import annotations

from alembic import op

revision = "0045"
down_revision = "0044"

TARGETS = """
CREATE OR REPLACE VIEW rule_target_list AS
SELECT t.*, r.project_id, p.connector, EXISTS (
    SELECT FROM rule_targets n JOIN rule_runs o ON o.id = n.rule_run_id
    WHERE n.tenant_id = t.tenant_id AND n.variant_id = t.variant_id AND n.id <> t.id AND o.project_id = r.project_id
      AND (n.status IN ('QUEUED', 'APPLYING') OR n.status = 'APPLIED' AND n.applied_at > t.applied_at)) AS superseded
FROM rule_targets t JOIN rule_runs r ON r.id = t.rule_run_id JOIN pricing_projects p ON p.id = r.project_id;
COMMENT ON COLUMN rule_target_list.superseded IS 'a later run has changed its price, or is about to';
"""
COUNTS = """
CREATE OR REPLACE VIEW rule_execution_counts AS
SELECT x.run_id, r.project_id, e.id IS NULL OR e.ended_at IS NOT NULL AS is_over, c.name, coalesce(c.value, 0) AS value
FROM rule_executions x JOIN rule_runs r ON r.id = x.rule_run_id LEFT JOIN runs e ON e.id = x.run_id
CROSS JOIN LATERAL (SELECT sum(i.executions) AS applies, sum(greatest(i.executions - 1, 0)) AS retries
                    FROM items i WHERE i.run_id = x.run_id AND x.kind = 'apply') sent
CROSS JOIN LATERAL (SELECT CASE x.kind WHEN 'apply' THEN floor(extract(epoch FROM e.ended_at - e.created_at) * 1000)
                                END::bigint AS ms) took
CROSS JOIN LATERAL (
    SELECT * FROM (VALUES ('applies', sent.applies), ('retries', sent.retries),
        ('throttled', (SELECT count(*) FROM rule_refusals f WHERE f.run_id = x.run_id)),
        ('runs', (took.ms IS NOT NULL)::int), ('duration_ms', took.ms)) AS plain(name, value)
    UNION ALL SELECT bound::text, (took.ms <= bound)::int
    FROM unnest(ARRAY[1000, 5000, 15000, 60000, 300000, 900000, 3600000, 14400000]) AS bound) c
WHERE x.counted_at IS NULL;
COMMENT ON VIEW rule_execution_counts IS 'of executions that are not in pricing_counters; a duration by its buckets';
"""


def upgrade() -> None:
    for view in (TARGETS, COUNTS):
        op.get_bind().connection.driver_connection.execute(view)  # type: ignore[union-attr]
