"""Events of transcription runs: ephemeral ones while a run is open (for realtime subscribers), durable ones and the
summary row when it ends. Counters are always read from the database."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_all, fetch_rows
from ecluse.engine import EphemeralEvent, Event, FinishedItem, Run
from ecluse.flows.fiches.fetch import Fetched, save_details
from ecluse.flows.transcriptions import rules, traces
from ecluse.flows.transcriptions.plan import event_of
from ecluse.flows.transcriptions.rules import Counts, End

REMEMBERED = 10_000  # runs whose last progress event is remembered

# For LATERAL beside `t`. Items closed by the end of the run (RUN_ENDED) were not tried and do not count; a succeeded
# item whose recording has no transcript (for example because its row is gone) counts as failed.
DONE = """(
    SELECT count(*)::int AS processed, (count(*) FILTER (WHERE ok AND cached))::int AS cached,
           (count(*) FILTER (WHERE NOT ok))::int AS failed
    FROM (SELECT i.status = 'succeeded' AND coalesce(r.has_transcription, false) AS ok,
                 coalesce((i.result ->> 'cached')::boolean, false) AS cached
          FROM items i
          LEFT JOIN recordings r ON r.fiche_cache_id = t.fiche_cache_id AND r.call_id = i.key
          WHERE i.run_id = t.run_id AND i.stage IN ('known', 'recordings') AND i.status <> 'open'
            AND i.error_code IS DISTINCT FROM 'RUN_ENDED') each_one)"""

COUNTS = f"""
SELECT t.run_id, t.fiche_id, t.total_recordings, t.already_transcribed, t.target_total,
       coalesce(t.processed, d.processed), coalesce(t.cached, d.cached), coalesce(t.failed, d.failed)
FROM transcription_runs t, LATERAL {DONE} d WHERE t.run_id = ANY(%s) AND t.target_total IS NOT NULL
"""  # noqa: S608 - our own names

SUM_UP = f"""
UPDATE transcription_runs t SET processed = s.processed, cached = s.cached, failed = s.failed
FROM (SELECT t.run_id, d.* FROM transcription_runs t, LATERAL {DONE} d WHERE t.run_id = ANY(%s)) s
JOIN runs r ON r.id = s.run_id WHERE t.run_id = s.run_id
RETURNING t.*, r.status, r.end_cause, r.error_code, coalesce(r.error_message, r.reason) AS reason,
          extract(epoch FROM r.ended_at - coalesce(r.started_at, r.created_at))::float8 AS seconds
"""  # noqa: S608 - our own names


class Progress:
    """Decides when a progress event is due: after every `every` recordings of a run. It remembers per process the count
    at each run's last event. A replica that misses one step emits the next; the replica that commits the last recording
    emits the final progress."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._processed: dict[int, int] = {}

    def due(self, run_id: int, counts: Counts) -> bool:
        """Return True if a progress event of the run is due now, and remember it as emitted."""
        if not rules.progress_due(self._processed.get(run_id, 0), counts, self._every):
            return False
        self._processed.pop(run_id, None)
        self._processed[run_id] = counts.processed
        while len(self._processed) > REMEMBERED:
            del self._processed[next(iter(self._processed))]
        return True


async def news(progress: Progress, connection: Connection, over: Sequence[FinishedItem]) -> list[EphemeralEvent]:
    """Log finished recordings and return the realtime events about them, with progress events where they are due. Used
    as the `news` of the stages `known` and `recordings`."""
    began = time.monotonic()
    events = [_recording(one) for one in over]
    for run_id, (fiche_id, counts) in (await counts_of(connection, {one.item.run_id for one in over})).items():
        one = next(one for one in reversed(over) if one.item.run_id == run_id)
        if counts.remaining:
            left = {"remaining": counts.remaining, "processed": counts.processed}
            traces.finalizer(one.item).end("waiting", time.monotonic() - began, **left)
        else:
            traces.finalizer(one.item).step("All recordings processed! Finalizing run...", processed=counts.processed)
        if progress.due(run_id, counts):
            payload = rules.progress(fiche_id, run_id, counts)
            events.append(EphemeralEvent(one.item.tenant_id, "transcription.progress", payload))
    return events


def _recording(one: FinishedItem) -> EphemeralEvent:
    """Log a finished recording, and return the realtime event about it."""
    item, code = one.item, None if one.status == "succeeded" else one.error_code or one.status
    cached = bool(one.result and one.result.get("cached"))
    payload = rules.recording_over(
        item.payload["fiche_id"], item.run_id, item.key, cached=cached, code=code, error=one.error
    )
    outcome = {name: payload.get(name) for name in ("ok", "cached", "error")}
    traces.finalizer(item).start("finalize-recording", **outcome)
    name = "recording_completed" if code is None else "recording_failed"
    return EphemeralEvent(item.tenant_id, f"transcription.{name}", payload)


async def counts_of(connection: Connection, runs: set[int]) -> dict[int, tuple[str, Counts]]:
    """Return fiche id and counts of the runs that have a plan, by run id: the frozen counts if the run has ended,
    otherwise the current ones."""
    return {row[0]: (row[1], Counts(*row[2:])) for row in await fetch_rows(connection, COUNTS, (list(runs),))}


async def ended(connection: Connection, runs: Sequence[Run]) -> list[Event]:
    """Store the summary of each ended run, mark its fiche in the cache if the CRM does not know it, and return the end
    events, exactly once per run, for every kind of end."""
    by_id = {run.id: run for run in runs}
    rows = {row["run_id"]: row for row in await fetch_all(connection, dict, SUM_UP, (sorted(by_id),))}
    gone = [
        Fetched(row["tenant_id"], row["fiche_id"], None)
        for row in rows.values()
        if row["error_code"] == "NOT_FOUND" and row["target_total"] is None
    ]
    await save_details(connection, gone)
    return [event for run_id in by_id for event in _end(by_id[run_id], rows[run_id])]


def _end(run: Run, row: Row) -> list[Event]:
    """Log the end of a run and return its end events."""
    counts = Counts(**{name: row[name] or 0 for name in Counts.__dataclass_fields__})
    planned = row["target_total"] is not None
    end = End(row["status"], row["end_cause"], planned, row["error_code"], row["reason"])
    fiche_id, tracer = row["fiche_id"], traces.orchestrator(run, row["fiche_id"])
    payload_of = rules.completed if rules.tried(end) else rules.failed
    name = "transcription.completed" if rules.tried(end) else "transcription.failed"
    if not rules.tried(end):
        tracer.error("transcription failed", reason=rules.why_ended(end))
    tracer.end("completed" if rules.tried(end) else "failed", row["seconds"], status=end.status, **counts.as_dict())
    return [
        event_of(run, name, payload_of(fiche_id, run.id, counts, end)),
        event_of(run, "fiche/transcribed", rules.transcribed(fiche_id, run.id, counts, end)),
    ]
