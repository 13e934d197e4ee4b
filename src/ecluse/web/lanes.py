"""Page of the limits of calls: the lanes, with their load, caps, holds and pauses, and the budgets of paid calls."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from ecluse.access.door import caller_of, needs
from ecluse.access.listing import Listing, read_page
from ecluse.access.wire import reads_of
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_all, fetch_value
from ecluse.web import live, render
from ecluse.web.actions import buttons
from ecluse.web.authentication import Page
from ecluse.web.live import Context

routes = APIRouter(route_class=Page, include_in_schema=False)
MAY = "vendors.read"
LANES = "SELECT * FROM lane_list WHERE tenant_id = %s ORDER BY name"
TENANTS = "SELECT count(*) FROM tenants"
LIST = live.Page("lanes_live.html")
HERE = "/ui/lanes"
BUDGETS = 100  # on the page


@routes.get(HERE, openapi_extra=needs(MAY))
async def show_lanes(request: Request) -> Response:
    shown = await _lanes(request)
    return render.page(request, "lanes.html", regions=LIST.regions(request, **shown), **shown)


@routes.get("/ui/lanes/live", openapi_extra=needs(MAY))
async def follow_lanes(request: Request) -> Response:
    return live.stream(request, MAY, LIST, lambda: _lanes(request), lambda _: False)


async def _lanes(request: Request) -> Context:
    caller = caller_of(request)

    listing: Listing = request.app.state.listings["list_budgets"]  # every role that may read lanes may read budgets

    async def ask(connection: Connection) -> tuple[list[Row], int, Row]:
        budgets = await read_page(connection, caller, listing, {}, limit=BUDGETS)
        lanes = await fetch_all(connection, dict, LANES, (caller.tenant,))
        return lanes, await fetch_value(connection, TENANTS), budgets

    lanes, tenants, budgets = await reads_of(request)(ask)
    # With several tenants, only the administrators of the first one change the lanes that all share.
    may_shared = tenants == 1 or caller.administers_tenants
    for lane in lanes:
        may = may_shared or lane["owner"] == caller.tenant
        first, named = "pause_lane_now" if lane["paused_at"] is None else "resume_lane_now", {"name": lane["name"]}
        lane["caps"] = caps(lane)
        lane["buttons"] = buttons(request, (first, named), ("cap_lane", named), back=HERE) if may else []
    return {"lanes": lanes, **_budgets(request, budgets), "busy": True, "over": False}


def _budgets(request: Request, page: Row) -> Context:
    """Return the template variables for the budgets: those of `page`, a page of their list, with buttons."""
    rows = page["budgets"]
    for row in rows:
        same = {name: row[name] for name in ("amount", "schedule_id", "run_id")}
        same |= {"period": row["period"]} if row["period"] != "all" else {}
        row["buttons"] = [] if row["run_ended"] else buttons(request, ("put_budget", {}), back=HERE, **same)
        row["buttons"] += buttons(request, ("remove_budget", {"budget_id": row["id"]}), back=HERE)
    return {
        "budgets": rows,
        "more_budgets": page["next_cursor"] is not None,
        "new_budget": buttons(request, ("put_budget", {}), back=HERE),
    }


def caps(lane: Row) -> str:
    found = [f"{lane['max_in_flight']:,} in flight"] if lane["max_in_flight"] else []
    found += [f"{lane['max_per_key']:,} per key"] if lane["max_per_key"] else []
    if lane["per_second"]:
        slow = lane["per_second"] < 1
        found.append(f"{lane['per_second'] * (60 if slow else 1):g} per {'minute' if slow else 'second'}")
    return ", ".join(found) or "none"
