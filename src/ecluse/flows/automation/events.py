"""Log lines, outbox events and notifications of automation runs, and the summary and statistics written when a run
ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import psycopg

from ecluse.base.errors import EcluseError
from ecluse.db.connect import Connection
from ecluse.db.outage import is_unavailable, one_line
from ecluse.db.query import Row, as_json, fetch_all, fetch_row
from ecluse.engine import EphemeralEvent, Event, Run, cause_in_words, note_errors, write_events, write_log
from ecluse.flows.audits.store import record_failures
from ecluse.flows.automation import statistics
from ecluse.flows.transcriptions.plan import event_of
from ecluse.notify.dispatch import Recipient, notify
from ecluse.notify.webhook_signature import schedule_url_name, schedule_webhook_secret_name

Level = Literal["info", "warning", "error"]
MOST_NAMED_FICHES = 200  # in an event

BEGIN = """
UPDATE automation_settings SET last_run_at = ecluse_now() WHERE id = %s
"""

# Counts the recordings that were transcribed for the run, in any round, and its audits.
SUM_UP = """
SELECT r.id, r.schedule_id, r.redrive_of, r.status, r.state, r.end_cause, r.ended_by, r.error_code, r.error_message,
       r.error_details, r.successful, r.failed, r.ignored, r.cancelled,
       extract(epoch FROM r.ended_at - coalesce(r.started_at, r.created_at))::float8 AS seconds,
       f.result_summary, coalesce(t.n, 0)::int AS transcriptions_run, coalesce(a.n, 0)::int AS audits_run,
       coalesce(e.reasons, '{}') AS reasons
FROM runs r LEFT JOIN automation_run_facts f ON f.run_id = r.id
LEFT JOIN LATERAL (
    SELECT count(*) AS n FROM runs c CROSS JOIN LATERAL (
        SELECT FROM items i WHERE i.run_id = c.id AND i.status = 'succeeded' AND i.result ->> 'cached' = 'false'
        OFFSET 0) i
    WHERE c.parent_run_id = r.id AND c.flow = 'transcription') t ON true
LEFT JOIN LATERAL (
    SELECT count(*) AS n FROM audits WHERE automation_run_id = r.id AND status IN ('completed', 'failed')) a ON true
LEFT JOIN LATERAL (
    SELECT jsonb_object_agg(code, n) AS reasons FROM (
        SELECT coalesce(error_code, outcome) AS code, count(*) AS n FROM outcomes
        WHERE run_id = r.id AND outcome <> 'successful' GROUP BY 1) c) e ON true
WHERE r.id = ANY(%s) ORDER BY r.id
"""
STORE = """
UPDATE automation_run_facts f SET result_summary = coalesce(f.result_summary, '{}') || t.summary,
    transcriptions_run = t.transcriptions_run, audits_run = t.audits_run
FROM jsonb_to_recordset(%s::jsonb) AS t(run_id bigint, summary jsonb, transcriptions_run integer, audits_run integer)
WHERE f.run_id = t.run_id
"""
# Deletes the API keys of schedules that were deleted while a run still needed them. The secrets that sign webhooks are
# deleted by retention: the end of a run does not depend on its deliveries.
FORGET_KEYS = """
DELETE FROM secrets k USING schedules s
WHERE s.id = ANY(%s) AND s.deleted_at IS NOT NULL AND k.tenant_id = s.tenant_id AND k.name = 'schedule:' || s.id
  AND NOT EXISTS (SELECT FROM runs r WHERE r.schedule_id = s.id AND r.ended_at IS NULL)
"""
# A webhook is signed as soon as its schedule has a secret.
WHOM = """
SELECT webhook_url, notify_emails, notify_on_complete, notify_on_error,
       EXISTS (SELECT FROM secrets k WHERE k.tenant_id = %(tenant)s AND k.name = %(secret)s)
FROM automation_settings WHERE id = %(schedule)s
"""


async def log_line(connection: Connection, run: Run, message: str, level: Level = "info", /, **metadata: Any) -> None:
    """Write a line to the log of the run, with `metadata`. A step that is repeated after a crash writes it once."""
    await write_log(connection, run.id, message, level=level, once=f"{message} {as_json(metadata)}", **metadata)


def job_id(run: Run) -> str:
    """Return the job id under which realtime clients subscribe to the run."""
    return f"automation-run-{run.id}"


def about(run: Run, job: str | None = None) -> Row:
    """Return the fields that every event payload has; `job` replaces the run's own job id."""
    schedule = None if run.schedule_id is None else str(run.schedule_id)
    return {"job_id": job or job_id(run), "run_id": str(run.id), "schedule_id": schedule}


def event(run: Run, name: str, payload: Mapping[str, Any], *, suffix: str = "", job: str | None = None) -> Event:
    """Return an event of the run. Its key deduplicates by run, name and suffix; `job` as in `about`."""
    return event_of(run, name, {**about(run, job), **payload}, suffix)


async def begun(connection: Connection, run: Run) -> None:
    """Set `last_run_at` of the schedule, and write the events for the creation and the start of the run."""
    await connection.execute(BEGIN, (run.schedule_id,))
    started = event(run, "automation.run.started", {"due_at": run.input.get("due_at")})
    await write_events(connection, [*asked_for(run), started])


def asked_for(run: Run) -> list[Event]:
    """Return the events that announce the creation of a run. They name at most the first MOST_NAMED_FICHES of its
    fiches."""
    given = run.input.get("override_fiche_selection")
    if given is not None and len(given.get("fiche_ids") or ()) > MOST_NAMED_FICHES:
        given = {
            **given,
            "fiche_ids": given["fiche_ids"][:MOST_NAMED_FICHES],
            "fiche_ids_given": len(given["fiche_ids"]),
        }
    due = {"due_at": run.input.get("due_at")}
    return [
        event(run, "automation/run", {**due, "override_fiche_selection": given}),
        event(run, "automation.schedule.run_created", due, job=f"automation-schedule-{run.schedule_id}"),
    ]


async def selected(
    connection: Connection, run: Run, fiche_ids: Sequence[str], controls: Mapping[str, Any], missing_days: Sequence[str]
) -> None:
    """Write the event about the selected fiches, which names at most the first MOST_NAMED_FICHES of them. `controls`:
    the selection without its fiche ids; `missing_days`: the days that the CRM did not list."""
    payload = {
        "total_fiches": len(fiche_ids),
        "selection": dict(controls),
        "fiche_ids": list(fiche_ids[:MOST_NAMED_FICHES]),
        "missing_days": list(missing_days),
    }
    if len(fiche_ids) > MOST_NAMED_FICHES:
        payload["truncated"] = True
    await write_events(connection, [event(run, "automation.run.selection", payload)])


def progress(run: Run, phase: str, done: int, total: int, failed: int) -> EphemeralEvent:
    """Return the progress event of a run, for realtime subscribers."""
    counts = {"phase": phase, "done": done, "total": total, "failed": failed}
    return EphemeralEvent(run.tenant_id, "automation.run.progress", {**about(run), **counts})


async def ended(connection: Connection, runs: Sequence[Run]) -> Sequence[Event]:
    """Mark unfinished audits of ending runs as failed, store summaries and statistics, delete API keys that only these
    runs still needed, log the ends and notify recipients, in the transaction that ends the runs. Return the end events.
    Called for every kind of end."""
    by_id = {run.id: run for run in runs}
    await record_failures(connection, list(by_id))
    rows = await fetch_all(connection, dict, SUM_UP, (sorted(by_id),))
    summaries = {row["id"]: summary(row) for row in rows}
    facts = [
        {"run_id": row["id"], "summary": summaries[row["id"]]}
        | {name: row[name] for name in ("transcriptions_run", "audits_run")}
        for row in rows
    ]
    await connection.execute(STORE, (as_json(facts),))
    await statistics.add(connection, rows)
    await connection.execute(FORGET_KEYS, ([run.schedule_id for run in runs],))
    events = []
    for row in rows:
        run, payload = by_id[row["id"]], summaries[row["id"]]
        normal, cancelled = row["end_cause"] == "normal", row["state"] == "cancelled"
        level: Level = "info" if normal or cancelled else "error"
        how = "completed" if normal else "cancelled" if cancelled else "failed"
        details = {**payload, "end_cause": cause_in_words(row["end_cause"])} if not normal else payload
        await log_line(connection, run, f"Automation run {how}", level, **details)
        events.append(event(run, f"automation.run.{'completed' if normal else 'failed'}", payload))
        if not normal:
            cause = cause_in_words(row["end_cause"])
            await note_errors(connection, run, {"cause": cause, "code": row["error_code"]})
        await _notify(connection, run, row, payload)
    return events


def summary(row: Row) -> Row:
    """Return the summary of an ended run from its row of SUM_UP. It is small: the outcome of each fiche is in its own
    row."""
    result = {
        "status": row["status"],
        "total_fiches": row["successful"] + row["failed"],
        "successful_fiches": row["successful"],
        "failed_fiches": row["failed"],
        "ignored_fiches": row["ignored"],
        "transcriptions_run": row["transcriptions_run"],
        "audits_run": row["audits_run"],
        "duration_ms": round(row["seconds"] * 1000),
        "reasons": row["reasons"],
    }
    if lacks_days(row):
        details = row["error_details"]
        result |= {"missing_days": details["missing_days"], "selection_incomplete": details["selection_incomplete"]}
    if row["end_cause"] != "normal":
        error = {"error_code": row["error_code"], "error": row["error_message"]}
        cancelled = {"ended_by": row["ended_by"], "cancelled_fiches": row["cancelled"]}
        return {**result, "end_cause": row["end_cause"], **error, **(cancelled if row["ended_by"] else {})}
    if row["successful"] + row["failed"] == 0:
        known = (row["result_summary"] or {}).get("reason")
        return {**result, "reason": "all_ignored" if row["ignored"] else known or "no_fiches"}
    return result


async def _notify(connection: Connection, run: Run, row: Row, payload: Row) -> None:
    """Notify the recipients of the run's schedule, if they want this kind of end. Best effort: a notification that
    cannot be stored changes nothing about the run. A cancelled run is not notified: the person who ended it knows."""
    if run.schedule_id is None:
        return
    secret = schedule_webhook_secret_name(run.schedule_id)
    given = {"tenant": run.tenant_id, "secret": secret, "schedule": run.schedule_id}
    whom = await fetch_row(connection, WHOM, given)
    if whom is None:
        return
    url, addresses, on_complete, on_error, sealed = whom
    normal = row["end_cause"] == "normal"
    if row["state"] == "cancelled" or not wanted(normal, row["status"], lacks_days(row), on_complete, on_error):
        return
    recipients = []
    if url:
        url_name = schedule_url_name(run.schedule_id)
        recipients = [Recipient("webhook", url, secret_name=secret if sealed else None, url_name=url_name)]
    recipients += [Recipient("mail", address) for address in addresses]
    name = "automation/completed" if normal else "automation/failed"
    try:
        async with connection.transaction():
            await notify(connection, recipients, event(run, name, payload, suffix=":notified"))
    except (psycopg.Error, EcluseError) as error:
        if is_unavailable(error):
            raise
        await log_line(connection, run, f"Notifications could not be stored: {one_line(error)}", "error")
        run.trace.warn("notifications could not be stored", error=one_line(error))


def lacks_days(row: Row) -> bool:
    """Return True if the CRM did not list all days of the run's selection. `row`: a row of SUM_UP."""
    return bool((row["error_details"] or {}).get("missing_days"))


def wanted(normal: bool, status: str, incomplete: bool, on_complete: bool, on_error: bool) -> bool:
    """Return True if recipients are notified of an end: with `on_complete` of every normal end; with `on_error` of
    every other end, and of a normal end that is partial or failed or whose selection lacks days (`incomplete`)."""
    return (normal and on_complete) or (on_error and (not normal or incomplete or status in ("partial", "failed")))
