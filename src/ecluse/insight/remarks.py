"""Remarks to the explanation why a run waits: the time limit of its open stage, and targets that are known to fail."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from ecluse.base.text import count_of
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_row, fetch_value
from ecluse.insight.causes import instant
from ecluse.insight.waiting import RunWaits

LIMIT = """
SELECT stage, deadline_at, clock_stopped(run_id, stage) FROM stages WHERE run_id = %s AND ended_at IS NULL
ORDER BY started_at DESC, stage LIMIT 1
"""
WILL_FAIL = "SELECT count(*) FROM expected_failures WHERE run_id = %s"


class Remarks(NamedTuple):
    """`deadline_at`: the time limit of the open stage; None: no stage is open."""

    deadline_at: datetime | None = None
    remark: str | None = None


async def remarks(connection: Connection, run_id: int, waits: RunWaits) -> Remarks:
    """Return the remarks to what a run waits for: whether waiting items start before the time limit of its stage, and
    why its stages count more waiting items than the explanation does. The caller has checked the tenant."""
    if waits.progress_at is None:
        return Remarks()
    said = []
    stage, deadline_at, stopped = await fetch_row(connection, LIMIT, (run_id,)) or (None, None, False)
    if stopped:
        said.append(f"the clock of stage {stage} is stopped")
    elif deadline_at is not None:
        ends = [at for group in waits.groups for at in (group.first_at, group.last_at) if at is not None]
        late = any(at > deadline_at for at in ends)
        said.append(
            f"stage {stage} has until {instant(deadline_at)}" + (": what starts later fails then" if late else "")
        )
    if count := await fetch_value(connection, WILL_FAIL, (run_id,)):
        known = f"{count_of(count, 'target is', 'targets are')} known to fail"
        them = "it" if count == 1 else "them"
        said.append(f"{known}: a stage may count {them} as waiting until it ends, the causes do not")
    return Remarks(deadline_at, "; ".join(said) or None)
