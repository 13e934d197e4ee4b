"""Response models of the fiche routes, for the OpenAPI document."""

from __future__ import annotations

from datetime import date, datetime
from typing import Any

from pydantic import Field

from ecluse.access.wire import Page, Shape
from ecluse.flows.fiches.cache import Details


class FicheRow(Shape):
    fiche_cache_id: str = Field(examples=["12"])
    tenant_id: str = Field(examples=["default"])
    fiche_id: str = Field(examples=["171234"], description="As the CRM numbers it.")
    groupe: str | None = Field(examples=["Lyon"], description="As the details say; before those, the sales list.")
    sales_date: date | None = Field(examples=["2026-03-02"])
    details: Details = Field(
        examples=["ready"], description="`ready`: known in full. `not_found`: gone in the CRM, for good."
    )
    recordings_count: int | None = Field(examples=[3], description="As the CRM says; null: not fetched yet.")
    has_recordings: bool | None = Field(examples=[True])
    total_recordings: int = Field(examples=[3], description="Those stored and not gone upstream.")
    transcribed: int = Field(examples=[2], description="Of those, how many have a transcript.")
    last_revalidated_at: datetime | None = Field(description="When the sales list named it last.")
    fetched_at: datetime | None = Field(description="When the CRM was last asked for its details, and answered.")
    created_at: datetime
    updated_at: datetime


class FichePage(Page):
    fiches: list[FicheRow]


class RecordingRow(Shape):
    id: str = Field(examples=["77"])
    call_id: str = Field(examples=["call-1"])
    recording_url: str = Field(
        examples=["https://calls.example/1.mp3?X-Amz-Signature=***"], description="What signs it is hidden."
    )
    url_missing: bool = Field(examples=[False], description="The CRM has no URL for it: it cannot be transcribed.")
    start_time: datetime | None
    duration_s: float | None = Field(examples=[61.5])
    has_transcription: bool
    transcribed_at: datetime | None
    removed_at: datetime | None = Field(
        description="Gone upstream since then: counted nowhere, its transcript is kept."
    )


class FicheInFull(FicheRow):
    details_message: str | None = Field(examples=[""])
    attribution_user_id: str | None = Field(examples=["42"])
    information: dict[str, Any] | None = Field(
        examples=[{"groupe": "Lyon", "attribution_user_id": 42}],
        description="What the CRM says; null while the details are missing.",
    )
    recordings: list[RecordingRow] = Field(description="By start time, those without one last.")
