"""I-10, leases: the holdings of one key do not overlap and are in the order of their fence numbers; an ended run holds
no lease. (That an expired lease is ended is part of I-19.)"""

from __future__ import annotations

from ecluse.verify import enrichment
from ecluse.verify.database import Check

HOLDINGS = """
SELECT format('lease %s number %s', key, fence) AS subject, tenant_id || '/' || key AS lease, CASE
    WHEN ended_at < acquired_at THEN format('ended at %s, before it was acquired at %s', ended_at, acquired_at)
    WHEN former_end IS NULL THEN format('acquired while number %s is held', former)
    WHEN acquired_at < former_end THEN format('acquired at %s, but number %s was held until %s', acquired_at, former,
        former_end)
    ELSE format('attempt %s after attempt %s, which ended as %s', attempt, former_attempt, former_cause) END AS message
FROM (SELECT *, lag(fence) OVER o AS former, lag(ended_at) OVER o AS former_end, lag(attempt) OVER o AS former_attempt,
             lag(end_cause) OVER o AS former_cause FROM leases
      WINDOW o AS (PARTITION BY tenant_id, key ORDER BY fence)) l
WHERE ended_at < acquired_at OR former IS NOT NULL AND (former_end IS NULL OR acquired_at < former_end
    OR attempt <> CASE former_cause WHEN 'expired' THEN former_attempt + 1 ELSE 1 END)
ORDER BY tenant_id, key, fence
"""

OF_ENDED_RUNS = """
SELECT format('lease %s number %s', l.key, l.fence) AS subject, l.tenant_id || '/' || l.key AS lease,
       format('held by run %s, which ', l.run_id) || CASE WHEN r.id IS NULL THEN 'does not exist'
       ELSE format('ended at %s', r.ended_at) END AS message
FROM leases l LEFT JOIN runs r ON r.id = l.run_id
WHERE l.run_id IS NOT NULL AND l.ended_at IS NULL AND (r.id IS NULL OR r.ended_at IS NOT NULL) ORDER BY 1
"""

I_10_LEASES = Check("I-10", "SELECT count(*) AS n FROM leases", (HOLDINGS, OF_ENDED_RUNS, enrichment.UNLOCKED))
