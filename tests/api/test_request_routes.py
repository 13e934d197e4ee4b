"""Requests for companies over HTTP: creation with a short wait, reads, refresh, list, events, erasure, refusals."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from itertools import count
from typing import Any

import psycopg
import pytest

from ecluse.flows.enrichment.surface import Created, RequestRow, RequestShown
from ecluse.settings import Settings
from ecluse.testing.sandbox import SandboxProcess
from ecluse.vendors.registers import Source
from tests.support import registers
from tests.support.api_server import Answer, Client, add_tenant, new_key, serving
from tests.support.metrics import scrape
from tests.support.registers import PLACES, VENDORS, some_sirens
from tests.support.session import Session

PATH = "/v1/requests"
NUMBERS = count()
FRESH_SIRENS = iter(some_sirens("51", 200))


@pytest.fixture(scope="module")
def serving_api(shared_dsn: str, sandbox_server: SandboxProcess) -> Iterator[Client]:
    url = sandbox_server.url
    knobs = {
        "RECHERCHE_ENTREPRISES_BASE_URL": url + PLACES[Source.SEARCH],
        "RECHERCHE_ENTREPRISES_PER_SECOND": 1000,
        "INPI_BASE_URL": url + PLACES[Source.INPI],
        "INPI_USERNAME": "user@example.org",
        "INPI_PASSWORD": "a-good-password",
        "API_ENTREPRISE_BASE_URL": url + PLACES[Source.RCS],
        "API_ENTREPRISE_TOKEN": "a-good-token",
        "API_ENTREPRISE_RECIPIENT": "13002526500013",
        "API_ENTREPRISE_PER_MINUTE": 60_000,
        "ENRICHMENT_SYNC_WAIT_MS": 20_000,  # a busy machine does not make a job slow
    }
    with serving(shared_dsn, roles=frozenset({"api", "worker"}), **knobs) as client:
        yield client


@pytest.fixture
def api(serving_api: Client, shared_dsn: str) -> Client:
    return serving_api.with_key(new_key(shared_dsn))


@pytest.fixture
def siren(sandbox: SandboxProcess) -> str:
    """A company that was not asked for yet."""
    return next(FRESH_SIRENS)


@pytest.fixture
def ask(shared_dsn: str) -> Iterator[Any]:
    session = Session(shared_dsn)
    yield session.ask
    session.close()


@pytest.fixture
def other(serving_api: Client, shared_dsn: str) -> Client:
    """A tenant of its own."""
    tenant = f"tenant-{next(NUMBERS)}"
    add_tenant(shared_dsn, tenant)
    return serving_api.with_key(new_key(shared_dsn, tenant=tenant))


@pytest.fixture
def brief(serving_api: Client) -> Iterator[None]:
    """The server waits for a moment only."""
    state = serving_api.app.state  # type: ignore[union-attr]
    usual = state.enrichment
    state.enrichment = replace(usual, sync_wait=timedelta(milliseconds=100))
    yield
    state.enrichment = usual


def created(client: Client, siren: str, **headers: str) -> Answer:
    return client.post(PATH, {"company_siren": siren}, headers=headers)


def settled(client: Client, request_id: str) -> dict[str, Any]:
    until = time.monotonic() + 20
    while (row := client.get(f"{PATH}/{request_id}").json)["enrichment_status"] in ("PENDING", "RUNNING", "STALE"):
        assert time.monotonic() < until
        time.sleep(0.02)
    return dict(row)


@pytest.mark.req("ENR-08", "ENR-78", "G-38", "G-63")
def test_the_first_answer_has_the_company(api: Client, siren: str) -> None:
    answer = created(api, siren)
    assert answer.status == 201
    row = answer.json
    Created.model_validate(row)
    assert (row["enrichment_status"], row["cached"]) == ("SUCCESS", False)
    assert row["company"]["legal_name"]["source"] == "API_RECHERCHE_ENTREPRISES"
    assert row["company"]["capital_amount"]["source"] == "INPI_RNE"
    shown = api.get(f"{PATH}/{row['id']}")
    RequestShown.model_validate(shown.json)
    assert shown.json["company"] == row["company"]


@pytest.mark.req("ENR-78", "G-63")
def test_a_slow_source_is_not_waited_for(api: Client, siren: str, sandbox: SandboxProcess, brief: None) -> None:
    assert Settings().ENRICHMENT_SYNC_WAIT_MS == 1_200
    sandbox.set_faults([{"vendor": "inpi", "kind": "latency", "seconds": 1, "methods": ["GET"]}])
    row = created(api, siren).json
    assert row["enrichment_status"] in ("PENDING", "RUNNING")
    assert settled(api, row["id"])["enrichment_status"] == "SUCCESS"


@pytest.mark.req("ENR-47", "G-61")
def test_a_cached_company_is_answered_at_once_and_nothing_is_called(
    api: Client, other: Client, siren: str, sandbox: SandboxProcess
) -> None:
    created(api, siren)
    before = len(sandbox.ledger(kind="call"))
    row = created(other, siren).json
    assert (row["enrichment_status"], row["cached"], row["job_id"]) == ("SUCCESS", True, None)
    assert other.get(f"{PATH}/{row['id']}").json["enrichment_status"] == "SUCCESS"
    assert len(sandbox.ledger(kind="call")) == before
    feed = await_events(other, siren, "CompanyEnrichmentRequested")
    assert [(one["event_type"], one["payload"]["cached"]) for one in feed] == [("CompanyEnrichmentRequested", True)]


@pytest.mark.req("ENR-09", "G-38", "G-57")
def test_a_refresh_starts_a_job_or_joins_it(api: Client, siren: str, sandbox: SandboxProcess) -> None:
    request_id = created(api, siren).json["id"]
    sandbox.set_faults([{"vendor": "recherche_entreprises", "kind": "latency", "seconds": 0.5}])
    first = api.post(f"{PATH}/{request_id}:refresh-company")
    assert (first.status, first.json["attached"]) == (202, False)
    second = api.post(f"{PATH}/{request_id}:refresh-company")
    assert (second.status, second.json["attached"], second.json["job_id"]) == (202, True, first.json["job_id"])
    assert settled(api, request_id)["job_id"] == first.json["job_id"]


@pytest.mark.req("ENR-10", "ENR-48", "ENR-49")
def test_a_read_of_stale_data_answers_them_and_starts_a_job(api: Client, siren: str, ask: Any) -> None:
    row = created(api, siren).json
    ask("UPDATE companies SET updated_at = updated_at - interval '30 days' WHERE siren = %s", siren)
    stale = api.get(f"{PATH}/{row['id']}").json
    assert stale["enrichment_status"] in ("STALE", "RUNNING")
    assert stale["company"] == row["company"]
    assert stale["job_id"] != row["job_id"]
    assert settled(api, row["id"])["company_updated_at"] > row["company_updated_at"]
    kinds = ask(
        "SELECT payload ->> 'trigger' FROM events_outbox WHERE aggregate = %s AND payload ? 'trigger' ORDER BY id",
        f"company:{siren}",
    )
    assert kinds == [("REQUEST_CREATED",), ("REQUEST_OPENED",)]


def test_a_read_of_stale_data_of_a_disabled_tenant_starts_no_job(
    serving_api: Client, siren: str, shared_dsn: str, ask: Any
) -> None:
    tenant = f"closed-{siren}"
    add_tenant(shared_dsn, tenant)
    admin, acting = serving_api.with_key(new_key(shared_dsn, "admin")), {"headers": {"Ecluse-Tenant": tenant}}
    row = created(serving_api.with_key(new_key(shared_dsn, "operator", tenant)), siren).json
    ask("UPDATE companies SET updated_at = updated_at - interval '30 days' WHERE siren = %s", siren)
    assert admin.post(f"/api/tenants/{tenant}/disable", {"reason": "unpaid"}).status == 200
    stale = admin.get(f"{PATH}/{row['id']}", **acting).json
    assert (stale["company"], stale["job_id"]) == (row["company"], row["job_id"])
    assert ask("SELECT count(*) FROM runs WHERE tenant_id = %s", tenant) == [(1,)]


@pytest.mark.req("G-66")
def test_a_failed_company_is_not_asked_for_again_at_once(api: Client, sandbox: SandboxProcess) -> None:
    siren = next(one for one in some_sirens("90", 50) if one != registers.UNKNOWN)
    row = created(api, siren).json
    assert row["enrichment_status"] == "FAILED"
    before = len(sandbox.ledger(kind="call"))
    assert api.get(f"{PATH}/{row['id']}").json["enrichment_status"] == "FAILED"
    assert created(api, siren).json["cached"] is True
    assert len(sandbox.ledger(kind="call")) == before


@pytest.mark.req("ENR-80", "G-58")
def test_the_same_key_is_one_request(api: Client, siren: str, ask: Any) -> None:
    key = {"Idempotency-Key": f"key-{siren}"}
    first, second = created(api, siren, **key), created(api, siren, **key)
    assert second.headers["Idempotent-Replay"] == "true"
    assert first.json["id"] == second.json["id"]
    assert ask("SELECT count(*) FROM requests WHERE company_siren = %s", siren) == [(1,)]


def test_many_at_once_share_the_job(api: Client, siren: str, sandbox: SandboxProcess) -> None:
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda _: created(api, siren), range(10)))
    assert {one.status for one in answers} == {201}
    asked = [one["vendor"] for one in sandbox.ledger(kind="call") if one["ref"] == siren and one["status"] == 200]
    assert asked == list(VENDORS.values())


def test_requests_that_come_together_are_one_transaction(
    api: Client, siren: str, sandbox: SandboxProcess, ask: Any, shared_dsn: str
) -> None:
    """One is held up by a lock; those that come meanwhile are the next group. Each has its own answer all the same."""
    late, key = next(FRESH_SIRENS), {"Idempotency-Key": f"key-{siren}"}
    with psycopg.connect(shared_dsn) as holding, ThreadPoolExecutor(10) as pool:
        holding.execute("LOCK TABLE companies IN SHARE MODE")
        first = pool.submit(created, api, late)
        waits = "SELECT count(*) FROM pg_locks WHERE relation = 'companies'::regclass AND NOT granted"
        while ask(waits) == [(0,)]:
            time.sleep(0.01)
        plain = [pool.submit(created, api, siren) for _ in range(3)]
        keyed = [pool.submit(created, api, siren, **key) for _ in range(2)]
        bad = created(api, "123456789")  # is not waited for
        time.sleep(0.2)
        holding.rollback()
    assert bad.status == 422
    assert (first.result().status, [one.result().status for one in plain]) == (201, [201, 201, 201])
    (made,) = [one.result() for one in keyed if one.result().status == 201]
    assert [one.result().json["error"]["code"] for one in keyed if one.result().status != 201] == ["IN_PROGRESS"]
    assert created(api, siren, **key).json["id"] == made.json["id"]
    assert len({one.result().json["id"] for one in plain} | {made.json["id"]}) == 4
    (ids, transactions), *_ = ask(
        "SELECT array_agg(subject ORDER BY id), count(DISTINCT xmin::text) FROM audit_trail"
        " WHERE action = 'request.create' AND subject IN (SELECT 'request:' || id FROM requests"
        " WHERE company_siren = %s)",
        siren,
    )
    assert (len(ids), transactions) == (4, 1)


def test_the_list_is_searched_by_number_name_and_status(other: Client, siren: str) -> None:
    mine = created(other, siren).json
    created(other, registers.SNCF)
    created(other, registers.UNKNOWN)
    rows = other.get(PATH).json["requests"]
    for row in rows:
        RequestRow.model_validate(row)
    assert [row["company_siren"] for row in rows] == [registers.UNKNOWN, registers.SNCF, siren]

    def found(query: str) -> list[str]:
        return [row["company_siren"] for row in other.get(f"{PATH}?{query}").json["requests"]]

    assert found(f"siren={siren}") == [siren]
    assert found("q=nationale") == [registers.SNCF]
    assert found("q=552") == [registers.SNCF]
    assert found("status=FAILED") == [registers.UNKNOWN]
    assert other.get(f"{PATH}/{mine['id']}").status == 200


def test_other_tenants_see_nothing(api: Client, other: Client, siren: str) -> None:
    request_id = created(api, siren).json["id"]
    for path in (f"{PATH}/{request_id}", f"{PATH}/999999999", f"{PATH}/abc", f"{PATH}/0"):
        assert other.get(path).code == "NOT_FOUND"
    assert other.post(f"{PATH}/{request_id}:refresh-company").code == "NOT_FOUND"
    assert other.get(PATH).json["requests"] == []


def await_events(client: Client, siren: str, last: str) -> list[dict[str, Any]]:
    """The company's events in the feed, once the last of this kind is published."""
    until = time.monotonic() + 10
    while True:
        page = client.get("/v1/events?limit=500").json["events"]
        mine = [one for one in page if one["payload"]["company_siren"] == siren]
        if mine and mine[-1]["event_type"] == last:
            return mine
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.req("ENR-12")
def test_the_feed_is_read_in_pages(other: Client, siren: str) -> None:
    created(other, siren)
    events = await_events(other, siren, "CompanyEnrichmentCompleted")
    assert len(events) == 5  # the tenant has no recipient: API Entreprise is not asked
    assert {one["producer"] for one in events} == {"M3"}
    after, read = 0, []
    while (page := other.get(f"/v1/events?after={after}&limit=2").json)["events"]:
        read += [one["event_type"] for one in page["events"]]
        assert page["next_after"] > after
        after = page["next_after"]
    assert read == [one["event_type"] for one in events]


@pytest.mark.parametrize(
    "query", ["after=x", "after=-1", "after=1.5", "after=99999999999999999999", "limit=0", "limit=x"]
)
def test_a_position_that_is_none(api: Client, query: str) -> None:
    assert api.get(f"/v1/events?{query}").code == "INVALID_INPUT"


@pytest.mark.req("ENR-11")
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"company_siren": "552049448"},
        {"company_siren": "55204944A"},
        {"company_siren": 552049447},
        {"company_siret": "552049447000140"},
        {"company_siren": "552100554", "company_siret": "55204944700014"},
        {"company_siren": "552049447", "more": 1},
        {"company_siren": "\u0000"},
    ],
)
def test_bad_numbers_are_refused_and_nothing_is_called(api: Client, body: Any, ask: Any) -> None:
    known = "SELECT (SELECT count(*) FROM requests), (SELECT count(*) FROM enrichment_jobs)"
    before = ask(known)
    assert api.post(PATH, body).code == "INVALID_INPUT"
    assert ask(known) == before


def test_erasure_leaves_nothing_and_is_recorded(serving_api: Client, api: Client, siren: str, shared_dsn, ask) -> None:
    created(api, siren)
    admin = serving_api.with_key(new_key(shared_dsn, "admin"))
    path = f"/api/erasure/companies/{siren}"
    assert api.post(path, {"reason": "asked for"}).code == "FORBIDDEN"
    answer = admin.post(path, {"reason": "asked for"})
    assert answer.json == {"company_siren": siren, "companies": 1, "snapshots": 1, "jobs": 1, "requests": 1}
    assert ask("SELECT 1 FROM companies WHERE siren = %s", siren) == []
    ((reason,),) = ask("SELECT reason FROM audit_trail WHERE subject = %s", f"company:{siren}")
    assert reason == "asked for (1 companies, 1 snapshots, 1 jobs, 1 requests)"
    assert admin.post("/api/erasure/companies/1", {"reason": "x"}).code == "INVALID_INPUT"


def test_an_open_job_is_not_erased(serving_api: Client, api: Client, siren: str, shared_dsn, sandbox, brief) -> None:
    sandbox.set_faults([{"vendor": "inpi", "kind": "latency", "seconds": 1, "methods": ["GET"]}])
    row = created(api, siren).json
    admin = serving_api.with_key(new_key(shared_dsn, "admin"))
    assert admin.post(f"/api/erasure/companies/{siren}", {"reason": "x"}).code == "RUN_OPEN"
    settled(api, row["id"])


def test_a_tenant_gets_a_recipient(serving_api: Client, other: Client, siren: str, shared_dsn) -> None:
    admin = serving_api.with_key(new_key(shared_dsn, "admin"))
    tenant = other.get("/api/me").json["tenant_id"]
    path = f"/api/tenants/{tenant}/recipient"
    assert other.post(path, {"recipient": None}).code == "FORBIDDEN"
    assert admin.post(path, {"recipient": "13002526500014"}).code == "INVALID_INPUT"
    assert admin.post(path, {"recipient": "130 025 265 00013"}).json["recipient"] == "13002526500013"
    assert created(other, siren).json["company"]["court"]["source"] == "API_ENTREPRISE_RCS"
    assert admin.post(path, {"recipient": None}).json["recipient"] is None
    assert "court" not in created(other, siren).json["company"]


def test_metrics_count_calls_errors_results_and_cache_hits(api: Client, siren: str, sandbox: SandboxProcess) -> None:
    sandbox.set_faults([{"vendor": "inpi", "kind": "server_error", "status": 500, "ids": [siren]}])
    before = scrape(api)
    assert created(api, siren).json["enrichment_status"] == "PARTIAL"
    assert created(api, siren).json["cached"]
    api.app.state.metrics._good_until = 0.0  # type: ignore[union-attr] # gauges are kept for seconds
    after = scrape(api)

    def grown(name: str, *labels: str) -> float:
        """How much a counter has grown; its labels in the order of their names."""
        return after[name][labels] - before.get(name, {}).get(labels, 0.0)

    assert grown("ecluse_calls_total", "enrichment", "api_recherche_entreprises") == 1
    assert grown("ecluse_calls_total", "enrichment", "inpi_rne") == 3
    assert grown("ecluse_call_seconds_total", "enrichment", "inpi_rne") > 0
    assert grown("ecluse_vendor_errors_total", "SERVER_ERROR", "enrichment", "inpi_rne") == 3
    assert grown("ecluse_enrichment_jobs_ended_total", "PARTIAL") == 1
    assert grown("ecluse_enrichment_requests_total", "started", "REQUEST_CREATED") == 1
    assert grown("ecluse_enrichment_requests_total", "cached", "REQUEST_CREATED") == 1
    assert after["ecluse_enrichment_companies"]["PARTIAL",] >= 1
    assert after["ecluse_enrichment_jobs_open"].keys() == {("PENDING",), ("RUNNING",)}
    assert after["ecluse_enrichment_oldest_pending_seconds"][()] >= 0
