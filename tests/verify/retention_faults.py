"""What retention and erasure excuse, and what they do not: everything younger is judged as ever."""

from __future__ import annotations

from tests.verify.plants import Fault, Plant, of, sql, then


def deleted_until(kind: str, instant: str) -> Plant:
    return sql(f"INSERT INTO pruned (kind, before) VALUES ('{kind}', {instant})")  # noqa: S608 - our own words


HOUR_AGO, SOON = "now() - interval '1 hour'", "now() + interval '1 minute'"

FAULTS = [
    Fault("I-09", "the end of a young transcription not published", "published 0 times",
          then(deleted_until("events", HOUR_AGO),
               of("fiche:fiche/transcribed", "events_outbox", "event_type = 'fiche/other'"))),
    Fault("I-13", "an attempt of a young run missing", "but 0 recorded as failed",
          then(deleted_until("attempts", HOUR_AGO),
               sql("DELETE FROM attempts a USING items i WHERE i.id = a.item_id AND i.key = 'new'"))),
    Fault("I-06", "an intent of a young run missing", "no intent is recorded",
          then(deleted_until("runs", HOUR_AGO), sql("DELETE FROM effects WHERE key = 'new'"))),
    Fault("I-12", "fewer transcripts than a young run made", "reports 1 transcripts",
          then(deleted_until("runs", HOUR_AGO), sql("UPDATE automation_run_facts SET transcriptions_run = 1"))),
    Fault("I-12", "a deleted run that its schedule never had", "counts 1 runs",
          sql("INSERT INTO pruned_runs (schedule_id, status, runs)"
              " SELECT id, 'completed', 1 FROM automation_settings")),
    Fault("I-12", "an audit that was not erased, and is gone", "reports 1 audits, but has 0",
          then(sql("UPDATE automation_run_fiches SET erased_at = now(), erased_audits = 0"),
               sql("DELETE FROM audits"))),
]  # fmt: skip

HARMLESS: dict[str, Plant] = {
    "the rows of a run that is being deleted": then(
        sql("INSERT INTO pruning (run_id) VALUES (%(chore)s), (%(ended)s)"),
        sql("DELETE FROM stages WHERE run_id IN (%(chore)s, %(ended)s)"),
        sql("DELETE FROM items WHERE key = 'SKU-00001'"),
        sql("DELETE FROM outcomes WHERE target = 'chore'"),
        sql("DELETE FROM runs WHERE id IN (%(chore)s, %(ended)s)"),
    ),
    "attempts and events that were old": then(
        deleted_until("attempts", SOON),
        deleted_until("events", SOON),
        sql("DELETE FROM attempts"),
        sql("DELETE FROM events_outbox WHERE published_seq IS NOT NULL"),
    ),
    "intents of runs that were old": then(
        deleted_until("runs", SOON),
        sql("DELETE FROM effects WHERE key = 'new'"),
    ),
    "runs of a schedule that were old": then(
        sql("UPDATE automation_settings SET total_runs = 4, successful_runs = 2, failed_runs = 1"),
        sql("INSERT INTO pruned_runs (schedule_id, status, runs) SELECT id, w.word, w.n FROM automation_settings,"
            " (VALUES ('completed', 2), ('failed', 1)) AS w(word, n)"),
    ),
    "a fiche that was erased": then(
        sql("UPDATE transcription_runs SET erased_at = now()"),
        sql("UPDATE automation_run_fiches SET erased_at = now(), erased_audits = 1"),
        *(sql(f"DELETE FROM {table}") for table in ("recordings", "audits", "fiche_cache")),  # noqa: S608 - our own words
    ),
}  # fmt: skip
