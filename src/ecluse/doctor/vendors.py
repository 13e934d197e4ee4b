"""Checks on vendors in the database: connections that are missing, keys that are refused, budgets that hold back items
or do not count all calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from ecluse.base.text import count_of
from ecluse.db.connect import Connection
from ecluse.doctor.findings import Finding, rows_of

# The kinds that the runs of an automation schedule need; the tenant default has those of the environment.
UNCONNECTED = """
SELECT s.tenant_id, count(DISTINCT s.id)::int AS schedules, array_agg(DISTINCT k.kind ORDER BY k.kind) AS kinds
FROM schedules s JOIN automation_settings a ON a.id = s.id
CROSS JOIN LATERAL (VALUES ('crm', true), ('speech', a.run_transcription OR a.run_audits), ('llm', a.run_audits))
    AS k(kind, needed)
LEFT JOIN connections c ON c.tenant_id = s.tenant_id AND c.kind = k.kind
WHERE s.tenant_id <> 'default' AND s.enabled AND s.deleted_at IS NULL AND k.needed AND c.kind IS NULL
GROUP BY 1 ORDER BY 1
"""


async def _unconnected(connection: Connection) -> AsyncIterator[Finding]:
    rows = await rows_of(connection, UNCONNECTED)
    for row in rows:
        schedules = count_of(row.schedules, "schedule")
        says = f"tenant {row.tenant_id} has no connection {', '.join(row.kinds)}: runs of {schedules} fail"
        do = f"`ecluse --tenant {row.tenant_id} connections create KIND --base-url URL --api-key-file FILE`"
        yield Finding("warn", "vendors", says, do)
    if not rows:
        yield Finding("ok", "vendors", "each tenant with schedules has the connections that they need")


# Of the latest attempts and claims only: the tables may be large, and have no index by time.
REFUSED = """
WITH refused AS (
    SELECT i.lane_id, count(*)::int AS calls, max(a.at) AS last, (array_agg(a.error ORDER BY a.id DESC))[1] AS error
    FROM attempts a JOIN items i ON i.id = a.item_id
    WHERE a.id > (SELECT max(id) - 10000 FROM attempts) AND a.at > ecluse_now() - interval '1 hour'
      AND a.error_code IN ('UNAUTHORIZED', 'FORBIDDEN') GROUP BY 1)
SELECT l.name, r.calls, r.last, r.error FROM refused r JOIN lanes l ON l.id = r.lane_id
WHERE NOT EXISTS (SELECT 1 FROM claims c WHERE c.id > (SELECT max(id) - 10000 FROM claims) AND c.lane_id = l.id
                    AND c.succeeded > 0 AND c.taken_at > r.last)
ORDER BY 1
"""


async def _refused(connection: Connection) -> AsyncIterator[Finding]:
    """Yield a warning for each lane whose key the vendor has refused in the last hour, without a success since."""
    for row in await rows_of(connection, REFUSED):
        calls = count_of(row.calls, "call")
        says = f"{row.name}: key refused, {calls} in the last hour, last at {row.last:%H:%M:%S%z}: {row.error}"
        do = (
            "give a valid key (`ecluse connections update KIND --api-key-file FILE`, or the server's variable), redrive"
        )
        yield Finding("warn", "vendors", says, do)


HELD = """
SELECT tenant_id, count(*)::int AS items, min(postponed_why) AS why FROM items
WHERE lane_id IN (SELECT id FROM lanes) AND claim_id IS NULL AND postponed_cause = 'budget' GROUP BY 1 ORDER BY 1
"""


async def _held(connection: Connection) -> AsyncIterator[Finding]:
    for row in await rows_of(connection, HELD):
        of = f"of tenant {row.tenant_id}"
        says = f"{count_of(row.items, f'item {of} waits', f'items {of} wait')} for a budget: {row.why}"
        yield Finding("warn", "budgets", says, "raise it with `ecluse budgets set`, or wait for its next period")


# By model: whether a price is set for it is asked of the settings, which may have changed since.
UNPRICED = """
SELECT vendor, model, count(*)::int AS calls FROM paid_calls
WHERE NOT priced AND at > ecluse_now() - interval '31 days' AND tenant_id IN (SELECT tenant_id FROM budgets)
GROUP BY 1, 2 ORDER BY 1, 2
"""


async def budgets(has_price: Callable[[str, str], bool], connection: Connection) -> AsyncIterator[Finding]:
    """Yield a warning if budgets count calls of the last 31 days as 0 because their model has no price, else the number
    of budgets."""
    ((count,),) = await rows_of(connection, "SELECT count(*) FROM budgets")
    if rows := [row for row in await rows_of(connection, UNPRICED) if not has_price(row.vendor, row.model)]:
        models = ", ".join(f"{row.vendor} {row.model}" for row in rows)
        calls = sum(row.calls for row in rows)
        says = f"{calls} paid calls of the last 31 days count as 0 in budgets: no price for {models}"
        yield Finding("warn", "budgets", says, "set LLM_PRICES and ELEVENLABS_PRICES, and restart the servers")
    elif count:
        yield Finding("ok", "budgets", f"{count} set")


PARTS = (_unconnected, _refused, _held)
