"""History of companies and registers: jobs, snapshots, and the figures of each register. Companies are shared by all
tenants: of another tenant's job, neither the tenant nor the run is shown."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

from ecluse.db.connect import Connection
from ecluse.db.query import Row, fetch_all
from ecluse.flows.enrichment import card
from ecluse.vendors.registers import Source

JOBS = """
SELECT CASE WHEN j.tenant_id = %(tenant)s THEN j.run_id END AS run_id, j.status, j.trigger, j.attempt,
       j.enrichment_error, j.created_at, j.started_at, j.ended_at
FROM enrichment_jobs j WHERE j.siren = %(siren)s ORDER BY j.run_id DESC LIMIT %(most)s
"""
SNAPSHOTS = """
SELECT enrichment_status AS status, sources, created_at FROM company_snapshots
WHERE siren = %s ORDER BY id DESC LIMIT %s
"""
SOURCES = """
SELECT source_api, count(*)::int AS answers, coalesce(sum(executions), 0)::int AS calls, max(ended_at) AS last_at,
       percentile_cont(0.5) WITHIN GROUP (ORDER BY extract(epoch FROM ended_at - started_at) * 1000)::int AS median_ms,
       max(ended_at) FILTER (WHERE error_code IS NULL) AS good_at
FROM enrichment_sources WHERE ended_at > ecluse_now() - interval '24 hours' GROUP BY 1
"""
ERRORS = """
SELECT source_api, error_code, count(*)::int AS n FROM enrichment_sources
WHERE ended_at > ecluse_now() - interval '24 hours' AND error_code IS NOT NULL GROUP BY 1, 2 ORDER BY 3 DESC, 2
"""
NONE: Row = {"answers": 0, "calls": 0, "last_at": None, "median_ms": None, "good_at": None}


async def jobs(connection: Connection, siren: str, tenant: str, most: int) -> list[Row]:
    """Return the last `most` jobs of a company, the newest first; `run_id` is None for jobs of other tenants."""
    return await fetch_all(connection, dict, JOBS, {"siren": siren, "tenant": tenant, "most": most})


async def snapshots(connection: Connection, siren: str, seen: Collection[Source], most: int) -> list[Row]:
    """Return the last `most` snapshots of a company, the newest first, each with the number of fields, and the names of
    those that differ from the snapshot before (None: it is the first). Only fields from the sources in `seen` count."""
    rows = await fetch_all(connection, dict, SNAPSHOTS, (siren, most + 1))
    cards = [{name: one["value"] for name, one in card.card(row.pop("sources"), seen).items()} for row in rows]
    for row, one in zip(rows, cards, strict=True):
        row |= {"fields": len(one), "changed": None}
    for row, (after, before) in zip(rows, pairwise(cards), strict=False):
        row["changed"] = [name for name in card.FIELDS if after.get(name) != before.get(name)]
    return rows[:most]


async def sources(connection: Connection) -> dict[str, Row]:
    """Return the figures of each register over the last day, of all tenants together: results, calls with their
    retries, median duration, and errors by code."""
    found = {row["source_api"]: row for row in await fetch_all(connection, dict, SOURCES)}
    figures = {str(source): {**NONE, **found.get(source, {}), "errors": {}} for source in Source}
    for row in await fetch_all(connection, dict, ERRORS):
        figures[row["source_api"]]["errors"][row["error_code"]] = row["n"]
    return figures
