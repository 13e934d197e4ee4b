"""Request and response models of the transcription routes, for the OpenAPI document."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from ecluse.access.wire import Body, Page, Shape
from ecluse.flows.fiches.cache import Details
from ecluse.flows.transcriptions.rules import State

MOST = 10_000


class Queued(Shape):
    success: Literal[True]
    fiche_id: str = Field(examples=["171234"])
    event_id: str = Field(examples=["transcribe-171234-1772445600000"])
    run_id: str = Field(examples=["41"], description="The run to follow.")
    attached: bool = Field(description="The fiche was being transcribed: this is the run that does it.")


class Batch(Body):
    fiche_ids: list[str] = Field(min_length=1, max_length=MOST, examples=[["171234", "171235"]])
    priority: str = Field("normal", examples=["normal"], json_schema_extra={"enum": ["high", "normal", "low"]})


class BatchRow(Shape):
    fiche_id: str = Field(examples=["171234"])
    event_id: str = Field(examples=["transcribe-171234-2026-03-02"])
    run_id: str = Field(examples=["41"])
    deduplicated: bool = Field(description="It is being transcribed already: nothing new was started.")


class BatchAnswer(Shape):
    success: Literal[True]
    queued: int = Field(description="New runs.")
    deduplicated: int
    folded: int = Field(description="Ids that stood in the list already: each fiche is queued once.")
    fiches: list[BatchRow]


class RecordingState(Shape):
    call_id: str = Field(examples=["call-1"])
    start_time: datetime | None
    duration_s: float | None
    url_missing: bool
    has_transcription: bool
    transcribed_at: datetime | None
    state: State
    reason: str | None = Field(description="Why it failed, or waits.")
    executions: int = Field(description="How often the last run has tried it.")


class WorkerCounts(Shape):
    queued: int
    running: int
    done: int
    failed: int


class FunctionState(Shape):
    state: Literal["queued", "running", "done", "failed", "waiting", "missing"]


class Functions(Shape):
    orchestrator: FunctionState = Field(alias="transcribe-fiche")
    worker: WorkerCounts = Field(alias="transcribe-recording")
    finalizer: FunctionState = Field(
        alias="finalize-fiche-transcription", description="`missing`: all is done, and the run has not ended."
    )


class RunPart(Shape):
    """The open or last run of a fiche. Its figures are frozen when it ends, whatever happens to the fiche later."""

    id: str
    event_id: str
    parent_run_id: str | None
    status: str
    state: str
    phase: Literal["refresh", "recordings", "ended"]
    priority: Literal["high", "normal", "low"]
    total_recordings: int | None
    already_transcribed: int | None
    target_total: int | None
    processed: int
    cached: int
    failed: int
    transcribed: int
    remaining: int
    maybe_paid: int = Field(description="Calls sent again although the first may have been paid for.")
    error_code: str | None
    reason: str | None
    waiting_for: str | None = Field(description="What the first in line waits for.")
    functions: Functions
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    stalled_at: datetime | None


class Lock(Shape):
    key: str = Field(examples=["lock:transcription:fiche:171234"])
    owner: str
    run_id: str | None
    fence: int
    acquired_at: datetime
    ttl_seconds: float | None = Field(description="Null: held for as long as its run is open.")


class Status(Shape):
    fiche_id: str
    known: bool = Field(description="The CRM was asked for it and knows it; if not, nothing is said of its coverage.")
    details: Details = Field(description="`missing`: not fetched yet; `not_found`: unknown to the CRM.")
    total: int | None = Field(description="Recordings there are now, without those gone upstream; null: not known.")
    transcribed: int
    pending: int | None = Field(description="Not transcribed, whether tried or not; null: not known.")
    percentage: int | None
    recordings: list[RecordingState]
    activeRun: str | None  # noqa: N815 - as the contract spells it
    processed: int | None
    failed: int | None
    target_total: int | None
    run: RunPart | None
    lock: Lock | None


class LogLine(Shape):
    id: str
    created_at: datetime
    level: Literal["debug", "info", "warning", "error"]
    message: str
    data: Any
    run_id: str | None
    trace_id: str | None
    function_id: str | None
    inngest_event_id: str | None


class TranscriptionLogPage(Page):
    logs: list[LogLine]
    stored: bool = Field(description="Whether lines are stored at all (WORKFLOW_LOG_DB_ENABLED).")


class ChunkRow(Shape):
    position: int
    speaker: str | None
    start_s: float | None
    end_s: float | None
    text: str


class TranscriptAnswer(Shape):
    fiche_id: str
    call_id: str
    has_transcription: bool
    transcription_id: str | None
    transcribed_at: datetime | None
    transcription: dict[str, Any] = Field(examples=[{"text": "Hello.", "words": []}])
    chunks: list[ChunkRow]
