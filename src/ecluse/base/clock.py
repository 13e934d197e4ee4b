"""The clock that is passed to the code that needs the time. `Clock` follows the clock of the database (`ecluse_now()`),
so that Python and SQL agree on the time; durations are measured on the monotonic clock."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta


class Clock:
    """The current time of the program: this host's time plus `offset`, the difference from the database's clock, which
    the engine measures at intervals (`set_clock`)."""

    def __init__(self) -> None:
        self.offset = timedelta(0)

    def now(self) -> datetime:
        """Return the current instant in UTC, with the offset added."""
        return datetime.now(UTC) + self.offset

    def monotonic(self) -> float:
        """Return seconds on a clock that is never set back, to measure durations with; the offset does not apply."""
        return time.monotonic()
