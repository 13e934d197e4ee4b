"""Faults of company enrichment (I-09, I-10, I-19)."""

from __future__ import annotations

from tests.verify.plants import Fault, sql, then

COMPANY = """
INSERT INTO companies (siren, enrichment_status, created_at, status_at) VALUES ('552049447', 'RUNNING', now(), now())
"""
JOB = """
INSERT INTO enrichment_jobs (run_id, tenant_id, siren, trigger, correlation_id, idempotency_key, status, asked,
                             created_at, ended_at)
SELECT id, 'default', '552049447', 'MANUAL_REFRESH', 'c', 'k', CASE WHEN {ended} THEN 'FAILED' ELSE 'RUNNING' END,
       '{{}}', now(), CASE WHEN {ended} THEN now() END
FROM runs WHERE (ended_at IS NOT NULL) = {of_ended} ORDER BY id LIMIT 1
"""

FAULTS = [
    Fault("I-10", "a company that is asked for without its lock", "is not held by run",
          then(sql(COMPANY), sql(JOB.format(ended="false", of_ended="false")))),
    Fault("I-19", "a job that outlived its run", "but its run ended",
          sql(JOB.format(ended="false", of_ended="true"))),
    Fault("I-09", "a job whose end was not published", "Completed was published 0 times",
          sql(JOB.format(ended="true", of_ended="true"))),
]  # fmt: skip
