"""Maintenance that takes longer than a request: the erasure of a tenant and an immediate retention sweep, which
administrators request over HTTP, and the encryption of webhook URLs, which a migration leaves to a process that has the
key. A request is stored; a scheduler carries it out, and continues it after a crash."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import structlog

from ecluse.access import audit_trail, sealing, tenants
from ecluse.access.refusal_log import SYSTEM
from ecluse.access.secrets import Secrets
from ecluse.base.errors import Conflict
from ecluse.base.trace_files import TraceFolder
from ecluse.db.connect import Connection, Pool
from ecluse.db.query import fetch_all, fetch_column, fetch_rows
from ecluse.engine import Flow, Job
from ecluse.retention import erasure, sweep
from ecluse.retention.erasure import Erasure, Stuck
from ecluse.retention.pace import Busy, Pace
from ecluse.retention.sweep import Rule

log = structlog.get_logger(__name__)

CHANNEL = "ecluse_maintenance"
EVERY_SECONDS = 60.0
SHOWN = 8  # runs

OF_TENANT = "t.tenant_id = %(tenant)s"
OF_SCHEDULES = "t.schedule_id IN (SELECT s.id FROM schedules s WHERE s.tenant_id = %(tenant)s)"
# All tables but runs and their rows, which are deleted first; in the order of the foreign keys. The tenant's row stays,
# disabled, and so does its audit trail.
TENANT = (
    Erasure("events", "events_outbox", OF_TENANT),
    Erasure("trace rows", "workflow_logs", OF_TENANT),
    Erasure("leases", "leases", OF_TENANT),
    Erasure("idempotency keys", "idempotency_keys", OF_TENANT),
    Erasure("counts of requests", "transcription_requests", OF_TENANT),
    Erasure("paid results", "speech_results", OF_TENANT),
    Erasure("budgets", "budgets", OF_TENANT),
    Erasure("costs of paid calls", "paid_calls", OF_TENANT),
    Erasure("totals of costs", "spend_totals", OF_TENANT),
    Erasure("audits", "audits", OF_TENANT),
    Erasure("fiches", "fiche_cache", OF_TENANT),
    Erasure("instants of schedules", "schedule_slots", OF_TENANT),
    Erasure("records of deleted runs", "pruned_runs", OF_SCHEDULES),
    Erasure("jobs", "jobs", OF_TENANT),
    Erasure("job schedules", "job_schedules", OF_TENANT),
    Erasure("schedules", "schedules", OF_TENANT),
    Erasure("enrolment tokens", "enrolment_tokens", OF_TENANT),
    Erasure("agents", "job_agents", OF_TENANT),
    Erasure("server instances", "job_servers", OF_TENANT),
    Erasure("hosts", "job_hosts", OF_TENANT),
    Erasure(
        "versions of audit configs",
        "audit_config_versions",
        "t.audit_config_id IN (SELECT c.id FROM audit_configs c WHERE c.tenant_id = %(tenant)s)",
    ),
    Erasure("audit configs", "audit_configs", OF_TENANT),
    Erasure("alerts", "alerts", OF_TENANT),
    Erasure("rule runs", "rule_runs", OF_TENANT),
    Erasure("pricing rules", "pricing_rules", OF_TENANT),
    Erasure("pricing projects", "pricing_projects", OF_TENANT),
    Erasure("requests for companies", "requests", OF_TENANT),
    Erasure("enrichment jobs", "enrichment_jobs", OF_TENANT),
    Erasure("notification endpoints", "notification_endpoints", OF_TENANT),
    Erasure("connections", "connections", OF_TENANT),
    Erasure("mail addresses", "mail_addresses", OF_TENANT),
    Erasure("counts of mails", "mail_counts", OF_TENANT),
    Erasure("listeners", "realtime_interests", OF_TENANT),
    Erasure("realtime apps", "realtime_apps", OF_TENANT),
    Erasure("lanes", "lanes", OF_TENANT),
    Erasure("secrets", "secrets", OF_TENANT),
    Erasure("API keys", "api_keys", OF_TENANT),
)
RUNS = (
    Erasure("runs", "runs", OF_TENANT),
    Erasure("items", "items", OF_TENANT),
    Erasure("deliveries", "deliveries", OF_TENANT),
)
OPEN = "SELECT id FROM runs WHERE tenant_id = %s AND ended_at IS NULL ORDER BY id LIMIT %s"
OF_FLOWS = "SELECT flow, id FROM runs WHERE tenant_id = %s AND flow = ANY(%s)"
NAMELESS = "UPDATE tenants SET name = id WHERE id = %s"
ASK = """
INSERT INTO maintenance (what, subject, asked_by, asked_at) VALUES (%s, %s, %s, ecluse_now()) ON CONFLICT DO NOTHING
"""
ASKED = "SELECT what, subject, asked_by FROM maintenance ORDER BY asked_at"


class MaintenanceRequest(NamedTuple):
    """A stored request for maintenance."""

    what: Literal["prune", "erase tenant", "seal urls"]
    subject: str  # the tenant, or nothing
    asked_by: str


async def ask(connection: Connection, what: str, subject: str, by: str) -> bool:
    """Store a request for maintenance in the caller's transaction and wake the schedulers; return False if the same
    request is stored already."""
    asked = (await connection.execute(ASK, (what, subject, by))).rowcount == 1
    await connection.execute("SELECT pg_notify(%s, '')", (CHANNEL,))
    return asked


async def refuse_open_runs(connection: Connection, tenant: str) -> None:
    """Raise Conflict, which names some of the runs, if the tenant has open runs."""
    if found := await fetch_column(connection, OPEN, (tenant, SHOWN + 1)):
        more = " and more" if len(found) > SHOWN else ""
        named = ", ".join(f"#{run}" for run in found[:SHOWN]) + more
        raise Conflict(
            f"Tenant {tenant} has open runs ({named}): wait for their end, or end them with `ecluse runs end`."
        )


async def foresee(connection: Connection, tenant: str) -> Counter[str]:
    """Return the number of rows, by kind, that the erasure of the tenant would remove now."""
    return await erasure.count(connection, (*RUNS, *TENANT), {"tenant": tenant})


async def ask_for_erasure(connection: Connection, tenant: str, by: str) -> bool:
    """Disable the tenant, so that no run of it is started, replace its name by its id, and request the erasure of its
    rows; return False if the erasure was requested before. Raise NotFound if there is no such tenant, Conflict if it
    has open runs. A run that is started at the same moment delays the erasure until its end."""
    await tenants.set_disabled(connection, tenant, True)
    await connection.execute(NAMELESS, (tenant,))
    await refuse_open_runs(connection, tenant)
    return await ask(connection, "erase tenant", tenant, by)


async def erase_rows(
    connection: Connection,
    flows: Mapping[str, Flow],
    folders: Mapping[str, TraceFolder],
    tenant: str,
    pace: Pace,
) -> Counter[str]:
    """Erase the rows of a disabled tenant, and the log files of its runs on this host; return the number of rows by
    table, and of `log files`. Raise Stuck if runs are open or locked."""
    runs = await fetch_rows(connection, OF_FLOWS, (tenant, list(folders)))
    files = sum(folders[name].erase(run) for name, run in runs)
    done = await erasure.delete_tenant(connection, flows, tenant, TENANT, pace)
    done["log files"] = files
    return done


def job(
    flows: Mapping[str, Flow], rules: Sequence[Rule], folders: Mapping[str, TraceFolder], secrets: Secrets | None
) -> Job:
    """Return the periodic job with which schedulers carry out stored requests, one process at a time. Without
    `secrets`, the encryption of URLs is left to a process that has the key."""

    async def run(pool: Pool) -> None:
        async with pool.connection() as connection:
            for asked in await fetch_all(connection, MaintenanceRequest, ASKED):
                if asked.what == "seal urls" and secrets is None:
                    continue
                async with sweep.alone(connection) as mine:
                    if mine:
                        await _do(connection, flows, rules, folders, secrets, asked)

    return Job("maintenance", EVERY_SECONDS, run, channels=[CHANNEL], roles=frozenset({"scheduler"}))


async def _do(
    connection: Connection,
    flows: Mapping[str, Flow],
    rules: Sequence[Rule],
    folders: Mapping[str, TraceFolder],
    secrets: Secrets | None,
    asked: MaintenanceRequest,
) -> None:
    try:
        if asked.what == "seal urls":
            done = await sealing.seal_urls(connection, secrets) if secrets is not None else Counter()
            tenant, action, subject = SYSTEM, "secrets.seal", "webhook URLs"
        elif asked.what == "prune":
            pruned = await sweep.prune(connection, flows, rules)
            done = Counter({one.rule.kind.name: one.rows.total() for one in pruned})
            tenant, action, subject = tenants.DEFAULT, "retention.pruned", "retention"
        else:
            done = await erase_rows(connection, flows, folders, asked.subject, Pace())
            tenant, action, subject = asked.subject, "tenant.erased", f"tenant:{asked.subject}"
    except (Busy, Stuck) as error:
        log.warning(
            "maintenance: postponed, will continue later", what=asked.what, subject=asked.subject, error=str(error)
        )
        return
    async with connection.transaction():
        await connection.execute("DELETE FROM maintenance WHERE what = %s AND subject = %s", asked[:2])
        entry = audit_trail.Entry(tenant, asked.asked_by, action, subject, in_words(done))
        await audit_trail.record_all(connection, [entry])
    log.info("maintenance: done", what=asked.what, subject=asked.subject, rows=done.total())


def in_words(counted: Counter[str]) -> str:
    return ", ".join(f"{what}: {rows}" for what, rows in counted.items() if rows) or "nothing was stored"
