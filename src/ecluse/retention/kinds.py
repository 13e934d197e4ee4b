"""Kinds of rows that retention deletes by their age: the table, the instant that the age counts from, and the index
that finds the rows."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal, NamedTuple

from ecluse.db.connect import Connection
from ecluse.db.query import fetch_rows

# Reads a page in index order and deletes its old rows. Rows that must stay are skipped, and not read again.
DELETE = """
WITH page AS MATERIALIZED (
    SELECT t.ctid AS place, t.{order} AS number, {at} < %(before)s AS old, {since} < %(before)s AS early FROM {table} t
    WHERE {where} AND t.{order} > %(after)s::{type} ORDER BY t.{order} LIMIT %(limit)s),
gone AS (
    DELETE FROM {table} t WHERE t.ctid = ANY(ARRAY(SELECT place FROM page WHERE old)) AND {also} RETURNING 1)
SELECT (SELECT count(*) FROM gone), count(*) = %(limit)s AND bool_or(early), max(number)::text FROM page
"""
COUNT = "SELECT count(*), min({at}), max({at}) FROM {table} t WHERE {where} AND {at} < %(before)s AND {also}"
FIRST = {"bigint": "-1", "timestamptz": "-infinity"}


class Page(NamedTuple):
    """The result of one deletion statement: the number of rows deleted; `more`: further old rows may follow, after the
    place `last`."""

    deleted: int
    more: bool
    last: str | None


class Old(NamedTuple):
    """The number of rows of a kind that are old enough to be deleted, and the instants of the oldest and the newest of
    them."""

    rows: int
    oldest: datetime | None
    newest: datetime | None


@dataclass(frozen=True)
class Aged:
    """A kind of rows that are deleted by their age. `at` is the SQL expression of the instant that the age of a row `t`
    counts from, `order` an indexed column that grows with it, `where` the predicate of that index, `also` a further
    condition that an old row must meet to be deleted. If `order` does not grow with `at`, it grows with `began`, which
    is never later than `at`; the search ends at the first page in which no row began early enough. `statement` replaces
    DELETE and has the same parameters and result columns."""

    name: str
    table: str
    at: str
    order: str = "id"
    type: Literal["bigint", "timestamptz"] = "bigint"
    where: str = "true"
    also: str = "true"
    began: str = ""
    statement: str = ""

    async def delete(self, connection: Connection, before: datetime, after: str | None, limit: int) -> Page:
        """Read one page, the next `limit` rows after the place `after` (None: the first rows), and delete the rows in
        it that are older than `before` and may be deleted."""
        given = {"before": before, "after": after or FIRST[self.type], "limit": limit}
        ((deleted, more, last),) = await fetch_rows(connection, self._sql(self.statement or DELETE), given)
        return Page(deleted, bool(more), last)

    async def count(self, connection: Connection, before: datetime) -> Old:
        """Count the rows that are older than `before` and may be deleted."""
        (row,) = await fetch_rows(connection, self._sql(COUNT), {"before": before})
        return Old(*row)

    def _sql(self, text: str) -> str:
        names = ("table", "at", "order", "type", "where", "also")
        return text.format(**{name: getattr(self, name) for name in names}, since=self.began or self.at)


EVENTS = Aged("events", "events_outbox", "t.published_at", order="published_seq", where="t.published_seq IS NOT NULL")
LOGS = Aged("logs", "workflow_logs", "t.created_at")
ATTEMPTS = Aged(
    "attempts",
    "attempts",
    "t.at",
    also="NOT EXISTS (SELECT 1 FROM runs r WHERE r.id = t.run_id AND r.ended_at IS NULL)",
)
# A slot with a run is deleted with it.
SLOTS = Aged(
    "slots",
    "schedule_slots",
    "t.decided_at",
    order="decided_at",
    type="timestamptz",
    where="t.run_id IS NULL AND t.state <> 'waiting'",
)
# Whole months are deleted, with the totals that began in them: every total that is kept has all its calls.
SPEND = Aged(
    "costs of paid calls",
    "paid_calls",
    "((date_trunc('month', t.day::timestamp) + interval '1 month') AT TIME ZONE 'UTC')",
    order="at",
    type="timestamptz",
    began="t.at",
    statement="""
WITH page AS MATERIALIZED (
    SELECT t.ctid AS place, t.{order} AS number, {at} < %(before)s AS old, {since} < %(before)s AS early FROM {table} t
    WHERE t.{order} > %(after)s::{type} ORDER BY t.{order} LIMIT %(limit)s),
totals AS (
    DELETE FROM spend_totals t WHERE t.starts_on < date_trunc('month', %(before)s AT TIME ZONE 'UTC')::date),
gone AS (DELETE FROM paid_calls t WHERE t.ctid = ANY(ARRAY(SELECT place FROM page WHERE old)) RETURNING 1)
SELECT (SELECT count(*) FROM gone), count(*) = %(limit)s AND bool_or(early), max(number)::text FROM page
""",
)
# The next number of a key follows its last row, or, where that was deleted, the highest number ever deleted.
LEASES = Aged(
    "leases",
    "leases",
    "t.ended_at",
    order="ended_at",
    type="timestamptz",
    where="t.ended_at IS NOT NULL",
    statement="""
WITH page AS MATERIALIZED (
    SELECT t.ctid AS place, t.fence, t.ended_at AS number, t.ended_at < %(before)s AS old FROM leases t
    WHERE t.ended_at IS NOT NULL AND t.ended_at > %(after)s::timestamptz ORDER BY t.ended_at LIMIT %(limit)s),
numbered AS (
    UPDATE pruned SET highest = greatest(highest, (SELECT max(fence) FROM page WHERE old)) WHERE kind = 'leases'),
gone AS (DELETE FROM leases t WHERE t.ctid = ANY(ARRAY(SELECT place FROM page WHERE old)) RETURNING 1)
SELECT (SELECT count(*) FROM gone), count(*) = %(limit)s AND bool_or(old), max(number)::text FROM page
""",
)
