"""Models of bodies and answers, for the OpenAPI document. Answers are not built through these models: a test compares
the two."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from ecluse.access.wire import Body, Page, Shape, StageRow, Standing, WillFail
from ecluse.engine import EndCause, State
from ecluse.insight.causes import Cause

Id = str
Role = Literal["viewer", "operator", "admin"]


class Me(Shape):
    key_id: Id
    tenant_id: str
    role: Role
    scope: Literal["ALL", "GROUP", "SELF"]
    groupes: list[str]
    crm_user_id: str | None
    permissions: list[str]


class RealtimeAccess(Shape):
    enabled: bool
    why_not: str | None = Field(description="What to do about it, if it is not.")
    app_id: str | None = Field(examples=["1001"])
    key: str | None = Field(description="The app's public key: the first argument of `new Pusher(…)`.")
    cluster: str | None = Field(description="Of hosted Pusher; null: connect to this server.")
    host: str | None = Field(description="Of hosted Pusher, where it is another than the cluster's.")
    ws_path: str | None = Field(description="Where sockets connect on this server.", examples=["/app/5f0c…"])
    auth_endpoint: Literal["/pusher/auth"]
    events_endpoint: Literal["/api/events"]
    private_channels: bool = Field(description="`private-fiche-…`; false: `fiche-…`, without a right to be asked for.")


class ChannelAuth(Shape):
    auth: str = Field(examples=["5f0c…:58df8b0c…"])


class RunRow(Shape):
    id: Id
    tenant_id: str
    flow: str
    event_key: str = Field(description="Names the decision to run; unique per tenant.")
    parent_run_id: Id | None
    redrive_of: Id | None = Field(description="The run whose targets it takes once more.")
    schedule_id: Id | None
    correlation_id: str | None
    status: str = Field(description="The flow's own word.")
    state: State = Field(
        description="The neutral one. `cancelled`: ended on request; `status` then says what came of the targets."
    )
    phase: str | None = Field(description="null once it has ended.")
    selected: int | None
    successful: int | None
    failed: int | None
    ignored: int | None
    cancelled: int = Field(description="Of `failed`: targets that were never finished, because the run was cancelled.")
    reason: str | None
    error_code: str | None
    end_cause: EndCause | None
    ended_by: str | None = Field(description="Of a cancelled run: the person, or `run:<id>` if it ended with that run.")
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None


class RunInFull(RunRow):
    orchestrated: bool
    input: dict[str, Any]
    error_message: str | None
    error_details: Any
    stages: list[StageRow]
    outcomes: dict[str, int] = Field(description="How many targets by reason; successes under their own name.")
    will_fail: WillFail
    redrives: list[Id]
    after_redrives: Standing | None = Field(
        description="The latest outcome of each target, over the run and its redrives; null without redrives."
    )
    selection_incomplete: str | None = Field(description="What its selection lacks, and why; null: nothing.")


class ItemRow(Shape):
    id: Id
    event_id: str
    stage: str
    key: str
    target: str
    lane: str
    status: Literal["open", "succeeded", "failed", "ignored"]
    in_flight: bool
    permanent: bool
    round: int
    executions: int
    crashes: int
    error_code: str | None
    error: str | None
    result: Any
    due_at: datetime
    finished_at: datetime | None


class WaitingRow(Shape):
    item_id: Id
    run_id: Id = Field(description="The run asked about, or one that it waits for.")
    key: str
    target: str
    stage: str
    lane: str
    cause: Cause
    detail: str = Field(description="The same for people: until when, how many before it.")
    position: int | None = Field(description="How many go before it; null: it is not in line yet, or far behind.")
    expected_at: datetime | None


class WaitingExample(Shape):
    run_id: Id
    key: str
    target: str


class WaitingGroup(Shape):
    cause: Cause = Field(
        description="`paused` by an operator, `held` after a Retry-After, `breaker` open, `throttled` by a rate, cap "
        "`in flight` or `per key` used up, a `lease` of another run, `postponed` by its flow, `retry` after a failure, "
        "`window`: not due yet, `suspect` of killing workers, `no worker` there, `queued` for a worker slot, `gate`: "
        "the run itself waits, for calls in flight or its next step."
    )
    flow: str
    stage: str | None
    lane: str | None = Field(description="null: the run itself waits, none of its items.")
    count: int = Field(description="Items that wait; of a `gate`, the calls in flight.")
    detail: str = Field(description="The same for people.")
    since: datetime | None = Field(description="When the pause, or the oldest call in flight, began.")
    first_at: datetime | None = Field(description="When the first of them is expected to start.")
    last_at: datetime | None = Field(description="When the last is, at the earliest.")
    sample: list[WaitingExample]


class WaitingPage(Page):
    """Why a run, and all the runs that it waits for, wait."""

    summary: str = Field(description="One sentence for all of it.")
    total: int = Field(description="Items that wait.")
    in_flight: int = Field(description="Calls under way.")
    in_flight_since: datetime | None = Field(description="The oldest of them.")
    progress_at: datetime | None = Field(description="When something was last done; null once the run has ended.")
    blocked: bool = Field(description="Nothing is in flight, and nothing starts before its cause is gone.")
    groups: list[WaitingGroup] = Field(description="By cause, the most frequent first.")
    waiting: list[WaitingRow] = Field(description="A page of the items, in their order.")


class LogRow(Shape):
    id: Id
    at: datetime
    level: Literal["info", "warning", "error"]
    message: str
    event_id: str | None
    data: Any
    count: int = Field(description="How often it was said: from `at` to `last_at`.")
    targets: list[str] | None = Field(description="Targets it is about, the first five.")
    last_at: datetime | None


class LogPage(Page):
    log: list[LogRow]
    total: int = Field(description="Lines there are.")


class StartRun(Body):
    flow: str = Field(examples=["hello"])
    input: dict[str, Any] = Field(default={}, examples=[{"articles": 500}])
    key: str | None = Field(
        None,
        min_length=1,
        max_length=400,
        description="Names the decision to run: while that run is not over, a second start is a no-op.",
    )


class StartedRun(Shape):
    run_id: Id
    event_key: str
    deduplicated: bool = Field(description="The key was known: this is the run it started then.")


class Reason(Body):
    reason: str = Field(min_length=1, max_length=2000, examples=["wrong catalogue"])


class EndPreview(Shape):
    run_id: Id
    flow: str
    status: str
    state: State
    ended: Literal[False]
    selected: int | None
    finished: int = Field(description="Targets that keep their outcome.")
    in_flight: int = Field(description="Targets that are cancelled while a call of theirs is under way.")
    waiting: int = Field(description="Targets that are cancelled and wait.")
    children_that_end: int = Field(description="Runs that only this one waits for.")
    children_that_go_on: int = Field(description="Runs that another open run or a person waits for, too.")
    calls_in_flight: int = Field(description="Paid ones come to their end, and their results are kept.")


class EndedRun(Shape):
    run_id: Id
    ended: Literal[True]
