"""HTTP routes of audits: the configs, the audits made with them, and a start of one audit by hand."""

from __future__ import annotations

import hashlib
import uuid
from typing import Annotated

from fastapi import Query, Request, Response
from pydantic_core import to_jsonable_python

from ecluse.access import door, idempotency
from ecluse.access.changes import change, record
from ecluse.access.door import caller_of, needs
from ecluse.access.envelope import as_json, request_id
from ecluse.access.idempotency import Answer
from ecluse.access.wire import Limit, Offset, id_as_text, kit_of, number, reads_of, with_ids_as_text
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_value
from ecluse.engine import Start, start_run
from ecluse.flows.audits import configs, queries, shapes
from ecluse.flows.audits.flow import FLOW
from ecluse.flows.audits.queries import Status, Wanted
from ecluse.flows.fiches.ids import FicheId, in_names
from ecluse.flows.fiches.scopes import require_visible, visible

routes = door.routes("audits")

WantedFiche = Annotated[FicheId | None, Query()]
Id = Annotated[str | None, Query(pattern=r"^[1-9][0-9]{0,17}$", examples=["3"])]


@routes.get("/api/audit-configs", openapi_extra=needs("audits.read", narrowed=True), response_model=shapes.ConfigPage)
async def list_configs(request: Request, limit: Limit = 50, offset: Offset = 0, active: bool | None = None) -> Response:
    """List the audit configs of the tenant, by id. A key of a narrower scope gets the same list."""
    tenant = caller_of(request).tenant
    rows = await reads_of(request)(lambda c: configs.listed(c, tenant, active=active, limit=limit, offset=offset))
    return as_json({"configs": with_ids_as_text(rows), "limit": limit, "offset": offset})


@routes.post(
    "/api/audit-configs", openapi_extra=needs("audits.write"), status_code=201, response_model=shapes.ConfigRow
)
async def create_config(request: Request, body: shapes.NewConfig) -> Response:
    """Add a config, in its first version."""

    async def ask(connection: Connection) -> Answer:
        row = await configs.create(connection, caller_of(request).tenant, body.model_dump(mode="json"))
        await record(connection, request, "audit_config.create", f"audit_config:{row['id']}")
        return Answer(201, to_jsonable_python(id_as_text(row)))

    return await idempotency.once(request, kit_of(request).pool, ask)


@routes.get(
    "/api/audit-configs/{config_id}",
    openapi_extra=needs("audits.read", narrowed=True),
    response_model=shapes.ConfigRow,
)
async def show_config(request: Request, config_id: str) -> Response:
    """Show the current version of a config."""
    tenant, wanted = caller_of(request).tenant, number("audit config", config_id)
    return as_json(id_as_text(await reads_of(request)(lambda c: configs.show(c, tenant, wanted))))


@routes.patch("/api/audit-configs/{config_id}", openapi_extra=needs("audits.write"), response_model=shapes.ConfigRow)
async def change_config(request: Request, config_id: str, body: shapes.ChangedConfig) -> Response:
    """Change a config. Audits already made keep the version they were made with."""
    tenant, wanted = caller_of(request).tenant, number("audit config", config_id)
    given = body.model_dump(mode="json", exclude_unset=True)
    given = {name: value for name, value in given.items() if value is not None or name == "model"}
    async with change(request, "audit_config.update", f"audit_config:{wanted}") as connection:
        row = await configs.update(connection, tenant, wanted, given)
    return as_json(id_as_text(row))


@routes.delete("/api/audit-configs/{config_id}", openapi_extra=needs("audits.write"), response_model=shapes.Deleted)
async def delete_config(request: Request, config_id: str) -> Response:
    """Delete a config, for good. Audits made with it stay."""
    tenant, wanted = caller_of(request).tenant, number("audit config", config_id)
    async with change(request, "audit_config.delete", f"audit_config:{wanted}") as connection:
        await configs.delete(connection, tenant, wanted)
    return as_json({"id": config_id, "deleted": True})


@routes.get("/api/audits", openapi_extra=needs("audits.read", narrowed=True), response_model=shapes.AuditPage)
async def list_audits(
    request: Request,
    limit: Limit = 50,
    offset: Offset = 0,
    fiche_id: WantedFiche = None,
    audit_config_id: Id = None,
    automation_run_id: Id = None,
    status: Status | None = None,
    latest: bool | None = None,
) -> Response:
    """List audits, the newest first, without their results. A caller of a narrow scope sees the audits of its own
    fiches."""
    caller = caller_of(request)
    wanted = Wanted(fiche_id, _number(audit_config_id), _number(automation_run_id), status, latest)
    rows = await reads_of(request)(
        lambda c: queries.list_audits(c, caller.tenant, wanted, visible=visible(caller), limit=limit, offset=offset)
    )
    return as_json({"audits": with_ids_as_text(rows), "limit": limit, "offset": offset})


@routes.get(
    "/api/audits/{audit_id}", openapi_extra=needs("audits.read", narrowed=True), response_model=shapes.AuditInFull
)
async def show_audit(request: Request, audit_id: str) -> Response:
    """Show an audit in full: what was asked, how each step was judged, and where its quotes were found."""
    caller, wanted = caller_of(request), number("audit", audit_id)
    audit = await reads_of(request)(lambda c: queries.show_audit(c, caller.tenant, wanted, visible=visible(caller)))
    return as_json(id_as_text(audit))


@routes.post(
    "/api/audits",
    openapi_extra=needs("audits.write", narrowed=True),
    status_code=201,
    response_model=shapes.StartedAudit,
    responses={200: {"model": shapes.StartedAudit, "description": "The key was known; nothing new was started"}},
)
async def start_audit(request: Request, body: shapes.NewAudit) -> Response:
    """Audit one fiche with one config, now. With an `Idempotency-Key`, a repeated request gets the same response."""
    kit, caller = kit_of(request), caller_of(request)
    start = Start(
        kit.flow(FLOW),
        f"audit-{in_names(body.fiche_id)}-{body.audit_config_id}-{_name(request)}",
        tenant_id=caller.tenant,
        input=body.model_dump(),
        correlation_id=request_id(request),
    )

    async def ask(connection: Connection) -> Answer:
        await require_visible(connection, caller, [body.fiche_id])
        started = await start_run(connection, start)
        run = started.run
        audit_id = await fetch_value(connection, "SELECT id FROM audits WHERE run_id = %s", (run.id,)) or 0
        told = {"audit_id": str(audit_id), "run_id": str(run.id), "event_key": run.event_key}
        return Answer(200 if started.deduplicated else 201, told)

    return await idempotency.once(request, kit.pool, ask)


def _name(request: Request) -> str:
    """Return the request's part of the event key. Derived from the idempotency key, so that a repeated request whose
    stored response has expired still finds the first one's run."""
    key = idempotency.key_of(request)
    return uuid.uuid4().hex if key is None else hashlib.sha256(key.encode()).hexdigest()[:32]


def _number(given: str | None) -> int | None:
    return None if given is None else int(given)
