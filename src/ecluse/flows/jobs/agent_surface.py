"""The agent protocol over HTTP, `/api/agent/…`; docs/agent-protocol.md describes it. All routes but the enrolment need
the credential of an agent, which sees the jobs of its own host only."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Request, Response
from pydantic import AfterValidator, Field

from ecluse.access import agents, answers, audit_trail, door
from ecluse.access.changes import record
from ecluse.access.door import UNKNOWN_AGENT, caller_of, check_storable, needs
from ecluse.access.envelope import BadCredentials, ErrorAnswer, Refused, as_json, request_id
from ecluse.access.keys import digest
from ecluse.access.permissions import EXECUTE
from ecluse.access.polls import woken_within
from ecluse.access.refusal_log import address_of
from ecluse.access.surface import Act, Surface
from ecluse.access.wire import CamelBody, CamelShape, camel, writes_of
from ecluse.base.errors import Conflict
from ecluse.base.masking import without_texts
from ecluse.db.connect import Connection
from ecluse.db.query import Row
from ecluse.flows.jobs import logs, states
from ecluse.flows.jobs.attempts import Ended, JobStatus, Open
from ecluse.flows.jobs.sweeps import Leasing

surface = Surface("agent")
enrolment = APIRouter(tags=["agent"])
ONE = "/api/agent/job-runs/{job_run_id}"
REFUSED: dict[int | str, dict[str, Any]] = {401: {"model": ErrorAnswer}, 422: {"model": ErrorAnswer}}
LONGEST_WAIT, MOST_JOBS = 30, 16
OFFLINE_AFTER = timedelta(minutes=1)
REVOKED, FENCED, POLLED = (
    ("CREDENTIAL_REVOKED",),
    ("CREDENTIAL_REVOKED", "FENCE_UNKNOWN"),
    ("CREDENTIAL_REVOKED", "TOO_MANY_CONNECTIONS"),
)
Short = Annotated[str, Field(max_length=500)]
Fence = Annotated[int, Field(ge=0, le=2**62, examples=[1])]


class Enrolment(CamelBody):
    token: Short = Field(examples=["a one-time token"])
    hostname: Short
    version: Short
    platform: Short


class EnrolledAgent(CamelShape):
    agent_id: str
    host_id: str
    credential: str = Field(description="Shown once: the server keeps its hash.")
    lease_seconds: float


class NewCredential(CamelShape):
    credential: str


class Claiming(CamelBody):
    max: int = Field(ge=0, le=MOST_JOBS, description="0: only the jobs that `claimKey` has claimed before.")
    wait_seconds: float = Field(ge=0, le=LONGEST_WAIT, examples=[25])
    types: list[Annotated[str, Field(max_length=100)]] = Field(max_length=100, description="Empty: jobs of every type.")
    version: Short
    claim_key: UUID = Field(strict=False, description="Repeated after a lost answer: the same jobs, and no new ones.")


class ClaimedJob(CamelShape):
    job_run_id: str
    job_id: str
    attempt: int
    fence: int
    type: str
    payload: dict[str, Any]
    timeout_seconds: int | None
    lease_seconds: float = Field(description="What is left of the lease when this is answered.")
    lease_ends_at: datetime


class ClaimedJobs(CamelShape):
    jobs: list[ClaimedJob]
    waited_seconds: float = Field(description="From the arrival of the request to the claim: no lease began before.")


class Renewal(CamelBody):
    fence: Fence


class RenewedLease(CamelShape):
    cancel: bool = Field(description="The job is to be stopped, and reported as failed with `CANCELLED`.")
    lease_seconds: float
    lease_ends_at: datetime


class LogChunk(CamelBody):
    fence: Fence
    offset: int = Field(ge=0, le=2**30, description="Characters of the log before this chunk.")
    text: str = Field(max_length=logs.LARGEST_CHUNK)


class LogEnd(CamelShape):
    next: int = Field(description="The offset of the chunk that follows.")
    capped: bool = Field(description="The log is full: further chunks are not kept.")


def _small(output: Any) -> Any:
    if len(json.dumps(output)) > logs.LARGEST_CHUNK:
        raise ValueError(f"has more than {logs.LARGEST_CHUNK} characters: send it as a log")
    return output


class ResultBody(CamelBody):
    fence: Fence
    status: Literal["succeeded", "failed"]
    exit_code: int | None = Field(None, ge=-(2**31), lt=2**31)
    error_code: str | None = Field(None, pattern=r"^[A-Z][A-Z0-9_]{0,63}$")
    error: str | None = Field(None, max_length=4_000)
    output: Annotated[Any, AfterValidator(_small)] = None


class KeptResult(CamelShape):
    status: JobStatus = Field(description="Of the attempt.")
    kept: Literal["result", "evidence", "repeated"]


@enrolment.post("/api/agent/enrol", status_code=201, response_model=EnrolledAgent, responses=REFUSED)
async def enrol_agent(request: Request, body: Enrolment) -> Response:
    """Exchange an enrolment token, once, for the credential of its host's agent."""
    check_storable(about := body.model_dump())
    async with writes_of(request).connection("") as connection, connection.transaction():
        found = await agents.enrol(connection, **about)
        if found is None:
            remedy = "make a new one with `ecluse jobs hosts token`"
            why = f"This enrolment token is unknown, expired or used: {remedy}."
            raise BadCredentials(401, "ENROLMENT_REFUSED", why)
        agent, credential = found
        enrolled = (agent.tenant, f"agent:{agent.id}", "job_agent.enrol", f"job_agent:{agent.id}")
        origin = (f"host {agent.host_id}", request_id(request), address_of(request))
        await audit_trail.record_all(connection, [audit_trail.Entry(*enrolled, *origin)])
    named = {"agentId": agent.id, "hostId": agent.host_id, "credential": credential}
    return as_json({**named, "leaseSeconds": _leasing(request).lease.total_seconds()}, 201)


# action=None: recorded with the id of the agent, which the answer lacks
@surface.operation("POST", "/api/agent/rotate", needs=EXECUTE, answer=NewCredential, action=None, refuses=REVOKED)
async def rotate_credential(act: Act) -> Row:
    """Make a new credential for this agent; the present one stays valid until the first claim with the new one."""
    credential = await agents.rotate(act.connection, str(act.caller.agent_id), _used(act.request))
    await record(act.connection, act.request, "job_agent.rotate", f"job_agent:{act.caller.agent_id}")
    act.answers(200, credential=credential)
    return {}


@surface.routes.post("/api/agent/jobs/claim", openapi_extra=needs(EXECUTE, refuses=POLLED), response_model=ClaimedJobs)
async def claim_jobs(request: Request, body: Claiming) -> Response:
    """Claim jobs of this agent's host, each with a lease; if none is due, wait for one for up to `waitSeconds`."""
    caller, leasing, began = caller_of(request), _leasing(request), time.monotonic()
    fixed = (body.types, body.version, _used(request), leasing.lease, OFFLINE_AFTER)
    wanted = states.Claim(str(caller.agent_id), body.claim_key, body.max, *fixed)
    with ExitStack() as ending, leasing.polls.one(str(caller.host_id)) as woken:
        ending.callback(request.app.state.limits.open(caller, "polls"))
        while True:
            woken.clear()
            async with writes_of(request).connection(caller.tenant) as connection:
                claimed = await states.claim(connection, wanted)
                at = time.monotonic()
                if claimed is None:
                    raise Refused(401, "CREDENTIAL_REVOKED", UNKNOWN_AGENT)
                jobs = await _with_payloads(request, connection, caller.tenant, claimed)
            left = began + body.wait_seconds - at
            if jobs or body.max == 0 or left <= 0 or leasing.polls.stopping:
                break
            if not await woken_within(request, woken, left):
                break
            await door.admit_again(request, EXECUTE)  # the tenant may have been disabled
    return await answers.answer(request, {"jobs": jobs, "waitedSeconds": at - began})


@surface.operation(
    "POST", f"{ONE}/renew", needs=EXECUTE, answer=RenewedLease, action=None, refuses=(*FENCED, "LEASE_LOST")
)
async def renew_lease(act: Act, job_run_id: str, body: Renewal) -> Row:
    """Renew the lease of an attempt, and learn whether its job was cancelled."""
    lease = _leasing(act.request).lease
    renewed = await states.renew(act.connection, str(act.caller.agent_id), job_run_id, body.fence, lease)
    if renewed is None:
        await _attempt(act, job_run_id, body.fence)
        why = "The lease of the attempt has expired; the attempt is recorded as failed. Stop the job."
        raise Conflict(why, code="LEASE_LOST")
    return camel({**renewed, "lease_seconds": lease.total_seconds()})


@surface.operation("POST", f"{ONE}/logs", needs=EXECUTE, answer=LogEnd, action=None, refuses=(*FENCED, "LOG_GAP"))
async def append_log(act: Act, job_run_id: str, body: LogChunk) -> Row:
    """Append a chunk to the log of an attempt; a repeated chunk changes nothing."""
    attempt = await _attempt(act, job_run_id, body.fence)
    hidden = await logs.secrets_of(act.connection, act.state.secrets, attempt)
    following, capped = await logs.append(act.connection, attempt, hidden, body.offset, body.text)
    return {"next": following, "capped": capped}


@surface.operation("POST", f"{ONE}/result", needs=EXECUTE, answer=KeptResult, action=None, refuses=FENCED)
async def report_result(act: Act, job_run_id: str, body: ResultBody) -> Row:
    """Report the result of an attempt. Repeated, or after the lease was lost, it changes nothing that has happened
    since; the first late one is kept as evidence."""
    attempt = await _attempt(act, job_run_id, body.fence)
    hidden = await logs.secrets_of(act.connection, act.state.secrets, attempt)
    failed = body.status == "failed"
    code, error = (body.error_code or "FAILED", without_texts(body.error, hidden)) if failed else (None, None)
    ended = Ended(body.status, code, error, body.exit_code, without_texts(body.output, hidden))
    kept = await states.report(act.connection, attempt, ended)
    return {"status": body.status if kept == "result" else attempt.status, "kept": kept}


async def _attempt(act: Act, run_id: str, fence: int) -> Open:
    return await states.attempt_of(act.connection, act.tenant, str(act.caller.host_id), run_id, fence)


async def _with_payloads(request: Request, connection: Connection, tenant: str, rows: list[Row]) -> list[Row]:
    """Return claimed attempts in the form of the answer, with their payloads decrypted."""
    sealed = [row["payload_secret"] for row in rows if row["payload_secret"] is not None]
    opened = await request.app.state.secrets.get_all(connection, tenant, sealed) if sealed else {}
    return [
        {
            "jobRunId": row["id"],
            "payload": json.loads(opened[row["payload_secret"]]) if row["payload_secret"] else row["payload"],
            **camel({name: row[name] for name in ClaimedJob.model_fields if name not in ("job_run_id", "payload")}),
        }
        for row in rows
    ]


def _leasing(request: Request) -> Leasing:
    leasing: Leasing = request.app.state.leasing
    return leasing


def _used(request: Request) -> bytes:
    """Return the hash of the credential of this request."""
    return digest(request.headers["authorization"].partition(" ")[2])
