"""Faults of automation (I-04, I-09, I-12, I-19)."""

from __future__ import annotations

from tests.verify.plants import Fault, Plant, of, sql, then

FAULTS = [
    Fault("I-04", "a fiche that succeeded without a transcript", "1 recordings have no transcript",
          sql("UPDATE recordings SET has_transcription = false WHERE call_id = '8-1'")),
    Fault("I-04", "a fiche that succeeded though its audit failed", "0 of 1 audits are completed",
          sql("UPDATE audits SET status = 'failed', score = NULL, result = NULL, error_code = 'NO'")),
    Fault("I-04", "a fiche that succeeded without being audited", "0 of 0 audits",
          then(sql("DELETE FROM audits"), sql("UPDATE automation_run_facts SET audits_run = 0"))),
    Fault("I-12", "more audits than there are", "reports 2 audits, but has 1",
          sql("UPDATE automation_run_facts SET audits_run = 2")),
    Fault("I-12", "more transcripts than were made", "reports 1 transcripts",
          sql("UPDATE automation_run_facts SET transcriptions_run = 1")),
    Fault("I-12", "a summary of fiches that flatters", "summary reports 2 successful",
          sql("UPDATE automation_run_facts SET result_summary = result_summary || '{\"successful_fiches\": 2}'")),
    Fault("I-12", "a run that its schedule forgot", "counts 0 runs",
          sql("UPDATE automation_settings SET total_runs = 0, partial_runs = 0, last_run_status = NULL")),
    Fault("I-12", "a last run that ended otherwise", "the last success",
          sql("UPDATE automation_settings SET last_run_status = 'success'")),
    Fault("I-19", "an audit that will never be made", "pending, but the run has ended",
          sql("INSERT INTO audits (tenant_id, run_id, fiche_cache_id, fiche_id, audit_config_id, config_version,"
              " trigger_source, created_at) SELECT tenant_id, run_id, fiche_cache_id, '7', 2, 1, 'api', now()"
              " FROM audits")),
    Fault("I-09", "the end of an automation run not published", "published 0 automation.run.completed",
          of("calls:end", "events_outbox", "event_type = 'automation.run.progress'")),
    Fault("I-09", "a run of automation published as failed", "1 automation.run.failed",
          of("calls:end", "events_outbox", "event_type = 'automation.run.failed'")),
]  # fmt: skip

HARMLESS: dict[str, Plant] = {
    "a recording that came after the run had looked": sql(
        "INSERT INTO recordings (fiche_cache_id, call_id, created_at, updated_at)"
        " SELECT fiche_cache_id, 'late', now() + interval '1 minute', now() + interval '1 minute' FROM recordings"
        " WHERE call_id = '8-1'"
    ),
}
