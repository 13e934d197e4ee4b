"""Models of bodies and answers, for the OpenAPI document. Answers are not built from these models; tests compare the
two."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ecluse.access.wire import Body, OutcomeCounts, Page, Shape, StageRow, WillFail
from ecluse.engine import EndCause, State
from ecluse.insight.causes import Cause

Id = str
Role = Literal["viewer", "operator", "admin"]


class RunRow(Shape):
    id: Id
    tenant_id: str
    flow: str
    event_key: str = Field(description="Key of the decision to start the run; unique per tenant.")
    parent_run_id: Id | None
    redrive_of: Id | None = Field(description="The run whose targets it repeats.")
    schedule_id: Id | None
    correlation_id: str | None
    status: str = Field(description="The status, in the flow's own terms.")
    state: State = Field(
        description="The neutral state. `cancelled`: ended on request; `status` then shows the outcome of the targets."
    )
    phase: str | None = Field(description="The current phase; null once the run has ended.")
    selected: int | None
    successful: int | None
    failed: int | None
    ignored: int | None
    cancelled: int = Field(description="The part of `failed` that the cancelled run never finished.")
    reason: str | None
    error_code: str | None
    end_cause: EndCause | None
    ended_by: str | None = Field(description="Of a cancelled run: the person, or `run:<id>` if it ended with that run.")
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None


class RunInFull(RunRow):
    orchestrated: bool
    reason: str | None = Field(
        description="Of a failed run without a reason of its own: the code that all its failed targets share. "
        "Lists of runs do not have that.",
        examples=["all 23 targets failed: NO_TRANSCRIPT"],
    )
    input: dict[str, Any]
    error_message: str | None
    error_details: Any
    stages: list[StageRow]
    outcomes: dict[str, int] = Field(description="Number of targets by error code, or by outcome if there is no code.")
    will_fail: WillFail
    redrives: list[Id]
    after_redrives: OutcomeCounts | None = Field(
        description="The latest outcome of each target, over the run and its redrives; null without redrives."
    )
    selection_incomplete: str | None = Field(description="What its selection lacks, and why; null: nothing.")
    cost: str | None = Field(
        description="What its paid calls and those of the runs it started have cost, with `cost_unknown`; null: there "
        "were none with a price.",
        examples=["0.012345"],
    )
    cost_unknown: str | None = Field(
        description="The part of the cost of calls that may have been paid for, although they have no result."
    )
    unpriced_calls: int = Field(description="Paid calls of models without a price: they are not in the cost.")
    cost_reserved: str | None = Field(description="Reserved for paid calls in flight; null: there are none.")


class ItemFacts(Shape):
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
    due_at: datetime
    finished_at: datetime | None


class ItemRow(ItemFacts):
    result: Any = Field(description="Null if it is larger than 10,000 bytes: a single item has it.")
    result_bytes: int | None = Field(description="Size of the result as stored, which may be compressed.")


class Attempt(Shape):
    """A failed or ambiguous execution of an item."""

    event_id: str
    round: int
    execution: int
    at: datetime
    replica_id: str
    error_code: str
    error: str
    http_status: int | None
    ambiguous: bool = Field(description="The vendor may have applied the call.")
    maybe_paid: bool | None = Field(description="A paid call was repeated although its first answer may exist.")
    outage: bool | None = Field(description="The vendor was down: no execution was used up.")
    retry_at: datetime | None


class ItemInFull(ItemFacts):
    result: Any
    attempts: list[Attempt] = Field(description="The first 200.")


class WaitingRow(Shape):
    item_id: Id
    run_id: Id = Field(description="The requested run, or a run that it waits for.")
    key: str
    target: str
    stage: str
    lane: str
    cause: Cause
    detail: str = Field(description="The cause in words: until when, how many calls are before it.")
    position: int | None = Field(description="Number of calls before it; null: it is not due yet, or far behind.")
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
    count: int = Field(description="Number of waiting items; for `gate`, of calls in flight.")
    detail: str = Field(description="The cause in words.")
    since: datetime | None = Field(
        description="When the pause, the outage of the vendor, or the oldest call in flight began."
    )
    error: str | None = Field(description="The last error of one of them; null: none has failed yet.")
    first_at: datetime | None = Field(description="When the first of them is expected to start.")
    last_at: datetime | None = Field(description="When the last of them is expected to start, at the earliest.")
    sample: list[WaitingExample]


class WaitingPage(Page):
    """Why a run, and all the runs that it waits for, wait: by cause, and item by item."""

    summary: str = Field(description="Why the run waits, in one sentence.")
    total: int = Field(description="Number of waiting items.")
    in_flight: int = Field(description="Number of calls in flight.")
    in_flight_since: datetime | None = Field(description="When the oldest call in flight began.")
    progress_at: datetime | None = Field(description="Time of the last progress; null once the run has ended.")
    blocked: bool = Field(description="Nothing is in flight, and nothing starts before its cause is gone.")
    deadline_at: datetime | None = Field(description="The time limit of the open stage; null: none is open.")
    remark: str | None = Field(description="What fails at the time limit, and targets that are known to fail already.")
    groups: list[WaitingGroup] = Field(description="Waiting items by cause, the most frequent first.")
    waiting: list[WaitingRow] = Field(description="A page of the waiting items, in queue order.")


class LogRow(Shape):
    id: Id
    at: datetime
    level: Literal["info", "warning", "error"]
    message: str
    event_id: str | None
    data: Any
    count: int = Field(description="Number of equal lines from `at` to `last_at`.")
    targets: list[str] | None = Field(description="The first five targets that it is about.")
    last_at: datetime | None


class LogPage(Page):
    log: list[LogRow]
    total: int = Field(description="Total number of lines.")


def _no_repetition(key: str) -> str:
    if re.search(r"-retry-\d+\Z", key):
        raise ValueError("must not end with -retry- and a number: such keys name the repetitions of a run")
    return key


class StartRun(Body):
    flow: str = Field(examples=["hello"])
    input: dict[str, Any] = Field(default={}, examples=[{"articles": 500}])
    key: Annotated[str, Field(min_length=1, max_length=400), AfterValidator(_no_repetition)] | None = Field(
        None,
        description="Names the decision to start a run: while that run is open, a second start with this key starts "
        "nothing. The event key of the run is `request:` followed by this key.",
    )


class StartedRun(Shape):
    run_id: Id
    event_key: str
    deduplicated: bool = Field(description="True: a run with this key existed, and this is that run.")


class Reason(Body):
    reason: str = Field(min_length=1, max_length=2000, examples=["asked for by the vendor"])


class EndPreview(Shape):
    run_id: Id
    flow: str
    status: str
    state: State
    ended: Literal[False]
    selected: int | None
    finished: int = Field(description="Targets that keep their outcome.")
    in_flight: int = Field(description="Targets that would be cancelled while a call is in flight.")
    waiting: int = Field(description="Waiting targets that would be cancelled.")
    children_that_end: int = Field(description="Runs that only this one waits for: they end with it.")
    children_that_go_on: int = Field(description="Runs that another open run or a person waits for, too: they go on.")
    calls_in_flight: int = Field(description="Calls in flight; paid ones finish, and their results are stored.")


class EndedRun(Shape):
    run_id: Id
    ended: Literal[True]
