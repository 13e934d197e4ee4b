"""Request and response models of the audit routes."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from ecluse.access.wire import Body, Page, Shape
from ecluse.base.validation import fields_of, partial_of
from ecluse.flows.audits.queries import Status
from ecluse.flows.audits.steps import Steps
from ecluse.flows.fiches.ids import FicheId

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
    run_automatically: bool = Field(False, description="Part of every automation that uses automatic audits.")
    is_active: bool = True


@partial_of(NewConfig)
class ChangedConfig(Body):
    """Fields that are left out stay as they are. A changed text, step or model makes a new version."""

    model: Model | None = Field(None, description="null: that of the knobs.")


@fields_of(NewConfig)
class ConfigRow(Shape):
    id: str = Field(examples=["3"])
    tenant_id: str = Field(examples=["default"])
    version: int = Field(examples=[1])
    created_at: datetime
    updated_at: datetime


class ConfigPage(Page):
    configs: list[ConfigRow]


class Deleted(Shape):
    id: str
    deleted: bool


class NewAudit(Body):
    fiche_id: FicheId
    audit_config_id: ConfigId
    use_rlm: bool = Field(False, description="Kept with the audit as it is given.")


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
    config_name: str = Field(description="In that version.")
    status: Status
    score: str | None = Field(examples=["87.50"], description="From 0 to 100, by the weights of the steps.")
    is_latest: bool = Field(description="The one of its fiche and config that ended last, well or not.")
    use_rlm: bool
    trigger_source: Literal["automation", "api"]
    run_id: str
    automation_run_id: str | None
    automation_schedule_id: str | None
    error_code: str | None = Field(examples=["NO_TRANSCRIPT"])
    error: str | None
    model: str | None = Field(description="That answered, as its vendor names it.")
    input_tokens: int | None
    output_tokens: int | None
    cost: str | None = Field(examples=["0.012345"], description="By the knobs' prices; null without them.")
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None


class AuditPage(Page):
    audits: list[AuditRow]


class Evidence(Shape):
    quote: str
    call_id: str | None = Field(description="The recording that it stands in.")
    position: int | None = Field(description="Of its first character, in that recording's transcript.")
    verified: bool = Field(description="false: no transcript of the fiche has it.")


class JudgedStep(Shape):
    name: str
    score: float
    max: int
    weight: float
    comment: str
    evidence: list[Evidence]


class AuditResult(Shape):
    steps: list[JudgedStep]


class AuditInFull(AuditRow):
    result: AuditResult | None
    config: dict[str, Any] = Field(description="What was asked: the config in its version.")
    maybe_paid: int = Field(description="Repetitions of a call that may have been paid for before.")
