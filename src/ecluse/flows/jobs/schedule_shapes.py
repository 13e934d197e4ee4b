"""Bodies and answers of the routes of job schedules. Fields have the names of the contract, in camelCase."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Field

from ecluse.access.wire import CamelShape, Fire
from ecluse.base.ids import CUID
from ecluse.base.validation import EitherSpelling, Partial, fields_of, form, in_camel_case, partial_of
from ecluse.flows.jobs.attempts import JobStatus

MOST_RETRIES = 100
LONGEST_BACKOFF_MS = 24 * 60 * 60 * 1000
LARGEST_PAYLOAD = 256 * 1024  # bytes
LONGEST_TIMEOUT = 24 * 60 * 60

CUID_IN_WORDS = "an id of 25 characters, such as cmf1w2x3y0000abcdefghijkl"
Id = Annotated[str, Field(pattern=form(f"^{CUID.pattern}$", CUID_IN_WORDS), examples=["cmf1w2x3y0000abcdefghijkl"])]
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"\S", examples=["Nightly backup"])]
TimeOfDay = Annotated[Annotated[str, Field(max_length=5)] | None, Field(examples=["02:00"])]


def _small(payload: dict[str, Any]) -> dict[str, Any]:
    size = len(json.dumps(payload, ensure_ascii=False).encode())
    if size > LARGEST_PAYLOAD:
        raise ValueError(f"has {size} bytes, of at most {LARGEST_PAYLOAD}; keep the data elsewhere, and name it")
    return payload


class RetryOptions(EitherSpelling):
    """How often a failed attempt of a job is repeated, and after how long."""

    model_config = ConfigDict(json_schema_extra=in_camel_case)

    max_retries: int = Field(0, ge=0, le=MOST_RETRIES, description="Attempts after the first one.")
    backoff_ms: int = Field(1000, ge=0, le=LONGEST_BACKOFF_MS)
    backoff_type: Literal["fixed", "exponential"] = Field(
        "fixed", description="`exponential` doubles `backoffMs` after each attempt."
    )


class JobSchedule(EitherSpelling):
    """A schedule of jobs."""

    model_config = ConfigDict(json_schema_extra=in_camel_case)

    name: Name
    server_instance_id: Id = Field(description="The server on whose host the jobs are executed.")
    cron_expression: str = Field(max_length=200, examples=["0 2 * * *"])
    job_type: str = Field(min_length=1, max_length=100, pattern=r"^\S+$", examples=["shell"])
    description: str | None = Field(None, max_length=2_000)
    payload: Annotated[dict[str, Any], AfterValidator(_small)] = Field(
        default_factory=dict,
        description="What the agent gets, at most 256 KiB. Secrets in it (`password`, `token`, …) are stored "
        "encrypted, and shown as `***`.",
        examples=[{"command": "backup --all"}],
    )
    enabled: bool = True
    timezone: str = Field("UTC", max_length=100, examples=["Europe/Paris"], description="Of cron and window.")
    execution_window_start: TimeOfDay = Field(
        None, description="Jobs begin only from this time of day to `executionWindowEnd`; both or none."
    )
    execution_window_end: TimeOfDay = None
    retry_policy: RetryOptions = Field(default_factory=RetryOptions)
    overlap: Literal["allow", "skip"] = Field(
        "allow", description="`skip`: a due time is skipped while a job of the schedule is active."
    )
    catch_up: Literal["latest", "skip"] = Field(
        "latest", description="After a downtime, run the `latest` missed due time, or `skip` all."
    )
    timeout_seconds: int | None = Field(
        None, ge=1, le=LONGEST_TIMEOUT, description="Time limit of an attempt; null: the agent's own."
    )


@partial_of(JobSchedule)
class ChangedJobSchedule(Partial):
    """Changes to a schedule: fields that are left out stay as they are; `payload` and `retryPolicy` are replaced as a
    whole."""

    model_config = ConfigDict(json_schema_extra=in_camel_case)
    nullable: ClassVar[tuple[str, ...]] = (
        "description", "execution_window_start", "execution_window_end", "timeout_seconds",
    )  # fmt: skip


class RetryPolicyShape(CamelShape):
    max_retries: int
    backoff_ms: int
    backoff_type: Literal["fixed", "exponential"]


@fields_of(JobSchedule, without=("payload",))
class JobScheduleRow(CamelShape):
    id: str = Field(examples=["cmf1w2x3y0000abcdefghijkl"])
    org_id: str = Field(examples=["default"])
    host_id: str
    retry_policy: RetryPolicyShape
    last_run_at: datetime | None = Field(description="When a job was last made.")
    next_run_at: datetime | None = Field(description="null: disabled, or `error` says why it cannot be computed.")
    last_run_status: Literal["success", "failed", "skipped", "scheduler_failed"] | None = Field(
        description="Changed by due times and by `run`. `success`: a job was made; `failed`: its last attempt has "
        "failed; `skipped`: a due time was not executed; `scheduler_failed`: no job could be made."
    )
    last_run_job_id: str | None
    last_job_status: JobStatus | None = Field(description="The status of the job `lastRunJobId`.")
    run_count: int = Field(description="Jobs made.")
    failure_count: int = Field(description="Due times for which no job could be made.")
    error: str | None = Field(description="Why the schedule cannot be handled; it is retried.")
    created_by_id: str
    created_at: datetime
    updated_at: datetime


class JobScheduleInFull(JobScheduleRow):
    """Lists have no payloads, which may be large."""

    payload: dict[str, Any] = Field(
        description="What the agent gets; its secrets are shown as `***`.", examples=[{"command": "backup --all"}]
    )


class JobSlotRow(CamelShape):
    due_at: datetime
    state: Literal["fired", "skipped", "missed", "failed"]
    reason: str | None
    job_id: str | None
    job_status: JobStatus | None
    decided_at: datetime


class JobSchedulePreview(CamelShape):
    in_words: str = Field(examples=["At 02:00 every day"])
    timezone: str
    fires: list[Fire]


class MadeJob(CamelShape):
    job_id: str
    job_run_id: str
    host_id: str
