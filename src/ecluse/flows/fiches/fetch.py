"""Fetch of a fiche in full with one CRM request, and storing of a batch of answers with a few statements.

A fetch never writes the transcription columns: those belong to the transcriptions flow. A recording that the CRM no
longer lists is marked as removed, and unmarked when the CRM lists it again.

Lock order: fiches by (tenant_id, fiche_id), then their recordings by (fiche_cache_id, call_id). Only the transaction
that holds the lock on a fiche's row adds or removes recordings of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ecluse.base.errors import PermanentError
from ecluse.db.connect import Connection
from ecluse.db.query import Row, as_json, fetch_rows
from ecluse.flows.fiches.cache import GONE
from ecluse.vendors.crm import Crm

FACTS = ("groupe", "attribution_user_id", "information")

# A fiche that is gone keeps its stored data; only `details_success` and `details_message` mark it as gone.
SAVE_FICHES = """
INSERT INTO fiche_cache AS f (tenant_id, fiche_id, details_success, details_message, recordings_count, has_recordings,
                              fetched_at, created_at, updated_at)
SELECT tenant_id, fiche_id, success, message, recordings, recordings > 0, now, now, now
FROM jsonb_to_recordset(%s::jsonb)
    AS t(tenant_id text, fiche_id text, success boolean, message text, recordings integer),
    (SELECT ecluse_now() AS now) clock
ORDER BY tenant_id, fiche_id
ON CONFLICT ON CONSTRAINT fiche_cache_fiche DO UPDATE SET details_success = excluded.details_success,
    details_message = excluded.details_message,
    recordings_count = coalesce(excluded.recordings_count, f.recordings_count),
    has_recordings = coalesce(excluded.has_recordings, f.has_recordings),
    fetched_at = excluded.fetched_at, updated_at = excluded.updated_at
RETURNING f.tenant_id, f.fiche_id, f.id
"""

SAVE_INFORMATION = """
INSERT INTO fiche_cache_information (fiche_cache_id, groupe, attribution_user_id, data, updated_at)
SELECT fiche_cache_id, groupe, attribution_user_id, information, ecluse_now()
FROM jsonb_to_recordset(%s::jsonb)
    AS t(fiche_cache_id bigint, groupe text, attribution_user_id text, information jsonb)
ORDER BY fiche_cache_id
ON CONFLICT (fiche_cache_id) DO UPDATE SET groupe = excluded.groupe,
    attribution_user_id = excluded.attribution_user_id, data = excluded.data, updated_at = excluded.updated_at
"""

LOCK_RECORDINGS = """
SELECT 1 FROM recordings WHERE fiche_cache_id = ANY(%s) ORDER BY fiche_cache_id, call_id FOR NO KEY UPDATE
"""

# UPDATE and INSERT never touch the same row. Unchanged rows are not written.
SAVE_RECORDINGS = """
WITH clock AS MATERIALIZED (SELECT ecluse_now() AS now),
listed AS MATERIALIZED (
    SELECT * FROM jsonb_to_recordset(%(rows)s::jsonb) AS t(fiche_cache_id bigint, call_id text, recording_url text,
        start_time timestamptz, duration_s double precision)),
removed AS (
    UPDATE recordings r SET removed_at = now, updated_at = now FROM clock
    WHERE r.fiche_cache_id = ANY(%(fiches)s) AND r.removed_at IS NULL AND NOT EXISTS (
        SELECT 1 FROM listed t WHERE t.fiche_cache_id = r.fiche_cache_id AND t.call_id = r.call_id))
INSERT INTO recordings AS r (fiche_cache_id, call_id, recording_url, start_time, duration_s, created_at, updated_at)
SELECT fiche_cache_id, call_id, recording_url, start_time, duration_s, now, now FROM listed, clock
ORDER BY fiche_cache_id, call_id
ON CONFLICT ON CONSTRAINT recordings_call DO UPDATE SET recording_url = excluded.recording_url,
    start_time = excluded.start_time, duration_s = excluded.duration_s, removed_at = NULL,
    updated_at = excluded.updated_at
WHERE r.removed_at IS NOT NULL OR (r.recording_url, r.start_time, r.duration_s)
    IS DISTINCT FROM (excluded.recording_url, excluded.start_time, excluded.duration_s)
"""


class Fetched(NamedTuple):
    """A fetched fiche to be stored, from the answer of `fetch_fiche`. `details` None: the CRM does not know it."""

    tenant_id: str
    fiche_id: str
    details: Mapping[str, Any] | None


async def fetch_fiche(crm: Crm, fiche_id: str) -> Row:
    """Fetch a fiche from the CRM, even if it is cached. Return `{"found": True, "details": {…}}`, or `{"found": False}`
    for a fiche that is gone, which is an answer, not a failure. Raise the CRM's error for any other failure."""
    try:
        details = await crm.fiche(fiche_id)
    except PermanentError as error:
        if error.code != GONE:
            raise
        return {"found": False}
    return {"found": True, "details": details.model_dump(mode="json")}


async def save_details(connection: Connection, fetched: Sequence[Fetched]) -> dict[tuple[str, str], int]:
    """Store the fetched fiches in the caller's transaction; of two answers for one fiche, the later counts. Return the
    `fiche_cache` ids by (tenant, fiche id)."""
    latest = {(one.tenant_id, one.fiche_id): one.details for one in fetched}
    if not latest:
        return {}
    found = {key: details for key, details in latest.items() if details is not None}
    calls = {key: {one["call_id"]: one for one in details["recordings"]} for key, details in found.items()}
    known = {
        key: {"success": True, "message": details["message"], "recordings": len(calls[key])}
        for key, details in found.items()
    }
    gone = {"success": False, "message": GONE}
    rows = [{"tenant_id": key[0], "fiche_id": key[1], **known.get(key, gone)} for key in latest]
    saved = await fetch_rows(connection, SAVE_FICHES, (as_json(rows),))
    ids = {(tenant, fiche_id): number for tenant, fiche_id, number in saved}
    if found:
        facts = [
            {"fiche_cache_id": ids[key]} | {name: details[name] for name in FACTS} for key, details in found.items()
        ]
        await connection.execute(SAVE_INFORMATION, (as_json(facts),))
        numbers = [ids[key] for key in found]
        recordings = [{"fiche_cache_id": ids[key], **one} for key, several in calls.items() for one in several.values()]
        await connection.execute(LOCK_RECORDINGS, (numbers,))
        await connection.execute(SAVE_RECORDINGS, {"rows": as_json(recordings), "fiches": numbers})
    return ids
