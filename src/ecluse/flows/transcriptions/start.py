"""Start of transcription runs, thousands in one transaction. A fiche that is already being transcribed gets no second
run: the caller is attached to the existing one. Requests are rate-limited per fiche."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from ecluse.access.limits import limit_exceeded
from ecluse.base.text import first_few
from ecluse.db.connect import Connection
from ecluse.db.query import as_json, fetch_column, fetch_rows
from ecluse.engine import (
    Event,
    Flow,
    Run,
    Start,
    Waiter,
    holders,
    load_runs,
    lock_open,
    put_waiters,
    start_runs,
    wake_workers,
    write_events,
)
from ecluse.flows.fiches.cache import states
from ecluse.flows.transcriptions import rules, traces
from ecluse.flows.transcriptions.flow import Taken
from ecluse.flows.transcriptions.plan import event_of
from ecluse.flows.transcriptions.rules import Counts
from ecluse.retention.kinds import Aged

TRIES = 5
KEPT = Aged("requests", "transcription_requests", "t.minute", order="minute", type="timestamptz")

OWN = "SELECT event_key, id FROM runs WHERE tenant_id = %s AND event_key = ANY(%s)"

LOG = """
INSERT INTO run_log (run_id, at, level, message, event_id)
SELECT run_id, ecluse_now(), 'info', message, event_id
FROM jsonb_to_recordset(%s::jsonb) AS t(run_id bigint, message text, event_id text)
"""

PLANNED = "SELECT run_id FROM transcription_runs WHERE run_id = ANY(%s) AND target_total IS NOT NULL"

# The minute begins with its first request. Ordered by fiche id, so that concurrent batches cannot deadlock.
COUNT = """
INSERT INTO transcription_requests AS q (tenant_id, fiche_id, minute, requests, last_ms)
SELECT %s, fiche_id, now, 1, floor(extract(epoch FROM now) * 1000)
FROM unnest(%s::text[]) AS f(fiche_id), (SELECT ecluse_now() AS now) clock ORDER BY fiche_id
ON CONFLICT (tenant_id, fiche_id) DO UPDATE SET
    minute = CASE WHEN q.minute <= excluded.minute - interval '1 minute' THEN excluded.minute ELSE q.minute END,
    requests = CASE WHEN q.minute <= excluded.minute - interval '1 minute' THEN 1 ELSE q.requests + 1 END,
    last_ms = greatest(q.last_ms + 1, excluded.last_ms)
RETURNING fiche_id, last_ms, requests, extract(epoch FROM minute + interval '1 minute' - ecluse_now())::float8
"""


class StartedFiche(NamedTuple):
    """The run of a fiche, new or existing, and the event id of the request for it."""

    fiche_id: str
    event_id: str
    run_id: int
    attached: bool  # to an existing run: nothing new was started


async def count_requests(connection: Connection, tenant: str, fiche_ids: Sequence[str], most: int) -> dict[str, int]:
    """Count one request per fiche; raise Refused (429) if a fiche exceeds `most` a minute. The caller's transaction is
    then rolled back, so a refused request is not counted. Return a millisecond timestamp per fiche that is unique among
    the requests of that fiche."""
    rows = await fetch_rows(connection, COUNT, (tenant, list(fiche_ids)))
    over = [(fiche_id, left) for fiche_id, _, requests, left in rows if requests > most]
    if over:
        named = first_few(sorted(fiche_id for fiche_id, _ in over))
        wait = max(left for _, left in over)
        message = f"At most {most} requests a minute are accepted per fiche, exceeded for: {named}."
        raise limit_exceeded("RATE_LIMITED", "fiche_requests", message, wait)
    return {fiche_id: at for fiche_id, at, *_ in rows}


async def start(
    connection: Connection,
    flow: Flow,
    tenant: str,
    fiche_ids: Sequence[str],
    *,
    event_ids: Sequence[str],
    priority: str = "normal",
    wait_for_completion: bool = False,
    refresh: bool = True,
    again: bool = False,
    parent_run_id: int | None = None,
    correlation_id: str | None = None,
) -> list[StartedFiche]:
    """Start one transcription run per fiche or attach to its open run, in one transaction (nested in the caller's, if
    there is one); return the results in the order given. `again`: the event ids are those of a day; after such a run
    has ended, a repetition gets the next retry suffix. Raise Taken if a lease has changed hands in all of TRIES
    attempts."""
    given = {"priority": priority, "wait_for_completion": wait_for_completion, "refresh": refresh}
    wanted = [
        Start(
            flow,
            event_id,
            tenant_id=tenant,
            input={"fiche_id": fiche_id, **given},
            parent_run_id=parent_run_id,
            correlation_id=correlation_id,
            again=again,
        )
        for fiche_id, event_id in zip(fiche_ids, event_ids, strict=True)
    ]
    for left in reversed(range(TRIES)):
        try:
            async with connection.transaction():
                return await _start(connection, tenant, wanted)
        except Taken:  # the fiche was taken, or its holder ended, after the holders were read: the next try sees it
            if not left:
                raise
    raise AssertionError("unreachable")


async def _start(connection: Connection, tenant: str, wanted: Sequence[Start]) -> list[StartedFiche]:
    """Start the runs of these starts or attach to open ones, in one attempt; raise Taken if a lease changed hands
    meanwhile."""
    locks = {_fiche(one): rules.fiche_lock(_fiche(one)) for one in wanted}
    held = await holders(connection, tenant, list(locks.values()))
    busy = {fiche_id: holder for fiche_id, lock in locks.items() if (holder := held.get(lock)) is not None}
    still_open = await lock_open(connection, busy.values())
    for fiche_id, holder in busy.items():
        if holder not in still_open:
            raise Taken(fiche_id, holder)
    # A known event id keeps its own run, whichever run holds the fiche now; that of a day (`again`) is repeated after
    # its run has ended.
    if once := {one.event_key: _fiche(one) for one in wanted if not one.again}:
        own = await fetch_rows(connection, OWN, (tenant, list(once)))
        busy |= {once[event_key]: run_id for event_key, run_id in own}
    free = [one for one in wanted if _fiche(one) not in busy]
    new: dict[str, Run] = {}
    for one, started in zip(free, await start_runs(connection, free) if free else (), strict=True):
        if started.deduplicated:
            busy[_fiche(one)] = started.run.id
        else:
            new[_fiche(one)] = started.run
    there = await _attach(connection, tenant, [one for one in wanted if _fiche(one) in busy], busy)
    events = [_asked(one, new[_fiche(one)].event_key, new[_fiche(one)], False) for one in wanted if _fiche(one) in new]
    await write_events(connection, events)
    runs = {fiche_id: run.id for fiche_id, run in new.items()} | busy
    await put_waiters(connection, [Waiter(runs[_fiche(one)], one.parent_run_id, _fiche(one)) for one in wanted])
    return [
        StartedFiche(fiche_id, new[fiche_id].event_key, new[fiche_id].id, False)
        if (fiche_id := _fiche(one)) in new
        else there[fiche_id]
        for one in wanted
    ]


async def _attach(
    connection: Connection, tenant: str, late: Sequence[Start], busy: dict[str, int]
) -> dict[str, StartedFiche]:
    """Attach these starts to the runs in `busy` (by fiche id): emit a status check for each, log it, and wake the
    workers. Return the results by fiche id."""
    if not late:
        return {}
    runs = {run.id: run for run in await load_runs(connection, busy.values())}
    known = await states(connection, tenant, [_fiche(one) for one in late])
    planned = set(await fetch_column(connection, PLANNED, (list(runs),)))
    answers, events, lines = {}, [], []
    for one in late:
        fiche_id, run = _fiche(one), runs[busy[_fiche(one)]]
        # A batch request shares the event of its day; a click has an event of its own.
        event_id = run.event_key if one.again else one.event_key
        state = known.get(fiche_id)
        counts = Counts(state.total_recordings, state.transcribed) if state and run.id in planned else None
        payload = {**rules.status_check(fiche_id, run.id, counts), "attached": True}
        asked = one.correlation_id or uuid.uuid4().hex
        events.append(event_of(run, "transcription.status_check", payload, suffix=f":{event_id}:{asked}"))
        if not one.again:
            events.append(_asked(one, event_id, run, True))
        lines.append({"run_id": run.id, "event_id": event_id, "message": f"asked for again ({event_id}): attached"})
        answers[fiche_id] = StartedFiche(fiche_id, event_id, run.id, True)
    await connection.execute(LOG, (as_json(lines),))
    await write_events(connection, events)
    await wake_workers(connection)
    for fiche_id, answer in answers.items():
        traces.orchestrator(runs[answer.run_id], fiche_id).waiting("active run", event_id=answer.event_id, cached=True)
    return answers


def _fiche(one: Start) -> str:
    """Return the fiche id of a start."""
    return str((one.input or {})["fiche_id"])


def _asked(one: Start, event_id: str, run: Run, attached: bool) -> Event:
    """Return the event `fiche/transcribe` of a start."""
    asked: dict[str, Any] = {
        **rules.about(_fiche(one), run.id),
        **{name: (one.input or {})[name] for name in ("priority", "wait_for_completion")},
        "attached": attached,
    }
    return Event(run.tenant_id, event_id, "fiche/transcribe", f"run:{run.id}", asked, one.correlation_id or event_id)
