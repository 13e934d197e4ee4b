"""An engine that enriches companies, with the sandbox as the registers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from ecluse.db.connect import Connection
from ecluse.engine.kit import Kit
from ecluse.flows.enrichment import requests
from ecluse.flows.enrichment.clients import Config, Registers
from ecluse.flows.enrichment.flow import Enrichment
from ecluse.flows.enrichment.requests import Desk, Launched
from ecluse.flows.enrichment.states import Trigger, TriggerRequest
from ecluse.testing.sandbox import SandboxProcess
from ecluse.vendors.registers import Source
from tests.support.registers import PLACES, PURPOSE, VENDORS

PATIENCE = timedelta(seconds=30)
RECIPIENT = PURPOSE.recipient


def config_at(url: str, **given: Any) -> Config:
    """Settings with all three sources at the sandbox of this URL, and no caps."""
    return Config(
        **{
            "urls": {source: url + place for source, place in PLACES.items()},
            "per_second": dict.fromkeys(Source),
            "inpi": ("user@example.org", "a-good-password"),
            "token": "a-good-token",
            "context": PURPOSE.context,
            "object": PURPOSE.object,
            "recipient": RECIPIENT,
            **given,
        }
    )


def enrichment(url: str, **given: Any) -> Enrichment:
    config = config_at(url, **given)
    return Enrichment(config, partial(Registers, config))


@dataclass
class World:
    kit: Kit
    made: Enrichment
    sandbox: SandboxProcess
    query: Callable[..., list[Any]]

    async def request(
        self, siren: str, tenant: str = "default", trigger: Trigger = Trigger.CREATED
    ) -> tuple[int, Launched]:
        """Create a request for a company; return its id and what it led to."""
        async with self.kit.pool.connection() as connection, connection.transaction():
            return (await self.create(connection, siren, tenant=tenant, trigger=trigger))[0]

    async def create(
        self, connection: Connection, *sirens: str, tenant: str = "default", trigger: Trigger = Trigger.CREATED
    ) -> list[tuple[int, Launched]]:
        """Create requests together, in the caller's transaction."""
        asked = [TriggerRequest(tenant, siren, trigger, f"correlation-{tenant}") for siren in sirens]
        return await requests.create(self._desk(connection), asked)

    async def again(self, request_id: int, siren: str, trigger: Trigger, key: str = "again") -> Launched:
        """Trigger a job by a request that exists."""
        async with self.kit.pool.connection() as connection, connection.transaction():
            asked = TriggerRequest("default", siren, trigger, "correlation-again", request_id, key=key)
            return (await requests.launch(self._desk(connection), [asked]))[0]

    def _desk(self, connection: Connection) -> Desk:
        return Desk(connection, self.kit.flow("enrichment"), self.made.config)

    async def enriched(self, siren: str, tenant: str = "default") -> dict[str, Any]:
        """Request a company and wait for the end of its job; return the row of the company."""
        _, launched = await self.request(siren, tenant)
        if launched.job_id is not None:
            assert await self.kit.wait_for_run(launched.job_id, PATIENCE)
        return self.company(siren)

    async def shown(self, request_id: int, tenant: str = "default") -> dict[str, Any]:
        async with self.kit.pool.connection() as connection:
            return (await requests.show(connection, self.made.config, tenant, request_id)).row

    async def sweep(self) -> None:
        watch = self.kit.flow("enrichment").watch
        assert watch is not None
        async with self.kit.pool.connection() as connection:
            await watch(connection)

    def company(self, siren: str) -> dict[str, Any]:
        ((row,),) = self.query("SELECT to_jsonb(c) FROM companies c WHERE siren = %s", siren)
        return dict(row)

    def job(self, run_id: int) -> dict[str, Any]:
        ((row,),) = self.query("SELECT to_jsonb(j) FROM enrichment_jobs j WHERE run_id = %s", run_id)
        return dict(row)

    def events(self, siren: str, tenant: str = "default") -> list[tuple[str, dict[str, Any]]]:
        """Kind and payload of the company's events, in their order."""
        return self.query(
            "SELECT replace(event_type, 'CompanyEnrichment', ''), payload FROM events_outbox"
            " WHERE aggregate = %s AND tenant_id = %s ORDER BY id",
            f"company:{siren}",
            tenant,
        )

    def calls(self, source: Source, siren: str | None = None) -> int:
        found = self.sandbox.ledger(VENDORS[source], "call")
        return sum(one["ref"] == siren if siren else one["ref"] != "login" for one in found)

    def later(self, by: timedelta) -> None:
        """Let time pass for the database."""
        self.query('UPDATE clock_offset SET "offset" = "offset" + %s', by)


Make = Callable[..., Awaitable[World]]
