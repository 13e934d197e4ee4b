"""Advice per error code of a failed target: one sentence that says whether a redrive can help."""

from __future__ import annotations

REDRIVE = "A redrive may succeed."
LATER = "A redrive may succeed once the vendor answers again."
SETTING = "Correct the setting or the key first; then a redrive may succeed."
RECORD = "A redrive fails again until the record is corrected in the CRM."
NOTHING = "A redrive fails again: the vendor refuses this record as it is."
UNKNOWN = "If the cause is gone, a redrive may succeed."

ADVICE = {
    **dict.fromkeys(("CANCELLED", "INCOMPLETE", "RUN_ENDED", "STALLED", "WORKER_CRASHED", "DISPATCH_FAILED"), REDRIVE),
    **dict.fromkeys(("STORE_FAILED", "LEASE_LOST", "TIMEOUT"), REDRIVE),
    **dict.fromkeys(("VENDOR_UNAVAILABLE", "VENDOR_UNREACHABLE", "VENDOR_DISCONNECTED", "THROTTLED"), LATER),
    **dict.fromkeys(("CRM_UNAVAILABLE", "CRM_UNSUCCESSFUL", "DETAILS_NOT_FETCHED", "CONCURRENCY"), LATER),
    **dict.fromkeys(("NOT_CONFIGURED", "UNAUTHORIZED", "FORBIDDEN", "FORBIDDEN_URL", "QUOTA_EXCEEDED"), SETTING),
    **dict.fromkeys(("SEALED", "NO_KEY", "NO_SECRET", "NO_SECRET_KEY", "NO_CONNECTION"), SETTING),
    **dict.fromkeys(("NO_URL", "NO_RECORDINGS", "NOT_FOUND", "GONE"), RECORD),
    **dict.fromkeys(("VENDOR_REFUSED", "CONTENT_FILTERED", "TRANSCRIPT_TOO_LONG", "ANSWER_TOO_LARGE"), NOTHING),
    "NO_TRANSCRIPT": "A redrive transcribes recordings first; without any it fails again. The preview counts them.",
}


def advice(code: str | None) -> str:
    return ADVICE.get(code or "", UNKNOWN)


def may_succeed(code: str | None) -> bool:
    """Return whether a redrive of targets that failed with this code is offered beside the advice."""
    return advice(code) not in (RECORD, NOTHING)
