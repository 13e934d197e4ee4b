"""Pages of company enrichment: the requests, the card of a company with its history, and the registers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Query, Request, Response
from markupsafe import Markup
from pydantic import BaseModel

from ecluse.access.door import caller_of, needs
from ecluse.access.listing import read_page
from ecluse.access.wire import Filter, Offset, number, reads_of
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_all
from ecluse.flows.enrichment import card, history, requests
from ecluse.flows.enrichment.clients import Config
from ecluse.flows.enrichment.flow import LANES
from ecluse.flows.enrichment.states import MEANING, REQUIRED, Status
from ecluse.flows.enrichment.surface import READ, REQUESTS, StatusWord
from ecluse.vendors.registers import ErrorCode, Source, text_of
from ecluse.web import forms, live, render
from ecluse.web.actions import buttons
from ecluse.web.authentication import Page
from ecluse.web.lanes import caps
from ecluse.web.live import Context
from ecluse.web.shops import Column

ROWS, JOBS, SNAPSHOTS = 25, 10, 10  # rows of each on a page
HOME, SOURCES = "/ui/requests", "/ui/requests/sources"
routes = APIRouter(route_class=Page, include_in_schema=False)
LIST = live.Page("requests_live.html")
ONE = live.Page("company_live.html", ("title", "header", "facts", "history"))
REGISTERS = live.Page("registers_live.html")
SEEN_LANES = "SELECT * FROM lane_list WHERE tenant_id = %s AND name = ANY(%s)"
LISTS = ("establishments", "directors", "observations")  # fields that are tables of their own
# Values of establishments, directors and observations, in the order in which people read them; jsonb keeps no order.
COLUMNS = """
siret trade_name address postal_code city head_office state activity_code creation_date
role type last_name first_names name siren born nationality masked date numero libelle
""".split()  # noqa: SIM905 - shorter
OPEN = (Status.PENDING, Status.RUNNING)


class ListFilters(BaseModel):
    """Filters and offset of the list of requests."""

    q: Filter = None
    siren: Filter = None
    status: StatusWord | None = None
    offset: Offset = 0


FiltersOfList = Annotated[ListFilters, Query()]


class Group(NamedTuple):
    """A section of the card: its heading, and its fields by name, each with value, source and date."""

    title: str
    fields: Mapping[str, Mapping[str, Any]]


@routes.get(HOME, openapi_extra=needs(READ))
async def show_requests(request: Request, filters: FiltersOfList) -> Response:
    shown = await _requests(request, filters)
    return render.page(request, "requests.html", regions=LIST.regions(request, **shown), **shown)


@routes.get(f"{HOME}/live", openapi_extra=needs(READ))
async def follow_requests(request: Request, filters: FiltersOfList) -> Response:
    return live.stream(
        request,
        READ,
        LIST,
        lambda: _requests(request, filters),
        lambda message: live.said(message, "job_id") is not None,
    )


@routes.get(SOURCES, openapi_extra=needs(READ))
async def show_sources(request: Request) -> Response:
    shown = await _sources(request)
    return render.page(request, "registers.html", regions=REGISTERS.regions(request, **shown), **shown)


@routes.get(f"{SOURCES}/live", openapi_extra=needs(READ))
async def follow_sources(request: Request) -> Response:
    return live.stream(request, READ, REGISTERS, lambda: _sources(request), lambda _: False)


@routes.get(f"{HOME}/{{request_id}}", openapi_extra=needs(READ))
async def show_one(request: Request, request_id: str) -> Response:
    wanted = number("request", request_id)
    # As over HTTP, opening a request starts a job if the data of its company are missing or stale.
    await forms.read(request, lambda route: route.name == "show_request", {"request_id": str(wanted)})
    shown = await _company(request, wanted)
    return render.page(request, "company.html", regions=ONE.regions(request, **shown), **shown)


@routes.get(f"{HOME}/{{request_id}}/live", openapi_extra=needs(READ))
async def follow_one(request: Request, request_id: str) -> Response:
    wanted = number("request", request_id)
    job = (await _company(request, wanted))["one"]["job_id"]  # raises NotFound
    return live.stream(
        request,
        READ,
        ONE,
        lambda: _company(request, wanted),
        lambda message: live.said(message, "job_id") == str(job),
    )


async def _requests(request: Request, filters: ListFilters) -> Context:
    given = {"q": filters.q or None, "siren": filters.siren or None, "status": filters.status}
    caller = caller_of(request)
    page = await reads_of(request)(
        lambda connection: read_page(connection, caller, REQUESTS, given, limit=ROWS, offset=filters.offset)
    )
    rows: list[Row] = page[REQUESTS.name]
    for row in rows:
        row |= {
            "name": row["legal_name"] or ("not known yet" if row["enrichment_status"] in OPEN else "not known"),
            "number": Markup('<span class="id">{}</span>').format(row["company_siren"]),
            "reason": _in_lines(row["enrichment_error"] or render.NONE),
            "status": row["enrichment_status"],
            "state": MEANING[Status(row["enrichment_status"])],
            "href": f"{HOME}/{row['id']}",
        }
    columns = (
        Column("name", "Company"),
        Column("status", "Status"),
        Column("number", "SIREN"),
        Column("reason", "Reason"),
        Column("company_updated_at", "Data fetched"),
        Column("created_by", "By"),
        Column("created_at", "Requested"),
    )
    return {
        "wanted": filters,
        "rows": rows,
        "columns": columns,
        "statuses": list(MEANING),
        "new": buttons(request, ("create_request", {}), back=HOME),
        "more": page["next_cursor"] is not None,
        "size": ROWS,
        "busy": any(row["status"] in OPEN for row in rows),
        "over": False,
    }


def _in_lines(error: str) -> Markup:
    """Format an error `SOURCE:HTTP:CODE|…` with one entry per line; a line may wrap only after a colon."""
    return Markup("<br>").join(Markup(":<wbr>").join(entry.split(":")) for entry in error.split("|"))


async def _company(request: Request, request_id: int) -> Context:
    config: Config = request.app.state.enrichment
    tenant = caller_of(request).tenant

    async def ask(connection: Connection) -> Context:
        one, seen, _ = await requests.show(connection, config, tenant, request_id)
        return {
            "one": one,
            "jobs": await history.jobs(connection, one["company_siren"], tenant, JOBS),
            "snapshots": await history.snapshots(connection, one["company_siren"], seen, SNAPSHOTS),
        }

    shown = await reads_of(request)(ask)
    one, back = shown["one"], f"{HOME}/{request_id}"
    name = one["legal_name"] or f"Company {one['company_siren']}"
    for row in (*shown["jobs"], *shown["snapshots"]):
        row["state"] = MEANING[Status(row["status"])]
    return {
        **shown,
        "name": name,
        "title": f"{name} {one['enrichment_status']} · Ecluse",
        "state": MEANING[Status(one["enrichment_status"])],
        "reasons": reasons(one["enrichment_error"]),
        "failure": failure(one["enrichment_error"]),
        "groups": groups(one["company"] or {}),
        "lists": {field: one["company"][field] for field in LISTS if field in (one["company"] or {})},
        "columns_of": columns_of,
        "in_words": in_words,
        "buttons": buttons(request, ("refresh_company", {"request_id": request_id}), back=back),
        "busy": one["enrichment_status"] in OPEN,
        "over": False,
    }


async def _sources(request: Request) -> Context:
    config: Config = request.app.state.enrichment
    tenant = caller_of(request).tenant

    async def ask(connection: Connection) -> tuple[Collection[Source], dict[str, Row], dict[str, Row]]:
        asked = config.asked(await requests.recipient_of(connection, config, tenant))
        lanes = await fetch_all(connection, dict, SEEN_LANES, (tenant, list(LANES.values())))
        return asked, {one["name"]: one for one in lanes}, await history.sources(connection)

    asked, lanes, figures = await reads_of(request)(ask)
    rows = [
        {
            "source": source,
            "required": source in REQUIRED,
            "asked": source in asked,
            "lane": lanes.get(LANES[source]),
            "pace": caps(lanes[LANES[source]]) if LANES[source] in lanes else render.NONE,
            "url": config.urls[source],
            "missing": missing(source, config),
            **figures[source],
        }
        for source in Source
    ]
    return {"rows": rows, "busy": True, "over": False}


def groups(company: Mapping[str, Mapping[str, Any]]) -> Sequence[Group]:
    """Divide the fields of a card that are not tables into identity and legal details, in the order of the card. A
    group without fields is left out."""
    single = {name: one for name, one in company.items() if name not in LISTS}
    identity = {name: one for name, one in single.items() if card.FIELDS[name] is card.IDENTITY}
    legal = {name: one for name, one in single.items() if name not in identity}
    return [group for group in (Group("Identity", identity), Group("Legal details", legal)) if group.fields]


def reasons(error: str | None) -> list[dict[str, str]]:
    """Split an error `SOURCE:HTTP:ERROR_CODE|…` into its entries, each with an explanation in `says` (empty for an
    unknown code). An entry without a code is left out."""
    found = []
    for entry in (error or "").split("|"):
        source, _, rest = entry.partition(":")
        status, _, code = rest.partition(":")
        if code:
            found.append({"source": source, "http": status, "code": code, "says": _says(code, status)})
    return found


def _says(code: str, status: str) -> str:
    if code == ErrorCode.CORE_IDENTITY_MISSING:
        return "no register gave the legal name of the company"
    known = code in list(ErrorCode)
    return text_of(ErrorCode(code), int(status) if status.isdecimal() else None).partition(":")[0] if known else ""


def failure(error: str | None) -> str:
    """Describe in one sentence why a job failed, by the error of the required register. Optional registers may have
    answered: nothing is stored of them without the required one."""
    required = [one for one in reasons(error) if one["source"] in REQUIRED]
    match required[0]["code"] if required else "":
        case ErrorCode.NOT_FOUND:
            return f"{required[0]['source']}, which is required, does not have this company."
        case ErrorCode.CORE_IDENTITY_MISSING:
            return "The registers have answered, but none gave the legal name of the company."
        case "" | ErrorCode.UNKNOWN:
            return "The job ended before the required register answered."
    return f"{required[0]['source']}, which is required, could not be asked."


def in_words(value: Any) -> Markup | str:
    """Format the value of a field: an establishment as its address and SIRET, a list as its entries, a float with two
    decimals, and everything else as `render.formatted` does."""
    match value:
        case dict():
            return ", ".join(str(value[name]) for name in ("address", "siret") if value.get(name)) or render.as_line(
                value
            )
        case list():
            return ", ".join(str(one) for one in value)
        case float():
            return f"{value:,.2f}"
    return render.formatted(value)


def columns_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the values that at least one row has: those of COLUMNS in their order, then others by
    name."""
    found = {name for row in rows for name, value in row.items() if value not in (None, "")}
    return [name for name in COLUMNS if name in found] + sorted(found.difference(COLUMNS))


def missing(source: Source, config: Config) -> str:
    """Return what a register that is not asked lacks: settings, or the recipient of the tenant."""
    if source is Source.INPI:
        return "set INPI_USERNAME and INPI_PASSWORD"
    if config.token is None:
        return "set API_ENTREPRISE_TOKEN"
    return "the tenant has no recipient: ecluse enrichment recipient"
