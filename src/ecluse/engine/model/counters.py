"""Metrics of this process since its start: counters that are incremented per call, poll, batch or failure."""

from __future__ import annotations

from collections import Counter, defaultdict

runs_ended: Counter[tuple[str, str]] = Counter()  # flow, state
items_finished: Counter[tuple[str, str, str]] = Counter()  # flow, stage, status
vendor_errors: Counter[tuple[str, str, str]] = Counter()  # flow, stage, code
calls: Counter[tuple[str, str]] = Counter()  # flow, stage
call_seconds: defaultdict[tuple[str, str], float] = defaultdict(float)  # sum over those calls
fires: Counter[tuple[str, str]] = Counter()  # flow, result
fire_lag_seconds: defaultdict[tuple[str], float] = defaultdict(float)  # flow; sum over those that were fired
gate_looks: Counter[tuple[str, str]] = Counter()  # flow, stage
spent: defaultdict[tuple[str, str], float] = defaultdict(float)  # vendor, model; the accounts are in `paid_calls`


def add_call(flow: str, stage: str, seconds: float) -> None:
    """Count a call of this stage, and add its duration."""
    calls[flow, stage] += 1
    call_seconds[flow, stage] += seconds
