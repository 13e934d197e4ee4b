"""The contract of company enrichment in one place: code, schema and document agree on events, states, codes, limits."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import get_args

import pytest

from ecluse.base.logging import MANDATORY
from ecluse.flows.enrichment import events, rules
from ecluse.flows.enrichment.flow import RETRIES
from ecluse.flows.enrichment.states import Fetched, Status, Trigger, TriggerRequest, evaluate
from ecluse.flows.enrichment.surface import StatusWord
from ecluse.settings import Settings
from ecluse.vendors.registers import RETRYABLE, ErrorCode, Source

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "enrichment.md").read_text()
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
SCHEMA = (ROOT / "src" / "ecluse" / "migrations" / "versions" / "0036_enrichment.py").read_text()
RESULT = evaluate([Fetched(one) for one in Source], core_identity=True)
ABOUT = {"job": 7, "siren": "552049447"}
EVENTS = [
    events.requested(TriggerRequest("t", "552049447", Trigger.CREATED, "c", 3, key="k"), cached=False),
    events.started("t", "c", **ABOUT, attempt=1),
    events.source_fetched("t", "c", **ABOUT, fetched=Fetched(Source.INPI), duration_ms=3),
    events.completed("t", "c", **ABOUT, result=RESULT),
]


@pytest.mark.req("ENR-83", "ENR-12", "ENR-20")
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.event_type)
def test_events_are_as_documented(event: events.Event) -> None:
    assert (event.producer, event.aggregate) == ("M3", "company:552049447")
    assert event.payload["company_siren"] == "552049447"
    (row,) = re.findall(rf"^\| `{event.event_type}` \| (.*) \|$", DOCUMENT, flags=re.MULTILINE)
    counts = {"sources_success_count", "sources_failed_count"}
    counts |= {"required_sources_failed_count", "optional_sources_failed_count"}
    named = set(re.findall(r"`(\w+)`", row)) | {"company_siren"} | (counts if "counts of sources" in row else set())
    assert named == set(event.payload)


@pytest.mark.req("ENR-83", "ENR-17")
def test_the_counters_of_the_event_are_those_of_the_evaluation() -> None:
    assert EVENTS[3].payload.items() >= RESULT.counters.items()
    assert RESULT.sources_failed_count == (RESULT.required_sources_failed_count + RESULT.optional_sources_failed_count)


@pytest.mark.req("ENR-83", "ENR-05")
def test_states_sources_and_codes_have_one_list() -> None:
    assert set(get_args(StatusWord)) == set(Status)
    for words in (Status, Source, Trigger):
        assert all(f"'{word}'" in SCHEMA for word in words)
    shown = re.findall(r"^\| (`[A-Z_`, ]+) \| .* \| (yes|no|) ?\|$", DOCUMENT, flags=re.MULTILINE)
    retried = {code: answer == "yes" for codes, answer in shown for code in re.findall(r"`([A-Z_]+)`", codes)}
    assert retried == {str(code): code in RETRYABLE for code in ErrorCode}


@pytest.mark.req("ENR-83", "ENR-46", "ENR-51", "ENR-52", "ENR-55", "ENR-56")
def test_limits() -> None:
    settings = Settings()
    assert rules.Limits().fresh == timedelta(days=settings.ENRICHMENT_FRESHNESS_TTL_DAYS) == timedelta(days=30)
    assert timedelta(minutes=settings.ENRICHMENT_FAILED_COOLDOWN_MINUTES) == rules.Limits().after_failure
    assert timedelta(hours=settings.ENRICHMENT_PARTIAL_RETRY_HOURS) == rules.Limits().after_partial
    assert (settings.ENRICHMENT_SOURCE_TIMEOUT_MS, settings.ENRICHMENT_SYNC_WAIT_MS) == (5_000, 1_200)
    assert (RETRIES.executions, RETRIES.base, RETRIES.base * RETRIES.multiplier) == (3, 0.25, 0.5)
    assert timedelta(seconds=120) == rules.LOCK_TTL
    assert rules.lock_key("552049447") == "company_enrichment:552049447"
    assert settings.ECLUSE_HEARTBEAT_SECONDS <= 30  # extends the lock


@pytest.mark.req("ENR-07")
@pytest.mark.parametrize(
    "term",
    ["enrichment job", "source fetch", "cache freshness window", "lock key", "partial failure", "stale snapshot"],
)
def test_the_terms_are_defined(term: str) -> None:
    assert f"| {term} | " in GLOSSARY


@pytest.mark.req("ENR-83", "ENR-70")
def test_the_fields_of_a_log_line() -> None:
    assert set(MANDATORY) == {
        "timestamp", "level", "correlation_id", "tenant_id", "request_id", "job_id", "company_siren", "source_api",
        "event_type", "http_status", "error_code", "error_message", "duration_ms",
    }  # fmt: skip
