"""The flow of company enrichment: a job is a run without a story, with one stage per source. The commit that ends a
source opens the next one, even if the source failed; the end of the run merges and evaluates the results, emits
Completed and updates the requests, in one transaction.

    begin ─▶ API_RECHERCHE_ENTREPRISES ─▶ INPI_RNE ─▶ API_ENTREPRISE_RCS ─▶ end
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict
from structlog.contextvars import bound_contextvars

from ecluse.access.refusal_log import SYSTEM
from ecluse.base.clock import Clock
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_column, fetch_now
from ecluse.engine import (
    Done,
    Event,
    Flow,
    Held,
    Item,
    ItemEnd,
    Lane,
    NewItem,
    Postponed,
    Result,
    RetryPolicy,
    Run,
    RunEnded,
    Settled,
    Stage,
    WorkContext,
    acquire_lease,
    open_stage,
    settle_targets,
    write_events,
)
from ecluse.flows.enrichment import card, events, metrics, records, rules, sweep
from ecluse.flows.enrichment.clients import Config
from ecluse.flows.enrichment.states import Evaluation, Fetched, Status, check_move, complete, evaluate
from ecluse.vendors.registers import ErrorCode, Source

# Jobs queued behind a register's rate cap may wait for days: that is not a stall.
PATIENCE = timedelta(days=14)
RETRIES = RetryPolicy(executions=3, base=0.25, multiplier=2.0)
LATER = timedelta(seconds=5)
LANES = {Source.SEARCH: "recherche-entreprises", Source.INPI: "inpi-rne", Source.RCS: "api-entreprise"}
STOPPED = "SELECT id FROM runs WHERE id = ANY(%s) AND end_cause = 'operator'"
# No source gave the legal name: the company, which is the target of the run, has failed.
NAMELESS = """
SELECT run_id FROM enrichment_sources WHERE run_id = ANY(%s) GROUP BY run_id
HAVING NOT bool_or(coalesce(facts ->> 'legal_name', '') <> '')
   AND bool_or(source_api = 'API_RECHERCHE_ENTREPRISES' AND status = 'SUCCESS')
"""


class Job(BaseModel):
    """Input of a run: the company, the trigger, and the sources to ask. Log lines have the fields of the same name."""

    model_config = ConfigDict(extra="forbid")

    company_siren: str
    trigger: str
    request_id: int | None = None
    asked: list[str]
    recipient: str | None = None
    idempotency_key: str


class Enrichment:
    """The flow `enrichment`, built from the settings."""

    def __init__(self, config: Config, vendors: Callable[[Clock], AbstractAsyncContextManager[Any]]) -> None:
        self.config = config
        self.stages = {source: self._stage(source) for source in Source}
        flow = Flow(
            rules.FLOW,
            tuple(self.stages.values()),
            None,
            Job,
            tables=("enrichment_jobs", "enrichment_sources"),
            vendors=vendors,
            begin=self._begin,
            ended=ended,
            not_by_hand="POST /v1/requests, or `ecluse enrich SIREN`",
        )
        self.flow = replace(flow, watch=partial(sweep.sweep, flow, config))

    def _stage(self, source: Source) -> Stage:
        return Stage(
            source.lower(),
            Lane(LANES[source], per_second=self.config.per_second[source]),
            partial(ask, source),
            on_end=partial(self._ended, source),
            opens=True,
            last=source is Source.SEARCH,
            retry=RETRIES,
            # INPI's call may need a log-in before it, and another after a refusal.
            time_limit=4 * self.config.deadline + timedelta(seconds=10),
            max_wait=PATIENCE,
        )

    async def _begin(self, connection: Connection, runs: Sequence[Run]) -> None:
        """Store the jobs of new runs and dispatch their first source. Raise Taken if a company has a job."""
        rows = [
            {**run.input, "siren": run.input["company_siren"], "run_id": run.id, "tenant_id": run.tenant_id}
            | {"correlation_id": run.correlation_id or run.event_key}
            for run in runs
        ]
        await records.put_jobs(connection, rows)
        first = [(run, [NewItem(run.input["company_siren"], payload=about(run.input, Source.SEARCH))]) for run in runs]
        await open_stage(connection, self.stages[Source.SEARCH], first, select=True)

    async def _ended(self, source: Source, connection: Connection, ends: Sequence[ItemEnd]) -> None:
        """Store the final results of a source, emit events, and dispatch the next one. The `on_end` of its stage."""
        over = {end.item.run_id: (end, result_of(source, end)) for end in ends if end.status != "open"}
        if not over:
            return
        rows = [
            {**vars(result), "run_id": run_id, "source_api": source, "status": result.status}
            | {"executions": end.executions, "facts": end.kept}
            for run_id, (end, result) in over.items()
        ]
        durations = await records.end_sources(connection, rows)
        following: dict[Source, list[tuple[Run, list[NewItem]]]] = {}
        last: list[Run] = []
        for end, _ in over.values():
            run = run_of(end.item)
            after = [one for one in Source if one in run.input["asked"]]
            left = after[after.index(source) + 1 :]
            if left:  # it only prepares: the outcome of the company is that of the required source
                item = NewItem(end.item.key, "", about(run.input, left[0]))
                following.setdefault(left[0], []).append((run, [item]))
            else:
                last.append(run)
        for stage, wanted in following.items():
            await open_stage(connection, self.stages[stage], wanted)
        await settle_nameless(connection, last)
        await write_events(
            connection,
            [
                events.source_fetched(
                    end.item.tenant_id,
                    end.item.correlation_id or end.item.event_key,
                    job=run_id,
                    siren=end.item.key,
                    fetched=result,
                    duration_ms=durations[run_id],
                )
                for run_id, (end, result) in over.items()
            ],
        )


def about(job: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """Return the payload of the item with which a job asks a source."""
    return {**job, "source_api": str(source)}


async def ask(source: Source, context: WorkContext, item: Item) -> Result:
    """Ask one register for a company, under the lock of its job; postpone without the lock. The work of its stage."""
    with bound_contextvars(**item.log_fields):
        return await _ask(source, context, item)


async def _ask(source: Source, context: WorkContext, item: Item) -> Result:
    siren = item.key
    try:
        async with context.database() as connection, connection.transaction():
            lease = await acquire_lease(
                connection,
                SYSTEM,
                rules.lock_key(siren),
                owner=f"run {item.run_id}",
                ttl=rules.LOCK_TTL,
                replica=context.replica,
                run_id=item.run_id,
            )
            if isinstance(lease, Held):
                return Postponed(context.now() + LATER, f"{lease.owner} has the lock of the company", "lease")
            if await records.begin_call(connection, item.run_id, siren, source, lease.attempt):
                facts: dict[str, Any] = {"job": item.run_id, "siren": siren, "attempt": lease.attempt}
                correlation = item.correlation_id or item.event_key
                await write_events(connection, [events.started(item.tenant_id, correlation, **facts)])
    except RunEnded:
        return Postponed(context.now() + LATER, "the job has ended")
    found = await context.vendors.facts(source, siren, item.payload["recipient"])
    # What a register says may be personal: it goes to the flow's own table, not into the item.
    return Done({"fields": len(found)}, kept=found)


def result_of(source: Source, end: ItemEnd) -> Fetched:
    """Return the final result of a source from the end of its item. An error that is not a register's own, such as the
    death of workers, is UNKNOWN."""
    if end.status == "succeeded":
        return Fetched(source, http_status=200)
    if end.error_code in list(ErrorCode):
        return Fetched(source, end.error_code, end.http_status, end.error)
    return Fetched(source, ErrorCode.UNKNOWN, end.http_status, end.error_code)


def run_of(item: Item) -> Run:
    job = {name: value for name, value in item.payload.items() if name != "source_api"}
    return Run(item.run_id, item.tenant_id, item.flow, item.event_key, job, item.correlation_id)


async def settle_nameless(connection: Connection, runs: Sequence[Run]) -> None:
    """Settle as failed the targets of runs whose required source answered without a name, if no other gave one."""
    by_id = {run.id: run for run in runs}
    for run_id in await fetch_column(connection, NAMELESS, (list(by_id),)) if runs else ():
        run = by_id[run_id]
        why = "no register gave the legal name of the company"
        settled = Settled(run.input["company_siren"], "failed", ErrorCode.CORE_IDENTITY_MISSING, why)
        await settle_targets(connection, run, [settled])


async def ended(connection: Connection, runs: Sequence[Run]) -> Sequence[Event]:
    """Merge, evaluate and store the results of these jobs and update their requests, in the transaction that ends the
    runs. Return a Completed event for each tenant that has the job or a request attached to it; if an operator of the
    job's tenant has ended it, the other tenants ask again."""
    jobs = await records.open_jobs(connection, [run.id for run in runs])
    companies = await records.lock_companies(connection, [job.siren for job in jobs])
    results = await records.fetched(connection, [job.run_id for job in jobs])
    now = await fetch_now(connection)
    rows, told = [], {}
    for job in jobs:
        before, stored = companies[job.siren]
        row, result = concluded(job, before, stored, results.get(job.run_id, []), now)
        rows.append(row)
        told[job.run_id] = (job, result)
        metrics.jobs[(str(result.status),)] += 1
    waiting = {(job.run_id, job.tenant_id): job.correlation_id for job in jobs}
    waiting |= {
        (job_id, tenant): correlation for job_id, tenant, correlation in await records.end_jobs(connection, rows)
    }
    stopped = set(await fetch_column(connection, STOPPED, (list(told),)))
    found = []
    for (job_id, tenant), correlation in sorted(waiting.items()):
        job, result = told[job_id]
        found.append(events.completed(tenant, correlation, job=job_id, siren=job.siren, result=result))
        if job_id in stopped and tenant != job.tenant_id and result.status is not Status.SUCCESS:
            found.append(events.refresh(tenant, correlation, job=job_id, siren=job.siren))
    return found


def concluded(
    job: records.JobRow,
    before: Status,
    stored: Mapping[str, Any],
    results: Sequence[tuple[Fetched, Row | None]],
    now: datetime,
) -> tuple[Row, Evaluation]:
    """Return the row with which a job ends, and its evaluation. Only a job that ends SUCCESS or PARTIAL changes the
    facts of its company; a job that never began leaves its company unchanged."""
    merged = card.merge(stored, {one.source: facts for one, facts in results if facts is not None}, now)
    fetched = complete([Source(one) for one in job.asked], [one for one, _ in results])
    result = evaluate(fetched, core_identity=card.legal_name(merged) is not None)
    began = job.status == Status.RUNNING
    if began:
        check_move(job.siren, before, result.status)
    row = {
        **vars(result),
        "run_id": job.run_id,
        "siren": job.siren,
        "began": began,
        "merged": began and result.status is not Status.FAILED,
        "legal_name": card.legal_name(merged, card.PUBLIC),
        "sources": merged,
    }
    return row, result
