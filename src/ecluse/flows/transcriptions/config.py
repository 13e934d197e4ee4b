"""Settings of the transcription flow, passed in by the composition root."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from decimal import ROUND_UP, Decimal

from ecluse.vendors.elevenlabs import Speech


@dataclass(frozen=True)
class Config:
    """Settings of the transcription flow, with their defaults. `fiche_concurrency`, `recording_concurrency` and
    `per_fiche` limit the calls in flight, `per_minute` the calls that start; `attempts` and `backoff_…` are the retries
    of a recording; `max_wait` limits the wait of callers for a run; `stall` is the time after which a run counts as
    stalled. `prices` are per minute of audio, by model; a recording of unknown length counts as `default_length`."""

    configured: bool = False  # the environment has an API key for speech to text
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
    prices: Mapping[str, Decimal] = field(default_factory=dict)
    default_length: timedelta = timedelta(minutes=10)

    def cost(self, seconds: float | None) -> Decimal | None:
        """Return the price of a recording of this length in seconds (None: `default_length`), rounded up. Return None
        if the model has no price."""
        price = self.prices.get(self.speech.model)
        if price is None:
            return None
        length = self.default_length.total_seconds() if seconds is None else seconds
        return (price * Decimal(str(length)) / 60).quantize(Decimal("0.000000001"), ROUND_UP)
