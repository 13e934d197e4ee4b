"""What a batch of results changes in the tables of recordings, set-based. Nobody else writes these columns, and a
transcript that is there is never written over: a result that comes late, of a run that has ended, is as good as any."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from pydantic_core import to_json

from ecluse.db.connect import Connection
from ecluse.engine import Saved
from ecluse.flows.transcriptions import traces
from ecluse.flows.transcriptions.chunks import derive

# Locked in the order that everybody keeps who writes recordings.
STORE = """
WITH told AS MATERIALIZED (
    SELECT * FROM jsonb_to_recordset(%s::jsonb) AS t(fiche_cache_id bigint, call_id text, transcription_id text,
        text text, data jsonb, pieces boolean)),
mine AS MATERIALIZED (
    SELECT r.id, r.call_id, r.fiche_cache_id, r.has_transcription FROM recordings r
    JOIN told t ON t.fiche_cache_id = r.fiche_cache_id AND t.call_id = r.call_id
    ORDER BY r.fiche_cache_id, r.call_id FOR NO KEY UPDATE OF r),
cleared AS (
    DELETE FROM recording_transcription_chunks c USING mine m JOIN told t USING (fiche_cache_id, call_id)
    WHERE c.recording_id = m.id AND t.pieces AND NOT m.has_transcription)
UPDATE recordings r SET has_transcription = true, transcription_id = t.transcription_id, transcription_text = t.text,
    transcription_data = t.data, transcribed_at = now, updated_at = now
FROM (SELECT ecluse_now() AS now) clock, mine m JOIN told t USING (fiche_cache_id, call_id)
WHERE r.id = m.id AND NOT r.has_transcription
RETURNING r.id, r.fiche_cache_id, r.call_id
"""

STORE_CHUNKS = """
INSERT INTO recording_transcription_chunks (recording_id, position, speaker, start_s, end_s, text)
SELECT * FROM jsonb_to_recordset(%s::jsonb) AS t(recording_id bigint, position integer, speaker text,
    start_s double precision, end_s double precision, text text)
"""

REMEMBER = """
INSERT INTO speech_results (tenant_id, key, call_id, model, transcription_id, text, chunks, created_at)
SELECT tenant_id, decode(key, 'hex'), call_id, model, transcription_id, text, chunks, ecluse_now()
FROM jsonb_to_recordset(%s::jsonb) AS t(tenant_id text, key text, call_id text, model text, transcription_id text,
    text text, chunks jsonb) ORDER BY tenant_id, key
ON CONFLICT DO NOTHING
"""

RECALL = """
SELECT s.tenant_id, encode(s.key, 'hex'), s.transcription_id, s.text, s.chunks
FROM unnest(%s::text[], %s::text[]) AS k(tenant_id, key)
JOIN speech_results s ON s.tenant_id = k.tenant_id AND s.key = decode(k.key, 'hex')
"""


async def save_recordings(connection: Connection, saved: Sequence[Saved]) -> None:
    fresh = [one for one in saved if one.kept is not None]
    if not fresh:
        return
    began = time.monotonic()
    rows = [{**_named(one), **one.kept} for one in fresh]
    await connection.execute(REMEMBER, (_json(rows),))
    await _store(connection, rows)
    for one in fresh:
        traces.worker(one.item).done("update-recording-transcription", time.monotonic() - began, together=len(fresh))


async def save_known(connection: Connection, saved: Sequence[Saved]) -> None:
    """What was paid for before, put in its place."""
    keys = [(one.item.tenant_id, one.item.payload["paid"]) for one in saved]
    cursor = await connection.execute(RECALL, [list(column) for column in zip(*keys, strict=True)])
    paid = {(tenant, key): rest for tenant, key, *rest in await cursor.fetchall()}
    rows = []
    for one, key in zip(saved, keys, strict=True):
        if key in paid:
            transcription_id, text, chunks = paid[key]
            told = {"transcription_id": transcription_id, "text": text, "data": None}
            chunks = [chunk._asdict() for chunk in derive(text, ()) or ()] if chunks is None else chunks
            rows.append({**_named(one), **told, "chunks": chunks})
    await _store(connection, rows)


async def _store(connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
    told = [{**row, "pieces": row["chunks"] is not None, "chunks": None} for row in rows]
    cursor = await connection.execute(STORE, (_json(told),))
    ids = {(fiche, call): recording for recording, fiche, call in await cursor.fetchall()}
    new = [(ids[key], row) for row in rows if (key := (int(row["fiche_cache_id"]), row["call_id"])) in ids]
    pieces = [{"recording_id": recording, **chunk} for recording, row in new for chunk in row["chunks"] or ()]
    if pieces:
        await connection.execute(STORE_CHUNKS, (_json(pieces),))


def _named(one: Saved) -> dict[str, Any]:
    payload = one.item.payload
    return {
        "tenant_id": one.item.tenant_id,
        "fiche_cache_id": payload["fiche_cache_id"],
        "call_id": one.item.key,
    }


def _json(rows: Sequence[Any]) -> str:
    return to_json(rows).decode()
