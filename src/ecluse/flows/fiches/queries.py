"""Read side of fiches, for API and command line. Signed parts of URLs are hidden, and so are values in the CRM's own
fields that look like secrets."""

from __future__ import annotations

from datetime import date
from typing import NamedTuple

from ecluse.base.errors import NotFound
from ecluse.base.masking import masked, plain
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_all, fetch_one, where
from ecluse.flows.fiches import cache
from ecluse.flows.fiches.cache import Details

COLUMNS = f"""f.id, f.tenant_id, f.fiche_id, {cache.GROUPE} AS groupe, f.sales_date, {cache.DETAILS} AS details,
    {cache.RECORDINGS_COUNT} AS recordings_count, {cache.HAS_RECORDINGS} AS has_recordings, f.last_revalidated_at,
    f.fetched_at, f.created_at, f.updated_at"""
SHOWN = """f.id AS fiche_cache_id, f.tenant_id, f.fiche_id, f.groupe, f.sales_date, f.details, f.recordings_count,
    f.has_recordings, c.total_recordings, c.transcribed, f.last_revalidated_at, f.fetched_at, f.created_at,
    f.updated_at"""

# Select the page first, so that recordings are counted for the fiches of this page only.
LIST = f"""
SELECT {SHOWN} FROM (
    SELECT {COLUMNS} FROM {cache.FROM} WHERE {{where}}
    ORDER BY f.sales_date DESC NULLS LAST, f.id DESC LIMIT %(limit)s OFFSET %(offset)s) f, LATERAL {cache.COUNTED} c
ORDER BY f.sales_date DESC NULLS LAST, f.id DESC
"""  # noqa: S608 - made of our own words

SHOW = f"""
SELECT {SHOWN}, f.details_message, f.attribution_user_id, f.information FROM (
    SELECT {COLUMNS}, f.details_message, {cache.ATTRIBUTION} AS attribution_user_id,
           coalesce(i.data, CASE WHEN {cache.LEGACY} THEN f.raw_data -> 'information' END) AS information
    FROM {cache.FROM} WHERE f.tenant_id = %(tenant)s AND f.fiche_id = %(fiche)s) f, LATERAL {cache.COUNTED} c
"""  # noqa: S608 - made of our own words

RECORDINGS = f"""
SELECT r.id, r.call_id, r.recording_url, {cache.URL_MISSING} AS url_missing, r.start_time, r.duration_s,
       r.has_transcription, r.transcribed_at, r.removed_at
FROM recordings r WHERE r.fiche_cache_id = %s ORDER BY r.start_time NULLS LAST, r.call_id
"""  # noqa: S608 - made of our own words

FILTERS = {
    "tenant": "f.tenant_id = %(tenant)s",
    "groupe": f"({cache.GROUPE}) = %(groupe)s",
    "sales_from": "f.sales_date >= %(sales_from)s",
    "sales_to": "f.sales_date <= %(sales_to)s",
    "details": f"{cache.DETAILS} = %(details)s",
    "has_recordings": f"{cache.HAS_RECORDINGS} = %(has_recordings)s",
    "q": "starts_with(f.fiche_id, %(q)s)",
}


class Wanted(NamedTuple):
    """Filters on fiches; None does not filter. A fiche whose `has_recordings` is unknown matches neither true nor
    false."""

    groupe: str | None = None
    sales_from: date | None = None
    sales_to: date | None = None
    details: Details | None = None
    has_recordings: bool | None = None
    q: str | None = None


class Visible(NamedTuple):
    """An SQL condition on `f` and `i` (see `cache.FROM`) and its parameters, whose names begin with `scope_`. It does
    not include the tenant."""

    condition: str
    parameters: Row


EVERYTHING = Visible("true", {})


async def list_fiches(
    connection: Connection,
    tenant: str | None,
    wanted: Wanted,
    *,
    visible: Visible = EVERYTHING,
    limit: int,
    offset: int,
) -> list[Row]:
    """Return fiches, the latest sales first. `tenant` None means all tenants; only the command line may pass it."""
    given = {"tenant": tenant, **wanted._asdict()}
    parameters = {**given, **visible.parameters, "limit": limit, "offset": offset}
    shown = where(FILTERS, given, visible.condition)
    return await fetch_all(connection, dict, LIST.format(where=shown), parameters)


async def show_fiche(connection: Connection, tenant: str, fiche_id: str) -> Row:
    """Return the fiche with its information and its recordings by start time, including those removed in the CRM."""
    fiche = await fetch_one(connection, dict, SHOW, {"tenant": tenant, "fiche": fiche_id})
    if fiche is None:
        raise NotFound(f"there is no fiche {fiche_id}")
    recordings = await fetch_all(connection, dict, RECORDINGS, (fiche["fiche_cache_id"],))
    for recording in recordings:
        recording["recording_url"] = masked(recording["recording_url"])
    told = {"details_message": plain(fiche["details_message"]), "information": plain(fiche["information"])}
    return {**fiche, **told, "recordings": recordings}
