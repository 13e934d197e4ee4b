"""Relaunch by an event: any part of Ecluse that learns of a change of a company writes `company/refresh` to the outbox,
with `company_siren` in its payload; this sink of the publisher starts one job for each."""

from __future__ import annotations

from collections.abc import Sequence

from ecluse.db.connect import Connection, Pool
from ecluse.db.query import fetch_row
from ecluse.engine import Flow, PublishedEvent
from ecluse.flows.enrichment import requests
from ecluse.flows.enrichment.clients import Config
from ecluse.flows.enrichment.events import REFRESH
from ecluse.flows.enrichment.requests import Desk
from ecluse.flows.enrichment.states import Trigger, TriggerRequest

# The last request of the tenant for the company, unless it was triggered by this event already (events are published at
# least once) or the tenant is disabled.
WANTED = """
SELECT r.id, r.company_siret FROM requests r JOIN tenants t ON t.id = r.tenant_id AND t.disabled_at IS NULL
WHERE r.tenant_id = %(tenant)s AND r.company_siren = %(siren)s
  AND NOT EXISTS (SELECT 1 FROM events_outbox e WHERE e.tenant_id = r.tenant_id AND e.event_key LIKE '%%:' || %(key)s
                  AND e.aggregate = 'company:' || r.company_siren)
ORDER BY r.id DESC LIMIT 1
"""


async def relaunch(pool: Pool, flow: Flow, config: Config, events: Sequence[PublishedEvent]) -> None:
    """Start or join a job for each event `company/refresh` about a company that its tenant has a request for."""
    for event in events:
        if event.event_type == REFRESH:
            async with pool.connection() as connection, connection.transaction():
                await _relaunch(connection, flow, config, event)


async def _relaunch(connection: Connection, flow: Flow, config: Config, event: PublishedEvent) -> None:
    siren, key = str(event.payload.get("company_siren")), f"event-{event.id}"
    row = await fetch_row(connection, WANTED, {"tenant": event.tenant_id, "siren": siren, "key": key})
    if row is not None:
        request_id, siret = row
        asked = TriggerRequest(event.tenant_id, siren, Trigger.MANUAL, event.correlation_id, request_id, siret, key)
        await requests.launch(Desk(connection, flow, config), [asked])
