"""Pure decisions about the end of an attempt at a job: its retry, the status of the job, and late reports."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple

from ecluse.engine import Backoff, Event, backoff
from ecluse.insight.causes import instant

LONGEST_DELAY = timedelta(days=7)
LEASE_LOST, CANCELLED, NO_AGENT = "LEASE_LOST", "CANCELLED", "NO_AGENT"
# An attempt that ended with one of these may have been ended by the server: a report that comes later is evidence.
ENDED_HERE = (LEASE_LOST, CANCELLED, NO_AGENT)

JobStatus = Literal["pending", "running", "succeeded", "failed"]  # of an attempt, too
Kept = Literal["result", "evidence", "repeated"]


@dataclass(frozen=True)
class Open:
    """An attempt with the columns of its job that its end depends on; its row is locked while the end is decided."""

    run_id: str
    tenant_id: str
    job_id: str
    attempt: int
    status: JobStatus
    fence: int
    error_code: str | None
    late_status: str | None
    max_attempts: int
    backoff_ms: int
    backoff_type: Literal["fixed", "exponential"]
    cancelled: bool  # a cancellation was requested
    payload_secret: str | None = None
    log_length: int = 0


class Ended(NamedTuple):
    """How an attempt ended."""

    status: Literal["succeeded", "failed"]
    error_code: str | None = None
    error: str | None = None
    exit_code: int | None = None
    output: Any = None


LOST = Ended("failed", LEASE_LOST, "The agent did not renew the lease; how far the job came is not known.")
NOT_CLAIMED = Ended("failed", NO_AGENT, "No agent of the host claimed the job within the time that a job may wait.")
CANCELLED_WAITING = Ended("failed", CANCELLED, "The job was cancelled before an agent claimed it.")


class Verdict(NamedTuple):
    """The decision on an ended attempt: the end to store, the status of its job, when to retry (None: not at all)."""

    ended: Ended
    job_status: JobStatus
    retry_at: datetime | None


def judged(attempt: Open, ended: Ended, now: datetime) -> Verdict:
    """Return what follows from the end of an attempt. A failed attempt, also one whose lease was lost, is retried while
    attempts are left; a cancelled job, or one that no agent claimed, is not."""
    if ended.status == "succeeded":
        return Verdict(ended, "succeeded", None)
    if attempt.cancelled:
        ended = ended._replace(error_code=CANCELLED, error=ended.error or "The job was cancelled.")
    if attempt.cancelled or ended.error_code == NO_AGENT or attempt.attempt >= attempt.max_attempts:
        return Verdict(ended, "failed", None)
    return Verdict(ended, "pending", now + delay(attempt))


def delay(attempt: Open) -> timedelta:
    """Return the time from the end of this attempt to the next, at most LONGEST_DELAY: `backoffMs`, or with
    `exponential` doubled for each attempt before."""
    longest = LONGEST_DELAY.total_seconds()
    series = Backoff(base=attempt.backoff_ms / 1000, longest=longest, kind=attempt.backoff_type)
    return timedelta(seconds=backoff(series, attempt.attempt, random.Random()))  # noqa: S311 - has no jitter


class Unattended(NamedTuple):
    """A host that has no agent online, with the times at which it was deleted, its last agent was revoked, and an agent
    was last seen; None for what has not happened."""

    host: str
    deleted: datetime | None
    revoked: datetime | None
    seen: datetime | None


def unattended(by: Unattended, due_at: datetime, longest: timedelta) -> str:
    """Return sentences about a pending attempt whose host has no agent online: why, what to do, and when its job fails,
    `longest` after it was due."""
    fails = f"the job fails {NO_AGENT} at {instant(due_at + longest)}."
    if by.deleted:
        return f"Its host was deleted at {instant(by.deleted)}. No agent can execute it: {fails}"
    if by.revoked:
        remedy = f"Enrol a new one with a token of `ecluse jobs hosts token {by.host}`"
        return f"The agent of its host was revoked at {instant(by.revoked)}. {remedy}: without one, {fails}"
    since = f"has been online since {instant(by.seen)}" if by.seen else "has enrolled"
    return f"No agent of its host {since}: without one, {fails}"


def kept_as(attempt: Open) -> Kept:
    """Decide how a reported result is kept. That of a running attempt counts, even if its lease is over: nothing else
    has happened to the job yet. Of an attempt that the server ended, the first late report is evidence."""
    if attempt.status == "running":
        return "result"
    return "evidence" if attempt.error_code in ENDED_HERE and attempt.late_status is None else "repeated"


def event(job: Mapping[str, Any], what: str, **more: Any) -> Event:
    """Return the event `job.{what}` about a row of `jobs`: its ids and `more`, nothing of its payload or output."""
    named = {
        "job_id": job["id"],
        "schedule_id": job["job_schedule_id"],
        "server_instance_id": job["server_instance_id"],
        "host_id": job["host_id"],
        "type": job["type"],
        "queue": f"jobs:{job['tenant_id']}",
    }
    about, key = f"job:{job['id']}", job["key"]
    return Event(job["tenant_id"], f"{key}:{what}", f"job.{what}", about, named | more, key)
