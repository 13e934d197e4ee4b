"""Every decision about a transcription run, pure: how things are named, what is told and when, what a state means."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from ecluse.flows.fiches.ids import in_names

if TYPE_CHECKING:
    from ecluse.vendors.elevenlabs import Speech

FLOW = "transcription"
REFRESH, KNOWN, RECORDINGS = "refresh", "known", "recordings"
# The three functions of the requirements, as traces name them.
ORCHESTRATOR, WORKER, FINALIZER = "transcribe-fiche", "transcribe-recording", "finalize-fiche-transcription"

NO_URL = "NO_URL"
MISSING = "RECORDING_MISSING"
AUDIO_UNAVAILABLE = "AUDIO_UNAVAILABLE"
NOT_CONFIGURED = "NOT_CONFIGURED"
STALLED = "STALLED"
RUN_ENDED = "RUN_ENDED"  # the engine's word for what the end of a run left undone

State = Literal["transcribed", "queued", "running", "throttled", "failed", "not_tried"]
# Why an item waits (insight/waiting.py) when somebody holds it back, rather than nobody having come to it yet.
HELD_BACK = frozenset({"paused", "held", "retry", "in flight", "per key", "throttled"})


def fiche_lock(fiche_id: str) -> str:
    return f"lock:transcription:fiche:{in_names(fiche_id)}"


def recording_lock(fiche_id: str, call_id: str) -> str:
    return f"lock:transcription:recording:{in_names(fiche_id)}:{call_id}"


def click_id(fiche_id: str, milliseconds: int) -> str:
    """Each click is an event of its own."""
    return f"transcribe-{in_names(fiche_id)}-{milliseconds}"


def day_id(fiche_id: str, day: date) -> str:
    """One per fiche and UTC day; what has ended is repeated under its next name."""
    return f"transcribe-{in_names(fiche_id)}-{day.isoformat()}"


def speech_key(call_id: str, url: str, wanted: Speech) -> bytes:
    """What was paid for: signatures in the query change with every fetch, the recording does not."""
    parts = urlsplit(url.strip())
    said = [call_id, parts.scheme, parts.netloc, parts.path, vars(wanted)]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).digest()


def without_query(url: str) -> str:
    """For the log: a signature is a secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{parts.path}{'?***' if parts.query else ''}"


def percentage(total: int, transcribed: int) -> int:
    """Rounded down, so that 100 is said only of all, and of none at all."""
    return 100 if transcribed >= total else transcribed * 100 // total


@dataclass(frozen=True)
class Counts:
    """Of one run: planned once, counted while it runs, frozen at its end."""

    total_recordings: int = 0
    already_transcribed: int = 0
    target_total: int = 0
    processed: int = 0
    cached: int = 0
    failed: int = 0

    @property
    def transcribed(self) -> int:
        """By this run, at the vendor."""
        return self.processed - self.cached - self.failed

    @property
    def remaining(self) -> int:
        return max(0, self.target_total - self.processed)

    def as_dict(self) -> dict[str, int]:
        return {
            "total_recordings": self.total_recordings,
            "already_transcribed": self.already_transcribed,
            "target_total": self.target_total,
            "processed": self.processed,
            "cached": self.cached,
            "failed": self.failed,
        }


def about(fiche_id: str, run_id: int) -> dict[str, Any]:
    """What every payload carries."""
    return {"fiche_id": fiche_id, "run_id": str(run_id)}


def status_check(fiche_id: str, run_id: int, counts: Counts | None) -> dict[str, Any]:
    """No counts: the run has not found out yet what there is, and of that nothing is complete."""
    return {
        **about(fiche_id, run_id),
        "is_complete": counts is not None and counts.already_transcribed >= counts.total_recordings,
        "total_recordings": counts and counts.total_recordings,
        "already_transcribed": counts and counts.already_transcribed,
    }


def started(fiche_id: str, run_id: int, counts: Counts, priority: str) -> dict[str, Any]:
    return {**status_check(fiche_id, run_id, counts), "target_total": counts.target_total, "priority": priority}


def recording_over(
    fiche_id: str, run_id: int, call_id: str, *, cached: bool = False, code: str | None = None, error: str | None = None
) -> dict[str, Any]:
    """Of a recording that is over, however: what `transcription/recording.transcribed` says."""
    said = {**about(fiche_id, run_id), "call_id": call_id, "ok": code is None, "cached": cached}
    return said if code is None else {**said, "error": error or code, "error_code": code}


def progress(fiche_id: str, run_id: int, counts: Counts) -> dict[str, Any]:
    return {**about(fiche_id, run_id), **counts.as_dict(), "remaining": counts.remaining}


class End(NamedTuple):
    """How a run ended, from its rows."""

    status: str
    cause: str | None  # `normal`: by itself, not by force
    planned: bool  # its targets were known
    code: str | None
    reason: str | None


def tried(end: End) -> bool:
    """Were all targets tried? Then it is completed, even if each of them failed."""
    return end.cause == "normal" and end.planned


def why_ended(end: End) -> str | None:
    if end.code and end.reason:
        return f"{end.code}: {end.reason}"
    return end.code or end.reason


def completed(fiche_id: str, run_id: int, counts: Counts, end: End) -> dict[str, Any]:
    return {
        **progress(fiche_id, run_id, counts),
        "status": end.status,
        "transcribed": counts.transcribed,
        "noop": counts.target_total == 0,
        "reason": why_ended(end),
    }


def failed(fiche_id: str, run_id: int, counts: Counts, end: End) -> dict[str, Any]:
    return {
        **progress(fiche_id, run_id, counts),
        "status": end.status,
        "end_cause": end.cause,
        "reason": why_ended(end) or "ended before its recordings were tried",
    }


def transcribed(fiche_id: str, run_id: int, counts: Counts, end: End) -> dict[str, Any]:
    """`fiche/transcribed`: for whoever waits, in every case."""
    return {
        **about(fiche_id, run_id),
        "status": end.status,
        "end_cause": end.cause,
        "counts": {**counts.as_dict(), "transcribed": counts.transcribed},
        "reason": why_ended(end),
    }


def progress_due(told: int, counts: Counts, every: int) -> bool:
    """`told`: how many were processed when it was last told. Every N-th that is passed, and the last one."""
    if counts.processed <= told:
        return False
    return counts.processed // every > told // every or counts.processed >= counts.target_total


class Attempt(NamedTuple):
    """What the last planned run says of a recording: its item."""

    status: str
    in_hand: bool
    error_code: str | None
    error: str | None


def state_of(has_transcription: bool, attempt: Attempt | None, waiting: tuple[str, str] | None) -> tuple[State, Any]:
    """And the reason, where there is one. `waiting`: why its item waits, in one word and in full."""
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
    """At least, at the provider's cap."""
    return -int(-recordings // per_minute)
