"""The story of a violation: the rows and ledger lines of its keys, in time order, shortened to a few lines."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import psycopg

from ecluse.verify.ledger import Ledger, Line
from ecluse.verify.report import About

LINES = 10

RUN = """
SELECT created_at AS at, format('run %%s (%%s) created', id, flow) AS line FROM runs WHERE id = %(run_id)s
UNION ALL
SELECT at, format('log: %%s', left(message, 100)) FROM run_log WHERE run_id = %(run_id)s AND event_id IS NULL
UNION ALL
SELECT started_at, format('stage %%s started: %%s items, budget %%s', stage, expected,
    coalesce(budget::text, 'unknown'))
FROM stages WHERE run_id = %(run_id)s
UNION ALL
SELECT max(coalesce(r.ended_at, now())), format('%%s outcomes: %%s', coalesce(o.outcome, 'open'), count(*))
FROM outcomes o LEFT JOIN runs r ON r.id = o.run_id WHERE o.run_id = %(run_id)s GROUP BY o.outcome
UNION ALL
SELECT ended_at, format('run %%s ended: %%s (%%s), %%s selected = %%s + %%s + %%s', id, status, end_cause, selected,
    successful, failed, ignored) FROM runs WHERE id = %(run_id)s AND ended_at IS NOT NULL
"""

SCHEDULE = """
SELECT created_at AS at, format('schedule %%s (%%s) created: %%s', id, flow, coalesce(cron, 'manual')) AS line
FROM schedules WHERE id = %(schedule_id)s
UNION ALL
SELECT s.decided_at, format('%%s: %%s%%s', s.due_at, s.state, coalesce(' as run ' || s.run_id, ' as ' || s.reference,
    ' (' || s.reason || ')'))
FROM schedule_slots s WHERE s.schedule_id = %(schedule_id)s
UNION ALL
SELECT created_at, format('run %%s: %%s', id, event_key) FROM runs WHERE schedule_id = %(schedule_id)s
"""

TARGET = """
WITH item AS (
    SELECT * FROM items WHERE id = %(item_id)s
    UNION SELECT i.* FROM items i WHERE i.run_id = %(run_id)s AND i.target = %(target)s),
effect AS (
    SELECT * FROM effects WHERE id = %(effect_id)s::uuid
    UNION SELECT * FROM effects WHERE run_id = %(run_id)s AND (item_id = %(item_id)s OR target = %(target)s))
SELECT coalesce(finished_at, due_at) AS at, format(
    'item %%s %%s/%%s round %%s: %%s%%s, %%s executions, %%s crashes, claim %%s', id, stage, key, round, status,
    coalesce(' ' || error_code, ''), executions, crashes, coalesce(claim_id::text, 'none')) AS line FROM item
UNION ALL
SELECT a.at, format('attempt %%s of round %%s: %%s%%s', a.execution, a.round, a.error_code,
    CASE WHEN a.ambiguous THEN ', ambiguous' ELSE '' END) FROM attempts a JOIN item i ON i.id = a.item_id
UNION ALL
SELECT first_send_at, format('effect %%s first sent', id) FROM effect WHERE first_send_at IS NOT NULL
UNION ALL
SELECT coalesce(settled_at, last_send_at, now()), format('effect %%s %%s %%s: %%s after %%s sends, wanted %%s',
    id, class, key, state, sends, left(wanted::text, 100)) FROM effect
UNION ALL
SELECT coalesce(r.ended_at, now()), format('outcome of %%s: %%s%%s', o.target, coalesce(o.outcome, 'open'),
    CASE WHEN o.effect_may_exist THEN ', an effect may exist' ELSE '' END)
FROM outcomes o LEFT JOIN runs r ON r.id = o.run_id WHERE o.run_id = %(run_id)s
  AND (o.target = %(target)s OR o.target IN (SELECT target FROM item))
"""

OUTBOX = """
SELECT occurred_at AS at, format('event %%s %%s: %%s', id, event_key, event_type) AS line
FROM events_outbox WHERE tenant_id || '/' || aggregate = %(aggregate)s
UNION ALL
SELECT published_at, format('event %%s published as %%s', id, published_seq)
FROM events_outbox WHERE tenant_id || '/' || aggregate = %(aggregate)s AND published_at IS NOT NULL
"""

LEASES = """
SELECT acquired_at AS at, format('number %%s acquired by %%s, attempt %%s, until %%s', fence, owner, attempt,
    coalesce(expires_at::text, 'run ' || run_id || ' ends')) AS line
FROM leases WHERE tenant_id || '/' || key = %(lease)s
UNION ALL
SELECT ended_at, format('number %%s %%s', fence, end_cause)
FROM leases WHERE tenant_id || '/' || key = %(lease)s AND ended_at IS NOT NULL
"""

KEYS = """
SELECT id::text AS key, key AS ref FROM effects
WHERE id = %(effect_id)s::uuid OR run_id = %(run_id)s AND (item_id = %(item_id)s OR target = %(target)s)
"""


def explain(connection: psycopg.Connection[dict[str, Any]], about: About, ledger: Ledger | None) -> list[str]:
    """Return the story of a violation as lines in time order; if there are more than LINES, those in the middle are
    left out. `about` has the keys of its rows; without a `ledger` only the tables are read."""
    whole_run = about._replace(aggregate=None, lease=None) == About(run_id=about.run_id)
    which = SCHEDULE if about.schedule_id is not None else RUN if whole_run else TARGET
    rows = [row for what in (which, OUTBOX, LEASES) for row in connection.execute(what, about._asdict())]
    events = [(row["at"], row["line"]) for row in rows]
    if ledger is not None and not whole_run:
        effects = connection.execute(KEYS, about._asdict()).fetchall()
        keys = [about.effect_id, *(row["key"] for row in effects)]
        refs = [about.ref, *(row["ref"] for row in effects)]
        events += [
            (datetime.fromtimestamp(line.at, UTC), _ledger_line(line)) for line in ledger.about(keys, refs, about.seqs)
        ]
    lines = [f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3] + f" {text}" for at, text in sorted(events)]
    if len(lines) <= LINES:
        return lines
    half = LINES // 2
    return [*lines[:half], f"… {len(lines) - 2 * half} more", *lines[-half:]]


def _ledger_line(line: Line) -> str:
    """Return an entry of the ledger as text."""
    who = line.key or line.client or "no key"
    if line.kind == "call":
        return f"ledger {line.seq}: {line.method} {line.path} ({who}) answered {line.status or 'by a reset'}"
    return f"ledger {line.seq}: {line.method} applied ({who}), {line.ref}: {line.before!r} -> {line.value!r}"
