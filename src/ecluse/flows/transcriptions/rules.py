"""Pure decisions about transcription runs: computed names and keys, event payloads, when progress events are due,
states."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from datetime import date
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from ecluse.flows.fiches.ids import in_names

if TYPE_CHECKING:
    from ecluse.vendors.elevenlabs import Speech

FLOW = "transcription"
REFRESH, KNOWN, RECORDINGS = "refresh", "known", "recordings"
# The three functions that the requirements name; traces use these names.
ORCHESTRATOR, WORKER, FINALIZER = "transcribe-fiche", "transcribe-recording", "finalize-fiche-transcription"

NO_URL = "NO_URL"
MISSING = "RECORDING_MISSING"
AUDIO_UNAVAILABLE = "AUDIO_UNAVAILABLE"
NOT_CONFIGURED = "NOT_CONFIGURED"
STALLED = "STALLED"
RUN_ENDED = "RUN_ENDED"  # the engine's error code for items that the end of a run closed

State = Literal["transcribed", "queued", "running", "throttled", "failed", "not_tried"]
# Causes of waiting (insight/causes.py) that hold an item back, as opposed to no worker having reached it yet.
HELD_BACK = frozenset({"paused", "held", "budget", "retry", "in flight", "per key", "throttled"})


def fiche_lock(fiche_id: str) -> str:
    """Return the key of the lease on a fiche, by which only one run at a time transcribes it."""
    return f"lock:transcription:fiche:{in_names(fiche_id)}"


def recording_lock(fiche_id: str, call_id: str) -> str:
    """Return the key of the lease on a recording, by which only one call at a time is paid for."""
    return f"lock:transcription:recording:{in_names(fiche_id)}:{call_id}"


def click_id(fiche_id: str, milliseconds: int) -> str:
    """Return the event id of one request for a single fiche, made at this instant: every request is an event of its
    own."""
    return f"transcribe-{in_names(fiche_id)}-{milliseconds}"


def day_id(fiche_id: str, day: date) -> str:
    """Return the event id of a daily request: one per fiche and UTC day. After that run has ended, a repetition gets
    the next retry suffix."""
    return f"transcribe-{in_names(fiche_id)}-{day.isoformat()}"


def speech_key(call_id: str, url: str, wanted: Speech) -> bytes:
    """Return the key of a paid result, from the recording and the request options. The URL's query is left out: its
    signature changes with every fetch, the recording does not."""
    parts = urlsplit(url.strip())
    parameters = [call_id, parts.scheme, parts.netloc, parts.path, vars(wanted)]
    return hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).digest()


def without_query(url: str) -> str:
    """Return the URL as logs show it: scheme, host and path. A query is hidden, because its signature is a secret;
    user, port and fragment are left out."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{parts.path}{'?***' if parts.query else ''}"


def percentage(total: int, transcribed: int) -> int:
    """Return the percentage of recordings that are transcribed, rounded down: 100 only if all are, or if there are
    none."""
    return 100 if transcribed >= total else transcribed * 100 // total


@dataclass(frozen=True)
class Counts:
    """Counters of one run: planned once, counted while it is open, frozen when it ends."""

    total_recordings: int = 0
    already_transcribed: int = 0
    target_total: int = 0
    processed: int = 0
    cached: int = 0
    failed: int = 0

    @property
    def transcribed(self) -> int:
        """The number of recordings that the provider transcribed for this run."""
        return self.processed - self.cached - self.failed

    @property
    def remaining(self) -> int:
        """The number of targets that are not processed yet."""
        return max(0, self.target_total - self.processed)

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def about(fiche_id: str, run_id: int) -> dict[str, Any]:
    """Return the fields that every event payload has."""
    return {"fiche_id": fiche_id, "run_id": str(run_id)}


def status_check(fiche_id: str, run_id: int, counts: Counts | None) -> dict[str, Any]:
    """Return the payload of `transcription.status_check`. Without counts the run has no plan yet and is not
    complete."""
    return {
        **about(fiche_id, run_id),
        "is_complete": counts is not None and counts.already_transcribed >= counts.total_recordings,
        "total_recordings": counts and counts.total_recordings,
        "already_transcribed": counts and counts.already_transcribed,
    }


def started(fiche_id: str, run_id: int, counts: Counts, priority: str) -> dict[str, Any]:
    """Return the payload of `transcription.started`."""
    return {**status_check(fiche_id, run_id, counts), "target_total": counts.target_total, "priority": priority}


def recording_over(
    fiche_id: str, run_id: int, call_id: str, *, cached: bool = False, code: str | None = None, error: str | None = None
) -> dict[str, Any]:
    """Return the payload of the events about a finished recording. `code`: its error code; None if it succeeded."""
    payload = {**about(fiche_id, run_id), "call_id": call_id, "ok": code is None, "cached": cached}
    return payload if code is None else {**payload, "error": error or code, "error_code": code}


def progress(fiche_id: str, run_id: int, counts: Counts) -> dict[str, Any]:
    """Return the payload of `transcription.progress`."""
    return {**about(fiche_id, run_id), **counts.as_dict(), "remaining": counts.remaining}


class End(NamedTuple):
    """The end of a run, read from its rows."""

    status: str
    cause: str | None  # `normal`: by itself, not by force
    planned: bool  # it got as far as having a plan
    code: str | None
    reason: str | None


def tried(end: End) -> bool:
    """Return True if all targets were tried: then the run counts as completed, even if every target failed."""
    return end.cause == "normal" and end.planned


def why_ended(end: End) -> str | None:
    """Return code and reason of an end as text; None if there is neither."""
    if end.code and end.reason:
        return f"{end.code}: {end.reason}"
    return end.code or end.reason


def completed(fiche_id: str, run_id: int, counts: Counts, end: End) -> dict[str, Any]:
    """Return the payload of `transcription.completed`."""
    return {
        **progress(fiche_id, run_id, counts),
        "status": end.status,
        "transcribed": counts.transcribed,
        "noop": counts.target_total == 0,
        "reason": why_ended(end),
    }


def failed(fiche_id: str, run_id: int, counts: Counts, end: End) -> dict[str, Any]:
    """Return the payload of `transcription.failed`."""
    return {
        **progress(fiche_id, run_id, counts),
        "status": end.status,
        "end_cause": end.cause,
        "reason": why_ended(end) or "ended before its recordings were tried",
    }


def transcribed(fiche_id: str, run_id: int, counts: Counts, end: End) -> dict[str, Any]:
    """Return the payload of `fiche/transcribed`, which is emitted for every kind of end."""
    return {
        **about(fiche_id, run_id),
        "status": end.status,
        "end_cause": end.cause,
        "counts": {**counts.as_dict(), "transcribed": counts.transcribed},
        "reason": why_ended(end),
    }


def progress_due(emitted: int, counts: Counts, every: int) -> bool:
    """Return True if a progress event is due: a multiple of `every` was passed since the last one, or all are
    processed. `emitted` is the processed count of the last progress event."""
    if counts.processed <= emitted:
        return False
    return counts.processed // every > emitted // every or counts.processed >= counts.target_total


class Attempt(NamedTuple):
    """The item of a recording in the last planned run; `in_hand`: a worker has claimed it."""

    status: str
    in_hand: bool
    error_code: str | None
    error: str | None


def state_of(has_transcription: bool, attempt: Attempt | None, waiting: tuple[str, str] | None) -> tuple[State, Any]:
    """Return the state of a recording, and the reason for it, if any. `waiting`: cause and detail for which its item
    waits."""
    if has_transcription:
        return "transcribed", None
    if attempt is None:
        return "not_tried", None
    if attempt.status == "failed" and attempt.error_code != RUN_ENDED:
        return "failed", f"{attempt.error_code}: {attempt.error}"
    if attempt.status != "open":
        return "not_tried", attempt.error
    if attempt.in_hand:
        return "running", None
    if waiting is None:
        return "queued", None
    cause, detail = waiting
    return "throttled" if cause in HELD_BACK else "queued", detail


def minutes_needed(recordings: int, per_minute: float) -> int:
    """Return the minimum number of minutes that this number of recordings takes at the provider's rate cap."""
    return -int(-recordings // per_minute)
