"""Pages of runs: the list, and one run in full. A page and the stream that updates it run the same queries and render
the same regions."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel

from ecluse.access.door import caller_of, needs
from ecluse.access.wire import Filter, Offset, kit_of, number, reads_of
from ecluse.db.connect import Connection
from ecluse.engine import State, list_schedules
from ecluse.flows.automation.schedules import FLOW as AUTOMATION
from ecluse.insight import run_queries
from ecluse.insight.causes import BLOCKING
from ecluse.insight.waiting import why_run
from ecluse.notify.rules import FLOW_NAME as NOTIFICATIONS
from ecluse.web import figures, live, render, standing
from ecluse.web.automation import budget_warning
from ecluse.web.door import Page
from ecluse.web.figures import Table
from ecluse.web.live import Context

RUNS, OUTCOMES, LOG, CHILDREN, REASONS = 25, 25, 20, 10, 12  # rows of each on a page

routes = APIRouter(route_class=Page, include_in_schema=False)
MAY = "runs.read"
LIST = live.Page("runs_live.html")
ONE = live.Page("run_live.html", ("title", "header", "waiting", "outcomes", "stages", "log", "children"))


class Wanted(BaseModel):
    """Which runs the list shows: the query parameters of the filter form and of links to it."""

    flow: Filter = None
    state: Filter = None
    parent: Filter = None
    all: bool = False
    offset: Offset = 0


class Part(BaseModel):
    """Which outcomes and which log lines the page of one run shows."""

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
    regions = LIST.regions(request, **shown)
    return render.page(request, "runs.html", flows=sorted(flows), states=list(State), regions=regions, **shown)


@routes.get("/ui/runs/live", openapi_extra=needs(MAY))
async def follow_runs(request: Request, wanted: WantedRuns) -> Response:
    return live.stream(request, MAY, LIST, lambda: _runs(request, wanted), lambda _: True)


@routes.get("/ui/runs/{run_id}", openapi_extra=needs(MAY))
async def show_run(request: Request, run_id: str, part: PartOfRun) -> Response:
    shown = await _run(request, number("run", run_id), part)
    return render.page(request, "run.html", regions=ONE.regions(request, **shown), **shown)


@routes.get("/ui/runs/{run_id}/live", openapi_extra=needs(MAY))
async def follow_run(request: Request, run_id: str, part: PartOfRun) -> Response:
    wanted = number("run", run_id)
    await reads_of(request)(lambda c: run_queries.run_itself(c, caller_of(request).tenant, wanted))  # raises NotFound
    return live.stream(
        request,
        MAY,
        ONE,
        lambda: _run(request, wanted, part),
        lambda message: live.said(message, "run_id") == str(wanted),
    )


async def _runs(request: Request, wanted: Wanted) -> Context:
    tenant, parent = caller_of(request).tenant, number("run", wanted.parent) if wanted.parent else None

    # A filter by state shows every run in that state, redrives included.
    fold = not wanted.all and not wanted.state

    async def ask(connection: Connection) -> tuple[bool, Table, run_queries.Row | None]:
        rows = await run_queries.list_runs(
            connection,
            tenant=tenant,
            flow=wanted.flow or None,
            state=wanted.state or None,
            but=() if wanted.all else [NOTIFICATIONS],
            top=not wanted.all and parent is None,
            folded=fold,
            parent=parent,
            limit=RUNS + 1,
            offset=wanted.offset,
        )
        known = await list_schedules(connection, tenant, limit=RUNS, offset=0) if not rows else []
        first = next((row for row in known if row["enabled"]), None)
        shown = await figures.folded(connection, tenant, rows[:RUNS]) if fold else rows[:RUNS]
        return len(rows) > RUNS, await figures.table(connection, tenant, shown), first

    more, table, first = await reads_of(request)(ask)
    shown = sum(not run.get("folded") for run in table.runs)
    there = {"table": table, "first": first, "shown": shown, "more": more, "size": RUNS}
    return {"wanted": wanted, **there, "busy": table.busy, "over": False}


async def _run(request: Request, run_id: int, part: Part) -> Context:
    tenant = caller_of(request).tenant

    async def ask(connection: Connection) -> Context:
        run = await run_queries.run_itself(connection, tenant, run_id)
        some: dict[str, Any] = {"tenant": tenant, "limit": CHILDREN, "offset": 0}
        children = await run_queries.list_runs(connection, parent=run_id, folded=True, **some)
        redrives = await run_queries.list_runs(connection, ids=run["redrives"], **some) if run["redrives"] else []
        results = await run_queries.results(
            connection,
            run_id,
            outcome=part.outcome or None,
            why=part.why or None,
            reasons=REASONS + 1,
            limit=OUTCOMES + 1,
            offset=part.outcomes,
        )
        log = await run_queries.list_log(connection, tenant, run_id, newest_first=True, limit=LOG + 1, offset=part.log)
        schedule = [run["schedule_id"]] if run["schedule_id"] is not None else []
        waits = None if run["ended_at"] is not None else await why_run(connection, tenant, run_id)
        return {
            "run": run,
            **results,
            "progress": figures.of_run(run, run["stages"]),
            "schedule": (await run_queries.schedules_of(connection, tenant, schedule)).get(run["schedule_id"]),
            "children": await figures.table(connection, tenant, children),
            "redrives": await figures.table(connection, tenant, redrives),
            "log": log,
            "waits": waits,
            "standing": await standing.of(connection, run, kit_of(request).clock.now(), waits),
            "blocking": BLOCKING,
            "warning": await budget_warning(connection, run_id) if run["flow"] == AUTOMATION else None,
        }

    shown = await reads_of(request)(ask)
    ended = shown["run"]["ended_at"] is not None
    sizes = {"outcomes": OUTCOMES, "log": LOG, "reasons": REASONS}
    bars = [figures.of_stage(stage) for stage in shown["run"]["stages"]]
    return {**shown, "part": part, "sizes": sizes, "bars": bars, "busy": not ended, "over": ended}
