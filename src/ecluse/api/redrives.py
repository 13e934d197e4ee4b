"""Routes for redrives of runs of every flow: a preview, and the start."""

from __future__ import annotations

from typing import Annotated

from fastapi import Body as InBody
from pydantic import Field

from ecluse.access.commands import Command
from ecluse.access.surface import Act, Look, Noun, Surface
from ecluse.access.wire import Body, Filter, Shape
from ecluse.api.flows import run_of
from ecluse.db.query import Row
from ecluse.engine import Choice, preview_redrive, redrive, redrive_of
from ecluse.engine.runs.redrive import Which

surface = Surface("runs")
PATH = "/api/runs/{run_id}/redrive"
RunNumber = Annotated[int, Noun("run")]
WHICH = "`failed`: those that were not cancelled; `cancelled`: those that were never finished; `all`: both."
Text = Annotated[str, Field(min_length=1, max_length=200)]


class RedriveChoice(Body):
    """The choice of the failed targets to repeat."""

    outcome: Which = Field("failed", description=WHICH)
    error_code: Text | None = Field(None, examples=["TIMEOUT"], description="Only targets with this error code.")
    stage: Text | None = Field(None, examples=["audit"], description="Only targets that failed at this stage.")
    leave_out_hopeless: bool = Field(
        False, description="Leave out targets that cannot succeed as they are (see the preview)."
    )
    include_succeeded: bool = Field(
        False, description="Also repeat targets that have succeeded since, in a redrive of this run."
    )


class RedriveCause(Shape):
    error_code: str | None = Field(examples=["NO_URL"])
    count: int
    target: str = Field(description="An example: one of these targets.")
    error: str | None = Field(description="The error of that target.")


class RedriveGroup(RedriveCause):
    cannot_succeed: int = Field(description="The number of these targets that cannot succeed as they are.")


class RedrivePreview(Shape):
    run_id: str
    flow: str
    count: int = Field(description="The number of targets that the redrive would take.")
    failed: int = Field(description="Targets of the run that failed, without the cancelled ones.")
    cancelled: int = Field(description="Targets that were cancelled before they were finished.")
    succeeded_since: int = Field(
        description="Targets that have succeeded since, in a redrive of this run. They are left out by default."
    )
    succeeded_in: list[str] = Field(description="The redrives in which they have succeeded.")
    cannot_succeed: int = Field(description="The number of chosen targets that cannot succeed as they are.")
    groups: list[RedriveGroup] = Field(description="The chosen targets by error code, the most frequent first.")
    causes: list[RedriveCause] = Field(description="Why targets cannot succeed, the most frequent cause first.")
    calls: dict[str, int] = Field(
        description="Calls to be made, by kind, as far as known.", examples=[{"transcripts": 12, "audits": 40}]
    )
    expected_seconds: float | None = Field(description="Estimated by the rates of the lanes; null: not known.")
    expected_cost: str | None = Field(
        description="Estimated by the recent cost of audits and the price of transcripts; null: not known."
    )
    without_cost: list[str] = Field(
        description="Kinds of calls whose cost is not known: the expected cost does not include them."
    )


class RedrivenRun(Shape):
    run_id: str
    event_key: str
    parent_run_id: str = Field(description="The run whose targets are repeated.")
    deduplicated: bool = Field(description="True: an earlier redrive is still open, and this is its run.")


@surface.read(
    PATH,
    needs="runs.read",
    answer=RedrivePreview,
    refuses=("RUN_NOT_ENDED", "SCHEDULE_GONE", "NO_REDRIVE", "FLOW_NOT_LOADED"),
)
async def preview_redrive_of_run(
    look: Look,
    run_id: RunNumber,
    outcome: Which = "failed",
    error_code: Filter = None,
    stage: Filter = None,
    leave_out_hopeless: bool = False,
    include_succeeded: bool = False,
) -> Row:
    """Preview a redrive: the number of targets by error code, which of them cannot succeed as they are or have
    succeeded since, and the expected calls, time and cost. Nothing is started."""
    flow, run = await run_of(look, run_id, "read")
    choice = Choice(outcome, error_code, stage, leave_out_hopeless, include_succeeded)
    return await preview_redrive(look.connection, redrive_of(flow), run, choice)


@surface.operation(
    "POST",
    PATH,
    needs="runs.write",
    answer=RedrivenRun,
    status=201,
    also={200: "The redrive of this run is still open; nothing new was started"},
    action="run.redrive",
    subject="run:{parent_run_id}",
    refuses=(
        "RUN_NOT_ENDED",
        "SCHEDULE_GONE",
        "SCHEDULE_INACTIVE",
        "BUDGET_EXCEEDED",
        "NOTHING_FAILED",
        "ONLY_CANCELLED",
        "ONLY_HOPELESS",
        "NOTHING_CHOSEN",
        "SUCCEEDED_SINCE",
        "NO_REDRIVE",
        "FLOW_NOT_LOADED",
        "NO_CONNECTION",
    ),
    command=Command("runs redrive", preview="preview_redrive_of_run", follows="run_id", hides=("causes",)),
)
async def redrive_run(
    act: Act, run_id: RunNumber, body: Annotated[RedriveChoice | None, InBody(examples=[{"outcome": "all"}])] = None
) -> Row:
    """Start a new run over targets that failed in this one and have not succeeded since, linked to it. While the new
    run is open, a repeated request returns it."""
    flow, run = await run_of(act, run_id, "write")
    choice = Choice(**(body or RedriveChoice()).model_dump())
    started = await redrive(act.connection, flow, run, choice, correlation_id=act.request_id)
    if started.deduplicated:
        act.answers(200)
        act.changes_nothing()
    new = started.run
    return {
        "run_id": str(new.id),
        "event_key": new.event_key,
        "parent_run_id": str(run_id),
        "deduplicated": started.deduplicated,
    }
