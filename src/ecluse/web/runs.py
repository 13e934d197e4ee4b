"""Pages of runs: the list, and one run in full. A page and the stream that updates it run the same queries and render
the same regions."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, BeforeValidator

from ecluse.access.door import caller_of, needs
from ecluse.access.wire import Filter, Offset, kit_of, number, reads_of
from ecluse.db.connect import Connection
from ecluse.db.query import Row
from ecluse.engine import State, list_schedules
from ecluse.flows.automation.schedules import FLOW as AUTOMATION
from ecluse.flows.connections.records import Kind, lacking
from ecluse.insight import run_queries
from ecluse.insight.causes import BLOCKING
from ecluse.insight.waiting import why_run
from ecluse.notify.rules import FLOW_NAME as NOTIFICATIONS
from ecluse.web import figures, live, own_pages, render, run_state
from ecluse.web.actions import Button, buttons
from ecluse.web.advice import advice, may_succeed
from ecluse.web.authentication import Page
from ecluse.web.automation import budget_warning
from ecluse.web.figures import Table
from ecluse.web.live import Context

RUNS, OUTCOMES, LOG, CHILDREN, REASONS, SCHEDULES = 25, 25, 20, 10, 12, 200  # rows of each on a page

routes = APIRouter(route_class=Page, include_in_schema=False)
MAY = "runs.read"
OUTCOMES_FILE = "/api/runs/{run_id}/outcomes.csv"
LIST = live.Page("runs_live.html")
REGIONS = ("title", "header", "failures", "waiting", "outcomes", "stages", "log", "children")
ONE = live.Page("run_live.html", REGIONS)


Day = Annotated[date | None, BeforeValidator(lambda given: given or None)]


class ListFilters(BaseModel):
    """Filters of the list of runs: the query parameters of the filter form and of links to it."""

    flow: Filter = None
    state: Filter = None
    parent: Filter = None
    schedule: Filter = None
    target: Filter = None
    since: Day = None
    until: Day = None
    all: bool = False
    offset: Offset = 0


class Part(BaseModel):
    """Query parameters of the page of one run: filters of its outcomes, and offsets of outcomes and log."""

    outcome: Filter = None
    why: Filter = None
    outcomes: Offset = 0
    log: Offset = 0


FiltersOfList = Annotated[ListFilters, Query()]
PartOfRun = Annotated[Part, Query()]


@routes.get("/ui/runs", openapi_extra=needs(MAY))
async def show_runs(request: Request, filters: FiltersOfList) -> Response:
    tenant = caller_of(request).tenant
    shown = await _runs(request, filters)
    but = own_pages.without_runs(kit_of(request).by_name)
    schedules = await reads_of(request)(lambda c: list_schedules(c, tenant, but=but, limit=SCHEDULES, offset=0))
    return render.page(
        request,
        "runs.html",
        flows=sorted((set(kit_of(request).by_name) - set(but)) | set(filter(None, [filters.flow]))),
        states=list(State),
        schedules=schedules,
        may_trigger=bool(buttons(request, ("run_schedule", {"schedule_id": 0}))),
        regions=LIST.regions(request, **shown),
        **shown,
    )


@routes.get("/ui/runs/live", openapi_extra=needs(MAY))
async def follow_runs(request: Request, filters: FiltersOfList) -> Response:
    return live.stream(request, MAY, LIST, lambda: _runs(request, filters), lambda _: True)


@routes.get("/ui/runs/{run_id}", openapi_extra=needs(MAY))
async def show_run(request: Request, run_id: str, part: PartOfRun) -> Response:
    shown = await _run(request, number("run", run_id), part)
    return render.page(request, "run.html", regions=ONE.regions(request, **shown), **shown)


@routes.get("/ui/runs/{run_id}/outcomes.csv", openapi_extra=needs(MAY))
async def send_outcomes(request: Request, run_id: str) -> Response:
    """Send the outcomes of a run as the API's CSV file, at an address below /ui: browsers do not send the cookie to the
    API's address."""
    (route,) = [one for one in request.app.router.routes if getattr(one, "path", "") == OUTCOMES_FILE]
    answer: Response = await route.endpoint(request=request, run_id=run_id)
    return answer


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


def _midnight(day: date | None, later: int = 0) -> datetime | None:
    """Return the start of the day in UTC, plus `later` days; None if no day is given."""
    return None if day is None else datetime.combine(day, time(), UTC) + timedelta(days=later)


async def _runs(request: Request, filters: ListFilters) -> Context:
    tenant, parent = caller_of(request).tenant, number("run", filters.parent) if filters.parent else None

    given = request.app.state.connections.given
    without = own_pages.without_runs(kit_of(request).by_name)
    # A filter by state or target shows every such run, redrives included.
    fold = not (filters.all or filters.state or filters.target)

    async def ask(connection: Connection) -> tuple[bool, Table, Row]:
        rows = await run_queries.list_runs(
            connection,
            tenant=tenant,
            flow=filters.flow or None,
            state=filters.state or None,
            but=() if filters.all else [NOTIFICATIONS],
            top=not filters.all and parent is None and not filters.target,
            folded=fold,
            parent=parent,
            schedule=number("schedule", filters.schedule) if filters.schedule else None,
            target=filters.target or None,
            since=_midnight(filters.since),
            until=_midnight(filters.until, 1),
            limit=RUNS + 1,
            offset=filters.offset,
        )
        begin = {} if rows else await _begin(connection, tenant, given, without)
        shown = await figures.folded(connection, tenant, rows[:RUNS]) if fold else rows[:RUNS]
        return len(rows) > RUNS, await figures.table(connection, tenant, shown), begin

    more, table, begin = await reads_of(request)(ask)
    shown = sum(not run.get("folded") for run in table.runs)
    filtered = any(filters.model_dump(exclude={"all"}).values())
    there = {"filtered": filtered, "table": table, **begin, "shown": shown, "more": more, "size": RUNS}
    return {"wanted": filters, **there, "busy": table.busy, "over": False}


async def _begin(connection: Connection, tenant: str, environment: Sequence[Kind], but: Sequence[str]) -> Row:
    """Return what a tenant without runs needs for its first one: the connections that it lacks, and its first enabled
    schedule. `environment`: the connections that the tenant `default` has from environment variables. `but`: flows
    without runs."""
    known = await list_schedules(connection, tenant, but=but, limit=RUNS, offset=0)
    first = next((row for row in known if row["enabled"]), None)
    return {"first": first, "lacking": await lacking(connection, tenant, environment)}


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
        waits = (
            None if run["ended_at"] is not None else await why_run(connection, tenant, run_id, kit_of(request).budgets)
        )
        return {
            "run": run,
            **results,
            "progress": figures.of_run(run, run["stages"]),
            "schedule": (await run_queries.schedules_of(connection, tenant, schedule)).get(run["schedule_id"]),
            "own": (await own_pages.of_runs(connection, tenant, [run])).get(run_id),
            "children": await figures.table(connection, tenant, children),
            "redrives": await figures.table(connection, tenant, redrives),
            "log": log,
            "waits": waits,
            "run_state": await run_state.of(connection, run, kit_of(request).clock.now(), waits),
            "blocking": BLOCKING,
            "warning": await budget_warning(connection, run_id) if run["flow"] == AUTOMATION else None,
        }

    shown = await reads_of(request)(ask)
    ended = shown["run"]["ended_at"] is not None
    sizes = {"outcomes": OUTCOMES, "log": LOG, "reasons": REASONS}
    run, progress = shown["run"], shown["progress"]
    stuck = shown["run_state"] is not None and shown["run_state"].stuck
    named = shown["schedule"]["name"] if shown["schedule"] else shown["own"] and shown["own"].words
    name = named or f"{run['flow']} #{run['id']}"
    said = {
        "name": name,
        "sentence": run_state.sentence(run, progress, stuck),
        "title": run_state.title(run, name, progress),
        "buttons": _buttons(request, run),
        "redrive": lambda code: _redrive(request, run, error_code=code) if may_succeed(code) else [],
        "advice": advice,
    }
    bars = [figures.of_stage(stage) for stage in shown["run"]["stages"]]
    return {**shown, **said, "part": part, "sizes": sizes, "bars": bars, "busy": not ended, "over": ended}


def _buttons(request: Request, run: Row) -> list[Button]:
    """Return the buttons for a run: an open run can be ended, an ended run redriven or started again."""
    one, back = {"run_id": run["id"]}, f"/ui/runs/{run['id']}"
    if run["ended_at"] is None:
        return buttons(request, ("end_run", one), back=back)
    # If no target failed, the cancelled ones are redriven.
    found = _redrive(request, run, outcome="" if run["failed"] > run["cancelled"] else "cancelled")
    flow = kit_of(request).by_name.get(run["flow"])
    if run["schedule_id"] is not None:
        return found + buttons(request, ("run_schedule", {"schedule_id": run["schedule_id"]}), back=back)
    if run["parent_run_id"] is not None or flow is None or flow.not_by_hand:
        return found
    given = {"flow": run["flow"], "input": render.as_line(run["input"])}
    return found + buttons(request, ("start_run", {}), back=back, **given)


def _redrive(request: Request, run: Row, **choice: str | None) -> list[Button]:
    """Return the button that redrives an ended run, with this choice of targets. Empty if the run is open, none of its
    targets failed, or its flow has no redrive."""
    flow = kit_of(request).by_name.get(run["flow"])
    if run["ended_at"] is None or not run["failed"] or flow is None or flow.redrive is None:
        return []
    return buttons(request, ("redrive_run", {"run_id": run["id"]}), back=f"/ui/runs/{run['id']}", **choice)
