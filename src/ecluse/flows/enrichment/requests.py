"""Requests for companies, and what a trigger leads to: the open job, a new one, or what is stored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import NamedTuple

from ecluse.access.tenants import DEFAULT
from ecluse.base.errors import Conflict, NotFound
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_one, fetch_value
from ecluse.engine import Flow, Start, start_run, write_events
from ecluse.flows.enrichment import card, events, metrics, records, rules
from ecluse.flows.enrichment.clients import Config
from ecluse.flows.enrichment.records import Looked, Taken
from ecluse.flows.enrichment.states import Status, Trigger
from ecluse.vendors.registers import Source

TRIES = 5
HIDDEN = ("sources", "job_ended_at", "relaunchable", "open_job", "recipient", "now")  # columns of SHOW
SWEEP = "SWEEP"  # the trigger of jobs that no request has begun
INSERT = """
INSERT INTO requests (tenant_id, company_siren, company_siret, correlation_id, created_by, job_id, created_at,
                      updated_at)
VALUES (%s, %s, %s, %s, %s, %s, ecluse_now(), ecluse_now()) RETURNING id
"""
SHOW = """
SELECT l.*, c.core_identity_present, c.sources_success_count, c.required_sources_failed_count,
       c.optional_sources_failed_count, c.sources, c.job_ended_at, c.relaunchable, j.run_id AS open_job,
       t.api_entreprise_recipient AS recipient, ecluse_now() AS now
FROM request_list l JOIN companies c ON c.siren = l.company_siren JOIN tenants t ON t.id = l.tenant_id
LEFT JOIN enrichment_jobs j ON j.siren = c.siren AND j.ended_at IS NULL WHERE l.tenant_id = %s AND l.id = %s
"""
ATTACH = "UPDATE requests SET job_id = %s, updated_at = ecluse_now() WHERE id = %s"
RECIPIENT = "SELECT api_entreprise_recipient FROM tenants WHERE id = %s"


@dataclass(frozen=True)
class Asked:
    """A trigger: by which request, about which company. `key` tells repeated triggers of a request apart."""

    tenant: str
    siren: str
    trigger: Trigger
    correlation: str
    request_id: int = 0
    siret: str | None = None
    key: str = ""


class Shown(NamedTuple):
    """A request with the card of its company; `seen`: the sources whose facts the tenant may see; `wanting`: reading it
    is to trigger a job, because the data are missing or stale, and it is not attached to an open job already."""

    row: Row
    seen: list[Source]
    wanting: bool


class Launched(NamedTuple):
    """What a trigger has led to: the job that the request is attached to, or none, because what is stored is used."""

    job_id: int | None
    attached: bool

    @property
    def cached(self) -> bool:
        return self.job_id is None

    @property
    def result(self) -> str:
        return "cached" if self.cached else "attached" if self.attached else "started"


STORED = Launched(None, attached=False)


async def create(connection: Connection, flow: Flow, config: Config, asked: Asked, by: str) -> tuple[int, Launched]:
    """Insert a request and, if it is new, its company; return its id and what it leads to. `asked` has no request."""
    looked = await records.look(connection, asked.siren)
    job = looked.job if looked.locked else None
    given = (asked.tenant, asked.siren, asked.siret, asked.correlation, by, job)
    asked = replace(asked, request_id=int(await fetch_value(connection, INSERT, given)))
    return asked.request_id, await launch(connection, flow, config, asked, looked)


async def launch(
    connection: Connection, flow: Flow, config: Config, asked: Asked, looked: Looked | None = None
) -> Launched:
    """Attach the request to the open job of its company, start one, or neither; and tell Requested. An attached request
    cannot miss the end of its job: the job's run is locked until this transaction ends. `looked`: the company, as a new
    request found it, which is attached to the job that was locked then."""
    launched = await _launch(connection, flow, config, asked, looked)
    metrics.requests[str(asked.trigger), launched.result] += 1
    if launched.job_id is not None and (looked is None or launched.job_id != looked.job):
        await connection.execute(ATTACH, (launched.job_id, asked.request_id))
    event = events.requested(
        asked.tenant,
        asked.correlation,
        key=asked.key or str(asked.trigger),
        request_id=asked.request_id,
        siren=asked.siren,
        siret=asked.siret,
        trigger=asked.trigger,
        cached=launched.cached,
    )
    await write_events(connection, [event])
    return launched


async def _launch(connection: Connection, flow: Flow, config: Config, asked: Asked, looked: Looked | None) -> Launched:
    for _ in range(TRIES):
        known, job, locked, now = looked or await records.look(connection, asked.siren)
        looked = None
        match rules.decide(known, asked.trigger, config.limits, now):
            case "cached":
                return STORED
            case "attach" if locked:
                return Launched(job, attached=True)
            case "start":
                try:
                    async with connection.transaction():
                        if rules.is_stale(known, config.limits, now):
                            await records.mark_stale(connection, config.limits.fresh, asked.siren)
                        return Launched(await start(connection, flow, config, asked, now), attached=False)
                except Taken:
                    looked = await records.look(connection, asked.siren)
                    # Without an open job it is the idempotency key: the job of today has succeeded.
                    if looked.job is None and asked.trigger is not Trigger.MANUAL:
                        return STORED
    raise Conflict(f"The job of company {asked.siren} changed while this was answered: repeat the request.")


async def start(
    connection: Connection, flow: Flow, config: Config, asked: Asked, now: datetime, trigger: str | None = None
) -> int:
    """Start a job in the tenant that wants it; return its run. Raise Taken if the company has one. `trigger`: that of
    the job, if no request began it."""
    recipient = await recipient_of(connection, config, asked.tenant)
    given = {
        "company_siren": asked.siren,
        "trigger": trigger or str(asked.trigger),
        "request_id": asked.request_id,
        "asked": [str(one) for one in config.asked(recipient)],
        "recipient": recipient,
        "idempotency_key": rules.job_key(asked.siren, trigger or asked.trigger, now),
    }
    key = f"enrichment:{given['idempotency_key']}"
    wanted = Start(flow, key, asked.tenant, given, correlation_id=asked.correlation, again=True)
    started = await start_run(connection, wanted)
    if started.deduplicated:
        raise Taken(f"Job {started.run.id} is open.")
    return started.run.id


async def recipient_of(connection: Connection, config: Config, tenant: str) -> str | None:
    """Return the recipient with which the tenant asks API Entreprise; None: it does not, and sees nothing of it."""
    return _recipient(config, tenant, await fetch_value(connection, RECIPIENT, (tenant,)))


def _recipient(config: Config, tenant: str, own: str | None) -> str | None:
    return own or (config.recipient if tenant == DEFAULT else None)


async def show(connection: Connection, config: Config, tenant: str, request_id: int) -> Shown:
    """Return a request with the card of its company, as far as the tenant may see it; raise NotFound."""
    row = await fetch_one(connection, dict, SHOW, (tenant, request_id))
    if row is None:
        raise NotFound(f"There is no request {request_id}.")
    sources, ended_at, relaunchable, job, own, now = (row.pop(name) for name in HIDDEN)
    entitled = _recipient(config, tenant, own) is not None
    seen = [one for one in Source if entitled or one is not Source.RCS]
    status, updated_at = Status(row["enrichment_status"]), row["company_updated_at"]
    known = rules.Known(status, updated_at, ended_at, relaunchable, job is not None)
    due = rules.decide(known, Trigger.OPENED, config.limits, now) != "cached"
    row["company"] = card.card(sources, seen) or None
    return Shown(row, seen, due and (job is None or job != row["job_id"]))
