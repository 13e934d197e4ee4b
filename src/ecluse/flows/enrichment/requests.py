"""Requests for companies, and the result of a trigger: it joins the open job, starts one, or uses the stored data."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import NamedTuple, TypeVar

from ecluse.access.tenants import DEFAULT
from ecluse.base.errors import Conflict, NotFound
from ecluse.db.connect import Connection
from ecluse.db.query import Row, as_json, fetch_all, fetch_column, fetch_value
from ecluse.engine import Flow, Start, start_runs, write_events
from ecluse.flows.enrichment import card, events, metrics, records, rules
from ecluse.flows.enrichment.clients import Config
from ecluse.flows.enrichment.records import Looked, Taken
from ecluse.flows.enrichment.states import Status, Trigger, TriggerRequest
from ecluse.insight.causes import instant
from ecluse.insight.waiting import why_open
from ecluse.vendors.registers import Source

T = TypeVar("T")
TRIES = 5
HIDDEN = ("sources", "job_ended_at", "relaunchable", "open_job", "recipient", "now")  # columns of SHOW
SWEEP = "SWEEP"  # the trigger of jobs that no request has begun
# Ids are drawn in the order of the rows.
INSERT = """
INSERT INTO requests (tenant_id, company_siren, company_siret, correlation_id, created_by, job_id, created_at,
                      updated_at)
SELECT tenant, siren, siret, correlation, by, job, ecluse_now(), ecluse_now()
FROM jsonb_to_recordset(%s::jsonb) AS r(place integer, tenant text, siren text, siret text, correlation text, by text,
    job bigint) ORDER BY place RETURNING id
"""
SHOW = """
SELECT l.*, c.core_identity_present, c.sources_success_count, c.required_sources_failed_count,
       c.optional_sources_failed_count, c.sources, c.job_ended_at, c.relaunchable, j.run_id AS open_job,
       t.api_entreprise_recipient AS recipient, ecluse_now() AS now
FROM request_list l JOIN companies c ON c.siren = l.company_siren JOIN tenants t ON t.id = l.tenant_id
LEFT JOIN enrichment_jobs j ON j.siren = c.siren AND j.ended_at IS NULL WHERE l.tenant_id = %s AND l.id = ANY(%s)
"""
ATTACH = """
UPDATE requests r SET job_id = a.job, updated_at = ecluse_now()
FROM unnest(%s::bigint[], %s::bigint[]) AS a(id, job) WHERE r.id = a.id
"""
RECIPIENT = "SELECT api_entreprise_recipient FROM tenants WHERE id = %s"


class Desk(NamedTuple):
    """The connection, flow and settings with which requests are handled."""

    connection: Connection
    flow: Flow
    config: Config


class Shown(NamedTuple):
    """A request with the card of its company; `seen`: the sources whose facts the tenant may see; `wanting`: reading it
    triggers a job, because the data are missing or stale, and it is not attached to an open job already."""

    row: Row
    seen: list[Source]
    wanting: bool


class Launched(NamedTuple):
    """The result of a trigger: the job that the request is attached to, or None if the stored data are used."""

    job_id: int | None
    attached: bool

    @property
    def cached(self) -> bool:
        return self.job_id is None

    @property
    def result(self) -> str:
        return "cached" if self.cached else "attached" if self.attached else "started"


STORED = Launched(None, attached=False)


async def create(desk: Desk, wanted: Sequence[TriggerRequest]) -> list[tuple[int, Launched]]:
    """Insert requests of one tenant, and companies that are new; return the id and the result of each, in order."""

    async def attempt(tries: Tries) -> list[tuple[int, Launched]]:
        looked = await records.look(desk.connection, {one.siren for one in wanted})
        rows = [{**vars(one), "place": place, "job": looked[one.siren].held} for place, one in enumerate(wanted)]
        ids = sorted(await fetch_column(desk.connection, INSERT, (as_json(rows),)))
        made = [replace(one, request_id=id_) for one, id_ in zip(wanted, ids, strict=True)]
        held = {one.request_id: looked[one.siren].held for one in made}
        return [*zip(ids, await _launch(desk, made, looked, held, tries), strict=True)]

    return await _tried(desk.connection, attempt)


async def launch(desk: Desk, wanted: Sequence[TriggerRequest]) -> list[Launched]:
    """Attach requests of one tenant to the open jobs of their companies, start jobs, or use the stored data; emit
    Requested. An attached request cannot miss the end of its job, whose run is locked until this transaction ends."""

    async def attempt(tries: Tries) -> list[Launched]:
        looked = await records.look(desk.connection, {one.siren for one in wanted})
        return await _launch(desk, wanted, looked, {}, tries)

    return await _tried(desk.connection, attempt)


@dataclass
class Tries:
    """What the tries of a launch have learned so far. `taken`: companies whose job another transaction has started, or
    whose job of today has succeeded; `stored`: those of them whose job of today has."""

    taken: frozenset[str] = frozenset()
    stored: set[str] = field(default_factory=set)


class Changed(Conflict):
    """The jobs of these companies changed while they were looked at."""

    def __init__(self, sirens: Collection[str]) -> None:
        which = ", ".join(sorted(sirens))
        super().__init__(f"The job of company {which} changed during this request: repeat the request.")
        self.sirens = sirens


async def _tried(connection: Connection, attempt: Callable[[Tries], Awaitable[T]]) -> T:
    """Return the result of `attempt`, which is repeated if a job changes meanwhile; raise Conflict if one does at each
    of TRIES. Each try begins without the locks of the one before: two transactions that keep some locks while they wait
    for others would deadlock, because the order of locks (companies that are new, runs, companies, jobs) holds within a
    try."""
    tries, changed = Tries(), frozenset[str]()
    for _ in range(TRIES):
        try:
            async with connection.transaction():
                return await attempt(tries)
        except (Changed, Taken) as error:
            changed = frozenset(error.sirens)
            tries.taken = changed if isinstance(error, Taken) else frozenset()
    raise Changed(changed)


async def _launch(
    desk: Desk,
    wanted: Sequence[TriggerRequest],
    looked: Mapping[str, Looked],
    held: Mapping[int, int | None],
    tries: Tries,
) -> list[Launched]:
    """Attach requests, start jobs, or use the stored data, once; emit Requested. `looked`: the companies as they were
    just read; `held`: the jobs with which new requests were inserted. Raise Changed or Taken if a job changed."""
    first = {one.siren: one for one in reversed(wanted)}
    found = await _decided(desk, first, looked, tries)
    made = [
        (one, found[one.siren] if one is first[one.siren] else found[one.siren]._replace(attached=True))
        for one in wanted
    ]
    moved = {
        one.request_id: launched.job_id
        for one, launched in made
        if launched.job_id is not None and launched.job_id != held.get(one.request_id)
    }
    if moved:
        await desk.connection.execute(ATTACH, (list(moved), list(moved.values())))
    await write_events(desk.connection, [events.requested(one, cached=launched.cached) for one, launched in made])
    for one, launched in made:
        metrics.requests[str(one.trigger), launched.result] += 1
    return [launched for _, launched in made]


async def _decided(
    desk: Desk, first: Mapping[str, TriggerRequest], looked: Mapping[str, Looked], tries: Tries
) -> dict[str, Launched]:
    """Return the result of the first trigger of each company: all jobs that are needed are started together, because
    their order is one only within a statement. Raise Changed or Taken."""
    (connection, _, config), found = desk, dict[str, Launched]()
    # Taken without an open job: it was the idempotency key, the job of today has succeeded.
    automatic = {siren for siren, one in first.items() if one.trigger is not Trigger.MANUAL}
    tries.stored |= {one for one in tries.taken if one in automatic and looked[one].job is None}
    starting: list[TriggerRequest] = []
    left = set(first)
    for seen in (looked, None):  # the second look is at those whose job has ended during the first
        looked = seen or await records.look(connection, left, wait=False)
        for siren in sorted(left):
            one, (known, job, locked, now) = first[siren], looked[siren]
            match "cached" if siren in tries.stored else rules.decide(known, one.trigger, config.limits, now):
                case "cached":
                    found[siren] = STORED
                case "attach" if locked:
                    found[siren] = Launched(job, attached=True)
                case "start":
                    starting.append(one)
        if not (left := left - found.keys() - {one.siren for one in starting}):
            break
    else:
        raise Changed(left)
    if starting:
        await records.mark_stale(connection, config.limits.fresh, [one.siren for one in starting])
        started = await start(desk, starting, now)
        found |= {siren: Launched(job, attached=False) for siren, job in started.items()}
    return found


async def start(
    desk: Desk, wanted: Sequence[TriggerRequest], now: datetime, trigger: str | None = None
) -> dict[str, int]:
    """Start jobs of one tenant; return the run of each company. Raise Taken if a company has a job already. `trigger`:
    the trigger of jobs that no request began."""
    connection, flow, config = desk
    recipient = await recipient_of(connection, config, wanted[0].tenant)
    sources, starts = [str(source) for source in config.asked(recipient)], []
    for one in wanted:
        key = rules.job_key(one.siren, trigger or one.trigger, now)
        given = {
            "company_siren": one.siren,
            "trigger": trigger or str(one.trigger),
            "request_id": one.request_id,
            "asked": sources,
            "recipient": recipient,
            "idempotency_key": key,
        }
        starts.append(Start(flow, f"enrichment:{key}", one.tenant, given, correlation_id=one.correlation, again=True))
    found = {one.run.input["company_siren"]: one for one in await start_runs(connection, starts)}
    if taken := {siren for siren, one in found.items() if one.deduplicated}:
        raise Taken(taken)
    return {siren: one.run.id for siren, one in found.items()}


async def recipient_of(connection: Connection, config: Config, tenant: str) -> str | None:
    """Return the SIRET for which the tenant asks API Entreprise; None: it does not ask, and sees nothing of it."""
    return _recipient(config, tenant, await fetch_value(connection, RECIPIENT, (tenant,)))


def _recipient(config: Config, tenant: str, own: str | None) -> str | None:
    return own or (config.recipient if tenant == DEFAULT else None)


async def show(connection: Connection, config: Config, tenant: str, request_id: int) -> Shown:
    """Return a request with the card that the tenant may see, and what its job waits for. Raise NotFound."""
    if not (found := await show_all(connection, config, tenant, [request_id])):
        raise NotFound(f"There is no request {request_id}.")
    row = found[request_id].row
    row["waiting"] = await why_open(connection, tenant, row["job_id"]) or row["waiting"]
    return found[request_id]


async def show_all(connection: Connection, config: Config, tenant: str, ids: Collection[int]) -> dict[int, Shown]:
    """Return the requests of the tenant with these ids as `show` does, by id; unknown ids are left out."""
    rows = await fetch_all(connection, dict, SHOW, (tenant, list(ids)))
    return {row["id"]: _shown(config, tenant, row) for row in rows}


def _shown(config: Config, tenant: str, row: Row) -> Shown:
    sources, ended_at, relaunchable, job, own, now = (row.pop(name) for name in HIDDEN)
    entitled = _recipient(config, tenant, own) is not None
    seen = [one for one in Source if entitled or one is not Source.RCS]
    status, updated_at = Status(row["enrichment_status"]), row["company_updated_at"]
    known = rules.Known(status, updated_at, ended_at, relaunchable, job is not None)
    due = rules.decide(known, Trigger.OPENED, config.limits, now) != "cached"
    again = rules.kept_until(known, config.limits) if status is Status.FAILED and not due else None
    refresh = f"`ecluse requests refresh {row['id']}` asks at once"
    row["waiting"] = again and f"not asked for again before {instant(again)}, when it is read: {refresh}"
    row["company"] = card.card(sources, seen) or None
    return Shown(row, seen, due and (job is None or job != row["job_id"]))
