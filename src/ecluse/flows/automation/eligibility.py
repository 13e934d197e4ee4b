"""Filter of fiches by their details: which go on to transcription and audits, which are ignored, and which have failed
because their details could not be fetched."""

from __future__ import annotations

from collections.abc import Sequence

from ecluse.base.text import count_of
from ecluse.db.connect import Connection
from ecluse.db.query import as_json, fetch_column, fetch_rows
from ecluse.engine import Run, Settled, settle_targets
from ecluse.flows.automation import events, snapshot
from ecluse.flows.automation.selection_model import Selection
from ecluse.flows.fiches.cache import FicheState, states

FETCH = "fetch"
NOT_FOUND = "Fiche not found (404)"
STOPPED = "Skipped: earlier stage failed (continueOnError=false)"

OPEN = "SELECT target FROM outcomes WHERE run_id = %s AND outcome IS NULL ORDER BY target"
COUNT = """
SELECT count(*) FILTER (WHERE outcome IS NULL)::int, count(*) FILTER (WHERE outcome = 'failed')::int
FROM outcomes WHERE run_id = %s
"""
WHY = "SELECT key, error FROM items WHERE run_id = %s AND stage = %s AND status <> 'succeeded'"
# Counted from the table: a step repeated after a crash counts the same.
REASONS = """
SELECT outcome, error_code, count(*)::int FROM outcomes WHERE run_id = %s AND outcome IS NOT NULL GROUP BY 1, 2
"""
KEEP = """
INSERT INTO automation_run_fiches (run_id, fiche_id, fiche_cache_id, recordings_count)
SELECT %s, fiche_id, fiche_cache_id, recordings_count
FROM jsonb_to_recordset(%s::jsonb) AS t(fiche_id text, fiche_cache_id bigint, recordings_count integer)
ON CONFLICT DO NOTHING
"""


def recordings_of(state: FicheState) -> int:
    """Return the number of recordings of a fiche: the CRM's figure, or the number of stored recordings if the fiche was
    never fetched."""
    return state.recordings_count if state.recordings_count is not None else state.total_recordings


def judge(
    fiche_id: str, state: FicheState | None, selection: Selection, limit: int | None, why: str | None
) -> Settled | None:
    """Return the final outcome of a fiche that does not continue; None if it continues to transcription and audits. The
    first rule that matches gives the reason. `state` is None for a fiche that is not cached; `limit` is the maximum of
    recordings per fiche, None for no limit; `why` is the error of its fetch, if that failed."""
    if state is None:
        return _failed(fiche_id, "Fiche not found in cache", why)
    if not state.ready:
        only_listed = state.sales_date is not None and state.fetched_at is None
        how = "still sales-list-only cache" if only_listed else "cache incomplete"
        return _failed(fiche_id, f"Fiche details not fetched ({how})", why)
    recordings = recordings_of(state)
    if state.details == "not_found":
        return Settled(fiche_id, "ignored", "NOT_FOUND", NOT_FOUND)
    if selection.groupes and state.groupe not in selection.groupes:
        reason = f"Groupe {state.groupe!r} is not among those selected" if state.groupe else "It has no groupe"
        return Settled(fiche_id, "ignored", "GROUPE", reason)
    if limit is not None and recordings > limit:
        reason = f"{count_of(recordings, 'recording')}, and {limit} is the most"
        return Settled(fiche_id, "ignored", "TOO_MANY_RECORDINGS", reason)
    if selection.only_with_recordings and not (recordings or state.has_recordings):
        return Settled(fiche_id, "ignored", "NO_RECORDINGS", "It has no recordings")
    return None


def _failed(fiche_id: str, text: str, why: str | None) -> Settled:
    return Settled(fiche_id, "failed", "DETAILS_NOT_FETCHED", f"{text}: {why}" if why else text)


async def decide(connection: Connection, run: Run, default_limit: int | None) -> tuple[int, int]:
    """Judge all open fiches of the run: store how many recordings each has, settle those that do not continue, and log
    the counts. `default_limit` applies where the selection sets no maximum of recordings. Return the numbers of open
    and failed fiches, as `left` does."""
    async with connection.transaction():
        wanted = await snapshot.load(connection, run)
        limit = wanted.selection.max_recordings_per_fiche or default_limit
        fiche_ids = await open_fiches(connection, run)
        known = await states(connection, run.tenant_id, fiche_ids)
        why: dict[str, str] = dict(await fetch_rows(connection, WHY, (run.id, FETCH)))
        verdicts = [judge(one, known.get(one), wanted.selection, limit, why.get(one)) for one in fiche_ids]
        settled = [verdict for verdict in verdicts if verdict is not None]
        await _keep(connection, run, list(known.values()))
        await settle_targets(connection, run, settled)
        counted: dict[str, dict[str, int]] = {"ignored": {}, "failed": {}}
        for outcome, code, count in await fetch_rows(connection, REASONS, (run.id,)):
            counted[outcome][code] = count
        gone_on = len(fiche_ids) - len(settled)
        stale = [one for one in why if (state := known.get(one)) is not None and state.ready]
        if stale:
            goes = count_of(len(stale), "fiche goes", "fiches go")
            they = "it" if len(stale) == 1 else "they"
            message = f"{goes} on with the details known before: {they} could not be fetched anew"
            await events.log_line(connection, run, message, "warning", sample=stale[:5])
        await snapshot.add_summary(connection, run, filters={"picked": gone_on, **counted})
        message = "Fiche detail fetch complete (distributed)"
        await events.log_line(connection, run, message, picked=gone_on, **counted)
    return await left(connection, run)


async def _keep(connection: Connection, run: Run, known: Sequence[FicheState]) -> None:
    """Store the run's fiches with their number of recordings; fiches that are stored already stay unchanged."""
    rows = [
        {"fiche_id": one.fiche_id, "fiche_cache_id": one.fiche_cache_id, "recordings_count": recordings_of(one)}
        for one in known
    ]
    await connection.execute(KEEP, (run.id, as_json(rows)))


async def open_fiches(connection: Connection, run: Run) -> list[str]:
    """Return the fiches without an outcome, by id; the next stage works on them. A replay finds the same ones, even
    while that stage runs."""
    return await fetch_column(connection, OPEN, (run.id,))


async def left(connection: Connection, run: Run) -> tuple[int, int]:
    """Return the number of fiches without an outcome, and the number of failed ones."""
    ((still_open, failed),) = await fetch_rows(connection, COUNT, (run.id,))
    return still_open, failed


async def settle_open(connection: Connection, run: Run, how: Settled) -> None:
    """Settle all open fiches with the same outcome, `how`; the target in `how` is not used."""
    fiche_ids = await open_fiches(connection, run)
    await settle_targets(connection, run, [how._replace(target=fiche_id) for fiche_id in fiche_ids])


async def stop(connection: Connection, run: Run) -> None:
    """Settle the open fiches as ignored, because a fiche has failed and the schedule does not continue on errors:
    fiches that were not processed to the end have neither succeeded nor failed."""
    await settle_open(connection, run, Settled("", "ignored", "STOPPED", STOPPED))
    await events.log_line(connection, run, "Stopped: a fiche has failed, and continueOnError is false", "warning")
