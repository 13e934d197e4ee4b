"""Parse `Retry-After` in both forms (RFC 9110): delta seconds and HTTP date. An unreadable value is None, never zero: a
vendor whose header cannot be parsed must not be called again at once."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime


def parse_retry_after(value: str | None, now: datetime) -> float | None:
    """Return the seconds to wait from `now`, which should be the vendor's own clock (its Date header) where there is
    one; None without a value or for an unreadable one."""
    if value is None:
        return None
    value = value.strip()
    if re.fullmatch(r"[+-]?\d+(\.\d+)?", value):
        return max(0.0, float(value)) if len(value) < 20 else None
    try:
        at = parsedate_to_datetime(value)
        return max(0.0, (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() - now.timestamp())
    except (ValueError, OverflowError):
        return None
