"""What this process has done since it started, for its metrics: plain counters, added to once per batch or failure."""

from __future__ import annotations

from collections import Counter

runs_ended: Counter[tuple[str, str]] = Counter()  # flow, state
items_finished: Counter[tuple[str, str, str]] = Counter()  # flow, stage, status
vendor_errors: Counter[tuple[str, str, str]] = Counter()  # flow, stage, code
