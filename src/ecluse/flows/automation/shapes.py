"""Answers of the automation routes, and the bodies of a trigger and a redrive; the body of a schedule is in
`plan.py`."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from ecluse.access.wire import Fire, OutcomeCounts, Page, Shape, SlotRow, StageRow, WillFail
from ecluse.base.validation import EitherSpelling, fields_of, in_camel_case
from ecluse.engine import EndCause, State
from ecluse.flows.automation.plan import Plan
from ecluse.flows.automation.queries import FicheStatus, RunStatus
from ecluse.flows.automation.selection_model import Override, Selection

Id = Annotated[str, Field(examples=["7"])]


class Trigger(EitherSpelling):
    model_config = ConfigDict(json_schema_extra=in_camel_case)

    schedule_id: str = Field(pattern=r"^[1-9][0-9]{0,18}$", examples=["7"])
    override_fiche_selection: Override | None = Field(
        None,
        description="Keys that are given replace the same keys of the schedule's selection, for this run; the others "
        "stay.",
        examples=[{"mode": "manual", "fiche_ids": ["171234", "171235"]}],
    )


class Triggered(Shape):
    success: Literal[True]
    run_id: Id
    event_ids: list[str] = Field(examples=[["automation-manual-019a8f3c-…"]])
    warnings: list[str] = Field(description="Foreseeable problems: fiches left out, time limits that are too short.")


class AutomationRunRow(Shape):
    id: Id
    tenant_id: str
    schedule_id: Id | None
    status: RunStatus
    state: State = Field(description="`queued`: no worker has taken it up yet; `cancelled`: it was ended on request.")
    phase: Literal["selection", "fetching", "transcribing", "auditing", "finalizing"] | None = Field(
        description="The current phase; null once the run has ended."
    )
    selected: int | None = Field(description="Once it has ended: successful + failed + ignored.")
    total_fiches: int = Field(
        description="Number of selected fiches without the ignored ones. The event `automation.run.selection` has the "
        "number of selected fiches, ignored ones included, under this name."
    )
    successful_fiches: int
    failed_fiches: int
    cancelled_fiches: int = Field(description="The part of the failed fiches that the cancelled run never finished.")
    ignored_fiches: int
    transcriptions_run: int
    audits_run: int
    error_code: str | None
    error_message: str | None
    end_cause: EndCause | None
    ended_by: str | None = Field(description="Of a cancelled run: who ended it.")
    event_id: str
    parent_run_id: Id | None = Field(description="Of a redrive: the run whose failed fiches it repeats.")
    created_at: datetime
    started_at: datetime
    completed_at: datetime | None
    duration_ms: int | None


class ExpectedFailure(Shape):
    code: str = Field(examples=["NO_URL"])
    reason: str = Field(examples=["1 of 3 recordings has no URL in the CRM (171234-2)"])


class AutomationRun(AutomationRunRow):
    correlation_id: str | None
    is_stale: bool
    stale_at: datetime | None = Field(description="When it becomes stale, if it is still open then.")
    config_snapshot: dict[str, Any] = Field(
        description="The settings of the schedule when the run began; empty before."
    )
    selection_summary: dict[str, Any] | None = Field(
        description="Numbers of selected fiches and, by reason, of others."
    )
    audit_configs: list[dict[str, Any]] | None = Field(
        description="The audit configs that were found, with their versions."
    )
    budget_warning: str | None
    api_errors: list[dict[str, Any]] = Field(description="The failed requests for days, with their errors.")
    selection_incomplete: str | None = Field(description="What its selection lacks, and why; null: nothing.")
    missing_days: list[str] = Field(
        examples=[["2026-03-02"]], description="Days that the CRM did not list: only fiches known before were selected."
    )
    will_fail: WillFail
    result_summary: dict[str, Any] | None
    error_details: dict[str, Any] | None
    stages: list[StageRow]
    redrives: list[Id]
    after_redrives: OutcomeCounts | None = Field(
        description="The latest outcome of each fiche, over the run and its redrives; null without redrives."
    )


class AutomationLogRow(Shape):
    id: Id
    timestamp: datetime
    level: Literal["debug", "info", "warning", "error"]
    message: str
    metadata: dict[str, Any] | None
    event_id: str | None
    count: int = Field(description="Number of equal lines from `timestamp` to `last_at`.")
    targets: list[str] | None = Field(description="The first five fiches that it is about.")
    last_at: datetime | None


class AutomationLogPage(Page):
    logs: list[AutomationLogRow]
    total: int = Field(description="Total number of lines.")


class Recordings(Shape):
    total: int
    transcribed: int


class Audits(Shape):
    total: int
    completed: int
    failed: int


class AutomationFicheRow(Shape):
    fiche_id: str = Field(examples=["171234"])
    status: FicheStatus = Field(description="The outcome of the fiche; `open`: it has none yet.")
    error: str | None
    error_code: str | None
    ignore_reason: str | None
    will_fail: ExpectedFailure | None = Field(description="Why the open fiche is known to fail; null if it is not.")
    recordings_count: int | None = Field(description="The number of recordings that the run found.")
    transcription_run_id: Id | None
    transcription_status: str | None
    details: Literal["ready", "not_found", "missing"] = Field(description="The present state of the fiche's details.")
    recordings: Recordings
    audits: Audits = Field(description="The audits of this run.")


class AutomationFichePage(Page):
    fiches: list[AutomationFicheRow]


@fields_of(Selection, without=("fiche_ids",))
class ListedSelection(Shape):
    fiche_ids_given: int = Field(description="Of mode manual: how many ids; `/fiche-ids` lists them.")


class FicheIdRow(Shape):
    place: int = Field(description="From 1, in the order given.")
    fiche_id: str = Field(examples=["171234"])


@fields_of(Plan, without=("external_api_key", "fiche_selection"))
class ScheduleFacts(Shape):
    id: Id
    tenant_id: str
    specific_audit_configs: list[str]
    webhook_url: str | None = Field(description="Its URL; path and query, which may be secret, are hidden.")
    webhook_signed: bool = Field(description="It has a secret, and its webhook carries signatures (Standard Webhooks).")
    has_external_api_key: bool
    last_run_at: datetime | None
    last_run_status: Literal["running", "success", "partial", "failed", "cancelled"] | None = Field(
        description="Status of its last run (not of a redrive), by the latest outcomes of its fiches, redrives "
        "included; `cancelled` if an operator ended it."
    )
    total_runs: int
    successful_runs: int
    partial_runs: int
    failed_runs: int
    cancelled_runs: int = Field(description="Runs that were ended on request; the other counts do not include them.")
    cron: str | None = Field(description="The cron expression of its type; null: started by hand only.")
    next_due_at: datetime | None
    overdue: bool = Field(description="It is past its due time, and no scheduler has handled it.")
    is_stale: bool = Field(description="Its open run takes longer than all its stages may.")
    stale_at: datetime | None
    failures: int = Field(description="Number of consecutive failures to fire it.")
    error: str | None
    holding_run_id: Id | None = Field(description="The run that later due times wait for, while it is open.")
    last_run_id: Id | None
    created_at: datetime
    updated_at: datetime


class AutomationScheduleRow(ScheduleFacts):
    fiche_selection: ListedSelection


class AutomationSchedule(ScheduleFacts):
    fiche_selection: Selection
    next_fires: list[Fire]
    slots: list[SlotRow] = Field(description="The decisions on its latest due times, the newest first.")
    runs: list[AutomationRunRow] = Field(description="Its last runs, the newest first.")


class ChangedAutomationSchedule(AutomationSchedule):
    webhook_secret: str | None = Field(
        description="The signing secret of its webhook, if it is new. Not shown again.",
        examples=["whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"],
    )


class Diagnostic(Shape):
    settings: dict[str, bool] = Field(description="For each knob, whether it is set; never its value.")
    knobs: dict[str, Any] = Field(description="Values in force of the knobs that are not secret.")
    budgets: dict[str, float] = Field(
        description="Time limits of a run, and the number of recordings that fit into them."
    )
    lanes: list[dict[str, Any]]
    replicas: list[dict[str, Any]] = Field(description="The live replicas.")
    schedules: dict[str, Any]
    hints: list[str] = Field(description="Advice for each problem.")
