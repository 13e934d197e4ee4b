"""Routes of runs of every flow: list, show, start, end. A run of another tenant is answered as not found."""

from __future__ import annotations

import hashlib
import json
import uuid
from dataclasses import asdict
from functools import partial
from typing import Any

from fastapi import Request, Response

from ecluse.access import door, idempotency
from ecluse.access.changes import record
from ecluse.access.door import caller_of, needs
from ecluse.access.envelope import Refused, as_json, request_id
from ecluse.access.idempotency import Answer
from ecluse.access.wire import Filter, Limit, Offset, Order, id_as_text, kit_of, number, reads_of, with_ids_as_text
from ecluse.api import shapes
from ecluse.base.errors import InvalidInput, NotFound
from ecluse.db.connect import Connection
from ecluse.engine import Flow, Run, Start, load_run, start_runs
from ecluse.engine.work.completion import end_by_operator
from ecluse.insight import run_queries
from ecluse.insight.previews import preview_end
from ecluse.insight.waiting import RunWaits, Waiting, why, why_run
from ecluse.notify.rules import FLOW_NAME as NOTIFICATIONS

routes = door.routes("runs")


@routes.get("/api/runs", openapi_extra=needs("runs.read"), response_model=shapes.RunPage)
async def list_runs(
    request: Request, limit: Limit = 50, offset: Offset = 0, flow: Filter = None, state: Filter = None
) -> Response:
    """List runs, the newest first. `state` is a neutral state or a flow's own status for it; cancelled runs are found
    by `cancelled` alone. Deliveries of notifications, which are runs too, are left out unless `flow=notifications` is
    given."""
    tenant, but = caller_of(request).tenant, [NOTIFICATIONS]
    rows = await reads_of(request)(
        lambda c: run_queries.list_runs(c, tenant=tenant, flow=flow, state=state, but=but, limit=limit, offset=offset)
    )
    return as_json({"runs": with_ids_as_text(rows), "limit": limit, "offset": offset})


@routes.get("/api/runs/{run_id}", openapi_extra=needs("runs.read"), response_model=shapes.RunInFull)
async def show_run(request: Request, run_id: str) -> Response:
    """Show one run in full: its stages with their counts, its outcomes by reason."""
    tenant, wanted = caller_of(request).tenant, number("run", run_id)
    run = id_as_text(await reads_of(request)(lambda c: run_queries.show_run(c, tenant, wanted)))
    return as_json({**run, "redrives": [str(one) for one in run["redrives"]]})


@routes.get("/api/runs/{run_id}/items", openapi_extra=needs("runs.read"), response_model=shapes.ItemPage)
async def list_items(
    request: Request, run_id: str, limit: Limit = 50, offset: Offset = 0, stage: Filter = None, status: Filter = None
) -> Response:
    """List the items of a run, by stage and key."""
    tenant, wanted = caller_of(request).tenant, number("run", run_id)
    rows = await reads_of(request)(
        lambda c: run_queries.list_items(c, tenant, wanted, stage=stage, status=status, limit=limit, offset=offset)
    )
    return as_json({"items": with_ids_as_text(rows), "limit": limit, "offset": offset})


@routes.get("/api/runs/{run_id}/waiting", openapi_extra=needs("runs.read"), response_model=shapes.WaitingPage)
async def why_waiting(request: Request, run_id: str, limit: Limit = 50, offset: Offset = 0) -> Response:
    """Explain why a run, and the runs that it waits for, wait: by cause, with counts and expected starts; and item by
    item."""
    tenant, wanted = caller_of(request).tenant, number("run", run_id)

    async def ask(connection: Connection) -> tuple[RunWaits, list[Waiting]]:
        return await why_run(connection, tenant, wanted), await why(
            connection, tenant, wanted, limit=limit, offset=offset
        )

    run, items = await reads_of(request)(ask)
    told = asdict(run)
    for group in told["groups"]:
        with_ids_as_text(group["sample"])
    told["total"] = told.pop("waiting")
    return as_json(
        {**told, "waiting": with_ids_as_text([asdict(one) for one in items]), "limit": limit, "offset": offset}
    )


@routes.get("/api/runs/{run_id}/log", openapi_extra=needs("runs.read"), response_model=shapes.LogPage)
async def list_log(
    request: Request, run_id: str, order: Order = "asc", limit: Limit = 50, offset: Offset = 0
) -> Response:
    """List the log of a run, the oldest line first, or the newest."""
    tenant, wanted = caller_of(request).tenant, number("run", run_id)

    async def ask(connection: Connection) -> dict[str, Any]:
        newest = order == "desc"
        rows = await run_queries.list_log(connection, tenant, wanted, newest_first=newest, limit=limit, offset=offset)
        return {"log": with_ids_as_text(rows), "total": await run_queries.count_log(connection, wanted)}

    return as_json({**await reads_of(request)(ask), "limit": limit, "offset": offset})


@routes.post(
    "/api/runs",
    openapi_extra=needs("runs.write", refuses=(*idempotency.REFUSES, "ALREADY_RUNNING", "CONFIG_INACTIVE")),
    status_code=201,
    response_model=shapes.StartedRun,
    responses={200: {"model": shapes.StartedRun, "description": "The key was known; nothing new was started"}},
)
async def start_run(request: Request, body: shapes.StartRun) -> Response:
    """Start a run of a loaded flow. With an `Idempotency-Key`, a repetition gets the same answer."""
    kit, caller, given_once = kit_of(request), caller_of(request), idempotency.key_of(request)
    if body.flow not in kit.by_name:
        raise InvalidInput(f"there is no flow {body.flow!r} (known: {', '.join(sorted(kit.by_name)) or 'none'})")
    if why_not := kit.by_name[body.flow].not_by_hand:
        raise InvalidInput(why_not)
    # Under this key a repetition whose stored answer has been deleted still finds the run of the first request.
    event_key = body.key or f"{body.flow}-request-{f'{given_once}-{_digest(body)}' if given_once else uuid.uuid4()}"
    start = Start(
        kit.by_name[body.flow],
        event_key,
        tenant_id=caller.tenant,
        input=body.input,
        correlation_id=request_id(request),
        again=body.key is not None,
    )

    async def ask(connection: Connection) -> Answer:
        (started,) = await start_runs(connection, [start])
        run = started.run
        return Answer(
            200 if started.deduplicated else 201,
            {"run_id": str(run.id), "event_key": run.event_key, "deduplicated": started.deduplicated},
        )

    return await idempotency.once(request, kit.pool, ask)


def _digest(body: shapes.StartRun) -> str:
    """Digest of the request: an idempotency key reused for another request, after its stored answer has expired, must
    start a new run."""
    return hashlib.sha256(json.dumps([body.flow, body.input], sort_keys=True).encode()).hexdigest()[:12]


@routes.get(
    "/api/runs/{run_id}/end",
    openapi_extra=needs("runs.read", refuses=("ALREADY_ENDED", "FLOW_NOT_LOADED")),
    response_model=shapes.EndPreview,
)
async def preview_end_of_run(request: Request, run_id: str) -> Response:
    """Preview what ending the run now would do; nothing is changed."""
    wanted = number("run", run_id)

    async def ask(connection: Connection) -> dict[str, Any]:
        return await preview_end(connection, *await _of_caller(connection, request, wanted))

    preview = await reads_of(request)(ask)
    if preview["ended"]:
        raise _ended(wanted)
    return as_json(preview)


@routes.post(
    "/api/runs/{run_id}/end",
    openapi_extra=needs("runs.write", refuses=("ALREADY_ENDED", "FLOW_NOT_LOADED")),
    response_model=shapes.EndedRun,
)
async def end_run(request: Request, run_id: str, body: shapes.Reason) -> Response:
    """End a run now: it is cancelled, by this key and for this reason. No more items of it are started, nor of the runs
    that only it waits for; targets that are not finished get the code `CANCELLED`."""
    caller, wanted = caller_of(request), number("run", run_id)
    async with kit_of(request).pool.connection() as connection:
        flow, run = await _of_caller(connection, request, wanted)
        recorded = partial(record, connection, request, "run.end", f"run:{wanted}", body.reason)
        if not await end_by_operator(connection, flow, run, body.reason, by=caller.name, record=recorded):
            raise _ended(wanted)
    return as_json({"run_id": run_id, "ended": True})


async def _of_caller(connection: Connection, request: Request, run_id: int) -> tuple[Flow, Run]:
    kit, run = kit_of(request), await load_run(connection, run_id)
    if run.tenant_id != caller_of(request).tenant:
        raise NotFound(f"there is no run {run_id}")
    if run.flow not in kit.by_name:
        raise Refused(409, "FLOW_NOT_LOADED", f"Run {run_id} is of flow {run.flow!r}, which is not loaded here.")
    return kit.by_name[run.flow], run


def _ended(run_id: int) -> Refused:
    return Refused(409, "ALREADY_ENDED", f"Run {run_id} had ended already; nothing was changed.")
