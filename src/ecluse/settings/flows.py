"""The knobs of automation and of transcription."""

from __future__ import annotations

from typing import Annotated, Any

import structlog
from pydantic import BeforeValidator, Field, ValidationInfo, model_validator
from pydantic_settings import BaseSettings

log = structlog.get_logger(__name__)

WEEK_MS = 7 * 24 * 3_600_000


def at_least(minimum: float) -> Any:
    """Return a validator that raises a number below `minimum` to it, and logs a warning."""

    def raised(value: Any, info: ValidationInfo) -> Any:
        try:
            number = float(value)
        except (TypeError, ValueError):
            return value  # not a number: the type's own message says so, naming the variable
        if number < minimum:
            log.warning("settings: value below its minimum, using the minimum", name=info.field_name, minimum=minimum)
            return minimum if isinstance(minimum, int) else float(minimum)
        return value

    return BeforeValidator(raised)


class AutomationKnobs(BaseSettings):
    """The knobs of automation."""

    AUTOMATION_SEND_EVENT_CHUNK_SIZE: Annotated[int, at_least(1)] = Field(
        200, description="Maximum rows per fan-out statement, for every flow. Minimum 1."
    )
    AUTOMATION_SCHEDULER_WINDOW_MINUTES: Annotated[int, at_least(5)] = Field(
        20,
        le=7 * 24 * 60,
        description="How late a slot of a schedule may be fired, and how long it waits for the running run. Minimum "
        "5, at most a week.",
    )
    AUTOMATION_SCHEDULER_CRON: str = Field(
        "*/1 * * * *", description="No effect, because schedules are checked every second, by one replica at a time."
    )
    AUTOMATION_SCHEDULER_STALE_GRACE_MS: Annotated[int, at_least(0)] = Field(
        15 * 60_000,
        description="An automation run that takes longer than the maximum waits of its three stages plus this time is "
        "ended as stale; while a live replica leads it, after twice that time.",
    )
    AUTOMATION_FICHE_DETAILS_MAX_WAIT_MS: Annotated[int, at_least(1_000)] = Field(
        10 * 60_000, le=WEEK_MS, description="Time limit of the details stage, which fetches fiches. Minimum 1000."
    )
    AUTOMATION_FICHE_DETAILS_POLL_INTERVAL_SECONDS: Annotated[float, at_least(0.1)] = Field(
        20,
        description="Longest interval between two polls of the details stage; no progress for three intervals is a "
        "stall.",
    )
    AUTOMATION_TRANSCRIPTION_MAX_WAIT_MS: Annotated[int, at_least(1_000)] = Field(
        15 * 60_000, le=WEEK_MS, description="Time limit of the transcription stage. Minimum 1000."
    )
    AUTOMATION_TRANSCRIPTION_POLL_INTERVAL_SECONDS: Annotated[float, at_least(0.1)] = Field(
        30,
        description="Longest interval between two polls of the transcription stage; no progress for three intervals "
        "is a stall.",
    )
    AUTOMATION_AUDIT_MAX_WAIT_MS: Annotated[int, at_least(1_000)] = Field(
        30 * 60_000, le=WEEK_MS, description="Time limit of the audit stage. Minimum 1000."
    )
    AUTOMATION_AUDIT_POLL_INTERVAL_SECONDS: Annotated[float, at_least(0.1)] = Field(
        60,
        description="Longest interval between two polls of the audit stage; no progress for three intervals is a "
        "stall.",
    )
    AUTOMATION_MAX_RECORDINGS_PER_FICHE: Annotated[int, at_least(1)] | None = Field(
        None,
        description="Fiches with more recordings are ignored; a schedule may have its own limit. Unset: no limit.",
    )
    AUTOMATION_DEBUG_LOG_TO_FILE: bool = Field(
        False,
        description="Write the log lines of each automation run to `automation-debug-logs/automation-run-<id>.txt` in "
        "`ECLUSE_DATA_DIR`.",
    )
    FICHE_SALES_CACHE_CONCURRENCY: Annotated[int, at_least(1)] = Field(
        10, description="No effect, because the rows of a sales list are stored in one statement."
    )


class TranscriptionKnobs(BaseSettings):
    """The knobs of transcription."""

    INNGEST_SERVER_REPLICAS: Annotated[int, at_least(1)] | None = Field(
        None, description="Number of replicas, for the defaults of concurrency knobs. Unset: `SERVER_REPLICAS`."
    )
    SERVER_REPLICAS: Annotated[int, at_least(1)] = Field(
        1, description="Number of replicas if `INNGEST_SERVER_REPLICAS` is unset."
    )
    INNGEST_PARALLELISM_PER_SERVER: Annotated[int, at_least(1)] = Field(
        10, description="Concurrency per replica; times the number of replicas, it is the default of concurrency knobs."
    )
    TRANSCRIPTION_FICHE_CONCURRENCY: Annotated[int, at_least(1)] | None = Field(
        None,
        description="Fiches fetched from the CRM at once by transcriptions, over all replicas. Unset: number of "
        "replicas times `INNGEST_PARALLELISM_PER_SERVER`. Minimum 1.",
    )
    TRANSCRIPTION_RECORDING_WORKER_CONCURRENCY: Annotated[int, at_least(1)] | None = Field(
        None,
        description="Recordings in flight at speech to text at once, over all replicas. Unset: number of replicas "
        "times `INNGEST_PARALLELISM_PER_SERVER`. Minimum 1.",
    )
    TRANSCRIPTION_RECORDING_PER_FICHE_CONCURRENCY: Annotated[int, at_least(1)] | None = Field(
        None,
        description="Recordings of one fiche in flight at once. Unset: `INNGEST_PARALLELISM_PER_SERVER`. Minimum 1.",
    )
    TRANSCRIPTION_ELEVENLABS_RATE_LIMIT_PER_MINUTE: Annotated[float, at_least(0.01)] = Field(
        10, description="Calls to speech to text started per minute, over all fiches and replicas. Minimum 0.01."
    )
    TRANSCRIPTION_ELEVENLABS_MAX_ATTEMPTS: Annotated[int, at_least(1)] = Field(
        6, description="Maximum attempts per recording, the first included. Minimum 1."
    )
    TRANSCRIPTION_ELEVENLABS_BACKOFF_BASE_SECONDS: Annotated[float, at_least(0)] = Field(
        2, description="Backoff before the first retry; it doubles with each further retry. Minimum 0."
    )
    TRANSCRIPTION_ELEVENLABS_BACKOFF_MAX_SECONDS: Annotated[float, at_least(0)] = Field(
        60,
        description="Maximum backoff. A `Retry-After` of the vendor, up to 15 minutes, replaces the backoff. "
        "Minimum 0.",
    )
    TRANSCRIPTION_PROGRESS_WEBHOOK_FREQUENCY: Annotated[int, at_least(1)] = Field(
        3, description="Publish `transcription.progress` every this many recordings, and at the end. Minimum 1."
    )
    TRANSCRIPTION_MAX_WAIT_SECONDS: Annotated[float, at_least(30)] = Field(
        900,
        description="How long code that starts a run with `wait_for_completion` waits for its end. No flow of Ecluse "
        "does: automation waits for `AUTOMATION_TRANSCRIPTION_MAX_WAIT_MS`, and requests only enqueue. Minimum 30.",
    )
    TRANSCRIPTION_STALL_MINUTES: Annotated[float, at_least(0.1)] = Field(
        10,
        description="If no recording of a run is claimed for this long although its lane is open, a warning is "
        "logged; after twice that time the recordings are given up. Minimum 0.1.",
    )
    RATE_LIMITS_TRANSCRIPTION: Annotated[int, at_least(1)] = Field(
        50, description="Requests per fiche and minute; further ones are answered 429. Minimum 1."
    )
    TRANSCRIPTION_DEBUG_LOG_TO_FILE: bool = Field(
        False,
        description="Write the log lines of each transcription run to `logs/transcription-run-<id>.log` in "
        "`ECLUSE_DATA_DIR`.",
    )
    TRANSCRIPTION_LOCK_TTL_MS: Annotated[int, at_least(1)] | None = Field(
        None,
        description="No effect, because the lock of a fiche is held by its run, for as long as the run is open. "
        "Unset: the larger of 30 minutes and 10 minutes more than `TRANSCRIPTION_MAX_WAIT_SECONDS`.",
    )
    TRANSCRIPTION_RUN_STATE_TTL_SECONDS: Annotated[int, at_least(1)] = Field(
        7200, description="No effect, because the state of runs is in the database and does not expire."
    )
    TRANSCRIPTION_POLL_INTERVAL_SECONDS: Annotated[float, at_least(0.1)] = Field(
        5, description="No effect, because the end of a run wakes the callers that wait for it."
    )
    TRANSCRIPTION_FINALIZER_CONCURRENCY: Annotated[int, at_least(1)] | None = Field(
        None,
        description="No effect, because the commit of the last recording ends the run. Unset: number of replicas "
        "times `INNGEST_PARALLELISM_PER_SERVER`.",
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
        """The default of the knobs that limit concurrency over all replicas."""
        return (self.INNGEST_SERVER_REPLICAS or self.SERVER_REPLICAS) * self.INNGEST_PARALLELISM_PER_SERVER
