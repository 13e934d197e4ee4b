"""Routes of lanes: load and state of each, pause, resume and caps. A change to a lane that all tenants share applies to
every tenant; a lane with an owner is listed for that tenant alone."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from ecluse.access.commands import Command
from ecluse.access.envelope import Refused
from ecluse.access.listing import Listing
from ecluse.access.surface import Act, Look, Surface
from ecluse.access.tenants import DEFAULT
from ecluse.access.wire import Body, Shape, with_ids_as_text
from ecluse.api.shapes import Id, Reason
from ecluse.base.errors import NotFound
from ecluse.base.text import storable
from ecluse.db.query import Row, fetch_one, fetch_value
from ecluse.engine import needing_lane, pause_lane, resume_lane, set_lane_caps

surface = Surface("lanes")

Count = Annotated[int, Field(ge=1, le=1_000_000, examples=[10])]
Rate = Annotated[float, Field(ge=0.0001, le=100_000, examples=[2.5])]
CLEARS = "If cleared: as the flows declare it."


class LaneRow(Shape):
    name: str = Field(examples=["crm"])
    state: Literal["open", "paused", "down", "held"] = Field(
        description="`paused` by an operator, `down`: its breaker is open, `held` until `held_until`, or `open`."
    )
    owner: str | None = Field(description="Tenant whose credential it is for; null: shared by all tenants.")
    max_in_flight: int | None = Field(description="Maximum calls in flight, over all replicas and tenants.")
    max_per_key: int | None
    per_second: float | None
    burst: int
    overrides: dict[str, Any] = Field(description="Caps that an operator has set instead of the flows' own.")
    in_flight: int = Field(description="Calls of this tenant in flight.")
    waiting: int = Field(description="Waiting items of this tenant.")
    shared: bool = Field(description="Other tenants have work in this lane now.")
    paused_at: datetime | None
    paused_by: str | None = Field(description="Known to the tenant `default` only.")
    paused_reason: str | None
    clock_stopped_at: datetime | None = Field(description="Since then no stage that needs the lane times out.")
    held_until: datetime | None = Field(description="Closed until then by a Retry-After or an open breaker.")
    held_reason: str | None
    down_since: datetime | None = Field(description="The breaker is open: no call has been answered since then.")
    last_failure: str | None
    vendor_per_second: float | None = Field(description="Rate that the vendor's own budget allows, as its answers say.")
    slowed_to: float | None = Field(description="Share of the rate that is used until `slowed_until`.", examples=[0.5])
    slowed_until: datetime | None
    slowed_reason: str | None


class PauseLane(Reason):
    stop_clock: bool = Field(False, description="No stage that needs the lane times out until it is resumed.")


class LaneCaps(Body):
    """Changes to the caps of a lane: fields that are left out stay as they are, and null clears a cap."""

    max_in_flight: Count | None = Field(None, description=CLEARS, examples=[5])
    max_per_key: Count | None = Field(None, description=CLEARS)
    per_second: Rate | None = Field(None, description=CLEARS)
    burst: Count | None = Field(None, description=CLEARS)
    reason: str | None = Field(None, min_length=1, max_length=2000)


class StageNeedingLane(Shape):
    run_id: Id
    tenant_id: str
    flow: str
    stage: str
    waiting: int = Field(description="Items that wait in the lane, of the run or of runs that it waits for.")
    deadline_at: datetime = Field(description="Items that still wait then fail, unless the clock is stopped.")


class LanePreview(Shape):
    name: str
    paused_at: datetime | None
    clock_stopped_at: datetime | None
    stages: list[StageNeedingLane] = Field(description="Stages that need the lane, the earliest deadline first.")


class MovedStage(Shape):
    run_id: Id
    tenant_id: str
    flow: str
    stage: str
    deadline_at: datetime
    by_seconds: float = Field(description="The time for which its clock was stopped.")


class ResumedLane(Shape):
    name: str
    resumed: bool = Field(description="True if it was paused before.")
    note: str | None = Field(description="If it was not paused: whether calls start, and when; otherwise null.")
    moved: list[MovedStage] = Field(description="Stages whose deadlines moved.")


def _with_state(lane: Row) -> Row:
    because = {"paused": "paused_at", "down": "down_since", "held": "held_until"}
    return {**lane, "state": next((state for state, why in because.items() if lane[why] is not None), "open")}


LANES = Listing("lanes", LaneRow, "lane_list", "vendors.read", order=("name",), shown=_with_state, added=("state",))
COLUMNS = ", ".join(name for name in LaneRow.model_fields if name != "state")
ONE = f"SELECT {COLUMNS} FROM lane_list WHERE tenant_id = %s AND name = %s"  # noqa: S608 - our own names

surface.listing(
    "/api/lanes",
    LANES,
    list_lanes="List the lanes with their caps, load and state. Counts are of the caller's own tenant.",
    command=Command(
        "lanes list",
        columns=(
            "name",
            "owner",
            "state",
            "max_in_flight",
            "per_second",
            "in_flight",
            "waiting",
            "paused_reason",
            "held_until",
            "slowed_to",
        ),
        empty="no lanes yet: a server creates the lanes of its flows when it starts",
    ),
)


@surface.read("/api/lanes/{name:path}/pause", needs="vendors.read", answer=LanePreview)
async def preview_pause_of_lane(look: Look, name: str) -> Row:
    """Preview a pause: the stages that need the lane, and when each times out if its clock is not stopped."""
    return await _preview(look, name)


@surface.read("/api/lanes/{name:path}/resume", needs="vendors.read", answer=LanePreview)
async def preview_resume_of_lane(look: Look, name: str) -> Row:
    """Preview a resume: the stages that need the lane. If their clock is stopped, their deadlines will move by the time
    for which it was stopped."""
    return await _preview(look, name)


# The last of the routes to read a lane: the name of a lane made at run time has a slash.
@surface.read("/api/lanes/{name:path}", needs="vendors.read", answer=LaneRow, command=Command("lanes show"))
async def show_lane(look: Look, name: str) -> Row:
    """Show one lane."""
    found = await fetch_one(look.connection, dict, ONE, (look.tenant, name))
    if found is None:
        raise NotFound(f"There is no lane {storable(name, 50)}.")
    return _with_state(found)


async def _preview(look: Look, name: str) -> Row:
    lane = await show_lane(look, name)
    found = [one._asdict() for one in await needing_lane(look.connection, name)]
    stages = [one for one in found if look.caller.administers_tenants or one["tenant_id"] == look.tenant]
    kept = {one: lane[one] for one in ("name", "paused_at", "clock_stopped_at")}
    return {**kept, "stages": with_ids_as_text(stages)}


@surface.operation(
    "POST",
    "/api/lanes/{name:path}/pause",
    needs="vendors.write",
    answer=LaneRow,
    action="lane.pause",
    subject="lane:{name}",
    command=Command("lanes pause", preview="preview_pause_of_lane"),
)
async def pause_lane_now(act: Act, name: str, body: PauseLane) -> Row:
    """Pause a lane: no replica starts its items until it is resumed; calls in flight finish. Stages that need the lane
    still time out, unless their clock is stopped."""
    await _check_right(act, name)
    await pause_lane(act.connection, name, reason=body.reason, by=act.caller.name, stop_clock=body.stop_clock)
    return await show_lane(act, name)


@surface.operation(
    "POST",
    "/api/lanes/{name:path}/resume",
    needs="vendors.write",
    answer=ResumedLane,
    action="lane.resume",
    subject="lane:{name}",
    command=Command("lanes resume", preview="preview_resume_of_lane"),
)
async def resume_lane_now(act: Act, name: str, body: Reason) -> Row:
    """Resume a paused lane, at once. The deadline of each stage moves by the time for which its clock was stopped."""
    await _check_right(act, name)
    moved = await resume_lane(act.connection, name, reason=body.reason, by=act.caller.name)
    if moved is None:
        act.changes_nothing()
    note = None if moved is not None else _not_paused(await show_lane(act, name))
    rows = [one._asdict() for one in moved or ()]
    for row in rows:
        row["by_seconds"] = row.pop("by").total_seconds()
    return {"name": name, "resumed": moved is not None, "note": note, "moved": with_ids_as_text(rows)}


@surface.operation(
    "PATCH",
    "/api/lanes/{name:path}",
    needs="vendors.write",
    answer=LaneRow,
    action="lane.cap",
    subject="lane:{name}",
    command=Command("lanes cap", preview="show_lane", example="ecluse lanes cap crm --max-in-flight 5"),
)
async def cap_lane(act: Act, name: str, body: LaneCaps) -> Row:
    """Change the caps of a lane while workers run. They apply to the next calls of every replica, also after restarts,
    until they are cleared with null."""
    await _check_right(act, name)
    changes = body.model_dump(exclude_unset=True, exclude={"reason"})
    if changes:
        await set_lane_caps(act.connection, name, changes, by=act.caller.name)
    else:
        act.changes_nothing()
    return await show_lane(act, name)


def _not_paused(lane: Row) -> str:
    until, state = lane["held_until"], lane["state"]
    if state == "open":
        return "The lane was not paused: its calls start."
    when = "with the next call" if until is None else f"at {until:%Y-%m-%d %H:%M:%S}Z"
    why = "its vendor is down, and is tried again" if state == "down" else "it is held, and opens"
    return f"The lane was not paused: {why} {when}."


async def _check_right(act: Act, name: str) -> None:
    """Raise Refused if the caller may not change the lane: it is shared, there are other tenants, and the caller's key
    is no admin key of the tenant `default`. Raise NotFound if there is no such lane."""
    lane = await show_lane(act, name)
    if act.caller.administers_tenants or lane["owner"] == act.tenant:
        return
    if await fetch_value(act.connection, "SELECT count(*) FROM tenants") > 1:
        message = f"Lane {name} is shared by all tenants: only an admin key of the tenant {DEFAULT} may change it."
        raise Refused(403, "FORBIDDEN", message)
