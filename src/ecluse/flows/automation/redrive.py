"""Choice of the fiches that a redrive of an ended run takes: those that failed and, on request, those that were
cancelled before they were finished. Fiches that are known not to succeed are reported beforehand, and may be left
out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ecluse.access.envelope import Refused
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_all
from ecluse.engine import CANCELLED
from ecluse.flows.automation.eligibility import FETCH
from ecluse.flows.automation.selection_model import MOST_FICHES
from ecluse.flows.fiches.ids import is_fiche_id

# Codes of permanent failures that are not the record's fault, but that of a setting, a key, a crash of workers or the
# end of the run.
MAY_HEAL = (
    *("INCOMPLETE", "RUN_ENDED", "STALLED", "WORKER_CRASHED", "STORE_FAILED", "DISPATCH_FAILED", "BUG"),
    *("NOT_CONFIGURED", "UNAUTHORIZED", "FORBIDDEN", "FORBIDDEN_URL", "QUOTA_EXCEEDED", "SEALED", "NO_KEY"),
)
# Per failed fiche, the first item that failed permanently, of the run itself or of the run that transcribed it. A
# failed recording that has its transcript by now does not make the fiche hopeless, nor does NO_TRANSCRIPT if the fiche
# has recordings: they may be transcribed yet.
FAILED = f"""
WITH for_good AS (
    SELECT CASE i.stage WHEN '{FETCH}' THEN i.key ELSE i.target END AS fiche_id, i.stage, i.error_code, i.error
    FROM items i WHERE i.run_id = %(run)s AND i.status = 'failed' AND i.permanent
    UNION ALL
    SELECT f.fiche_id, i.stage, i.error_code, i.error
    FROM automation_run_fiches f
    JOIN recordings r ON r.fiche_cache_id = f.fiche_cache_id AND NOT r.has_transcription AND r.removed_at IS NULL
    JOIN items i ON i.run_id = f.transcription_run_id AND i.key = r.call_id
    WHERE f.run_id = %(run)s AND i.status = 'failed' AND i.permanent AND i.target <> '')
SELECT o.target AS fiche_id, o.error_code, p.error_code AS cause, p.error AS why
FROM outcomes o
LEFT JOIN automation_run_fiches f ON f.run_id = o.run_id AND f.fiche_id = o.target
LEFT JOIN (
    SELECT DISTINCT ON (fiche_id) fiche_id, stage, error_code, error FROM for_good
    WHERE error_code <> ALL(%(may_heal)s) ORDER BY fiche_id, error_code, error) p
  ON p.fiche_id = o.target AND (p.stage <> '{FETCH}' OR o.error_code = 'DETAILS_NOT_FETCHED')
     AND (p.error_code <> 'NO_TRANSCRIPT' OR f.recordings_count = 0)
WHERE o.run_id = %(run)s AND o.outcome = 'failed' ORDER BY o.target
"""  # noqa: S608 - our own words


class Failed(NamedTuple):
    """A fiche that failed or was cancelled in a run. `cause` and `why` are code and text of the error that makes
    another try hopeless; None if it may succeed."""

    fiche_id: str
    error_code: str | None
    cause: str | None
    why: str | None

    @property
    def cancelled(self) -> bool:
        """True if the fiche was not finished because its run was cancelled."""
        return self.error_code == CANCELLED


async def failed_in(connection: Connection, run_id: int) -> list[Failed]:
    """Return the fiches that failed or were cancelled in a run."""
    found = await fetch_all(connection, Failed, FAILED, {"run": run_id, "may_heal": list(MAY_HEAL)})
    return [one for one in found if is_fiche_id(one.fiche_id)]


def chosen(run_id: int, failed: Sequence[Failed], *, include_cancelled: bool, leave_out_hopeless: bool) -> list[str]:
    """Return the fiches to redrive: the failed ones, with `include_cancelled` the cancelled ones, without those that
    cannot succeed if `leave_out_hopeless`. Raises Refused (409), with the reason, if there are none."""
    wanted = [one for one in failed if include_cancelled or not one.cancelled]
    taken = [one.fiche_id for one in wanted if not (leave_out_hopeless and one.cause)]
    if taken:
        return taken[:MOST_FICHES]
    if wanted:
        why = f"None of the {len(wanted)} fiches that failed in run {run_id} can succeed as it is: {_causes(wanted)}."
        raise Refused(409, "ONLY_HOPELESS", why)
    if cancelled := len(failed):
        why = f"No fiche failed in run {run_id}, but {cancelled} were cancelled before they were finished: redrive them"
        raise Refused(409, "ONLY_CANCELLED", f"{why} with include_cancelled (`--cancelled` on the command line).")
    why = f"No fiche failed in run {run_id}: there is nothing to redrive. A trigger starts its schedule anew."
    raise Refused(409, "NOTHING_FAILED", why)


def _causes(failed: Sequence[Failed]) -> str:
    """Return the causes as text, each with its count."""
    return ", ".join(f"{one['count']} {one['error_code']}" for one in hopeless(failed))


def hopeless(failed: Sequence[Failed]) -> list[dict[str, Any]]:
    """Return the fiches that cannot succeed, grouped by cause, the most frequent first, each with an example."""
    by_cause: dict[str, list[Failed]] = {}
    for one in failed:
        if one.cause:
            by_cause.setdefault(one.cause, []).append(one)
    grouped = [
        {"error_code": cause, "count": len(several), "fiche_id": several[0].fiche_id, "error": several[0].why}
        for cause, several in by_cause.items()
    ]
    return sorted(grouped, key=lambda one: (-one["count"], one["error_code"]))


def preview(run_id: int, failed: Sequence[Failed], *, include_cancelled: bool) -> dict[str, Any]:
    """Return how many fiches a redrive would take, and how many of them cannot succeed."""
    wanted = [one for one in failed if include_cancelled or not one.cancelled]
    cancelled, causes = sum(one.cancelled for one in failed), hopeless(wanted)
    return {
        "run_id": str(run_id),
        "failed": len(failed) - cancelled,
        "cancelled": cancelled,
        "takes": min(len(wanted), MOST_FICHES),
        "cannot_succeed": sum(one["count"] for one in causes),
        "causes": causes,
    }
