"""Units: the things (recordings, say) that a gate counts in a stage whose work is done by other runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from ecluse.db.connect import Connection
from ecluse.db.query import fetch_rows
from ecluse.engine.model.flow import Run


@dataclass(frozen=True)
class Counted:
    """The counts of a stage's units. `failed_for_good`: the part of `failed` that a further round would not help."""

    expected: int
    succeeded: int
    failed: int
    failed_for_good: int


CountUnits = Callable[[Connection, Run], Awaitable[Counted]]

OPEN_STAGES = "SELECT run_id, stage FROM stages WHERE run_id = ANY(%s) AND units IS NOT NULL AND ended_at IS NULL"
KEEP = "UPDATE stages SET units = %s, progress = %s, units_failed = %s WHERE run_id = %s AND stage = %s"


async def keep_counts(connection: Connection, count: CountUnits, ending: Sequence[Run]) -> None:
    """Count the units of these runs, which are about to end, and store the counts with their open stages, where pages
    and API read them: nothing counts them after the end. `count` is `Flow.units`. Called in the transaction that ends
    the runs, before their targets are settled."""
    by_id = {run.id: run for run in ending}
    for run_id, stage in await fetch_rows(connection, OPEN_STAGES, (list(by_id),)):
        found = await count(connection, by_id[run_id])
        await connection.execute(KEEP, (found.expected, found.succeeded, found.failed, run_id, stage))
