"""The query for one fiche in full. Signed parts of URLs are hidden, and so are values in the CRM's own fields that look
like secrets."""

from __future__ import annotations

from ecluse.base.errors import NotFound
from ecluse.base.masking import masked, masked_value
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_all, fetch_one
from ecluse.flows.fiches.cache import URL_MISSING

SHOW = "SELECT * FROM fiche_states WHERE tenant_id = %s AND fiche_id = %s"
RECORDINGS = f"""
SELECT r.id::text, r.call_id, r.recording_url, {URL_MISSING} AS url_missing, r.start_time, r.duration_s,
       r.has_transcription, r.transcribed_at, r.removed_at
FROM recordings r WHERE r.fiche_cache_id = %s ORDER BY r.start_time NULLS LAST, r.call_id
"""  # noqa: S608 - made of our own words


async def show_fiche(connection: Connection, tenant: str, fiche_id: str) -> Row:
    """Return the fiche with its information and its recordings by start time, including those removed in the CRM;
    signatures and secrets are hidden. Raise NotFound if the tenant has no such fiche in its cache."""
    fiche = await fetch_one(connection, dict, SHOW, (tenant, fiche_id))
    if fiche is None:
        raise NotFound(f"Fiche {fiche_id} is not in the cache: it has not been fetched from the CRM.")
    recordings = await fetch_all(connection, dict, RECORDINGS, (fiche["fiche_cache_id"],))
    for recording in recordings:
        recording["recording_url"] = masked(recording["recording_url"])
    told = {name: masked_value(fiche[name]) for name in ("details_message", "information")}
    return {**fiche, **told, "recordings": recordings}
