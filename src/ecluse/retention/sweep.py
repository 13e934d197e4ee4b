"""Retention: deletion of old rows, kind by kind, in small batches, on one replica at a time.

A batch is one transaction of about a tenth of a second, followed by a pause of the same length. A sweep stops when the
database is busy or unavailable; a statement that is refused or cancelled ends its kind only. A `Rule` per kind says how
long its rows are kept; the composition root derives the rules from the settings. The table `pruned` records up to which
instant rows were deleted, for the auditor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

import psycopg
import structlog

from ecluse.db.connect import Connection, Pool
from ecluse.db.outage import is_unavailable, one_line
from ecluse.db.query import fetch_column, fetch_now, fetch_value
from ecluse.engine import Flow, Job, KeyedWrite
from ecluse.retention import families
from ecluse.retention.families import Limits
from ecluse.retention.kinds import Aged, Old
from ecluse.retention.pace import Busy, Pace

log = structlog.get_logger(__name__)

EVERY_SECONDS = 300.0
FIRST_SECONDS = 60.0  # after a start: a server that restarts often should do its work first
RUNS_TOGETHER = 200
ROWS_OF_A_RUN = 10  # deleted in the same transaction as the run: stages, slot, events, workflow
# The database is available, but the statement took or waited too long: the next sweep tries fewer rows.
TOO_SLOW = (psycopg.errors.QueryCanceled, psycopg.errors.LockNotAvailable)

LOCK = "SELECT pg_try_advisory_lock(hashtextextended('ecluse retention', 40))"
UNLOCK = "SELECT pg_advisory_unlock(hashtextextended('ecluse retention', 40))"
MARK = """
INSERT INTO pruned AS p (kind, before) VALUES (%s, %s)
ON CONFLICT (kind) DO UPDATE SET before = greatest(p.before, excluded.before)
"""
OF_RUNS = "SELECT count(*) FROM {table} WHERE {column} = ANY(%s)"
ENDED = """
SELECT unnest(ARRAY[min(ended_at), max(ended_at)]) FROM runs WHERE id = ANY(%s) HAVING count(*) > 0
"""


@dataclass(frozen=True)
class OldRuns:
    """A kind of rows: ended runs of these flows, with all rows that belong to them."""

    name: str
    flows: tuple[str, ...]


class Rule(NamedTuple):
    """The time for which rows of a kind are kept; None: for ever. `knob` is the name of the setting, None where the
    time is fixed."""

    kind: Aged | OldRuns
    keep: timedelta | None
    knob: str | None = None


class Pruned(NamedTuple):
    """Rows that a rule deleted, or would delete: their number by table, and the instants of the oldest and the
    newest."""

    rule: Rule
    rows: Counter[str]
    oldest: datetime | None = None
    newest: datetime | None = None
    kept: Mapping[str, int] = {}  # old families of runs that stay, by reason


def job(
    flows: Mapping[str, Flow], rules: Sequence[Rule], *, first: float = FIRST_SECONDS, every: float = EVERY_SECONDS
) -> Job:
    """Return the periodic job that deletes old rows by these rules, on one scheduler at a time: `first` seconds after
    the start of the process, and again `every` seconds after the end of each sweep."""
    pace = Pace()  # shared by all sweeps: a batch size that was too large is not tried again

    async def run(pool: Pool) -> None:
        async with pool.connection() as connection, alone(connection) as mine:
            if mine:
                await _sweep(connection, flows, rules, pace)

    return Job("retention", every, run, first=first, roles=frozenset({"scheduler"}))


async def _sweep(connection: Connection, flows: Mapping[str, Flow], rules: Sequence[Rule], pace: Pace) -> None:
    try:
        done = await prune(connection, flows, rules, pace=pace)
    except Busy as error:
        log.warning("retention: stopped until the next sweep, the database is busy", error=str(error))
        return
    if rows := {one.rule.kind.name: one.rows.total() for one in done if one.rows.total()}:
        log.info("retention: old rows deleted", **rows)


@asynccontextmanager
async def alone(connection: Connection) -> AsyncIterator[bool]:
    """Try to take the lock that lets only one session prune; yield whether this session has it. A session lock ends
    with the connection at the latest."""
    mine: bool = await fetch_value(connection, LOCK)
    try:
        yield mine
    finally:
        if mine and not connection.closed:
            await connection.execute(UNLOCK)


async def prune(
    connection: Connection, flows: Mapping[str, Flow], rules: Sequence[Rule], *, pace: Pace | None = None
) -> list[Pruned]:
    """Delete all rows that are old enough by these rules; return what was deleted, by rule. If the database refuses to
    delete a kind of rows, this is logged, the result lacks that rule, and the other kinds are deleted. The caller holds
    the lock (`alone`). Raise Busy if a batch takes too long, psycopg.Error if the database is unavailable."""
    pace = pace or Pace()
    now = await fetch_now(connection)
    tables = own_tables(flows)
    with _apart("rows of deleted runs", pace):
        await _finish(connection, tables, pace)
    done = []
    for rule in rules:
        if rule.keep is None:
            continue
        with _apart(rule.kind.name, pace):
            await connection.execute(MARK, (rule.kind.name, now - rule.keep))
            if isinstance(rule.kind, Aged):
                rows = await _prune_aged(connection, rule.kind, now - rule.keep, pace)
            else:
                rows = await _prune_runs(connection, rule.kind, limits(flows, rules, now), tables, pace)
            done.append(Pruned(rule, rows))
    return done


@contextmanager
def _apart(kind: str, pace: Pace) -> Iterator[None]:
    """Confine an error to one kind of rows: a statement that the database refuses, or cancels because it takes too
    long, is logged and ends this kind only. If the database is unavailable, the error is raised."""
    try:
        yield
    except psycopg.Error as error:
        if isinstance(error, TOO_SLOW):
            pace.slower()
        elif is_unavailable(error):
            raise
        log.error("retention: rows of this kind cannot be deleted", kind=kind, error=one_line(error))


def limits(flows: Mapping[str, Flow], rules: Iterable[Rule], now: datetime) -> Limits:
    """Return, per flow, the instant before which a run must have ended to be deleted, by these rules at the instant
    `now`. Runs whose writes a vendor recognises by key are kept at least as long as the vendor remembers the key: the
    event key of a deleted run can be used again, and a new run under it would send the same keys."""
    before = {}
    for kind, keep, _ in rules:
        if isinstance(kind, Aged) or keep is None:
            continue
        for name in kind.flows:
            works = [stage.work for stage in flows[name].stages]
            remembered = [work.remembered for work in works if isinstance(work, KeyedWrite)]
            before[name] = now - max([keep, *remembered])
    return Limits(before)


def own_tables(flows: Mapping[str, Flow]) -> list[str]:
    """Return the flows' own tables that have rows of runs."""
    return sorted({table for flow in flows.values() for table in flow.tables})


async def _prune_aged(connection: Connection, kind: Aged, before: datetime, pace: Pace) -> Counter[str]:
    rows: Counter[str] = Counter()
    more, last = True, None
    while more:
        async with pace.batch() as limit:
            deleted, more, last = await kind.delete(connection, before, last, limit)
        rows[kind.table] += deleted
    return rows


async def _prune_runs(
    connection: Connection, kind: OldRuns, limits: Limits, tables: Sequence[str], pace: Pace
) -> Counter[str]:
    rows: Counter[str] = Counter()
    async for found in families.families(connection, kind.flows, limits):
        going = {run for family in found if family.kept is None for run in family.runs}
        rows += await delete_in_batches(connection, going, limits, tables, pace)
    return rows


async def delete_in_batches(
    connection: Connection,
    runs: Collection[int],
    limits: Limits,
    tables: Sequence[str],
    pace: Pace,
    *,
    needed_too: bool = False,
) -> Counter[str]:
    """Delete the runs among `runs` that may be deleted, with all their rows, in batches; return the number of deleted
    rows by table. The youngest runs go first: children before their parents. `limits`: how old a run must be; `tables`:
    the flows' own tables with rows of runs; `needed_too`: delete every run that has ended, whatever its age and
    whatever still needs it."""
    rows: Counter[str] = Counter()
    latest_first, place = sorted(runs, reverse=True), 0
    while place < len(latest_first):
        async with pace.batch() as limit:
            some = latest_first[place : place + max(1, min(RUNS_TOGETHER, limit // ROWS_OF_A_RUN))]
            place += len(some)
            gone, counted = await families.delete_runs(connection, some, limits, needed_too=needed_too)
        rows += counted
        rows += await _delete_left_behind(connection, gone, tables, pace)
    return rows


async def _finish(connection: Connection, tables: Sequence[str], pace: Pace) -> None:
    """Delete the rows of deleted runs that a crashed sweep left behind."""
    while runs := await families.noted(connection, RUNS_TOGETHER):
        await _delete_left_behind(connection, runs, tables, pace)


async def _delete_left_behind(
    connection: Connection, runs: Sequence[int], tables: Sequence[str], pace: Pace
) -> Counter[str]:
    """Delete the rows of these deleted runs from all tables, in batches; return the number of rows by table."""
    rows: Counter[str] = Counter()
    if not runs:
        return rows
    for table, column in families.left_behind(tables):
        more = True
        while more:
            async with pace.batch() as limit:
                deleted = await families.delete_left_behind(connection, runs, table, column, limit)
            rows[table] += deleted
            more = deleted == limit
    await families.done(connection, runs)
    return rows


async def foresee(connection: Connection, flows: Mapping[str, Flow], rules: Sequence[Rule]) -> list[Pruned]:
    """Count the rows that `prune` would delete by these rules, without deleting any; return one result per rule."""
    now = await fetch_now(connection)
    found = []
    for rule in rules:
        if rule.keep is None:
            found.append(Pruned(rule, Counter()))
        elif isinstance(rule.kind, Aged):
            old: Old = await rule.kind.count(connection, now - rule.keep)
            found.append(Pruned(rule, Counter({rule.kind.table: old.rows}), old.oldest, old.newest))
        else:
            found.append(await _foresee_runs(connection, rule, limits(flows, rules, now), own_tables(flows)))
    return found


async def _foresee_runs(connection: Connection, rule: Rule, limits: Limits, tables: Sequence[str]) -> Pruned:
    """Count the runs, with their rows, that a rule for runs would delete, and the families that it keeps, by reason."""
    assert isinstance(rule.kind, OldRuns)  # noqa: S101 - the caller has checked it
    going: set[int] = set()
    kept: Counter[str] = Counter()
    async for found in families.families(connection, rule.kind.flows, limits):
        going |= {run for family in found if family.kept is None for run in family.runs}
        kept.update(family.kept for family in found if family.kept is not None)
    rows: Counter[str] = Counter()
    ended: list[datetime] = []
    every = sorted(going)
    for start in range(0, len(every), 10 * RUNS_TOGETHER):
        some = every[start : start + 10 * RUNS_TOGETHER]
        for table, column in [("runs", "id"), ("stages", "run_id"), *families.left_behind(tables)[:-1]]:
            rows[table] += await fetch_value(connection, OF_RUNS.format(table=table, column=column), (some,))
        ended += await fetch_column(connection, ENDED, (some,))
    return Pruned(rule, rows, min(ended, default=None), max(ended, default=None), kept)
