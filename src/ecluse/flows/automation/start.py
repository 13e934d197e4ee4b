"""Runs started on request: a trigger of a schedule, perhaps over other fiches, or a redrive of failed fiches.

Everything is checked before a run is inserted: a schedule that is unknown or switched off starts nothing.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from ecluse.access.envelope import Refused
from ecluse.base.errors import NotFound
from ecluse.base.ids import uuid7
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_row, fetch_value
from ecluse.engine import Flow, Start, Started, fire_by_hand, load_schedule, write_events
from ecluse.flows.audits.configs import resolve_configs
from ecluse.flows.automation import events
from ecluse.flows.automation.config import Config
from ecluse.flows.automation.redrive import chosen, failed_in, preview
from ecluse.flows.automation.schedules import load, selection_of
from ecluse.flows.automation.selection_model import (
    AUDIT_WAIT,
    WAIT,
    Override,
    budget_warning,
    merged,
    missing_warning,
    nothing_warning,
    truncation_warning,
)

NO_CONFIGS = (
    "There is no audit config for it: every fiche will fail with `No audit configs resolved`, after its transcripts "
    "were paid for. Make one that has run_automatically, or name it in specific_audit_configs."
)

ENDED = """
SELECT r.schedule_id, r.ended_at IS NOT NULL, r.status, r.input -> 'override_fiche_selection',
       s.id IS NOT NULL AND s.deleted_at IS NULL
FROM runs r LEFT JOIN schedules s ON s.id = r.schedule_id AND s.tenant_id = r.tenant_id
WHERE r.id = %s AND r.tenant_id = %s AND r.flow = 'automation'
"""
# Only cached fiches are counted: the number of recordings of other fiches is not known yet.
LEFT = """
SELECT count(*) FROM fiche_cache f
JOIN recordings r ON r.fiche_cache_id = f.id AND NOT r.has_transcription AND r.removed_at IS NULL
WHERE f.tenant_id = %s AND f.fiche_id = ANY(%s)
"""


async def start(
    connection: Connection,
    flow: Flow,
    tenant: str,
    schedule_id: int,
    override: Override | None,
    *,
    correlation_id: str | None = None,
) -> Started:
    """Start a run of a schedule by hand; `override` replaces parts of its selection. Raises NotFound or Refused."""
    async with connection.transaction():
        await _startable(connection, tenant, schedule_id, override)
        return await _fire(
            connection, flow, tenant, schedule_id, override, Start(flow, "", correlation_id=correlation_id)
        )


async def redrive(
    connection: Connection,
    flow: Flow,
    tenant: str,
    run_id: int,
    *,
    include_cancelled: bool = False,
    leave_out_hopeless: bool = False,
    correlation_id: str | None = None,
) -> Started:
    """Start a run like `run_id` over the fiches that failed in it; `include_cancelled` and `leave_out_hopeless` as in
    `redrive.chosen`. While the redrive is open, a second request returns it. Raises Refused if there is nothing to
    redrive."""
    async with connection.transaction():
        schedule_id, given, there = await _ended(connection, tenant, run_id)
        failed = chosen(
            run_id,
            await failed_in(connection, run_id),
            include_cancelled=include_cancelled,
            leave_out_hopeless=leave_out_hopeless,
        )
        if not there:
            raise Refused(409, "SCHEDULE_GONE", f"The schedule of run {run_id} is deleted: nothing can be redriven.")
        idle = {"date_range", "start_date", "end_date"}
        kept = {name: value for name, value in (given or {}).items() if name not in idle}
        again = Override.model_validate({**kept, "mode": "manual", "fiche_ids": failed, "max_fiches": None})
        await _startable(connection, tenant, schedule_id, again)
        link = Start(flow, f"automation-{run_id}-redrive", redrive_of=run_id, correlation_id=correlation_id)
        return await _fire(connection, flow, tenant, schedule_id, again, replace(link, again=True))


async def preview_redrive(
    connection: Connection, tenant: str, run_id: int, *, include_cancelled: bool = False
) -> dict[str, Any]:
    """Return what a redrive of the run would take, as `redrive.preview` does."""
    await _ended(connection, tenant, run_id)
    return preview(run_id, await failed_in(connection, run_id), include_cancelled=include_cancelled)


async def _ended(connection: Connection, tenant: str, run_id: int) -> tuple[int, dict[str, Any] | None, bool]:
    """Return the schedule of a run, the override it was started with, and whether the schedule still exists. Refuse a
    run that has not ended."""
    row = await fetch_row(connection, ENDED, (run_id, tenant))
    if row is None:
        raise NotFound(f"there is no automation run {run_id}")
    schedule_id, ended, status, given, there = row
    if not ended:
        raise Refused(409, "RUN_NOT_ENDED", f"Run {run_id} is still going ({status}): it can be redriven once over.")
    return schedule_id, given, there


async def warnings(
    connection: Connection, tenant: str, schedule_id: int, override: Override | None, config: Config
) -> list[str]:
    """Return warnings about what is known beforehand not to work out. The number of fiches is known for a manual list
    only."""
    row = await load(connection, tenant, schedule_id)
    selection = merged(selection_of(row), override)
    # Audits need transcripts, too: without a stage of their own they are made within the time of the audit stage.
    max_wait = config.transcription_wait if row["run_transcription"] else config.audit_wait
    left = 0
    if row["run_transcription"] or row["run_audits"]:
        taken = selection.fiche_ids[: selection.max_fiches]
        left = await fetch_value(connection, LEFT, (tenant, taken))
    knob = WAIT if row["run_transcription"] else AUDIT_WAIT
    resolved = await resolve_configs(connection, tenant, row["specific_audit_configs"], row["use_automatic_audits"])
    found = (
        nothing_warning(selection),
        missing_warning(config.unset, row["run_transcription"], row["run_audits"]),
        None if resolved.configs or not row["run_audits"] else NO_CONFIGS,
        truncation_warning(selection),
        budget_warning(left, config.per_minute, max_wait, knob),
    )
    return [one for one in found if one is not None]


async def _startable(connection: Connection, tenant: str, schedule_id: int, override: Override | None) -> None:
    """Raise if the schedule may not start a run. Lock it, so that it is not switched off before the run is inserted."""
    await load_schedule(connection, tenant, schedule_id, lock=True)
    row = await load(connection, tenant, schedule_id)
    if not row["is_active"]:
        raise Refused(409, "SCHEDULE_INACTIVE", f"Schedule {schedule_id} is switched off: switch it on (is_active).")
    merged(selection_of(row), override)


async def _fire(
    connection: Connection, flow: Flow, tenant: str, schedule_id: int, override: Override | None, how: Start
) -> Started:
    """Insert the run and the events that announce it. `how` has its event key, correlation id and the run it
    redrives."""
    given: dict[str, Any] | None = None
    if override is not None:
        given = override.model_dump(mode="json", exclude_unset=True)

    def named(start: Start) -> Start:
        key = how.event_key or f"automation-manual-{uuid7(time.time_ns() // 1_000_000)}"
        link = {"redrive_of": how.redrive_of, "correlation_id": how.correlation_id, "again": how.again}
        return replace(start, event_key=key, **link)  # type: ignore[arg-type]

    wanted = {"override_fiche_selection": given}
    started = await fire_by_hand(connection, tenant, schedule_id, flow, input=wanted, start=named)
    if not started.deduplicated:
        # The run emits these events, too, under the same keys (deduplicated). Written here, subscribers need not wait
        # until a replica takes up the run.
        await write_events(connection, events.asked_for(started.run))
    return started
