"""The automation flow: its stages and the story that leads a run through them.

    load-schedule ─▶ revalidate (the days at the CRM) ─▶ select ─▶ fetch ═▶ filter ─▶ transcribe ═▶ audit ═▶ finalize

Each ═▶ is a gate. The days and the fetches only prepare: whether a fiche goes on is decided by the state of the tables
afterwards. Transcripts are made by runs of their own, one per fiche. A settled outcome is final: a fiche that has
failed or is ignored is left out of the stages that follow.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from ecluse.access.tenants import DEFAULT
from ecluse.base.clock import Clock
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_rows, fetch_value
from ecluse.engine import (
    VENDOR_DOWN,
    Flow,
    Lane,
    NewItem,
    RetryPolicy,
    Run,
    Settled,
    Stage,
    keep_open,
)
from ecluse.flows.audits import configs
from ecluse.flows.audits.flow import Config as AuditConfig
from ecluse.flows.audits.flow import audit_stage
from ecluse.flows.audits.plan import plan_audits
from ecluse.flows.automation import eligibility, events, progress, select, snapshot, work
from ecluse.flows.automation.config import Config
from ecluse.flows.automation.eligibility import FETCH
from ecluse.flows.automation.plan import Work
from ecluse.flows.automation.schedules import AutomationPlans
from ecluse.flows.automation.select import REVALIDATE
from ecluse.flows.automation.start import AutomationRedrive
from ecluse.flows.automation.transcripts import TRANSCRIBE, Transcripts
from ecluse.flows.connections import records as connections

if TYPE_CHECKING:
    from ecluse.engine.lead.story import Story

NAME = "automation"
# CRM reads: three attempts, with pauses of one and four seconds.
CRM_READS = RetryPolicy(executions=3, base=1.0, multiplier=4.0)
NOT_BY_HAND = (
    "Runs of automation are started by a schedule: use `ecluse schedules run SCHEDULE`, or POST "
    "/api/automation/trigger."
)
NO_CONFIGS = "No audit configs resolved"
UNAUDITED = Settled("", "failed", "NO_AUDIT_CONFIGS", NO_CONFIGS)


class AutomationRunInput(BaseModel):
    """Input of an automation run: the payload of the event `automation/run`. The schedule is a column of the run."""

    model_config = ConfigDict(extra="forbid")

    override_fiche_selection: dict[str, Any] | None = None
    due_at: datetime | None = None


class Automation:
    """The flow `automation`, built from its settings and those of audits; `transcription` is the flow whose runs make
    the transcripts."""

    def __init__(
        self,
        config: Config,
        audits: AuditConfig,
        transcription: Flow,
        vendors: Callable[[Clock], AbstractAsyncContextManager[Any]],
    ) -> None:
        self.config = config
        self.audits = audits
        self.transcription = transcription
        self.revalidate = Stage(
            REVALIDATE,
            Lane("crm-sales", tenant=DEFAULT, max_per_key=select.AT_ONCE, breaker=VENDOR_DOWN),
            work.revalidate,
            save=work.save_sales,
            retry=CRM_READS,
            max_wait=timedelta(minutes=5),
            poll=timedelta(seconds=5),
            event="sales/revalidate",
            gate="revalidation",
        )
        self.fetch = Stage(
            FETCH,
            Lane("crm", tenant=DEFAULT, max_in_flight=config.crm_concurrency, breaker=VENDOR_DOWN),
            work.fetch,
            save=work.save_fetched,
            retry=CRM_READS,
            max_wait=config.details_wait,
            poll=config.details_poll,
            event="fiche/fetch",
            gate="fiche-details",
            signal="full details",
        )
        # No worker claims items of this stage: it is the time in which the transcription runs work.
        self.transcribe = replace(
            self.fetch,
            name=TRANSCRIBE,
            max_wait=config.transcription_wait,
            poll=config.transcription_poll,
            event="fiche/transcribe",
            gate="transcription",
            signal="has_transcription",
        )
        self.audit = replace(
            audit_stage(
                audits,
                max_wait=config.audit_wait,
                poll=config.audit_poll,
                incomplete="Audit incomplete (timeout/stall)",
            ),
            last=True,
            event="audit/run",
            gate="audit",
            signal="audit completion",
        )
        self.flow = Flow(
            NAME,
            (self.revalidate, self.fetch, self.audit),
            self._story,
            AutomationRunInput,
            tables=("automation_run_facts", "automation_run_fiches"),
            vendors=vendors,
            ended=events.ended,
            units=Transcripts(transcription, config, 0).count,
            longest=config.longest,
            slot_key="automation-schedule-{schedule}-{due}",
            not_by_hand=NOT_BY_HAND,
            about=_about,
            plan=Work,
            plans=AutomationPlans(config),
            redrive=AutomationRedrive(config),
        )

    async def _story(self, story: Story) -> None:
        """Lead a run from its selection to its end."""
        wanted = _Wanted(**await story.step("load-schedule", _begin))
        await story.phase("selection")
        if wanted.dated:
            await story.fan_out(self.revalidate, partial(select.days, self.revalidate))
            await story.gate(self.revalidate)
        if await story.step("select-fiches", select.select):
            await self._take_through(story, wanted)
        await story.phase("finalizing")
        if not wanted.run_audits:
            await story.step("settle-fiches", eligibility.settle_open, Settled("", "successful"))

    async def _take_through(self, story: Story, wanted: _Wanted) -> None:
        """Lead the selected fiches through details, transcripts and audits, as far as the schedule wants them."""
        await story.phase("fetching")
        fetch = replace(self.fetch, rounds=wanted.rounds)
        await story.fan_out(fetch, partial(_fetches, fetch))
        await story.gate(fetch, seen=partial(progress.seen, story.emit, "fetching", "Fiche details"))
        left = await story.step("filter-fiches", _filter, self.config.max_recordings)
        if wanted.run_transcription:
            if not await self._goes_on(story, wanted, left):
                return
            await story.phase("transcribing")
            left = await self._transcribe(story, replace(self.transcribe, rounds=wanted.rounds))
        if wanted.run_audits and await self._goes_on(story, wanted, left):
            await story.phase("auditing")
            await self._audit(story, wanted)

    async def _goes_on(self, story: Story, wanted: _Wanted, left: tuple[int, int]) -> bool:
        """Return True if open fiches are left to continue with. If fiches have failed and the schedule does not
        continue on errors, settle the open ones as ignored and return False."""
        still_there, failed = left
        if still_there and failed and not wanted.continue_on_error:
            await story.step("stop", eligibility.stop)
            return False
        return still_there > 0

    async def _transcribe(self, story: Story, stage: Stage) -> tuple[int, int]:
        """Have transcripts made and wait for them; settle the fiches that lack some. Return the numbers of open and
        failed fiches, as `eligibility.left` does."""
        transcripts = Transcripts(self.transcription, self.config, stage.rounds)
        await story.open(stage)
        await story.step("dispatch-transcriptions", transcripts.dispatch, stage.max_wait)
        await story.gate(stage, units=transcripts, seen=partial(progress.seen_transcribing, story.emit, transcripts))
        await story.step("settle-transcriptions", transcripts.settle)
        return await story.once("left-after-transcriptions", eligibility.left)

    async def _audit(self, story: Story, wanted: _Wanted) -> None:
        """Have the fiches audited and wait for the audits; if the schedule has no transcription stage, make transcripts
        first."""
        if not await story.step("resolve-audit-configs", _resolve):
            return
        stage = replace(self.audit, rounds=wanted.rounds)
        if not wanted.run_transcription:
            # Audits need transcripts: they are made within the time of the audit stage.
            first = replace(self.transcribe, max_wait=stage.max_wait, rounds=wanted.rounds)
            left = await self._transcribe(story, first)
            if not await self._goes_on(story, wanted, left):
                return
            seconds = await story.once("audit-time-left", _time_left)
            stage = replace(stage, max_wait=timedelta(seconds=seconds))
        await story.fan_out(stage, partial(_audits, self.audits.model, stage))
        cause = await story.gate(stage, seen=partial(progress.seen, story.emit, "auditing", "Audit"))
        if cause == "timeout":
            await story.once("say-audits-late", _log_late_audits)


class _Wanted(BaseModel):
    """The part of the plan that the story branches on."""

    dated: bool
    rounds: int
    run_transcription: bool
    run_audits: bool
    continue_on_error: bool


async def _begin(connection: Connection, run: Run) -> dict[str, Any]:
    """Store the snapshot of the run's settings and write its start events, once; return the settings that the story
    branches on. Raise Conflict if the tenant lacks a connection that the run needs."""
    async with connection.transaction():
        await keep_open(connection, run)
        if await snapshot.make(connection, run):
            await events.begun(connection, run)
        made = await snapshot.load(connection, run)
    await connections.require(connection, [(run.tenant_id, kind) for kind in made.kinds])
    return _Wanted(
        dated=bool(select.days_of(made)),
        rounds=made.rounds,
        run_transcription=made.run_transcription,
        run_audits=made.run_audits,
        continue_on_error=made.continue_on_error,
    ).model_dump()


def _about(run: Run) -> dict[str, Any]:
    """Return the fields of a run's first log line: schedule, due time, whether its selection is overridden."""
    has_override = run.input.get("override_fiche_selection") is not None
    return {"schedule_id": run.schedule_id, "due_at": run.input.get("due_at"), "has_override": has_override}


async def _fetches(stage: Stage, connection: Connection, run: Run) -> list[NewItem]:
    """Return a fetch item per open fiche, cached or not, and log their number. The items have no target: a failed fetch
    does not settle its fiche."""
    wanted = await snapshot.load(connection, run)
    open_ = await eligibility.open_fiches(connection, run)
    sample = [f"{run.flow}-{run.id}-{FETCH}-{fiche_id}" for fiche_id in open_[:3]]
    await events.log_line(connection, run, "Dispatched fiche/fetch fan-out events", fiches=len(open_), event_ids=sample)
    lane = await wanted.crm_lane(connection, stage, run)
    return [NewItem(fiche_id, target="", payload=wanted.own_key, lane=lane) for fiche_id in open_]


async def _filter(connection: Connection, run: Run, default_limit: int | None) -> tuple[int, int]:
    """Judge the fiches of the run (see `eligibility.decide`). Without an audit config for its audits, those that would
    go on fail, before transcripts are paid for."""
    async with connection.transaction():
        left = await eligibility.decide(connection, run, default_limit)
        wanted = await snapshot.load(connection, run)
        if not left[0] or not wanted.run_audits or (await _configs(connection, run, wanted)).configs:
            return left
        await _resolve(connection, run)
        return await eligibility.left(connection, run)


async def _configs(connection: Connection, run: Run, wanted: snapshot.Snapshot) -> configs.Resolved:
    """Return the audit configs that the run's audits are to use."""
    given = wanted.specific_audit_configs, wanted.use_automatic_audits
    return await configs.resolve_configs(connection, run.tenant_id, *given)


async def _resolve(connection: Connection, run: Run) -> int:
    """Resolve the audit configs of the run, store them, log what is missing, and return their number. Without any, all
    open fiches fail."""
    found = await _configs(connection, run, await snapshot.load(connection, run))
    if found.unknown or found.inactive:
        message = "Some audit configs do not exist or are not active: left out"
        await events.log_line(connection, run, message, "warning", unknown=found.unknown, inactive=found.inactive)
    named = [{"id": str(one.id), "version": one.version, "name": one.name} for one in found.configs]
    await snapshot.add(connection, run, audit_configs=named)
    if not found.configs:
        await events.log_line(connection, run, NO_CONFIGS, "error")
        await eligibility.settle_open(connection, run, UNAUDITED)
    return len(found.configs)


async def _audits(model: str | None, stage: Stage, connection: Connection, run: Run) -> list[NewItem]:
    """Plan the audits of the open fiches, log their number, and return their items. `model`: the model of the
    environment."""
    wanted = await snapshot.load(connection, run)
    resolved = await snapshot.configs_of(connection, run)
    async with connection.transaction():
        await keep_open(connection, run)
        items = await plan_audits(
            connection,
            run,
            await eligibility.open_fiches(connection, run),
            resolved,
            lane=stage.lane,
            model=model,
            use_rlm=wanted.selection.use_rlm,
            schedule_id=wanted.schedule_id,
        )
    fiches = len({item.target for item in items})
    counted = f"{len(resolved)} configs × {fiches} fiches = {len(items)} total audits"  # noqa: RUF001 - as it is known
    await events.log_line(connection, run, f"Running {counted}")
    sample = [f"{run.flow}-{run.id}-audit-{item.key}" for item in items[:3]]
    await events.log_line(connection, run, "Dispatched audit/run fan-out events", audits=len(items), event_ids=sample)
    return items


TIME_LEFT = """
SELECT greatest(extract(epoch FROM deadline_at - ecluse_now()), 1)::float8 FROM stages WHERE run_id = %s AND stage = %s
"""


async def _time_left(connection: Connection, run: Run) -> float:
    """Return how many seconds of the audit stage's time are left after the transcripts, at least 1."""
    return float(await fetch_value(connection, TIME_LEFT, (run.id, TRANSCRIBE)))


LATE_AUDITS = """
SELECT count(*) FILTER (WHERE status = 'completed'), count(*) FILTER (WHERE status = 'failed'), count(*)
FROM audits WHERE automation_run_id = %s
"""


async def _log_late_audits(connection: Connection, run: Run) -> None:
    """Log how many audits had finished when the time of the stage was over."""
    ((completed, failed, total),) = await fetch_rows(connection, LATE_AUDITS, (run.id,))
    message = f"Audit timeout/stall - finished {completed + failed}/{total} (completed={completed}, failed={failed})"
    await events.log_line(connection, run, message, "warning")
