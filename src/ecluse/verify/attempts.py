"""I-13, attempts: how often an item was executed, and how often its writes were sent.

A failed execution is a row in `attempts`, numbered from 1 in its round; a success adds one to the count and no row. Not
counted are executions interrupted by a crash or a shutdown (a row about a paid call that was then sent again is no
execution), and executions that failed because the vendor was down. The budget limits executions; beyond it a write in
doubt is only read back, for as long as it takes, and not sent again. Every send belongs to one execution, and every
execution to one claim of its item: that limits sends without knowing how many executions were interrupted. Deaths of
workers use up no budget, and an item is given up because of them only if workers died while it ran alone.
"""

from ecluse.verify.retention import before, remains

EXECUTED = """attempts WHERE (maybe_paid AND error_code IN ('WORKER_CRASHED', 'INTERRUPTED')) IS NOT TRUE
    AND outage IS NOT TRUE"""

# Retention deletes attempts by their own age: a run created after this instant still has all of them.
SINCE = before("attempts")

NUMBERED = f"""
SELECT format('run %s item %s/%s', i.run_id, i.stage, i.key) AS subject, i.run_id, i.id AS item_id,
       format('the failed executions of round %s are numbered %s', a.round, a.numbers) AS message
FROM (SELECT item_id, round, array_agg(execution ORDER BY execution) AS numbers, max(execution) AS last,
             count(DISTINCT execution) AS different FROM {EXECUTED} GROUP BY 1, 2) a
JOIN items i ON i.id = a.item_id JOIN runs r ON r.id = i.run_id AND r.created_at >= {SINCE}
WHERE a.numbers[1] <> 1 OR a.last <> cardinality(a.numbers) OR a.different <> cardinality(a.numbers) ORDER BY i.id
"""  # noqa: S608 - our own names

COUNTED = f"""
SELECT format('run %s item %s/%s', i.run_id, i.stage, i.key) AS subject, i.run_id, i.id AS item_id, format(
    '%s after %s executions, but %s recorded as failed', i.status, i.executions, coalesce(a.n, 0)) AS message
FROM items i JOIN runs r ON r.id = i.run_id AND r.created_at >= {SINCE}
LEFT JOIN (SELECT item_id, round, count(*) AS n FROM {EXECUTED} GROUP BY 1, 2) a
  ON a.item_id = i.id AND a.round = i.round
WHERE i.executions - (i.status IN ('succeeded', 'ignored'))::int <> coalesce(a.n, 0) ORDER BY i.id
"""  # noqa: S608 - our own names

WITHIN_BUDGET = f"""
SELECT format('run %s item %s/%s', i.run_id, i.stage, i.key) AS subject, i.run_id, i.id AS item_id,
       format('%s executions in round %s, but the budget is %s', x.n, x.round, s.budget) AS message
FROM (SELECT item_id, round, max(n) AS n FROM (
          SELECT item_id, round, count(*) AS n FROM {EXECUTED} GROUP BY 1, 2
          UNION ALL SELECT id, round, executions FROM items WHERE executions > 0) t GROUP BY 1, 2) x
JOIN items i ON i.id = x.item_id JOIN stages s ON s.run_id = i.run_id AND s.stage = i.stage
WHERE x.n > s.budget AND NOT EXISTS (
    SELECT 1 FROM effects e WHERE e.item_id = x.item_id AND e.round = x.round AND e.sends > 0) ORDER BY i.id
"""  # noqa: S608 - our own names

NOT_SENT_BEYOND_BUDGET = """
SELECT format('run %s item %s/%s', e.run_id, e.stage, e.key) AS subject, e.run_id, e.item_id,
       format('write %s was sent again after the last execution (%s) had ended', e.id, s.budget) AS message
FROM effects e JOIN stages s ON s.run_id = e.run_id AND s.stage = e.stage
JOIN attempts a ON a.item_id = e.item_id AND a.round = e.round AND a.execution = s.budget
  AND a.outage IS NOT TRUE
WHERE e.last_send_at > a.at ORDER BY e.item_id
"""

NOT_SENT_AFTERWARDS = """
SELECT format('run %s item %s/%s', e.run_id, e.stage, e.key) AS subject, e.run_id, e.item_id,
       format('write %s was sent after the item was finished', e.id) AS message
FROM effects e JOIN items i ON i.id = e.item_id AND i.round = e.round
WHERE i.status <> 'open' AND e.last_send_at > i.finished_at ORDER BY e.item_id
"""

# Claims under these names only close items; no worker executes under them.
SENT_UNDER_A_CLAIM = """
WITH held AS (
    SELECT run_id, stage, lane_id, count(*) AS claims FROM claims
    WHERE replica_id NOT IN ('dispatch', 'gate', 'end of run', 'given up') GROUP BY 1, 2, 3)
SELECT format('run %s item %s/%s', i.run_id, i.stage, i.key) AS subject, i.run_id, i.id AS item_id,
       format('writes were sent %s times under %s claims', e.sends, coalesce(h.claims, 0)) AS message
FROM (SELECT item_id, sum(sends) AS sends FROM effects GROUP BY 1) e JOIN items i ON i.id = e.item_id
LEFT JOIN held h ON h.run_id = i.run_id AND h.stage = i.stage AND h.lane_id = i.lane_id
WHERE e.sends > coalesce(h.claims, 0) ORDER BY i.id
"""

SENT_AS_OFTEN_AS_TAKEN = f"""
WITH held AS (
    SELECT run_id, stage, sum(taken) AS taken FROM claims
    WHERE replica_id NOT IN ('dispatch', 'gate', 'end of run', 'given up') GROUP BY 1, 2)
SELECT format('run %s stage %s', e.run_id, e.stage) AS subject, e.run_id,
       format('writes were sent %s times, but items were claimed %s times', e.sends, coalesce(h.taken, 0)) AS message
FROM (SELECT run_id, stage, sum(sends) AS sends FROM effects GROUP BY 1, 2) e
LEFT JOIN held h ON h.run_id = e.run_id AND h.stage = e.stage
WHERE e.sends > coalesce(h.taken, 0) AND {remains("e.run_id")} ORDER BY 2, 1
"""  # noqa: S608 - the fragment of retention

# Items that crashed before solo deaths were counted have no `first_crash_at`.
GIVEN_UP_ON_EVIDENCE = """
SELECT format('run %s item %s/%s', i.run_id, i.stage, i.key) AS subject, i.run_id, i.id AS item_id, format(
    'given up after %s workers died with it in flight, but only %s of them while it ran alone', i.crashes,
    i.solo_deaths) AS message
FROM items i WHERE i.first_crash_at IS NOT NULL AND i.status = 'failed' AND i.error_code = 'WORKER_CRASHED'
  AND i.solo_deaths < 3 ORDER BY i.id
"""

STATEMENTS = (
    NUMBERED,
    COUNTED,
    WITHIN_BUDGET,
    NOT_SENT_BEYOND_BUDGET,
    NOT_SENT_AFTERWARDS,
    SENT_UNDER_A_CLAIM,
    SENT_AS_OFTEN_AS_TAKEN,
    GIVEN_UP_ON_EVIDENCE,
)
