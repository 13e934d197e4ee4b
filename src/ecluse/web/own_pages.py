"""Pages that flows have of their own for their schedules: the pages of all flows link to them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from ecluse.db.connect import Connection
from ecluse.db.query import Row
from ecluse.engine import Flow
from ecluse.flows.jobs.flow import FLOW as JOBS
from ecluse.web import jobs

# By flow: the addresses of the pages of these schedules of a tenant, by id.
SCHEDULES: Mapping[str, Callable[[Connection, str, Sequence[int]], Awaitable[Mapping[int, str]]]] = {
    JOBS.name: jobs.pages_of_schedules,
}


async def of_schedules(connection: Connection, tenant: str, rows: Sequence[Row]) -> dict[int, str]:
    """Return the addresses of the pages that flows have of their own for these schedules, by schedule id."""
    found: dict[int, str] = {}
    for flow, pages in SCHEDULES.items():
        if ids := [row["id"] for row in rows if row["flow"] == flow]:
            found |= await pages(connection, tenant, ids)
    return found


def without_runs(flows: Mapping[str, Flow]) -> list[str]:
    """Return the names of the flows whose schedules start no runs."""
    return [name for name, flow in flows.items() if flow.fire is not None]
