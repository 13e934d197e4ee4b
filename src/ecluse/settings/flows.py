"""The knobs of automation and of transcription."""

from __future__ import annotations

from typing import Annotated, Any

import structlog
from pydantic import BeforeValidator, Field, ValidationInfo, model_validator
from pydantic_settings import BaseSettings

log = structlog.get_logger(__name__)

WEEK_MS = 7 * 24 * 3_600_000


def at_least(minimum: float) -> Any:
    def raised(value: Any, info: ValidationInfo) -> Any:
        try:
            number = float(value)
        except (TypeError, ValueError):
            return value  # not a number: the type's own message says so, naming the variable
        if number < minimum:
            log.warning("setting below its minimum, using the minimum", name=info.field_name, minimum=minimum)
            return minimum if isinstance(minimum, int) else float(minimum)
        return value

    return BeforeValidator(raised)


class AutomationKnobs(BaseSettings):
    AUTOMATION_SEND_EVENT_CHUNK_SIZE: Annotated[int, at_least(1)] = Field(
        200, description="Rows of one dispatch statement at most, whatever the flow. Minimum 1."
    )
    AUTOMATION_SCHEDULER_WINDOW_MINUTES: Annotated[int, at_least(5)] = Field(
        20,
        le=7 * 24 * 60,
        description="How long a due instant of a schedule is in time, or waits for the run before it. Minimum 5, at "
        "most a week.",
    )
    AUTOMATION_SCHEDULER_CRON: str = Field(
        "*/1 * * * *", description="No effect, because schedules are looked at every second, by one replica at a time."
    )
    AUTOMATION_SCHEDULER_STALE_GRACE_MS: Annotated[int, at_least(0)] = Field(
        15 * 60_000,
        description="An automation run that takes longer than its three waits together and this is ended as stale; "
        "while a live replica leads it, after twice that time.",
    )
    AUTOMATION_FICHE_DETAILS_MAX_WAIT_MS: Annotated[int, at_least(1_000)] = Field(
        10 * 60_000, le=WEEK_MS, description="How long a run waits for the details of its fiches. Minimum 1000."
    )
    AUTOMATION_FICHE_DETAILS_POLL_INTERVAL_SECONDS: Annotated[float, at_least(0.1)] = Field(
        20, description="The longest pause between two looks at them; no progress for three of it is a stall."
    )
    AUTOMATION_TRANSCRIPTION_MAX_WAIT_MS: Annotated[int, at_least(1_000)] = Field(
        15 * 60_000, le=WEEK_MS, description="How long a run waits for transcripts. Minimum 1000."
    )
    AUTOMATION_TRANSCRIPTION_POLL_INTERVAL_SECONDS: Annotated[float, at_least(0.1)] = Field(
        30, description="The longest pause between two looks at them; no progress for three of it is a stall."
    )
    AUTOMATION_AUDIT_MAX_WAIT_MS: Annotated[int, at_least(1_000)] = Field(
        30 * 60_000, le=WEEK_MS, description="How long a run waits for audits. Minimum 1000."
    )
    AUTOMATION_AUDIT_POLL_INTERVAL_SECONDS: Annotated[float, at_least(0.1)] = Field(
        60, description="The longest pause between two looks at them; no progress for three of it is a stall."
    )
    AUTOMATION_MAX_RECORDINGS_PER_FICHE: Annotated[int, at_least(1)] | None = Field(
        None,
        description="A fiche with more recordings is ignored, unless its schedule has a limit of its own. Unset: no "
        "limit.",
    )
    AUTOMATION_DEBUG_LOG_TO_FILE: bool = Field(
        False,
        description="Write the log lines of every automation run into `automation-debug-logs/automation-run-<id>.txt`, "
        "in `ECLUSE_DATA_DIR`.",
    )
    FICHE_SALES_CACHE_CONCURRENCY: Annotated[int, at_least(1)] = Field(
        10, description="No effect, because the rows of a sales list are stored in one statement."
    )


class TranscriptionKnobs(BaseSettings):
    INNGEST_SERVER_REPLICAS: Annotated[int, at_least(1)] | None = Field(
        None, description="Number of replicas that concurrency defaults are computed for; before `SERVER_REPLICAS`."
    )
    SERVER_REPLICAS: Annotated[int, at_least(1)] = Field(1, description="The same, when the former is unset.")
    INNGEST_PARALLELISM_PER_SERVER: Annotated[int, at_least(1)] = Field(
        10, description="Share of one replica in the default global concurrency."
    )
    TRANSCRIPTION_FICHE_CONCURRENCY: Annotated[int, at_least(1)] | None = Field(
        None,
        description="Fiches fetched anew at once, over all replicas. Unset: replicas times their share. Minimum 1.",
    )
    TRANSCRIPTION_RECORDING_WORKER_CONCURRENCY: Annotated[int, at_least(1)] | None = Field(
        None, description="Recordings at the provider at once, over all replicas. Unset: as before. Minimum 1."
    )
    TRANSCRIPTION_RECORDING_PER_FICHE_CONCURRENCY: Annotated[int, at_least(1)] | None = Field(
        None, description="Of those, how many of one fiche. Unset: the share of one replica. Minimum 1."
    )
    TRANSCRIPTION_ELEVENLABS_RATE_LIMIT_PER_MINUTE: Annotated[float, at_least(0.01)] = Field(
        10, description="Calls that start at the provider per minute, over all fiches and replicas. Minimum 0.01."
    )
    TRANSCRIPTION_ELEVENLABS_MAX_ATTEMPTS: Annotated[int, at_least(1)] = Field(
        6, description="Calls per recording at most, the first included. Minimum 1."
    )
    TRANSCRIPTION_ELEVENLABS_BACKOFF_BASE_SECONDS: Annotated[float, at_least(0)] = Field(
        2, description="Pause before the second call; each further one is twice as long. Minimum 0."
    )
    TRANSCRIPTION_ELEVENLABS_BACKOFF_MAX_SECONDS: Annotated[float, at_least(0)] = Field(
        60, description="The longest pause, unless the provider's Retry-After says more. Minimum 0."
    )
    TRANSCRIPTION_PROGRESS_WEBHOOK_FREQUENCY: Annotated[int, at_least(1)] = Field(
        3, description="`transcription.progress` is told every so many recordings, and at the end. Minimum 1."
    )
    TRANSCRIPTION_MAX_WAIT_SECONDS: Annotated[float, at_least(30)] = Field(
        900, description="How long a caller with `wait_for_completion` waits for the run's end. Minimum 30."
    )
    TRANSCRIPTION_STALL_MINUTES: Annotated[float, at_least(0.1)] = Field(
        10,
        description="Nothing was taken up for so long, though nothing held it back: a warning; after as long again, "
        "the recordings are given up. Minimum 0.1.",
    )
    RATE_LIMITS_TRANSCRIPTION: Annotated[int, at_least(1)] = Field(
        50, description="Requests per fiche and minute; one more is answered 429. Minimum 1."
    )
    TRANSCRIPTION_DEBUG_LOG_TO_FILE: bool = Field(
        False,
        description="Write the log lines of every transcription run into a file of its own, in `ECLUSE_DATA_DIR`.",
    )
    TRANSCRIPTION_LOCK_TTL_MS: Annotated[int, at_least(1)] | None = Field(
        None,
        description="No effect, because a fiche's lock is held by its run, for as long as that is open. Unset: the "
        "larger of 30 minutes and 10 minutes more than `TRANSCRIPTION_MAX_WAIT_SECONDS`.",
    )
    TRANSCRIPTION_RUN_STATE_TTL_SECONDS: Annotated[int, at_least(1)] = Field(
        7200, description="No effect, because the state of runs is in the database, and stays."
    )
    TRANSCRIPTION_POLL_INTERVAL_SECONDS: Annotated[float, at_least(0.1)] = Field(
        5, description="No effect, because whoever waits for a run is woken by its end."
    )
    TRANSCRIPTION_FINALIZER_CONCURRENCY: Annotated[int, at_least(1)] | None = Field(
        None,
        description="No effect, because the commit of a run's last recording ends it. Unset: replicas times share.",
    )
    REDIS_URL: str | None = Field(None, description="No effect, because locks and state are in PostgreSQL.")

    @model_validator(mode="after")
    def _derived(self) -> TranscriptionKnobs:
        """Compute the defaults that depend on other knobs."""
        for name in ("FICHE", "RECORDING_WORKER", "FINALIZER"):
            if getattr(self, knob := f"TRANSCRIPTION_{name}_CONCURRENCY") is None:
                setattr(self, knob, self.default_global_concurrency)
        if self.TRANSCRIPTION_RECORDING_PER_FICHE_CONCURRENCY is None:
            self.TRANSCRIPTION_RECORDING_PER_FICHE_CONCURRENCY = self.INNGEST_PARALLELISM_PER_SERVER
        if self.TRANSCRIPTION_LOCK_TTL_MS is None:
            self.TRANSCRIPTION_LOCK_TTL_MS = int(max(1_800, self.TRANSCRIPTION_MAX_WAIT_SECONDS + 600) * 1_000)
        return self

    @property
    def default_global_concurrency(self) -> int:
        return (self.INNGEST_SERVER_REPLICAS or self.SERVER_REPLICAS) * self.INNGEST_PARALLELISM_PER_SERVER
