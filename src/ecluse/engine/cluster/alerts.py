"""Evaluation of the alerts that flows declare (`Flow.alerts`). An alert is a row, open until it is cleared; raising and
clearing it writes an event each, which notifications deliver."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from ecluse.db.connect import Connection, Pool
from ecluse.db.query import Row, as_json, fetch_all, fetch_rows, fetch_value
from ecluse.engine.model.alerts import Alert, Measured, decide
from ecluse.engine.model.flow import Flow
from ecluse.engine.outbox.events import Event
from ecluse.engine.outbox.events import write as write_events

LOCK = "SELECT pg_try_advisory_xact_lock(hashtextextended('ecluse alerts of ' || %s, 60))"
OPEN = "SELECT tenant_id, record_id, alert, id FROM alerts WHERE flow = %s AND cleared_at IS NULL"
RAISE = """
INSERT INTO alerts (flow, tenant_id, record_id, measure, alert, severity, summary, action, raised_at)
SELECT %s, t.tenant, t.record, t.measure, t.alert, t.severity, t.summary, t.action, ecluse_now()
FROM jsonb_to_recordset(%s::jsonb)
    AS t(tenant text, record text, measure text, alert text, severity text, summary text, action text)
ON CONFLICT (flow, tenant_id, record_id, measure) WHERE cleared_at IS NULL DO NOTHING RETURNING *
"""
CLEAR = "UPDATE alerts SET cleared_at = ecluse_now() WHERE id = ANY(%s) AND cleared_at IS NULL RETURNING *"


async def evaluate(pool: Pool, flow: Flow) -> None:
    """Raise and clear the alerts of a flow. A periodic job of every worker; one worker at a time does it."""
    async with pool.connection() as connection:
        await evaluate_measures(connection, flow)


async def evaluate_measures(connection: Connection, flow: Flow) -> None:
    """Read the measures of a flow, raise and clear its alerts accordingly, and write their events, in one transaction.
    Do nothing if the flow has no alerts, or while another replica evaluates them."""
    if flow.alerts is None:
        return
    async with connection.transaction():
        if not await fetch_value(connection, LOCK, (flow.name,)):
            return
        measured = await flow.alerts.read(connection)
        before = defaultdict[tuple[str, str], dict[str, int]](dict)
        for tenant, record, alert, number in await fetch_rows(connection, OPEN, (flow.name,)):
            before[tenant, record][alert] = number
        raised, lasting = list[Row](), set[int]()
        for one in measured:
            known = before[one.tenant, one.id]
            for alert in decide(flow.alerts.table, one.values, known):
                if alert.while_open is not None:
                    await alert.while_open(connection, one)
                if alert.name in known:
                    lasting.add(known[alert.name])
                else:
                    raised.append(_row(one, alert))
        over = {number for known in before.values() for number in known.values()} - lasting
        cleared = await fetch_all(connection, dict, CLEAR, (sorted(over),))
        new = await fetch_all(connection, dict, RAISE, (flow.name, as_json(raised)))
        events = [*(_event(row, flow.alerts.noun, "cleared") for row in cleared)]
        events += [_event(row, flow.alerts.noun, "raised") for row in new]
        await write_events(connection, events)


def _row(measured: Measured, alert: Alert) -> Row:
    measure = alert.measure
    summary = measure.summary.format(value=measured.values[measure.name], limit=alert.limit)
    return {
        "tenant": measured.tenant,
        "record": measured.id,
        "measure": measure.name,
        "alert": alert.name,
        "severity": alert.severity,
        "summary": f"{measured.name}: {summary}",
        "action": measure.action,
    }


def _event(row: Mapping[str, Any], noun: str, what: str) -> Event:
    """Return the event about an alert that was `what` (raised or cleared). Its type contains the severity, so that
    endpoints can subscribe to one severity."""
    key = f"{row['flow']}-alert-{row['id']}-{row['raised_at']:%Y%m%dT%H%M%SZ}"
    payload = {
        "alert_id": str(row["id"]),
        f"{noun}_id": row["record_id"],
        "dedup_key": key,
        **{name: row[name] for name in ("alert", "severity", "summary", "action")},
        "raised_at": row["raised_at"].isoformat(),
    }
    name, about = f"{row['flow']}.alert.{row['severity']}.{what}", f"{row['flow']}_{noun}:{row['record_id']}"
    return Event(row["tenant_id"], f"{key}:{what}", name, about, payload, correlation_id=key)
