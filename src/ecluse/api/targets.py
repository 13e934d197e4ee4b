"""Routes of targets of runs: their outcomes, one target in full, and all runs that selected a target."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from ecluse.access.commands import Command
from ecluse.access.listing import Filters, Listing, Where
from ecluse.access.surface import Look, Noun, Surface
from ecluse.access.wire import Filter, Shape, TargetFilter, with_ids_as_text
from ecluse.api.runs import exists
from ecluse.api.shapes import Id, ItemInFull, LogRow, WaitingRow
from ecluse.base.errors import NotFound
from ecluse.base.text import storable
from ecluse.db.query import Row, fetch_value
from ecluse.engine import State
from ecluse.insight import targets

surface = Surface("targets")

Outcome = Literal["successful", "failed", "ignored"]
ANY_RUN = """
SELECT 1 FROM outcomes o JOIN runs r ON r.id = o.run_id WHERE o.target = %s AND r.tenant_id = %s LIMIT 1
"""


class TargetRow(Shape):
    target: str = Field(examples=["171234"])
    outcome: Outcome | None = Field(description="null: the target is open.")
    error_code: str | None
    reason: str | None
    effect_may_exist: bool = Field(description="Failed, but a write of it has or may have been applied.")


class TargetFilters(Filters):
    outcome: Annotated[
        Literal["open", "successful", "failed", "ignored"] | None, Where("coalesce(t.outcome, 'open') = %(outcome)s")
    ] = None
    error_code: Filter = None
    target: TargetFilter = None


class TargetRunRow(TargetRow):
    run_id: Id
    flow: str
    schedule_id: Id | None
    status: str
    state: State
    created_at: datetime
    ended_at: datetime | None


class Effect(Shape):
    """A write at a vendor, recorded before it is sent."""

    id: str
    stage: str
    key: str
    round: int
    kind: Literal["C1", "C2"] = Field(description="C1: the vendor honours the key; C2: a write that can be read back.")
    state: Literal["planned", "sending", "unknown", "applied", "rejected", "not_applied", "conflict"]
    wanted: Any
    before: Any
    result: Any
    error: str | None
    sends: int
    first_send_at: datetime | None
    last_send_at: datetime | None
    settled_at: datetime | None


class RunForTarget(Shape):
    id: Id
    flow: str
    status: str
    state: State
    selected: int | None
    successful: int | None
    failed: int | None
    ignored: int | None
    created_at: datetime
    ended_at: datetime | None


class Expected(Shape):
    code: str
    reason: str | None


class TargetInFull(TargetRow):
    """A target of a run in full. Each list has at most its first 200 rows."""

    run_id: Id
    will_fail: Expected | None = Field(description="It has no outcome yet, but is known to fail.")
    items: list[ItemInFull]
    effects: list[Effect]
    log: list[LogRow] = Field(description="Lines of the run's log that name it.")
    runs: list[RunForTarget] = Field(description="Runs that this run waits for because of it, the newest first.")
    waiting: list[WaitingRow] = Field(description="Why its items wait; empty once it has an outcome.")


TARGETS = Listing(
    "targets",
    TargetRow,
    "run_targets",
    "runs.read",
    filters=TargetFilters,
    order=("target",),
    within=("run_id",),
)
RUNS_OF_TARGET = Listing("runs", TargetRunRow, "run_targets", "runs.read", order=("-run_id",), named=("target",))


async def known(look: Look, target: str) -> None:
    """Raise NotFound if no run of the tenant has selected this target."""
    if await fetch_value(look.connection, ANY_RUN, (target, look.tenant)) is None:
        raise NotFound(f"There is no run with the target {storable(target, 50)}.")


surface.listing(
    "/api/runs/{run_id}/targets",
    TARGETS,
    check=exists,
    list_targets="List the targets of a run with their outcomes, by target.",
    command=Command("runs targets", columns=("target", "outcome", "error_code", "reason")),
)


@surface.read(
    "/api/runs/{run_id}/targets/{target:text}",
    needs="runs.read",
    answer=TargetInFull,
    command=Command("runs target", example="ecluse runs target 7 171234"),
)
async def show_target(look: Look, run_id: Annotated[int, Noun("run")], target: str) -> Row:
    """Show one target of a run in full: its items with every attempt, its writes at vendors, the log lines that name
    it, the runs started for it, and why it waits."""
    found = await targets.show_target(look.connection, look.tenant, run_id, target)
    for name in ("items", "log", "runs", "waiting"):
        with_ids_as_text(found[name])
    return found


surface.listing(
    "/api/targets/{target:text}",
    RUNS_OF_TARGET,
    check=known,
    list_runs_of_target="List all runs that selected this target, the newest first, with its outcome in each.",
    command=Command("targets", columns=("run_id", "flow", "status", "outcome", "error_code", "created_at")),
)
