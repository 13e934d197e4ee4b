"""The four events of company enrichment, and the log line of each. Events of one company are in order for each
tenant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import structlog

from ecluse.engine import Event
from ecluse.flows.enrichment.rules import PRODUCER
from ecluse.flows.enrichment.states import Evaluation, Fetched, Trigger

log = structlog.get_logger(__name__)

REQUESTED = "CompanyEnrichmentRequested"
STARTED = "CompanyEnrichmentStarted"
SOURCE_FETCHED = "CompanyEnrichmentSourceFetched"
COMPLETED = "CompanyEnrichmentCompleted"


def requested(
    tenant: str,
    correlation: str,
    *,
    key: str,
    request_id: int,
    siren: str,
    siret: str | None,
    trigger: Trigger,
    cached: bool,
) -> Event:
    """Return the event of a request for a company. `key` names the request that is answered; `cached`: no job was
    started or joined, hence no Completed follows."""
    payload = {
        "request_id": str(request_id),
        "company_siren": siren,
        "company_siret": siret,
        "trigger": str(trigger),
        "cached": cached,
    }
    return _event(tenant, f"{REQUESTED}:{request_id}:{key}", REQUESTED, correlation, payload)


def started(tenant: str, correlation: str, *, job: int, siren: str, attempt: int) -> Event:
    payload = {"job_id": str(job), "company_siren": siren, "attempt": attempt}
    return _event(tenant, f"{STARTED}:{job}:{attempt}", STARTED, correlation, payload)


def source_fetched(tenant: str, correlation: str, *, job: int, siren: str, fetched: Fetched, duration_ms: int) -> Event:
    payload = {
        "job_id": str(job),
        "company_siren": siren,
        "source_api": str(fetched.source),
        "status": fetched.status,
        "http_status": fetched.http_status,
        "error_code": fetched.error_code,
        "duration_ms": duration_ms,
    }
    key = f"{SOURCE_FETCHED}:{job}:{fetched.source}"
    return _event(tenant, key, SOURCE_FETCHED, correlation, payload, error_message=fetched.message)


def completed(tenant: str, correlation: str, *, job: int, siren: str, result: Evaluation) -> Event:
    payload = {
        "job_id": str(job),
        "company_siren": siren,
        "enrichment_status": str(result.status),
        **result.counters,
    }
    key = f"{COMPLETED}:{job}"
    return _event(tenant, key, COMPLETED, correlation, payload, error_message=result.enrichment_error)


def _event(
    tenant: str, key: str, kind: str, correlation: str, payload: Mapping[str, Any], error_message: str | None = None
) -> Event:
    """Return the event, after its log line, which has every mandatory field: those without a value are null."""
    shown = {name: payload.get(name) for name in ("request_id", "job_id", "source_api", "http_status", "error_code")}
    rest = {name: value for name, value in payload.items() if name not in shown}
    log.info(
        kind,
        area="ENRICHMENT",
        event_type=kind,
        tenant_id=tenant,
        correlation_id=correlation,
        error_message=error_message,
        duration_ms=rest.pop("duration_ms", None),
        **shown,
        **rest,
    )
    return Event(tenant, key, kind, f"company:{payload['company_siren']}", payload, correlation, PRODUCER)
