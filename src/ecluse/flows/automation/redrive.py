"""SQL for redrives of automation: at which stage each failed fiche failed and whether it can succeed as it is, and the
figures for the estimate of a redrive."""

from __future__ import annotations

from ecluse.engine import FailedTarget
from ecluse.flows.audits.store import STAGE as AUDIT
from ecluse.flows.automation.eligibility import FETCH
from ecluse.flows.automation.transcripts import TRANSCRIBE
from ecluse.flows.fiches.cache import URL_MISSING

BEFORE_THE_CALL = ("NO_TRANSCRIPT", "TRANSCRIPT_TOO_LONG")  # the codes of audits that fail without a call

# Only cached fiches are counted: the number of recordings of other fiches is not known yet. A recording without a URL
# fails without a call.
LEFT = f"""
SELECT count(*), coalesce(sum(r.duration_s), 0), count(*) FILTER (WHERE r.duration_s IS NULL) FROM fiche_cache f
JOIN recordings r ON r.fiche_cache_id = f.id AND NOT r.has_transcription AND r.removed_at IS NULL AND NOT {URL_MISSING}
WHERE f.tenant_id = %s AND f.fiche_id = ANY(%s)
"""  # noqa: S608 - our own words
# Per failed fiche, the first item that failed permanently, of the run itself or of the run that transcribed it. A
# failed recording that has its transcript by now does not make the fiche hopeless, nor does NO_TRANSCRIPT if the fiche
# has recordings: they may be transcribed yet.
FAILED = f"""
WITH failures AS (
    SELECT CASE i.stage WHEN '{FETCH}' THEN i.key ELSE i.target END AS fiche_id, i.stage, i.error_code, i.error,
           i.permanent AND i.error_code <> ALL(%(may_heal)s) AS for_good
    FROM items i WHERE i.run_id = %(run)s AND i.status = 'failed'
    UNION ALL
    SELECT f.fiche_id, '{TRANSCRIBE}', i.error_code, i.error,
           i.permanent AND i.target <> '' AND i.error_code <> ALL(%(may_heal)s)
    FROM automation_run_fiches f
    JOIN recordings r ON r.fiche_cache_id = f.fiche_cache_id AND NOT r.has_transcription AND r.removed_at IS NULL
    JOIN items i ON i.run_id = f.transcription_run_id AND i.key = r.call_id
    WHERE f.run_id = %(run)s AND i.status = 'failed')
SELECT o.target, o.error_code, o.reason, CASE o.error_code WHEN 'DETAILS_NOT_FETCHED' THEN '{FETCH}'
           WHEN 'TRANSCRIPTION_INCOMPLETE' THEN '{TRANSCRIBE}' ELSE s.stage END AS stage,
       p.error_code AS cause, p.error AS why
FROM outcomes o
LEFT JOIN automation_run_fiches f ON f.run_id = o.run_id AND f.fiche_id = o.target
LEFT JOIN (SELECT fiche_id, min(stage) AS stage FROM failures WHERE stage <> '{FETCH}' GROUP BY 1) s
  ON s.fiche_id = o.target
LEFT JOIN (
    SELECT DISTINCT ON (fiche_id) fiche_id, stage, error_code, error FROM failures
    WHERE for_good ORDER BY fiche_id, error_code, error) p
  ON p.fiche_id = o.target AND (p.stage <> '{FETCH}' OR o.error_code = 'DETAILS_NOT_FETCHED')
     AND (p.error_code <> 'NO_TRANSCRIPT' OR f.recordings_count = 0)
WHERE o.run_id = %(run)s AND o.outcome = 'failed' ORDER BY o.target
"""  # noqa: S608 - our own words
SETTINGS = """
SELECT run_transcription, run_audits, specific_audit_configs, use_automatic_audits
FROM automation_settings WHERE id = %s
"""
# What audits of these configs have cost lately.
COST = """
SELECT avg(cost) FROM (SELECT cost FROM audits WHERE tenant_id = %s AND audit_config_id = ANY(%s) AND cost IS NOT NULL
                       ORDER BY id DESC LIMIT 200) a
"""


SCHEDULE = """
SELECT s.id, r.input -> 'override_fiche_selection' FROM runs r
LEFT JOIN schedules s ON s.id = r.schedule_id AND s.tenant_id = r.tenant_id AND s.deleted_at IS NULL WHERE r.id = %s
"""


def is_fetched(one: FailedTarget) -> bool:
    """Return whether a redrive of the fiche comes to its transcripts: not if its details cannot be fetched as it is."""
    return one.cause is None or one.stage != FETCH


def is_audited(one: FailedTarget) -> bool:
    """Return whether a redrive of the fiche comes to the calls of its audits: not if it cannot be fetched or
    transcribed as it is, or its audits fail before the call. An audit that the model has refused is sent again."""
    return one.cause is None or (one.stage == AUDIT and one.cause not in BEFORE_THE_CALL)
