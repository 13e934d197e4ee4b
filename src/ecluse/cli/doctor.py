"""`ecluse doctor`: show the findings of the server or, if none can be reached, check settings and database from this
host. Each finding is ok, warn or fail, with advice per problem. Read-only."""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict
from functools import partial

from ecluse import bootstrap, settings
from ecluse.base import descriptors, logging
from ecluse.base.errors import SetUpError
from ecluse.bootstrap.checks import check_disk, check_settings, has_price
from ecluse.bootstrap.edge import check_descriptors
from ecluse.cli import show
from ecluse.cli.client import Client, Refused
from ecluse.cli.failure import BAD, OK, Failure
from ecluse.cli.target import DEFAULT, Given, client_for, profiles
from ecluse.doctor.database import check_database
from ecluse.doctor.findings import Finding
from ecluse.engine import ROLES


def run(where: Given) -> int:
    logging.configure("ERROR")
    client = _server(where)
    findings = _of_server(client) if isinstance(client, Client) else [client, *_of_host()]
    healthy = all(finding.level != "fail" for finding in findings)
    if where.json:
        show.write_json({"ok": healthy, "findings": [asdict(finding) for finding in findings]})
        return OK if healthy else BAD
    for finding in findings:
        advice = f"; {finding.do}" if finding.do else ""
        show.write(show.harmless(f"{finding.level:<4}  {finding.what:<12} {finding.says}{advice}"))
    return OK if healthy else BAD


def _server(where: Given) -> Client | Finding:
    """Return a client of the server, or a finding if the server does not answer: `fail` if the user named the server,
    `warn` for the server of this host, which need not run."""
    named = any((where.url, where.profile, os.environ.get("ECLUSE_URL"), profiles().get(DEFAULT)))
    try:
        client = client_for(where, appear_seconds=0)
        client.get("/healthz")
    except Failure as failure:
        if named:
            do = "correct the URL, or start the server"
            return Finding("fail", "server", failure.message.rstrip("."), do)
        says, _, advice = failure.message.rstrip(".").partition(": ")
        return Finding("warn", "server", says, advice or "start one with `ecluse serve`")
    return client


def _of_server(client: Client) -> list[Finding]:
    ours = Finding("ok", "server", f"{client.url} answers")
    try:
        answer = client.get("/api/doctor")
    except Refused as refused:
        return [ours, Finding("fail", "server", refused.message.rstrip("."), _advice(refused))]
    return [ours, *(Finding(**one) for one in answer["findings"])]


def _advice(refused: Refused) -> str:
    if refused.error_code == "DATABASE_AWAY":
        return "start PostgreSQL, or see in the server's log why it does not reach it"
    if refused.status in (401, 403):
        return "use an admin key of the tenant default"
    return "do what the message says, or repeat the command"


def _of_host() -> list[Finding]:
    """Check settings, disk and database from this host. Checks that depend on a failed one are left out."""
    try:
        given = settings.load()
    except SetUpError as error:
        return [Finding("fail", "environment", error.message, "correct the named variable")]
    descriptors.raise_limit()  # as a server does
    findings = [*check_settings(given), check_descriptors(given, ROLES)]
    if (folder := bootstrap.without_database(given)) is not None:
        do = "start a server with `ecluse serve`, which makes one, or set DATABASE_URL"
        return [*findings, Finding("warn", "database", f"there is none in {folder} yet", do)]
    try:
        database = bootstrap.open_database(given)
    except SetUpError as error:
        return [*findings, Finding("fail", "database", error.message, "start PostgreSQL, or correct DATABASE_URL")]
    try:
        if database.server is not None:
            findings.append(check_disk(str(database.server.data_dir)))
        secrets = bootstrap.load_secrets(given, database)
        known = (given.ECLUSE_DB_POOL, bootstrap.keep_days(given), secrets.key_ids if secrets else ())
        return findings + asyncio.run(check_database(database.dsn, *known, partial(has_price, given)))
    except SetUpError as error:
        return [*findings, Finding("fail", "secrets", error.message, "correct the named variable")]
    finally:
        database.release()
