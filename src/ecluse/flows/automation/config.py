"""Settings of the automation flow, passed in by the composition root."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal


@dataclass(frozen=True)
class Config:
    """Settings of the automation flow, with their defaults. `…_wait` is the longest time that a stage may take,
    `…_poll` the longest interval between two polls of its gate; `grace` is added to the waits before a run is stale."""

    details_wait: timedelta = timedelta(minutes=10)
    details_poll: timedelta = timedelta(seconds=20)
    transcription_wait: timedelta = timedelta(minutes=15)
    transcription_poll: timedelta = timedelta(seconds=30)
    audit_wait: timedelta = timedelta(minutes=30)
    audit_poll: timedelta = timedelta(seconds=60)
    grace: timedelta = timedelta(minutes=15)
    max_recordings: int | None = None  # per fiche, where its schedule has no limit of its own
    crm_concurrency: int = 20
    per_minute: float = 10  # recordings that start at the provider
    chunk: int = 200  # runs started in one transaction
    # The price of a transcript of so many seconds, or of unknown length; None: not known.
    transcript_cost: Callable[[float | None], Decimal | None] = lambda _: None
    unset: tuple[str, ...] = ()  # knobs without which runs fail

    @property
    def longest(self) -> timedelta:
        """The longest time that a run may take. A run that takes longer is stale, even if a replica still works on
        it."""
        return self.details_wait + self.transcription_wait + self.audit_wait + self.grace
