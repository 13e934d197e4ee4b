"""`ecluse prune`: delete, or count, rows that are older than the retention knobs allow."""

from __future__ import annotations

import asyncio
import getpass
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from ecluse import bootstrap, settings
from ecluse.access import audit_trail
from ecluse.base import logging
from ecluse.cli.failure import BAD, OK
from ecluse.cli.show import say, write, write_json
from ecluse.db.connect import Connection, open_session
from ecluse.retention import sweep
from ecluse.retention.pace import Busy
from ecluse.retention.sweep import Pruned, Rule

EVERYWHERE = "system"  # retention belongs to no tenant
EVERY_SECONDS = 2.0


def run(extra: Sequence[str], *, dry_run: bool, as_json: bool) -> int:
    logging.configure("WARNING")
    given = settings.load()
    flows = bootstrap.load_flows(given, extra)
    by_name, rules = {one.name: one for one in flows}, bootstrap.retention_rules(given, flows)

    async def ask(connection: Connection) -> list[Pruned] | None:
        if dry_run:
            return await sweep.foresee(connection, by_name, rules)
        async with sweep.alone(connection) as mine:
            if not mine:
                return None
            done = await sweep.prune(connection, by_name, rules, report=Progress())
            total = sum(one.rows.total() for one in done)
            subject = ", ".join(f"{one.rule.kind.name} {one.rows.total()}" for one in done if one.rows.total())
            if total:
                by = f"cli:{getpass.getuser()}"
                await audit_trail.record(connection, EVERYWHERE, by, "retention.prune", subject)
            return done

    database = bootstrap.open_database(given)

    async def opened() -> list[Pruned] | None:
        async with await open_session(database.dsn) as connection:
            return await ask(connection)

    try:
        done = asyncio.run(opened())
    except Busy as error:
        say(f"pruning stopped because the database is busy: {error}; servers continue it, or run it again later")
        return BAD
    finally:
        database.release()
    if done is None:
        say("another process is pruning: nothing was done")
        return BAD
    if as_json:
        write_json({"dry_run": dry_run, "kinds": [_row(one) for one in done]})
    else:
        _show(done, rules, dry_run=dry_run)
    return OK


class Progress:
    """Callback that prints, every few seconds, how many rows of a kind have been deleted so far."""

    def __init__(self) -> None:
        self._rows: Counter[str] = Counter()
        self._said_at = time.monotonic()

    def __call__(self, kind: str, rows: int) -> None:
        self._rows[kind] += rows
        if rows and time.monotonic() - self._said_at > EVERY_SECONDS:
            self._said_at = time.monotonic()
            say(f"{kind}: {self._rows[kind]:,} rows deleted …")


def _show(done: Sequence[Pruned], rules: Sequence[Rule], *, dry_run: bool) -> None:
    word = "would be deleted" if dry_run else "deleted"
    write(f"{'kind':<17} {'knob':<31} {'kept':>9} {'rows ' + word:>22}  {'oldest':<17} newest")
    by_kind = {one.rule.kind.name: one for one in done}
    for rule in rules:
        one = by_kind.get(rule.kind.name)
        kept = "for ever" if rule.keep is None else f"{rule.keep.days} days"
        rows = "-" if rule.keep is None else "refused" if one is None else f"{one.rows.total():,}"
        oldest, newest = (_at(one.oldest), _at(one.newest)) if one else ("", "")
        write(f"{rule.kind.name:<17} {rule.knob or '(fixed)':<31} {kept:>9} {rows:>22}  {oldest:<17} {newest}".rstrip())
    for one in done:
        tables = ", ".join(f"{rows:,} {table}" for table, rows in one.rows.most_common() if rows)
        if len(one.rows) > 1 and tables:
            write(f"{one.rule.kind.name}: {tables}")
        for reason, families in sorted(one.kept.items()):
            write(f"{one.rule.kind.name}: {families:,} old families are kept: {reason}")


def _at(instant: datetime | None) -> str:
    return "" if instant is None else f"{instant:%Y-%m-%d %H:%M}"


def _row(one: Pruned) -> dict[str, Any]:
    return {
        "kind": one.rule.kind.name,
        "knob": one.rule.knob,
        "days": None if one.rule.keep is None else one.rule.keep.days,
        "rows": one.rows.total(),
        "tables": {table: rows for table, rows in one.rows.items() if rows},
        "oldest": None if one.oldest is None else one.oldest.isoformat(),
        "newest": None if one.newest is None else one.newest.isoformat(),
        "kept": dict(one.kept),
    }
