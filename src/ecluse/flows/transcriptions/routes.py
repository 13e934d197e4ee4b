"""HTTP routes of transcriptions. A 200 to a POST means "queued": the answer names the run, which clients follow by its
events or by polling the status."""

from __future__ import annotations

from datetime import UTC, date, datetime
from functools import partial
from typing import Annotated, Literal

from fastapi import Query, Request, Response
from pydantic import AfterValidator

from ecluse.access import door, idempotency
from ecluse.access.door import caller_of, needs
from ecluse.access.envelope import Refused, as_json, request_id
from ecluse.access.idempotency import Answer
from ecluse.access.wire import Filter, Limit, Offset, kit_of, with_ids_as_text
from ecluse.base.errors import InvalidInput
from ecluse.db.connect import Connection
from ecluse.db.query import Row
from ecluse.flows.fiches import ids
from ecluse.flows.fiches.scopes import fiche_in_path, read_fiche, require_visible
from ecluse.flows.transcriptions import queries, rules, shapes
from ecluse.flows.transcriptions.config import Config
from ecluse.flows.transcriptions.start import StartedFiche, count_requests, start

routes = door.routes("transcriptions")

PRIORITIES = ("high", "normal", "low")
Priority = Annotated[str, Query(examples=["normal"], json_schema_extra={"enum": list(PRIORITIES)})]
Level = Literal["debug", "info", "warning", "error"]
Instant = Annotated[
    datetime | None, Query(), AfterValidator(lambda at: at and (at if at.tzinfo else at.replace(tzinfo=UTC)))
]


def config_of(request: Request) -> Config:
    config: Config = request.app.state.transcriptions
    return config


@routes.post(
    "/api/transcriptions/batch",
    openapi_extra=needs(
        "transcriptions.write",
        narrowed=True,
        refuses=(*idempotency.REFUSES, "SCOPE", "INVALID_PRIORITY", "RATE_LIMITED"),
    ),
    response_model=shapes.BatchAnswer,
)
async def transcribe_batch(request: Request, body: shapes.Batch) -> Response:
    """Queue many fiches, each once a day. A fiche that is being transcribed is returned with its run; a fiche whose run
    of today has ended is queued again."""
    priority, fiche_ids = _priority(body.priority), _checked(body.fiche_ids)
    folded = len(body.fiche_ids) - len(fiche_ids)
    today = kit_of(request).clock.now().astimezone(UTC).date()

    async def ask(connection: Connection) -> Answer:
        started = await _queue(connection, request, fiche_ids, priority, day=today)
        rows = [
            {
                "fiche_id": one.fiche_id,
                "event_id": one.event_id,
                "run_id": str(one.run_id),
                "deduplicated": one.attached,
            }
            for one in started
        ]
        old = sum(one.attached for one in started)
        counts = {"queued": len(rows) - old, "deduplicated": old, "folded": folded}
        return Answer(200, {"success": True, **counts, "fiches": rows})

    return await idempotency.once(request, kit_of(request).pool, ask)


@routes.post(
    "/api/transcriptions/{fiche_id}",
    openapi_extra=needs(
        "transcriptions.write",
        narrowed=True,
        refuses=(*idempotency.REFUSES, "SCOPE", "INVALID_PRIORITY", "RATE_LIMITED"),
    ),
    response_model=shapes.Queued,
)
async def transcribe_fiche(request: Request, fiche_id: str, priority: Priority = "normal") -> Response:
    """Queue one fiche now: every request is an event of its own. A fiche that is being transcribed gets no second
    run."""
    wanted, first = fiche_in_path(fiche_id), _priority(priority)
    if (await request.body()).strip() not in (b"", b"{}"):
        raise InvalidInput("This takes no body: the priority is the query parameter ?priority=. Nothing was queued.")

    async def ask(connection: Connection) -> Answer:
        (started,) = await _queue(connection, request, [wanted], first)
        answer = {"fiche_id": wanted, "event_id": started.event_id, "run_id": str(started.run_id)}
        return Answer(200, {"success": True, **answer, "attached": started.attached})

    return await idempotency.once(request, kit_of(request).pool, ask)


@routes.get(
    "/api/transcriptions/{fiche_id:fiche}/status",
    openapi_extra=needs("transcriptions.read", narrowed=True, refuses=("SCOPE",)),
    response_model=shapes.Status,
)
async def show_status(request: Request, fiche_id: str) -> Response:
    """Return how many recordings have a transcript, the state of each recording, and the open or last run."""
    return as_json(await read_fiche(request, fiche_id, queries.status))


@routes.get(
    "/api/transcriptions/{fiche_id:fiche}/logs",
    openapi_extra=needs("transcriptions.read", narrowed=True, refuses=("SCOPE",)),
    response_model=shapes.TranscriptionLogPage,
)
async def list_transcription_logs(
    request: Request,
    fiche_id: str,
    run_id: Filter = None,
    level: Level | None = None,
    since: Instant = None,
    until: Instant = None,
    limit: Limit = 50,
    offset: Offset = 0,
) -> Response:
    """List the log lines of this fiche's transcriptions, the oldest first, if log lines are stored."""
    given: Row = {"run_id": run_id, "level": level, "since": since, "until": until, "limit": limit, "offset": offset}

    async def known_logs(connection: Connection, tenant: str, wanted: str) -> list[Row]:
        await queries.require_known(connection, tenant, wanted)
        return await queries.logs(connection, tenant, wanted, **given)

    rows = with_ids_as_text(await read_fiche(request, fiche_id, known_logs))
    return as_json({"logs": rows, "stored": kit_of(request).trace_rows, "limit": limit, "offset": offset})


@routes.get(
    "/api/transcriptions/{fiche_id:fiche}/recordings/{call_id}",
    openapi_extra=needs("transcriptions.read", narrowed=True, refuses=("SCOPE",)),
    response_model=shapes.TranscriptAnswer,
)
async def show_transcript(request: Request, fiche_id: str, call_id: str) -> Response:
    """Return the transcript of one recording."""
    return as_json(await read_fiche(request, fiche_id, partial(queries.transcript, call_id=call_id)))


async def _queue(
    connection: Connection, request: Request, fiche_ids: list[str], priority: str, *, day: date | None = None
) -> list[StartedFiche]:
    """Start or attach to one run per fiche: as the event of this day, or without a day as an event of its own."""
    caller, most = caller_of(request), config_of(request).requests_per_minute
    await require_visible(connection, caller, fiche_ids)
    clicked = await count_requests(connection, caller.tenant, fiche_ids, most)
    return await start(
        connection,
        kit_of(request).flow(rules.FLOW),
        caller.tenant,
        fiche_ids,
        event_ids=[rules.day_id(one, day) if day else rules.click_id(one, clicked[one]) for one in fiche_ids],
        priority=priority,
        again=day is not None,
        correlation_id=request_id(request),
    )


def _priority(given: str) -> str:
    if given not in PRIORITIES:
        raise Refused(400, "INVALID_PRIORITY", f"A priority is one of {', '.join(PRIORITIES)}.")
    return given


def _checked(fiche_ids: list[str]) -> list[str]:
    """Return the distinct ids in the order given; refuse the whole list if one id is invalid."""
    if why := ids.why_not(fiche_ids):
        raise InvalidInput(f"fiche_ids: {why}. Nothing was queued.")
    return list(dict.fromkeys(fiche_ids))
