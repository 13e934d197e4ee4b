"""Pages of rule runs: the list, and one rule run in full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel

from ecluse.access.door import caller_of, needs
from ecluse.access.listing import Listing, read_page
from ecluse.access.wire import Filter, Offset, number, reads_of
from ecluse.base.text import count_of
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_all
from ecluse.engine import State
from ecluse.flows.connections.project_surface import PROJECTS, READ
from ecluse.flows.pricing.rules import REASONS
from ecluse.flows.pricing.run_surface import MISMATCHES, RECONCILIATIONS, RUNS, TARGETS
from ecluse.flows.pricing.runs import show_run
from ecluse.flows.pricing.shapes import RunStatus, TargetStatus
from ecluse.flows.pricing.states import APPLIED, FAILED, PARTIAL, PREVIEW
from ecluse.flows.pricing.states import RUNS as STATES
from ecluse.flows.pricing.surface import ALERTS
from ecluse.web import live, render
from ecluse.web.actions import Button, buttons
from ecluse.web.authentication import Page
from ecluse.web.live import Context
from ecluse.web.shops import HOME, MOST, Column, money

ROWS, OPEN_ALERTS, PASSES, MISMATCHED, MOVES = 25, 10, 10, 25, 20  # rows of each on a page

routes = APIRouter(route_class=Page, include_in_schema=False)
LIST = live.Page("pricing_live.html")
REGIONS = ("title", "header", "alerts", "targets", "executions", "reconciliations", "history")
ONE = live.Page("rule_run_live.html", REGIONS)
NAMED = """
SELECT r.id::text AS id, p.name AS project, p.deleted_at IS NOT NULL AS is_gone,
       coalesce(u.name, 'Correction of #' || r.corrects_id, 'Rule run') || ' #' || r.id AS name
FROM rule_runs r JOIN pricing_projects p ON p.id = r.project_id LEFT JOIN pricing_rules u ON u.id = r.rule_id
WHERE r.id = ANY(%s::bigint[])
"""
# Changes of the run itself; those of a target are in the API.
HISTORY = """
SELECT from_status, to_status, round, actor, source, at FROM rule_history
WHERE rule_run_id = %s AND rule_target_id IS NULL ORDER BY id DESC LIMIT %s
"""


class ListFilters(BaseModel):
    """Filters and offset of the list of rule runs."""

    project: Filter = None
    rule: Filter = None
    status: RunStatus | None = None
    offset: Offset = 0


class Part(BaseModel):
    """Query parameters of the page of one rule run: status filter and offset of its targets."""

    status: TargetStatus | None = None
    targets: Offset = 0


FiltersOfList = Annotated[ListFilters, Query()]
PartOfRun = Annotated[Part, Query()]


@routes.get(HOME, openapi_extra=needs(READ))
async def show_runs(request: Request, filters: FiltersOfList) -> Response:
    shown = await _runs(request, filters)
    return render.page(request, "pricing.html", regions=LIST.regions(request, **shown), **shown)


@routes.get(f"{HOME}/live", openapi_extra=needs(READ))
async def follow_runs(request: Request, filters: FiltersOfList) -> Response:
    return live.stream(
        request, READ, LIST, lambda: _runs(request, filters), lambda message: live.said(message, "runId") is not None
    )


@routes.get(f"{HOME}/runs/{{rule_run_id}}", openapi_extra=needs(READ))
async def show_one(request: Request, rule_run_id: str, part: PartOfRun) -> Response:
    shown = await _run(request, number("rule run", rule_run_id), part)
    return render.page(request, "rule_run.html", regions=ONE.regions(request, **shown), **shown)


@routes.get(f"{HOME}/runs/{{rule_run_id}}/live", openapi_extra=needs(READ))
async def follow_one(request: Request, rule_run_id: str, part: PartOfRun) -> Response:
    wanted = number("rule run", rule_run_id)
    await _run(request, wanted, part)  # raises NotFound
    return live.stream(
        request,
        READ,
        ONE,
        lambda: _run(request, wanted, part),
        lambda message: live.said(message, "runId") == str(wanted),
    )


async def _runs(request: Request, filters: ListFilters) -> Context:
    given = {
        "project_id": number("project", filters.project) if filters.project else None,
        "rule_id": number("rule", filters.rule) if filters.rule else None,
        "status": filters.status,
    }
    caller = caller_of(request)

    async def ask(connection: Connection) -> tuple[list[Row], list[Row], dict[str, Row]]:
        projects = await read_page(connection, caller, PROJECTS, {}, limit=MOST)
        found = await read_page(connection, caller, RUNS, given, limit=ROWS + 1, offset=filters.offset)
        rows: list[Row] = found[RUNS.name]
        named = await fetch_all(connection, dict, NAMED, ([row["id"] for row in rows],))
        return projects[PROJECTS.name], rows, {one["id"]: one for one in named}

    projects, rows, named = await reads_of(request)(ask)
    for row in rows:
        row |= named[row["id"]]
        row["changed"] = (row["totals"] or {}).get("changed")
        row["state"], row["href"] = _state(row), f"{HOME}/runs/{row['id']}"
        row["reason"] = row["stopped_reason"] or render.NONE
    columns = (
        Column("name", "Run"),
        Column("status", "Status"),
        Column("project", "Project"),
        Column("changed", "Targets", figure=True),
        Column("round", "Retry round", figure=True),
        Column("actor", "By"),
        Column("created_at", "Created"),
        Column("finished_at", "Finished"),
        Column("reason", "Reason"),
    )
    return {
        "wanted": filters,
        "rows": rows[:ROWS],
        "columns": columns,
        "projects": projects,
        "statuses": list(STATES.meaning),
        "new": buttons(request, ("preview_rule", {}), back=HOME),
        "more": len(rows) > ROWS,
        "size": ROWS,
        "busy": any(row["status"] in ("QUEUED", "APPLYING") for row in rows),
        "over": False,
    }


async def _run(request: Request, run_id: int, part: Part) -> Context:
    caller = caller_of(request)

    async def ask(connection: Connection) -> Context:
        async def listed(listing: Listing, limit: int, offset: int = 0, **given: Any) -> list[Row]:
            page = await read_page(connection, caller, listing, given, limit=limit, offset=offset)
            found: list[Row] = page[listing.name]
            return found

        run, within = await show_run(connection, caller.tenant, run_id), {"rule_run_id": run_id}
        return {
            "run": run,
            **(await fetch_all(connection, dict, NAMED, ([run_id],)))[0],
            "targets": await listed(TARGETS, ROWS + 1, part.targets, **within, status=part.status),
            "alerts": await listed(ALERTS, OPEN_ALERTS, project_id=run["project_id"], open=True),
            "passes": await listed(RECONCILIATIONS, PASSES, **within),
            "mismatches": await listed(MISMATCHES, MISMATCHED, **within),
            "moves": await fetch_all(connection, dict, HISTORY, (run_id, MOVES)),
        }

    shown = await reads_of(request)(ask)
    run = shown["run"]
    open_ = [one for one in run["executions"] if one["created_at"] and not one["ended_at"]]
    for one in shown["targets"]:
        one["state"] = STATES.meaning[one["status"]]
        one["difference"] = money(one["after_amount"] - one["before_amount"], run["currency"])
    return {
        **shown,
        "title": f"{shown['name']} {run['status']} · Ecluse",
        "sentence": sentence(run, open_),
        "state": _state(run),
        "no_plan": None if run["plan_hash"] else _sentence(run["stopped_reason"]),
        "states": STATES.meaning,
        "money": lambda amount: money(amount, run["currency"]),
        "excluded": [(REASONS[code], n) for code, n in ((run["totals"] or {}).get("excluded") or {}).items()],
        "buttons": _buttons(request, run, open_, bool(shown["mismatches"])),
        "part": part,
        "size": ROWS,
        "busy": bool(open_),
        "over": False,
    }


def _state(run: Row) -> State:
    """Return the state in whose colour the status of a rule run is shown: a preview that failed keeps its status."""
    failed = run["status"] == PREVIEW and run["plan_hash"] is None and run["stopped_reason"]
    return State.FAILED if failed else STATES.meaning[run["status"]]


def _buttons(request: Request, run: Row, open_: Sequence[Row], mismatched: bool) -> list[Button]:
    """Return the buttons for a rule run in its present state. While an execution is under way (`open_`), it can only be
    ended."""
    one, back = {"rule_run_id": run["id"]}, f"{HOME}/runs/{run['id']}"
    if open_:
        ends = buttons(request, ("end_run", {"run_id": open_[0]["run_id"]}), back=back)
        return [button._replace(label=f"End {open_[0]['kind']}") for button in ends]
    failed, applied = run["counts"].get(FAILED, 0), run["counts"].get(APPLIED, 0)
    found: list[Button] = []
    if run["status"] == PREVIEW and run["plan_hash"] and run["counts"]:
        found += buttons(request, ("queue_rule_run", one), back=back, plan_hash=run["plan_hash"])
    if run["status"] == PREVIEW and not run["plan_hash"]:
        again = buttons(request, ("preview_rule", {}), back=HOME, rule_id=run["rule_id"])
        found += [button._replace(label="Preview again") for button in again]
    if failed:
        again = buttons(request, ("retry_rule_run", one), back=back)
        found += [button._replace(label=f"{button.label} ({failed})") for button in again]
    if run["status"] in (APPLIED, PARTIAL):
        found += buttons(request, ("reconcile_rule_run", one), back=back)
        found += buttons(request, ("correct_rule_run", one), back=back) if mismatched else []
    if run["status"] in (APPLIED, PARTIAL) and applied:
        found += buttons(request, ("roll_back_rule_run", one), back=back)
    return found


def sentence(run: Row, open_: Sequence[Row]) -> str:
    """Describe in one sentence what a rule run would do, is doing, or has done. `open_`: its open executions."""
    counts: Mapping[str, int] = run["counts"]
    total = sum(counts.values())
    if open_:
        of = count_of(total, "target is", "targets are")
        applied, restored = counts.get(APPLIED, 0), counts.get("ROLLED_BACK", 0)
        settled = applied + restored + counts.get(FAILED, 0)
        back = count_of(restored, "price is", "prices are")
        doing = {
            "preview": "The catalogue is being read.",
            "apply": f"Apply is under way: {settled:,} of {of} settled.",
            "rollback": f"Rollback is under way: {back} restored, {applied:,} still as applied.",
            "reconcile": "The applied prices are being compared with the shop.",
        }
        return doing[open_[0]["kind"]]
    match run["status"]:
        case "PREVIEW" if run["plan_hash"] is None:
            return "There is no plan: the preview failed." if run["stopped_reason"] else "The plan is not made yet."
        case "PREVIEW":
            return f"{count_of(total, 'price')} would change. Nothing is changed until the run is queued."
        case _ if run["stopped_reason"]:
            return f"Stopped: {run['stopped_reason']}."
    said = ", ".join(f"{n:,} {status.lower().replace('_', ' ')}" for status, n in sorted(counts.items()))
    return f"{said} of {count_of(total, 'target')}."


def _sentence(reason: str | None) -> str | None:
    return reason and reason[0].upper() + reason[1:]
