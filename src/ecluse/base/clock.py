"""The clock that is passed to the code that needs the time. `Clock` adds the one offset row of the database (zero
outside tests), so that Python and SQL (`ecluse_now()`) always agree on the time; durations are measured on the
monotonic clock."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta


class Clock:
    def __init__(self) -> None:
        self.offset = timedelta(0)

    def now(self) -> datetime:
        return datetime.now(UTC) + self.offset

    def monotonic(self) -> float:
        return time.monotonic()
