"""One audit: a snapshot of the database first, the ledger after it.

In this order concurrent work does not look like a violation. An effect that is applied in the snapshot had been applied
before, hence is in the ledger that is read later. In the other direction only ledger lines from before the snapshot are
checked: their intents were committed by then. That comparison needs the same clock in database and vendor: one host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import IsolationLevel
from psycopg.rows import dict_row

from ecluse.verify import database, leases, ledger, outbox, rates, stuck
from ecluse.verify.jobs import I_24_JOBS
from ecluse.verify.pricing import I_23_RULE_RUNS
from ecluse.verify.report import Report
from ecluse.verify.retention import runs_before
from ecluse.verify.schedules import I_08_DUE_TIMES
from ecluse.verify.spend import I_22_MONEY
from ecluse.verify.story import explain


class CannotCheck(Exception):
    """The audit was not possible, so the result is neither clean nor broken. The message is for the operator."""


# Freshly filled tables have no statistics: the planner would assume one row and use nested loops over thousands.
SET_UP = "SET LOCAL enable_nestloop = off; SET LOCAL jit = off; SET LOCAL work_mem = '64MB'; SET LOCAL timezone = 'UTC'"
MIGRATE = "Migrate it with `ecluse migrate`"


def audit(dsn: str, ledger_url: str | None, more: Sequence[tuple[str, str, tuple[str, ...]]] = ()) -> Report:
    """Audit the database and, if a URL is given, compare it with the ledger there; return the report. `more`:
    invariants of packages, each a name, a statement that counts the rows checked, and statements that return
    violations. Raise CannotCheck if the database or the ledger cannot be read, or if the schema does not fit."""
    try:
        with psycopg.connect(
            dsn, connect_timeout=5, application_name="ecluse verify", row_factory=dict_row
        ) as connection:
            connection.isolation_level = IsolationLevel.REPEATABLE_READ
            connection.read_only = True
            connection.execute(SET_UP)
            return _look(connection, ledger_url, [database.Check(*one) for one in more])
    except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn, psycopg.errors.InvalidSchemaName) as error:
        missing = error.diag.message_primary
        raise CannotCheck(
            f"the database schema does not fit this version of the program ({missing}). {MIGRATE}."
        ) from error
    except psycopg.OperationalError as error:
        why = " ".join(str(error).split())
        raise CannotCheck(f"the database is unavailable: {why}. Check that it is running, and its address.") from error
    except psycopg.ProgrammingError as error:
        if error.sqlstate is not None:  # for example a missing privilege
            raise CannotCheck(f"the database refused a query: {error.diag.message_primary}.") from error
        # The part that libpq quotes of an unreadable address may be a password.
        raise CannotCheck("not a PostgreSQL address. Give it as postgresql://user@host:5432/database.") from error
    except ledger.Unreadable as error:
        raise CannotCheck(f"{error}. Give the address of a running sandbox, as http://127.0.0.1:8089.") from error


def _look(
    connection: psycopg.Connection[dict[str, Any]], ledger_url: str | None, more: Sequence[database.Check]
) -> Report:
    """Run all checks in one snapshot of the database and return the report."""
    report = Report()
    # The start of the transaction is earlier than its snapshot, so that everything committed before `cut` is in it.
    clock = connection.execute("SELECT now() AS cut, \"offset\" <> '0' AS moved FROM clock_offset").fetchone()
    assert clock is not None  # noqa: S101 - the migration put the row there
    database.check(connection, report)
    database.run(connection, I_08_DUE_TIMES, report)
    database.run(connection, I_22_MONEY, report)
    database.run(connection, I_23_RULE_RUNS, report)
    database.run(connection, I_24_JOBS, report)
    stuck.check(connection, report)
    database.run(connection, outbox.I_09_OUTBOX, report)
    database.run(connection, leases.I_10_LEASES, report)
    for check in more:
        database.run(connection, check, report)
    effects = connection.execute(ledger.EFFECTS).fetchall()
    lanes, ended = connection.execute(rates.LANES).fetchall(), connection.execute(rates.ENDED).fetchall()
    entries = ledger.read(ledger_url) if ledger_url is not None else None
    ledger.check(effects, entries, clock["cut"], report, moved=clock["moved"], since=runs_before(connection))
    report.checked["I-14"] = 0
    if entries is not None and not clock["moved"]:
        rates.check(lanes, ended, entries, report)
    if clock["moved"]:
        report.notes.append("the database clock is moved (clock_offset): checks that depend on time were skipped")
    for violation in report.shown:
        violation.story = explain(connection, violation.about, entries)
    return report
