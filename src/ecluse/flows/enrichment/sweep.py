"""The sweep of company enrichment, on every worker at intervals: marks stale companies, relaunches companies that are
stale, pending without a job or partial for a passing reason, and erases those that no request asked for any more."""

from __future__ import annotations

import structlog

from ecluse.access import audit_trail
from ecluse.access.refusal_log import SYSTEM
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_column, fetch_rows
from ecluse.engine import Flow
from ecluse.flows.enrichment import erasure, records, rules
from ecluse.flows.enrichment.clients import Config
from ecluse.flows.enrichment.records import Taken
from ecluse.flows.enrichment.requests import SWEEP, Desk, start
from ecluse.flows.enrichment.states import Status, Trigger, TriggerRequest

log = structlog.get_logger(__name__)
MOST = 100  # companies per sweep
# PENDING without a job is left alone for a minute: a request that is being answered has not started its job yet. The
# job runs in the tenant of the last request.
CANDIDATES = """
SELECT c.siren, c.enrichment_status, c.updated_at, c.job_ended_at, c.relaunchable, r.tenant_id, r.id,
       r.correlation_id, ecluse_now()
FROM companies c
CROSS JOIN LATERAL (
    SELECT r.* FROM requests r JOIN tenants t ON t.id = r.tenant_id AND t.disabled_at IS NULL
    WHERE r.company_siren = c.siren ORDER BY r.id DESC LIMIT 1) r
WHERE (c.enrichment_status = 'STALE' OR c.enrichment_status = 'PENDING' AND c.status_at < ecluse_now() - interval '60 s'
       OR c.enrichment_status = 'PARTIAL' AND c.relaunchable
          AND c.job_ended_at <= ecluse_now() - %(after_partial)s::interval)
  AND NOT EXISTS (SELECT 1 FROM enrichment_jobs j WHERE j.siren = c.siren AND j.ended_at IS NULL)
ORDER BY c.status_at LIMIT %(most)s
"""
FORGOTTEN = """
SELECT siren FROM companies c WHERE status_at < ecluse_now() - %(keep)s::interval
  AND NOT EXISTS (SELECT 1 FROM requests r WHERE r.company_siren = c.siren
                  AND r.created_at >= ecluse_now() - %(keep)s::interval)
  AND NOT EXISTS (SELECT 1 FROM enrichment_jobs j WHERE j.siren = c.siren AND j.ended_at IS NULL)
ORDER BY siren LIMIT %(most)s
"""


async def sweep(flow: Flow, config: Config, connection: Connection) -> None:
    """Sweep once, at most MOST companies. Idempotent: the index of open jobs prevents a second job of a company."""
    limits = config.limits
    await records.mark_stale(connection, limits.fresh)
    given = {"after_partial": limits.after_partial, "most": MOST}
    for siren, *known, tenant, request, correlation, now in await fetch_rows(connection, CANDIDATES, given):
        status, updated_at, ended_at, relaunchable = known
        if not rules.is_due(rules.Known(Status(status), updated_at, ended_at, relaunchable), limits, now):
            continue
        asked = TriggerRequest(tenant, siren, Trigger.OPENED, correlation, request)
        try:
            async with connection.transaction():
                job = (await start(Desk(connection, flow, config), [asked], now, SWEEP))[siren]
                await connection.execute("UPDATE requests SET job_id = %s WHERE id = %s", (job, request))
        except Taken:  # by a request, or by the sweep of another replica
            continue
        ids = {"tenant_id": tenant, "correlation_id": correlation, "company_siren": siren, "request_id": str(request)}
        log.info("enrichment: relaunched", area="ENRICHMENT", job_id=str(job), status=status, **ids)
    if config.keep is not None:
        await _forget(connection, config)


async def _forget(connection: Connection, config: Config) -> None:
    sirens = await fetch_column(connection, FORGOTTEN, {"keep": config.keep, "most": MOST})
    if not sirens:
        return
    async with connection.transaction():
        removed = await erasure.erase(connection, sirens)
        why = f"not asked for since {config.keep}: {removed.in_words()}"
        entry = audit_trail.Entry(SYSTEM, "retention", "companies.erase", f"companies:{len(sirens)}", why)
        await audit_trail.record_all(connection, [entry])
