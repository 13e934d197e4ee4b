"""Start of runs on request: of a schedule, possibly over other fiches than it selects, or over fiches that failed.

Everything is checked before a run is inserted: a schedule that is unknown or switched off starts nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

from pydantic import ValidationError

from ecluse.base.errors import Conflict, InvalidInput
from ecluse.base.ids import uuid7
from ecluse.base.validation import readable
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_row, fetch_rows, fetch_value
from ecluse.engine import (
    Estimate,
    FailedTarget,
    Fired,
    Flow,
    Redrive,
    Run,
    Started,
    failed_targets,
    fire_by_hand,
    load_schedule,
    write_events,
)
from ecluse.flows.audits.configs import resolve_configs
from ecluse.flows.automation import events
from ecluse.flows.automation.config import Config
from ecluse.flows.automation.redrive import COST, FAILED, LEFT, SCHEDULE, SETTINGS, is_audited, is_fetched
from ecluse.flows.automation.schedules import kinds_of, load, selection_of
from ecluse.flows.automation.selection_model import (
    AUDIT_WAIT,
    MOST_FICHES,
    WAIT,
    Override,
    budget_warning,
    merged,
    missing_warning,
    nothing_warning,
    truncation_warning,
)
from ecluse.flows.connections import records as connections
from ecluse.flows.fiches.ids import is_fiche_id

NO_CONFIGS = (
    "There is no audit config for it: every fiche will fail with `No audit configs resolved`, and none is transcribed. "
    "Create one with run_automatically, or name one in specific_audit_configs."
)


@dataclass(frozen=True)
class AutomationRedrive(Redrive):
    """The redrive of automation runs: a new run of the same schedule over the fiches that failed."""

    config: Config = field(default_factory=Config)
    most: int = MOST_FICHES

    async def failed(self, connection: Connection, run: Run) -> list[FailedTarget]:
        return [one for one in await failed_targets(connection, run, FAILED) if is_fiche_id(one.target)]

    async def estimate(self, connection: Connection, run: Run, taken: Sequence[FailedTarget]) -> Estimate:
        """Return how many transcripts and audits a redrive of these fiches would make, with time and cost as far as
        they are known. Calls that a fiche does not come to are not counted, because it fails before them again. The
        time is that of the transcripts, at the rate of their lane. The cost of transcripts is their price, that of
        audits the average cost of recent audits with these configs."""
        row = await fetch_row(connection, SETTINGS, (run.schedule_id,))
        if row is None or not taken:
            return Estimate()
        transcribes, audits, named, automatic = row
        found = await resolve_configs(connection, run.tenant_id, named, automatic)
        configs = [one.id for one in found.configs] if audits else []
        left, length, unknown = (
            await fetch_row(connection, LEFT, (run.tenant_id, [one.target for one in taken if is_fetched(one)]))
            if transcribes or audits
            else None
        ) or (0, 0, 0)
        each = await fetch_value(connection, COST, (run.tenant_id, configs))
        calls = {"transcripts": left, "audits": sum(is_audited(one) for one in taken) * len(configs)}
        known, default = self.config.transcript_cost(length), self.config.transcript_cost(None)
        costs: dict[str, Decimal | None] = {
            "transcripts": None if known is None or default is None else known + default * unknown,
            "audits": None if each is None else each * calls["audits"],
        }
        priced = [cost for kind, cost in costs.items() if calls[kind] and cost is not None]
        return Estimate(
            calls,
            left * 60 / self.config.per_minute if left else None,
            f"{sum(priced, Decimal(0)):.6f}" if priced else None,
            [kind for kind, cost in costs.items() if calls[kind] and cost is None],
        )

    async def start(
        self, connection: Connection, flow: Flow, run: Run, targets: Sequence[str], correlation_id: str | None
    ) -> Started:
        ((schedule_id, given),) = await fetch_rows(connection, SCHEDULE, (run.id,))
        if schedule_id is None:
            why = f"The schedule of run {run.id} is deleted: nothing can be redriven."
            raise Conflict(why, code="SCHEDULE_GONE")
        idle = {"date_range", "start_date", "end_date"}
        kept = {name: value for name, value in (given or {}).items() if name not in idle}
        again = Override.model_validate({**kept, "mode": "manual", "fiche_ids": list(targets), "max_fiches": None})
        how = {"event_key": f"automation-{run.id}-redrive", "redrive_of": run.id, "again": True}
        return await start(connection, flow, run.tenant_id, schedule_id, again, correlation_id=correlation_id, **how)


async def start(
    connection: Connection,
    flow: Flow,
    tenant: str,
    schedule_id: int,
    override: Override | None,
    **how: Any,
) -> Started:
    """Start a run of the schedule. `override`: changes to its selection for this run; `how`: further fields of the
    run's `Start`, such as the run that it redrives. Raise NotFound if the tenant has no such schedule, InvalidInput if
    the changed selection is not valid, Conflict if the schedule is switched off or the tenant lacks a connection."""
    key = f"automation-manual-{uuid7(time.time_ns() // 1_000_000)}"
    given = None if override is None else override.model_dump(mode="json", exclude_unset=True)
    async with connection.transaction():
        # Locked, so that it is not switched off before the run is inserted.
        await load_schedule(connection, tenant, schedule_id, lock=True)
        row = await load(connection, tenant, schedule_id)
        if not row["is_active"]:
            why = f"Schedule {schedule_id} is disabled: enable it first (`ecluse schedules enable {schedule_id}`)."
            raise Conflict(why, code="SCHEDULE_INACTIVE")
        merged(selection_of(row), override)  # raises InvalidInput
        await connections.require(connection, [(tenant, kind) for kind in kinds_of(row)])
        started = await fire_by_hand(
            connection,
            tenant,
            schedule_id,
            flow,
            input={"override_fiche_selection": given},
            start=lambda start: replace(start, **{"event_key": key, **how}),
        )
        if not started.deduplicated:
            # The run emits these events, too, under the same keys (deduplicated). Written here, subscribers need not
            # wait until a replica takes up the run.
            await write_events(connection, events.asked_for(started.run))
    return started


def override_of(instead: Mapping[str, Any] | None) -> Override | None:
    """Return the override of a selection from the fields of the plan that differ for one run; None if there are none. A
    list of fiches sets mode `manual`. Raise InvalidInput if a field other than the selection differs, or if it is not
    valid."""
    if not instead:
        return None
    if set(instead) != {"fiche_selection"} or not isinstance(instead["fiche_selection"], dict):
        raise InvalidInput("plan: for one run, only the object fiche_selection can differ from the schedule")
    given = instead["fiche_selection"]
    mode = {"mode": "manual"} if given.keys() & {"fiche_ids", "ficheIds"} else {}
    try:
        return Override.model_validate({**mode, **given})
    except ValidationError as error:
        raise InvalidInput(f"plan.fiche_selection: {readable(error)}") from error


async def fire(
    connection: Connection,
    flow: Flow,
    tenant: str,
    schedule_id: int,
    override: Override | None,
    config: Config,
    correlation_id: str,
) -> Fired:
    """Start a run of the schedule now, even if other runs of it are open, and return it with warnings about foreseeable
    problems."""
    started = await start(connection, flow, tenant, schedule_id, override, correlation_id=correlation_id)
    return Fired(started, await warnings(connection, tenant, schedule_id, override, config))


async def warnings(
    connection: Connection, tenant: str, schedule_id: int, override: Override | None, config: Config
) -> list[str]:
    """Return warnings about foreseeable problems of a run with this override. The number of fiches is known for a
    manual list only."""
    row = await load(connection, tenant, schedule_id)
    selection = merged(selection_of(row), override)
    # Audits need transcripts, too: without a stage of their own they are made within the time of the audit stage.
    max_wait = config.transcription_wait if row["run_transcription"] else config.audit_wait
    left = 0
    if row["run_transcription"] or row["run_audits"]:
        taken = selection.fiche_ids[: selection.max_fiches]
        left, *_ = await fetch_row(connection, LEFT, (tenant, taken)) or (0,)
    knob = WAIT if row["run_transcription"] else AUDIT_WAIT
    resolved = await resolve_configs(connection, tenant, row["specific_audit_configs"], row["use_automatic_audits"])
    found = (
        nothing_warning(selection),
        missing_warning(config.unset, await connections.of_environment(connection, tenant, kinds_of(row))),
        None if resolved.configs or not row["run_audits"] else NO_CONFIGS,
        truncation_warning(selection),
        budget_warning(left, config.per_minute, max_wait, knob),
    )
    return [one for one in found if one is not None]
