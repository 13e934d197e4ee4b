"""Audits in the API, the command line and the pages: the configs, the audits made with them, and the start of one audit
by hand."""

from __future__ import annotations

import hashlib
import uuid
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from ecluse.access.commands import Command
from ecluse.access.listing import Filters, Listing, Where, every_row
from ecluse.access.resource import Resource
from ecluse.access.surface import Act, Look, Noun, Surface
from ecluse.access.wire import Body, Shape
from ecluse.base.validation import fields_of, partial_of
from ecluse.db.query import Row, fetch_value
from ecluse.engine import Start, require_budget, start_run
from ecluse.flows.audits import configs, queries
from ecluse.flows.audits.flow import FLOW
from ecluse.flows.audits.steps import Steps
from ecluse.flows.fiches.ids import FicheId, in_names
from ecluse.flows.fiches.scopes import require_visible, visible, visible_rows

surface = Surface("audits")
Status = Literal["pending", "running", "completed", "failed"]

Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"\S", examples=["Compliance of sales calls"])]
Description = Annotated[str, Field(max_length=2_000, examples=["What the law asks of a sale by telephone."])]
Prompt = Annotated[str, Field(max_length=20_000, examples=["You know French insurance law."])]
Model = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^\S+$", examples=["gpt-4.1"])]
ConfigId = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,17}$", examples=["3"])]


class NewConfig(Body):
    name: Name
    description: Description = ""
    steps: Steps
    system_prompt: Prompt = ""
    model: Model | None = None
    run_automatically: bool = Field(False, description="Used by every automation schedule with automatic audits.")
    is_active: bool = True


@partial_of(NewConfig)
class ChangedConfig(Body):
    """Changes to a config: fields that are left out stay as they are. A changed text, step or model makes a new
    version."""

    model: Model | None = Field(None, description="null: the model of LLM_MODEL.")


@fields_of(NewConfig, without=("steps", "system_prompt"))
class ConfigFacts(Shape):
    id: str = Field(examples=["3"])
    tenant_id: str = Field(examples=["default"])
    version: int = Field(examples=[1])
    created_at: datetime
    updated_at: datetime


class ConfigRow(ConfigFacts):
    """Lists have neither steps nor prompts, which may be large."""

    step_count: int = Field(examples=[12])


@fields_of(NewConfig)
class ConfigInFull(ConfigFacts):
    """The current version of a config."""


class NewAudit(Body):
    fiche_id: FicheId
    audit_config_id: ConfigId
    use_rlm: bool = Field(False, description="Stored with the audit unchanged; it has no effect.")


class StartedAudit(Shape):
    audit_id: str = Field(examples=["12"])
    run_id: str = Field(examples=["7"])
    event_key: str = Field(examples=["audit-171234-3-5f0c…"])


class AuditRow(Shape):
    id: str = Field(examples=["12"])
    tenant_id: str = Field(examples=["default"])
    fiche_id: str = Field(examples=["171234"])
    fiche_cache_id: str
    audit_config_id: str = Field(examples=["3"])
    config_version: int = Field(examples=[1])
    config_name: str = Field(description="Name of the config in that version.")
    status: Status
    score: str | None = Field(examples=["87.50"], description="From 0 to 100, by the weights of the steps.")
    is_latest: bool = Field(description="The latest ended audit of its fiche and config, completed or failed.")
    use_rlm: bool
    trigger_source: Literal["automation", "api"]
    run_id: str
    automation_run_id: str | None
    automation_schedule_id: str | None
    unverified_steps: int | None = Field(description="Number of steps with quotes, none of which is in a transcript.")
    error_code: str | None = Field(examples=["NO_TRANSCRIPT"])
    error: str | None
    model: str | None = Field(description="The model that answered, as its vendor names it.")
    input_tokens: int | None
    output_tokens: int | None
    cost: str | None = Field(
        examples=["0.012345"], description="Cost by the prices in the settings; null without them."
    )
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None


class Evidence(Shape):
    quote: str
    call_id: str | None = Field(description="The recording in which the quote was found.")
    position: int | None = Field(description="Position of its first character in the transcript of that recording.")
    verified: bool = Field(description="True if the quote was found in a transcript of the fiche.")


class JudgedStep(Shape):
    name: str
    score: float
    max: int
    weight: float
    comment: str
    evidence: list[Evidence]
    unverified: bool = Field(False, description="True if it has quotes, and none of them is in a transcript.")


class AuditResult(Shape):
    steps: list[JudgedStep]


class AuditInFull(AuditRow):
    result: AuditResult | None
    config: dict[str, Any] = Field(description="The config in the version that the audit was made with.")
    maybe_paid: int = Field(description="Repetitions of a call that may have been paid for before.")


class ConfigFilters(Filters):
    active: Annotated[bool | None, Where("t.is_active = %(active)s")] = None


class AuditFilters(Filters):
    fiche_id: FicheId | None = None
    audit_config_id: ConfigId | None = None
    automation_run_id: ConfigId | None = None
    status: Status | None = None
    latest: Annotated[bool | None, Where("t.is_latest = %(latest)s")] = None


CONFIG = Resource(surface, "/api/audit-configs/{config_id}", "audits", "audit_config", "audits configs", ConfigInFull)
CONFIGS = Listing(
    "configs",
    ConfigRow,
    "(SELECT *, jsonb_array_length(steps) AS step_count FROM audit_configs)",
    "audits.read",
    filters=ConfigFilters,
    order=("id",),
    where="t.deleted_at IS NULL",
    visible=every_row,
)
AUDITS = Listing("audits", AuditRow, "audit_list", "audits.read", filters=AuditFilters, visible=visible_rows)
ConfigNumber = Annotated[int, Noun("audit config")]

CONFIG.lists(
    CONFIGS,
    list_configs="List the audit configs of the tenant, by id, without their steps and prompts. A key of a narrower"
    " scope gets the same list.",
    columns=("id", "version", "run_automatically", "is_active", "step_count", "name"),
    empty="no configs yet: `ecluse audits configs create`",
)
surface.listing(
    "/api/audits",
    AUDITS,
    list_audits="List audits, the newest first, without their results. A caller of a narrow scope sees the audits of"
    " its own fiches.",
    command=Command(
        "audits list", columns=("id", "fiche_id", "status", "score", "unverified_steps", "error_code", "config_name")
    ),
)


@CONFIG.creates(refuses=["LIMIT_REACHED"], arguments=("name",))
async def create_config(act: Act, body: NewConfig) -> Row:
    """Create a config, in its first version."""
    await act.require_room("audit_configs")
    return await configs.create(act.connection, act.tenant, body.model_dump(mode="json"))


@CONFIG.shows(narrowed=True)
async def show_config(look: Look, config_id: ConfigNumber) -> Row:
    """Show the current version of a config."""
    return await configs.show(look.connection, look.tenant, config_id)


@CONFIG.changes(action="update")
async def change_config(act: Act, config_id: ConfigNumber, body: ChangedConfig) -> Row:
    """Change a config. Audits already made keep the version they were made with."""
    return await configs.update(act.connection, act.tenant, config_id, body.changes("model", mode="json"))


@CONFIG.deletes()
async def delete_config(act: Act, config_id: ConfigNumber) -> Row:
    """Delete a config, for good. Audits made with it stay."""
    await configs.delete(act.connection, act.tenant, config_id)
    return {"id": str(config_id), "deleted": True}


@surface.read(
    "/api/audits/{audit_id}",
    needs="audits.read",
    narrowed=True,
    answer=AuditInFull,
    command=Command("audits show"),
)
async def show_audit(look: Look, audit_id: Annotated[int, Noun("audit")]) -> Row:
    """Show an audit in full: the config in its version, the judgement of each step, and the places of its quotes."""
    return await queries.show_audit(look.connection, look.tenant, audit_id, visible=visible(look.caller))


@surface.operation(
    "POST",
    "/api/audits",
    needs="audits.write",
    narrowed=True,
    answer=StartedAudit,
    status=201,
    also={200: "The key was known; nothing new was started"},
    action="audit.start",
    subject="run:{run_id}",
    refuses=("SCOPE", "CONFIG_INACTIVE", "BUDGET_EXCEEDED", "NO_CONNECTION"),
    command=Command("audits run", arguments=("fiche_id", "audit_config_id"), follows="run_id"),
)
async def start_audit(act: Act, body: NewAudit) -> Row:
    """Audit one fiche with one config, now. With an `Idempotency-Key`, a repeated request gets the same response."""
    await require_visible(act.connection, act.caller, [body.fiche_id])
    # From the idempotency key, so that a repetition whose stored answer has expired still finds the first one's run.
    key = act.idempotency_key
    name = uuid.uuid4().hex if key is None else hashlib.sha256(key.encode()).hexdigest()[:32]
    start = Start(
        act.kit.flow(FLOW),
        f"audit-{in_names(body.fiche_id)}-{body.audit_config_id}-{name}",
        tenant_id=act.tenant,
        input=body.model_dump(),
        correlation_id=act.request_id,
    )
    started = await start_run(act.connection, start)
    if started.deduplicated:
        act.answers(200)
        act.changes_nothing()
    else:
        await require_budget(act.connection, start.flow, act.tenant)
    run = started.run
    audit_id = await fetch_value(act.connection, "SELECT id FROM audits WHERE run_id = %s", (run.id,)) or 0
    return {"audit_id": str(audit_id), "run_id": str(run.id), "event_key": run.event_key}
