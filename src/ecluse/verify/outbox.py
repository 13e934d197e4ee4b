"""I-09, the outbox: the events of a run agree with its row and exist once; every event is published, and those of one
aggregate in order; every alert has its events.

A run without a `started` event began before the outbox existed: its missing events are no violation.
"""

from __future__ import annotations

from ecluse.verify import automation, enrichment, transcriptions
from ecluse.verify.database import Check
from ecluse.verify.stuck import CARE

OF_RUNS = """
WITH events AS (
    SELECT e.*, r.id AS run_id, substr(e.event_type, length(r.flow) + 2) AS what, r.status, r.state, r.selected,
           r.successful, r.failed, r.ignored, r.end_cause, r.ended_at
    FROM events_outbox e JOIN runs r ON e.aggregate = 'run:' || r.id AND e.tenant_id = r.tenant_id
    WHERE e.event_type LIKE r.flow || '/%')
"""
AGGREGATE = "tenant_id || '/' || aggregate AS aggregate"

HOW_OFTEN = f"""
{OF_RUNS}
SELECT 'run ' || run_id AS subject, run_id, CASE
    WHEN n.started > 1 THEN format('started was published %s times', n.started)
    WHEN n.selected > 1 THEN format('selected was published %s times', n.selected)
    WHEN n.open THEN 'its end was published, but the run is open'
    ELSE format('ended, but its end was published %s times', n.ended) END AS message
FROM (SELECT run_id, bool_or(ended_at IS NULL) AS open, count(*) FILTER (WHERE what = 'started') AS started,
             count(*) FILTER (WHERE what = 'selected') AS selected,
             count(*) FILTER (WHERE what IN ('completed', 'failed')) AS ended FROM events GROUP BY run_id) n
WHERE n.started > 1 OR n.selected > 1 OR n.started = 1 AND n.ended <> (NOT n.open)::int ORDER BY run_id
"""  # noqa: S608 - the fragment above

# Statuses given to a run after its end (reverted, expired …) differ from its events: such runs are excluded.
WHAT = f"""
{OF_RUNS}
SELECT 'run ' || run_id AS subject, run_id, {AGGREGATE},
       format('published %s with %s, but the run is %s', event_type, payload, due) AS message
FROM events, LATERAL (SELECT jsonb_build_object('run_id', run_id::text, 'selected', selected) || CASE what
    WHEN 'selected' THEN '{{}}' ELSE jsonb_build_object('status', status, 'successful', successful, 'failed', failed,
        'ignored', ignored, 'end_cause', end_cause) END AS due) d
WHERE what = 'selected' AND NOT payload @> due OR state IN ('succeeded', 'partial', 'failed', 'cancelled')
  AND what IN ('completed', 'failed') AND (NOT payload @> due OR (what = 'completed') <> (end_cause = 'normal'))
ORDER BY run_id, id
"""  # noqa: S608 - the fragments above

NO_SUCH_RUN = """
SELECT 'event ' || e.id AS subject, e.tenant_id || '/' || e.aggregate AS aggregate,
       format('%s of tenant %s belongs to a run that does not exist', e.event_key, e.tenant_id) AS message
FROM events_outbox e LEFT JOIN runs r ON e.aggregate = 'run:' || r.id AND e.tenant_id = r.tenant_id
WHERE e.aggregate ~ '^run:[0-9]+$' AND r.id IS NULL ORDER BY e.id
"""

ORDER = f"""
SELECT 'event ' || id AS subject, {AGGREGATE}, CASE
    WHEN former IS NULL THEN format('published, but the earlier event %s is not', former_id)
    ELSE format('published as %s, but the earlier event %s as %s', published_seq, former_id, former) END AS message
FROM (SELECT *, lag(id) OVER o AS former_id, lag(published_seq) OVER o AS former FROM events_outbox
      WINDOW o AS (PARTITION BY tenant_id, aggregate ORDER BY id)) e
WHERE published_seq IS NOT NULL AND former_id IS NOT NULL AND (former IS NULL OR former > published_seq) ORDER BY id
"""  # noqa: S608 - the fragment above

# An event that a sink rejects is retried for as long as it takes, and its row records the tries: it is not forgotten.
UNPUBLISHED = f"""
{CARE}
SELECT 'event ' || e.id AS subject, {AGGREGATE},
       format('occurred at %s, but is not published', occurred_at) AS message
FROM care, events_outbox e
WHERE NOT care.moved AND published_seq IS NULL AND greatest(occurred_at, care.since) < now() - interval '60 seconds'
  AND NOT EXISTS (SELECT 1 FROM events_outbox b WHERE b.published_seq IS NULL AND b.tenant_id = e.tenant_id
      AND b.aggregate = e.aggregate AND b.id <= e.id AND b.tries > 0 AND b.try_at > now() - interval '60 seconds')
ORDER BY e.id
"""  # noqa: S608 - the fragments above

# An alert and its events are one transaction. Events older than the oldest one are deleted. The latest run of the flow
# tells the story.
OF_ALERTS = """
SELECT 'alert ' || a.id AS subject, format('%s, but without an event', w.what) AS message,
       (SELECT max(r.id) FROM runs r WHERE r.tenant_id = a.tenant_id AND r.flow = a.flow) AS run_id
FROM alerts a CROSS JOIN LATERAL (VALUES ('raised', a.raised_at), ('cleared', a.cleared_at)) AS w(what, at)
LEFT JOIN events_outbox e ON e.tenant_id = a.tenant_id AND e.event_key = format('%s-alert-%s-%s:%s', a.flow, a.id,
    to_char(a.raised_at AT TIME ZONE 'UTC', 'YYYYMMDD"T"HH24MISS"Z"'), w.what)
WHERE w.at > (SELECT min(occurred_at) FROM events_outbox) AND e.id IS NULL ORDER BY a.id
"""

STATEMENTS = (
    *(HOW_OFTEN, WHAT, NO_SUCH_RUN, ORDER, UNPUBLISHED, OF_ALERTS),
    *(transcriptions.END_PUBLISHED, automation.END_PUBLISHED, enrichment.END_PUBLISHED),
)
I_09_OUTBOX = Check("I-09", "SELECT count(*) AS n FROM events_outbox", STATEMENTS)
