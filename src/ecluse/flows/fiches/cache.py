"""State of a fiche, derived from its rows: whether its details are complete, whether it is gone from the CRM for good,
how many recordings it has. The rules are SQL expressions: `f` is `fiche_cache` and `i` its `fiche_cache_information`,
LEFT JOINed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, datetime
from typing import Any, Literal, NamedTuple

from ecluse.db.connect import Connection
from ecluse.db.query import as_json, fetch_all
from ecluse.retention.kinds import Aged

# A fiche stays while a stored run accounts for its transcripts or audits, and while an open automation run has it as a
# target: that run may continue with the cached details if the fiche cannot be fetched again. Ordered by id: with an
# index on `updated_at`, no fetch would be a HOT update.
KEPT = Aged(
    "fiches",
    "fiche_cache",
    "t.updated_at",
    began="t.created_at",
    also="""NOT EXISTS (SELECT 1 FROM transcription_runs r WHERE r.tenant_id = t.tenant_id AND r.fiche_id = t.fiche_id)
        AND NOT EXISTS (SELECT 1 FROM audits a JOIN runs r ON r.id = a.run_id
                        WHERE a.tenant_id = t.tenant_id AND a.fiche_id = t.fiche_id)
        AND NOT EXISTS (SELECT 1 FROM runs r JOIN outcomes o ON o.run_id = r.id AND o.target = t.fiche_id
                        WHERE r.tenant_id = t.tenant_id AND r.flow = 'automation' AND r.ended_at IS NULL)""",
)

Details = Literal["ready", "not_found", "missing"]
GONE = "NOT_FOUND"

FROM = "fiche_cache f LEFT JOIN fiche_cache_information i ON i.fiche_cache_id = f.id"
# Older versions stored the CRM's details in `raw_data`; a row of the sales list has no `information` object.
LEGACY = "coalesce(jsonb_typeof(f.raw_data -> 'information') = 'object', false)"
FULL = f"(i.fiche_cache_id IS NOT NULL OR {LEGACY})"
NOT_FOUND = f"coalesce(NOT f.details_success AND strpos(upper(f.details_message), '{GONE}') > 0, false)"
# `not_found` wins over stored details: those are kept, but no longer valid.
DETAILS = f"CASE WHEN {NOT_FOUND} THEN 'not_found' WHEN {FULL} THEN 'ready' ELSE 'missing' END"
# The sales list may lack the group or be outdated: once there are details, their value counts, even if it is empty.
GROUPE = f"""CASE WHEN i.fiche_cache_id IS NOT NULL THEN i.groupe
    WHEN {LEGACY} THEN f.raw_data -> 'information' ->> 'groupe' ELSE f.groupe END"""
ATTRIBUTION = f"""CASE WHEN i.fiche_cache_id IS NOT NULL THEN i.attribution_user_id
    WHEN {LEGACY} THEN f.raw_data -> 'information' ->> 'attribution_user_id' END"""
RECORDINGS_COUNT = """coalesce(f.recordings_count, CASE jsonb_typeof(f.raw_data -> 'recordings') WHEN 'array'
    THEN jsonb_array_length(f.raw_data -> 'recordings') END)"""
HAS_RECORDINGS = f"coalesce(f.has_recordings, {RECORDINGS_COUNT} > 0)"
# For LATERAL beside `f`. Recordings removed in the CRM are not counted.
COUNTED = """(SELECT count(*)::int AS total_recordings, count(*) FILTER (WHERE r.has_transcription)::int AS transcribed
    FROM recordings r WHERE r.fiche_cache_id = f.id AND r.removed_at IS NULL)"""
# Like `str.strip`, for the blanks that a CRM is likely to send; a fetch stores URLs stripped.
URL_MISSING = "btrim(r.recording_url, E' \\t\\r\\n') = ''"

STATES = f"""
SELECT f.fiche_id, f.id AS fiche_cache_id, {DETAILS} AS details, {GROUPE} AS groupe,
       {RECORDINGS_COUNT} AS recordings_count, {HAS_RECORDINGS} AS has_recordings, f.fetched_at, f.sales_date,
       c.total_recordings, c.transcribed
FROM {FROM}, LATERAL {COUNTED} c WHERE f.tenant_id = %s AND f.fiche_id = ANY(%s)
"""  # noqa: S608 - made of our own words

# A fiche whose details are only in `raw_data` keeps them: a row of the sales list has less.
CACHE_SALES = f"""
INSERT INTO fiche_cache AS f (tenant_id, fiche_id, groupe, sales_date, last_revalidated_at, raw_data, created_at,
                              updated_at)
SELECT %(tenant)s, id, groupe, day, %(now)s, data, ecluse_now(), ecluse_now()
FROM jsonb_to_recordset(%(rows)s::jsonb) AS t(id text, day date, groupe text, data jsonb) ORDER BY id
ON CONFLICT ON CONSTRAINT fiche_cache_fiche DO UPDATE SET groupe = coalesce(excluded.groupe, f.groupe),
    sales_date = excluded.sales_date, last_revalidated_at = excluded.last_revalidated_at,
    raw_data = CASE WHEN {LEGACY} THEN f.raw_data ELSE excluded.raw_data END, updated_at = excluded.updated_at
"""  # noqa: S608 - made of our own words


class FicheState(NamedTuple):
    """State of one fiche for gates and filters. `recordings_count` and `has_recordings` are what the CRM sent, None if
    the fiche was not fetched yet; `total_recordings` and `transcribed` count the rows."""

    fiche_id: str
    fiche_cache_id: int
    details: Details
    groupe: str | None
    recordings_count: int | None
    has_recordings: bool | None
    fetched_at: datetime | None
    sales_date: date | None
    total_recordings: int
    transcribed: int

    @property
    def ready(self) -> bool:
        """True unless the fiche's details are missing: they were fetched, or the CRM does not know the fiche."""
        return self.details != "missing"


async def states(connection: Connection, tenant: str, fiche_ids: Sequence[str]) -> dict[str, FicheState]:
    """Return the state by fiche id; fiches that are not in the cache are missing from the result."""
    found = await fetch_all(connection, FicheState, STATES, (tenant, list(fiche_ids)))
    return {state.fiche_id: state for state in found}


async def cache_sales(
    connection: Connection, tenant: str, lists: Mapping[date, Sequence[Mapping[str, Any]]], now: datetime
) -> None:
    """Store sales lists by day (`SalesFiche`s of the CRM as JSON). A row without a group keeps the stored group; for a
    fiche that was sold twice, the later day counts."""
    once = {row["id"]: {**row, "day": day} for day, rows in sorted(lists.items()) for row in rows}
    given = {"tenant": tenant, "now": now, "rows": as_json(list(once.values()))}
    await connection.execute(CACHE_SALES, given)
