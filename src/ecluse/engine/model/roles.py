"""The roles of a process: `api` answers requests, `worker` executes items and leads runs, `scheduler` fires schedules.
By default a process has all of them."""

from __future__ import annotations

from typing import Literal, get_args

Role = Literal["api", "worker", "scheduler"]
ROLES: frozenset[Role] = frozenset(get_args(Role))
RUNS_AT_ONCE = 2_000  # led by one worker, runs that wait at a gate included; further runs stay queued
