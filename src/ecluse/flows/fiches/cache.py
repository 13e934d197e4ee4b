"""The cached state of fiches: whether the details of a fiche are complete, whether it is gone from the CRM for good,
and its number of recordings (the view `fiche_states` derives this from the rows). Also the cache of sales lists."""

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

# Like `str.strip`, for the blanks that a CRM is likely to send; a fetch stores URLs stripped.
URL_MISSING = "btrim(r.recording_url, E' \\t\\r\\n') = ''"

STATES = """
SELECT fiche_id, fiche_cache_id, details, groupe, recordings_count, has_recordings, fetched_at, sales_date,
       total_recordings, transcribed
FROM fiche_states WHERE tenant_id = %s AND fiche_id = ANY(%s)
"""

# A fiche whose details are only in `raw_data` keeps them: a row of the sales list has less.
CACHE_SALES = """
INSERT INTO fiche_cache AS f (tenant_id, fiche_id, groupe, sales_date, last_revalidated_at, raw_data, created_at,
                              updated_at)
SELECT %(tenant)s, id, groupe, day, %(now)s, data, ecluse_now(), ecluse_now()
FROM jsonb_to_recordset(%(rows)s::jsonb) AS t(id text, day date, groupe text, data jsonb) ORDER BY id
ON CONFLICT ON CONSTRAINT fiche_cache_fiche DO UPDATE SET groupe = coalesce(excluded.groupe, f.groupe),
    sales_date = excluded.sales_date, last_revalidated_at = excluded.last_revalidated_at,
    raw_data = CASE WHEN jsonb_typeof(f.raw_data -> 'information') = 'object' THEN f.raw_data
        ELSE excluded.raw_data END, updated_at = excluded.updated_at
"""


class FicheState(NamedTuple):
    """State of one fiche for gates and filters. `recordings_count` and `has_recordings` are the CRM's figures, None if
    the fiche was not fetched yet; `total_recordings` and `transcribed` count the stored rows."""

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
    """Store sales lists by day (`SalesFiche`s of the CRM as JSON). A row without a groupe keeps the stored groupe; for
    a fiche that was sold twice, the later day counts. `now`: when the lists were read."""
    once = {row["id"]: {**row, "day": day} for day, rows in sorted(lists.items()) for row in rows}
    given = {"tenant": tenant, "now": now, "rows": as_json(list(once.values()))}
    await connection.execute(CACHE_SALES, given)
