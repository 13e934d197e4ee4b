"""Scenes for automation runs: days as CRM and cache know them, lanes that are held up, what a run wrote down."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime
from typing import Any
from urllib.request import Request, urlopen

from ecluse.engine import pause_lane, resume_lane
from ecluse.flows.fiches.cache import cache_sales
from tests.support.automation_world import World

MONDAY = date(2026, 3, 2)
ONLY_DETAILS = {"run_transcription": False, "run_audits": False}
NO_AUDITS = {"run_audits": False}
LONG_AGO = datetime(2026, 3, 1, tzinfo=UTC)


def over(first: date = MONDAY, last: date | None = None, **more: Any) -> dict[str, Any]:
    """A selection of these days."""
    days = {"start_date": first.isoformat(), "end_date": (last or first).isoformat()}
    return {"mode": "date_range", "date_range": "custom", **days, **more}


def at_the_crm(day: date) -> str:
    """What the sandbox knows a day's list by."""
    return f"{day:%d/%m/%Y}"


def sold(world: World, day: date) -> list[str]:
    """The fiches in the CRM's list."""
    request = Request(  # noqa: S310 - our own sandbox
        f"{world.sandbox.url}/crm/sales?date={at_the_crm(day)}", headers={"Authorization": "Bearer a test"}
    )
    with urlopen(request, timeout=30) as answer:  # noqa: S310
        return [fiche["id"] for fiche in json.load(answer)["fiches"] if "id" in fiche]


async def known(world: World, day: date, tenant: str = "default", **groupes: str | None) -> None:
    """Fiches that the cache has of a day, called f1000 and so on, with their groupes."""
    rows = [{"id": name[1:], "groupe": groupe, "data": {"id": name[1:]}} for name, groupe in groupes.items()]
    async with world.kit.pool.connection() as connection:
        await cache_sales(connection, tenant, {day: rows}, LONG_AGO)


def out_of_order(*days: date, kind: str = "server_error") -> list[dict[str, Any]]:
    """Faults: these lists cannot be had."""
    return [{"kind": kind, "vendor": "crm", "ids": [at_the_crm(day) for day in days]}]


@asynccontextmanager
async def held_up(world: World, lane: str) -> AsyncIterator[None]:
    """Nothing starts there before the end of this."""
    async with world.kit.pool.connection() as connection:
        await pause_lane(connection, lane, reason="a test", by="test")
    yield
    async with world.kit.pool.connection() as connection:
        await resume_lane(connection, lane, reason="a test", by="test")


def log_rows(world: World, run_id: int, message: str) -> list[tuple[str, Any]]:
    """Level and metadata of each line that says so."""
    rows = world.query(
        "SELECT level, metadata FROM automation_logs WHERE run_id = %s AND message = %s ORDER BY id", run_id, message
    )
    return [(level, metadata) for level, metadata in rows]


def asked(world: World, vendor: str, kind: str = "call") -> list[str]:
    """What a vendor was asked for, or paid for, in order."""
    return [entry["ref"] for entry in world.sandbox.ledger(vendor=vendor, kind=kind)]
