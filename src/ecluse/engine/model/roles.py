"""What a process does: answers requests; does the work and leads the runs; fires the schedules. Unasked, all of it."""

from __future__ import annotations

from typing import Literal, get_args

Role = Literal["api", "worker", "scheduler"]
ROLES: frozenset[Role] = frozenset(get_args(Role))
