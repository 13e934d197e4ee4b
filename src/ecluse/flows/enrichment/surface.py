"""Company enrichment in the API and on the command line: requests, the feed of events, erasure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import ConfigDict, Field

from ecluse.access import tenants
from ecluse.access.changes import record
from ecluse.access.commands import Command
from ecluse.access.envelope import Refused
from ecluse.access.listing import Filters, Listing, Where
from ecluse.access.surface import Act, CallerRequest, Look, Noun, Surface
from ecluse.access.wire import LARGEST_ID, Body, Filter, Shape, id_as_text, writes_of
from ecluse.db.connect import Connection
from ecluse.db.groups import Groups
from ecluse.db.query import Row
from ecluse.db.reads import Reads
from ecluse.engine import read_published
from ecluse.flows.enrichment import erasure, requests, rules
from ecluse.flows.enrichment.clients import Config
from ecluse.flows.enrichment.requests import Desk, Launched
from ecluse.flows.enrichment.states import Trigger, TriggerRequest

surface = Surface("enrichment")
READ, WRITE = "requests.read", "requests.write"
ONE = "/v1/requests/{request_id}"
StatusWord = Literal["PENDING", "RUNNING", "SUCCESS", "PARTIAL", "FAILED", "STALE"]
Siren = Annotated[str, Field(max_length=40, examples=["552049447"])]
RequestNumber = Annotated[int, Noun("request")]


class NewRequest(Body):
    """The company to ask for: one of the two numbers is enough. Blanks are ignored."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"company_siren": "552049447"}]})

    company_siren: Siren | None = None
    company_siret: Annotated[str, Field(max_length=40, examples=["55204944700014"])] | None = None


class CardField(Shape):
    value: Any
    source: str = Field(examples=["INPI_RNE"])
    at: datetime = Field(description="When the register said so.")


class RequestRow(Shape):
    id: str = Field(examples=["3"])
    tenant_id: str = Field(examples=["default"])
    company_siren: str
    company_siret: str | None
    legal_name: str | None
    enrichment_status: StatusWord
    enrichment_error: str | None = Field(
        description="`SOURCE:HTTP:ERROR_CODE`, one entry per failed source, separated by `|`."
    )
    company_updated_at: datetime | None = Field(description="The last merge: freshness counts from it.")
    job_id: str | None = Field(description="The run that is its job, or the last job of its company.")
    created_by: str
    created_at: datetime
    updated_at: datetime


class RequestShown(RequestRow):
    core_identity_present: bool
    sources_success_count: int
    required_sources_failed_count: int
    optional_sources_failed_count: int
    waiting: str | None = Field(None, description="What its open job waits for, or when a failed one is repeated.")
    company: dict[str, CardField] | None = Field(
        description="What the registers say, field by field, as far as the tenant may see it; null: nothing yet."
    )


class Created(RequestShown):
    cached: bool = Field(description="What is stored is used: no job was started or joined, and no Completed follows.")


class Refreshed(Shape):
    request_id: str
    job_id: str
    attached: bool = Field(description="The job was open already.")
    enrichment_status: StatusWord


class RequestFilters(Filters):
    siren: Annotated[Filter, Where("t.company_siren = %(siren)s")] = None
    status: Annotated[StatusWord | None, Where("t.enrichment_status = %(status)s")] = None
    q: Annotated[
        Filter,
        Where("(t.legal_name ILIKE '%%' || %(q)s || '%%' OR t.company_siren LIKE %(q)s || '%%')"),
        Query(description="A part of the name, or the beginning of the SIREN."),
    ] = None


class CompanyEventRow(Shape):
    seq: int
    event_key: str
    event_type: str = Field(examples=["CompanyEnrichmentCompleted"])
    tenant_id: str
    correlation_id: str
    producer: str = Field(examples=["M3"])
    occurred_at: datetime
    payload: dict[str, Any]


class CompanyEventPage(Shape):
    events: list[CompanyEventRow]
    next_after: int = Field(description="`after` of the next page, or of the next poll.")


class ErasureReason(Body):
    reason: Annotated[str, Field(min_length=1, max_length=500, pattern=r"\S", examples=["asked for by the director"])]


class Erased(Shape):
    company_siren: str
    companies: int
    snapshots: int
    jobs: int
    requests: int


class NewRecipient(Body):
    recipient: Annotated[str, Field(max_length=40)] | None = Field(
        examples=["13002526500013"],
        description="SIRET of the administration; null: the tenant neither asks API Entreprise nor sees what it says.",
    )


class Recipient(Shape):
    tenant_id: str
    recipient: str | None


REQUESTS = Listing("requests", RequestRow, "request_list", READ, filters=RequestFilters)
surface.listing(
    "/v1/requests",
    REQUESTS,
    list_requests="List the tenant's requests for companies, the newest first.",
    command=Command(
        "requests list",
        columns=("id", "company_siren", "legal_name", "enrichment_status", "enrichment_error", "created_at"),
        empty="no requests yet: `ecluse enrich SIREN`",
    ),
)


def _config(asked: CallerRequest) -> Config:
    config: Config = asked.state.enrichment
    return config


async def _waited(asked: CallerRequest, answer: Row) -> Row:
    """Wait for the end of the job until the request is `sync_wait` (1.2 s) old, unless there are fresh data, and return
    the request as it is then. The job goes on in any case."""
    updated_at = answer["company_updated_at"]
    fresh = updated_at is not None and asked.kit.clock.now() - updated_at < _config(asked).limits.fresh
    if answer["cached"] or fresh:
        return answer
    await asked.kit.wait_for_run(int(answer["job_id"]), _config(asked).sync_wait - asked.age)
    return await SHOWN.ask((asked.state.reads, asked.tenant), (asked, int(answer["id"]))) | {"cached": False}


async def _show_all(whose: tuple[Reads, str], wanted: Sequence[tuple[CallerRequest, int]]) -> list[Row]:
    (reads, tenant), config, ids = whose, _config(wanted[0][0]), [one for _, one in wanted]
    found = await reads.of(tenant)(lambda connection: requests.show_all(connection, config, tenant, ids))
    return [id_as_text(found[one].row) for one in ids]


SHOWN = Groups(_show_all)  # requests that waited for the same jobs are read together


async def _create(acts: Sequence[Act]) -> list[Row]:
    desk = _desk(acts[0], acts[0].connection)
    created = await requests.create(desk, [act.before for act in acts])
    ids = [request_id for request_id, _ in created]
    found = await requests.show_all(desk.connection, desk.config, acts[0].tenant, ids)
    return [found[request_id].row | {"cached": launched.cached} for request_id, launched in created]


@surface.operation(
    "POST",
    "/v1/requests",
    needs=WRITE,
    answer=Created,
    status=201,
    action="request.create",
    subject="request:{id}",
    together=_create,
    after=_waited,
    refuses=("CONFLICT",),
    command=Command("enrich", arguments=("company_siren",), example="ecluse enrich 552049447"),
)
async def create_request(asked: CallerRequest, body: NewRequest) -> TriggerRequest:
    """Ask for a company. Fresh data are answered at once; otherwise the registers are asked, and the answer waits for
    them until the request is 1.2 s old: `enrichment_status` says how far it is."""
    siren, siret = rules.identifiers(body.company_siren, body.company_siret)
    return replace(_about(asked, 0, siren, siret, Trigger.CREATED), by=asked.caller.name)


@surface.read(ONE, needs=READ, answer=RequestShown, command=Command("requests show"))
async def show_request(look: Look, request_id: RequestNumber) -> Row:
    """Show a request with the card of its company. If the data are missing or stale, they are answered as they are, and
    a job is started, unless the tenant is disabled."""
    config = _config(look)
    shown = await requests.show(look.connection, config, look.tenant, request_id)
    if shown.wanting and not look.caller.disabled:
        async with writes_of(look.request).connection(look.tenant) as connection, connection.transaction():
            await _launch(look, connection, shown.row, Trigger.OPENED)
            shown = await requests.show(connection, config, look.tenant, request_id)
    return shown.row


@surface.operation(
    "POST",
    ONE + ":refresh-company",
    needs=WRITE,
    answer=Refreshed,
    status=202,
    action="request.refresh",
    subject="request:{request_id}",
    refuses=("CONFLICT",),
    command=Command("requests refresh", follows="job_id"),
)
async def refresh_company(act: Act, request_id: RequestNumber) -> Row:
    """Ask the registers again for the company of a request, however fresh its data are; or join the job that does."""
    row, *_ = await requests.show(act.connection, _config(act), act.tenant, request_id)
    launched = await _launch(act, act.connection, row, Trigger.MANUAL)
    return {
        "request_id": str(request_id),
        "job_id": str(launched.job_id),
        "attached": launched.attached,
        "enrichment_status": row["enrichment_status"],
    }


@surface.read("/v1/events", needs=READ, answer=CompanyEventPage, command=Command("requests events"))
async def list_enrichment_events(
    look: Look,
    after: Annotated[int, Query(ge=0, le=LARGEST_ID, description="`next_after` of the page before.")] = 0,
    limit: Annotated[int, Query(ge=1, le=500, description="Maximum number of events in the answer.")] = 100,
) -> Row:
    """List the events of company enrichment for this tenant in the order of their publishing, after a position."""
    found = await read_published(look.connection, after, look.tenant, limit, rules.PRODUCER)
    rows = [{name: getattr(event, name) for name in CompanyEventRow.model_fields} for event in found]
    return {"events": rows, "next_after": found[-1].seq if found else after}


@surface.operation(
    "POST",
    "/api/erasure/companies/{siren}",
    needs="erasure.write",
    answer=Erased,
    action=None,  # recorded with what was removed
    refuses=("RUN_OPEN",),
    command=Command("enrichment erase"),
)
async def erase_company(act: Act, siren: str, body: ErasureReason) -> Row:
    """Erase a company for good, for all tenants: what the registers said of it, snapshots, jobs and requests. Only for
    admins of the tenant `default`."""
    _administrators_only(act)
    found, _ = rules.identifiers(siren, None)
    erased = await erasure.erase(act.connection, [found])
    said = f"{body.reason} ({erased.in_words()})"
    await record(act.connection, act.request, "company.erase", f"company:{found}", said)
    return {"company_siren": found, **erased._asdict()}


@surface.operation(
    "POST",
    "/api/tenants/{tenant}/recipient",
    needs="tenants.write",
    answer=Recipient,
    action="tenant.recipient",
    subject="tenant:{tenant}",
    command=Command("enrichment recipient", arguments=("recipient",)),
)
async def set_recipient(act: Act, tenant: str, body: NewRecipient) -> Row:
    """Set the SIRET of the administration for which a tenant asks API Entreprise and sees its data; null ends both.
    Only for admins of the tenant `default`."""
    _administrators_only(act)
    await tenants.require(act.connection, tenant)
    siret = None if body.recipient is None else rules.identifiers(None, body.recipient)[1]
    statement = "UPDATE tenants SET api_entreprise_recipient = %s WHERE id = %s"
    await act.connection.execute(statement, (siret, tenant))
    return {"tenant_id": tenant, "recipient": siret}


def _administrators_only(asked: CallerRequest) -> None:
    if not asked.caller.administers_tenants:
        raise Refused(403, "FORBIDDEN", f"Only an admin key of the tenant {tenants.DEFAULT} may do this.")


def _desk(asked: CallerRequest, connection: Connection) -> Desk:
    return Desk(connection, asked.kit.flow(rules.FLOW), _config(asked))


def _about(asked: CallerRequest, request_id: int, siren: str, siret: str | None, trigger: Trigger) -> TriggerRequest:
    key = f"{trigger}:{asked.request_id}"
    return TriggerRequest(asked.tenant, siren, trigger, asked.request_id, request_id, siret, key)


async def _launch(asked: CallerRequest, connection: Connection, row: Row, trigger: Trigger) -> Launched:
    """Trigger enrichment by a stored request, and return the result."""
    about = _about(asked, row["id"], row["company_siren"], row["company_siret"], trigger)
    return (await requests.launch(_desk(asked, connection), [about]))[0]
