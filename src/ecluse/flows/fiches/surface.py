"""Fiches in the API, the command line and the pages: the list, and one fiche in full. A fiche of another tenant is not
found; a caller of a narrow scope sees only the fiches of that scope."""

from __future__ import annotations

import re
from datetime import date, datetime
from typing import Annotated, Any

from fastapi import Query
from pydantic import AfterValidator, BeforeValidator, Field

from ecluse.access.commands import Command
from ecluse.access.listing import Filters, Listing, Where
from ecluse.access.surface import Look, Surface
from ecluse.access.wire import Filter, Shape
from ecluse.base.text import LONGEST_FOREIGN_ID, storable
from ecluse.db.query import Row
from ecluse.flows.fiches import queries
from ecluse.flows.fiches.cache import Details
from ecluse.flows.fiches.scopes import FicheInPath, visible

surface = Surface("fiches")


class FicheRow(Shape):
    fiche_cache_id: str = Field(examples=["12"])
    tenant_id: str = Field(examples=["default"])
    fiche_id: str = Field(examples=["171234"], description="The id of the fiche in the CRM.")
    groupe: str | None = Field(
        examples=["Lyon"], description="From the details; before those are fetched, from the sales list."
    )
    sales_date: date | None = Field(examples=["2026-03-02"])
    details: Details = Field(
        examples=["ready"], description="`ready`: known in full. `not_found`: gone in the CRM, for good."
    )
    recordings_count: int | None = Field(
        examples=[3], description="Number of recordings in the CRM; null: not fetched yet."
    )
    has_recordings: bool | None = Field(examples=[True])
    total_recordings: int = Field(examples=[3], description="Stored recordings, without those removed in the CRM.")
    transcribed: int = Field(examples=[2], description="The number of these that have a transcript.")
    last_revalidated_at: datetime | None = Field(description="When a sales list last contained it.")
    fetched_at: datetime | None = Field(description="When its details were last fetched from the CRM.")
    created_at: datetime
    updated_at: datetime


class RecordingRow(Shape):
    id: str = Field(examples=["77"])
    call_id: str = Field(examples=["call-1"])
    recording_url: str = Field(
        examples=["https://calls.example/1.mp3?X-Amz-Signature=***"], description="The signature in it is hidden."
    )
    url_missing: bool = Field(examples=[False], description="The CRM has no URL for it: it cannot be transcribed.")
    start_time: datetime | None
    duration_s: float | None = Field(examples=[61.5])
    has_transcription: bool
    transcribed_at: datetime | None
    removed_at: datetime | None = Field(
        description="Removed in the CRM since then: not counted, its transcript is kept."
    )


class FicheInFull(FicheRow):
    details_message: str | None = Field(examples=[""])
    attribution_user_id: str | None = Field(examples=["42"])
    information: dict[str, Any] | None = Field(
        examples=[{"groupe": "Lyon", "attribution_user_id": 42}],
        description="The CRM's information about it; null while the details are missing.",
    )
    recordings: list[RecordingRow] = Field(description="The recordings by start time, those without one last.")


def _plain_day(value: Any) -> Any:
    if isinstance(value, str) and not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", value):
        raise ValueError("must be a day as YYYY-MM-DD")  # otherwise pydantic takes a number as seconds
    return value


Day = Annotated[date | None, Query(examples=["2026-03-02"]), BeforeValidator(_plain_day)]
Beginning = Annotated[
    str | None,
    Query(min_length=1, max_length=LONGEST_FOREIGN_ID, description="The id begins with this."),
    AfterValidator(lambda text: text and storable(text)),
]


class FicheFilters(Filters):
    """Filters of the list of fiches. A fiche whose `has_recordings` is unknown matches neither true nor false."""

    groupe: Filter = None
    sales_from: Annotated[Day, Where("t.sales_date >= %(sales_from)s")] = None
    sales_to: Annotated[Day, Where("t.sales_date <= %(sales_to)s")] = None
    details: Details | None = None
    has_recordings: bool | None = None
    q: Annotated[Beginning, Where("starts_with(t.fiche_id, %(q)s)")] = None


FICHES = Listing(
    "fiches",
    FicheRow,
    "fiche_states",
    "fiches.read",
    filters=FicheFilters,
    order=("-sales_date", "-fiche_cache_id"),
    visible=lambda caller: visible(caller, "t"),
)

surface.listing(
    "/api/fiches",
    FICHES,
    list_fiches="List fiches, the latest sales first, each with the number of its transcribed recordings.",
    command=Command(
        "fiches list",
        columns=("fiche_id", "sales_date", "details", "transcribed", "total_recordings", "groupe"),
        empty="no fiches yet: a run that reads the CRM adds them",
    ),
)


@surface.read(
    "/api/fiches/{fiche_id:text}",
    needs="fiches.read",
    narrowed=True,
    answer=FicheInFull,
    refuses=("SCOPE",),
    command=Command("fiches show"),
)
async def show_fiche(look: Look, fiche_id: FicheInPath) -> Row:
    """Show one fiche in full: the CRM's information about it, and its recordings by start time."""
    return await queries.show_fiche(look.connection, look.tenant, fiche_id)
