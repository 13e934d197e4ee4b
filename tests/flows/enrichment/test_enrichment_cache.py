"""The cache and the sweep: what is stale, pending without a job or partial is asked for again; what is not asked for is
forgotten. And the constraints that keep states true."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from ecluse.base.logging import MANDATORY
from ecluse.engine import PublishedEvent
from ecluse.flows.enrichment.events import REFRESH
from ecluse.flows.enrichment.relaunch import relaunch
from ecluse.flows.enrichment.rules import Limits
from ecluse.flows.enrichment.states import Trigger
from tests.support.engine_flows import until
from tests.support.enrichment_world import PATIENCE, Make, World
from tests.support.registers import SNCF

DAYS = timedelta(days=31)


async def settled(world: World) -> None:
    for (run,) in world.query("SELECT run_id FROM enrichment_jobs WHERE ended_at IS NULL"):
        assert await world.kit.wait_for_run(run, PATIENCE)


@pytest.mark.req("ENR-32", "ENR-33", "ENR-45", "ENR-49", "ENR-79", "G-66")
async def test_the_sweep_relaunches_a_stale_company_once(world: World) -> None:
    await world.enriched(SNCF)
    await world.sweep()
    assert world.query("SELECT count(*) FROM enrichment_jobs") == [(1,)]
    world.later(DAYS)
    before = world.company(SNCF)["updated_at"]
    await world.sweep()
    await world.sweep()
    await settled(world)
    assert world.query("SELECT trigger, status FROM enrichment_jobs ORDER BY run_id") == [
        ("REQUEST_CREATED", "SUCCESS"),
        ("SWEEP", "SUCCESS"),
    ]
    assert world.company(SNCF)["updated_at"] > before
    assert [kind for kind, _ in world.events(SNCF)].count("Completed") == 2


@pytest.mark.req("ENR-50", "G-60")
async def test_a_failed_refresh_keeps_the_data_and_their_age(world: World) -> None:
    before = await world.enriched(SNCF)
    world.later(DAYS)
    world.sandbox.set_faults([{"vendor": "recherche_entreprises", "kind": "not_found"}])
    after = await world.enriched(SNCF)
    assert (after["enrichment_status"], after["enrichment_error"]) == (
        "FAILED",
        "API_RECHERCHE_ENTREPRISES:404:NOT_FOUND",
    )
    assert (after["updated_at"], after["sources"], after["legal_name"]) == (
        before["updated_at"],
        before["sources"],
        before["legal_name"],
    )


@pytest.mark.req("ENR-34", "G-66")
async def test_a_partial_company_is_asked_for_again_after_a_day_if_that_may_help(make: Make) -> None:
    world = await make(limits=Limits(after_partial=timedelta(hours=24)))
    world.sandbox.set_faults([{"vendor": "inpi", "kind": "server_error", "methods": ["GET"]}])
    assert (await world.enriched(SNCF))["enrichment_status"] == "PARTIAL"
    world.later(timedelta(hours=23))
    await world.sweep()
    assert world.query("SELECT count(*) FROM enrichment_jobs") == [(1,)]
    world.later(timedelta(hours=1))
    world.sandbox.set_faults([])
    await world.sweep()
    await settled(world)
    assert world.company(SNCF)["enrichment_status"] == "SUCCESS"


@pytest.mark.req("G-78")
async def test_a_company_left_pending_without_a_job_is_taken_up(world: World) -> None:
    world.query(
        "INSERT INTO companies (siren, enrichment_status, created_at, status_at) VALUES (%s, 'PENDING', now(),"
        " now() - interval '2 minutes')",
        SNCF,
    )
    world.query(
        "INSERT INTO requests (tenant_id, company_siren, correlation_id, created_by, created_at, updated_at)"
        " VALUES ('default', %s, 'c', 'a test', now(), now())",
        SNCF,
    )
    await world.sweep()
    await settled(world)
    assert world.company(SNCF)["enrichment_status"] == "SUCCESS"


@pytest.mark.req("ENR-80", "G-58")
async def test_the_key_guards_jobs_of_a_day_and_never_the_requested_event(make: Make) -> None:
    world = await make(limits=Limits(fresh=timedelta(microseconds=1)))
    first, _ = await world.request(SNCF)
    await settled(world)
    second, launched = await world.request(SNCF)
    assert launched.job_id is None, "the job of today has succeeded"
    assert [payload["request_id"] for kind, payload in world.events(SNCF) if kind == "Requested"] == [
        str(first),
        str(second),
    ]
    manual = await world.again(second, SNCF, Trigger.MANUAL)
    assert manual.job_id is not None
    await settled(world)


async def test_companies_that_nobody_asks_for_are_forgotten_and_that_is_recorded(make: Make) -> None:
    world = await make(keep=timedelta(days=90), limits=Limits(fresh=timedelta(days=1000)))
    await world.enriched(SNCF)
    world.later(timedelta(days=89))
    await world.sweep()
    assert world.company(SNCF)["legal_name"]
    world.later(timedelta(days=1))
    await world.sweep()
    for table in ("companies", "company_snapshots", "requests", "enrichment_jobs", "enrichment_sources"):
        assert world.query(f"SELECT count(*) FROM {table}") == [(0,)]  # noqa: S608
    assert world.query("SELECT action, subject FROM audit_trail") == [("companies.erase", "companies:1")]


@pytest.mark.req("ENR-20", "ENR-70", "ENG-84")
async def test_every_line_of_a_job_has_the_mandatory_fields(world: World) -> None:
    world.sandbox.set_faults([{"vendor": "inpi", "kind": "refused", "status": 400, "code": "no", "methods": ["GET"]}])
    with capture_logs(processors=[merge_contextvars]) as lines:
        request, launched = await world.request(SNCF)
        await settled(world)
        await until(lambda: any(line["event"] == "completed" for line in lines))  # logged after the commit
    events = [line for line in lines if str(line.get("event_type", "")).startswith("CompanyEnrichment")]
    assert len(events) == 6
    for line in events:
        assert set(MANDATORY) - {"timestamp", "level"} <= set(line)
    own = [line for line in lines if str(launched.job_id) in (str(line.get("run_id")), line.get("job_id"))]
    kinds = {line["event"] for line in own}
    assert {"run-enrichment", "leases: acquired", "execution: failed", "completed"} <= kinds, "the engine's own lines"
    for line in own:
        assert line["company_siren"] == SNCF, line
        assert line["correlation_id"] == "correlation-default", line
        assert line["tenant_id"] in ("default", "system"), line  # the lock is in the system tenant
        assert line.get("request_id") in (None, str(request)), line
    of_sources = {line["source_api"] for line in own if line["event"] == "execution: failed"}
    assert of_sources == {"INPI_RNE"}
    assert "last_name" not in json.dumps(lines, default=str)


IMPOSSIBLE = [
    "enrichment_status = 'SUCCESS', core_identity_present = false",
    "enrichment_status = 'SUCCESS', required_sources_failed_count = 1",
    "enrichment_status = 'SUCCESS', optional_sources_failed_count = 1",
    "enrichment_status = 'PARTIAL'",
    "enrichment_status = 'PARTIAL', optional_sources_failed_count = 1, required_sources_failed_count = 1",
    "enrichment_status = 'FAILED', core_identity_present = false, enrichment_error = ''",
    "enrichment_status = 'FAILED', core_identity_present = false, enrichment_error = NULL",
    "enrichment_status = 'FAILED', enrichment_error = 'x'",
    "enrichment_status = 'STALE'",
    "enrichment_status = 'STALE', stale_since = status_at + interval '1 s'",
    "enrichment_status = 'STALE', stale_since = status_at, updated_at = NULL",
    "enrichment_error = repeat('x', 2001)",
    "enrichment_status = 'DONE'",
]


@pytest.mark.req("ENR-42", "ENR-43", "ENR-44", "ENR-45")
def test_the_database_refuses_what_cannot_be(query) -> None:
    query(
        "INSERT INTO companies (siren, enrichment_status, created_at, status_at, updated_at, core_identity_present)"
        " VALUES ('552049447', 'SUCCESS', now(), now(), now(), true)"
    )
    for columns in IMPOSSIBLE:
        with pytest.raises(psycopg.errors.CheckViolation):
            query(f"UPDATE companies SET {columns}")  # noqa: S608
    insert = (
        "INSERT INTO enrichment_jobs (run_id, tenant_id, siren, trigger, correlation_id, idempotency_key, status,"
        " asked, created_at) VALUES (%s, 'default', '552049447', 'SWEEP', 'c', 'k', 'PENDING', '{}', now())"
    )
    query(insert, 1)
    with pytest.raises(psycopg.errors.UniqueViolation):  # a company has one open job
        query(insert, 2)
    query("UPDATE enrichment_jobs SET status = 'FAILED', ended_at = now()")
    query(insert, 2)


@pytest.mark.req("ENR-79")
async def test_an_event_relaunches_a_company_once(world: World) -> None:
    await world.enriched(SNCF)
    event = PublishedEvent(
        7, "default", "k", REFRESH, "registry", "c-7", "a flow", datetime.now(UTC), {"company_siren": SNCF}, None
    )
    strange = replace(event, id=8, payload={"company_siren": "1"})
    for _ in range(2):  # events are published at least once
        await relaunch(world.kit.pool, world.kit.flow("enrichment"), world.made.config, [event, strange])
        await settled(world)
    assert world.query("SELECT trigger, correlation_id FROM enrichment_jobs ORDER BY run_id") == [
        ("REQUEST_CREATED", "correlation-default"),
        ("MANUAL_REFRESH", "c-7"),
    ]
