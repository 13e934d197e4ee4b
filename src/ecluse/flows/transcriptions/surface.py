"""Transcriptions in the API, the command line and the pages. A 200 to a POST means "queued": the answer names the run,
which clients follow by its events or by polling the status."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import Field

from ecluse.access.commands import Command
from ecluse.access.envelope import Refused
from ecluse.access.listing import Filters, Listing, Where, every_row
from ecluse.access.surface import Act, Look, Surface
from ecluse.access.wire import Body, Filter, Instant, Page, Shape
from ecluse.base.errors import InvalidInput
from ecluse.db.query import Row
from ecluse.engine import require_budget
from ecluse.flows.fiches import cache, ids
from ecluse.flows.fiches.scopes import FicheInPath, require_visible
from ecluse.flows.transcriptions import queries, rules
from ecluse.flows.transcriptions.start import StartedFiche, count_requests, start

surface = Surface("transcriptions")
READ, OF_FICHE = "transcriptions.read", "/api/transcriptions/{fiche_id:text}"
MOST = 10_000
# Fiches of a batch that are started together: the work on more of them would block the event loop for too long.
CHUNK = 100
FICHES_PER_UNIT = 10  # of the cost of a batch
PRIORITIES = ("high", "normal", "low")
Priority = Annotated[str, Query(examples=["normal"], json_schema_extra={"enum": list(PRIORITIES)})]
Level = Literal["debug", "info", "warning", "error"]


class Queued(Shape):
    success: Literal[True]
    fiche_id: str = Field(examples=["171234"])
    event_id: str = Field(examples=["transcribe-171234-1772445600000"])
    run_id: str = Field(examples=["41"], description="The run to follow.")
    attached: bool = Field(description="True: the fiche was being transcribed, and this is that run.")


class Batch(Body):
    fiche_ids: list[str] = Field(min_length=1, max_length=MOST, examples=[["171234", "171235"]])
    priority: str = Field("normal", examples=["normal"], json_schema_extra={"enum": list(PRIORITIES)})


class BatchRow(Shape):
    fiche_id: str = Field(examples=["171234"])
    event_id: str = Field(examples=["transcribe-171234-2026-03-02"])
    run_id: str = Field(examples=["41"])
    deduplicated: bool = Field(description="True: it is being transcribed already, and no run was started.")


class BatchAnswer(Shape):
    success: Literal[True]
    queued: int = Field(description="Number of new runs.")
    deduplicated: int
    folded: int = Field(description="Number of repeated ids in the list: each fiche is queued once.")
    fiches: list[BatchRow]


class RecordingState(Shape):
    call_id: str = Field(examples=["call-1"])
    start_time: datetime | None
    duration_s: float | None
    url_missing: bool
    has_transcription: bool
    transcribed_at: datetime | None
    state: rules.State
    reason: str | None = Field(description="Why it failed, or waits.")
    executions: int = Field(description="Number of executions in the last run.")


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
        alias="finalize-fiche-transcription", description="`missing`: all items are done, but the run has not ended."
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
    maybe_paid: int = Field(description="Number of calls sent again although the first may have been paid for.")
    error_code: str | None
    reason: str | None
    waiting_for: str | None = Field(description="Why the first waiting item waits.")
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
    ttl_seconds: float | None = Field(description="null: held for as long as its run is open.")


class Status(Shape):
    fiche_id: str
    known: bool = Field(description="The fiche was fetched and the CRM knows it; otherwise its coverage is not known.")
    details: cache.Details = Field(description="`missing`: not fetched yet; `not_found`: unknown to the CRM.")
    total: int | None = Field(description="Current recordings, without those removed in the CRM; null: not known.")
    transcribed: int
    pending: int | None = Field(description="Recordings without a transcript, tried or not; null: not known.")
    percentage: int | None
    recordings: list[RecordingState]
    activeRun: str | None  # noqa: N815 - as the contract spells it
    processed: int | None
    failed: int | None
    target_total: int | None
    run: RunPart | None
    lock: Lock | None


class TranscriptionLogRow(Shape):
    id: str
    created_at: datetime
    level: Level
    message: str
    data: Any
    run_id: str | None
    trace_id: str | None
    function_id: str | None
    inngest_event_id: str | None


class TranscriptionLogs(Page):
    stored: bool = Field(description="Whether lines are stored at all (WORKFLOW_LOG_DB_ENABLED).")


class LogFilters(Filters):
    run_id: Annotated[Filter, Where("t.trace_id = %(run_id)s")] = None
    level: Level | None = None
    since: Annotated[Instant, Where("t.created_at >= %(since)s")] = None
    until: Annotated[Instant, Where("t.created_at < %(until)s")] = None


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


LOGS = Listing(
    "logs",
    TranscriptionLogRow,
    "transcription_logs",
    READ,
    filters=LogFilters,
    order=("created_at", "id"),
    within=("fiche_id",),
    visible=every_row,  # of a fiche that the caller sees
    base=TranscriptionLogs,
)


@surface.operation(
    "POST",
    "/api/transcriptions/batch",
    needs="transcriptions.write",
    narrowed=True,
    answer=BatchAnswer,
    action="transcription.start",  # one row: its request id is the correlation id of the runs
    subject="fiches:{queued}",
    refuses=("SCOPE", "INVALID_PRIORITY", "RATE_LIMITED", "BUDGET_EXCEEDED", "NO_CONNECTION"),
    command=Command("transcriptions batch", arguments=("fiche_ids",)),
)
async def transcribe_batch(act: Act, body: Batch) -> Row:
    """Queue many fiches. A fiche that is being transcribed gets no second run: the answer names its open run. A fiche
    whose run of today has ended is queued again."""
    if why := ids.why_not(body.fiche_ids):
        raise InvalidInput(f"fiche_ids: {why}. Nothing was queued.")
    fiche_ids = list(dict.fromkeys(body.fiche_ids))
    act.charge(len(fiche_ids) // FICHES_PER_UNIT)
    await require_visible(act.connection, act.caller, fiche_ids)
    day, in_order = act.kit.clock.now().astimezone(UTC).date(), sorted(fiche_ids)
    queued: dict[str, StartedFiche] = {}
    for first in range(0, len(fiche_ids), CHUNK):  # in one order, so that concurrent batches cannot deadlock
        some = await _queue(act, in_order[first : first + CHUNK], body.priority, day=day)
        queued |= {one.fiche_id: one for one in some}
    started = [queued[one] for one in fiche_ids]
    rows = [
        {"fiche_id": one.fiche_id, "event_id": one.event_id, "run_id": str(one.run_id), "deduplicated": one.attached}
        for one in started
    ]
    old = sum(one.attached for one in started)
    if old == len(rows):
        act.changes_nothing()
    counts = {"queued": len(rows) - old, "deduplicated": old, "folded": len(body.fiche_ids) - len(rows)}
    return {"success": True, **counts, "fiches": rows}


@surface.operation(
    "POST",
    "/api/transcriptions/{fiche_id}",
    needs="transcriptions.write",
    narrowed=True,
    answer=Queued,
    action="transcription.start",
    subject="run:{run_id}",
    refuses=("SCOPE", "INVALID_PRIORITY", "RATE_LIMITED", "BUDGET_EXCEEDED", "NO_CONNECTION"),
    command=Command("transcriptions start", follows="run_id"),
)
async def transcribe_fiche(act: Act, fiche_id: FicheInPath, priority: Priority = "normal") -> Row:
    """Queue one fiche now; every request is an event of its own. A fiche that is being transcribed gets no second run:
    the answer names its open run."""
    if (await act.request.body()).strip() not in (b"", b"{}"):
        raise InvalidInput(
            "The request must have no body: the priority is the query parameter ?priority=. Nothing was queued."
        )
    (started,) = await _queue(act, [fiche_id], priority)
    if started.attached:
        act.changes_nothing()
    answer = {"fiche_id": fiche_id, "event_id": started.event_id, "run_id": str(started.run_id)}
    return {"success": True, **answer, "attached": started.attached}


@surface.read(
    OF_FICHE + "/status",
    needs=READ,
    narrowed=True,
    answer=Status,
    refuses=("SCOPE",),
    command=Command("transcriptions status"),
)
async def show_transcription_status(look: Look, fiche_id: FicheInPath) -> Row:
    """Show how many recordings have a transcript, the state of each recording, and the open or last run."""
    return await queries.status(look.connection, look.tenant, fiche_id)


async def _known(look: Look, fiche_id: FicheInPath) -> Row:
    await queries.require_known(look.connection, look.tenant, fiche_id)
    return {"stored": look.kit.trace_rows}


surface.listing(
    OF_FICHE + "/logs",
    LOGS,
    check=_known,
    refuses=("SCOPE",),
    list_transcription_logs="List the log lines of this fiche's transcriptions, the oldest first, if they are stored.",
    command=Command(
        "transcriptions logs",
        columns=("created_at", "level", "message", "data"),
        options={"run": "run_id"},
        empty="no log lines are stored: set WORKFLOW_LOG_DB_ENABLED=1 for the servers",
    ),
)


@surface.read(
    OF_FICHE + "/recordings/{call_id}",
    needs=READ,
    narrowed=True,
    answer=TranscriptAnswer,
    refuses=("SCOPE",),
    command=Command("transcriptions recording"),
)
async def show_transcript(look: Look, fiche_id: FicheInPath, call_id: str) -> Row:
    """Show the transcript of one recording."""
    return await queries.transcript(look.connection, look.tenant, fiche_id, call_id)


async def _queue(act: Act, fiche_ids: list[str], priority: str, *, day: date | None = None) -> list[StartedFiche]:
    """Start one run per fiche, or attach to the open one: with a `day`, as the event of that day; without, as an event
    of its own. Raise Refused for an unknown priority, too many requests for a fiche, or an exhausted budget."""
    if priority not in PRIORITIES:
        raise Refused(400, "INVALID_PRIORITY", f"A priority is one of {', '.join(PRIORITIES)}.")
    most: int = act.state.transcriptions.requests_per_minute
    clicked = await count_requests(act.connection, act.tenant, fiche_ids, most)
    flow = act.kit.flow(rules.FLOW)
    started = await start(
        act.connection,
        flow,
        act.tenant,
        fiche_ids,
        event_ids=[rules.day_id(one, day) if day else rules.click_id(one, clicked[one]) for one in fiche_ids],
        priority=priority,
        again=day is not None,
        correlation_id=act.request_id,
    )
    if not all(one.attached for one in started):
        await require_budget(act.connection, flow, act.tenant)
    return started
