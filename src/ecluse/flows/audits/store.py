"""Storing of ended audits, set-based, and of which audit is the latest of its fiche and config: the one that ended
last.

An audit is written in the commit that finishes its item (`save_ends`). An item that fails without an execution, or is
never dispatched, is written by `record_failures`, in the transaction that ends the run. A paid result is written
whenever it arrives, even over a failure; a completed audit is never written again.

A transaction that ends audits locks their fiches first, by (tenant, fiche id), like every transaction that locks
fiches: two audits of one fiche and config wait for each other, and cannot both be the latest.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ecluse.base.text import storable
from ecluse.db.connect import Connection
from ecluse.db.query import Row, as_json, fetch_rows
from ecluse.engine import EphemeralEvent, FinishedItem, ItemEnd
from ecluse.retention.kinds import Aged

STAGE = "audit"
# Audits are kept at least as long as their run, which accounts for them.
KEPT = Aged(
    "audits",
    "audits",
    "t.finished_at",
    where="t.finished_at IS NOT NULL",
    also="NOT EXISTS (SELECT 1 FROM runs r WHERE r.id = t.run_id)",
)

LOCK_FICHES = """
SELECT 1 FROM fiche_cache WHERE id = ANY(%s) ORDER BY tenant_id, fiche_id FOR NO KEY UPDATE
"""
# Whether the end `t` changes the row `a`.
CHANGES = "a.status <> 'completed' AND (t.status = 'completed' OR a.status <> 'failed')"
ENDS = """
ends AS MATERIALIZED (
    SELECT * FROM jsonb_to_recordset(%s::jsonb) AS t(id bigint, status text, score numeric, result jsonb, model text,
        input_tokens integer, output_tokens integer, cost numeric, error_code text, error text))"""
# Runs before FINISH: a unique index checks each row at once.
UNSET = f"""
WITH {ENDS}
UPDATE audits former SET is_latest = false FROM ends t JOIN audits a ON a.id = t.id
WHERE {CHANGES} AND former.is_latest AND former.id <> a.id
  AND former.fiche_cache_id = a.fiche_cache_id AND former.audit_config_id = a.audit_config_id
"""  # noqa: S608 - our own names
FINISH = f"""
WITH {ENDS},
mine AS MATERIALIZED (
    SELECT t.*, a.id = max(a.id) OVER (PARTITION BY a.fiche_cache_id, a.audit_config_id) AS is_latest
    FROM ends t JOIN audits a ON a.id = t.id WHERE {CHANGES})
UPDATE audits a SET status = m.status, is_latest = m.is_latest, score = m.score, result = m.result, model = m.model,
    input_tokens = m.input_tokens, output_tokens = m.output_tokens, cost = m.cost, error_code = m.error_code,
    error = m.error, finished_at = now
FROM mine m, (SELECT ecluse_now() AS now) clock WHERE a.id = m.id
"""  # noqa: S608 - our own names

# An audit of an ended run that was not dispatched will not be any more: it has failed.
FAILED = """
SELECT a.id, a.fiche_cache_id, coalesce(i.error_code, 'NOT_DISPATCHED'),
       coalesce(i.error, 'The run ended before it was dispatched')
FROM audits a JOIN runs r ON r.id = a.run_id
LEFT JOIN items i ON i.run_id = a.run_id AND i.stage = %(stage)s AND i.key = a.fiche_id || '-' || a.audit_config_id
WHERE a.run_id = ANY(%(runs)s) AND a.status IN ('pending', 'running')
  AND (i.status = 'failed' OR (i.id IS NULL AND r.ended_at IS NOT NULL))
"""


async def save_ends(connection: Connection, ends: Sequence[ItemEnd]) -> None:
    """Write completed and failed audits, in the commit that finishes their items. Used as the stage's `on_end`."""
    rows = []
    for one in ends:
        if one.status == "succeeded" and one.kept is not None:
            rows.append(_end(one.item.payload, "completed", **one.kept))
        elif one.status in ("failed", "ignored"):
            error = storable(one.error or "")
            rows.append(_end(one.item.payload, "failed", error_code=one.error_code or "FAILED", error=error))
    await _finish(connection, rows)


async def record_failures(connection: Connection, run_ids: Collection[int]) -> None:
    """Mark audits of these runs as failed if their items have failed or, in an ended run, were never dispatched. Called
    by `Flow.ended` of every flow with an audit stage; a gate may call it before it counts. Idempotent."""
    found = [
        _end({"audit_id": audit, "fiche_cache_id": fiche}, "failed", error_code=code, error=error)
        for audit, fiche, code, error in await fetch_rows(connection, FAILED, {"runs": list(run_ids), "stage": STAGE})
    ]
    if found:
        async with connection.transaction():
            await _finish(connection, found)


async def news(_: Connection, over: Sequence[FinishedItem]) -> list[EphemeralEvent]:
    """Return the realtime events about finished audits. Used as the stage's `news`."""
    return [_live(one) for one in over]


async def _finish(connection: Connection, rows: Sequence[Row]) -> None:
    """Write the results of ended audits, in the caller's transaction."""
    if not rows:
        return
    given = as_json(rows)
    await connection.execute(LOCK_FICHES, (sorted({int(row["fiche_cache_id"]) for row in rows}),), prepare=True)
    await connection.execute(UNSET, (given,), prepare=True)
    await connection.execute(FINISH, (given,), prepare=True)


def _end(payload: Row, status: str, **facts: Any) -> Row:
    """Return the result of an ended audit as an input row for the statements of this module."""
    return {"id": payload["audit_id"], "fiche_cache_id": payload["fiche_cache_id"], "status": status, **facts}


def _live(one: FinishedItem) -> EphemeralEvent:
    """Return the realtime event about a finished audit."""
    item = one.item
    about = {
        "fiche_id": item.target,
        "audit_id": item.payload["audit_id"],
        "audit_config_id": item.payload["audit_config_id"],
        "run_id": str(item.run_id),
    }
    if one.status == "succeeded":
        return EphemeralEvent(item.tenant_id, "audit.completed", {**about, "score": one.result["score"]})
    return EphemeralEvent(item.tenant_id, "audit.failed", {**about, "error_code": one.error_code, "error": one.error})
