"""Settings of the transcription flow, passed in by the composition root."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

from ecluse.vendors.elevenlabs import Speech


@dataclass(frozen=True)
class Config:
    """Settings of the transcription flow, with their defaults. `fiche_concurrency`, `recording_concurrency` and
    `per_fiche` limit the calls in flight, `per_minute` the calls that start; `attempts` and `backoff_…` are the retries
    of a recording; `max_wait` limits the wait of callers for a run; `stall` is the time after which a run counts as
    stalled."""

    configured: bool = False  # a speech-to-text API key is set
    speech: Speech = field(default_factory=Speech)
    fiche_concurrency: int = 10
    recording_concurrency: int = 10
    per_fiche: int = 10
    per_minute: float = 10
    attempts: int = 6
    backoff_base: float = 2.0
    backoff_longest: float = 60.0
    progress_every: int = 3
    time_limit: timedelta = timedelta(minutes=20)  # of one execution: a download and a call
    max_wait: timedelta = timedelta(seconds=900)
    stall: timedelta = timedelta(minutes=10)
    requests_per_minute: int = 50
