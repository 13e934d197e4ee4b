"""Descriptions of the selection and the stages of an automation schedule, for its page: the input of its runs does not
contain them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_one, fetch_value
from ecluse.flows.audits.configs import Resolved, resolve_configs
from ecluse.web.render import number

NAMED = 20  # groupes and configs listed by name, at most
# Counts the fiche ids instead of reading them: there may be fifty thousand.
PLAN = """
SELECT fiche_selection_mode AS mode, fiche_selection_date_range AS date_range,
       fiche_selection_start_date AS start_date, fiche_selection_end_date AS end_date,
       cardinality(fiche_selection_fiche_ids) AS fiches, fiche_selection_groupes AS groupes,
       fiche_selection_only_with_recordings AS only_with_recordings,
       fiche_selection_only_unaudited AS only_unaudited, fiche_selection_use_rlm AS use_rlm,
       fiche_selection_max_fiches AS max_fiches,
       fiche_selection_max_recordings_per_fiche AS max_recordings_per_fiche,
       run_transcription, skip_if_transcribed, transcription_priority, run_audits, use_automatic_audits,
       specific_audit_configs
FROM automation_schedules WHERE id = %s AND tenant_id = %s AND deleted_at IS NULL
"""


BUDGET = "SELECT config_snapshot ->> 'budget_warning' FROM automation_run_facts WHERE run_id = %s"


class Fact(NamedTuple):
    name: str
    said: str | None  # None: nothing is set


class Plan(NamedTuple):
    selection: Sequence[Fact]
    stages: Sequence[Fact]


async def plan_of(connection: Connection, tenant: str, schedule_id: int) -> Plan | None:
    """Return the plan of an automation schedule in words; None if the tenant has no such schedule."""
    row = await fetch_one(connection, dict, PLAN, (schedule_id, tenant))
    if row is None:
        return None
    found = await resolve_configs(connection, tenant, row["specific_audit_configs"], row["use_automatic_audits"])
    return Plan(selection_in_words(row), stages_in_words(row, found))


async def budget_warning(connection: Connection, run_id: int) -> str | None:
    """Return the warning that the time limit of the run is too short; None if its story stored no such warning."""
    warning: str | None = await fetch_value(connection, BUDGET, (run_id,))
    return warning


def selection_in_words(row: Row) -> list[Fact]:
    only = {"with recordings": row["only_with_recordings"], "not audited yet": row["only_unaudited"]}
    most, recordings = row["max_fiches"], row["max_recordings_per_fiche"]
    return [
        Fact("Mode", row["mode"]),
        _fiches(row) if row["mode"] == "manual" else _days(row),
        Fact("Groupes", _some(row["groupes"]) or "any"),
        Fact("Only", ", ".join(name for name, wanted in only.items() if wanted) or "no restriction"),
        Fact("Limit", "none" if most is None else number(most)),
        Fact("Max recordings per fiche", "server default" if recordings is None else number(recordings)),
        Fact("RLM", "used" if row["use_rlm"] else "not used"),
    ]


def stages_in_words(row: Row, found: Resolved) -> list[Fact]:
    which = (
        "recordings without a transcript" if row["skip_if_transcribed"] else "all recordings, transcribed ones again"
    )
    transcription = Fact(
        "Transcription", f"{which}; priority {row['transcription_priority']}" if row["run_transcription"] else "no"
    )
    if not row["run_audits"]:
        return [transcription, Fact("Audits", "no")]
    asked = len(row["specific_audit_configs"])
    by = ["automatic configs"] if row["use_automatic_audits"] else []
    by += [f"{number(asked)} specific configs"] if asked else []
    facts = [
        transcription,
        Fact("Audits", " and ".join(by) or None),
        Fact("Current audit configs", _some([f"{config.name} #{config.id}" for config in found.configs]) or "none"),
    ]
    if idle := [f"#{one} (not active)" for one in found.inactive] + [f"#{one} (deleted)" for one in found.unknown]:
        facts.append(Fact("Unavailable audit configs", _some(idle)))
    return facts


def _fiches(row: Row) -> Fact:
    given = f"{number(row['fiches'])} given" if row["fiches"] else "none given: runs complete without doing anything"
    return Fact("Fiches", given)


def _days(row: Row) -> Fact:
    if row["date_range"] == "custom":
        return Fact("Days", f"{row['start_date']} to {row['end_date']}")
    return Fact("Days", row["date_range"] and row["date_range"].replace("_", " "))


def _some(names: Sequence[str]) -> str:
    more = f" and {number(len(names) - NAMED)} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
