"""Metrics of company enrichment that are not those of every flow: what requests led to and how jobs ended, counted
by this process, and the companies and open jobs in the database. Calls, errors and latency of a register are those of
its stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

requests: Counter[tuple[str, str]] = Counter()  # trigger, result: cached, attached or started
jobs: Counter[tuple[str]] = Counter()  # status at the end

OPEN = """
SELECT ARRAY[s.status], count(j.run_id) FROM unnest(ARRAY['PENDING', 'RUNNING']) AS s(status)
LEFT JOIN enrichment_jobs j ON j.status = s.status AND j.ended_at IS NULL GROUP BY 1
"""
OLDEST = """
SELECT ARRAY[]::text[], coalesce(extract(epoch FROM ecluse_now() - min(created_at)), 0)::float8
FROM enrichment_jobs WHERE ended_at IS NULL AND status = 'PENDING'
"""
BY_STATUS = "SELECT ARRAY[enrichment_status], count(*) FROM companies GROUP BY 1"
OPEN_MEANING = "Jobs that have not ended: PENDING before their first call, then RUNNING."
OLDEST_MEANING = "Age of the oldest job that has not called a register yet; 0 without any."
# Name, meaning, statement, labels.
GAUGES: Sequence[tuple[str, str, str, Sequence[str]]] = (
    ("enrichment_companies", "Companies by status.", BY_STATUS, ("status",)),
    ("enrichment_jobs_open", OPEN_MEANING, OPEN, ("status",)),
    ("enrichment_oldest_pending_seconds", OLDEST_MEANING, OLDEST, ()),
)
