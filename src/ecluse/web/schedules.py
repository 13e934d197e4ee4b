"""Pages of schedules: the list, and one schedule with its next due instants, plan and latest runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel

from ecluse.access.door import caller_of, needs
from ecluse.access.wire import Offset, kit_of, number, reads_of
from ecluse.base.errors import InvalidInput
from ecluse.base.timetable import Fire, timetable
from ecluse.db.connect import Connection
from ecluse.db.query import Row
from ecluse.engine import list_schedules, show_schedule
from ecluse.flows.automation.schedules import FLOW as AUTOMATION
from ecluse.flows.connections.records import lacking
from ecluse.insight import run_queries
from ecluse.realtime.hub import Message
from ecluse.web import figures, live, own_pages, render
from ecluse.web.actions import Button, buttons
from ecluse.web.authentication import Page
from ecluse.web.automation import plan_of
from ecluse.web.live import Context

SCHEDULES, RUNS = 25, 10  # rows of each on a page
FIRES_IN_LIST, FIRES = 3, 10

routes = APIRouter(route_class=Page, include_in_schema=False)
MAY = "schedules.read"
HOME = "/ui/schedules"
LIST, ONE = live.Page("schedules_live.html"), live.Page("schedule_live.html")


class ListOffset(BaseModel):
    offset: Offset = 0


OffsetOfList = Annotated[ListOffset, Query()]


@dataclass(frozen=True)
class Ahead:
    """The due times of a schedule: in words, the next ones as instants (none if it is disabled or manual), and the
    problem if its cron expression is not valid."""

    words: str
    fires: Sequence[Fire] = ()
    problem: str | None = None


def ahead(row: Row, now: datetime, count: int) -> Ahead:
    if row["cron"] is None:
        return Ahead("Manual")
    try:
        table = timetable(row["cron"], row["timezone"], row["window_start"], row["window_end"])
    except InvalidInput as error:  # stored by another version, which had other rules
        return Ahead(row["cron"], problem=error.message)
    return Ahead(table.cron.explain(), table.preview(now, count) if row["enabled"] else ())


@routes.get("/ui/schedules", openapi_extra=needs(MAY))
async def show_schedules(request: Request, filters: OffsetOfList) -> Response:
    shown = await _schedules(request, filters)
    new = buttons(request, ("create_automation_schedule", {}), ("create_schedule", {}), back=HOME)
    return render.page(request, "schedules.html", new=new, regions=LIST.regions(request, **shown), **shown)


@routes.get("/ui/schedules/live", openapi_extra=needs(MAY))
async def follow_schedules(request: Request, filters: OffsetOfList) -> Response:
    return live.stream(request, MAY, LIST, lambda: _schedules(request, filters), _of_a_schedule)


@routes.get("/ui/schedules/{schedule_id}", openapi_extra=needs(MAY))
async def show_one(request: Request, schedule_id: str) -> Response:
    shown = await _schedule(request, number("schedule", schedule_id))
    return render.page(request, "schedule.html", regions=ONE.regions(request, **shown), **shown)


@routes.get("/ui/schedules/{schedule_id}/live", openapi_extra=needs(MAY))
async def follow_one(request: Request, schedule_id: str) -> Response:
    wanted = number("schedule", schedule_id)
    await _schedule(request, wanted)  # raises NotFound
    return live.stream(request, MAY, ONE, lambda: _schedule(request, wanted), _of_a_schedule)


def _of_a_schedule(message: Message) -> bool:
    return live.said(message, "schedule_id") is not None


async def _schedules(request: Request, filters: ListOffset) -> Context:
    tenant, now = caller_of(request).tenant, kit_of(request).clock.now()

    async def ask(connection: Connection) -> Context:
        rows = await list_schedules(connection, tenant, limit=SCHEDULES + 1, offset=filters.offset)
        last = [row["last_run_id"] for row in rows if row["last_run_id"] is not None]
        runs = await run_queries.list_runs(connection, tenant=tenant, ids=last, limit=len(rows), offset=0)
        return {
            "rows": rows,
            "own": await own_pages.of_schedules(connection, tenant, rows),
            "last": {run["id"]: run for run in runs},
            "stands": await figures.stands(connection, runs),
            "lacking": [] if rows else await lacking(connection, tenant, request.app.state.connections.given),
        }

    shown = await reads_of(request)(ask)
    rows = shown["rows"][:SCHEDULES]
    return {
        "schedules": rows,
        "own": shown["own"],
        "last": shown["last"],
        "stands": shown["stands"],
        "lacking": shown["lacking"],
        "ahead": {row["id"]: ahead(row, now, FIRES_IN_LIST) for row in rows},
        "buttons": {row["id"]: _often(request, row, HOME) for row in rows},
        "more": len(shown["rows"]) > SCHEDULES,
        "wanted": filters,
        "size": SCHEDULES,
        "busy": any(run["ended_at"] is None for run in shown["last"].values()),
        "over": False,
    }


async def _schedule(request: Request, schedule_id: int) -> Context:
    tenant, now = caller_of(request).tenant, kit_of(request).clock.now()

    async def ask(connection: Connection) -> Context:
        row = await show_schedule(connection, tenant, schedule_id)
        rows = await run_queries.list_runs(
            connection, tenant=tenant, schedule=schedule_id, folded=True, limit=RUNS, offset=0
        )
        rows = await figures.folded(connection, tenant, rows)
        plan = await plan_of(connection, tenant, schedule_id) if row["flow"] == AUTOMATION else None
        table = await figures.table(connection, tenant, rows)
        own = (await own_pages.of_schedules(connection, tenant, [row])).get(schedule_id)
        return {"schedule": row, "automated": row["flow"] == AUTOMATION, "plan": plan, "table": table, "own": own}

    shown = await reads_of(request)(ask)
    return {
        **shown,
        "ahead": ahead(shown["schedule"], now, FIRES),
        "has_runs": _has_runs(request, shown["schedule"]),
        "buttons": _all(request, shown["schedule"]),
        "busy": shown["table"].busy,
        "over": False,
    }


def _has_runs(request: Request, row: Row) -> bool:
    return row["flow"] not in own_pages.without_runs(kit_of(request).by_name)


def _often(request: Request, row: Row, back: str) -> list[Button]:
    names = ["run_schedule"] if _has_runs(request, row) else []
    names.append(f"{'disable' if row['enabled'] else 'enable'}_schedule_of_flow")
    return buttons(request, *((name, {"schedule_id": row["id"]}) for name in names), back=back)


def _all(request: Request, row: Row) -> list[Button]:
    """Return the buttons for a schedule on its own page. A schedule of automation is changed by an operation of its
    own, one of a flow without runs on the page that this flow has for it."""
    back = f"{HOME}/{row['id']}"
    names = ["change_automation_schedule" if row["flow"] == AUTOMATION else "change_schedule", "delete_schedule"]
    names = names if _has_runs(request, row) else names[1:]
    return _often(request, row, back) + buttons(
        request, *((name, {"schedule_id": row["id"]}) for name in names), back=back
    )
