"""Settling of writes that were in doubt when their item was given up or their run ended: a sweep reads them back until
`effects` has their true state."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any
from uuid import UUID

import structlog

from ecluse.db.connect import Pool
from ecluse.db.query import fetch_rows
from ecluse.engine.effects.protocol import EffectEnd, as_stored_json, conclude, store_effects
from ecluse.engine.model.context import WorkContext
from ecluse.engine.model.flow import Flow
from ecluse.engine.model.item import Item
from ecluse.engine.model.writes import ReadableWrite
from ecluse.engine.runs import run_log

log = structlog.get_logger(__name__)

AT_ONCE = 20

# Only writes that can be read back: sending a key again would be a write, and nothing is written for a run that has
# ended. For a day after the last send.
DUE = """
WITH due AS (
    SELECT e.id FROM effects e JOIN items i ON i.id = e.item_id
    WHERE e.state IN ('sending', 'unknown') AND e.probe_at <= (SELECT ecluse_now()) AND e.class = 'C2'
      AND i.status <> 'open' AND i.flow = ANY(%(flows)s) AND i.error_code IS DISTINCT FROM 'WORKER_CRASHED'
      AND e.last_send_at + e.quiet <= ecluse_now() AND e.last_send_at > ecluse_now() - interval '1 day'
    ORDER BY e.probe_at LIMIT %(most)s FOR UPDATE OF e SKIP LOCKED)
UPDATE effects e SET probe_at = ecluse_now() + interval '30 seconds'
FROM due, items i JOIN runs r ON r.id = i.run_id WHERE e.id = due.id AND i.id = e.item_id
RETURNING i.id, i.run_id, i.tenant_id, i.flow, i.stage, i.key, i.target, i.payload, i.round, i.executions, i.crashes,
          r.event_key, r.correlation_id, i.lane_id, e.id, e.sends, e.wanted, e.before
"""


async def settle_forgotten(
    pool: Pool, flows: Mapping[str, Flow], contexts: Mapping[str, WorkContext], replica: str
) -> None:
    """Read back the writes in doubt that are due, at most AT_ONCE of them, store the state of each and log it to its
    run. A write that cannot be read is logged and tried again later, for a day after its last send. A periodic job of
    workers; `contexts`: the work contexts of the flows, by name."""
    async with pool.connection() as connection:
        rows = await fetch_rows(connection, DUE, {"flows": list(flows), "most": AT_ONCE})
        due = [(Item._make(row[:-4]), *row[-4:]) for row in rows]
    if not due:
        return

    async def settled(item: Item, *effect: Any) -> None:
        ended = await _read_back(flows[item.flow], contexts[item.flow], item, *effect)
        async with pool.connection() as connection, connection.transaction():
            await store_effects(connection, [ended], replica)
            message = f"a write of {item.event_id} was in doubt: {ended.state}"
            await run_log.write(connection, item.run_id, message, level="warning", event_id=item.event_id)

    results = await asyncio.gather(*(settled(*one) for one in due), return_exceptions=True)
    for (item, *_), error in zip(due, results, strict=True):
        if error is not None:
            log.warning("effects: read-back failed, will retry", **item.log_fields, error=repr(error))


async def _read_back(
    flow: Flow, context: WorkContext, item: Item, name: UUID, sends: int, wanted: Any, before: Any
) -> EffectEnd:
    """Read the state at the vendor and return the end of the effect with the id `name` that follows from it. `before`:
    the state before the write; `wanted`: the state that the write was to set. Raise TypeError if the stage no longer
    has a write that can be read back."""
    stage = flow.stage(item.stage)
    if not isinstance(stage.work, ReadableWrite):
        raise TypeError(f"{item.flow}/{item.stage} is no write that can be read back any more")
    async with asyncio.timeout(stage.time_limit.total_seconds()):
        await context.permit(item)
        found = as_stored_json((await stage.work.read_all(context, [item])).get(item.key))
    return EffectEnd(name, sends, conclude(found, wanted, before))
