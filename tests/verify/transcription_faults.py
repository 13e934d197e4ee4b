"""Faults of transcriptions (I-04, I-09, I-12)."""

from __future__ import annotations

from tests.verify.plants import Fault, of, sql

FAULTS = [
    Fault("I-04", "a success without a transcript", "has no transcript",
          sql("UPDATE recordings SET has_transcription = false WHERE call_id = '7-1'")),
    Fault("I-12", "a summary that flatters", "summary reports",
          sql("UPDATE transcription_runs SET failed = 0 WHERE run_id = %(fiche)s")),
    Fault("I-09", "the end of a fiche not published", "published 0 times",
          of("fiche:fiche/transcribed", "events_outbox", "event_type = 'fiche/other'")),
]  # fmt: skip
