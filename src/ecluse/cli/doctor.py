"""`ecluse doctor`: check settings and database, with advice per problem. Read-only; a finding is ok, warn or fail."""

from __future__ import annotations

import asyncio

from ecluse import bootstrap, settings
from ecluse.base import logging
from ecluse.base.errors import SetUpError
from ecluse.bootstrap.checks import check_disk, check_settings
from ecluse.doctor.database import check_database
from ecluse.doctor.findings import Finding


def look() -> list[Finding]:
    """Run all checks. Checks that depend on a failed one are left out."""
    logging.configure("ERROR")
    try:
        given = settings.load()
    except SetUpError as error:
        return [Finding("fail", "environment", error.message, "correct the named variable")]
    findings = check_settings(given)
    try:
        database = bootstrap.open_database(given)
    except SetUpError as error:
        return [*findings, Finding("fail", "database", error.message, "start PostgreSQL, or correct DATABASE_URL")]
    try:
        if database.server is not None:
            findings.append(check_disk(str(database.server.data_dir)))
        return findings + asyncio.run(check_database(database.dsn, given.ECLUSE_DB_POOL, bootstrap.keep_days(given)))
    finally:
        database.release()
