"""Runs: all of them, and one of them in full. A page and the stream that keeps it true ask the same question and show
the same."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel

from ecluse.access.door import caller_of, needs
from ecluse.access.wire import Filter, Offset, kit_of, number, reads_of
from ecluse.db.connect import Connection
from ecluse.engine import State, reading
from ecluse.notify.rules import FLOW_NAME as NOTIFICATIONS
from ecluse.web import figures, live, render
from ecluse.web.door import Page
from ecluse.web.figures import Table
from ecluse.web.live import Context

RUNS, OUTCOMES, LOG, CHILDREN, REASONS = 25, 25, 20, 10, 12  # of each so many on a page

routes = APIRouter(route_class=Page, include_in_schema=False)
MAY = "runs.read"


class Wanted(BaseModel):
    """Of all runs, which: as the filter's form and its links say it."""

    flow: Filter = None
    state: Filter = None
    parent: Filter = None
    all: bool = False
    offset: Offset = 0


class Part(BaseModel):
    """Of one run, which outcomes and which lines of its log."""

    outcome: Filter = None
    why: Filter = None
    outcomes: Offset = 0
    log: Offset = 0


WantedRuns = Annotated[Wanted, Query()]
PartOfRun = Annotated[Part, Query()]


@routes.get("/ui/runs", openapi_extra=needs(MAY))
async def show_runs(request: Request, wanted: WantedRuns) -> Response:
    shown = await _runs(request, wanted)
    flows = {*kit_of(request).by_name, *filter(None, [wanted.flow])}
    return render.page(request, "runs.html", flows=sorted(flows), states=list(State), **shown)


@routes.get("/ui/runs/live", openapi_extra=needs(MAY))
async def follow_runs(request: Request, wanted: WantedRuns) -> Response:
    return live.stream(request, MAY, "runs_live.html", lambda: _runs(request, wanted), lambda _: True)


@routes.get("/ui/runs/{run_id}", openapi_extra=needs(MAY))
async def show_run(request: Request, run_id: str, part: PartOfRun) -> Response:
    return render.page(request, "run.html", **await _run(request, number("run", run_id), part))


@routes.get("/ui/runs/{run_id}/live", openapi_extra=needs(MAY))
async def follow_run(request: Request, run_id: str, part: PartOfRun) -> Response:
    wanted = number("run", run_id)
    await reads_of(request)(lambda c: reading.show_run(c, caller_of(request).tenant, wanted))  # or a 404
    return live.stream(
        request,
        MAY,
        "run_live.html",
        lambda: _run(request, wanted, part),
        lambda message: live.said(message, "run_id") == str(wanted),
    )


async def _runs(request: Request, wanted: Wanted) -> Context:
    tenant, parent = caller_of(request).tenant, number("run", wanted.parent) if wanted.parent else None

    async def ask(connection: Connection) -> tuple[bool, Table]:
        rows = await reading.list_runs(
            connection,
            tenant=tenant,
            flow=wanted.flow or None,
            state=wanted.state or None,
            but=() if wanted.all else [NOTIFICATIONS],
            top=not wanted.all and parent is None,
            parent=parent,
            limit=RUNS + 1,
            offset=wanted.offset,
        )
        return len(rows) > RUNS, await figures.table(connection, tenant, rows[:RUNS])

    more, table = await reads_of(request)(ask)
    return {"wanted": wanted, "table": table, "more": more, "size": RUNS, "busy": table.busy, "over": False}


async def _run(request: Request, run_id: int, part: Part) -> Context:
    tenant = caller_of(request).tenant

    async def ask(connection: Connection) -> Context:
        run = await reading.show_run(connection, tenant, run_id)
        children = await reading.list_runs(connection, tenant=tenant, parent=run_id, limit=CHILDREN, offset=0)
        reasons = await reading.reasons(connection, tenant, run_id, limit=REASONS + 1)
        unsettled = run["ended_at"] is None and not part.outcome and {one["outcome"] for one in reasons} == {"open"}
        log = await reading.list_log(connection, tenant, run_id, newest_first=True, limit=LOG + 1, offset=part.log)
        return {
            "run": run,
            "itself": await figures.table(connection, tenant, [run]),
            "children": await figures.table(connection, tenant, children),
            "reasons": reasons,
            "unsettled": unsettled,
            "outcomes": [] if unsettled else await _outcomes(connection, tenant, run_id, part),
            "log": log,
        }

    shown = await reads_of(request)(ask)
    ended = shown["run"]["ended_at"] is not None
    sizes = {"outcomes": OUTCOMES, "log": LOG, "reasons": REASONS}
    bars = [figures.of_stage(stage) for stage in shown["run"]["stages"]]
    return {**shown, "part": part, "sizes": sizes, "bars": bars, "busy": not ended, "over": ended}


async def _outcomes(connection: Connection, tenant: str, run_id: int, part: Part) -> list[reading.Row]:
    return await reading.list_outcomes(
        connection,
        tenant,
        run_id,
        outcome=part.outcome or None,
        why=part.why or None,
        worst_first=True,
        limit=OUTCOMES + 1,
        offset=part.outcomes,
    )
