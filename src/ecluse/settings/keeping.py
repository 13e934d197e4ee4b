"""The knobs of retention: for how many days rows are kept after their end, by kind."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from pydantic_settings import BaseSettings

from ecluse.settings.flows import at_least

Days = Annotated[int, at_least(0)]


def _days(default: int, description: str, zero: str = "for ever") -> Any:
    """Return a knob of days; `zero` describes the meaning of 0."""
    return Field(default, le=36_500, description=f"{description} 0: {zero}.")


class KeepKnobs(BaseSettings):
    """Days of retention by kind. Rows that an open or kept run needs are kept in any case."""

    ECLUSE_KEEP_RUNS_DAYS: Days = _days(
        90,
        "Days for which a run is kept after its end, with its stages, items, outcomes, attempts, writes, log and slot. "
        "Runs that belong together (a redrive, the transcriptions of an automation run) are deleted together; the last "
        "run of a schedule and runs with a write in doubt are kept.",
    )
    ECLUSE_KEEP_DELIVERIES_DAYS: Days = _days(14, "Days for which a delivery of a webhook or mail is kept.")
    ECLUSE_KEEP_EVENTS_DAYS: Days = _days(30, "Days for which an event is kept after it was published.")
    ECLUSE_KEEP_LOGS_DAYS: Days = _days(30, "Days for which the rows of `workflow_logs` are kept.")
    ECLUSE_KEEP_ATTEMPTS_DAYS: Days = _days(
        30, "Days for which the failed attempts of a run are kept, once it has ended.", zero="as long as the run"
    )
    ECLUSE_KEEP_SLOTS_DAYS: Days = _days(
        90,
        "Days for which slots without a run are kept: skipped, missed and failed ones, and those of jobs; a slot with "
        "a run is deleted with it.",
    )
    ECLUSE_KEEP_JOBS_DAYS: Days = _days(
        90, "Days for which a job of a schedule is kept after its end, with its attempts and their logs."
    )
    ECLUSE_KEEP_WORKFLOWS_DAYS: Days = _days(
        7, "Days for which the workflow rows of an ended run (schema `dbos`) are kept.", zero="as long as the run"
    )
    ECLUSE_KEEP_PAID_RESULTS_DAYS: Days = _days(
        30,
        "Days for which the result of a paid speech-to-text call is kept beside the transcript, so that it is not "
        "paid for twice.",
    )
    ECLUSE_KEEP_SPEND_DAYS: Days = _days(
        400, "Days for which the cost of a paid call is kept; whole months are deleted."
    )
    ECLUSE_KEEP_LEASES_DAYS: Days = _days(7, "Days for which a lease is kept after its end.")
    ECLUSE_KEEP_AUDITS_DAYS: Days = _days(
        0, "Days for which an audit is kept after its end; at least as long as its run."
    )
    ECLUSE_KEEP_FICHES_DAYS: Days = _days(
        0,
        "Days for which a fiche is kept after its last change, with its recordings, transcripts and audits; at least "
        "as long as its runs.",
    )
    ECLUSE_KEEP_RULE_RUNS_DAYS: Days = _days(
        400,
        "Days for which a rule run is kept after its end, with its targets, history and reconciliations; a preview "
        "that was not queued, after its creation.",
    )
    ECLUSE_KEEP_COMPANIES_DAYS: Days = _days(
        0, "Days after which a company that was not asked for is erased, with its snapshots, jobs and requests."
    )
    ECLUSE_KEEP_AUDIT_TRAIL_DAYS: Days = _days(0, "Days for which the audit trail is kept.")
