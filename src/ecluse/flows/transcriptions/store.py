"""Storing of a batch of transcription results in the tables of recordings, set-based. No other module writes these
columns. A stored transcript is never overwritten; a late result, of a run that has already ended, is stored like any
other."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ecluse.db.connect import Connection
from ecluse.db.query import Row, as_json, fetch_rows
from ecluse.engine import Saved
from ecluse.flows.transcriptions import traces
from ecluse.flows.transcriptions.chunks import derive
from ecluse.retention.kinds import Aged

KEPT = Aged("paid results", "speech_results", "t.created_at", order="created_at", type="timestamptz")

# Recordings are locked by (fiche_cache_id, call_id), the order that every writer of recordings uses. A row with a `key`
# comes from a call that was just paid for.
STORE = """
WITH given AS MATERIALIZED (
    SELECT * FROM jsonb_to_recordset(%s::jsonb) AS t(tenant_id text, key text, model text, fiche_cache_id bigint,
        call_id text, transcription_id text, text text, data jsonb, chunks jsonb)),
clock AS MATERIALIZED (SELECT ecluse_now() AS now),
mine AS MATERIALIZED (
    SELECT r.id, r.call_id, r.fiche_cache_id, r.has_transcription FROM recordings r
    JOIN given t ON t.fiche_cache_id = r.fiche_cache_id AND t.call_id = r.call_id
    ORDER BY r.fiche_cache_id, r.call_id FOR NO KEY UPDATE OF r),
cleared AS (
    DELETE FROM recording_transcription_chunks c USING mine m JOIN given t USING (fiche_cache_id, call_id)
    WHERE c.recording_id = m.id AND t.chunks IS NOT NULL AND NOT m.has_transcription RETURNING 1),
stored AS (
    UPDATE recordings r SET has_transcription = true, transcription_id = t.transcription_id,
        transcription_text = t.text, transcription_data = t.data, transcribed_at = now, updated_at = now
    FROM clock, mine m JOIN given t USING (fiche_cache_id, call_id) WHERE r.id = m.id AND NOT r.has_transcription
    RETURNING r.id, t.chunks),
remembered AS (
    INSERT INTO speech_results (tenant_id, key, call_id, model, transcription_id, text, chunks, created_at)
    SELECT tenant_id, decode(key, 'hex'), call_id, model, transcription_id, text, chunks, now
    FROM given, clock WHERE key IS NOT NULL ORDER BY tenant_id, key
    ON CONFLICT DO NOTHING)
INSERT INTO recording_transcription_chunks (recording_id, position, speaker, start_s, end_s, text)
SELECT s.id, c.* FROM (SELECT count(*) FROM cleared) AS first, stored s, jsonb_to_recordset(s.chunks)
    AS c(position integer, speaker text, start_s double precision, end_s double precision, text text)
"""

RECALL = """
SELECT s.tenant_id, encode(s.key, 'hex'), s.transcription_id, s.text, s.chunks
FROM unnest(%s::text[], %s::text[]) AS k(tenant_id, key)
JOIN speech_results s ON s.tenant_id = k.tenant_id AND s.key = decode(k.key, 'hex')
"""


async def save_recordings(connection: Connection, saved: Sequence[Saved]) -> None:
    """Store the transcripts of finished calls; items that needed no call are skipped. Used as the `save` of the stage
    `recordings`."""
    fresh = [one for one in saved if one.kept is not None]
    if not fresh:
        return
    began = time.monotonic()
    await _store(connection, [{**_named(one), **one.kept} for one in fresh])
    for one in fresh:
        traces.worker(one.item).done("update-recording-transcription", time.monotonic() - began, together=len(fresh))


async def save_known(connection: Connection, saved: Sequence[Saved]) -> None:
    """Copy transcripts that were paid for earlier (`speech_results`) to their recordings. Used as the `save` of the
    stage `known`."""
    keys = [(one.item.tenant_id, one.item.payload["paid"]) for one in saved]
    rows = await fetch_rows(connection, RECALL, [list(column) for column in zip(*keys, strict=True)])
    paid = {(tenant, key): rest for tenant, key, *rest in rows}
    stored = []
    for one, key in zip(saved, keys, strict=True):
        if key in paid:
            transcription_id, text, chunks = paid[key]
            result = {"transcription_id": transcription_id, "text": text, "data": None}
            chunks = [chunk._asdict() for chunk in derive(text, ()) or ()] if chunks is None else chunks
            stored.append({**_named(one), **result, "chunks": chunks})
    await _store(connection, stored)


async def _store(connection: Connection, rows: Sequence[Row]) -> None:
    if rows:
        await connection.execute(STORE, (as_json(rows),), prepare=True)


def _named(one: Saved) -> Row:
    """Return the columns that identify the recording of an item."""
    item = one.item
    return {"tenant_id": item.tenant_id, "fiche_cache_id": item.payload["fiche_cache_id"], "call_id": item.key}
