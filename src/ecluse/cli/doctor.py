"""`ecluse doctor`: check settings and database, with advice per problem. Read-only; a finding is ok, warn or fail."""

from __future__ import annotations

import asyncio
import os
import shutil
from typing import Any

from ecluse import bootstrap, settings
from ecluse.base import logging
from ecluse.base.errors import SetUpError
from ecluse.cli.doctor_database import check_database
from ecluse.cli.findings import Finding, graded

FREE = (2 * 1024**3, 200 * 1024**2)  # free bytes on the disk: warn below, fail below


def look() -> list[Finding]:
    """Run all checks. Checks that depend on a failed one are left out."""
    logging.configure("ERROR")
    try:
        given = settings.load()
    except SetUpError as error:
        return [Finding("fail", "environment", error.message, "correct the named variable")]
    findings = [_environment(given), *_flows(given), *_secrets(given)]
    try:
        database = bootstrap.open_database(given)
    except SetUpError as error:
        return [*findings, Finding("fail", "database", error.message, "start PostgreSQL, or correct DATABASE_URL")]
    try:
        if database.server is not None:
            findings.append(_disk(shutil.disk_usage(database.server.data_dir).free, str(database.server.data_dir)))
        return findings + asyncio.run(check_database(database.dsn, given.ECLUSE_DB_POOL))
    finally:
        database.release()


def _environment(given: settings.Settings) -> Finding:
    raised = [
        f"{name}={text} is below its minimum, {getattr(given, name)} is used"
        for name in settings.Settings.model_fields
        if (text := os.environ.get(name)) and _is_less(text, getattr(given, name))
    ]
    if raised:
        return Finding("warn", "environment", "; ".join(raised), "see docs/configuration.md for the minimum")
    return Finding("ok", "environment", "all settings are valid")


def _flows(given: settings.Settings) -> list[Finding]:
    """Warn of flows that are set up in part. A flow of which no variable is set is not in use: no warning."""
    return [
        Finding(
            "warn", one.flow, f"runs of this flow fail: {', '.join(one.unset)} unset", "set all variables of this flow"
        )
        if one.begun
        else Finding("ok", one.flow, f"not set up; to use it, set {', '.join(one.unset)}")
        for one in bootstrap.lacking(given)
    ]


def _secrets(given: settings.Settings) -> list[Finding]:
    """Warn if there is no secret key. The embedded PostgreSQL gets one by itself, other databases do not."""
    if given.DATABASE_URL is None or given.ECLUSE_SECRET_KEY is not None or given.ECLUSE_SECRET_KEY_FILE is not None:
        return []
    says = "there is no key to encrypt secrets with: webhooks, API keys of schedules and Pusher apps are refused"
    do = "set ECLUSE_SECRET_KEY (`openssl rand -base64 32`) or ECLUSE_SECRET_KEY_FILE, the same for every replica"
    return [Finding("warn", "secrets", says, do)]


def _is_less(text: str, used: Any) -> bool:
    try:
        return not isinstance(used, bool) and isinstance(used, int | float) and float(text) < used
    except ValueError:
        return False


def _disk(free: int, place: str) -> Finding:
    level = graded(-free, *(-limit for limit in FREE))
    do = "" if level == "ok" else "free disk space: PostgreSQL stops when the disk is full"
    return Finding(level, "disk", f"{free / 1024**3:.1f} GiB free in {place}", do)
