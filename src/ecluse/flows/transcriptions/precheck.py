"""The check before a paid call: whether the recording still exists, is still untranscribed, and its lock is held by
this run. Items that are checked at about the same moment share one query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ecluse.db.connect import Connection
from ecluse.db.query import fetch_rows
from ecluse.engine import BatchedQuery, Item, hold_for_runs, lock_open
from ecluse.flows.transcriptions import rules

LOOK = """
SELECT k.item_id, r.id IS NOT NULL, coalesce(r.has_transcription, false), coalesce(r.recording_url, ''), l.run_id,
       r.duration_s
FROM unnest(%s::bigint[], %s::bigint[], %s::text[], %s::text[], %s::text[])
    AS k(item_id, fiche_cache_id, call_id, tenant_id, key)
LEFT JOIN recordings r ON r.fiche_cache_id = k.fiche_cache_id AND r.call_id = k.call_id AND r.removed_at IS NULL
LEFT JOIN leases l ON l.tenant_id = k.tenant_id AND l.key = k.key AND l.ended_at IS NULL
"""


class CheckedRecording(NamedTuple):
    """The state of an item's recording just before the call to the provider."""

    exists: bool
    transcribed: bool
    url: str  # from the latest fetch: an older signed URL may have expired
    holder: int | None  # the run that holds its lock; None: the item's own run has ended, or a process holds it
    seconds: float | None = None  # its length, as the CRM says


class Looks(BatchedQuery[CheckedRecording]):
    """Batches the checks of items that start at about the same moment (`look`)."""

    def __init__(self) -> None:
        super().__init__(look)


async def look(connection: Connection, items: Sequence[Item]) -> dict[int, CheckedRecording]:
    """Return the state of each item's recording, by item id. A lock without a holder (an operator released it, or a
    call that outlived its run has finished) is acquired for the item's run; the recording is read again after that, to
    see the result that the last holder stored."""
    found = await _look(connection, items)
    free = [item for item in items if found[item.id].holder is None]
    if free:
        async with connection.transaction():
            # The end of these runs waits for this transaction; a run that has already ended gets no lease.
            open_runs = await lock_open(connection, {item.run_id for item in free})
            locks = [(item.run_id, item.tenant_id, _lock(item)) for item in free if item.run_id in open_runs]
            held = await hold_for_runs(connection, locks)
        again = await _look(connection, free)
        for item in free:
            found[item.id] = again[item.id]._replace(holder=held.get((item.tenant_id, _lock(item))))
    return found


async def _look(connection: Connection, items: Sequence[Item]) -> dict[int, CheckedRecording]:
    """Return the state of each item's recording and the run that holds its lock, by item id."""
    rows = await fetch_rows(connection, LOOK, [list(column) for column in zip(*map(_row, items), strict=True)])
    return {item: CheckedRecording(*state) for item, *state in rows}


def _lock(item: Item) -> str:
    """Return the key of the lease on the item's recording."""
    return rules.recording_lock(item.payload["fiche_id"], item.key)


def _row(item: Item) -> tuple[Any, ...]:
    return item.id, int(item.payload["fiche_cache_id"]), item.key, item.tenant_id, _lock(item)
