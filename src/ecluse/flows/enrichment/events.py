"""The four events of company enrichment, and the log line of each. Events of one company are in order for each
tenant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import structlog

from ecluse.engine import Event
from ecluse.flows.enrichment.rules import PRODUCER
from ecluse.flows.enrichment.states import Evaluation, Fetched, TriggerRequest

log = structlog.get_logger(__name__)

REQUESTED = "CompanyEnrichmentRequested"
STARTED = "CompanyEnrichmentStarted"
SOURCE_FETCHED = "CompanyEnrichmentSourceFetched"
COMPLETED = "CompanyEnrichmentCompleted"
REFRESH = "company/refresh"  # asks for a company again (`relaunch.py`)
NULLS = dict.fromkeys(("request_id", "job_id", "source_api", "http_status", "error_code", "duration_ms"))


def requested(asked: TriggerRequest, *, cached: bool) -> Event:
    """Return the event of a request for a company. `cached`: no job was started or joined: no Completed follows."""
    payload = {
        "request_id": str(asked.request_id),
        "company_siren": asked.siren,
        "company_siret": asked.siret,
        "trigger": str(asked.trigger),
        "cached": cached,
    }
    key = f"{REQUESTED}:{asked.request_id}:{asked.key or asked.trigger}"
    return _event(asked.tenant, key, REQUESTED, asked.correlation, payload)


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
    payload = {"job_id": str(job), "company_siren": siren, "enrichment_status": str(result.status), **result.counters}
    key = f"{COMPLETED}:{job}"
    return _event(tenant, key, COMPLETED, correlation, payload, error_message=result.enrichment_error)


def refresh(tenant: str, correlation: str, *, job: int, siren: str) -> Event:
    """Return the event by which a tenant asks again for a company whose job another tenant has ended."""
    key, payload = f"{REFRESH}:{job}", {"company_siren": siren}
    return Event(tenant, key, REFRESH, f"company:{siren}", payload, correlation, PRODUCER)


def _event(
    tenant: str, key: str, kind: str, correlation: str, payload: Mapping[str, Any], error_message: str | None = None
) -> Event:
    """Log an event and return it. Only the log line has `error_message`, and null for missing mandatory fields."""
    about = {"event_type": kind, "tenant_id": tenant, "correlation_id": correlation, "error_message": error_message}
    log.info(kind, area="ENRICHMENT", **about, **{**NULLS, **payload})
    return Event(tenant, key, kind, f"company:{payload['company_siren']}", payload, correlation, PRODUCER)
