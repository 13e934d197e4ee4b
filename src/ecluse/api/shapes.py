"""What the routes take and answer, for the OpenAPI document. Answers are not built through these models: a test
compares the two."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from ecluse.access.wire import Body, Shape
from ecluse.engine import State

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
    schedule_id: Id | None
    correlation_id: str | None
    status: str = Field(description="The flow's own word.")
    state: State = Field(description="The neutral one.")
    phase: str | None
    selected: int | None
    successful: int | None
    failed: int | None
    ignored: int | None
    reason: str | None
    error_code: str | None
    end_cause: Literal["normal", "operator", "stale", "catastrophic"] | None
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None


class RunPage(Shape):
    runs: list[RunRow]
    limit: int
    offset: int


class StageRow(Shape):
    stage: str
    expected: int
    done: int
    failed: int
    ignored: int
    in_flight: int
    waiting: int
    round: int
    started_at: datetime
    fanned_out_at: datetime | None
    progress_at: datetime
    deadline_at: datetime
    ended_at: datetime | None
    end_cause: Literal["done", "timeout", "run ended"] | None


class RunInFull(RunRow):
    orchestrated: bool
    input: dict[str, Any]
    error_message: str | None
    error_details: Any
    stages: list[StageRow]
    outcomes: dict[str, int] = Field(description="How many targets by reason; successes under their own name.")


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


class ItemPage(Shape):
    items: list[ItemRow]
    limit: int
    offset: int


class WaitingRow(Shape):
    item_id: Id
    key: str
    stage: str
    cause: Literal["paused", "held", "retry", "suspect", "no worker", "in flight", "per key", "throttled", "queued"]
    detail: str = Field(description="The same for people: until when, how many before it.")
    position: int | None = Field(description="How many go before it; null: it is not in line yet, or far behind.")
    expected_at: datetime | None


class WaitingPage(Shape):
    waiting: list[WaitingRow]
    limit: int
    offset: int


class LogRow(Shape):
    id: Id
    at: datetime
    level: Literal["info", "warning", "error"]
    message: str
    event_id: str | None
    data: Any


class LogPage(Shape):
    log: list[LogRow]
    limit: int
    offset: int


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


class EndedRun(Shape):
    run_id: Id
    ended: Literal[True]
