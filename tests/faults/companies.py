"""How jobs of company enrichment are started for the fault cases: a request for each company, and for every third one
another of a second tenant, which joins the job."""

from __future__ import annotations

from functools import cache

from ecluse.db.connect import Connection
from ecluse.engine import Run, Start, load_run
from ecluse.flows.enrichment import requests
from ecluse.flows.enrichment.requests import Desk
from ecluse.flows.enrichment.states import Trigger, TriggerRequest
from ecluse.vendors.registers import Source
from tests.support.enrichment_world import RECIPIENT, enrichment
from tests.support.registers import PLACES, VENDORS, some_sirens

SECOND = "second"
SECOND_TENANT = "INSERT INTO tenants (id, name, created_at) VALUES (%s, %s, ecluse_now()) ON CONFLICT DO NOTHING"
OF_START = "UPDATE runs SET event_key = %s WHERE id = %s"


@cache
def _sirens() -> list[str]:
    return some_sirens("41", 5_000)


def siren(n: int) -> str:
    return _sirens()[n - 1]


def wanted_by_second(company: str) -> bool:
    return int(company[:8]) % 3 == 0


def calls(company: str) -> frozenset[str]:
    return frozenset({"log-in", *(f"{vendor} of {company}" for vendor in VENDORS.values())})


def registers(url: str) -> dict[str, str]:
    return {
        "RECHERCHE_ENTREPRISES_BASE_URL": url + PLACES[Source.SEARCH],
        "RECHERCHE_ENTREPRISES_PER_SECOND": "10000",
        "INPI_BASE_URL": url + PLACES[Source.INPI],
        "INPI_USERNAME": "user@example.org",
        "INPI_PASSWORD": "a-good-password",
        "API_ENTREPRISE_BASE_URL": url + PLACES[Source.RCS],
        "API_ENTREPRISE_TOKEN": "a-good-token",
        "API_ENTREPRISE_RECIPIENT": RECIPIENT,
        "API_ENTREPRISE_PER_MINUTE": "600000",
    }


async def ask(connection: Connection, start: Start, url: str) -> Run:
    """Request a company; return the run of its job."""
    made, company = enrichment(url), start.input["company"]
    await connection.execute(SECOND_TENANT, (SECOND, SECOND))
    for tenant in (start.tenant_id, *([SECOND] if wanted_by_second(company) else ())):
        async with connection.transaction():
            asked = TriggerRequest(tenant, company, Trigger.CREATED, f"of {tenant}")
            ((_, launched),) = await requests.create(Desk(connection, made.flow, made.config), [asked])
            if tenant == start.tenant_id:
                job = launched.job_id
                await connection.execute(OF_START, (start.event_key, job))
    assert job is not None
    return await load_run(connection, job)
