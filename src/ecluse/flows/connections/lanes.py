"""One lane per credential, so that a Retry-After, a breaker or a cap of one credential holds back no other. The lanes
that flows declare are those of the environment's connections; beneath them, `crm/acme` is the lane of a tenant's
connection, `crm/acme/schedule-7` that of a schedule's own key, and `llm/acme/gpt-4.1` that of a model other than the
connection's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from ecluse.base.text import count_of
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_column
from ecluse.engine import Flow, Lane, put_lanes, retire_lanes
from ecluse.flows.connections import records
from ecluse.flows.connections.records import Kind, Record

# The declared lanes of calls to each kind of vendor.
BASES: Mapping[Kind, tuple[str, ...]] = {
    "crm": ("crm", "crm-sales", "crm-transcription"),
    "speech": ("elevenlabs",),
    "llm": ("llm",),
}
OVERRIDES_SHOWN = 10  # lanes per connection, at most
BASE_OF_KIND = ", ".join(f"('{kind}', '{base}')" for kind, bases in BASES.items() for base in bases)
# The connections, each with the caps that operators have set on its lanes: they stay in force instead of its own.
WITH_OVERRIDES = f"""(
SELECT c.*, (
    SELECT coalesce(jsonb_agg(o), '[]') FROM (
        SELECT l.name AS lane, l.set_max_in_flight AS max_in_flight, l.set_per_second AS per_second,
               count(*) OVER () AS lanes
        FROM lanes l JOIN (VALUES {BASE_OF_KIND}) AS b(kind, base) ON b.base = l.base
        WHERE b.kind = c.kind AND l.tenant_id = c.tenant_id AND l.name <> l.base AND l.retired_at IS NULL
          AND (l.set_max_in_flight IS NOT NULL OR l.set_per_second IS NOT NULL)
        ORDER BY length(l.name), l.name LIMIT {OVERRIDES_SHOWN}) o) AS overrides
FROM connections c)"""  # noqa: S608 - our own names
# Without the declared lanes, which are those of the tenant `default`.
MADE = "SELECT name FROM lanes WHERE tenant_id = %s AND base = ANY(%s) AND name <> base ORDER BY name"


def of_schedule(schedule_id: int) -> str:
    """Return the last part of the name of a lane for a schedule's own key (`apart`)."""
    return f"schedule-{schedule_id}"


def lane(declared: Lane, tenant: str, record: Record | None, apart: str = "") -> Lane | None:
    """Return the lane beneath `declared` for a tenant's connection, with the caps of its `record`. `apart`: the last
    part of its name, for a schedule's key or a model. `record` None: the connection is the environment's, and its lane
    the declared one (None), unless `apart` is given."""
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
    """Return the lane of each tenant's connection of this kind, by tenant, as `lane` does."""
    known = await records.of_tenants(connection, kind, tenants)
    return {tenant: lane(declared, tenant, known.get(tenant), apart) for tenant in tenants}


def with_remarks(row: Row) -> Row:
    """Return a row of WITH_OVERRIDES with each override in words, and the number of those that are not shown."""
    found = row["overrides"]
    more = found[0]["lanes"] - len(found) if found else 0
    lanes = count_of(more, "further lane")
    further = [f"{lanes} with caps set by an operator: see `ecluse lanes list`"] if more else []
    return {**row, "overrides": [*(_remark(**one) for one in found), *further]}


def _remark(lane: str, max_in_flight: int | None, per_second: float | None, **_: int) -> str:
    caps = [] if max_in_flight is None else [(f"{max_in_flight:,} in flight", "--max-in-flight null")]
    caps += [] if per_second is None else [(f"{60 * per_second:g} per minute", "--per-second null")]
    said, cleared = [" and ".join(said for said, _ in caps), " ".join(cleared for _, cleared in caps)]
    return f"lane {lane}: {said}, set by an operator, until `ecluse lanes cap {lane} {cleared}`"


async def put(connection: Connection, flows: Iterable[Flow], kind: Kind, record: Record) -> None:
    """Create the lanes of a connection, and store its caps in these and in all lanes that it already has. Not left to
    the first dispatch, whose transaction may be long: another dispatch of the tenant would wait for its end."""
    declared = {stage.lane.name: stage.lane for flow in flows for stage in flow.stages}
    wanted = []
    made = await fetch_column(connection, MADE, (record.tenant_id, list(BASES[kind])))
    for name in {*made, *(f"{base}/{record.tenant_id}" for base in BASES[kind])}:
        base, _, *apart = name.split("/", 2)
        if base in declared:
            wanted.append(lane(declared[base], record.tenant_id, record, "/".join(apart)))
    await put_lanes(connection, filter(None, wanted))


async def retire(connection: Connection, kind: Kind, tenant: str, apart: str = "") -> None:
    """Mark the lanes of a tenant's deleted connection as no longer used; with `apart`, only those whose name ends with
    it."""
    names = await fetch_column(connection, MADE, (tenant, list(BASES[kind])))
    await retire_lanes(connection, [name for name in names if not apart or name.endswith(f"/{apart}")])
