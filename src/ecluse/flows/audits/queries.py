"""Queries about audits: one audit in full, limited to the fiches that a caller may see, and the unverified steps of a
run."""

from __future__ import annotations

from ecluse.base.errors import NotFound
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_one, fetch_rows
from ecluse.flows.audits.store import STAGE

# A repeated call that may have been paid twice is recorded as an attempt of its item (`maybe_paid`).
SHOW = f"""
SELECT l.*, a.result, v.snapshot AS config,
       (SELECT count(*) FROM items i JOIN attempts t ON t.item_id = i.id AND t.maybe_paid
        WHERE i.run_id = a.run_id AND i.stage = '{STAGE}' AND i.key = a.fiche_id || '-' || a.audit_config_id)
           AS maybe_paid
FROM audit_list l JOIN audits a ON a.id = l.id JOIN fiche_states f ON f.fiche_cache_id = a.fiche_cache_id
JOIN audit_config_versions v ON v.audit_config_id = a.audit_config_id AND v.version = a.config_version
WHERE a.tenant_id = %(tenant)s AND a.id = %(id)s AND {{visible}}
"""  # noqa: S608 - made of our own words


# The part of an automation run, and a run of its own.
UNVERIFIED = """
SELECT fiche_id, sum(unverified_steps)::int FROM audit_list
WHERE tenant_id = %(tenant)s AND (run_id = %(run)s OR automation_run_id = %(run)s) AND unverified_steps > 0
GROUP BY fiche_id
"""


async def unverified_steps(connection: Connection, tenant: str, run_id: int) -> dict[str, int]:
    """Return the number of unverified steps in the audits of a run, by fiche; fiches without any are left out."""
    return dict(await fetch_rows(connection, UNVERIFIED, {"tenant": tenant, "run": run_id}))


async def show_audit(
    connection: Connection, tenant: str, audit_id: int, *, visible: tuple[str, Row] = ("true", {})
) -> Row:
    """Return an audit with its result and the config version that it was made with. Raise NotFound if the tenant has no
    such audit, or the caller may not see its fiche. `visible`: the condition on `fiche_states` for the caller, and its
    parameters."""
    condition, parameters = visible
    given = {"tenant": tenant, "id": audit_id, **parameters}
    audit = await fetch_one(connection, dict, SHOW.format(visible=condition), given)
    if audit is None:
        raise NotFound(f"There is no audit {audit_id}.")
    return audit
