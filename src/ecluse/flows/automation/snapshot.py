"""Snapshot of a run's settings: its schedule at the time the run began, with the overrides of this run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg.types.json import Jsonb

from ecluse.base.errors import NonRetriableError
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_one, fetch_row, fetch_rows, fetch_value
from ecluse.engine import Lane, Run, Stage
from ecluse.flows.audits.configs import ConfigVersion
from ecluse.flows.automation.schedules import selection_of
from ecluse.flows.automation.selection_model import Override, Selection, kinds_needed, merged, parsed
from ecluse.flows.connections import lanes
from ecluse.flows.connections.records import Kind

SETTINGS = (
    "run_transcription", "skip_if_transcribed", "transcription_priority", "run_audits", "use_automatic_audits",
    "specific_audit_configs", "continue_on_error", "retry_failed", "max_retries",
)  # fmt: skip

SCHEDULE = """
SELECT a.*, ecluse_now() AS now FROM automation_schedules a
WHERE a.id = %s AND a.tenant_id = %s AND a.deleted_at IS NULL
"""
STORE = """
INSERT INTO automation_run_facts (run_id, schedule_id, config_snapshot, fiche_ids)
VALUES (%s, %s, %s, %s)
"""
LOAD = "SELECT config_snapshot, fiche_ids FROM automation_run_facts WHERE run_id = %s"
ADD_SUMMARY = """
UPDATE automation_run_facts SET config_snapshot = jsonb_set(config_snapshot, '{selection_summary}',
    coalesce(config_snapshot -> 'selection_summary', '{}') || %s::jsonb) WHERE run_id = %s
"""
ADD = "UPDATE automation_run_facts SET config_snapshot = config_snapshot || %s::jsonb WHERE run_id = %s"


class NoSchedule(NonRetriableError):
    """The run has no schedule, or it was deleted or switched off before the run began."""

    code = "NO_SCHEDULE"


@dataclass(frozen=True)
class Snapshot:
    """The settings of a run; `due` is its due time or, for a run started by hand, its start. The fiche ids of
    `selection` are stored in a column of their own."""

    schedule_id: int
    timezone: str
    due: datetime
    selection: Selection
    has_key: bool
    run_transcription: bool
    skip_if_transcribed: bool
    transcription_priority: Any
    run_audits: bool
    use_automatic_audits: bool
    specific_audit_configs: Sequence[int]
    continue_on_error: bool
    retry_failed: bool
    max_retries: int

    @property
    def rounds(self) -> int:
        """The number of further rounds for failed items."""
        return self.max_retries if self.retry_failed else 0

    @property
    def kinds(self) -> list[Kind]:
        """The kinds of connections that the run needs."""
        return kinds_needed(self.run_transcription, self.run_audits)

    @property
    def own_key(self) -> dict[str, Any] | None:
        """The payload that tells an item to use the schedule's own API key; it names the schedule, never the key. None
        if the schedule has no key of its own."""
        return {"own_key_of": str(self.schedule_id)} if self.has_key else None

    async def crm_lane(self, connection: Connection, stage: Stage, run: Run) -> Lane | None:
        """Return the lane of the API key with which the run reads the CRM; None if that is the lane that the stage
        declares."""
        apart = lanes.of_schedule(self.schedule_id) if self.has_key else ""
        return (await lanes.of_tenants(connection, "crm", stage.lane, [run.tenant_id], apart))[run.tenant_id]


async def make(connection: Connection, run: Run) -> bool:
    """Store the snapshot of the run's settings and return True. A run that has a snapshot keeps it, even if the
    schedule has changed: return False. Raise NoSchedule if the schedule is missing, deleted or switched off."""
    if await fetch_row(connection, LOAD, (run.id,)) is not None:
        return False
    if run.schedule_id is None:
        raise NoSchedule("An automation run is started by its schedule: use POST /api/automation/trigger.")
    row = await fetch_one(connection, dict, SCHEDULE, (run.schedule_id, run.tenant_id))
    if row is None:
        raise NoSchedule(f"Schedule {run.schedule_id} was deleted before its run began.")
    if not row["is_active"]:
        raise NoSchedule(f"Schedule {run.schedule_id} was switched off before its run began.")
    given = run.input.get("override_fiche_selection")
    selection = merged(selection_of(row), None if given is None else Override.model_validate(given))
    kept = selection.model_dump(mode="json")
    ids = kept.pop("fiche_ids")
    snapshot = {
        "schedule_id": str(run.schedule_id),
        "schedule_name": row["name"],
        "schedule_type": row["schedule_type"],
        "timezone": row["timezone"],
        "due_at": run.input.get("due_at"),
        "started_at": row["now"].isoformat(),
        "overrides": None if given is None else {**given, **({"fiche_ids": len(ids)} if "fiche_ids" in given else {})},
        "has_external_api_key": row["has_external_api_key"],
        "selection": {**kept, "fiche_ids_given": len(ids)},
        **{name: row[name] for name in SETTINGS},
    }
    await connection.execute(STORE, (run.id, run.schedule_id, Jsonb(snapshot), ids))
    return True


async def load(connection: Connection, run: Run) -> Snapshot:
    """Return the snapshot of a run, which its first step has stored."""
    ((kept, ids),) = await fetch_rows(connection, LOAD, (run.id,))  # stored by the first step of the run
    selection = {name: value for name, value in kept["selection"].items() if name != "fiche_ids_given"}
    return Snapshot(
        schedule_id=int(kept["schedule_id"]),
        timezone=kept["timezone"],
        due=datetime.fromisoformat(kept["due_at"] or kept["started_at"]),
        selection=parsed({**selection, "fiche_ids": ids}),
        has_key=kept["has_external_api_key"],
        **{name: kept[name] for name in SETTINGS},
    )


async def configs_of(connection: Connection, run: Run) -> list[ConfigVersion]:
    """Return the audit configs that were resolved for the run, in the versions of that time."""
    kept = await fetch_value(connection, LOAD, (run.id,))
    return [ConfigVersion(int(one["id"]), one["version"], one["name"]) for one in kept["audit_configs"]]


async def add_summary(connection: Connection, run: Run, **parts: Any) -> None:
    """Merge these parts into the selection summary of the snapshot."""
    await connection.execute(ADD_SUMMARY, (Jsonb(parts), run.id))


async def add(connection: Connection, run: Run, **facts: Any) -> None:
    """Merge facts that were found out during the run into its snapshot."""
    await connection.execute(ADD, (Jsonb(facts), run.id))
