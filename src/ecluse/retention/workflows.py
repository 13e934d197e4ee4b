"""Rows of ended workflows in the schema `dbos`. The open-source DBOS has no garbage collection, so this module knows
the layout of its tables; it is SQL only, so that importing it does not import DBOS."""

from __future__ import annotations

from ecluse.retention.kinds import Aged

# Inputs, outputs and steps have no foreign key to the workflow; messages, events and streams have one, and cascade.
DELETED = """
inputs AS (DELETE FROM dbos.workflow_input WHERE workflow_uuid = ANY((SELECT names FROM names)::text[])),
outputs AS (DELETE FROM dbos.workflow_output WHERE workflow_uuid = ANY((SELECT names FROM names)::text[])),
steps AS (DELETE FROM dbos.operation_outputs WHERE workflow_uuid = ANY((SELECT names FROM names)::text[]))
"""
NOT_OVER = "('PENDING', 'ENQUEUED', 'DELAYED')"

OF_RUNS = f"""
WITH names AS MATERIALIZED (
    SELECT ARRAY(SELECT tenant_id || '/' || event_key FROM runs WHERE id = ANY(%(runs)s) AND orchestrated) AS names),
{DELETED}
DELETE FROM dbos.workflow_status WHERE workflow_uuid = ANY((SELECT names FROM names)::text[])
"""  # noqa: S608 - our own words

# A workflow that waits in its queue, is to be resumed, or leads an open run is not deleted.
WORKFLOWS = Aged(
    "workflows",
    "dbos.workflow_status",
    "to_timestamp(t.completed_at / 1000.0)",
    order="completed_at",
    where="t.completed_at IS NOT NULL",
    also=f"""t.status NOT IN {NOT_OVER} AND NOT EXISTS (
        SELECT 1 FROM runs r WHERE r.tenant_id = split_part(t.workflow_uuid, '/', 1)
          AND r.event_key = substr(t.workflow_uuid, strpos(t.workflow_uuid, '/') + 1) AND r.ended_at IS NULL)""",  # noqa: S608
    statement=f"""
WITH page AS MATERIALIZED (
    SELECT t.workflow_uuid AS name, t.completed_at AS number, {{at}} < %(before)s AS old, {{also}} AS over
    FROM {{table}} t
    WHERE {{where}} AND t.completed_at > %(after)s::bigint ORDER BY t.completed_at LIMIT %(limit)s),
names AS MATERIALIZED (SELECT ARRAY(SELECT name FROM page WHERE old AND over) AS names),
{DELETED},
gone AS (DELETE FROM {{table}} t WHERE t.workflow_uuid = ANY((SELECT names FROM names)::text[]) RETURNING 1)
SELECT (SELECT count(*) FROM gone), count(*) = %(limit)s AND bool_or(old), max(number)::text FROM page
""",  # noqa: S608 - our own words
)
