"""The cost of paid calls: reserved before a call, settled in the commit that stores its result. Every statement that
changes `paid_calls` also changes the totals that budgets are compared with.

A call is identified by its item and its claim: if an item is taken over, its next call is paid for under another claim,
and the first call stays a row of its own, `unknown` unless its result arrives after all."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import date
from decimal import Decimal
from typing import Any, NamedTuple

import structlog

from ecluse.db.connect import Connection, Pool
from ecluse.db.query import as_json, fetch_rows
from ecluse.engine.model import counters
from ecluse.engine.model.budget import Charge, Exceeded, Settlement, Total, TotalKey, admit, totals_of
from ecluse.engine.model.item import ClaimedItem, ClaimKey

log = structlog.get_logger(__name__)
_warned: set[tuple[str, str]] = set()

MOST_POSTPONED = 10_000  # items per statement

# A redrive is a child of the run it repeats, but a decision of its own.
ROOTS = """
WITH RECURSIVE up AS (
    SELECT id AS run_id, id, parent_run_id, redrive_of, schedule_id, created_at, 0 AS depth
    FROM runs WHERE id = ANY(%s)
    UNION ALL
    SELECT u.run_id, p.id, p.parent_run_id, p.redrive_of, p.schedule_id, p.created_at, u.depth + 1
    FROM up u JOIN runs p ON p.id = u.parent_run_id WHERE u.redrive_of IS NULL)
SELECT DISTINCT ON (run_id) run_id, id, schedule_id, (created_at AT TIME ZONE 'UTC')::date, ecluse_now()
FROM up ORDER BY run_id, depth DESC
"""
KEYS = """unnest(%s::text[], %s::text[], %s::bigint[], %s::text[], %s::date[])
    AS k(tenant_id, scope, subject_id, period, starts_on)"""
KEY = "tenant_id, scope, subject_id, period, starts_on"
OPEN = f"INSERT INTO spend_totals ({KEY}) SELECT * FROM {KEYS} ORDER BY {KEY} ON CONFLICT DO NOTHING"  # noqa: S608
# In the order of the key, like every statement that locks totals: two transactions must not deadlock.
LOCK = f"""
SELECT {KEY}, t.spent, t.reserved FROM spend_totals t JOIN {KEYS} USING ({KEY}) ORDER BY {KEY} FOR UPDATE OF t
"""  # noqa: S608 - our own names
# A statement of its own: a budget that was changed while this transaction waited for the locks counts.
BUDGETS = f"""
SELECT {KEY}, amount FROM budgets JOIN {KEYS} USING (tenant_id, scope, subject_id, period)
"""  # noqa: S608 - our own names
# Of totals whose budgets have no room, the part that is the cost of calls which may have been made.
UNKNOWN = f"""
SELECT {KEY}, spend_unknown(tenant_id, scope, subject_id, period, starts_on) FROM {KEYS}
"""  # noqa: S608 - our own names
OF_TOTAL = " AND ".join(f"t.{name} = m.{name}" for name in KEY.split(", "))
USED_UP = f"""
UPDATE spend_totals t SET used_up = true FROM (SELECT * FROM {KEYS}) m WHERE {OF_TOTAL}
"""  # noqa: S608 - our own names

AWAITED = f"""
UPDATE spend_totals t SET awaited = m.most
FROM unnest(%s::text[], %s::text[], %s::bigint[], %s::text[], %s::date[], %s::numeric[]) AS m({KEY}, most)
WHERE {OF_TOTAL} AND (t.awaited IS NULL OR m.most < t.awaited)
"""  # noqa: S608 - our own names

# The totals that a row `c` of paid_calls counts in, as `totals_of` names them.
SHARES = """CROSS JOIN LATERAL (VALUES
    ('tenant', 0::bigint, 'day', c.day), ('tenant', 0, 'month', date_trunc('month', c.day::timestamp)::date),
    ('schedule', c.schedule_id, 'day', c.day),
    ('schedule', c.schedule_id, 'month', date_trunc('month', c.day::timestamp)::date),
    ('run', c.root_run_id, 'all', c.root_day)) AS k(scope, subject_id, period, starts_on)"""
RESERVE = f"""
WITH c AS (
    INSERT INTO paid_calls (item_id, claim_id, tenant_id, run_id, root_run_id, root_day, schedule_id, day, vendor,
                            model, priced, reserved, at)
    SELECT item_id, claim_id, tenant_id, run_id, root_run_id, root_day, schedule_id, day, vendor, model, priced,
           reserved, ecluse_now()
    FROM jsonb_to_recordset(%s::jsonb) AS n(item_id bigint, claim_id bigint, tenant_id text, run_id bigint,
        root_run_id bigint, root_day date, schedule_id bigint, day date, vendor text, model text, priced boolean,
        reserved numeric)
    RETURNING *)
UPDATE spend_totals t SET reserved = t.reserved + m.reserved
FROM (SELECT c.tenant_id, k.*, sum(c.reserved) AS reserved FROM c {SHARES} WHERE k.subject_id IS NOT NULL
      GROUP BY {KEY}) m
WHERE {OF_TOTAL}
"""  # noqa: S608 - our own names
# A settled call is final: a commit that is repeated changes nothing. A late result settles an unknown call.
SETTLE = f"""
WITH given AS MATERIALIZED (
    SELECT * FROM jsonb_to_recordset(%s::jsonb) AS g(item_id bigint, claim_id bigint, how text, price numeric)),
c AS MATERIALIZED (
    SELECT p.*, g.how, CASE g.how WHEN 'settled' THEN coalesce(g.price, p.reserved) END AS paid
    FROM paid_calls p JOIN given g ON g.item_id = p.item_id AND g.claim_id = p.claim_id
    WHERE p.state <> 'settled' AND p.state <> g.how ORDER BY p.item_id, p.claim_id FOR UPDATE OF p),
moved AS MATERIALIZED (
    SELECT c.tenant_id, k.*, sum(CASE WHEN c.state = 'reserved' THEN c.reserved ELSE 0 END) AS freed,
           sum(CASE c.how WHEN 'settled' THEN c.paid WHEN 'unknown' THEN c.reserved ELSE 0 END
               - CASE WHEN c.state = 'unknown' THEN c.reserved ELSE 0 END) AS added
    FROM c {SHARES} WHERE k.subject_id IS NOT NULL GROUP BY {KEY}),
locked AS MATERIALIZED (
    SELECT m.* FROM spend_totals t JOIN moved m USING ({KEY}) ORDER BY {KEY} FOR UPDATE OF t),
summed AS (
    UPDATE spend_totals t SET reserved = t.reserved - m.freed, spent = t.spent + m.added FROM locked m
    WHERE {OF_TOTAL}),
gone AS (
    DELETE FROM paid_calls p USING c WHERE p.item_id = c.item_id AND p.claim_id = c.claim_id AND c.how = 'released'),
kept AS (
    UPDATE paid_calls p SET state = c.how, cost = c.paid FROM c
    WHERE p.item_id = c.item_id AND p.claim_id = c.claim_id AND c.how <> 'released')
SELECT vendor, model, sum(paid) FROM c WHERE how = 'settled' GROUP BY vendor, model
"""  # noqa: S608 - our own names
# The claim that reserved it is gone: its worker died, was stopped, or the run ended.
ABANDONED = """
SELECT p.item_id, p.claim_id FROM paid_calls p WHERE p.state = 'reserved' AND NOT EXISTS (
    SELECT 1 FROM items i WHERE i.id = p.item_id AND i.claim_id = p.claim_id AND i.status = 'open')
ORDER BY p.item_id, p.claim_id LIMIT 1000
"""
# The waiting items of the same stage in the scope of the same budget: they need not be claimed one by one to find out.
POSTPONE = """
WITH RECURSIVE tree AS (
    SELECT id FROM runs WHERE {root} AND ended_at IS NULL
    UNION ALL SELECT r.id FROM tree t JOIN runs r ON r.parent_run_id = t.id
    WHERE r.redrive_of IS NULL AND r.ended_at IS NULL),
late AS (
    SELECT i.id FROM items i WHERE {of} AND i.flow = %(flow)s AND i.stage = %(stage)s AND i.claim_id IS NULL
      AND i.status = 'open' AND i.due_at <= ecluse_now() ORDER BY i.id LIMIT %(most)s FOR UPDATE SKIP LOCKED)
UPDATE items i SET due_at = %(until)s, postponed_cause = 'budget', postponed_why = %(why)s
FROM late WHERE i.id = late.id
"""
WITHIN = {
    "tenant": ("false", "i.lane_id = %(lane)s AND i.tenant_id = %(tenant)s"),
    "schedule": ("schedule_id = %(subject)s", "i.run_id IN (SELECT id FROM tree)"),
    "run": ("id = %(subject)s", "i.run_id IN (SELECT id FROM tree)"),
}


class PaidCallRequest(NamedTuple):
    """A paid call that is about to be made for a claimed item, and the most that it may cost."""

    claimed: ClaimedItem
    charge: Charge


class Root(NamedTuple):
    """The run whose budget a call counts against (the run at the top of its tree, or the nearest redrive), its
    schedule, and the day (UTC) on which it was created."""

    run_id: int
    schedule_id: int | None
    created_on: date


async def reserve(connection: Connection, wanted: Sequence[PaidCallRequest]) -> dict[int, Exceeded | None]:
    """Reserve the cost of these calls, in one transaction. Return, by item id, the budgets that have no room for the
    call; None: the cost is reserved. If no other call is expected to fit either, the waiting items of the same stage
    that count against that budget are postponed, too. `wanted` must not be empty."""
    rows = await fetch_rows(connection, ROOTS, (list({one.claimed.item.run_id for one in wanted}),))
    now = rows[0][-1]
    roots = {run_id: Root(*root) for run_id, *root, _ in rows}
    found: dict[int, Exceeded | None] = {}
    granted = []
    keys = [_totals(one, roots[one.claimed.item.run_id], now.date()) for one in wanted]
    async with connection.transaction():
        totals = await lock_totals(connection, {key for several in keys for key in several})
        for one, counted in zip(wanted, keys, strict=True):
            item, most = one.claimed.item, one.charge.most
            if most is None and any(totals[key].budget is not None for key in counted):
                _warn_of_unpriced(one.charge)
            found[item.id] = admit(most or Decimal(0), counted, totals, now)
            if found[item.id] is None:
                granted.append(_row(one, roots[item.run_id], now.date()))
        if granted:
            await connection.execute(RESERVE, (as_json(granted),))
        refused = [one for over in found.values() if over is not None for one in over.refused]
        if used_up := {one.key for one in refused if one.used_up}:
            await connection.execute(USED_UP, _columns(used_up))
        awaited: dict[TotalKey, Decimal] = {}
        for over in refused:
            if over.in_flight:
                awaited[over.key] = min(awaited.get(over.key, over.most), over.most)
        if awaited:
            await connection.execute(AWAITED, _columns((*key, most) for key, most in awaited.items()))
    if not refused:
        return found
    # Now that the totals are not locked any more.
    unknown = {
        TotalKey(*key): cost
        for *key, cost in await fetch_rows(connection, UNKNOWN, _columns({one.key for one in refused}))
    }
    found = {item: over and over._replace(unknown=unknown) for item, over in found.items()}
    await _postpone(connection, wanted, found)
    return found


async def _postpone(
    connection: Connection, wanted: Sequence[PaidCallRequest], found: Mapping[int, Exceeded | None]
) -> None:
    """Postpone the due items that wait in the stages of the refused calls and count against the same budgets, at most
    MOST_POSTPONED per budget and stage. Only for refusals with `others`."""
    refused = {
        (over.key, item.flow, item.stage, one.claimed.item.lane_id): over
        for one in wanted
        if (over := found[(item := one.claimed.item).id]) is not None and over.others
    }
    for (key, flow, stage, lane), over in refused.items():
        root, of = WITHIN[key.scope]
        where = {"tenant": key.tenant_id, "subject": key.subject_id, "flow": flow, "stage": stage, "lane": lane}
        how = {"until": over.until, "why": over.why_others, "most": MOST_POSTPONED}
        await connection.execute(POSTPONE.format(root=root, of=of), {**where, **how})


async def lock_totals(connection: Connection, keys: Collection[TotalKey]) -> dict[TotalKey, Total]:
    """Lock these totals until the end of the caller's transaction, creating those that do not exist; return them with
    their budgets."""
    columns = _columns(keys)
    await connection.execute(OPEN, columns)
    locked = await fetch_rows(connection, LOCK, columns)
    budgets = {TotalKey(*key): amount for *key, amount in await fetch_rows(connection, BUDGETS, columns)}
    return {
        key: Total(spent, reserved, budgets.get(key)) for *named, spent, reserved in locked if (key := TotalKey(*named))
    }


async def settle_costs(connection: Connection, ended: Mapping[ClaimKey, Settlement]) -> None:
    """Store the cost of these calls, or that it is unknown or released, in the caller's transaction. Calls that were
    not reserved, or are settled already, are left out."""
    rows = [
        {"item_id": item, "claim_id": claim, "how": end.how, "price": None if end.cost is None else str(end.cost)}
        for (item, claim), end in ended.items()
    ]
    for vendor, model, cost in await fetch_rows(connection, SETTLE, (as_json(rows),)):
        counters.spent[vendor, model] += float(cost)


async def settle_abandoned(pool: Pool) -> None:
    """Mark reserved calls whose claim is gone as unknown, because they may have been paid for: at most 1000 per call of
    this periodic job."""
    async with pool.connection() as connection:
        if found := await fetch_rows(connection, ABANDONED):
            async with connection.transaction():
                await settle_costs(connection, {(item, claim): Settlement("unknown") for item, claim in found})


def _warn_of_unpriced(charge: Charge) -> None:
    """Log, once per process and model, that the model has no price, so that a budget does not limit its calls."""
    if (model := (charge.vendor, charge.model)) not in _warned:
        _warned.add(model)
        log.warning("budgets: model without a price, its calls count as 0", vendor=charge.vendor, model=charge.model)


def _totals(one: PaidCallRequest, root: Root, today: date) -> list[TotalKey]:
    return totals_of(one.claimed.item.tenant_id, root.schedule_id, root.run_id, root.created_on, today)


def _row(one: PaidCallRequest, root: Root, day: date) -> dict[str, Any]:
    item, charge = one.claimed.item, one.charge
    return {
        "item_id": item.id,
        "claim_id": one.claimed.claim_id,
        "tenant_id": item.tenant_id,
        "run_id": item.run_id,
        "root_run_id": root.run_id,
        "root_day": root.created_on,
        "schedule_id": root.schedule_id,
        "day": day,
        "vendor": charge.vendor,
        "model": charge.model,
        "priced": charge.most is not None,
        "reserved": str(charge.most or 0),
    }


def _columns(rows: Iterable[tuple[Any, ...]]) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)]
