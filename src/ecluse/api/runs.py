"""Routes of runs of every flow: list, show, explain, start, end. A run of another tenant is not found."""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import asdict
from functools import partial
from typing import Annotated

from ecluse.access.changes import record
from ecluse.access.commands import Command
from ecluse.access.envelope import Refused
from ecluse.access.listing import Filters, Listing, Where
from ecluse.access.surface import Act, Look, Noun, Surface
from ecluse.access.wire import (
    Filter,
    IdFilter,
    Instant,
    Limit,
    Offset,
    Order,
    TargetFilter,
    id_as_text,
    with_ids_as_text,
)
from ecluse.api import shapes
from ecluse.api.flows import named, run_of
from ecluse.base.errors import InvalidInput
from ecluse.db.query import Row
from ecluse.engine import Start, require_budget, start_runs
from ecluse.engine.work.completion import end_by_operator
from ecluse.insight import run_queries, targets
from ecluse.insight.previews import preview_end
from ecluse.insight.remarks import remarks
from ecluse.insight.waiting import why, why_run

surface = Surface("runs")
RunId = Annotated[int, Noun("run")]
# Event keys that callers choose are apart from those that are computed (slots, deliveries, redrives): a caller cannot
# take the key of a run that is due.
OF_CALLERS = "request:"
# In the words of the index `runs_listed`. Of a target, the child runs that work on it are wanted, too.
LISTED = (
    "(%(target)s::text IS NOT NULL OR t.parent_run_id IS NULL OR t.schedule_id IS NOT NULL)"
    " AND t.flow <> 'notifications'"
)
SELECTED = "t.id IN (SELECT o.run_id FROM outcomes o WHERE o.target = %(target)s)"


class RunFilters(Filters):
    flow: Annotated[Filter, Where("t.flow = %(flow)s", otherwise=LISTED)] = None
    state: Annotated[Filter, Where("(t.state = %(state)s OR (t.status = %(state)s AND t.state <> 'cancelled'))")] = None
    schedule_id: IdFilter = None
    target: Annotated[TargetFilter, Where(SELECTED)] = None
    since: Annotated[Instant, Where("t.created_at >= %(since)s")] = None
    until: Annotated[Instant, Where("t.created_at < %(until)s")] = None


class ItemFilters(Filters):
    stage: Filter = None
    status: Filter = None


RUNS = Listing("runs", shapes.RunRow, "runs", "runs.read", filters=RunFilters)
ITEMS = Listing(
    "items",
    shapes.ItemRow,
    targets.LISTED_ITEMS,
    "runs.read",
    filters=ItemFilters,
    order=("stage", "key"),
    within=("run_id",),
)


# Its groups say why all items wait; item by item it would be the same line again and again.
WHY = Command("runs why", hides=("waiting", "limit", "offset"))


async def exists(look: Look, run_id: int) -> None:
    """Raise NotFound if the tenant has no such run."""
    await run_queries.check_tenant(look.connection, look.tenant, run_id)


surface.listing(
    "/api/runs",
    RUNS,
    list_runs="List runs, the newest first. `state` is a neutral state or a flow's own status for it; cancelled runs"
    " are found by `cancelled` alone. `target`: runs that selected it. `since` and `until` compare the instant at which"
    " a run was created. Runs that other runs have started, and deliveries of notifications, which are runs too, are"
    " left out unless `flow` names their flow.",
    command=Command(
        "runs list",
        columns=("id", "flow", "status", "selected", "successful", "failed", "cancelled", "ignored", "created_at"),
        empty="no runs yet: `ecluse runs start FLOW`",
    ),
)
surface.listing(
    "/api/runs/{run_id}/items",
    ITEMS,
    check=exists,
    list_items="List the items of a run, by stage and key; without results of more than 10,000 bytes.",
    command=Command(
        "runs items", columns=("id", "stage", "key", "status", "in_flight", "executions", "error_code", "finished_at")
    ),
)


@surface.read("/api/runs/{run_id}", needs="runs.read", answer=shapes.RunInFull, command=Command("runs show"))
async def show_run(look: Look, run_id: RunId) -> Row:
    """Show one run in full, with its stages and their counts, and its outcomes by reason."""
    run = await run_queries.show_run(look.connection, look.tenant, run_id)
    return {**run, "redrives": [str(one) for one in run["redrives"]]}


@surface.read(
    "/api/runs/{run_id}/items/{item_id}", needs="runs.read", answer=shapes.ItemInFull, command=Command("runs item")
)
async def show_item(look: Look, run_id: RunId, item_id: Annotated[int, Noun("item")]) -> Row:
    """Show one item of a run with its whole result and its first 200 attempts."""
    return id_as_text(await targets.show_item(look.connection, look.tenant, run_id, item_id))


@surface.read("/api/runs/{run_id}/waiting", needs="runs.read", answer=shapes.WaitingPage, command=WHY)
async def why_waiting(look: Look, run_id: RunId, limit: Limit = 50, offset: Offset = 0) -> Row:
    """Explain why a run, and the runs that it waits for, wait: by cause, with counts and expected starts, and item by
    item."""
    budgets = look.kit.budgets
    waits = await why_run(look.connection, look.tenant, run_id, budgets)
    told = asdict(waits) | (await remarks(look.connection, run_id, waits))._asdict()
    items = await why(look.connection, look.tenant, run_id, limit=limit, offset=offset, budgets=budgets)
    for group in told["groups"]:
        with_ids_as_text(group["sample"])
    told["total"] = told.pop("waiting")
    return {**told, "waiting": with_ids_as_text([asdict(one) for one in items]), "limit": limit, "offset": offset}


@surface.read(
    "/api/runs/{run_id}/log",
    needs="runs.read",
    answer=shapes.LogPage,
    # `data`, which may be long, is last: the last column is not padded.
    command=Command("runs log", columns=("id", "at", "level", "message", "event_id", "count", "last_at", "data")),
)
async def list_log(look: Look, run_id: RunId, order: Order = "asc", limit: Limit = 50, offset: Offset = 0) -> Row:
    """List the log of a run, the oldest line first, or the newest first (`order=desc`)."""
    newest = order == "desc"
    rows = await run_queries.list_log(
        look.connection, look.tenant, run_id, newest_first=newest, limit=limit, offset=offset
    )
    total = await run_queries.count_log(look.connection, run_id)
    return {"log": with_ids_as_text(rows), "total": total, "limit": limit, "offset": offset}


@surface.operation(
    "POST",
    "/api/runs",
    needs="runs.write",
    answer=shapes.StartedRun,
    status=201,
    also={200: "The key was known; nothing new was started"},
    action="run.start",
    subject="run:{run_id}",
    refuses=("ALREADY_RUNNING", "CONFIG_INACTIVE", "KEY_TAKEN", "BUDGET_EXCEEDED", "NO_CONNECTION"),
    command=Command("runs start", arguments=("flow",), follows="run_id"),
)
async def start_run(act: Act, body: shapes.StartRun) -> Row:
    """Start a run of a loaded flow. With an `Idempotency-Key`, a repeated request gets the same answer."""
    flow, given_once = named(act, body.flow), act.idempotency_key
    if flow.not_by_hand:
        raise InvalidInput(flow.not_by_hand)
    # Without a key of the caller's: a repetition whose stored answer has been deleted still finds the first run.
    name = body.key or f"{body.flow}-{f'{given_once}-{await _digest(act)}' if given_once else uuid.uuid4()}"
    start = Start(
        flow,
        f"{OF_CALLERS}{name}",
        tenant_id=act.tenant,
        input=body.input,
        correlation_id=act.request_id,
        again=body.key is not None,
    )
    (started,) = await start_runs(act.connection, [start])
    if started.deduplicated:
        act.answers(200)
        act.changes_nothing()
    else:
        await require_budget(act.connection, start.flow, act.tenant)
    run = started.run
    return {"run_id": str(run.id), "event_key": run.event_key, "deduplicated": started.deduplicated}


async def _digest(act: Act) -> str:
    """Return a digest of the request's body, for the event key: an idempotency key that is reused for another request,
    after its stored answer has expired, must start a new run."""
    return hashlib.sha256(await act.request.body()).hexdigest()[:12]


@surface.read(
    "/api/runs/{run_id}/end", needs="runs.read", answer=shapes.EndPreview, refuses=("ALREADY_ENDED", "FLOW_NOT_LOADED")
)
async def preview_end_of_run(look: Look, run_id: RunId) -> Row:
    """Preview the end of the run: the number of targets that would be cancelled, and of runs that would end with it.
    Nothing is changed."""
    preview = await preview_end(look.connection, *await run_of(look, run_id, "read"))
    if preview["ended"]:
        raise _ended(run_id)
    return preview


@surface.operation(
    "POST",
    "/api/runs/{run_id}/end",
    needs="runs.write",
    answer=shapes.EndedRun,
    action=None,  # recorded by the end itself, before it is logged
    refuses=("ALREADY_ENDED", "FLOW_NOT_LOADED"),
    command=Command("runs end", preview="preview_end_of_run"),
)
async def end_run(act: Act, run_id: RunId, body: shapes.Reason) -> Row:
    """End a run now: it is cancelled, in the name of the caller's key and with this reason. No more items of it are
    started, nor of the runs that only it waits for; targets that are not finished get the code `CANCELLED`."""
    flow, run = await run_of(act, run_id, "write")
    recorded = partial(record, act.connection, act.request, "run.end", f"run:{run_id}", body.reason)
    if not await end_by_operator(act.connection, flow, run, body.reason, by=act.caller.name, record=recorded):
        raise _ended(run_id)
    return {"run_id": str(run_id), "ended": True}


def _ended(run_id: int) -> Refused:
    return Refused(409, "ALREADY_ENDED", f"Run {run_id} had ended already; nothing was changed.")
