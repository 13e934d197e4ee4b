"""Planning of a run's audits: one row and one item each. The row is inserted before any worker claims the item, so that
every requested audit is recorded; planning the same audit twice adds nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ecluse.db.connect import Connection
from ecluse.db.query import Row, as_json, fetch_all
from ecluse.engine import Lane, NewItem, Run
from ecluse.flows.audits.configs import ConfigVersion
from ecluse.flows.connections import lanes, records

Trigger = Literal["automation", "api"]
CHUNK = 1_000

PLAN = """
INSERT INTO audits (tenant_id, run_id, fiche_cache_id, fiche_id, audit_config_id, config_version, automation_run_id,
                    automation_schedule_id, trigger_source, use_rlm, created_at)
SELECT f.tenant_id, t.run, f.id, f.fiche_id, t.config, t.version, CASE t.source WHEN 'automation' THEN t.run END,
       t.schedule, t.source, t.rlm, ecluse_now()
FROM jsonb_to_recordset(%s::jsonb) AS t(tenant text, run bigint, fiche text, config bigint, version integer,
    schedule bigint, source text, rlm boolean)
JOIN fiche_cache f ON f.tenant_id = t.tenant AND f.fiche_id = t.fiche
ORDER BY t.run, f.id, t.config
ON CONFLICT ON CONSTRAINT audits_once DO NOTHING
"""

PLANNED = """
SELECT a.id, a.tenant_id, a.run_id, a.fiche_id, a.fiche_cache_id, a.audit_config_id, a.config_version, a.use_rlm,
       v.snapshot ->> 'model' AS model
FROM audits a JOIN audit_config_versions v ON v.audit_config_id = a.audit_config_id AND v.version = a.config_version
WHERE a.run_id = ANY(%s) ORDER BY a.run_id, a.fiche_cache_id, a.audit_config_id
"""


@dataclass(frozen=True, slots=True)
class AuditToPlan:
    """An audit to plan: tenant, run, fiche id, config and its version. `rlm` is stored with it unchanged; `source` is
    the trigger of the audit."""

    tenant: str
    run: int
    fiche: str
    config: int
    version: int
    rlm: bool
    source: Trigger
    schedule: int | None = None


async def plan_audits(
    connection: Connection,
    run: Run,
    fiche_ids: Sequence[str],
    configs: Sequence[ConfigVersion],
    *,
    lane: Lane,
    model: str | None = None,
    use_rlm: bool = False,
    schedule_id: int | None = None,
) -> list[NewItem]:
    """Plan an audit of every fiche with every config. Return the items, each with its row, for a stage made by
    `audit_stage`, whose lane is `lane`; `model`: the model of the environment. A fiche that is not in the cache gets no
    audit."""
    wanted = [
        AuditToPlan(run.tenant_id, run.id, fiche_id, config.id, config.version, use_rlm, "automation", schedule_id)
        for fiche_id in fiche_ids
        for config in configs
    ]
    return (await plan(connection, wanted, lane, model)).get(run.id, [])


async def plan(
    connection: Connection, wanted: Sequence[AuditToPlan], lane: Lane, model: str | None
) -> dict[int, list[NewItem]]:
    """Insert the audits of many runs, each once, and return their items by run id. An item gets the lane beneath `lane`
    of its tenant's connection, and of its config's model if that is not the model of the connection; `model`: the model
    of the environment."""
    async with connection.transaction():
        for start in range(0, len(wanted), CHUNK):
            await connection.execute(PLAN, (as_json(wanted[start : start + CHUNK]),))
        rows = await fetch_all(connection, dict, PLANNED, (sorted({one.run for one in wanted}),))
    known = await records.of_tenants(connection, "llm", {one.tenant for one in wanted})
    items: dict[int, list[NewItem]] = {}
    for row in rows:
        record = known.get(row["tenant_id"])
        own = model if record is None else record.model
        apart = row["model"] if row["model"] not in (None, own) else ""
        found = _item(row)._replace(lane=lanes.lane(lane, row["tenant_id"], record, apart))
        items.setdefault(row["run_id"], []).append(found)
    return items


def item_key(fiche_id: str, config_id: int) -> str:
    """Return the key of an audit's item, unique in its run."""
    return f"{fiche_id}-{config_id}"


def _item(row: Row) -> NewItem:
    """Return the item of a planned audit."""
    payload = {
        "audit_id": str(row["id"]),
        "fiche_cache_id": str(row["fiche_cache_id"]),
        "audit_config_id": str(row["audit_config_id"]),
        "config_version": row["config_version"],
        "use_rlm": row["use_rlm"],
    }
    return NewItem(item_key(row["fiche_id"], row["audit_config_id"]), target=row["fiche_id"], payload=payload)
