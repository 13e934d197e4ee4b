"""Bodies and answers of the routes of jobs, server instances, hosts and agents; in camelCase, as those of schedules."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import ConfigDict, Field

from ecluse.access.listing import Filters, Where
from ecluse.access.wire import CamelShape, Filter
from ecluse.base.validation import EitherSpelling, Partial, in_camel_case, partial_of
from ecluse.flows.jobs.attempts import JobStatus
from ecluse.flows.jobs.schedule_shapes import Id, Name


class JobRow(CamelShape):
    id: str
    org_id: str
    queue: str = Field(examples=["jobs:default"])
    schedule_id: str
    server_instance_id: str
    host_id: str
    type: str
    status: JobStatus = Field(description="`pending` also while a further attempt is to come.")
    attempts: int
    max_attempts: int
    error_code: str | None = Field(description="Of the last attempt.")
    error: str | None
    due_at: datetime | None = Field(description="The due time of the schedule; null: made by hand.")
    created_by: str
    created_at: datetime
    cancel_requested_at: datetime | None
    cancel_requested_by: str | None
    ended_at: datetime | None


class JobRunRow(CamelShape):
    id: str
    attempt: int
    status: JobStatus
    due_at: datetime = Field(description="When an agent may claim it.")
    agent_id: str | None
    started_at: datetime | None
    lease_ends_at: datetime | None
    ended_at: datetime | None
    exit_code: int | None
    error_code: str | None
    error: str | None
    output: Any
    late_status: Literal["succeeded", "failed"] | None = Field(
        description="What an agent reported after the attempt had ended: evidence, without effect."
    )
    late_at: datetime | None
    late_result: dict[str, Any] | None
    log_length: int
    log_capped: bool


class JobDetail(JobRow):
    payload: dict[str, Any] = Field(description="Without its secrets.")
    timeout_seconds: int | None
    waiting: str | None = Field(description="Of a pending job: that no agent is online, and when it fails. Else null.")
    runs: list[JobRunRow]


class JobLogRow(CamelShape):
    attempt: int
    start: int = Field(description="Characters of the log before this part.")
    text: str
    at: datetime


class HostRow(CamelShape):
    id: str
    org_id: str
    name: str
    created_by: str
    created_at: datetime
    updated_at: datetime


class HostDetail(HostRow):
    pending: int = Field(description="Jobs that wait for its agent.")
    running: int = Field(description="Jobs that its agent is executing.")


class ServerRow(HostRow):
    host_id: str
    host: str = Field(description="The name of the host.")


class AgentRow(CamelShape):
    id: str
    org_id: str
    host_id: str
    host: str
    hostname: str
    platform: str
    version: str
    online: bool = Field(description="It was heard of within the last minute.")
    online_since: datetime | None
    last_seen_at: datetime
    running: int = Field(description="Jobs that it is executing.")
    enrolled_at: datetime
    rotated_at: datetime | None
    revoked_at: datetime | None


class NewHost(EitherSpelling):
    model_config = ConfigDict(json_schema_extra=in_camel_case)

    name: Name = Field(examples=["db-1"])


class NewServer(NewHost):
    host_id: Id


@partial_of(NewServer)
class ChangedServer(Partial):
    """Changes to a server instance; its next jobs are executed on the new host."""

    model_config = ConfigDict(json_schema_extra=in_camel_case)


class NewToken(CamelShape):
    host_id: str
    token: str = Field(description="Shown once. An agent exchanges it for its credential.")
    expires_at: datetime


class JobFilters(Filters):
    scheduleId: Annotated[Filter, Where("t.schedule_id = %(scheduleId)s")] = None  # noqa: N815
    status: JobStatus | None = None


class LogFilters(Filters):
    attempt: Annotated[int | None, Query(ge=1, le=1_000)] = None
