"""I-23, rule runs: their statuses follow the counts of their targets, their sums equal their rows, their histories have
no gap, every applied target has its write, and no write is sent that the plan does not have."""

from __future__ import annotations

from ecluse.verify.database import Check

# The changes of status that are allowed, of runs and of targets; '' is the creation.
MOVES = """(VALUES
    ('run', '', 'PREVIEW'), ('run', 'PREVIEW', 'QUEUED'), ('run', 'QUEUED', 'APPLYING'), ('run', 'APPLYING', 'APPLIED'),
    ('run', 'APPLYING', 'PARTIAL'), ('run', 'APPLYING', 'FAILED'), ('run', 'PARTIAL', 'APPLYING'),
    ('run', 'FAILED', 'APPLYING'), ('run', 'APPLIED', 'ROLLED_BACK'), ('run', 'PARTIAL', 'ROLLED_BACK'),
    ('target', '', 'PREVIEW'), ('target', 'PREVIEW', 'QUEUED'), ('target', 'QUEUED', 'APPLYING'),
    ('target', 'APPLYING', 'APPLIED'), ('target', 'APPLYING', 'QUEUED'), ('target', 'APPLYING', 'FAILED'),
    ('target', 'FAILED', 'QUEUED'), ('target', 'APPLIED', 'ROLLED_BACK')) AS m(kind, former, following)"""
LAST_RUN = "(SELECT max(x.run_id) FROM rule_executions x WHERE x.rule_run_id = r.id) AS run_id"

# What was applied and then rolled back by choice counts as applied. Targets that were not chosen stay PREVIEW.
STATUS = f"""
SELECT 'rule run ' || r.id AS subject, {LAST_RUN},
       format('%s, but its targets are: %s', r.status, coalesce(n.words, 'none')) AS message
FROM rule_runs r LEFT JOIN (
    SELECT rule_run_id, sum(n) FILTER (WHERE status IN ('QUEUED', 'APPLYING')) AS unfinished,
           sum(n) FILTER (WHERE status = 'APPLIED') AS applied, sum(n) FILTER (WHERE status = 'FAILED') AS failed,
           sum(n) FILTER (WHERE status IN ('APPLIED', 'ROLLED_BACK')) AS were_applied,
           sum(n) FILTER (WHERE status <> 'PREVIEW') AS queued,
           string_agg(n || ' ' || status, ', ' ORDER BY status) AS words
    FROM (SELECT rule_run_id, status, count(*) AS n FROM rule_targets GROUP BY 1, 2) c GROUP BY 1) n
    ON n.rule_run_id = r.id
WHERE CASE r.status WHEN 'PREVIEW' THEN n.queued > 0
    WHEN 'QUEUED' THEN n.were_applied > 0 OR n.failed > 0
    WHEN 'APPLIED' THEN n.unfinished > 0 OR n.failed > 0 OR n.applied IS NULL
    WHEN 'PARTIAL' THEN n.unfinished > 0 OR n.failed IS NULL OR n.were_applied IS NULL
    WHEN 'FAILED' THEN n.unfinished > 0 OR n.failed IS NULL OR n.were_applied > 0
    WHEN 'ROLLED_BACK' THEN n.unfinished > 0 OR n.applied > 0 OR n.were_applied IS NULL END ORDER BY r.id
"""  # noqa: S608 - the fragment above
# The end of an execution and the status that follows from it are one transaction.
OPEN = """
SELECT 'rule run ' || r.id AS subject, x.run_id, CASE WHEN e.id IS NULL
    THEN format('%s, but no execution of it is open', r.status)
    ELSE format('%s, but run %s still applies it', r.status, e.id) END AS message
FROM rule_runs r
LEFT JOIN rule_executions x ON x.rule_run_id = r.id AND x.kind = 'apply' AND x.number = r.round
LEFT JOIN runs e ON e.id = x.run_id AND e.ended_at IS NULL
WHERE (r.status IN ('QUEUED', 'APPLYING')) <> (e.id IS NOT NULL) ORDER BY r.id
"""
INSTANTS = f"""
SELECT 'rule run ' || r.id AS subject, {LAST_RUN},
       format('queued %s, started %s, finished %s', r.queued_at, r.started_at, r.finished_at) AS message
FROM rule_runs r WHERE r.queued_at > r.started_at OR r.started_at > r.finished_at ORDER BY r.id
"""  # noqa: S608 - the fragment above
TARGETS = f"""
SELECT format('rule run %s target %s', r.id, t.id) AS subject, {LAST_RUN}, CASE
    WHEN t.applied_at IS NULL AND t.status = 'APPLIED' THEN 'APPLIED, but not at any time'
    ELSE format('%s after %s retries', t.status, t.attempts) END AS message
FROM rule_targets t JOIN rule_runs r ON r.id = t.rule_run_id
WHERE t.attempts < 0 OR t.attempts > 3 AND t.status <> 'FAILED' OR t.status = 'APPLIED' AND t.applied_at IS NULL
ORDER BY t.id
"""  # noqa: S608 - the fragment above
COUNTS = f"""
SELECT 'rule run ' || r.id AS subject, {LAST_RUN}, format('its plan changes %s and excludes %s variants, but it has '
    '%s targets and %s exclusions', r.totals ->> 'changed', (r.totals ->> 'selected')::int
    - (r.totals ->> 'changed')::int, coalesce(t.n, 0), coalesce(e.n, 0)) AS message
FROM rule_runs r LEFT JOIN (SELECT rule_run_id, count(*) AS n FROM rule_targets GROUP BY 1) t ON t.rule_run_id = r.id
LEFT JOIN (SELECT rule_run_id, count(*) AS n FROM rule_exclusions GROUP BY 1) e ON e.rule_run_id = r.id
WHERE r.totals IS NOT NULL AND ((r.totals ->> 'changed')::int <> coalesce(t.n, 0)
    OR (r.totals ->> 'selected')::int <> coalesce(t.n, 0) + coalesce(e.n, 0)) ORDER BY r.id
"""  # noqa: S608 - the fragment above
MISMATCHES = """
SELECT 'reconciliation ' || c.id AS subject, c.run_id,
       format('counts %s mismatches, but has %s', c.mismatches, coalesce(m.n, 0)) AS message
FROM rule_reconciliations c LEFT JOIN (
    SELECT reconciliation_id, count(*) AS n FROM rule_mismatches GROUP BY 1) m ON m.reconciliation_id = c.id
WHERE c.mismatches <> coalesce(m.n, 0) ORDER BY c.id
"""
HISTORY = f"""
WITH steps AS (
    SELECT h.rule_run_id, h.rule_target_id, h.from_status, h.to_status, h.id,
           lag(h.to_status) OVER w AS former, lead(h.id) OVER w IS NULL AS is_last
    FROM rule_history h WINDOW w AS (PARTITION BY h.rule_run_id, h.rule_target_id ORDER BY h.id))
SELECT format('rule run %s%s', r.id, ' target ' || s.rule_target_id) AS subject, {LAST_RUN}, CASE
    WHEN s.from_status IS DISTINCT FROM s.former THEN format('moved from %s to %s when it was %s',
        coalesce(s.from_status, 'nothing'), s.to_status, coalesce(s.former, 'nothing'))
    WHEN m.kind IS NULL THEN format('moved from %s to %s, which is not allowed', s.from_status, s.to_status)
    ELSE format('the last recorded status is %s, but it is %s', s.to_status, coalesce(t.status, r.status)) END
    AS message
FROM steps s JOIN rule_runs r ON r.id = s.rule_run_id LEFT JOIN rule_targets t ON t.id = s.rule_target_id
LEFT JOIN {MOVES} ON m.kind = CASE WHEN s.rule_target_id IS NULL THEN 'run' ELSE 'target' END
    AND m.former = coalesce(s.from_status, '') AND m.following = s.to_status
WHERE s.from_status IS DISTINCT FROM s.former OR m.kind IS NULL
   OR s.is_last AND s.to_status <> CASE WHEN s.rule_target_id IS NULL THEN r.status ELSE t.status END ORDER BY s.id
"""  # noqa: S608 - the fragments above
# Writes of executions whose rows retention has deleted are not missed.
NO_WRITE = f"""
WITH written AS (
    SELECT DISTINCT x.rule_run_id, e.key, CASE e.stage WHEN 'rollback' THEN 'ROLLED_BACK' ELSE 'APPLIED' END AS status
    FROM rule_executions x JOIN effects e ON e.run_id = x.run_id AND e.state = 'applied')
SELECT format('rule run %s target %s', r.id, t.id) AS subject, {LAST_RUN},
       format('%s, but no write of it is applied', t.status) AS message
FROM rule_targets t JOIN rule_runs r ON r.id = t.rule_run_id LEFT JOIN written w
    ON w.rule_run_id = t.rule_run_id AND w.key = t.id::text AND w.status = t.status
WHERE t.status IN ('APPLIED', 'ROLLED_BACK') AND w.key IS NULL AND NOT EXISTS (
    SELECT 1 FROM rule_executions x WHERE x.rule_run_id = r.id AND x.kind IN ('apply', 'rollback')
      AND NOT EXISTS (SELECT 1 FROM runs e WHERE e.id = x.run_id)) ORDER BY t.id
"""  # noqa: S608 - the fragment above
# A write that was in doubt when its execution ended may turn out to be applied later: its target says OUTCOME_UNKNOWN.
FALSE_FAILURE = """
SELECT format('rule run %s target %s', x.rule_run_id, t.id) AS subject, x.run_id, t.variant_id AS target,
       format('FAILED (%s), but its write %s is applied', t.error_code, e.id) AS message
FROM rule_targets t JOIN rule_executions x ON x.rule_run_id = t.rule_run_id AND x.kind = 'apply' AND x.number = t.round
JOIN runs r ON r.id = x.run_id JOIN effects e ON e.run_id = x.run_id AND e.key = t.id::text
WHERE t.status = 'FAILED' AND e.state = 'applied'
  AND (e.settled_at < r.ended_at OR t.error_code <> 'OUTCOME_UNKNOWN') ORDER BY t.id
"""
UNPLANNED = """
SELECT format('rule run %s effect %s', x.rule_run_id, e.id) AS subject, x.run_id, e.target,
       format('sets %s to %s, which the plan does not', e.target, e.wanted) AS message
FROM rule_executions x JOIN effects e ON e.run_id = x.run_id
LEFT JOIN rule_targets t ON t.rule_run_id = x.rule_run_id AND t.id::text = e.key AND t.variant_id = e.target
WHERE t.id IS NULL OR (e.wanted ->> 'amount')::bigint IS DISTINCT FROM
    CASE e.stage WHEN 'rollback' THEN t.before_amount ELSE t.after_amount END ORDER BY e.id
"""

I_23_RULE_RUNS = Check(
    "I-23",
    "SELECT (SELECT count(*) FROM rule_runs) + (SELECT count(*) FROM rule_targets) AS n",
    (STATUS, OPEN, INSTANTS, TARGETS, COUNTS, MISMATCHES, HISTORY, NO_WRITE, FALSE_FAILURE, UNPLANNED),
)
