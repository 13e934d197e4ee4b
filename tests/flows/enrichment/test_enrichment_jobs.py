"""Jobs: the sources in their order, what their failures mean, events, lock, and what is stored."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta

import pytest

from ecluse.engine import PublishedEvent, pause_lane, resume_lane
from ecluse.engine.runs.lifecycle import load_run
from ecluse.engine.work.completion import end_by_operator
from ecluse.flows.enrichment.events import REFRESH
from ecluse.flows.enrichment.flow import LANES
from ecluse.flows.enrichment.relaunch import relaunch
from ecluse.flows.enrichment.requests import Launched
from ecluse.flows.enrichment.states import Trigger
from ecluse.vendors.registers import Source
from tests.support import registers
from tests.support.enrichment_world import PATIENCE, Make, World
from tests.support.registers import SNCF, VENDORS, some_sirens

ALL = [str(source) for source in Source]


def tenants(world: World, *names: str) -> None:
    for name in names:
        world.query("INSERT INTO tenants (id, name, created_at) VALUES (%s, %s, ecluse_now())", name, name)


@pytest.mark.req(
    "ENR-01",
    "ENR-03",
    "ENR-08",
    "ENR-12",
    "ENR-13",
    "ENR-14",
    "ENR-15",
    "ENR-16",
    "ENR-19",
    "ENR-20",
    "ENR-74",
    "ENR-81",
)
async def test_a_job_asks_the_sources_in_order_and_tells_each_step(world: World) -> None:
    request_id, launched = await world.request(SNCF)
    assert launched.job_id is not None
    assert not launched.attached
    assert await world.kit.wait_for_run(launched.job_id, PATIENCE)

    company, job = world.company(SNCF), str(launched.job_id)
    assert (company["enrichment_status"], company["enrichment_error"]) == ("SUCCESS", None)
    assert company["legal_name"] == "SOCIETE NATIONALE SNCF"
    kinds, payloads = zip(*world.events(SNCF), strict=True)
    assert kinds == ("Requested", "Started", "SourceFetched", "SourceFetched", "SourceFetched", "Completed")
    assert payloads[0] == {
        "request_id": str(request_id),
        "company_siren": SNCF,
        "company_siret": None,
        "trigger": "REQUEST_CREATED",
        "cached": False,
    }
    assert payloads[1] == {"job_id": job, "company_siren": SNCF, "attempt": 1}
    assert [one["source_api"] for one in payloads[2:5]] == ALL
    for told in payloads[2:5]:
        assert set(told) == {
            "job_id", "company_siren", "source_api", "status", "http_status", "error_code", "duration_ms"
        }  # fmt: skip
        assert (told["status"], told["http_status"], told["error_code"]) == ("SUCCESS", 200, None)
    assert payloads[5] == {
        "job_id": job,
        "company_siren": SNCF,
        "enrichment_status": "SUCCESS",
        "sources_success_count": 3,
        "sources_failed_count": 0,
        "core_identity_present": True,
        "required_sources_failed_count": 0,
        "optional_sources_failed_count": 0,
    }
    ((producer, correlation),) = world.query(
        "SELECT DISTINCT producer, correlation_id FROM events_outbox WHERE aggregate = %s", f"company:{SNCF}"
    )
    assert (producer, correlation) == ("M3", "correlation-default")
    order = [one["vendor"] for one in world.sandbox.ledger(kind="call") if one["ref"] == SNCF]
    assert order == [VENDORS[source] for source in Source]


@pytest.mark.req("ENR-21", "ENR-37", "ENR-56", "ENR-57", "ENR-82", "G-62")
async def test_an_optional_source_that_fails_is_retried_twice_and_the_job_goes_on(world: World) -> None:
    world.sandbox.set_faults([{"vendor": "inpi", "kind": "server_error", "status": 503, "ids": [SNCF]}])
    company = await world.enriched(SNCF)
    assert company["enrichment_status"] == "PARTIAL"
    assert company["enrichment_error"] == "INPI_RNE:503:TIMEOUT"
    assert company["relaunchable"] is True
    assert [world.calls(source, SNCF) for source in Source] == [1, 3, 1]
    told = [payload for kind, payload in world.events(SNCF) if kind == "SourceFetched"]
    assert [(one["status"], one["error_code"]) for one in told] == [
        ("SUCCESS", None),
        ("FAILED", "TIMEOUT"),
        ("SUCCESS", None),
    ]
    assert told[1]["duration_ms"] >= 750  # the retries, after 250 and 500 ms, are part of it


@pytest.mark.req("ENR-38", "ENR-58", "ENR-60", "G-62")
async def test_an_unknown_company_fails_and_all_sources_are_asked(world: World) -> None:
    company = await world.enriched(registers.UNKNOWN)
    assert company["enrichment_status"] == "FAILED"
    assert company["enrichment_error"] == (
        "API_RECHERCHE_ENTREPRISES:200:NOT_FOUND|INPI_RNE:404:NOT_FOUND|API_ENTREPRISE_RCS:404:NOT_FOUND"
    )
    assert (company["updated_at"], company["sources"]) == (None, {})
    assert [world.calls(source, registers.UNKNOWN) for source in Source] == [1, 1, 1]
    assert world.query("SELECT state FROM runs") == [("failed",)]


@pytest.mark.req("ENR-06", "G-56", "G-64")
async def test_answers_without_an_identity(world: World) -> None:
    expected = {
        registers.NAMELESS: "API_RECHERCHE_ENTREPRISES:200:CORE_IDENTITY_MISSING",
        registers.ANOTHER: "API_RECHERCHE_ENTREPRISES:200:INVALID_RESPONSE",
        registers.HTML: "API_RECHERCHE_ENTREPRISES:-:INVALID_RESPONSE",
    }
    for siren, error in expected.items():
        company = await world.enriched(siren)
        assert (company["enrichment_status"], company["enrichment_error"]) == ("FAILED", error)
    assert world.query("SELECT outcome, count(*) FROM outcomes GROUP BY 1") == [("failed", 3)]


@pytest.mark.req("G-84", "ENR-35")
async def test_sources_without_credentials_are_off(make: Make) -> None:
    world = await make(inpi=None, token=None)
    company = await world.enriched(registers.ONLY_SEARCH)
    assert company["enrichment_status"] == "SUCCESS"
    assert company["sources_success_count"] == 1
    assert [world.calls(source) for source in Source] == [1, 0, 0]
    assert [kind for kind, _ in world.events(registers.ONLY_SEARCH)] == [
        "Requested", "Started", "SourceFetched", "Completed"
    ]  # fmt: skip


@pytest.mark.req("G-59")
async def test_what_only_api_entreprise_says_is_shown_to_tenants_with_a_recipient(world: World) -> None:
    tenants(world, "acme")
    own, _ = await world.request(SNCF)
    await world.enriched(SNCF)
    others, _ = await world.request(SNCF, "acme")
    assert "court" in (await world.shown(own))["company"]
    assert "court" not in (await world.shown(others, "acme"))["company"]
    world.query("UPDATE tenants SET api_entreprise_recipient = '13002526500013' WHERE id = 'acme'")
    assert "court" in (await world.shown(others, "acme"))["company"]


@pytest.mark.req("ENR-53", "ENR-77", "G-59", "G-65")
async def test_requests_during_a_job_join_it_and_every_tenant_hears_the_end(world: World) -> None:
    tenants(world, "acme", "zeta")
    world.sandbox.set_faults([{"vendor": "inpi", "kind": "latency", "seconds": 0.3}])
    first = await world.request(SNCF, "default")  # which is switched on for the third source
    others = [world.request(SNCF, tenant) for tenant in ("acme", "acme", "zeta", "default")]
    launched = [one for _, one in (first, *await asyncio.gather(*others))]
    jobs = {one.job_id for one in launched}
    assert len(jobs) == 1
    assert [one.attached for one in launched] == [False, True, True, True, True]
    job = jobs.pop()
    assert job is not None
    assert await world.kit.wait_for_run(job, PATIENCE)
    assert [world.calls(source, SNCF) for source in Source] == [1, 1, 1]
    for tenant, count in (("default", 2), ("acme", 2), ("zeta", 1)):
        kinds = [kind for kind, _ in world.events(SNCF, tenant)]
        assert (kinds.count("Requested"), kinds.count("Completed"), kinds[-1]) == (count, 1, "Completed")
    assert world.query("SELECT DISTINCT job_id FROM requests") == [(job,)]


@pytest.mark.req("ENR-02", "ENR-31", "ENR-41", "ENR-52", "G-78")
async def test_a_company_is_pending_in_line_and_running_under_its_lock(world: World) -> None:
    async with world.kit.pool.connection() as connection:
        await pause_lane(connection, LANES[Source.SEARCH], reason="a test", by="test")
        _, launched = await world.request(SNCF)
        assert world.company(SNCF)["enrichment_status"] == "PENDING"
        assert world.query("SELECT 1 FROM leases WHERE ended_at IS NULL") == []
        await pause_lane(connection, LANES[Source.INPI], reason="a test", by="test")
        await resume_lane(connection, LANES[Source.SEARCH], reason="a test", by="test")
        while world.company(SNCF)["enrichment_status"] == "PENDING":
            await asyncio.sleep(0.01)
        ((tenant, key, ttl, run),) = world.query(
            "SELECT tenant_id, key, ttl, run_id FROM leases WHERE ended_at IS NULL"
        )
        assert (tenant, key) == ("system", f"company_enrichment:{SNCF}")
        assert (ttl, run) == (timedelta(seconds=120), launched.job_id)
        assert world.company(SNCF)["enrichment_status"] == "RUNNING"
        await resume_lane(connection, LANES[Source.INPI], reason="a test", by="test")
    assert launched.job_id is not None
    assert await world.kit.wait_for_run(launched.job_id, PATIENCE)
    assert world.query("SELECT end_cause FROM leases") == [("run ended",)]


@pytest.mark.req("ENR-54")
async def test_a_lock_that_is_lost_is_taken_again_with_the_next_attempt(world: World) -> None:
    async with world.kit.pool.connection() as connection:
        for source in (Source.INPI, Source.RCS):
            await pause_lane(connection, LANES[source], reason="a test", by="test")
        _, launched = await world.request(SNCF)
        await at_stage(world, Source.INPI)
        world.query("UPDATE leases SET expires_at = acquired_at, replica_id = NULL")
        await resume_lane(connection, LANES[Source.INPI], reason="a test", by="test")
        await at_stage(world, Source.RCS)
        world.query(
            "INSERT INTO replicas (id, host, pid, roles, work, hands, state, ended_at)"
            " VALUES ('died', 'h', 1, '{}', '{}', 1, 'dead', now())"
        )
        world.query("UPDATE leases SET replica_id = 'died' WHERE ended_at IS NULL")
        await resume_lane(connection, LANES[Source.RCS], reason="a test", by="test")
    assert launched.job_id is not None
    assert await world.kit.wait_for_run(launched.job_id, PATIENCE)
    started = [payload["attempt"] for kind, payload in world.events(SNCF) if kind == "Started"]
    assert started == [1, 2, 3]
    assert (world.job(launched.job_id)["attempt"], world.company(SNCF)["enrichment_status"]) == (3, "SUCCESS")
    assert [world.calls(source, SNCF) for source in Source] == [1, 1, 1]


async def at_stage(world: World, source: Source) -> None:
    """Wait until a job waits for this source."""
    while not world.query("SELECT 1 FROM items WHERE stage = %s", source.lower()):
        await asyncio.sleep(0.01)


@pytest.mark.req("G-10")
async def test_a_retry_after_is_heeded(world: World) -> None:
    world.sandbox.set_faults(
        [{"vendor": "recherche_entreprises", "kind": "throttle", "retry_after": 1, "ids": [SNCF], "times": 1}]
    )
    company = await world.enriched(SNCF)
    assert (company["enrichment_status"], world.calls(Source.SEARCH, SNCF)) == ("SUCCESS", 2)
    first, second = [one["at"] for one in world.sandbox.ledger("recherche_entreprises", "call")]
    assert second - first >= 1


async def test_an_operator_ends_a_job_and_the_company_is_not_left_running(world: World) -> None:
    async with world.kit.pool.connection() as connection:
        await pause_lane(connection, LANES[Source.INPI], reason="a test", by="test")
        _, launched = await world.request(SNCF)
        assert launched.job_id is not None
        await at_stage(world, Source.INPI)
        run = await load_run(connection, launched.job_id)
        await end_by_operator(connection, world.kit.flow("enrichment"), run, "enough", by="test")
    company = world.company(SNCF)
    assert company["enrichment_status"] == "PARTIAL"
    assert company["enrichment_error"] == "INPI_RNE:-:UNKNOWN|API_ENTREPRISE_RCS:-:UNKNOWN"
    assert world.events(SNCF)[-1][1]["enrichment_status"] == "PARTIAL"


async def test_a_tenant_that_ends_a_shared_job_ends_nothing_for_others(world: World) -> None:
    tenants(world, "gone", "rival")
    async with world.kit.pool.connection() as connection:
        await pause_lane(connection, LANES[Source.INPI], reason="a test", by="test")
        _, launched = await world.request(SNCF)
        assert launched.job_id is not None
        others, attached = await world.request(SNCF, "rival")
        assert attached.job_id == launched.job_id
        await world.request(SNCF, "gone")
        await at_stage(world, Source.INPI)
        run = await load_run(connection, launched.job_id)
        await end_by_operator(connection, world.kit.flow("enrichment"), run, "enough", by="test")
        await resume_lane(connection, LANES[Source.INPI], reason="a test", by="test")
    world.query("UPDATE tenants SET disabled_at = ecluse_now() WHERE id = 'gone'")
    sql = "SELECT tenant_id, payload, correlation_id FROM events_outbox WHERE event_type = %s ORDER BY tenant_id"
    events = world.query(sql, REFRESH)
    assert events == [(one, {"company_siren": SNCF}, f"correlation-{one}") for one in ("gone", "rival")]
    for number, (one, payload, correlation) in enumerate(events):
        event = PublishedEvent(number, one, "k", REFRESH, "c", correlation, "a flow", datetime.now(UTC), payload, None)
        await relaunch(world.kit.pool, world.kit.flow("enrichment"), world.made.config, [event])
    ((job, tenant),) = world.query("SELECT run_id, tenant_id FROM enrichment_jobs WHERE ended_at IS NULL")
    assert tenant == "rival"
    assert await world.kit.wait_for_run(job, PATIENCE)
    assert (await world.shown(others, "rival"))["enrichment_status"] == "SUCCESS"


async def test_directors_leave_no_trace_in_items_events_and_errors(world: World) -> None:
    await world.enriched(registers.OPPOSED)
    await world.enriched(SNCF)
    (director,) = world.company(SNCF)["sources"]["INPI_RNE"]["facts"]["directors"]
    assert director["last_name"]
    for table in ("items", "events_outbox", "runs", "run_log", "attempts", "outcomes", "enrichment_sources"):
        rows = json.dumps(world.query(f"SELECT to_jsonb(t) FROM {table} t"), ensure_ascii=False)  # noqa: S608
        assert director["last_name"] not in rows
    shown = json.dumps(world.company(registers.OPPOSED), ensure_ascii=False)
    assert '"masked": true' in shown
    assert '"last_name"' not in shown


@pytest.mark.req("ENR-03")
async def test_many_companies_at_once_are_each_asked_for_once(world: World) -> None:
    sirens = some_sirens("41", 20)
    await asyncio.gather(*(world.enriched(siren) for siren in sirens for _ in range(2)))
    assert [world.calls(source) for source in Source] == [20, 20, 20]
    assert world.query("SELECT DISTINCT enrichment_status FROM companies") == [("SUCCESS",)]
    assert world.query("SELECT count(*) FROM company_snapshots") == [(20,)]


async def test_a_manual_refresh_of_fresh_data_runs_again(world: World) -> None:
    request_id, launched = await world.request(SNCF)
    assert launched.job_id is not None
    assert await world.kit.wait_for_run(launched.job_id, PATIENCE)
    again = await world.again(request_id, SNCF, Trigger.MANUAL)
    assert again.job_id not in (None, launched.job_id)
    assert await world.kit.wait_for_run(again.job_id or 0, PATIENCE)
    assert world.calls(Source.SEARCH, SNCF) == 2
    assert world.query("SELECT count(*) FROM company_snapshots") == [(2,)]


async def test_requests_that_come_together_have_one_job_per_company(world: World) -> None:
    one, two = some_sirens("57", 2)
    async with world.kit.pool.connection() as connection, connection.transaction():
        made = await world.create(connection, one, two, one, one)
    jobs = [launched.job_id for _, launched in made]
    assert jobs == [jobs[0], jobs[1], jobs[0], jobs[0]]
    assert [launched.result for _, launched in made] == ["started", "started", "attached", "attached"]
    assert [id_ for id_, _ in made] == sorted({id_ for id_, _ in made})
    rows = world.query("SELECT company_siren, job_id FROM requests ORDER BY id")
    assert rows == list(zip([one, two, one, one], jobs, strict=True))
    told = [payload["request_id"] for kind, payload in world.events(one) if kind == "Requested"]
    assert told == [str(made[n][0]) for n in (0, 2, 3)]


async def test_a_job_that_another_group_has_started_is_joined_and_the_others_are_started(world: World) -> None:
    known, new = some_sirens("58", 2)
    await world.enriched(known)
    world.later(timedelta(days=31))
    tenants(world, "acme")
    async with world.kit.pool.connection() as first, world.kit.pool.connection() as second:
        async with first.transaction():
            ((_, begun),) = await world.create(first, known, tenant="acme")

            async def meanwhile() -> list[tuple[int, Launched]]:
                async with second.transaction():
                    return await world.create(second, known, new)

            waiting = asyncio.create_task(meanwhile())
            waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND pid = %s"
            while world.query(waits, second.info.backend_pid) == [(0,)]:
                assert not waiting.done()
                await asyncio.sleep(0.01)
        (_, joined), (_, started) = await waiting
    assert (joined.job_id, joined.result, started.result) == (begun.job_id, "attached", "started")
    for launched in (joined, started):
        assert launched.job_id is not None
        assert await world.kit.wait_for_run(launched.job_id, PATIENCE)
    assert [kind for kind, _ in world.events(known)].count("Completed") == 2
    assert [kind for kind, _ in world.events(known, "acme")].count("Completed") == 1
