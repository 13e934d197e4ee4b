"""Command line of the auditor: ``python -m ecluse.verify --database-url DSN [--ledger URL] [--json]``. Exit code 0:
clean; 1: violations, which are listed; 2: the audit was not possible, with the reason on stderr."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ecluse.verify.snapshot import CannotCheck, audit


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run the audit and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ecluse.verify", description="Audit a database of Ecluse.")
    parser.add_argument("--database-url", required=True, metavar="DSN", help="database to audit; it is not changed")
    parser.add_argument("--ledger", metavar="URL", help="URL of a sandbox, whose ledger lists what the vendors applied")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args(argv)
    return run(args.database_url, args.ledger, as_json=args.json)


def run(
    dsn: str, ledger_url: str | None, *, as_json: bool, more: Sequence[tuple[str, str, tuple[str, ...]]] = ()
) -> int:
    """Audit a database, print the report (with `as_json` also as JSON) and return the exit code. `more`: invariants of
    packages, as in `audit`."""
    try:
        report = audit(dsn, ledger_url, more)
    except CannotCheck as error:
        print(f"verify: {error}", file=sys.stderr)
        return 2
    print(report.text())
    if as_json:
        print(report.json())
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
