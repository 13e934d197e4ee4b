"""Pages that flows have of their own for their schedules and runs: the pages of all flows link to them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_rows
from ecluse.engine import Flow
from ecluse.flows.enrichment.rules import FLOW as ENRICHMENT
from ecluse.flows.jobs.flow import FLOW as JOBS
from ecluse.flows.pricing.flow import FLOW as PRICING
from ecluse.web import jobs

# By flow: the addresses of the pages of these schedules of a tenant, by id.
SCHEDULES: Mapping[str, Callable[[Connection, str, Sequence[int]], Awaitable[Mapping[int, str]]]] = {
    JOBS.name: jobs.pages_of_schedules,
}
# By flow: what these runs of a tenant are, and the addresses of the pages about it.
RUNS = {
    PRICING: """
SELECT e.run_id, e.kind || ' ' || e.number || ' of '
       || coalesce(u.name, 'correction of #' || r.corrects_id, 'rule run') || ' #' || r.id, '/ui/pricing/runs/' || r.id
FROM rule_executions e JOIN rule_runs r ON r.id = e.rule_run_id LEFT JOIN pricing_rules u ON u.id = r.rule_id
WHERE r.tenant_id = %s AND e.run_id = ANY(%s)
""",
    ENRICHMENT: """
SELECT run_id, 'company ' || siren, '/ui/requests?siren=' || siren FROM enrichment_jobs
WHERE tenant_id = %s AND run_id = ANY(%s)
""",
}


class Own(NamedTuple):
    """What a run is in the words of its flow, and the address of the page about it."""

    words: str
    href: str


async def of_schedules(connection: Connection, tenant: str, rows: Sequence[Row]) -> dict[int, str]:
    """Return the addresses of the pages that flows have of their own for these schedules, by schedule id."""
    found: dict[int, str] = {}
    for flow, pages in SCHEDULES.items():
        if ids := [row["id"] for row in rows if row["flow"] == flow]:
            found |= await pages(connection, tenant, ids)
    return found


async def of_runs(connection: Connection, tenant: str, rows: Sequence[Row]) -> dict[int, Own]:
    """Return what these runs are in the words of their flows, by run id; runs of which a flow says nothing are left
    out."""
    found: dict[int, Own] = {}
    for flow, statement in RUNS.items():
        if ids := [row["id"] for row in rows if row["flow"] == flow]:
            found |= {run: Own(*own) for run, *own in await fetch_rows(connection, statement, (tenant, ids))}
    return found


def without_runs(flows: Mapping[str, Flow]) -> list[str]:
    """Return the names of the flows whose schedules start no runs."""
    return [name for name, flow in flows.items() if flow.fire is not None]
