"""Fiches for tests: what the CRM says of one, and how it gets into the cache."""

from __future__ import annotations

from typing import Any

from ecluse.access.keys import Caller
from ecluse.flows.fiches.fetch import Fetched, save_details

Row = dict[str, Any]


def call(call_id: str, url: str = "https://calls.test/a.mp3", **more: Any) -> Row:
    return {"call_id": call_id, "recording_url": url, "start_time": None, "duration_s": None} | more


def details(*recordings: Row, groupe: str | None = "A", user: str | None = "7", **more: Any) -> Row:
    known = {"groupe": groupe, "attribution_user_id": user}
    return {**known, "message": "", "information": {**known, **more}, "recordings": list(recordings), "skipped": []}


def caller(
    scope: str = "ALL", tenant: str = "default", groupes: tuple[str, ...] = (), user: str | None = None
) -> Caller:
    return Caller(1, tenant, "operator", scope, groupes, user, False)


async def save(connection, *fetched: tuple[str, Row | None], tenant: str = "default") -> list[int]:
    """Fiche ids with their details, as one commit would store them; the cache ids in that order."""
    async with connection.transaction():
        ids = await save_details(connection, [Fetched(tenant, *one) for one in fetched])
    return [ids[tenant, fiche_id] for fiche_id, _ in fetched]
