"""Queries about transcriptions: coverage of a fiche, which is a snapshot of its current recordings; its last run, whose
figures are frozen when it ends; the state of each recording, and why one waits; transcripts."""

from __future__ import annotations

from collections.abc import Sequence

from ecluse.access.answers import Encoded
from ecluse.base.errors import NotFound
from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_all, fetch_one, fetch_row
from ecluse.flows.fiches import cache
from ecluse.flows.transcriptions import rules
from ecluse.flows.transcriptions.events import DONE
from ecluse.flows.transcriptions.rules import Attempt, Counts
from ecluse.insight import run_queries
from ecluse.insight.waiting import why

MOST_WAITING = 1_000

FICHE = "SELECT fiche_cache_id AS id, details FROM fiche_states WHERE tenant_id = %(tenant)s AND fiche_id = %(fiche)s"
KNOWN = """
SELECT id FROM fiche_cache WHERE tenant_id = %(tenant)s AND fiche_id = %(fiche)s UNION ALL
SELECT run_id FROM transcription_runs WHERE tenant_id = %(tenant)s AND fiche_id = %(fiche)s LIMIT 1
"""

# Counters are computed while the run is open and read from its summary afterwards. `planned`: the fiche's last run that
# has a plan.
RUN = f"""
SELECT t.run_id, t.total_recordings, t.already_transcribed, t.target_total, coalesce(t.processed, d.processed)
           AS processed, coalesce(t.cached, d.cached) AS cached, coalesce(t.failed, d.failed) AS failed, t.stalled_at,
       r.event_key, r.parent_run_id, r.status, r.state, r.input ->> 'priority' AS priority, r.end_cause, r.error_code,
       coalesce(r.error_message, r.reason) AS reason, r.created_at, r.started_at, r.ended_at,
       (SELECT count(*)::int FROM attempts a WHERE a.run_id = r.id AND a.maybe_paid) AS maybe_paid,
       (SELECT max(p.run_id) FROM transcription_runs p WHERE p.tenant_id = t.tenant_id AND p.fiche_id = t.fiche_id
           AND p.target_total IS NOT NULL) AS planned
FROM transcription_runs t JOIN runs r ON r.id = t.run_id, LATERAL {DONE} d
WHERE t.tenant_id = %(tenant)s AND t.fiche_id = %(fiche)s ORDER BY t.run_id DESC LIMIT 1
"""  # noqa: S608 - our own names

RECORDINGS = f"""
SELECT r.call_id, r.start_time, r.duration_s, {cache.URL_MISSING} AS url_missing, r.has_transcription, r.transcribed_at,
       i.id AS item, i.status, i.claim_id IS NOT NULL AS in_hand, i.error_code, i.error, i.executions
FROM recordings r LEFT JOIN items i ON i.run_id = %(run)s AND i.stage IN ('known', 'recordings') AND i.key = r.call_id
WHERE r.fiche_cache_id = %(fiche)s AND r.removed_at IS NULL ORDER BY r.start_time NULLS LAST, r.call_id
"""  # noqa: S608 - our own names

LEASE = """
SELECT key, owner, run_id, fence, acquired_at, extract(epoch FROM expires_at - ecluse_now())::float8 AS ttl_seconds
FROM leases WHERE tenant_id = %s AND key = %s AND ended_at IS NULL
"""

TRANSCRIPT = """
SELECT r.call_id, r.has_transcription, r.transcription_id, r.transcribed_at,
       num_nonnulls(r.transcription_data, r.transcription_text) = 0 AS nothing,
       coalesce(r.transcription_data, jsonb_build_object('text', r.transcription_text, 'words', '[]'::jsonb))::text
           AS transcription,
       (SELECT coalesce(jsonb_agg(jsonb_build_object('position', c.position, 'speaker', c.speaker, 'start_s', c.start_s,
               'end_s', c.end_s, 'text', c.text) ORDER BY c.position), '[]')
        FROM recording_transcription_chunks c WHERE c.recording_id = r.id) AS chunks
FROM recordings r JOIN fiche_cache f ON f.id = r.fiche_cache_id
WHERE f.tenant_id = %s AND f.fiche_id = %s AND r.call_id = %s
"""


async def status(connection: Connection, tenant: str, fiche_id: str) -> Row:
    """Return the transcription status of a fiche: coverage, each recording with its state, the open or last run, and
    the lease. Raise NotFound if the tenant has neither fetched the fiche nor a transcription run of it."""
    given = {"tenant": tenant, "fiche": fiche_id}
    fiche = await fetch_one(connection, dict, FICHE, given)
    run = await fetch_one(connection, dict, RUN, given)
    if fiche is None and run is None:
        raise NotFound(f"Fiche {fiche_id} is not in the cache: it has not been fetched from the CRM.")
    rows: list[Row] = []
    if fiche is not None:
        rows = await fetch_all(connection, dict, RECORDINGS, {"run": run and run["planned"], "fiche": fiche["id"]})
    lease = await fetch_one(connection, dict, LEASE, (tenant, rules.fiche_lock(fiche_id)))
    waiting: dict[int, tuple[str, str]] = {}
    stages: Sequence[Row] = ()
    if run is not None:
        stages = (await run_queries.show_run(connection, tenant, run["run_id"]))["stages"]
        if run["ended_at"] is None:
            found = await why(connection, tenant, run["run_id"], limit=MOST_WAITING)
            waiting = {one.item_id: (one.cause, one.detail) for one in found}
            run["waiting_for"] = next((f"{one.cause}: {one.detail}" for one in found), None)
    details: cache.Details = "missing" if fiche is None else fiche["details"]
    return assembled(fiche_id, details, [_recording(row, waiting) for row in rows], run, stages, lease)


def _recording(row: Row, waiting: dict[int, tuple[str, str]]) -> Row:
    item, status_, in_hand = row.pop("item"), row.pop("status"), row.pop("in_hand")
    attempt = None if item is None else Attempt(status_, in_hand, row.pop("error_code"), row.pop("error"))
    state, reason = rules.state_of(row["has_transcription"], attempt, waiting.get(item or 0))
    return {
        **{name: row[name] for name in ("call_id", "start_time", "duration_s", "url_missing", "has_transcription")},
        "transcribed_at": row["transcribed_at"],
        "state": state,
        "reason": reason or ("The CRM has no URL for this recording." if row["url_missing"] else None),
        "executions": row["executions"] or 0,
    }


def assembled(
    fiche_id: str,
    details: cache.Details,
    recordings: Sequence[Row],
    run: Row | None,
    stages: Sequence[Row],
    lease: Row | None,
) -> Row:
    """Assemble the status of a fiche from its parts. If it was never fetched or the CRM does not know it, `total`,
    `pending` and `percentage` are None."""
    known = details == "ready"
    total, transcribed = len(recordings), sum(one["has_transcription"] for one in recordings)
    active = run is not None and run["ended_at"] is None
    return {
        "fiche_id": fiche_id,
        "known": known,
        "details": details,
        "total": total if known else None,
        "transcribed": transcribed,
        "pending": total - transcribed if known else None,
        "percentage": rules.percentage(total, transcribed) if known else None,
        "recordings": recordings,
        "activeRun": str(run["run_id"]) if run and active else None,
        **{name: run[name] if run else None for name in ("processed", "failed", "target_total")},
        "run": None if run is None else _run(run, stages),
        "lock": None if lease is None else {**lease, "run_id": lease["run_id"] and str(lease["run_id"])},
    }


def _run(run: Row, stages: Sequence[Row]) -> Row:
    counts = Counts(**{name: run[name] or 0 for name in Counts.__dataclass_fields__})
    planned, over = run["target_total"] is not None, run["ended_at"] is not None
    return {
        "id": str(run["run_id"]),
        "event_id": run["event_key"],
        "parent_run_id": run["parent_run_id"] and str(run["parent_run_id"]),
        "status": run["status"],
        "state": run["state"],
        "phase": "ended" if over else "recordings" if planned else "refresh",
        "priority": run["priority"],
        **{name: run[name] for name in Counts.__dataclass_fields__},
        "transcribed": counts.transcribed,
        "remaining": counts.remaining,
        "maybe_paid": run["maybe_paid"],
        "error_code": run["error_code"],
        "reason": run["reason"],
        "waiting_for": run.get("waiting_for"),
        "functions": functions({row["stage"]: row for row in stages}, planned=planned, over=over),
        **{name: run[name] for name in ("created_at", "started_at", "ended_at", "stalled_at")},
    }


def functions(stages: dict[str, Row], *, planned: bool, over: bool) -> Row:
    """Return the states of the three functions that the requirements name (orchestrator, worker, finalizer), from the
    run's stages. The finalizer is `missing` if a planned run has no open item but has not ended."""
    refresh = stages.get(rules.REFRESH)
    first = "done" if planned else "failed" if over else "running" if refresh and refresh["in_flight"] else "queued"
    items = [row for name, row in stages.items() if name != rules.REFRESH]
    names = {"queued": "waiting", "running": "in_flight", "done": "done", "failed": "failed"}
    each = {shown: sum(row[name] for row in items) for shown, name in names.items()}
    open_ = each["queued"] + each["running"]
    last = "done" if over else "missing" if planned and not open_ else "waiting"
    return {
        rules.ORCHESTRATOR: {"state": first},
        rules.WORKER: each,
        rules.FINALIZER: {"state": last},
    }


async def require_known(connection: Connection, tenant: str, fiche_id: str) -> None:
    """Raise NotFound if the tenant has neither the fiche in its cache nor a transcription run of it."""
    if await fetch_row(connection, KNOWN, {"tenant": tenant, "fiche": fiche_id}) is None:
        raise NotFound(f"Fiche {fiche_id} is not in the cache: it has not been fetched from the CRM.")


async def transcript(connection: Connection, tenant: str, fiche_id: str, call_id: str) -> Row:
    """Return the transcript of one recording: with its words if they were stored, otherwise the text alone. Raise
    NotFound if the fiche has no such recording, or the recording no transcript."""
    row = await fetch_one(connection, dict, TRANSCRIPT, (tenant, fiche_id, call_id))
    if row is None:
        raise NotFound(f"There is no recording {call_id} of fiche {fiche_id}.")
    if row.pop("nothing"):
        raise NotFound(f"There is no transcript of recording {call_id} of fiche {fiche_id}.")
    return {"fiche_id": fiche_id, **row, "transcription": Encoded(row["transcription"].encode())}
