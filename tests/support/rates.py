"""A rate, judged by the instants of the calls."""

from __future__ import annotations

from collections.abc import Iterable


def assert_within(times: Iterable[float], *, rate: float, burst: float, slack: float = 1e-4) -> None:
    """In no window [s, e] more than burst + rate * (e - s) calls, each given `slack` seconds."""
    times = sorted(times)
    for first, start in enumerate(times):
        for last in range(first, len(times)):
            allowed = burst + rate * (times[last] - start + slack)
            assert last - first + 1 <= allowed, f"{last - first + 1} calls within {times[last] - start:.4f} s"
