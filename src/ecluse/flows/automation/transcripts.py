"""Transcripts of a run's fiches: a transcription run is started for each fiche, and the gate counts recordings. The
transcription runs go on after this run has ended, unless it is ended by force (ADR 0017)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

from ecluse.base.crash import crashpoint
from ecluse.base.ids import item_event_id
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_all, fetch_column, fetch_rows
from ecluse.engine import Counted, Flow, Run, Settled, keep_open, settle_targets
from ecluse.flows.automation import events, snapshot
from ecluse.flows.automation.config import Config
from ecluse.flows.automation.selection_model import AUDIT_WAIT, WAIT, budget_warning
from ecluse.flows.fiches.ids import in_names
from ecluse.flows.transcriptions.start import start

TRANSCRIBE = "transcribe"
INCOMPLETE = "Transcription incomplete (timeout/stall)"
SAMPLE = 3
NAMED = 3  # recordings, in the error of a fiche

# Recordings, known when the stage began, of fiches that have no outcome yet. Recordings removed upstream are not
# counted. (OFFSET 0 forces lookups by key, fiche by fiche, whatever the planner estimates for tables that were just
# filled.)
FROM = f"""
FROM automation_run_fiches f JOIN stages s ON s.run_id = f.run_id AND s.stage = '{TRANSCRIBE}'
CROSS JOIN LATERAL (
    SELECT 1 FROM outcomes o WHERE o.run_id = f.run_id AND o.target = f.fiche_id AND o.outcome IS NULL OFFSET 0) o
LEFT JOIN LATERAL (SELECT * FROM runs t WHERE t.id = f.transcription_run_id OFFSET 0) t ON true
CROSS JOIN LATERAL (
    SELECT r.call_id, r.has_transcription FROM recordings r
    WHERE r.fiche_cache_id = f.fiche_cache_id AND r.removed_at IS NULL AND r.created_at <= s.started_at OFFSET 0) r
"""  # noqa: S608 - our own words
THIS = "WHERE f.run_id = %(run)s"
MISSING = f"{THIS} AND NOT r.has_transcription"
# No transcription run works on the recording any more, or ever did. A recording that a run of another parent left
# undone is not over: this run takes it over.
OVER = "NOT r.has_transcription AND (t.id IS NULL OR (t.ended_at IS NOT NULL AND t.parent_run_id = f.run_id))"
UNHEALABLE = """EXISTS (SELECT 1 FROM items i WHERE i.run_id = t.id AND i.key = r.call_id AND i.status = 'failed'
    AND i.permanent AND i.target <> '')"""
COUNT = f"""
SELECT count(*)::int, (count(*) FILTER (WHERE r.has_transcription))::int,
       (count(*) FILTER (WHERE {OVER}))::int, (count(*) FILTER (WHERE {OVER} AND {UNHEALABLE}))::int {FROM} {THIS}
"""
FICHES = f"""
SELECT f.fiche_id, (count(*) FILTER (WHERE NOT r.has_transcription))::int {FROM} {THIS} GROUP BY f.fiche_id ORDER BY 1
"""
HEALABLE = f"""
SELECT DISTINCT f.fiche_id {FROM} {THIS} AND {OVER} AND NOT {UNHEALABLE} ORDER BY 1
"""
LEFT_BY_OTHERS = f"""
SELECT DISTINCT f.fiche_id {FROM} {MISSING} AND t.ended_at IS NOT NULL AND t.parent_run_id IS DISTINCT FROM f.run_id
ORDER BY 1
"""  # noqa: S608 - our own words
# Why transcripts of a fiche are missing: its first known cause, and how many recordings have one; for late recordings,
# what they waited for.
LATE = f"""
SELECT w.fiche_id, count(*)::int AS missing, coalesce((array_agg(w.call_id || ': ' || w.why ORDER BY w.call_id)
           FILTER (WHERE w.why IS NOT NULL))[1:{NAMED}], '{{}}') AS waited, e.error_code AS code, e.error, e.failed,
       bool_or(w.over_budget) AS over_budget
FROM (SELECT f.fiche_id, r.call_id, coalesce(b.why, i.error, 'lane ' || l.name || ' is paused: ' || l.paused_reason)
          AS why, b.why IS NOT NULL AS over_budget
      {FROM} LEFT JOIN items i ON i.run_id = t.id AND i.stage IN ('known', 'recordings') AND i.key = r.call_id
      LEFT JOIN lanes l ON l.id = i.lane_id LEFT JOIN LATERAL (
          SELECT i.postponed_why AS why WHERE i.postponed_cause = 'budget' AND i.claim_id IS NULL) b ON true
      {MISSING}) w
LEFT JOIN (SELECT * FROM expected_failures WHERE run_id = %(run)s) e ON e.target = w.fiche_id
GROUP BY w.fiche_id, e.error_code, e.error, e.failed ORDER BY 1
"""  # noqa: S608 - our own words
LINK = """
UPDATE automation_run_fiches f SET transcription_run_id = t.run, transcription_round = %s
FROM unnest(%s::text[], %s::bigint[]) AS t(fiche_id, run) WHERE f.run_id = %s AND f.fiche_id = t.fiche_id
"""


class Late(NamedTuple):
    """A fiche that lacks transcripts after the gate: `missing` is their number; `waited` has up to NAMED causes for
    which recordings waited; `code` and `error` are the fiche's first known cause, None if there is none."""

    fiche_id: str
    missing: int
    waited: Sequence[str]
    code: str | None
    error: str | None
    failed: int | None  # None: the cause is not that of particular recordings
    over_budget: bool  # one of them waits for a budget

    @property
    def late(self) -> int:
        """The number of recordings without a known cause but that their time was over."""
        if self.code is None:
            return self.missing
        return 0 if self.failed is None else max(0, self.missing - self.failed)

    def settled(self) -> Settled:
        """Return the failed outcome of the fiche, with its cause."""
        if self.code is None:
            named = "; ".join(f"recording {why}" for why in self.waited)
            more = f" (and {self.missing - len(self.waited)} more)" if 0 < len(self.waited) < self.missing else ""
            text = f"{INCOMPLETE}: {named}{more}" if named else INCOMPLETE
            code = "BUDGET_EXCEEDED" if self.over_budget else "TRANSCRIPTION_INCOMPLETE"
            return Settled(self.fiche_id, "failed", code, text)
        text = f"{self.error}; {self.late} more not transcribed in time" if self.late else str(self.error)
        return Settled(self.fiche_id, "failed", self.code, text)


@dataclass(frozen=True)
class Transcripts:
    """The units of the transcription gate: recordings of all fiches without an outcome, whichever run transcribes them.
    `flow` is the flow of transcription runs; `rounds` the number of further rounds for failed fiches."""

    flow: Flow
    config: Config
    rounds: int

    async def dispatch(self, connection: Connection, run: Run, max_wait: timedelta) -> int:
        """Start a transcription run for every fiche that lacks a transcript (for every fiche, if the schedule does not
        skip transcribed ones), and return their number. Warn if `max_wait` is too short for the recordings. Idempotent:
        a known event id already has its run."""
        wanted = await snapshot.load(connection, run)
        rows = await fetch_rows(connection, FICHES, {"run": run.id})
        fiche_ids = [fiche for fiche, missing in rows if missing or not wanted.skip_if_transcribed]
        await self._warn(connection, run, sum(missing for _, missing in rows), max_wait)
        await self._start(connection, run, fiche_ids, wanted.transcription_priority, 0)
        sample = [_event_id(run, fiche_id, 0) for fiche_id in fiche_ids[:SAMPLE]]
        counts = {"fiches": len(fiche_ids), "skipped": len(rows) - len(fiche_ids)}
        await events.log_line(connection, run, "Dispatched fiche/transcribe fan-out events", **counts, event_ids=sample)
        run.trace.fan_out("fiche/transcribe", len(fiche_ids), sample, **counts)
        return len(fiche_ids)

    async def count(self, connection: Connection, run: Run) -> Counted:
        """Return how many recordings the gate expects, and how many are transcribed, failed, and failed for good."""
        (row,) = await fetch_rows(connection, COUNT, {"run": run.id})
        return Counted(*row)

    async def take_over(self, connection: Connection, run: Run, round_: int) -> None:
        """Start runs for fiches whose transcription run was not started by this run and has ended unfinished. `round_`:
        the current round."""
        left = await fetch_column(connection, LEFT_BY_OTHERS, {"run": run.id})
        if left:
            wanted = await snapshot.load(connection, run)
            await self._start(connection, run, left, wanted.transcription_priority, round_)

    async def again(self, connection: Connection, run: Run, round_: int) -> None:
        """Start round `round_` for fiches that may succeed. Idempotent: a fiche in progress is left out, and event ids
        are computed."""
        wanted = await snapshot.load(connection, run)
        fiche_ids = await fetch_column(connection, HEALABLE, {"run": run.id})
        await self._start(connection, run, fiche_ids, wanted.transcription_priority, round_)
        sample = [_event_id(run, fiche_id, round_) for fiche_id in fiche_ids[:SAMPLE]]
        message = f"Retrying transcriptions ({round_}/{self.rounds})"
        await events.log_line(connection, run, message, "warning", fiches=len(fiche_ids), event_ids=sample)
        run.trace.fan_out("fiche/transcribe", len(fiche_ids), sample, round=round_)

    async def settle(self, connection: Connection, run: Run) -> None:
        """Settle every fiche that lacks a transcript after the gate as failed: for its first cause if one is known,
        otherwise because time ran out."""
        async with connection.transaction():
            late = await fetch_all(connection, Late, LATE, {"run": run.id})
            counted = await self.count(connection, run)
            await settle_targets(connection, run, [one.settled() for one in late])
            done = f"completed {counted.succeeded}/{counted.expected}"
            if codes := Counter(one.code for one in late if one.code is not None):
                causes = ", ".join(f"{count} × {code}" for code, count in codes.most_common())  # noqa: RUF001
                message = f"Transcription failed (fiches): {causes} - recordings {done}"
                await events.log_line(connection, run, message, "warning", fiches=codes.total(), sample=_known(late))
            if timed_out := [one.fiche_id for one in late if one.late]:
                message = f"Transcription timeout/stall - {done}"
                sample = timed_out[:SAMPLE]
                await events.log_line(connection, run, message, "warning", fiches=len(timed_out), sample=sample)

    async def _start(
        self, connection: Connection, run: Run, fiche_ids: Sequence[str], priority: Any, round_: int
    ) -> None:
        """Start transcription runs for these fiches, or attach to existing ones, in chunks, and link them to the
        run."""
        for first in range(0, len(fiche_ids), self.config.chunk):
            some = fiche_ids[first : first + self.config.chunk]
            async with connection.transaction():
                await keep_open(connection, run)
                started = await start(
                    connection,
                    self.flow,
                    run.tenant_id,
                    some,
                    event_ids=[_event_id(run, fiche_id, round_) for fiche_id in some],
                    priority=priority,
                    refresh=False,
                    parent_run_id=run.id,
                    correlation_id=run.correlation_id or run.event_key,
                )
                ids = [one.run_id for one in started]
                await connection.execute(LINK, (round_, [one.fiche_id for one in started], ids, run.id))
            crashpoint("in dispatch")

    async def _warn(self, connection: Connection, run: Run, recordings: int, max_wait: timedelta) -> None:
        """Warn, in log and snapshot, if this number of recordings cannot be transcribed within `max_wait`."""
        knob = WAIT if max_wait == self.config.transcription_wait else AUDIT_WAIT
        if warning := budget_warning(recordings, self.config.per_minute, max_wait, knob):
            await events.log_line(connection, run, f"The time limit is too short: {warning}", "warning")
            await snapshot.add(connection, run, budget_warning=warning)
            run.trace.warn(warning)


def _event_id(run: Run, fiche_id: str, round_: int) -> str:
    """Return the event id of a fiche's transcription in a round."""
    return item_event_id(run.flow, run.id, TRANSCRIBE, in_names(fiche_id), round_)


def _known(late: Sequence[Late]) -> list[str]:
    """Return up to SAMPLE examples of fiches with a known cause, for the log."""
    return [f"{one.fiche_id}: {one.error}" for one in late if one.code is not None][:SAMPLE]
