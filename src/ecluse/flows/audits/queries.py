"""One audit in full, limited to the fiches that a caller may see."""

from __future__ import annotations

from typing import Literal, NamedTuple

from ecluse.base.errors import NotFound
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_one
from ecluse.flows.audits.store import STAGE

Status = Literal["pending", "running", "completed", "failed"]

COLUMNS = """a.id, a.tenant_id, a.fiche_id, a.fiche_cache_id, a.audit_config_id, a.config_version, a.status, a.score,
    a.is_latest, a.use_rlm, a.trigger_source, a.run_id, a.automation_run_id, a.automation_schedule_id, a.error_code,
    a.error, a.model, a.input_tokens, a.output_tokens, a.cost, a.created_at, a.started_at, a.finished_at"""
# The page is cut first, then the names of its configs are joined.
LIST = f"""
SELECT a.*, v.snapshot ->> 'name' AS config_name
FROM (SELECT {COLUMNS} FROM audits a WHERE {{where}} ORDER BY a.id DESC LIMIT %(limit)s OFFSET %(offset)s) a
JOIN audit_config_versions v ON v.audit_config_id = a.audit_config_id AND v.version = a.config_version
ORDER BY a.id DESC
"""  # noqa: S608 - made of our own words

# A repeated call that may have been paid twice is recorded as an attempt of its item (`maybe_paid`).
SHOW = f"""
SELECT l.*, a.result, v.snapshot AS config,
       (SELECT count(*) FROM items i JOIN attempts t ON t.item_id = i.id AND t.maybe_paid
        WHERE i.run_id = a.run_id AND i.stage = '{STAGE}' AND i.key = a.fiche_id || '-' || a.audit_config_id)
           AS maybe_paid
FROM audit_list l JOIN audits a ON a.id = l.id JOIN fiche_states f ON f.fiche_cache_id = a.fiche_cache_id
JOIN audit_config_versions v ON v.audit_config_id = a.audit_config_id AND v.version = a.config_version
WHERE a.tenant_id = coalesce(%(tenant)s, a.tenant_id) AND a.id = %(id)s AND {{visible}}
"""  # noqa: S608 - made of our own words


class Wanted(NamedTuple):
    """Filter of audits; None matches any value."""

    fiche_id: str | None = None
    audit_config_id: int | None = None
    automation_run_id: int | None = None
    status: Status | None = None
    latest: bool | None = None


async def show_audit(
    connection: Connection, tenant: str | None, audit_id: int, *, visible: tuple[str, Row] = ("true", {})
) -> Row:
    """Return an audit with its result and the config version that was asked. An audit that the caller may not see is
    not found."""
    condition, parameters = visible
    given = {"tenant": tenant, "id": audit_id, **parameters}
    audit = await fetch_one(connection, dict, SHOW.format(visible=condition), given)
    if audit is None:
        raise NotFound(f"there is no audit {audit_id}")
    return audit
