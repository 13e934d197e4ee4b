"""The lane of each credential, so that a Retry-After, a breaker or a cap of one holds no other. The lanes that flows
declare are those of the environment's connections; beneath them, `crm/acme` is that of a tenant's connection,
`crm/acme/schedule-7` that of a schedule's own key, and `llm/acme/gpt-4.1` that of a model that is not the connection's
own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from ecluse.db.connect import Connection
from ecluse.db.query import fetch_column
from ecluse.engine import Flow, Lane, put_lanes, retire_lanes
from ecluse.flows.connections import records
from ecluse.flows.connections.records import Kind, Record

# The declared lanes of calls to each kind of vendor.
BASES: Mapping[Kind, tuple[str, ...]] = {
    "crm": ("crm", "crm-sales", "crm-transcription"),
    "speech": ("elevenlabs",),
    "llm": ("llm",),
}
MADE = "SELECT name FROM lanes WHERE tenant_id = %s AND base = ANY(%s) ORDER BY name"


def of_schedule(schedule_id: int) -> str:
    """Return what tells the lane of a schedule's own key apart."""
    return f"schedule-{schedule_id}"


def lane(declared: Lane, tenant: str, record: Record | None, apart: str = "") -> Lane | None:
    """Return the lane beneath `declared` of a tenant's connection. `record` None: the connection is the environment's;
    its lane is the declared one (None), unless something tells the credential or model apart."""
    if record is None and not apart:
        return None
    made = replace(declared, name="/".join(filter(None, (declared.name, tenant, apart))), tenant=tenant)
    if record is None:
        return made
    per_second = declared.per_second if record.per_minute is None else Lane.per_minute(record.per_minute)
    return replace(made, max_in_flight=record.max_in_flight or declared.max_in_flight, per_second=per_second)


async def of_tenants(
    connection: Connection, kind: Kind, declared: Lane, tenants: Collection[str], apart: str = ""
) -> dict[str, Lane | None]:
    """Return by tenant the lane of its connection of this kind."""
    known = await records.of_tenants(connection, kind, tenants)
    return {tenant: lane(declared, tenant, known.get(tenant), apart) for tenant in tenants}


async def put(connection: Connection, flows: Iterable[Flow], kind: Kind, record: Record) -> None:
    """Make the lanes of a connection, and store its caps with all that it has. Not left to the first dispatch, whose
    transaction may be long: another one of the tenant would wait for its end."""
    declared = {stage.lane.name: stage.lane for flow in flows for stage in flow.stages}
    wanted = []
    made = await fetch_column(connection, MADE, (record.tenant_id, list(BASES[kind])))
    for name in {*made, *(f"{base}/{record.tenant_id}" for base in BASES[kind])}:
        base, _, *apart = name.split("/", 2)
        if base in declared:
            wanted.append(lane(declared[base], record.tenant_id, record, "/".join(apart)))
    await put_lanes(connection, filter(None, wanted))


async def retire(connection: Connection, kind: Kind, tenant: str, apart: str = "") -> None:
    """Mark the lanes of a deleted connection, or of what is told `apart`, as no longer wanted."""
    names = await fetch_column(connection, MADE, (tenant, list(BASES[kind])))
    await retire_lanes(connection, [name for name in names if not apart or name.endswith(f"/{apart}")])
