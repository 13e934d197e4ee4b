"""`ecluse doctor`: check the settings of this host, and the server or, without one, the database, with advice per
problem. Read-only; a finding is ok, warn or fail."""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import asdict
from typing import Any

from ecluse import bootstrap, settings
from ecluse.base import logging
from ecluse.base.errors import SetUpError
from ecluse.cli import show
from ecluse.cli.client import Client, Refused
from ecluse.cli.doctor_database import check_database
from ecluse.cli.failure import BAD, OK, Failure
from ecluse.cli.findings import Finding, graded
from ecluse.cli.target import DEFAULT, Given, client_for, profiles

FREE = (2 * 1024**3, 200 * 1024**2)  # free bytes on the disk: warn below, fail below


def run(where: Given) -> int:
    findings = look(where)
    healthy = all(finding.level != "fail" for finding in findings)
    if where.json:
        show.write_json({"ok": healthy, "findings": [asdict(finding) for finding in findings]})
        return OK if healthy else BAD
    for finding in findings:
        advice = f"; {finding.do}" if finding.do else ""
        show.write(show.harmless(f"{finding.level:<4}  {finding.what:<12} {finding.says}{advice}"))
    return OK if healthy else BAD


def look(where: Given) -> list[Finding]:
    """Run all checks: of the settings, and of the database by the server or, if none runs, by this process. Checks that
    depend on a failed one are left out."""
    logging.configure("ERROR")
    try:
        given = settings.load()
    except SetUpError as error:
        return [Finding("fail", "environment", error.message, "correct the named variable")]
    findings = [_environment(given), *_flows(given), *_secrets(given)]
    client = _server(where)
    if isinstance(client, Client):
        return [*findings, *_of_server(client)]
    return [*findings, client, *_of_database(given)]


def _server(where: Given) -> Client | Finding:
    """Return a client of the server, or what is wrong with it. A server that was named must be there; the one of this
    host need not run."""
    named = any((where.url, where.profile, os.environ.get("ECLUSE_URL"), profiles().get(DEFAULT)))
    try:
        client = client_for(where, appear_seconds=0)
        client.get("/healthz")
    except Failure as failure:
        return Finding("fail" if named else "warn", "server", failure.message.rstrip("."), "see `ecluse serve --help`")
    return client


def _of_server(client: Client) -> list[Finding]:
    ours = Finding("ok", "server", f"{client.url} answers")
    try:
        answer = client.get("/api/doctor")
    except Refused as refused:
        if refused.status == 404:  # an older server
            return [ours]
        return [ours, Finding("fail", "server", refused.message.rstrip("."), "use a key that may see this")]
    return [ours, *(Finding(one["level"], one["what"], one["says"], one.get("do", "")) for one in answer["findings"])]


def _of_database(given: settings.Settings) -> list[Finding]:
    try:
        database = bootstrap.open_database(given)
    except SetUpError as error:
        return [Finding("fail", "database", error.message, "start PostgreSQL, or correct DATABASE_URL")]
    try:
        found = []
        if database.server is not None:
            found.append(_disk(shutil.disk_usage(database.server.data_dir).free, str(database.server.data_dir)))
        return found + asyncio.run(check_database(database.dsn, given.ECLUSE_DB_POOL))
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
